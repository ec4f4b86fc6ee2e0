"""fastverify evaluate: prompt files, rows, equality with plain decoding; the numbers behind them."""

import json
import re

import numpy as np
import pytest
import torch
from cli_run import GOLDEN, PAIR
from safetensors.torch import load_file

from fastverify import Decoder, SamplingParams, load_draft, load_target, load_tokenizer
from fastverify.cli import report
from fastverify.cli.difference import first_difference, last_logits
from fastverify.cli.prompts import OWN, read_prompts
from fastverify.eagle3.shapes import Controller, parse_shape
from fastverify.eagle3.stats import Stats
from fastverify.reference.noise import gumbel
from cli_fixtures import chatty, cli  # noqa: F401

PROMPTS = [[3, 4, 5], [9, 8], [9, 8, 7, 100], [50, 60, 70], [11]]


@pytest.fixture(scope="module")
def pair():
    target = load_target(GOLDEN / "target")
    return target, load_draft(GOLDEN / "draft", target)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ids.jsonl"
    lines = [{"id": f"p{i}", "category": "ab"[i % 2], "token_ids": ids} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- the command ----------------------------------------------------------------------------------------------------


def test_rows_hold_the_decoders_numbers(cli, pair, file):
    target, draft = pair
    code, out, _ = cli("evaluate", *PAIR, "--prompts", file, "--tree", "chain-2,tree-8", "--max-new-tokens", "30", "--ignore-eos",
                       "--json", "-")
    data = json.loads(out)
    assert code == 0 and [r["tree"] for r in data["rows"]] == ["chain-2", "tree-8"] and data["batch"] == 1
    for row in data["rows"]:
        runs = [Decoder(target, draft, tree=row["tree"]).generate([ids], 30, stop_ids=[]).stats for ids in PROMPTS]
        assert row["set"] == "ids" and row["prompts"] == 5 and row["emitted"] == 150 and row["auto"] == {}
        for name in ("rounds", "accepted", "drafted"):
            assert row[name] == sum(getattr(r, name) for r in runs) > 0
        assert row["tau"] == pytest.approx(1 + row["accepted"] / row["rounds"])
        assert row["depth_1"] == pytest.approx(sum(r.at_depth[0] for r in runs) / row["rounds"])
        assert row["per_depth"][0]["unconditional"] == row["depth_1"] > row["per_depth"][1]["unconditional"]
        assert 0 < row["distinct_4gram_ratio"] <= 1


@pytest.mark.parametrize("flags", [[], ["--temperature", "0.8", "--top-p", "0.95", "--seed", "5"]])
@pytest.mark.parametrize("draft", [PAIR[3], "ngram"])
def test_compare_plain_in_batches(cli, file, flags, draft):
    code, out, _ = cli("evaluate", *PAIR[:2], "--draft", draft, "--prompts", file, "--tree", "tree-8,auto", "--batch", "2",
                       "--max-new-tokens", "24", "--ignore-eos", "--compare-plain", *flags)
    assert code == 0
    lines = out.splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["set", "tree", "prompts", "tau", "acc/drafted", "depth 1", "4-grams", "tok/s",
                                             "plain", "x plain", "even at", "equal"]
    for line, tree in zip(lines[1:3], ("tree-8", "auto")):
        assert line.split()[:3] == ["ids", tree, "5"] and line.split()[-1] == "5/5"
    assert lines[3] == "every text equals plain decoding token for token" and "\x1b" not in out


def test_written_file_categories_and_limit(cli, file, tmp_path):
    result = tmp_path / "out.json"
    code, out, err = cli("evaluate", *PAIR, "--prompts", file, "--by-category", "--limit", "2", "--tree", "chain-2",
                         "--max-new-tokens", "8", "--json", result, "--compare-plain")
    data = json.loads(result.read_text())
    assert code == 0 and f"written: {result}" in err and "tok/s" in out
    assert [(r["set"], r["prompts"]) for r in data["rows"]] == [("ids/a", 2), ("ids/b", 2)]
    row = data["rows"][0]
    assert row["equal"] == 2 and row["differences"] == [] and row["plain"]["steps"].keys() == {"off"} and row["verdict"]
    assert data["environment"]["command"].startswith("fastverify evaluate --target ") and data["environment"]["device"]


def test_differences_are_counted_and_listed_with_their_margins(cli, file, monkeypatch):
    """Token 4 of every speculative text is replaced before the comparison."""
    from fastverify.cli import evaluation
    real = evaluation.first_difference
    monkeypatch.setattr(evaluation, "first_difference", lambda target, ids, plain, spec, *rest: real(
        target, ids, plain, spec[:4] + [7] + spec[5:], *rest))
    code, out, _ = cli("evaluate", *PAIR, "--prompts", file, "--tree", "chain-2", "--max-new-tokens", "12", "--ignore-eos",
                       "--compare-plain")
    assert code == 0 and out.splitlines()[1].split()[-1] == "0/5" and "every text equals" not in out
    line = r"^ids chain-2, prompt p\d: first difference at token 4: plain token \d+, speculative token 7, margin [\d.e-]+$"
    assert len(re.findall(line, out, re.M)) == 5


def test_prompts_that_do_not_fit_are_left_out(cli, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"token_ids": [5] * 1000}) + "\n" + json.dumps({"token_ids": [5, 6]}) + "\n")
    rest = ["--prompts", path, "--tree", "chain-2", "--max-new-tokens", "30"]
    code, out, err = cli("evaluate", *PAIR, *rest)
    assert code == 0 and "long: 1 of 2 prompts left out (up to 1000 + 30 tokens in 1020 positions)" in err
    assert out.splitlines()[1].split()[2] == "1"
    path.write_text(json.dumps({"token_ids": [5] * 1000}) + "\n")
    code, out, err = cli("evaluate", *PAIR, *rest)
    assert code == 2 and out == "" and "evaluate: at least one prompt must fit into 1020 positions; got none." in err


