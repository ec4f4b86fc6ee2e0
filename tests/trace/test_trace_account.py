"""fastverify trace on synthetic traces: every number is known beforehand."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from trace_fixtures import BASE, NCCL, VLLM, kernel, simulate, write

from fastverify.cli.main import main
from fastverify.trace.events import HOST, KERNELS, STEPS, Span, kind_of, merge_spans
from fastverify.trace.timeline import BAR, COLOURS, WIDTH, _tick

ONE_PERCENT = dict(rel=0.01, abs=1e-3)


@pytest.fixture
def trace(capsys):
    """trace(*args) -> (exit code, stdout, stderr)."""
    def run(*args) -> tuple:
        capsys.readouterr()
        code = main(["trace", *map(str, args)])
        return (code, *capsys.readouterr())
    return run


@pytest.fixture
def report(trace):
    def run(*args) -> dict:
        code, out, err = trace(*args, "--json")
        assert code == 0, err
        return json.loads(out) | {"stderr": err}
    return run


def refused(result: tuple, message: str) -> None:
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err and "Fix: " in err, err


def test_the_users_25_ms(report, trace, tmp_path):
    """122 all-reduces, 8 ranks: 3 ms of wire, rank 5 arrives 20 ms late in all, 2 ms of launch gaps."""
    paths = write(tmp_path, simulate(8, 3, 122, wire=3000 / 122, late={5: 20000 / 122}, gaps={None: 2000 / 122}))
    r = report(*paths)
    assert r["account"] == "25.0 ms = 3.0 wire + 20.0 waiting for rank 5 + 2.0 gaps"
    assert (r["wire"], r["waiting"], r["gaps"]) == pytest.approx((3, 20, 2), rel=1e-6)
    assert r["late_rank"] == 5 and r["late_count"] == r["collectives"] == 366 and r["number_of_steps"] == 3
    assert [s["account"] for s in r["steps"]] == [r["account"]] * 3
    late = r["ranks"][5]
    assert (late["wire"], late["waiting"], late["gaps"]) == pytest.approx((3, 0, 2), abs=1e-6)
    assert r["waiting_for"]["5"] == pytest.approx(20)
    assert r["advice"][0].startswith("waiting (80%): rank 5 arrives last in 366 of 366") and "kernels take longer" in r["advice"][0]
    code, out, err = trace(*paths)
    assert code == 0 and err == "" and "25.0 ms = 3.0 wire + 20.0 waiting for rank 5 + 2.0 gaps" in out and "ProfilerStep#2" in out
    assert out.count("ProfilerStep#") == 3 and trace(*paths, "--steps", 1)[1].count("ProfilerStep#") == 1


def test_slow_wire(report, tmp_path):
    r = report(*write(tmp_path, simulate(4, 2, 50, wire=205)))
    assert (r["wire"], r["waiting"], r["gaps"]) == pytest.approx((10.25, 0, 0), abs=1e-6)
    assert r["late_rank"] is None and r["late_count"] == 0
    assert len(r["advice"]) == 1 and "205.0 us per collective" in r["advice"][0] and "P2P" in r["advice"][0]


@pytest.mark.parametrize("wire,words", [(40, "NCCL at its normal speed"), (9, "Near what kernels reach")])
def test_advice_on_the_wire(report, tmp_path, wire, words):
    assert words in report(*write(tmp_path, simulate(2, 1, 10, wire=wire)))["advice"][0]


def test_large_messages_are_bound_by_the_link(report, tmp_path):
    r = report(*write(tmp_path, simulate(2, 1, 10, wire=1000, nbytes=50_000_000)))
    assert "47.7 MiB. That is 50.0 GB/s" in r["advice"][0]


def test_launch_gaps(report, tmp_path):
    r = report(*write(tmp_path, simulate(2, 2, 10, wire=10, gaps={None: 33})))
    assert (r["wire"], r["waiting"], r["gaps"]) == pytest.approx((0.1, 0, 0.33), abs=1e-6)
    assert "CUDA graph" in r["advice"][0] and r["advice"][0].startswith("gaps (77%)")


def test_a_rank_whose_launches_come_late(report, tmp_path):
    r = report(*write(tmp_path, simulate(4, 2, 10, gaps={2: 100})))
    assert r["late_rank"] == 2 and r["waiting"] == pytest.approx(1.0) and r["ranks"][2]["gaps"] == pytest.approx(1.0)
    assert "its launches come late" in r["advice"][0]


def test_work_on_another_stream_is_no_gap(report, tmp_path):
    per_rank = simulate(2, 1, 1, gaps={None: 30}, annotate=False)
    for events in per_rank:  # a copy on another stream covers the first 20 of the 30 idle us
        events.append(kernel("copy", events[1]["ts"] - 30, 20, stream=9) | {"cat": "gpu_memcpy"})
    assert report(*write(tmp_path, per_rank))["gaps"] == pytest.approx(0.010)


def test_a_long_kernel_on_another_stream_outlasts_a_short_one(report, tmp_path):
    per_rank = simulate(2, 1, 1, gaps={None: 30}, annotate=False)
    for events in per_rank:  # began first, ends 5 us before the collective; a short one begins and ends within it
        events += [kernel("long", events[1]["ts"] - 60, 55, stream=9), kernel("short", events[1]["ts"] - 20, 2, stream=11)]
    assert report(*write(tmp_path, per_rank))["gaps"] == pytest.approx(0.005)


def test_ranks_that_take_turns(report, tmp_path):
    a, b = (simulate(4, 1, 10, late={r: 50}, annotate=False) for r in (0, 1))
    c, d = (simulate(4, 1, 10, late={r: 50}, annotate=False, begin=2e6) for r in (2, 3))
    shifted = [[e | {"ts": e["ts"] + 5e5} for e in events] for events in b]
    later = [[e | {"ts": e["ts"] + 5e5} for e in events] for events in d]
    r = report(*write(tmp_path, [sum(parts, []) for parts in zip(a, shifted, c, later)]))
    assert r["late_rank"] is None and r["waiting"] == pytest.approx(1.5) and "(for no one rank)" in r["account"]
    assert "take turns" in r["advice"][0]


def test_a_kernel_that_starts_early_waits_for_its_own_rank(report, tmp_path):
    """Programmatic dependent launch: every all-reduce starts 30 us before the product in front of it ends."""
    per_rank = simulate(2, 2, 10, wire=20, late={1: 50})
    want = report(*write(tmp_path, per_rank))
    early = [[e | {"ts": e["ts"] - 30, "dur": e["dur"] + 30} if e["name"] == NCCL else e for e in events] for events in per_rank]
    got = report(*write(tmp_path, early))
    assert got["account"] == want["account"] == "0.700 ms = 0.200 wire + 0.500 waiting for rank 1 + 0.000 gaps"


def test_two_ranks_that_share_the_blame_evenly(report, tmp_path):
    a, b = (simulate(2, 1, 10, late={r: 50}, annotate=False, begin=1e6 + 5e5 * r) for r in (0, 1))
    r = report(*write(tmp_path, [x + y for x, y in zip(a, b)]))
    assert r["late_rank"] is None and r["waiting"] == pytest.approx(0.5) and "take turns" in r["advice"][0]


def test_clock_offsets_and_drift(report, tmp_path):
    per_rank = simulate(4, 20, 20, late={3: 60}, offsets={1: 7e5, 2: -2e6, 3: 12345.5}, drift={2: 3e-5})
    r = report(*write(tmp_path, per_rank))
    assert (r["wire"], r["waiting"]) == pytest.approx((0.4, 1.2), **ONE_PERCENT) and r["late_rank"] == 3
    got = [x["clock_offset_us"] for x in r["ranks"]]
    assert [got[0], got[1], got[3]] == pytest.approx([0, 7e5, 12345.5], abs=0.01)
    assert got[2] == pytest.approx(-2e6 + 30 + 3e-5 * 30000, abs=1)
    assert r["ranks"][2]["clock_drift_ppm"] == pytest.approx(30, rel=0.01)
    assert max(x["clock_spread_us"] for x in r["ranks"]) < 0.1


def test_bases_of_the_files_are_honoured(report, tmp_path):
    per_rank = simulate(2, 1, 10)
    paths = write(tmp_path, per_rank)
    data = json.loads(paths[1].read_text())
    data["baseTimeNanoseconds"] = BASE + 2_000_000_000
    paths[1].write_text(json.dumps(data))
    assert report(*paths)["ranks"][1]["clock_offset_us"] == pytest.approx(2e6)


def test_gzip_and_plain_say_the_same(report, tmp_path):
    per_rank = simulate(3, 2, 10, late={1: 50}, names=(NCCL, VLLM), nbytes=14336)
    (tmp_path / "plain").mkdir()
    plain, packed = report(*write(tmp_path / "plain", per_rank)), report(*write(tmp_path, per_rank, compress=True))
    assert plain == packed and plain["late_rank"] == 1


def test_missing_rank(report, tmp_path):
    paths = write(tmp_path, simulate(4, 1, 10, late={2: 50}))
    r = report(paths[0], paths[1], paths[3])
    assert "3 of 4 ranks are given (missing: 2)" in r["stderr"] and r["notes"]
    assert r["advice"][0].startswith("wire (100%): 70.0 us per collective. With 3 of 4 ranks it may still hold waiting")
    assert r["wire"] == pytest.approx(0.70) and [x["rank"] for x in r["ranks"]] == [0, 1, 3]


def test_steps_that_differ_are_left_out(report, trace, tmp_path):
    per_rank = simulate(2, 3, 10)
    gone = next(e for e in per_rank[1] if e["name"] == NCCL and e["ts"] > 1.0009e6)
    per_rank[1].remove(gone)
    r = report(*write(tmp_path, per_rank))
    assert r["number_of_steps"] == 2
    assert "1 steps are left out: ProfilerStep#1: 10 collectives on rank 0 and 9 on rank 1" in r["stderr"]
    r = trace(*write(tmp_path, [[e for e in events if e["cat"] == "kernel"] for events in per_rank]))
    refused(r, "the ranks must hold the same collectives; got 30 collectives on rank 0 and 29 on rank 1")


def test_steps_by_count(report, trace, tmp_path):
    paths = write(tmp_path, simulate(2, 1, 25, wire=10, late={1: 40}, annotate=False))
    r = report(*paths, "--per-step", 10)
    assert [s["name"] for s in r["steps"]] == ["step 0", "step 1"] and r["account"].startswith("0.500 ms = 0.100 wire + 0.400 waiting")
    assert [s["step_ms"] for s in r["steps"]] == pytest.approx([9 * 0.09 + 0.05, 0.9])  # from the first all-reduce's arrival on
    assert "the last 5 of 25 collectives fill no step of 10" in r["stderr"]
    refused(trace(*paths, "--per-step", 26), "a step must not hold more collectives than the trace; got 26 > 25")
    refused(trace(*paths, "--per-step", 0), "per_step must be at least 1; got 0")


def test_truncated_file(report, tmp_path):
    paths = write(tmp_path, simulate(2, 4, 10, wire=20, late={1: 30}))
    text = paths[1].read_text()
    paths[1].write_text(text[: len(text) * 6 // 10])
    r = report(*paths)
    assert r["number_of_steps"] == 2 and r["account"] == "0.500 ms = 0.200 wire + 0.300 waiting for rank 1 + 0.000 gaps"
    assert "rank 1 (rank1.json) is incomplete, it ends" in r["stderr"] and "2 steps are left out" in r["stderr"]


def test_truncated_file_without_steps(report, trace, tmp_path):
    paths = write(tmp_path, simulate(2, 4, 100, late={1: 30}, annotate=False), compress=True)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[: len(data) * 4 // 5])
    r = report(*paths)
    assert 100 < r["collectives"] < 400 and f"the first {r['collectives']} collectives are compared" in r["stderr"]
    assert r["waiting"] == pytest.approx(0.030 * r["collectives"]) and "its gzip stream ends early" in r["stderr"]
    paths[1].write_bytes(data[:30])
    refused(trace(*paths), "its gzip stream ends early")


def test_refusals(trace, tmp_path):
    per_rank = simulate(2, 1, 10)
    paths = write(tmp_path, per_rank)
    refused(trace(paths[0]), "at least two ranks must be given")
    refused(trace(paths[0], paths[0]), "every rank must be given once")
    refused(trace(*paths, "--steps", "-1"), "steps must be at least 0; got -1")
    refused(trace(*paths, "--step-name", "("), "step_name must be a regular expression; got '('")
    none = write(tmp_path, [[e for e in events if e["name"] != NCCL] for events in per_rank])
    refused(trace(*none), "every trace must hold collectives")
    refused(trace(*write(tmp_path, [per_rank[0], [e for e in per_rank[1] if e["name"] != NCCL]])), "of rank 1")
    (tmp_path / "text").write_text("hello")
    refused(trace(tmp_path / "text", paths[0]),
            "must be a torch profiler trace (Chrome JSON), with a JSON object or array; got another file: its "
            "first character is 'h'.")
    (tmp_path / "config").write_text('{"a": {"b": [1]}}')
    refused(trace(tmp_path / "config", paths[0]), 'with "traceEvents"; got another file: it has none')
    (tmp_path / "empty").write_text("")
    refused(trace(tmp_path / "empty", paths[0]), "got another file: it is empty")


def test_missing_file(trace, tmp_path):
    refused(trace(tmp_path / "a.json", tmp_path / "b.json"), "trace: every trace must be an existing file; got ")
    refused(trace(tmp_path, tmp_path), "trace: every trace must be an existing file; got ")


def test_ranks_of_different_runs(trace, tmp_path):
    rng = np.random.default_rng(0)

    def run(world, seed_shift, **kw):
        """Compute times of this run, so that its collectives keep no common time with those of another."""
        events = simulate(2, 1, 40, annotate=False, **kw)
        moved = np.cumsum(rng.uniform(0, 4000, 40)) + seed_shift
        return [[e | {"ts": e["ts"] + moved[i // 2]} for i, e in enumerate(r)] for r in events]

    a, b = run(2, 0), run(2, 1e5)
    refused(trace(*write(tmp_path, [a[0], b[1]])), "all ranks must be of one run; got ")
    paths = write(tmp_path, simulate(2, 1, 10))
    data = json.loads(paths[1].read_text())
    paths[1].write_text(json.dumps(data | {"baseTimeNanoseconds": BASE + 7200 * 10**9}))
    refused(trace(*paths), "got traces that begin 2.0 hours apart")
    paths[1].write_text(json.dumps(data | {"distributedInfo": {"rank": 1, "world_size": 8}}))
    refused(trace(*paths), "got world sizes 2, 8")
    small, large = simulate(2, 1, 10, nbytes=14336), simulate(2, 1, 10, nbytes=28672)
    refused(trace(*write(tmp_path, [small[0], large[1]])),
            "all-reduce of 14336 bytes on rank 0 and all-reduce of 28672 bytes on rank 1 as collective 0")
    gather = simulate(2, 1, 10, names=("ncclDevKernel_AllGather_RING_LL",))
    refused(trace(*write(tmp_path, [small[0], gather[1]])), "the ranks must hold the same collectives")


def test_collectives_of_smaller_groups_are_left_out(report, tmp_path):
    per_rank = simulate(4, 1, 10)
    for events in per_rank:
        events.append(kernel(NCCL, 1.0001e6, 5, **{"Collective name": "allreduce", "Group size": 2, "Process Group Name": "dp"}))
        events.append(kernel("ncclDevKernel_SendRecv", 1.0002e6, 5))
        events.append(kernel("ncclDevKernel_Generic_1", 1.0002e6, 5, **{"Collective name": "broadcast"}))
    assert report(*write(tmp_path, per_rank))["collectives"] == 10


def test_ranks_from_file_names(report, tmp_path):
    paths = write(tmp_path, simulate(2, 1, 10, late={1: 50}), distributedInfo={}, trace_id=None)
    named = [p.rename(tmp_path / f"1717-TP-{n}.trace.json") for p, n in zip(paths, (4, 6))]
    assert report(*named)["late_rank"] == 6
    plain = [p.rename(tmp_path / f"{n}.json") for p, n in zip(named, "ab")]
    assert report(*plain)["late_rank"] == 1


def test_bare_array_without_its_bracket(report, tmp_path):
    paths = []
    for r, events in enumerate(simulate(2, 1, 10)):
        paths.append(tmp_path / f"rank{r}.json")
        paths[-1].write_text(json.dumps(events)[:-1] + ",\n")
    r = report(*paths)
    assert r["collectives"] == 10 and r["stderr"] == ""


@pytest.mark.parametrize("name,kind", [
    (NCCL, "all-reduce"), (VLLM, "all-reduce"), ("ncclKernel_AllReduce_RING_LL_Sum_half(ncclWork)", "all-reduce"),
    ("ncclSymkDevKernel_AllReduce_AGxLL_R", "all-reduce"), ("ncclDevKernel_AllGather_RING_LL(x)", "all-gather"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce-scatter"), ("ncclDevKernel_Generic_2", "collective"),
    ("void sglang::cross_device_reduce_2stage<half, 4>", "all-reduce"),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>", "all-reduce"),
    ("void tensorrt_llm::oneShotAllReduceKernel<half>", "all-reduce"), ("one_shot_all_reduce_kernel", "all-reduce"),
    ("ncclDevKernel_SendRecv(x)", None), ("ncclDevKernel_Broadcast_RING_LL", None), ("ncclDevKernel_Reduce_Sum_f32_RING_LL", None),
    ("void at::native::reduce_kernel<512, 1>", None), ("layer_norm<BlockAllReduceSum>", None),
    ("sm90_xmma_gemm_bf16", None), ("triton_red_fused_add_mean", None)])
def test_kernel_names(name, kind):
    assert kind_of(KERNELS, name) == kind


def test_host_and_step_names():
    assert kind_of(HOST, "gloo:all_reduce") == "all-reduce" and kind_of(HOST, "gloo:broadcast") is None
    for name in ("ProfilerStep#12", "execute_context_0(0)_generation_1(1)", "step[DECODE bs=1]", "fastverify.step 3", "step_7"):
        assert STEPS.search(name), name
    for name in ("aten::add", "my_step_function", "Optimizer.step#SGD.step"):
        assert not STEPS.search(name), name


def test_spans():
    spans = [Span("execute_model", 0, 5), Span("execute_model", 1, 8), Span("execute_model", 20, 25), Span("step 1", 2, 3)]
    assert merge_spans(spans) == [Span("execute_model", 0, 8), Span("execute_model (2)", 20, 25)]
    assert merge_spans([Span("ProfilerStep#1", 0, 5), Span("execute_model", 0, 9)]) == [Span("ProfilerStep#1", 0, 5)]


def test_timeline(trace, tmp_path):
    """Bars of one step: their lengths are the parts, on one scale."""
    paths = write(tmp_path, simulate(3, 2, 4, wire=20, late={1: 60}, gaps={None: 10}))
    picture = tmp_path / "t.svg"
    code, out, err = trace(*paths, "--timeline", picture, "--timeline-step", 1)
    assert code == 0 and f"written: {picture}" in err
    root = ElementTree.parse(picture).getroot()
    bars: dict = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        name = {v: k for k, v in COLOURS.items()}.get(rect.get("fill"))
        if name and float(rect.get("height")) == BAR:
            bars.setdefault((name, rect.get("y")), []).append(float(rect.get("width")))
    lanes = sorted({y for _, y in bars}, key=float)
    assert len(lanes) == 3 and {len(v) for v in bars.values()} == {4}
    us = 4 * 130 - 40  # from the first gap of ranks 0 and 2 on
    for y in lanes:
        for name, length in (("gap", 10), ("waiting", 60), ("wire", 20)):
            assert (name, y) not in bars if (name, y) == ("waiting", lanes[1]) else bars[name, y] == pytest.approx(
                [WIDTH * length / us] * 4, abs=0.02)
    text = picture.read_text()
    assert "ProfilerStep#1: 4 collectives; rank 2: 0.08 ms wire + 0.24 waiting + 0.04 gaps; rank 1 arrives last" in text
    refused(trace(*paths, "--timeline", picture, "--timeline-step", 2), "trace: timeline_step must be in 0..1; got 2.")
    refused(trace(*paths, "--timeline", tmp_path / "t.png"), "trace: timeline must be an .svg file in a folder that exists; got ")


@pytest.mark.parametrize("span", [0.02, 1.0, 7.3, 999.0, 2e6])
def test_ticks_are_round(span):
    tick = _tick(span)
    assert 5 <= span / tick <= 12.5 and f"{tick:e}"[0] in "125" and float(f"{tick:e}".split("e")[0]) in (1, 2, 5)


def test_importing_trace_needs_no_torch():
    import subprocess
    code = "import sys, fastverify.cli.trace, fastverify.trace, fastverify.trace.advice; assert 'torch' not in sys.modules"
    root = Path(sys.modules["fastverify"].__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
