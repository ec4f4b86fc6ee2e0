"""fastverify probe: pieces, prediction and verdict by hand; the command on the golden pair; wrong input."""

import json
import re

import pytest
from cli_run import PAIR

from fastverify import Decoder, load_draft, load_target
from fastverify.cli import probe_report as pr
from fastverify.cli.prompts import Prompt, halves, read_sets
from fastverify.eagle3.shapes import OFF, parse_shape
from fastverify.eagle3.stats import Stats, SynchronizedStats
from cli_fixtures import cli  # noqa: F401

PROMPTS = [[3, 4, 5], [9, 8], [9, 8, 7, 100], [50, 60, 70], [11, 12, 13, 11, 12], [5, 6]]
RUN = ["--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": ids, "category": "ab"[i % 2]}) + "\n" for i, ids in enumerate(PROMPTS)))
    return path


def piece(draft=0.0, verify=11.6, other=0.0, communication=0.0) -> pr.Pieces:
    total = draft + verify + other + communication
    return pr.Pieces(draft, verify, communication, other, total, total)


def counted(steps: dict, emitted: int, rounds: int, accepted: int, drafted: int, ms: float = 0.0, depths: tuple = ()) -> Stats:
    s = Stats(rounds=rounds, spec_rounds=rounds, emitted=emitted, first_tokens=1, drafted=drafted, accepted=accepted,
              at_depth=list(depths), offered=[rounds] * len(depths), decode_ms=ms)
    s.steps.update(steps)
    return s


# ---- the arithmetic ---------------------------------------------------------------------------------------------------


def test_the_users_verdict():
    """Plain 11.6 ms, verify 30, draft 0.66: break-even 2.64; at tau 1.58 speculation loses 40 %."""
    p = piece(0.66, 30.0)
    assert pr.verdict(1.58, piece(), p) == ("tau 1.58 < break-even 2.64: speculation loses 40 %; with verify at 11.6 ms (a plain "
                                            "step's) it would win 49 %")
    assert pr.verdict(1.58, piece(), piece(2.36, 30.0), 14.0).endswith("with verify at 14 ms it would win 12 %")
    assert pr.verdict(1.2, piece(), piece(5.0, 30.0)) == (
        "tau 1.20 < break-even 3.02: speculation loses 60 %; even with verify at 11.6 ms (a plain step's) it would lose 16 %: "
        "draft 5 ms, other 0 ms")
    assert pr.verdict(3.02, piece(), p) == "tau 3.02 >= break-even 2.64: speculation wins 14 %"
    assert pr.verdict(3.02, piece(), p, 14.0) == ("tau 3.02 >= break-even 2.64: speculation wins 14 %; with verify at 14 ms it "
                                                  "would win 139 %")
    assert pr.verdict(2.65, piece(), p).startswith("tau 2.65 >= break-even 2.64: speculation changes nothing (+0.3 %)")


def test_communication_is_part_of_the_verify():
    even = pr.Row("d", "chain-3", 4, 3, piece(0.66, 5.0, 0.0, 25.0), piece(), [counted({"chain-3": 10}, 17, 10, 6, 30)],
                  [counted({"chain-3": 10}, 17, 10, 6, 30, 306.6)])
    assert even.break_even == pytest.approx(30.66 / 11.6) and even.as_dict()["ms"]["communication"] == 25.0
    assert "tau 1.60 < break-even 2.64: speculation loses 39 %" in even.verdict()


def test_predictions_hold_no_clock_of_the_runs():
    def row(ms: float) -> pr.Row:
        return pr.Row("d", "chain-2", 3, 2, piece(4.0, 15.0, 1.0), piece(verify=10.0), [counted({"chain-2": 50}, 101, 50, 52, 100, ms)],
                      [counted({"chain-2": 40}, 101, 40, 62, 80, 1000.0)])
    r = row(1000.0)
    assert r.predicted(r.stats) == pytest.approx(1e3 * 200 / 90 / 20.0) and r.measured == pytest.approx(100.0)
    assert r.error == pytest.approx(200 / 90 * 50 / 100 - 1) and row(9e9).predicted(r.stats) == r.predicted(r.stats)
    assert r.error_other_half == row(9e9).error_other_half == pytest.approx(2.0 * 50 / 100 - 1)
    assert r.stats.tau == pytest.approx((52 + 62 + 90) / 90) and r.break_even == 2.0 and r.speed_up == pytest.approx(r.stats.tau / 2)
    d = r.as_dict()
    assert [h["tau"] for h in d["halves"]] == pytest.approx([2.04, 2.55]) and d["halves"][1]["round_ms"] == 25.0
    assert d["measured"]["tokens_per_second"] == r.measured and d["predicted_from_other_half"] == pytest.approx(100.0)


