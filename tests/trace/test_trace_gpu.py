"""fastverify trace on profiles of GPU runs (tests/data/gpu_traces): two processes on one GPU, and two GPUs over NCCL. Who is late, why,
and by how much."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from fastverify.cli.main import main
from fastverify.trace import account, read_rank

FOLDER = Path(__file__).resolve().parents[1] / "data" / "gpu_traces"


def paths(mode: str) -> list:
    return [FOLDER / f"{mode}-rank{r}.json.gz" for r in (0, 1)]


@pytest.fixture
def report(capsys):
    def run(mode: str) -> dict:
        capsys.readouterr()
        assert main(["trace", *map(str, paths(mode)), "--json"]) == 0
        return json.loads(capsys.readouterr().out)
    return run


MODES = [("late", 2), ("host_late", 1), ("graph_late", 1), ("nccl_late", 2), ("nccl_host_late", 1), ("nccl_graph_late", 2)]


@pytest.mark.parametrize("mode,steps", MODES)
def test_the_late_rank_is_found(report, mode, steps):
    r = report(mode)
    assert (r["source"], r["number_of_steps"], r["collectives"], r["notes"]) == ("kernel", steps, 8 * steps, [])
    assert r["late_rank"] == 1 and r["late_count"] >= 7 * steps and r["shown_rank"] == 0
    assert r["waiting_for"]["1"] > 0.95 * r["waiting"] > 0.8 * r["communication"]
    assert abs(r["ranks"][1]["clock_offset_us"]) < 1 and r["ranks"][1]["clock_spread_us"] < 1, "one host, one clock"


def test_waiting_is_what_the_extra_work_takes(report):
    """Three products of 4096 x 4096 before each of eight all-reduces: 4.439 ms by CUDA events."""
    for step in report("late")["steps"]:
        assert step["waiting"] == pytest.approx(4.439, rel=0.01)


@pytest.mark.parametrize("mode", ["nccl_late", "nccl_graph_late"])
def test_waiting_over_nccl_is_what_the_extra_work_takes(mode):
    """The same three products before every all-reduce, 513.9 us by CUDA events. The median: the first all-reduce of a step also waits
    for the host that launched later."""
    for step in account([read_rank(p) for p in paths(mode)]).steps:
        assert np.median(step.waiting[0]) == pytest.approx(513.9, rel=0.02)


def test_a_step_holds_the_collective_behind_its_last_kernel():
    """On the GPU ProfilerStep ends before an all-reduce that has an annotation of its own, which eager NCCL has."""
    for r, path in enumerate(paths("nccl_late")):
        raw = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ends = {e["name"]: e["ts"] + e["dur"] for e in raw if e["cat"] == "gpu_user_annotation"}
        for step in read_rank(path).steps:
            assert step.end > ends[step.name] + 1


@pytest.mark.parametrize("mode", [m for m, _ in MODES])
def test_waiting_is_the_distance_of_the_starts(mode):
    """Both kernels end together, so who arrived first waited from his start to that of the other."""
    for step in account([read_rank(p) for p in paths(mode)]).steps:
        apart = step.start[1] - step.start[0]
        np.testing.assert_allclose(step.waiting[0] - step.waiting[1], apart, atol=1.0)
        assert step.waiting[0].sum() == pytest.approx(apart.clip(min=0).sum(), rel=0.001)


def test_the_reason_is_told(report):
    assert "Its GPU is busy until then, so its kernels take longer" in report("late")["advice"][0]
    assert "Its GPU is busy until then, so its kernels take longer" in report("graph_late")["advice"][0]
    host = report("host_late")
    assert "its launches come late" in host["advice"][0] and host["ranks"][1]["gaps"] > 0.9 * host["waiting"] > 8
    assert report("graph_late")["ranks"][1]["gaps"] < 0.01, "a graph leaves no gaps"
    for mode in ("nccl_late", "nccl_graph_late"):
        assert "Its GPU is busy until then, so its kernels take longer" in report(mode)["advice"][0]
    host = report("nccl_host_late")
    assert "its launches come late" in host["advice"][0] and host["ranks"][1]["gaps"] > 0.9 * host["waiting"] > 8


def test_the_excerpts_hold_nothing_of_the_machine():
    for path in sorted(FOLDER.glob("*.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        assert path.stat().st_size < 10_000 and "/" not in "".join(e["name"] for e in json.loads(text)["traceEvents"])
        assert {e["pid"] for e in json.loads(text)["traceEvents"]} == {0}
