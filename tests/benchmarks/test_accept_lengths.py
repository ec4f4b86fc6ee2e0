"""benchmarks/loop/accept_lengths.py: counts by set in one continuous batch are those of every set alone."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from fastverify import Decoder, SamplingParams, load_draft, load_target

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
SETS = {"one": [[3, 4, 5], [9, 80, 81, 300, 7]], "two": [[100 + i for i in range(9)], [11], [500, 2, 17]]}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("accept_lengths", ROOT / "benchmarks" / "loop" / "accept_lengths.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("batch", [2, 5])
def test_counts_by_set(script, tmp_path, batch):
    files = []
    for name, prompts in SETS.items():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
    runs, out = (("tree-8", 0.0, True), ("chain-3", 0.8, True), ("tree-8", 0.8, False)), tmp_path / "out.json"
    names = ",".join(f"{s}@{t:g}" + ("" if c else ":off") for s, t, c in runs)
    assert script.main(["--target", str(GOLDEN / "target"), "--draft", str(GOLDEN / "draft"), "--prompts", *map(str, files), "--runs", names,
                        "--max-new-tokens", "12", "--batch", str(batch), "--seed", "4", "--device", "cpu", "--agreement", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [(r["tree"], r["temperature"], r["set"]) for r in data["rows"]] == [(s, t, n) for s, t, _ in runs for n in SETS]
    target = load_target(GOLDEN / "target")
    draft = load_draft(GOLDEN / "draft", target)
    for row in data["rows"]:
        d = Decoder(target, draft, tree=row["tree"], coupled=row["coupled"])
        s = d.generate(SETS[row["set"]], 12, SamplingParams(temperature=row["temperature"], seed=4)).stats
        assert (row["rounds"], row["accepted"], row["drafted"], row["tau"]) == (s.rounds, s.accepted, s.drafted, s.tau)
        assert row["prompts"] == row["same"] == len(SETS[row["set"]]) and 0 < row["distinct_4gram_ratio"] <= 1
    assert set(data["agreement"]) == set(SETS) and all(0 <= v["depth_1"] <= 1 for v in data["agreement"].values())


def test_imposed_text(script, tmp_path):
    """The text of the first run of a temperature is emitted by the others, whatever the seed; counts follow it."""
    file, out = tmp_path / "one.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in SETS["two"]))

    def rows(*extra) -> list:
        script.main(["--target", str(GOLDEN / "target"), "--draft", str(GOLDEN / "draft"), "--prompts", str(file), "--runs",
                     "tree-8@0,tree-8@0.8,tree-8@0.8,chain-3@0.8,tree-8@0.8:off,chain-3@0", "--max-new-tokens", "14", "--batch", "2",
                     "--device", "cpu", "--json", str(out), *extra])
        return json.loads(out.read_text())["rows"]

    plain, imposed = rows(), rows("--same-text")  # float32 on a CPU: the text is the same in any case
    assert all(r["same"] == 3 for r in plain + imposed)
    for a, b in zip(plain, imposed):
        assert (a["rounds"], a["accepted"], a["varied"], a["per_depth"]) == (b["rounds"], b["accepted"], b["varied"], b["per_depth"])
    session, args = script.open_session("x", argparse.Namespace(target=str(GOLDEN / "target"), draft=str(GOLDEN / "draft"), device="cpu",
                                                                dtype="float32", threads=None), script.Output(json_only=True), False), \
        argparse.Namespace(batch=2, max_new_tokens=9, seed=1)
    want = {"two": [[7, 8, 9, 10], [400, 7], [5] * 9]}
    _, texts, _ = script.decode(session, {"two": SETS["two"]}, "tree-8", 0.8, True, args, want)
    for got, text in zip(texts["two"], want["two"]):
        assert got[1:len(text)] == text[1:]  # the first token comes from the prompt's own forward


def test_runs_are_read_or_refused(script):
    assert script.parse_run("tree-60@0.8:off") == ("tree-60", 0.8, False) and script.parse_run("chain-3") == ("chain-3", 0.0, True)
    for text in ("tree-60@0.8:on", "bush-3@0"):
        with pytest.raises(ValueError, match="shape must be|a run must be"):
            script.parse_run(text)
