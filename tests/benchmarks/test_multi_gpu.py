"""How benchmarks/comm/multi_gpu.py goes through its sections; what they measure needs GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastverify import _ops

ROOT = Path(__file__).resolve().parents[2]
needs_control = pytest.mark.skipif(not _ops.build_info().get("comm"), reason="this build has no _comm (no pybind11)")
sys.path[:0] = [str(ROOT / "benchmarks" / p) for p in ("comm", "")]
multi_gpu, sections = pytest.importorskip("multi_gpu"), pytest.importorskip("sections")


def test_sections_that_need_other_processes():
    assert multi_gpu.groups(["sums", "without-p2p", "loop:cycles-70b", "one-card:host"]) == [
        (["sums", "loop:cycles-70b"], {}, False), (["without-p2p"], {"NCCL_P2P_DISABLE": "1"}, False), (["one-card:host"], {}, True)]
    assert multi_gpu.groups(["without-p2p"]) == [(["without-p2p"], {"NCCL_P2P_DISABLE": "1"}, False)]


def test_a_section_that_fails_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    done = []

    def spawn(body, args, world):
        for at, item in enumerate(args.todo):
            args.reached.write_text(str(at))
            if item == "bad":
                raise RuntimeError("process 1 terminated with signal SIGABRT")
            done.append((item, world))
    monkeypatch.setattr(multi_gpu, "spawn", spawn)
    multi_gpu.run_group(SimpleNamespace(out=tmp_path, until=float("inf")), 2, ["a", "bad", "b", "bad", "c"], {}, False)
    assert done == [("a", 2), ("b", 2), ("c", 2)]
    assert capsys.readouterr().err.count("section bad broke off: process 1 terminated") == 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("transport", ["peer", "host", "nccl"])
def test_cuts_fit_the_shape(transport, quick):
    from fastverify.comm.linear_all_reduce import fits
    for m in (8, 16, 64, 256, 1024, 4096):
        streams, resident = (sections.cuts_for(m, transport, quick, kind) for kind in (False, True))
        cuts = streams + resident
        assert streams and len(set(cuts)) == len(cuts) and bool(resident) == (transport != "nccl")
        assert all(fits(7168, 2, *split) and (split[0] == "resident") == (at >= len(streams)) for at, (split, _) in enumerate(cuts))
        assert m >= 64 or len(cuts) <= 3, "few rows: a cut or two, to show that it does not pay"


def rehearse(folder: Path, *options: str) -> tuple:
    """(rows, what was printed) of multi_gpu.py over two CPU processes."""
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "comm" / "multi_gpu.py"), "--rehearse", "--quick", "--repeats", "1", "--out",
                           str(folder), *options], capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = [row for path in folder.glob("cpu-x2-*.json") for row in json.loads(path.read_text())["rows"]]
    return rows, done.stdout + done.stderr


@needs_control
def test_every_section_runs_over_cpu_processes(tmp_path):
    rows, said = rehearse(tmp_path, "--rows", "1,16", "--hidden", "512", "--vocab", "4096", "--inner", "1024", "--linear-rows", "8,256", "--sections",
                          "sums,peers,verifies,linears,resident,loop:cycles-70b+texts-70b,without-p2p")
    assert "broke off" not in said and "did not end" not in said, said[-3000:]
    ops = {r["op"] for r in rows}
    assert ops == {"all_reduce", "all_reduce_rms_norm", "verify_tree_sharded", "linear_all_reduce", "decode"}
    assert all(r["correct"] for r in rows if r["median_us"] is not None)
    absent = {r["provider"] for r in rows if r["median_us"] is None}
    assert all("torch symmetric" in p or "FlashInfer" in p or "sglang" in p for p in absent), absent
    assert all(r["note"] == "not on a CPU" or "not on a CPU" in r["note"] for r in rows if r["median_us"] is None)


@needs_control
def test_a_section_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path):
    """What a section has measured by then is kept: on a busy machine its clock strikes late, but long before the last row."""
    many = ",".join(str(n) for n in range(1, 129))
    rows, said = rehearse(tmp_path, "--section-seconds", "0.01", "--rows", many, "--hidden", "512", "--sections", "verifies,sums")
    assert all(f"{name} did not end within 0 s" in said and f"section {name} broke off" in said for name in ("verifies", "sums")), said
    assert not any(r["shape"].get("rows") == 128 for r in rows), rows
