"""benchmarks/harness.py: statistics, buffer sets, rows and files, and whole runs on the CPU (and on a GPU if there is one)."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve()
SOURCE = next((p / "benchmarks/harness.py" for p in HERE.parents if (p / "benchmarks/harness.py").exists()), None)
if SOURCE is None:
    pytest.skip("benchmarks/ is not beside these tests", allow_module_level=True)
spec = importlib.util.spec_from_file_location("fastverify_bench_harness", SOURCE)
harness = importlib.util.module_from_spec(spec)
spec.loader.exec_module(harness)

SHAPE = dict(B=1, N=4)


@pytest.fixture
def bench(monkeypatch):
    """A Bench on the CPU with a bandwidth of 1 GB/s, so that floors are known."""
    def make(*argv, op="probe"):
        monkeypatch.setattr(harness, "copy_bandwidth", lambda device, repeats: 1e9)
        return harness.Bench(op, harness.options("test").parse_args(["--device", "cpu", "--repeats", "5", *argv]))
    return make


# ---- statistics and sizes ---------------------------------------------------------------------------------------------------

def test_quantiles_are_those_of_torch(rng):
    for n in (1, 2, 5, 30):
        values = torch.rand(n, generator=rng, dtype=torch.float64)
        for q in (0.0, 0.2, 0.5, 0.8, 1.0):
            want = torch.quantile(values, q).item()
            assert harness.quantile(sorted(values.tolist()), q) == pytest.approx(want, abs=1e-12)
    t = harness.summary([5.0, 1.0, 3.0, 2.0, 4.0], True)
    assert (t.median_us, t.p20_us, t.p80_us, t.graph) == (3.0, pytest.approx(1.8), pytest.approx(4.2), True)


@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 20, 3 << 20, 50 << 20, 1 << 30])
def test_between_two_uses_of_a_set_three_caches_pass(nbytes):
    l2 = 50 << 20
    n = harness.buffer_sets(nbytes, l2)
    assert 2 <= n <= harness.MAX_SETS
    if n < harness.MAX_SETS:
        assert harness.is_cold(n, nbytes, l2) and (n - 1) * nbytes >= 3 * l2
        assert n == 2 or not harness.is_cold(n - 1, nbytes, l2), "no more sets than needed"
    else:
        assert not harness.is_cold(n, 1, l2), "a tiny op says that it is not cold"
    assert not harness.is_cold(1, nbytes, l2)


def test_long_calls_get_fewer_samples():
    assert [harness.samples_within(s, 30) for s in (0.0, 1e-3, 0.0076, 0.1, 9.0)] == [30, 30, 19, 7, 7]
    assert harness.samples_within(9.0, 3) == 3


def test_warm_option_makes_one_set(bench):
    assert bench("--warm").sets(1 << 20) == 1
    assert bench().sets(1 << 20) == harness.CPU_SETS and bench().sets(1 << 30) == 2


# ---- measuring -------------------------------------------------------------------------------------------------------------

def test_host_timer_measures_what_passes():
    calls = [lambda: time.sleep(0.004)] * 3
    t = harness.time_host(calls, 6)
    assert 4000 <= t.p20_us <= t.median_us <= t.p80_us


def test_every_set_is_called_and_before_runs_before_each_sample():
    seen = []
    harness.time_host([lambda i=i: seen.append(i) for i in range(4)], 8, before=lambda: seen.append("before"))
    assert seen[:4] == [0, 1, 2, 3]  # the warm-up
    assert seen[4:] == [x for i in range(8) for x in ("before", i % 4)]


def test_row_has_every_column_and_the_check_runs_after_the_calls(bench):
    b, state = bench(), []
    row = b.measure("ours", SHAPE, torch.float32, [lambda: state.append(1)] * 2, 2500, check=lambda: len(state) == 7)
    assert set(harness.COLUMNS) <= set(row)
    assert row["correct"] is True and row["floor_us"] == pytest.approx(2.5) and row["dtype"] == "float32"
    assert row["graph"] is False and row["cold"] is False and row["note"] == ""
    assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["versions"]["torch"] == torch.__version__


def test_a_peer_that_fails_or_is_absent_is_a_row_without_times(bench):
    b = bench()
    def fail():
        raise RuntimeError("needs sm_120\nmore lines")
    b.measure("peer", SHAPE, "float32", [fail], 10)
    b.absent("other", SHAPE, "float32", "not installed")
    assert [(r["median_us"], r["note"]) for r in b.rows] == [(None, "failed: needs sm_120"), (None, "not installed")]


def test_a_wrong_result_is_the_exit_status(bench, capsys):
    b = bench()
    b.measure("ours", SHAPE, "float32", [lambda: None], 10, check=lambda: True)
    b.measure("peer", SHAPE, "float32", [lambda: None], 10, check=lambda: "1 tie in 300")
    assert b.finish() == 0
    b.measure("third", SHAPE, "float32", [lambda: None], 10, check=lambda: False)
    assert b.finish() == 1
    out = capsys.readouterr().out
    assert "1 tie in 300" in out and "NO" in out and "third" in out


def test_only_names_the_providers(bench, capsys):
    b = bench("--only", "a,b")
    assert b.measure("c", SHAPE, "float32", [lambda: 1 / 0], 10) is None
    assert b.absent("c", SHAPE, "float32", "not installed") is None
    assert b.finish() == 2 and "nothing measured" in capsys.readouterr().err
    assert b.measure("b", SHAPE, "float32", [lambda: None], 10) is not None


def test_ratio_is_against_the_first_measured_provider_of_the_same_shape(bench):
    b = bench()
    for shape, provider, us in ((dict(B=1), "x", None), (dict(B=1), "y", 10.0), (dict(B=1), "z", 25.0), (dict(B=2), "z", 7.0)):
        b._add(provider, shape, "float32", harness.Timing(us, us, us, False), 0, None, "", True)
    header, cells = harness.table_rows(b.rows)
    at = header.index("against")
    assert [c[at] for c in cells] == ["", "1.00x", "2.50x", "1.00x"]
    assert all(len(c) == len(header) for c in cells)


# ---- files -----------------------------------------------------------------------------------------------------------------

def test_rows_are_added_and_replaced_by_key(bench, tmp_path, capsys):
    for provider, us in (("ours", 1.0), ("peer", 2.0), ("ours", 3.0)):
        b = bench("--out", str(tmp_path))
        b._add(provider, SHAPE, "float32", harness.Timing(us, us, us, False), 10, True, "", True)
        b.finish()
    (path,) = tmp_path.iterdir()
    assert path.name == f"cpu-{b.about['date'][:10]}.json"
    rows = json.loads(path.read_text())["rows"]
    assert sorted((r["provider"], r["median_us"]) for r in rows) == [("ours", 3.0), ("peer", 2.0)]
    assert str(tmp_path) not in path.read_text(), "no path of this machine"


def test_a_result_file_is_whole_at_any_time(bench, tmp_path, monkeypatch):
    """A process that is stopped while it writes leaves the rows that were there."""
    b = bench()
    b._add("ours", SHAPE, "float32", harness.Timing(1.0, 1.0, 1.0, False), 10, True, "", True)
    path = tmp_path / "cpu.json"
    harness.store(path, b.rows)
    before = path.read_text()
    whole = Path.write_text

    def half(self, text):
        whole(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        harness.store(path, [dict(b.rows[0], provider="peer")])
    assert path.read_text() == before and list(tmp_path.glob("*.json")) == [path]
    monkeypatch.undo()
    harness.store(path, [dict(b.rows[0], provider="peer")])
    assert [r["provider"] for r in json.loads(path.read_text())["rows"]] == ["ours", "peer"]


def test_device_names_and_commands():
    assert harness.slug("NVIDIA H200", "cuda") == "nvidia-h200"
    assert harness.slug("NVIDIA RTX PRO 6000 Blackwell (Server)", "cuda") == "nvidia-rtx-pro-6000-blackwell-server"
    assert harness.slug("AMD EPYC", "cpu") == "cpu"
    got = harness.without_paths("python bench_x.py --out /home/me/results --logits /data/a.pt --repeats 3 --device cuda:1")
    assert got == "python bench_x.py --logits a.pt --repeats 3 --device cuda:1"
    assert harness.without_paths("python bench_x.py --out=/home/me") == "python bench_x.py"


def test_absent_packages_have_no_version():
    assert harness.installed("torch") and harness.installed("no-such-distribution-xyz") is None


def test_empty_call_and_bandwidth_on_the_cpu():
    cpu = torch.device("cpu")
    assert 0 < harness.empty_node(cpu, 20) < 1000
    assert 1e8 < harness.copy_bandwidth(cpu, 3) < 1e13


def test_bandwidth_is_that_of_data_that_is_in_memory(monkeypatch):
    """Pages of zeros that nobody wrote are one page: a copy of them runs at the speed of a cache."""
    seen = []
    monkeypatch.setattr(harness, "time_host", lambda calls, repeats: seen.append(calls[0]()) or harness.Timing(1.0, 1.0, 1.0, False))
    harness.copy_bandwidth(torch.device("cpu"), 4)
    assert int((seen[0] == 0).sum()) < 10


def test_names_and_numbers_of_the_command_line():
    import argparse
    parse = harness.names("peer", "host")
    assert parse("host,peer") == ["host", "peer"] and harness.numbers("1,8") == [1, 8]
    for call in (lambda: parse("peer,x"), lambda: harness.numbers("0,1")):
        with pytest.raises(argparse.ArgumentTypeError, match="^must be "):
            call()


# ---- a GPU -----------------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
def test_graph_times_a_known_kernel():
    clocks = 200_000
    short = harness.time_cuda([lambda: torch.cuda._sleep(clocks)], 10)
    long = harness.time_cuda([lambda: torch.cuda._sleep(2 * clocks)], 10)
    assert short.graph and 1.8 < long.median_us / short.median_us < 2.2
    assert harness.empty_node(torch.device("cuda"), 20) < 0.2 * short.median_us


@pytest.mark.gpu
def test_calls_that_cannot_be_captured_are_timed_without_a_graph():
    x = torch.zeros(4, device="cuda")
    t = harness.time_cuda([lambda: x.add_(1)] * 2, 5, graph=False)
    assert not t.graph and t.median_us > 0
    samples, rest = divmod(int(x[0]) - 2, harness.MIN_CALLS)  # two of its own calls, then whole samples
    assert rest == 0 and samples >= 2 + 1 + 5, "two that look, at least one that warms up, five that count"