def test_standard_error_of_tau():
    """Over batches as independent draws: here taus 2, 3, 1 of ten rounds each, so sd 1, and 1 / sqrt(3)."""
    runs = [counted({"chain-3": 10}, 30, 10, a, 30) for a in (10, 20, 0)]
    row = pr.Row("d", "chain-3", 4, 3, piece(), piece(), runs[:2], runs[2:])
    assert row.stats.tau == 2.0 and row.tau_error == pytest.approx(1 / 3**0.5)
    alike = pr.Row("d", "chain-3", 4, 3, piece(0, 11.0), piece(verify=10.0), [runs[0]] * 2, [runs[0]])
    assert alike.tau_error == 0.0 and alike.verdict() == "tau 2.00 >= break-even 1.10: speculation wins 82 %"
    assert pr.Row("d", "chain-3", 4, 3, piece(0, 26.0), piece(verify=10.0), runs[:2], runs[2:]).verdict() == (
        "tau 2.00 < break-even 2.60: speculation loses 23 % (too close to call: tau is known to +-1.15; more prompts); with verify at "
        "10 ms (a plain step's) it would win 100 %")
    even = pr.Row("d", "chain-3", 4, 3, piece(0, 20.1), piece(verify=10.0), runs[:2], runs[2:]).verdict()
    assert even.startswith("tau 2.00 < break-even 2.01: speculation changes nothing (-0.5 %); with verify at 10 ms")
    assert pr.Row("none", "off", 1, 0, piece(), piece(), runs, runs).tau_error is None


def test_rounds_without_a_draft_cost_a_plain_step():
    """An n-gram drafter that found a match in a quarter of the rounds."""
    row = pr.Row("ngram", "tree-8", 8, 7, piece(1.0, 19.0), piece(verify=10.0), [counted({"tree-8": 10, "off": 30}, 61, 40, 20, 70)],
                 [counted({"tree-8": 5, "off": 5}, 21, 10, 10, 35, 150.0)])
    assert row.predicted(row.first[0]) == pytest.approx(1e3 * 1.5 / 12.5) and row.predicted(row.stats) == pytest.approx(1e3 * 1.6 / 13)
    assert row.round(row.stats).total == pytest.approx(13.0) and row.break_even == pytest.approx(1.3)
    assert row.round(row.stats).draft == pytest.approx(0.3)
    none = pr.Row("ngram", "tree-8", 8, 7, piece(1.0, 19.0), piece(), [counted({"off": 30}, 31, 30, 0, 0)], [counted({"off": 9}, 10, 9, 0, 0)])
    assert none.verdict() == "nothing was drafted: all rounds were plain" and none.predicted(none.stats) == pytest.approx(1e3 / 11.6)
    assert none.measured is None and none.error is None


def test_pieces_add_up_and_forget_the_extremes():
    rounds = [{"draft": 2.0, "target": 10.0, "verify": 1.0, "other": 0.5, "total": 13.5}] * 9
    rounds += [{"draft": 90.0, "target": 10.0, "verify": 1.0, "other": 0.5, "total": 101.5}]
    p = pr.pieces(rounds)
    assert (p.draft, p.verify, p.communication, p.other, p.total) == pytest.approx((2.0, 11.0, 0.0, 0.5, 13.5))
    p = pr.pieces([r | {"communication": c} for r, c in zip(rounds, (3.0, 4.0, 5.0))])
    assert (p.verify, p.communication, p.total) == pytest.approx((7.0, 4.0, 13.5))
    assert pr.pieces([rounds[0] | {"communication": 90.0}]).verify == 0.0, "never more than the stages that hold it"
    apart = [{"draft": 4.0, "target": 20.0, "verify": 2.0, "other": 1.0, "total": 27.0}] * 3  # waits for the device after a stage
    p = pr.pieces(rounds[:6], apart)
    assert (p.draft, p.verify, p.other, p.total) == pytest.approx((2.0, 11.0, 0.5, 13.5))
    uneven = [{"draft": 5.0, "target": 9.0, "verify": 1.0, "total": 16.0}, {"draft": 1.0, "target": 9.0, "verify": 1.0, "total": 12.0}]
    p = pr.pieces(uneven)
    assert (p.draft, p.verify, p.other, p.total) == pytest.approx((3.0, 10.0, 1.0, 14.0)) and (p.p20, p.p80) == (12.0, 16.0)


