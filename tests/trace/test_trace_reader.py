"""TraceReader: any chunk size, damage anywhere, bounded memory."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from trace_fixtures import NCCL, document, simulate

import fastverify
from fastverify.trace import reader
from fastverify.trace.reader import TraceReader

EVENTS = [{"ph": "X", "cat": "kernel", "name": 'a "quoted" {brace} [\\] é\u4e16', "ts": 1.5, "dur": 2, "args": {"x": [1, {"y": "}"}]}},
          {"ph": "M", "name": "meta", "args": {}}, {}, {"ts": -1e-7, "name": "z"}]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("compress", [False, True])
def test_any_chunk_size(tmp_path, monkeypatch, chunk, compress):
    monkeypatch.setattr(reader, "CHUNK", chunk * (4 if compress else 1))
    text = json.dumps({"first": 12345, "distributedInfo": {"rank": 3}, "traceEvents": EVENTS, "last": 678, "none": None},
                      ensure_ascii=False, indent=1).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]) if compress else text)
    r = TraceReader(path)
    assert list(r) == EVENTS and r.damage is None
    assert r.header == {"first": 12345, "distributedInfo": {"rank": 3}, "traceEvents": True, "last": 678, "none": None}


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_truncated_at_every_byte(tmp_path, monkeypatch, chunk):
    """Every cut gives the whole events before it and one sentence; never a wrong event, never another error."""
    monkeypatch.setattr(reader, "CHUNK", chunk)
    text = json.dumps({"a": 1, "traceEvents": EVENTS, "b": 22}).encode()
    path, counts = tmp_path / "t.json", []
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        r, got = TraceReader(path), []
        try:
            got += r
        except ValueError as exc:
            assert not got and str(exc).startswith("trace: ") and "Fix: " in str(exc)
            assert cut <= text.index(b"[")
            continue
        assert r.damage and got == EVENTS[: len(got)]
        counts.append(len(got))
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3, 4}


def test_damage_in_the_middle(tmp_path):
    text = json.dumps({"traceEvents": EVENTS})
    at = text.index('"meta"')
    path = tmp_path / "t.json"
    path.write_text(text[:at] + "\x00garbage" + text[at:])
    r = TraceReader(path)
    assert list(r) == EVENTS[:1] and f"in the value at character {text.index(json.dumps(EVENTS[1]))}" in r.damage


def test_an_event_that_never_ends_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", 1000)
    monkeypatch.setattr(reader, "LARGEST_EVENT", 5000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"a": 1}, {"name": "' + "x" * 100_000)
    seen = []
    r = TraceReader(path, seen.append)
    assert list(r) == [{"a": 1}] and "no JSON at character 27" in r.damage
    assert max(seen) < 10_000


def test_damaged_gzip(tmp_path):
    data = bytearray(gzip.compress(document(simulate(1, 1, 2000)[0], 0, 1).encode()))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "t.json"
    path.write_bytes(data)
    r = TraceReader(path)
    whole = simulate(1, 1, 2000)[0]
    got = list(r)
    assert 500 < len(got) <= len(whole) and got[:500] == whole[:500] and r.damage


def test_progress_counts_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(document(simulate(1, 1, 5000)[0], 0, 1).encode()))
    seen = []
    list(TraceReader(path, seen.append))
    assert seen == sorted(seen) and seen[-1] == path.stat().st_size


MEASURE = """
import resource, sys
import numpy
from fastverify.cli import main, trace
from fastverify.trace import account, read_rank
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
ranks = [read_rank(p) for p in sys.argv[1:]]
assert len(ranks[0].collectives) == 2000, len(ranks[0].collectives)
report = account(ranks)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of 60 MB (its bulk: CPU events with stacks) and a small one, in a process of their own."""
    events = simulate(2, 20, 100, annotate=False)
    paths = [tmp_path / f"rank{r}.json" for r in (0, 1)]
    paths[1].write_text(document(events[1], 1, 2))
    filler = json.dumps([{"ph": "X", "cat": "cpu_op", "name": f"aten::op{i % 97}", "pid": 1, "tid": 1, "ts": 1e6 + i, "dur": 0.5,
                          "args": {"External id": i, "Call stack": "model.py(12): forward; " * 20}} for i in range(1000)])[1:-1]
    head, tail = document(events[0], 0, 2).split('"traceEvents": [', 1)
    with open(paths[0], "w") as f:
        f.write(head + '"traceEvents": [')
        while f.tell() < 60e6:
            f.write(filler + ",")
        f.write(tail)
    assert paths[0].stat().st_size > 60e6
    root = os.path.dirname(os.path.dirname(fastverify.__file__))
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100, f"{done.stdout} MiB above the imports"
    assert NCCL in paths[0].read_text()[-2000:]
