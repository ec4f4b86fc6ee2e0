"""fastverify plan --probe (what a probe wrote, by hand) and --plot."""

import json
import re
import sys

import pytest
from test_plan import COMM, K2, USER, refused

from fastverify.cli import plan_plot
from cli_fixtures import cli  # noqa: F401


def row(draft, shape, nodes, levels, ms, tau, conditional=(), measured=None) -> dict:
    parts = dict(zip(("draft", "verify", "communication", "other"), ms))
    return dict(draft=draft, shape=shape, nodes=nodes, levels=levels, tau=tau, ms=parts | {"round": sum(ms)}, error=None,
                per_depth=[dict(depth=i + 1, unconditional=0.0, conditional=c) for i, c in enumerate(conditional)],
                measured=dict(tokens_per_second=measured))


PROBE = dict(kind="fastverify probe", target="demo", world_size=1, rows=[
    row("none", "off", 1, 0, (0.0, 10.0, 0.0, 0.0), 1.0, measured=99.0),
    row("a", "chain-2", 3, 2, (2.0, 11.0, 1.0, 1.0), 2.1, (0.7, 0.6), 140.0),
    row("a", "chain-5", 6, 5, (5.0, 15.0, 1.0, 1.0), 2.6, (0.7, 0.6, 0.5, 0.5, 0.5), 118.0),
    row("a", "tree-8", 8, 4, (4.0, 21.0, 1.0, 2.0), 2.8, (0.8, 0.7), 100.0),
    row("ngram", "tree-8", 8, 7, (0.1, 20.0, 1.0, 1.0), 1.1, (0.1,), 50.0)])


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE))
    return path


@pytest.fixture
def plan(cli, probe):  # noqa: F811
    def run(*args) -> dict:
        code, out, err = cli("plan", "--probe", probe, *args, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)
    return run


def test_measured_rows_by_hand(plan):
    data = plan("--tau", "1.5,2")
    rows = {(r["draft"], r["shape"]): r for r in data["rows"]}
    assert data["plain_ms"] == 10.0 and data["plain_tokens_per_second"] == 100.0 and data["target"] == "demo"
    assert rows["none", "off"]["speed_up"] == 1.0 and rows["none", "off"]["break_even_tau"] == 1.0
    r = rows["a", "chain-2"]
    assert (r["verify_ms"], r["draft_ms"], r["round_ms"], r["source"]) == (12.0, 2.0, 15.0, "measured")
    assert r["break_even_tau"] == 1.5 and r["speed_up"] == pytest.approx(1.4)
    assert r["expected_tokens_per_second"] == pytest.approx(140.0) and r["measured_tokens_per_second"] == 140.0
    assert r["tokens_per_second"] == {"1.5": 100.0, "2": pytest.approx(400 / 3)}
    speeds = [r["speed_up"] for r in data["rows"][1:]]
    assert speeds == sorted(speeds, reverse=True)


def test_chains_between_those_that_were_run(plan):
    rows = {r["shape"]: r for r in plan()["rows"] if r["source"] == "interpolated"}
    assert set(rows) == {"chain-1", "chain-3", "chain-4"}
    assert [rows[s]["tau"] for s in ("chain-1", "chain-3", "chain-4")] == pytest.approx([1.7, 2.33, 2.435])
    assert rows["chain-1"]["verify_ms"] == pytest.approx(11.0), "between plain (10, one row) and chain-2 (12, three)"
    assert rows["chain-3"]["verify_ms"] == pytest.approx(12 + 4 / 3) and rows["chain-3"]["draft_ms"] == pytest.approx(3.0)
    assert rows["chain-4"]["round_ms"] == pytest.approx(15 + 7 * 2 / 3)
    assert all(r["measured_tokens_per_second"] is None for r in rows.values())


def test_drafts_compared_and_what_to_change(plan, cli, probe):  # noqa: F811
    data = plan()
    assert [(d["draft"], d["shape"]) for d in data["drafts"]] == [("a", "chain-2"), ("ngram", "tree-8")]
    assert [c["part"] for c in data["change_first"]] == ["verify", "draft", "other", "acceptance"]
    got = {c["part"]: c["speed_up"] for c in data["change_first"]}
    assert got == pytest.approx({"verify": 21 / 13, "draft": 21 / 14, "other": 21 / 14, "acceptance": 2.21 / 1.5})
    code, out, err = cli("plan", "--probe", probe)
    assert code == 0 and "a: best is chain-2 (measured), tau 2.10 >= break-even 1.50, 1.40x plain" in out
    assert "ngram: best is tree-8 (measured), tau 1.10 < break-even 2.21, 0.50x plain" in out
    assert "1. verify: verify in 10 ms, a plain step's; 1.62x plain" in out
    assert re.search(r"^a +chain-3 +interpolated +3\.00 +13\.33 +1\.00 +17\.33 +2\.33 +1\.73 +1\.34 +134\.4 +- ", out, re.M)