def test_prompts_at_the_limit_run(cli, tmp_path):
    """The room is exact: one more position is refused by the decoder itself."""
    path = tmp_path / "edge.jsonl"
    path.write_text(json.dumps({"token_ids": [5] * 990}) + "\n")
    assert cli("evaluate", *PAIR, "--prompts", path, "--tree", "chain-2", "--max-new-tokens", "30")[0] == 0
    code, _, err = cli("generate", *PAIR, "--token-ids", ",".join(["5"] * 991), "--tree", "chain-2", "--max-new-tokens", "30")
    assert code == 2 and "must be at most 1024 positions" in err


def test_text_prompts_use_the_chat_template(cli, chatty, tmp_path, pair):
    path = tmp_path / "text.jsonl"
    path.write_text('{"question_id": 4, "category": "", "turns": ["hello world", "more"], "reference": ["x"]}\n\n'
                    '{"prompt": "the sky"}\n')
    prompts = read_prompts(path)
    assert [(p.id, p.text) for p in prompts] == [("4", "hello world"), ("3", "the sky")]
    code, out, _ = cli("evaluate", "--target", chatty, *PAIR[2:], "--prompts", path, "--tree", "chain-2",
                       "--max-new-tokens", "8", "--ignore-eos", "--json", "-")
    (row,) = json.loads(out)["rows"]
    tok, (target, draft) = load_tokenizer(chatty), pair
    ids = [tok.apply_chat_template([{"role": "user", "content": p.text}]) for p in prompts]
    runs = [Decoder(target, draft, tree="chain-2").generate([i], 8, stop_ids=[]).stats for i in ids]
    assert code == 0 and row["prompts"] == 2 and row["rounds"] == sum(r.rounds for r in runs)