def test_noise_is_named():
    row = pr.Row("d", "off", 1, 0, pr.Pieces(0, 10, 0, 0, 9.0, 11.0), piece(), [Stats()], [Stats()])
    assert pr.noise([row]) is None and pr.summary([row]) == "no speed was measured: every text ended before a decode step"
    row.calibrated = pr.Pieces(0, 10, 0, 0, 9.0, 19.0)
    assert "rounds of one shape differ by 100 %" in pr.noise([row])


def test_halves_are_alike():
    own = read_sets(None)["prompts"]
    a, b = halves(own)
    assert len(a) == len(b) == 15 and {p.id for p in a + b} == {p.id for p in own}
    for part in (a[:6], b[:6]):
        assert len({p.category for p in part}) == 6
    assert halves([Prompt(str(i), "", "x") for i in range(5)])[0][-1].id == "4" and halves([]) == ([], [])


# ---- the calibration -----------------------------------------------------------------------------------------------------


def test_time_rounds_splits_every_round():
    target = load_target(PAIR[1])
    decoder = Decoder(target, load_draft(PAIR[3], target), tree="chain-3")
    waits = []
    stats = SynchronizedStats(lambda: waits.append(1))
    found = decoder.time_rounds([[3, 4, 5]], decoder.shapes[0], 6, stats)
    assert len(found) == 6 and stats.rounds == 6 and stats.drafted == 18
    assert len(waits) == 1 + 6 * 4, "prefill; draft, target, verify and extend of a round"
    for r in found:
        assert min(r.values()) > 0 and r["total"] == pytest.approx(sum(r[s] for s in ("draft", "target", "verify", "other")))
    plain = Decoder(target).time_rounds([[3, 4, 5], [6, 7]], OFF, 4)
    assert len(plain) == 4


def test_captured_cycles_are_calibrated_as_such():
    """GraphDecoder, whose cycles run eagerly here: means of runs give the round, rounds apart give its shares."""
    from fastverify.cli import probe_measure as pm
    from fastverify.eagle3.graph_decode import GraphDecoder
    target = load_target(PAIR[1])
    draft = load_draft(PAIR[3], target)
    settings = [pm.Setting("none", GraphDecoder(target, None, tree="off")), pm.Setting("d", GraphDecoder(target, draft, tree="chain-2"))]
    rows = pm.measure(settings, (PROMPTS[:2], PROMPTS[2:4]), pm.Plan(12, stop_ids=[], rounds=4))
    for row in rows:
        p = row.calibrated
        assert p.total > 0 and p.verify > 0 and row.equal == 4 and row.predicted(row.stats) > 0
    assert rows[1].calibrated.draft > 0 and rows[1].stats.drafted > 0


def test_searching_the_text_counts_as_drafting():
    from fastverify.tree.ngram import NgramDrafter

    class Slow(NgramDrafter):
        def pool(self, histories):
            import time
            time.sleep(0.02)
            return super().pool(histories)

    decoder = Decoder(load_target(PAIR[1]), Slow(num_draft=7), tree="tree-8")
    rounds = decoder.time_rounds([[3, 4, 5, 6] * 4], parse_shape("tree-8"), 3)
    assert all(r["draft"] >= 20 for r in rounds)


# ---- the command ------------------------------------------------------------------------------------------------------------