def test_other_times_replace_the_measured_ones(plan):
    r = next(r for r in plan("--verify-ms", "7", "--plain-ms", "8")["rows"] if r["shape"] == "chain-2")
    assert r["round_ms"] == 10.0 and r["break_even_tau"] == 1.25
    assert plan("--plain-ms", "8")["plain_tokens_per_second"] == 125.0


def test_a_probe_of_plain_decoding_alone(cli, tmp_path):  # noqa: F811
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(PROBE | {"rows": PROBE["rows"][:1]}))
    code, out, err = cli("plan", "--probe", path)
    assert code == 0 and "100.0 tok/s" in out and "change first" not in out


@pytest.mark.parametrize("change,message", [
    ("[1]", "plan: probe must be the JSON of `fastverify probe`; got "),
    ("{", "plan: probe must be the JSON of `fastverify probe`; got "),
    (json.dumps({"rows": [1]}), "plan: probe must be the JSON of `fastverify probe`; got "),
    (json.dumps(PROBE | {"rows": []}), "plan: probe must be the JSON of `fastverify probe`; got "),
    (json.dumps(PROBE | {"rows": [{"draft": "a"}]}), "plan: every row of the probe must have draft, shape, nodes, levels, tau, per_depth"),
    (json.dumps(PROBE | {"rows": PROBE["rows"][1:]}), "plan: the first row of the probe must be plain decoding; got chain-2"),
])
def test_files_that_are_no_probe(cli, probe, change, message):  # noqa: F811
    probe.write_text(change)
    refused(cli("plan", "--probe", probe), message)


def test_arguments(cli, probe):  # noqa: F811
    refused(cli("plan", "--probe", "/nowhere.json"), "plan: probe must be an existing file; got /nowhere.json. Fix: fastverify probe --out")
    for flags, name in ((["--config", "x"], "--config"), (["--draft-ms", "3"], "--draft-ms"), (["--allreduce", "kernel"], "--allreduce")):
        refused(cli("plan", "--probe", probe, *flags), f"plan: {name} must go without --probe; got both.")


# ---- pictures -----------------------------------------------------------------------------------------------------------


def test_what_is_drawn_from_a_probe(plan):
    data = plan()
    lines, (names, groups, label, line, _), title = plan_plot.series(data)
    assert [n for n, _, _ in lines] == [plan_plot._name(r) for r in data["rows"][1:]] and lines[-1][0] == "ngram tree-8"
    assert lines[0] == ("chain-2", 15.0, (2.1, pytest.approx(140.0)))
    assert names[0] == "plain" and groups["measured"][:2] == [99.0, 140.0] and (label, line, title) == ("tok/s", 100.0, "demo")


def test_what_is_drawn_from_times_and_from_a_model(cli, tmp_path):  # noqa: F811
    data = json.loads(cli("plan", *USER, *COMM, "--allreduce", "kernel", "--json")[1])
    lines, (names, groups, label, line, _), _ = plan_plot.series(data)
    assert names == ["as given 205 us, draft 0.66 ms", "as given 205 us, draft 5 ms", "kernel 10 us, draft 0.66 ms", "kernel 10 us, draft 5 ms"]
    assert [round(v, 2) for v in groups["break-even tau"]] == [2.64, 3.02, 0.59, 0.97] and line == 1.0
    assert lines[0][1] == 30.66 and plan_plot.data_plain(data) == 11.6
    (tmp_path / "config.json").write_text(json.dumps(K2))
    data = json.loads(cli("plan", "--config", tmp_path, "--memory-gbs", "1790", "--ranks", "8", "--draft-step-ms", "0.5",
                          "--accept", "0.6", "--shapes", "off,chain-2,tree-20", "--json")[1])
    lines, (names, groups, *_), title = plan_plot.series(data)
    assert [n for n, _, _ in lines] == ["chain-2", "tree-20"] and lines[0][2][0] == pytest.approx(1.96) and lines[1][2] is None
    assert names == ["off", "chain-2", "tree-20"] and len(groups) == 4 and "all-reduce kernel 10 us (left)" in title
    assert plan_plot.data_plain(data) == min(r["plain_ms"] for r in data["rows"])


def test_plots_are_files(cli, probe, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    code, out, err = cli("plan", "--probe", probe, "--plot", tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert code == 0 and text.startswith("<?xml") and "accept length tau" in text and "measured" in text
    assert cli("plan", *USER, *COMM, "--plot", tmp_path / "p.png")[0] == 0
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_plots_refused(cli, probe, monkeypatch):  # noqa: F811
    refused(cli("plan", "--probe", probe, "--plot", "x.pdf"), "plan: plot must end in .svg or .png; got x.pdf. Fix: change --plot.")
    refused(cli("plan", "--probe", probe, "--plot", "/nowhere/x.svg"), "plan: the folder of the plot must exist; got /nowhere/x.svg.")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(cli("plan", "--probe", probe, "--plot", "x.svg"),
            "plan: matplotlib must be installed for --plot; got none. Fix: pip install matplotlib, or leave --plot out.")
