"""fastverify bench: verdicts by hand, wrong input, axes, and whole runs of small benchmarks on the CPU."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_fixtures import cli  # noqa: F401
from cli_run import PAIR

from fastverify.cli import bench_compare, bench_run, bench_tables

HERE = Path(__file__).resolve()
ROOT = next((p for p in HERE.parents if (p / "benchmarks/harness.py").exists()), None)
need_source = pytest.mark.skipif(ROOT is None, reason="benchmarks/ is not beside these tests")


def row(us, low=None, high=None, op="probe", provider="ours", **more) -> dict:
    return dict(op=op, provider=provider, shape=more.pop("shape", dict(B=1)), dtype="float32", cold=True, median_us=us,
                p20_us=low if low is not None or us is None else us, p80_us=high if high is not None or us is None else us, floor_us=1.0,
                empty_us=0.5, bytes=more.pop("bytes", 1000), copy_gb_s=10.0, correct=True, note="", command="python bench_probe.py",
                device="X", device_type="cpu", date="2026-01-02T03:04:05", versions=dict(torch="2.13")) | more


def written(path: Path, rows: list) -> Path:
    path.write_text(json.dumps(dict(schema=1, rows=rows)))
    return path


# ---- compare -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old,new,word", [
    (row(10.0, 9.9, 10.1), row(10.2, 10.1, 10.3), "SAME"),
    (row(10.0, 9.9, 10.1), row(12.0, 11.9, 12.1), "SLOWER"),
    (row(12.0, 11.9, 12.1), row(10.0, 9.9, 10.1), "FASTER"),
    (row(10.0, 8.0, 13.0), row(12.0, 9.0, 14.0), "UNCLEAR"),    # the spans meet
    (row(10.0, 8.0, 13.0), row(10.0, 9.9, 10.1), "UNCLEAR"),    # equal medians of a span of 50 % prove nothing
    (row(10.0, 9.95, 10.05), row(10.25, 10.2, 10.3), "SAME"),   # apart, but by less than the tolerance
    (row(10.0, 9.95, 10.05), row(10.5, 10.45, 10.55), "SLOWER"),  # 5 %
    (row(1.0, 0.98, 1.02), row(1.045, 1.03, 1.06), "SAME"),     # 45 ns
    (row(1.0, 0.98, 1.02), row(1.4, 1.38, 1.42), "SLOWER"),
    (row(None), row(3.0), "UNCLEAR"), (row(3.0), row(None), "UNCLEAR")])
def test_verdicts(old, new, word):
    assert bench_compare.verdict(old, new).word == word


def runs_of(change: float, between: float, within: float, count: int = 600) -> dict:
    """Shares of the verdicts on `count` rows whose second run is `change` times as long. Every run has an error of its own that its samples
    do not show (clocks, where memory lies): `between`, one standard deviation; `within` is that of the samples of a run."""
    rng = random.Random(1)

    def run(true: float) -> dict:
        middle = true * rng.lognormvariate(0, between)
        samples = sorted(middle * rng.lognormvariate(0, within) for _ in range(20))
        return row(samples[10], samples[4], samples[16])

    words = [bench_compare.verdict(run(us), run(change * us)).word for us in (10 ** rng.uniform(0.3, 3) for _ in range(count))]
    return {w: words.count(w) / count for w in set(words)}


@pytest.mark.parametrize("within", [0.001, 0.005])
def test_equal_code_is_the_same_and_a_change_of_five_percent_is_seen(within):
    """With runs that differ by 1 %, as rows of unchanged code do (docs/benchmarks.md)."""
    assert runs_of(1.0, 0.01, within)["SAME"] >= 0.95
    assert runs_of(1.05, 0.01, within)["SLOWER"] >= 0.85 and runs_of(1 / 1.05, 0.01, within)["FASTER"] >= 0.85
    assert runs_of(1.1, 0.01, within)["SLOWER"] >= 0.99 and runs_of(1 / 1.1, 0.01, within)["FASTER"] >= 0.99


def test_noise_is_neither_the_same_nor_a_change():
    """Samples that scatter by 20 % can show neither; a real doubling shows through 5 %."""
    assert runs_of(1.0, 0.01, 0.2).get("SAME", 0) <= 0.05 and runs_of(1.05, 0.01, 0.2).get("SLOWER", 0) <= 0.05
    assert runs_of(2.0, 0.01, 0.05)["SLOWER"] == 1.0


def test_compare_by_key(cli, tmp_path):  # noqa: F811
    old = [row(10.0), row(20.0, shape=dict(B=2)), row(None, provider="peer"), row(5.0, op="gone")]
    new = [row(14.0), row(20.1, shape=dict(B=2)), row(None, provider="peer"), row(7.0, op="more"), row(9.0, op="more", cold=False)]
    a, b = written(tmp_path / "a.json", old), written(tmp_path / "b.json", new)
    code, out, err = cli("bench", "compare", a, b)
    assert code == 1 and out.splitlines()[-1] == "2 rows in both: 1 SAME, 1 SLOWER (50.0 % SAME); 1 only in the first, 2 only in the second"
    assert out.splitlines()[1].split() == ["probe", "ours", "B=1", "float32", "10.0", "14.0", "1.400", "SLOWER"] and err == ""
    code, out, err = cli("bench", "compare", a, a)
    assert code == 0 and out == "3 rows in both: 3 SAME (100.0 % SAME)\n"
    code, out, err = cli("bench", "compare", b, a, "--json", "--tolerance", "0.5")
    data = json.loads(out)
    assert code == 0 and data["same_share"] == 1.0 and {r["verdict"] for r in data["rows"]} == {"SAME"}
    other = written(tmp_path / "c.json", [r | dict(device="Y", versions=dict(torch="2.14")) for r in old])
    code, out, err = cli("bench", "compare", a, other, "--all")
    assert code == 0 and "device: X against Y" in err and "versions that differ: torch 2.13 against torch 2.14" in err and "B=2" in out


@pytest.mark.parametrize("content,why", [
    ("{}", "which has no rows"), ("[1", "which has no rows"), ('{"rows": []}', "which has no rows"), ('{"rows": [1]}', "something else than rows"),
    (json.dumps(dict(rows=[row(1.0) | dict(shape=3)])), "a row of which has no shape"),
    (json.dumps(dict(rows=[row(1.0) | dict(p20_us=None)])), "a row of which has no times")])
def test_wrong_results_are_refused(cli, tmp_path, content, why):  # noqa: F811
    path = tmp_path / "x.json"
    path.write_text(content)
    for command in (("compare", path, path), ("show", path)):
        code, out, err = cli("bench", *command)
        assert code == 2 and out == "" and why in err and "Fix: fastverify bench run" in err
    assert cli("bench", "compare", path, tmp_path / "none.json")[0] == 2


@pytest.mark.parametrize("flags,message", [
    (["run", "nothing"], "every name must be an op or a stage of the suite; got nothing"),
    (["run", "--batch", "1,x"], "batch must be positive integers with commas; got 1,x"),
    (["run", "--batch", "0"], "batch must be positive integers with commas; got 0"),
    (["run", "--repeats", "0"], "repeats must be at least 1; got 0"),
    (["run", "--limit", "0"], "limit must be above 0 seconds"),
    (["step", "--nodes", ","], "nodes must be positive integers with commas")])
@need_source
def test_arguments(cli, flags, message):  # noqa: F811
    code, out, err = cli("bench", *flags, "--device", "cpu")
    assert code == 2 and out == "" and message in err and "Fix: " in err


def test_stored_results_have_the_schema():
    files = sorted((ROOT / "benchmarks/results").glob("*-????-??-??.json")) if ROOT else []
    seen = 0
    for path in files:
        rows = [r for r in json.loads(path.read_text()).get("rows", ()) if "op" in r]
        assert [w for r in rows if (w := bench_tables.wrong(r))] == [], path.name
        seen += len(rows)
    assert seen or not ROOT


# ---- showing -----------------------------------------------------------------------------------------------------------------


def test_show_markdown_and_pictures(cli, tmp_path):  # noqa: F811
    stages = [row(us, op="step", shape=dict(model="m", B=1, stage=s)) for s, us in (("tree", 5.0), ("linears", 90.0), ("whole", 93.0))]
    sums = [row(us, op="all_reduce", shape=dict(W=2, rows=n, H=512)) for n, us in ((1, 4.0), (64, 9.0))]
    path = written(tmp_path / "r.json", [row(3.0, 2.9, 3.2), row(9.0, provider="peer"), row(None, provider="gone", note="not installed"), *stages, *sums])
    code, out, err = cli("bench", "show", path, "--markdown", tmp_path / "r.md", "--plot", tmp_path / "plots")
    assert code == 0 and "probe on X, 2026-01-02, torch 2.13" in out and "3.00x" in out and "not installed" in out
    text = (tmp_path / "r.md").read_text()
    assert "### probe" in text and "| peer | 1 | float32 | 9.00 |" in text and "`python bench_probe.py`" in text
    names = {p.name for p in (tmp_path / "plots").iterdir()}
    assert names == {"probe.svg", "step.svg", "all_reduce.svg"}
    for name, labels in (("probe", ("bytes that a call must move (MB)", "us per call, median", "peer")), ("step", ("ms per verify step",)),
                         ("all_reduce", ("message of one rank (KiB)",))):
        comments = "".join(ElementTree.parse(tmp_path / "plots" / f"{name}.svg", ElementTree.XMLParser(
            target=ElementTree.TreeBuilder(insert_comments=True))).getroot().itertext())
        assert all(label in comments for label in labels), name
    code, out, err = cli("bench", "show", path, "--op", "step", "--json")
    assert code == 0 and {r["op"] for r in json.loads(out)["rows"]} == {"step"}
    assert cli("bench", "show", path, "--op", "none")[0] == 2


# ---- the suite ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harness():
    if ROOT is None:
        pytest.skip("benchmarks/ is not beside these tests")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import harness
    return harness


def test_axes_replace_those_of_the_table(harness):
    def shapes(table, *argv, names=()):
        return harness.with_axes(harness.options("x").parse_args(list(argv)), table, names)

    table = [dict(B=1, N=16, law="a"), dict(B=8, N=16, law="a"), dict(B=8, N=64, law="b")]
    assert shapes(table) == table
    assert shapes(table, "--batch", "2,3") == [dict(B=b, N=n, law=w) for n, w in ((16, "a"), (64, "b")) for b in (2, 3)]
    assert shapes(table, "--batch", "2", "--nodes", "4", "--vocab", "9") == [dict(B=2, N=4, law="a"), dict(B=2, N=4, law="b")]
    assert shapes(table, "--quick") == table[:2]
    assert shapes([(1, 16), (8, 16)], "--nodes", "4", names="BN") == [(1, 4), (8, 4)]
    assert shapes(["1,16,1024"], "--prefix", "5,6", names=("B", "N", "KV")) == ["1,16,5", "1,16,6"]
    with pytest.raises(SystemExit):
        harness.options("x").parse_args(["--batch", "0"])
    assert set(bench_run.AXES) == set(harness.AXES)


def test_time_left_is_that_of_the_newest_result(tmp_path):
    """Seconds of the rows, where they say them; a script of several ops counts once; the other kind of device not at all."""
    old = [row(1.0, op="a", seconds=9.0), row(2.0, op="b")]
    new = [row(1.0, op="a", seconds=1.5), row(1.0, op="a", shape=dict(B=2), seconds=0.5), row(1.0, op="s.x", seconds=1.0), row(1.0, op="s.y", seconds=2.0),
           row(1.0, op="c", device_type="cuda")]
    written(tmp_path / "x-2026-01-02.json", old), written(tmp_path / "x-2026-01-03.json", new)
    assert bench_run.expected(tmp_path, "cpu") == {"a": (2, 2.0), "b": (1, bench_run.ROW_SECONDS), "s": (2, 3.0)}


@need_source
def test_list_names_everything(cli):  # noqa: F811
    code, out, err = cli("bench")
    assert code == 0 and err == ""
    for script in (ROOT / "benchmarks").glob("*/bench_*.py"):
        if script.parent.name not in ("loop", "host"):
            assert re.search(rf"^{script.stem.removeprefix('bench_')} .*benchmarks/{script.parent.name}/{script.name}", out, re.M)
    for provider in bench_run.PROVIDERS:
        assert provider in out
    assert "pip install sglang-kernel" in out or "sglang-kernel" in out


@need_source
def test_run_writes_rows_of_the_schema(cli, tmp_path):  # noqa: F811
    code, out, err = cli("bench", "run", "draft_topk", "--device", "cpu", "--rows", "2", "--vocab", "300", "--top", "3", "--repeats", "2",
                         "--out", tmp_path, "--only", "fastverify")
    assert code == 0, err
    (path,) = tmp_path.glob("*.json")
    rows = bench_tables.read_rows("test", str(path))
    assert [(r["shape"], r["provider"], r["correct"]) for r in rows] == [(dict(rows=2, V=300, k=3), "fastverify", True)]
    assert rows[0]["command"] == ("python benchmarks/tree/bench_draft_topk.py --device cpu --repeats 2 --only fastverify --rows 2 --vocab 300 "
                                  "--top 3") or set(rows[0]["command"].split()) >= {"benchmarks/tree/bench_draft_topk.py", "--vocab"}
    assert json.loads(path.read_text())["schema"] == 1 and "draft_topk: 1 rows" in err and "draft_topk on " in out
    again = subprocess.run([sys.executable, *rows[0]["command"].split()[1:]], cwd=ROOT, capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    assert again.returncode == 0 and "fastverify" in again.stdout, "the command of a row reproduces it"


@need_source
def test_the_next_script_starts_early_and_waits_its_turn():
    """On a GPU the next process imports while one measures. Rows, order and a failing script are those of one after the other."""
    flags = ["--device", "cpu", "--repeats", "2", "--rows", "2", "--batch", "1", "--vocab", "300", "--top", "3", "--nodes", "8", "--prefix", "64"]
    wanted = bench_run.chosen(bench_run.scripts(ROOT / "benchmarks", 0), ["draft_topk", "prepare_tree"])
    broken = bench_run.Script("broken", "tree", ROOT / "benchmarks/tree/no_such_file.py")
    outcomes = list(bench_run.run([wanted[0], broken, wanted[1]], flags, lambda share, text: None, ahead=True))
    assert [(o.script.op, o.status, len(o.rows) > 0) for o in outcomes] == [("draft_topk", 0, True), ("broken", 2, False), ("prepare_tree", 0, True)]
    assert "no_such_file" in outcomes[1].error and all("--wait" not in r["command"] for o in outcomes for r in o.rows)


@need_source
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see child processes")
def test_scripts_end_with_the_run():
    """A run that is told to end takes its scripts along; one whose starter is gone measures nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.Popen([sys.executable, "-m", "fastverify", "bench", "run", "verify_tree", "--device", "cpu"], env=environment, cwd=ROOT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children, until = "", time.monotonic() + 60
    while not children and time.monotonic() < until and run.poll() is None:
        time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().strip()
    assert children
    run.terminate()
    assert run.wait(60) == 143 and not any(Path(f"/proc/{pid}").exists() for pid in children.split())
    alone = subprocess.run([sys.executable, "benchmarks/tree/bench_draft_topk.py", "--device", "cpu", "--wait"], stdin=subprocess.DEVNULL, cwd=ROOT,
                           env=environment, capture_output=True, text=True)
    assert alone.returncode == 2 and alone.stdout == ""


@need_source
def test_a_step_of_a_tiny_model(cli):  # noqa: F811
    code, out, err = cli("bench", "step", "--model", "tiny", "--device", "cpu", "--prefix", "32", "--nodes", "8", "--repeats", "2", "--json")
    data = json.loads(out)
    assert code == 0, err
    stages = [r["shape"]["stage"] for r in data["rows"]]
    assert stages == ["tree", "rope_append", "tree_attention", "linears", "lm_head", "verify_tree", "compact_kv", "whole"]
    assert data["rows"][-1]["correct"] is True and all(r["median_us"] > 0 for r in data["rows"])


@need_source
def test_a_script_that_fails_or_hangs_is_named(tmp_path):
    folder = tmp_path / "benchmarks" / "x"
    folder.mkdir(parents=True)
    (folder / "bench_bad.py").write_text("import sys; print('a line'); sys.exit('it broke')")
    (folder / "bench_slow.py").write_text("import time; time.sleep(60)")
    seen = []
    bad, slow = bench_run.run([bench_run.Script(n, "x", folder / f"bench_{n}.py") for n in ("bad", "slow")], [],
                              lambda share, text: seen.append((share, text)), limit=0.5)
    assert (bad.status, bad.error, bad.rows) == (1, "it broke", []) and (slow.status, slow.error) == (124, "stopped after 0.5 s")
    assert seen[0] == (0.0, "bad") and seen[-1] == (1.0, "done") and all(a[0] <= b[0] for a, b in zip(seen, seen[1:]))


@need_source
def test_the_loop_on_prompts(cli, tmp_path):  # noqa: F811
    (tmp_path / "p.jsonl").write_text('{"token_ids": [3, 4, 5, 3, 4]}\n')
    code, out, err = cli("bench", "loop", *PAIR, "--prompts", tmp_path / "p.jsonl", "--eagle3", "chain-2", "--ngram", "chain-3",
                         "--max-new-tokens", "12", "--ignore-eos", "--out", tmp_path / "out")
    assert code == 0, err
    (path,) = (tmp_path / "out").glob("*-loop-*.json")
    assert [e["rows"][0]["tree"] for e in json.loads(path.read_text())["entries"]] == ["chain-2", "chain-3"] and "eagle3" in out


@need_source
def test_host_costs_by_pytest_benchmark():
    pytest.importorskip("pytest_benchmark")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", str(ROOT / "benchmarks/host/bench_host.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    assert done.returncode == 0 and "16 passed" in done.stdout, done.stdout + done.stderr
