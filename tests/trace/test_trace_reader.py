"""TraceReader: any chunk size, damage anywhere, bounded memory."""

import gzip
import json
import os

import pytest
from large_trace import read_large, write_large
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


@pytest.mark.parametrize("kind,most", [("stacks", 30), ("kernels", 30)])
def test_memory_does_not_grow_with_the_file(tmp_path, kind, most):
    """A file of 60 MB and a small one, in a process of their own; tests/trace/large_trace.py does the same with 1 GB."""
    paths = write_large(tmp_path, 60, kind)
    assert paths[0].stat().st_size > 60e6 and NCCL in paths[0].read_text()[-2000:]
    found = read_large(paths, os.path.dirname(os.path.dirname(fastverify.__file__)))
    assert found["mib"] < most and found["events"] > 60e6 / 1000