def test_every_drafter_in_one_table(cli, file):  # noqa: F811
    code, out, err = cli("probe", *PAIR, "--draft", "ngram", "--prompts", file, *RUN, "--json")
    data = json.loads(out)
    assert code == 0 and data["kind"] == "fastverify probe" and data["world_size"] == 1
    assert [(r["draft"], r["shape"]) for r in data["rows"]] == [
        ("none", "off"), *(("draft", s) for s in ("chain-2", "chain-3", "chain-5", "tree-8")), ("ngram", "tree-8")]
    assert data["prompts"] == {"halves": [3, 3]} and data["environment"]["command"]
    target = load_target(PAIR[1])
    first, second = halves([Prompt(str(i), "ab"[i % 2], "", ids) for i, ids in enumerate(PROMPTS)])
    for r in data["rows"]:
        decoder = Decoder(target, load_draft(PAIR[3], target), tree=r["shape"])
        if r["draft"] == "draft":
            runs = [decoder.generate([p.token_ids], 24, stop_ids=[]).stats for p in first + second]
            assert (r["accepted"], r["drafted"], r["rounds"]) == tuple(sum(getattr(s, k) for s in runs)
                                                                       for k in ("accepted", "drafted", "rounds"))
            for half, part in zip(r["halves"], (runs[:3], runs[3:])):
                assert half["tokens_per_round"] == pytest.approx(3 * 23 / sum(s.rounds for s in part))
            assert r["measured"]["tokens_per_round"] == pytest.approx(6 * 23 / sum(s.rounds for s in runs)) and r["tau_standard_error"] > 0
            assert r["verdict"].startswith(f"tau {r['tau']:.2f}") and len(r["per_depth"]) == decoder.shapes[0].levels
        ms = r["ms"]
        assert ms["round"] == pytest.approx(sum(ms[k] for k in ("draft", "verify", "communication", "other"))) and ms["verify"] > 0
        assert ms["communication"] == 0.0 and r["equal"] == r["prompts"] == 6
        assert r["break_even_tau"] == pytest.approx(ms["round"] / data["plain_ms"]["round"])
        assert r["predicted_tokens_per_second"] == pytest.approx(1e3 * r["measured"]["tokens_per_round"] / ms["round"])
        assert r["error"] == pytest.approx(r["predicted_tokens_per_second"] / r["measured"]["tokens_per_second"] - 1)
    assert data["rows"][0]["tau"] == data["rows"][0]["break_even_tau"] == 1.0 and data["rows"][0]["verdict"] is None
    ngram = data["rows"][-1]
    assert 0 < ngram["speculative_share"] <= 1
    assert data["summary"].startswith("fastest here: ")


def test_the_page(cli, file, tmp_path):  # noqa: F811
    result = tmp_path / "probe.json"
    code, out, err = cli("probe", *PAIR, "--prompts", file, "--tree", "chain-2", *RUN, "--out", result, "--batch", "2",
                         "--verify-ms", "0.001")
    assert code == 0 and f"written: {result}" in err and "\x1b" not in out
    data = json.loads(result.read_text())
    lines = out.splitlines()
    assert re.match(r"target on .* \(\d+ threads\), float32, batch 2, world size 1: plain step [\d.]+ ms \(p20 [\d.]+, p80 ", lines[0])
    assert lines[1] == ("6 prompts, 24 new tokens each. predicted: counted tokens per round over calibrated ms. other half: acceptance of 3 "
                        "prompts against the clock of the other 3")
    header = re.split(r"\s{2,}", lines[3])
    assert header == ["draft", "shape", "tau", "acc/drafted", "draft ms", "verify", "comm", "other", "round", "break-even",
                      "predicted", "measured", "error", "other half", "x plain", "equal"]
    assert lines[5].split()[:3] == ["draft", "chain-2", f"{data['rows'][1]['tau']:.2f}"] and lines[5].split()[-1] == "6/6"
    assert any(line.startswith("draft chain-2: tau ") and "with verify at 0.001 ms it would win" in line for line in lines)
    assert re.search(r"draft +shape +depth 1 +depth 2\ndraft +chain-2 +0\.\d\d +0\.\d\d \(0\.\d\d\)", out)
    assert "accepted at least so deep" in out and data["summary"] in out


