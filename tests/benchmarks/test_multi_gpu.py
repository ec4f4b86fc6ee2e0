"""How benchmarks/comm/multi_gpu.py goes through its sections; what they measure needs GPUs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks" / p) for p in ("comm", "")]
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
        cuts = sections.cuts_for(m, transport, quick)
        assert cuts and len(set(cuts)) == len(cuts)
        assert all(fits(7168, 2, *split) and (transport != "nccl" or split[0] != "resident") for split, _ in cuts)
        assert m >= 64 or len(cuts) <= 2, "few rows: one cut, to show that it does not pay"