@pytest.mark.parametrize("content,message", [
    (None, "evaluate: prompts must be a readable file; got"),
    ("", "evaluate: prompts must hold at least one line; got none in"),
    ("{", "evaluate: every line of a prompt file must be a JSON object; got"),
    ('{"prompt": "a"}\n[1]', "got none of them in {path}, line 2. Fix: mend the line."),
    ('{"prompt": ""}', "evaluate: every line of a prompt file must have `prompt` (text), `turns` (texts) or `token_ids` ("),
    ('{"turns": []}', "got none of them in {path}, line 1."),
    ('{"token_ids": [1, "2"]}', "got none of them in {path}, line 1."),
])
def test_bad_prompt_files(cli, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    code, out, err = cli("evaluate", *PAIR, "--prompts", path)
    assert code == 2 and out == "" and err.count("\n") == 1 and message.format(path=path) in err


@pytest.mark.parametrize("flags,message", [
    (["--tree", "chain-2,bush"], "got 'bush'"),
    (["--limit", "0"], "evaluate: limit must be at least 1; got 0. Fix: change --limit."),
    (["--batch", "-1"], "evaluate: batch must be at least 1; got -1."),
    (["--temperature", "-1"], "evaluate: temperature must be a finite number >= 0; got -1.0."),
    (["--json", "/no/such/folder/x.json"], "evaluate: the folder of the result file must exist; got /no/such/folder/x.json."),
    (["--draft", "none"], "evaluate: a draft must be given for shapes other than off; got --draft none. Fix: add --tree off."),
])
def test_bad_arguments(cli, file, flags, message):
    code, out, err = cli("evaluate", *PAIR, "--device", "cpu", "--prompts", file, *flags)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err


def test_same_name_twice_is_refused(cli, file):
    code, _, err = cli("evaluate", *PAIR, "--prompts", file, file)
    assert code == 2 and "evaluate: prompt files must have different names; got ids twice." in err


def test_our_own_prompts():
    """30 prompts, six styles of five, all different, ids unique, plain ASCII."""
    prompts = read_prompts(OWN)
    assert len(prompts) == 30 == len({p.id for p in prompts}) == len({p.text for p in prompts})
    counts = {c: sum(p.category == c for p in prompts) for c in {p.category for p in prompts}}
    assert counts == dict.fromkeys(("chat", "math", "code", "instruction", "factual", "summary"), 5)
    for line in OWN.read_text().splitlines():
        assert set(json.loads(line)) == {"id", "category", "prompt"} and line.isascii()


# ---- margins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 7, 512])
def test_last_logits_are_the_targets(pair, chunk):
    """Against logits recorded from the trainer's own network."""
    recorded = load_file(GOLDEN / "reference.safetensors")
    for n in (1, 2, 17, 25):
        got = last_logits(pair[0], recorded["ids"][0, :n].tolist(), chunk)
        np.testing.assert_allclose(got, recorded["target_logits"][0, n - 1].double().numpy(), atol=2e-4)


def test_greedy_margin_is_the_gap_of_the_two_logits(pair):
    target, prompt = pair[0], [3, 4, 5]
    plain = Decoder(target).generate([prompt], 12, stop_ids=[]).tokens[0]
    row = last_logits(target, prompt + plain[:6])
    second = int(np.argsort(-row)[1])
    assert int(np.argmax(row)) == plain[6]
    found = first_difference(target, prompt, plain, plain[:6] + [second] + plain[7:], SamplingParams(), 0)
    assert (found.index, found.plain, found.spec) == (6, plain[6], second)
    assert found.margin == pytest.approx(row[plain[6]] - row[second])
    assert str(found).startswith(f"first difference at token 6: plain token {plain[6]}, speculative token {second}, margin ")


def test_sampled_margin_is_the_gap_of_the_perturbed_scores(pair):
    target, prompt, seed = pair[0], [3, 4, 5], 11
    params = SamplingParams(temperature=0.9, seed=seed)
    plain = Decoder(target).generate([prompt], 12, params, stop_ids=[]).tokens[0]
    score = last_logits(target, prompt + plain[:6]) / 0.9 + gumbel(np.arange(512), len(prompt) + 6, seed)
    second = int(np.argsort(-score)[1])
    assert int(np.argmax(score)) == plain[6], "the noise of that position and seed"
    found = first_difference(target, prompt, plain, plain[:6] + [second] + plain[7:], params, seed)
    assert found.margin == pytest.approx(score[plain[6]] - score[second])


def test_margin_at_a_filter_cut(pair):
    """A token that a cut excludes is as far away as the cut is, whatever its score."""
    target, prompt = pair[0], [3, 4, 5]
    row = last_logits(target, prompt)
    order = np.argsort(-row)
    params = SamplingParams(temperature=1.0, top_k=2)
    found = first_difference(target, prompt, [int(order[0])], [int(order[2])], params, 0)
    assert found.margin == pytest.approx(row[order[1]] - row[order[2]])


def test_margin_counts_penalties(pair):
    target, prompt = pair[0], [3, 4, 5]
    plain = [7, 7, 7]
    row = last_logits(target, prompt + plain[:2])
    other = int(np.argmax(row))
    other = other if other != 7 else int(np.argsort(-row)[1])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    x7 = (row[7] / 2 if row[7] > 0 else row[7] * 2) - 2 * 0.25 - 0.5
    assert first_difference(target, prompt, plain, [7, 7, other], params, 0).margin == pytest.approx(abs(x7 - row[other]))


def test_equal_texts_and_texts_of_two_lengths(pair):
    assert first_difference(pair[0], [3], [4, 5], [4, 5], SamplingParams(), 0) is None
    found = first_difference(pair[0], [3], [4, 5], [4, 5, 6], SamplingParams(), 0)
    assert (found.index, found.plain, found.spec, found.margin) == (2, None, 6, None) and "plain the end" in str(found)


# ---- numbers and words ---------------------------------------------------------------------------------------------------


def stats(tokens: int, steps: int, ms: float, accepted: int = 0, drafted: int = 0) -> Stats:
    s = Stats(rounds=steps, spec_rounds=steps if drafted else 0, emitted=tokens, first_tokens=1, drafted=drafted,
              accepted=accepted, decode_ms=ms)
    s.steps["chain-3" if drafted else "off"] = steps
    return s


@pytest.mark.parametrize("spec,words", [
    (stats(101, 50, 1000.0, 50, 150), "tau 2.00 > break-even 1.00: speculation wins by 100 % here"),
    (stats(101, 64, 2000 * 100 / 60, 37, 192), "tau 1.58 < break-even 2.60: speculation loses 40 % here"),
    (stats(101, 50, 1990.0, 50, 150), "tau 2.00 > break-even 1.99: speculation changes nothing here (+0.5 %)"),
    (stats(101, 100, 2500.0),
     "nothing was drafted: both runs are plain decoding (their speeds differ by -20.0 %, which is noise)"),
    (stats(1, 0, 0.0), "no verdict: the text ended before a decode step"),
    (stats(81, 50, 2100.0, 60, 150),
     "tau 2.20 > break-even 2.10 (tau counts tokens that the end of the text cut off): speculation loses 24 % here"),
])
def test_verdict(spec, words):
    assert report.verdict(stats(101, 100, 2000.0), spec) == words


def test_merge_adds_up():
    runs = [Stats(rounds=3, spec_rounds=2, emitted=7, first_tokens=1, drafted=9, accepted=4, at_depth=[2, 1],
                  offered=[2, 2], decode_ms=5.0),
            Stats(rounds=1, spec_rounds=1, emitted=2, first_tokens=1, drafted=3, accepted=1, at_depth=[1], offered=[1],
                  decode_ms=2.0, controller="why")]
    for r, n in zip(runs, (3, 1)):
        r.steps["chain-3"], r.ms["draft"] = n, 1.5
    total = report.merge(runs)
    assert (total.rounds, total.emitted, total.drafted, total.accepted, total.decode_ms) == (4, 9, 12, 5, 7.0)
    assert total.at_depth == [3, 1] and total.offered == [3, 2] and total.steps == {"chain-3": 4} and total.ms["draft"] == 3.0
    assert total.controller == "why" and total.tau == 9 / 4 and total.per_depth()[1] == (2, 1 / 3, 1 / 3)
    assert runs[0].at_depth == [2, 1], "the runs are left alone"


def test_auto_line_says_why():
    shapes = tuple(parse_shape(s) for s in ("off", "chain-2", "tree-8"))
    controller = Controller(shapes, {"off": 10.0, "chain-2": 25.0, "tree-8": 40.0})
    controller.accepted["chain-2"] = [0.75, 100]
    assert report.considered(controller)["chain-2"] == {"tau": 1.75, "break_even": 2.5}
    line = report.auto_line(stats(101, 100, 1000.0), controller)
    assert re.fullmatch(r"auto: off x 100; expected tau/break-even: chain-2 1\.75/2\.50, tree-8 \d\.\d\d/4\.00", line)
    assert report.considered(None) == {}


def test_plain_table_aligns():
    from fastverify.cli.output import plain_table
    assert plain_table(["a", "bb"], [["ccc", "1"], ["", "22.5"]]) == ["a      bb", "ccc     1", "     22.5"]


def test_seed_of_a_request_is_its_place_in_the_batch(pair, monkeypatch):
    """The margin of request b uses seed + b, as the decoder does."""
    from fastverify.cli import evaluation
    from fastverify.cli.session import Session
    seen = []
    monkeypatch.setattr(evaluation, "first_difference", lambda target, ids, plain, spec, params, seed: seen.append(seed))
    session = Session(*pair, None, "", "", torch.device("cpu"), [])
    settings = evaluation.Settings(("chain-2",), 4, 2, True, SamplingParams(seed=40), [])
    evaluation.evaluate(session, "x", [(str(i), ids) for i, ids in enumerate(PROMPTS)], settings)
    assert seen == [40, 41, 40, 41, 40]