def test_a_budget_of_time(cli, file):  # noqa: F811
    """The first pair always runs; no other one that would end too late begins."""
    code, out, err = cli("probe", *PAIR, "--prompts", file, "--tree", "chain-2", *RUN, "--seconds", "0.001", "--json")
    data = json.loads(out)
    assert code == 0 and data["prompts"] == {"halves": [1, 1]} and {r["prompts"] for r in data["rows"]} == {2}


def test_plain_alone(cli, file):  # noqa: F811
    code, out, err = cli("probe", *PAIR[:2], "--draft", "none", "--prompts", file, *RUN)
    assert code == 0 and "fastest here: plain decoding" in out and "depth 1" not in out


def test_prompts_that_do_not_fit(cli, tmp_path):  # noqa: F811
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([5, 6], [6, 7], [5] * 1100)))
    rest = ["--prompts", path, "--tree", "chain-2", *RUN]
    code, out, err = cli("probe", *PAIR, *rest)
    assert code == 0 and "1 prompts left out: longer than the 996 positions that 24 new tokens leave" in err
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([5, 6], [5] * 1100)))
    refused(cli("probe", *PAIR, *rest), "probe: each half of the prompts must hold one of at most 996 tokens; got none.")


def test_prompts_at_the_limit_run(cli, tmp_path):  # noqa: F811
    path = tmp_path / "edge.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [5] * 996}) + "\n" for _ in range(2)))
    assert cli("probe", *PAIR, "--prompts", path, "--tree", "chain-2", *RUN)[0] == 0


# ---- wrong input ------------------------------------------------------------------------------------------------------------


def refused(result: tuple, message: str) -> None:
    code, out, err = result
    assert code == 2 and out == "" and err.splitlines()[-1].startswith("fastverify: ") and "Traceback" not in err, err
    assert message in err and "Fix: " in err, err


@pytest.mark.parametrize("flags,message", [
    (["--limit", "1"], "probe: limit must be 0 (all) or at least 2, since half of the prompts predicts the other; got 1."),
    (["--limit", "-2"], "probe: limit must be 0 (all) or at least 2"),
    (["--batch", "0"], "probe: batch must be at least 1; got 0. Fix: change --batch."),
    (["--max-new-tokens", "4"], "probe: max_new_tokens must be at least 8, or there are no rounds to measure; got 4."),
    (["--verify-ms", "0"], "probe: verify_ms must be a finite number > 0; got 0.0."),
    (["--verify-ms", "nan"], "probe: verify_ms must be a finite number > 0; got nan."),
    (["--seconds", "-1"], "probe: seconds must be a finite number > 0; got -1.0. Fix: change --seconds."),
    (["--tree", "auto"], "probe: tree must be shapes that draft (plain decoding always runs beside them); got auto."),
    (["--tree", "chain-3,bush"], "tree: the shape must be off, auto, chain-K"),
    (["--draft", "ngram", "--draft", "ngram"], "probe: drafts must be different; got ngram twice."),
    (["--temperature", "-1"], "probe: temperature must be a finite number >= 0; got -1.0."),
    (["--out", "/nowhere/x.json"], "probe: the folder of the result file must exist; got /nowhere/x.json."),
    (["--prompts", "/nowhere.jsonl"], "probe: prompts must be a readable file; got /nowhere.jsonl"),
    (["--draft", "/nowhere"], "nowhere"),
])
def test_arguments(cli, file, flags, message):  # noqa: F811
    given = PAIR[:2] if "--draft" in flags else PAIR
    refused(cli("probe", *given, *(["--prompts", file] if "--prompts" not in flags else []), *flags), message)


def test_one_prompt_is_not_enough(cli, tmp_path):  # noqa: F811
    path = tmp_path / "one.jsonl"
    path.write_text('{"token_ids": [3, 4]}\n')
    refused(cli("probe", *PAIR, "--prompts", path), "probe: prompts must be at least 2, since half of them predicts the other; got 1.")
    path.write_text("{}\n")
    refused(cli("probe", *PAIR, "--prompts", path), "probe: every line of a prompt file must have `prompt` (text)")


def test_no_demo_model(cli):  # noqa: F811
    refused(cli("probe"), "probe: the demo model must be on this machine; got none. Fix: run `fastverify fetch-demo`")
