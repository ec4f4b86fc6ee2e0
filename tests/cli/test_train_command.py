"""fastverify train on the golden target: from prompts to a draft that loads, interrupted, remapped, spread over processes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from cli_fixtures import chatty, cli  # noqa: F401
from cli_run import COMMAND, GOLDEN, environment, heed_interrupts
from safetensors.torch import load_file

from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.train_data import Replies
from fastverify.eagle3.train_run import Job, run_job
from fastverify.models.load import load_target

TARGET, DRAFT = str(GOLDEN / "target"), str(GOLDEN / "draft")
FAST = ["--batch", "4", "--row", "48", "--ttt", "3", "--warmup", "3", "--eval-every", "6", "--ema", "0.9", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _threads():
    n = torch.get_num_threads()
    torch.set_num_threads(min(n, 2))
    yield
    torch.set_num_threads(n)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """40 prompts of 4 token ids."""
    path, rng = tmp_path_factory.mktemp("prompts") / "p.jsonl", np.random.default_rng(0)
    path.write_text("".join(json.dumps({"token_ids": rng.integers(3, 512, 4).tolist()}) + "\n" for _ in range(40)))
    return str(path)


@pytest.fixture(scope="module")
def replies(tmp_path_factory, prompts):
    """work/replies.npz of a run of one step over them."""
    from fastverify.cli.main import main
    out = tmp_path_factory.mktemp("first") / "run"
    assert main(["train", "--target", TARGET, "--prompts", prompts, "--out", str(out), "--max-new-tokens", "30", "--samples", "1",
                 "--generate-batch", "16", "--held", "0.1", "--steps", "1", *FAST]) == 0
    return str(out / "work/replies.npz")


def test_prompts_to_draft(cli, prompts, replies, tmp_path):  # noqa: F811
    """Replies are the target's; the draft loads, has the golden EAGLE-3 shape, default aux layers unstated, and learns."""
    r = Replies.load(replies)
    assert len(r.ids) >= 60 and set(r.greedy.tolist()) == {True, False} and 2 <= int(r.held.sum()) <= 4
    assert all(r.greedy[r.held]) and r.asst.flat[r.ids.off[:-1]].sum() == 0
    out = tmp_path / "run"
    code, text, err = cli("train", "--target", TARGET, "--replies", replies, "--out", out, "--steps", "40", "--lr", "3e-3",
                          "--head-lr", "3e-3", "--draft-vocab-size", "480", *FAST)
    assert code == 0 and text.splitlines()[-1].startswith(f"draft: {out} (fastverify inspect")
    assert "conversations" in err and "step 0: held-out agreement by depth" in err and "step 40: held-out" in err
    raw = json.loads((out / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and "eagle_config" not in raw and raw["draft_vocab_size"] == 480
    draft = load_draft(out, load_target(TARGET))
    assert draft.config.aux_layers == (2, 4, 5) and draft.config.sources["aux_layers"].startswith("default (2, L//2, L-3)")
    assert set(load_file(out / "model.safetensors")) == set(load_file(GOLDEN / "draft/model.safetensors"))
    curves, record = (json.loads((out / n).read_text()) for n in ("curves.json", "training_record.json"))
    assert record["steps"] == record["planned_steps"] == 40 and record["data"]["coverage"] > 0.9 and record["hardware"] == "1 x CPU"
    assert [p["step"] for p in curves["eval"]] == [0, 6, 12, 18, 24, 30, 36, 40] and len(curves["eval"][0]["conditional"]) == 5
    assert curves["train"][-1]["loss"] < curves["train"][0]["loss"]
    assert cli("inspect", out, "--target", TARGET)[0] == 0
    assert cli("train", "--target", TARGET, "--replies", replies, "--out", out, "--steps", "2")[0] == 2  # never over a run


def test_resumed_run_is_bit_equal(cli, replies, tmp_path):  # noqa: F811
    """Stopped by --seconds before its first step, and between two steps, then resumed: the same bytes as one run."""
    args = ["--target", TARGET, "--replies", replies, "--steps", "12", "--acceptance-loss", "0.2", *FAST]
    assert cli("train", "--out", tmp_path / "one", *args)[0] == 0
    code, text, err = cli("train", "--out", tmp_path / "two", "--seconds", "0.001", *args)
    first = torch.load(tmp_path / "two/work/checkpoint.pt", weights_only=True)["step"]
    assert code == 0 and first < 12 and f"stopped at step {first} of 12; go on with: fastverify train --out" in err and text == ""
    asked = iter([False] * 5 + [True])
    result = run_job(Job.load(str(tmp_path / "two")), stop=lambda: next(asked))
    assert not result.finished and result.step == first + 5
    code, _, err = cli("train", "--out", tmp_path / "two", "--resume")
    assert code == 0 and f"resumed at step {first + 5} of 12" in err
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    a, b = (torch.load(tmp_path / n / "work/checkpoint.pt", weights_only=True) for n in ("one", "two"))
    assert all(torch.equal(x, b["net"][k]) for k, x in a["net"].items())
    assert [p["step"] for p in a["curve"]["eval"]] == [p["step"] for p in b["curve"]["eval"]]


@pytest.mark.parametrize("name", ["checkpoint.pt", "replies.npz"])
@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04nothing", None])
def test_a_run_whose_files_were_damaged(cli, replies, tmp_path, name, damage):  # noqa: F811
    """One line that names the file; without the file the run goes on."""
    out = tmp_path / "run"
    assert cli("train", "--target", TARGET, "--replies", replies, "--out", out, "--seconds", "0.001", "--steps", "2", *FAST)[0] == 0
    path = out / "work" / name
    path.write_bytes(path.read_bytes()[:-400] if damage is None else damage)
    code, text, err = cli("train", "--out", out, "--resume")
    assert (code, text) == (2, "") and f"train: {path} must be as the interrupted run wrote it; got " in err and "Fix: delete it" in err
    path.unlink()
    assert cli("train", "--out", out, "--resume")[0] == 0


def test_a_signal_leaves_a_whole_checkpoint(replies, tmp_path):
    out = tmp_path / "run"
    args = [*COMMAND, "train", "--target", TARGET, "--replies", replies, "--out", str(out), "--steps", "100000",
            "--save-seconds", "0.05", *FAST]
    process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=heed_interrupts)
    deadline = time.time() + 60
    while not (out / "work/checkpoint.pt").exists() and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "interrupted; the checkpoint is whole" in err and "go on with: fastverify train" in err
    assert torch.load(out / "work/checkpoint.pt", weights_only=True)["step"] > 0
    assert not list((out / "work").glob("*.part"))


def test_init_and_remap(cli, replies, tmp_path):  # noqa: F811
    """--init starts where the golden draft is; --remap-vocab says what it moved and starts there too; without --init, nowhere."""
    starts = {}
    for name, more in (("init", ["--init", DRAFT]), ("remap", ["--init", DRAFT, "--remap-vocab", "--draft-vocab-size", "496"]),
                       ("none", [])):
        out = tmp_path / name
        code, _, err = cli("train", "--target", TARGET, "--replies", replies, "--out", out, "--steps", "1", "--lr", "1e-6",
                           "--head-lr", "1e-6", *more, *FAST)
        assert code == 0 and ("remapped: kept" in err) == (name == "remap"), err
        starts[name] = json.loads((out / "curves.json").read_text())["train"][0]["ce"][0]
        record = json.loads((out / "training_record.json").read_text())
        assert record["init"] == ("draft" if more else None)
    assert load_draft(tmp_path / "remap", load_target(TARGET)).config.draft_vocab_size == 496
    assert starts["remap"] == pytest.approx(starts["init"], rel=0.02) and starts["none"] > starts["init"] + 1


def test_two_processes_are_one_with_twice_the_batch(cli, replies, tmp_path):  # noqa: F811
    """torchrun, gloo: gradients are sums over all tokens of the step, so that only the order of additions differs."""
    args = ["--target", TARGET, "--replies", replies, "--steps", "5", *FAST]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29531", "-m", "fastverify"]
    done = subprocess.run([*run, "train", "--out", str(tmp_path / "two"), *args, "--batch", "3"], capture_output=True, text=True,
                          env=environment(OMP_NUM_THREADS="1"), timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert cli("train", "--out", tmp_path / "one", *args, "--batch", "6")[0] == 0
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    for k, v in a.items():
        torch.testing.assert_close(b[k].float(), v.float(), rtol=1e-3, atol=1e-4, msg=k)
    record = json.loads((tmp_path / "two/training_record.json").read_text())
    assert record["hardware"] == "2 x CPU" and record["tokens_seen"] == 5 * 6 * 48


def test_texts_go_through_the_chat_template(cli, chatty, tmp_path):  # noqa: F811
    """Two turns become one conversation; the stop id, digits and the template's special ids are in the draft vocabulary."""
    (tmp_path / "chat.jsonl").write_text('{"turns": ["hello world", "the sky?"]}\n{"prompt": "is it blue"}\n' * 6)
    out = tmp_path / "run"
    code, _, err = cli("train", "--target", chatty, "--prompts", tmp_path / "chat.jsonl", "--out", out, "--steps", "1", "--samples", "0",
                       "--max-new-tokens", "12", "--held", "0.2", "--draft-vocab-size", "200", *FAST[:-2], "--row", "96",
                       "--device", "cpu")
    assert code == 0, err
    r = Replies.load(str(out / "work/replies.npz"))
    assert r.names == ["chat"] and all(r.ids[i][0] == 1 for i in range(len(r.ids)))  # <|im_start|>
    t2d = load_file(out / "model.safetensors")["t2d"]
    assert bool(t2d[[1, 2]].all()) and int(t2d.sum()) == 200


def test_wrong_input(cli, prompts, replies, tmp_path):  # noqa: F811
    out, new = tmp_path / "out", ["--target", TARGET, "--out", tmp_path / "out"]
    text, empty, junk = tmp_path / "t.jsonl", tmp_path / "e.jsonl", tmp_path / "junk.npz"
    text.write_text('{"prompt": "hello"}\n')
    empty.write_text("\n")
    junk.write_bytes(b"PK\x03\x04nothing")
    cases = [
        (["--out", out], "train: --target must be given for a new run; got none."),
        (new, "train: one of --prompts and --replies must be given; got neither."),
        ([*new, "--prompts", prompts, "--replies", replies], "got both."),
        ([*new, "--replies", replies, "--remap-vocab"], "train: --remap-vocab must go with --init"),
        ([*new, "--replies", replies, "--init", DRAFT, "--draft-vocab-size", "9"], "train: --draft-vocab-size with --init must go with"),
        ([*new, "--replies", replies, "--steps", "0"], "train: steps must be at least 1; got 0. Fix: change --steps."),
        ([*new, "--replies", replies, "--temperatures", "0.9", "0.8"], "train: temperatures must be two numbers above 0 in rising order; got"),
        ([*new, "--replies", replies, "--min-p", "1.5"], "train: min_p must be in [0, 1]; got 1.5. Fix: change --min-p."),
        ([*new, "--replies", replies, "--lr", "0"], "train: lr must be above 0; got 0.0."),
        ([*new, "--replies", replies, "--draft-vocab-size", "600"], "train: --draft-vocab-size must be 1..512"),
        ([*new, "--replies", tmp_path / "none.npz"], "train: --replies must be the replies.npz of an earlier run; got"),
        ([*new, "--replies", junk], "train: --replies must be the replies.npz of an earlier run; got"),
        ([*new, "--prompts", text], "train: prompts must be token_ids where the target brings no tokenizer; got texts."),
        ([*new, "--prompts", empty], "train: --prompts must hold prompts that fit; got none of at most"),
        ([*new, "--prompts", tmp_path / "none"], "train: --prompts must be a readable file; got"),
        ([*new, "--replies", replies, "--init", tmp_path], "config.json"),
        (["--out", out, "--resume", "--steps", "3"], "train: --resume goes on with the settings that the run had; got --steps."),
        (["--out", tmp_path / "nothing", "--resume"], "settings.json of an earlier run; got FileNotFoundError."),
        (["--target", TARGET, "--replies", replies, "--out", text], "train: --out must be a folder; got the file"),
    ]
    for i, (args, message) in enumerate(cases):
        args = [tmp_path / f"out{i}" if a == out else a for a in args]
        code, stdout, err = cli("train", *args, *(() if "--steps" in args or "--resume" in args else ("--steps", "1")))
        last = err.strip().splitlines()[-1]
        assert (code, stdout) == (2, "") and message in last and "Fix: " in last, (args, err)


def test_only_plain_drafts_are_trained_on(tmp_path):
    """What the trainer would not unroll as it is served is refused, with what it found."""
    from fastverify.eagle3.train_net import load_draft as trainable
    raw, tensors = json.loads((GOLDEN / "draft/config.json").read_text()), load_file(GOLDEN / "draft/model.safetensors")
    from safetensors.torch import save_file
    cases = {"norm_output": ({"norm_output": True}, {}), "q_proj.bias": ({}, {f"midlayer.self_attn.{x}_proj.bias": torch.zeros(n)
                                                                             for x, n in (("q", 64), ("k", 32), ("v", 32))}),
             "RoPE scaling linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {})}
    for name, (keys, more) in cases.items():
        folder = tmp_path / name
        os.makedirs(folder)
        (folder / "config.json").write_text(json.dumps(raw | keys))
        save_file(tensors | more, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"train: the draft to start from must be a plain EAGLE-3 layer.*{name}"):
            trainable(folder)
