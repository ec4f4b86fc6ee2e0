"""Remapping a draft to another vocabulary: rows follow their ids, losses stay, and every wrong input has its sentence."""

import json

import numpy as np
import pytest
import torch
from golden_drafts import GOLDEN, V, VD, command, config, ids_of, other_ids, tensors, with_map, write  # noqa: F401
from safetensors.torch import load_file, save_file

from fastverify.cli.prompts import OWN, read_prompts
from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.remap import remap_draft, remap_vocab
from fastverify.eagle3.target_facts import read_target
from fastverify.eagle3.train_generate import Generator
from fastverify.eagle3.train_loss import teach, ttt_loss
from fastverify.eagle3.train_net import Eagle3Draft, load_target
from fastverify.eagle3.train_net import load_draft as load_trainable
from fastverify.eagle3.train_run import remapped
from fastverify.models.demo import SHIPPED_DRAFT, demo_target_path
from fastverify.models.load import load_tokenizer

TARGET = GOLDEN / "target"


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return read_target(TARGET).lm_head_weight


# ---- rows follow their ids ----------------------------------------------------------------------------------------------


def test_shuffled_and_back_gives_identical_logits(rng):
    """A -> a permutation of A's ids -> A: the same head; and in between, each id has the logit that it had."""
    a, x = tensors(), torch.randn(7, 64, generator=rng)
    ids = ids_of(a)
    shuffled = ids[torch.randperm(VD, generator=rng)]
    b, counts = remap_vocab(a, shuffled, V)
    fixed = int((shuffled == ids).sum())
    assert (counts.kept, counts.moved, counts.new, counts.dropped) == (fixed, VD - fixed, 0, 0)
    assert torch.equal(ids_of(b), shuffled) and torch.equal(b["t2d"], a["t2d"]) and b["d2t"].dtype == torch.int64
    wide = lambda t: torch.zeros(7, V).index_copy_(1, ids_of(t), x @ t["lm_head.weight"].T)  # noqa: E731
    assert torch.equal(wide(a), wide(b))
    back, counts = remap_vocab(b, ids, V)
    assert all(torch.equal(back[k], a[k]) for k in a) and counts.kept == fixed


def test_other_ids_keep_the_logits_of_shared_ids(head, rng):
    a, ids, x = tensors(), other_ids(), torch.randn(7, 64, generator=rng)
    b, counts = remap_vocab(a, ids, V, head)
    assert counts.kept + counts.moved + counts.new == VD and (counts.new, counts.dropped) == (32, 32)
    shared = torch.isin(torch.arange(V), ids_of(a)) & torch.isin(torch.arange(V), ids)
    wide = lambda t: torch.zeros(7, V).index_copy_(1, ids_of(t), x @ t["lm_head.weight"].T)[:, shared]  # noqa: E731
    assert int(shared.sum()) == 448 and torch.equal(wide(a), wide(b))
    back, _ = remap_vocab(b, ids_of(a), V, head)
    known = torch.isin(ids_of(a), ids)
    assert torch.equal(back["lm_head.weight"][known], a["lm_head.weight"][known])
    assert sorted(k for k in a if not torch.equal(a[k], b[k])) == ["d2t", "lm_head.weight", "t2d"]


def test_new_rows_are_the_targets_scaled_to_the_kept_ones(head):
    """One factor and one shift, measured on the ids that both know: rms over rms, and the mean change of their rows."""
    a, ids = tensors(), other_ids()
    b, counts = remap_vocab(a, ids, V, 10 * head)
    old = ids_of(a)
    known = torch.isin(old, ids)
    rms = lambda x: x.square().mean().sqrt().item()  # noqa: E731
    assert counts.scale == pytest.approx(rms(a["lm_head.weight"][known]) / rms(10 * head[old[known]]), rel=1e-6)
    new = ~torch.isin(ids, old)
    shift = (a["lm_head.weight"][known] - 10 * counts.scale * head[old[known]]).mean(0)
    assert torch.allclose(b["lm_head.weight"][new], head[ids[new]] * 10 * counts.scale + shift, atol=1e-5) and counts.shifted
    assert str(counts).endswith(f"new 32 (from the target's head, times {counts.scale:.3g}, shifted); dropped 32")
    few, counts = remap_vocab(a, torch.cat([old[:9], ids[new]]), V, head)  # nine rows have no mean worth adding
    assert torch.allclose(few["lm_head.weight"][9:], head[ids[new]] * counts.scale) and not counts.shifted
    apart, counts = remap_vocab(a, ids[new], V, head)  # nothing shared: the whole head gives the size
    assert counts.scale == pytest.approx(rms(a["lm_head.weight"]) / rms(head[old]), rel=1e-6)
    assert (counts.kept, counts.moved, counts.new, counts.dropped) == (0, 0, 32, VD)
    assert torch.allclose(apart["lm_head.weight"], head[ids[new]] * counts.scale)
    half, _ = remap_vocab(a | {"lm_head.weight": a["lm_head.weight"].bfloat16()}, ids, V, head)
    assert half["lm_head.weight"].dtype == torch.bfloat16


def test_embedding_of_the_draft_serves_where_the_target_is_wider(head, rng):
    a = tensors() | {"embed_tokens.weight": torch.randn(V, 64, generator=rng)}
    _, counts = remap_vocab(a, other_ids(), V, torch.randn(V, 96, generator=rng))
    assert counts.source == "the draft's own embedding"


def test_smaller_larger_and_whole_vocabularies(tmp_path, head):
    """Any number of ids; a draft without map or head gets the maps; the written folder loads."""
    a = tensors()
    for ids in (ids_of(a)[::2], torch.arange(V)):
        folder = tmp_path / f"{len(ids)}"
        remap_draft(GOLDEN / "draft", ids, folder, read_target(TARGET))
        draft = load_draft(folder, read_target(TARGET))
        assert draft.config.draft_vocab_size == draft.head.size(0) == len(ids)
        mapped = torch.arange(len(ids)) if draft.d2t is None else torch.arange(len(ids)) + draft.d2t
        assert torch.equal(mapped, ids)
    whole, counts = remap_vocab({"lm_head.weight": head}, ids_of(a), V)  # no d2t: its ids are the target's
    assert torch.equal(whole["lm_head.weight"], head[ids_of(a)]) and counts.dropped == V - VD
    bare, counts = remap_vocab({k: v for k, v in a.items() if k != "lm_head.weight"}, other_ids(), V)
    assert "lm_head.weight" not in bare and counts.source == "the target's head, which this draft uses"


def test_names_and_config_stay_as_stored(tmp_path):
    """Prefixes, nested config, shards as .bin: the output has the input's names, one file and draft_vocab_size alone changed."""
    raw = config()
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": raw, "eagle_aux_hidden_state_layer_ids": None}
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(nested))
    named = {f"draft_model.{k}": v for k, v in tensors().items() if k != "t2d"} | {"draft_model.rotary_emb.inv_freq": torch.ones(8)}
    torch.save(named, source / "pytorch_model.bin")
    remap_draft(source, other_ids(16)[:200], tmp_path / "out", read_target(TARGET))
    got, made = load_file(tmp_path / "out/model.safetensors"), json.loads((tmp_path / "out/config.json").read_text())
    assert set(got) == set(named) | {"t2d"} and got["draft_model.lm_head.weight"].shape == (200, 64)
    assert made["transformer_layer_config"].pop("draft_vocab_size") == made.pop("draft_vocab_size") == 200
    raw.pop("draft_vocab_size")
    assert made == nested | {"transformer_layer_config": raw}


# ---- what it is for: the loss of a fine-tune's first step ------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher():
    """(golden target, 24 of its own texts of 64 tokens)."""
    target, n = load_target(str(TARGET)), 24
    firsts = [np.random.default_rng(i).integers(3, V, 1).astype(np.int32) for i in range(n)]
    made = Generator(target, eos=[-1], rows=n, min_p=1e-6, seed=3).many(
        firsts, 63, np.full(n, 0.7, np.float32), log=lambda *a, **k: None)
    return target, torch.stack([torch.from_numpy(np.concatenate(x).astype(np.int64)) for x in zip(firsts, made)])


@torch.no_grad()
def loss(teacher, state: dict) -> float:
    """Teacher-forced cross entropy, the trainer's own, of the golden draft with these tensors."""
    target, ids = teacher
    net = Eagle3Draft(load_trainable(str(GOLDEN / "draft")).config)
    net.load_state_dict(state)
    want = torch.ones_like(ids, dtype=torch.bool)
    want[:, -1] = False
    pos = torch.arange(ids.size(1)).expand_as(ids)
    t = teach(target, net, ids, torch.zeros_like(ids), pos, want)
    return float(ttt_loss(target, net, t, 1, 1.0)[0])


@pytest.mark.parametrize("case", ["other ids", "shuffled"])
def test_loss_after_remap_is_the_unshuffled_drafts(teacher, head, case):
    """Other ids: the map of another frequency count, which gives up the 32 rarest ids for the 32 that A lacks."""
    a = tensors()
    old = ids_of(a)
    ids = old[torch.randperm(VD, generator=torch.Generator().manual_seed(1))]
    if case == "other ids":
        rare = old[torch.bincount(teacher[1].flatten(), minlength=V)[old].argsort(stable=True)[:32]]
        ids = torch.isin(torch.arange(V), rare, invert=True).nonzero()[:, 0]
    start = loss(teacher, a)
    assert start < 0.5 * np.log(VD)  # the golden draft knows something
    assert loss(teacher, remap_vocab(a, ids, V, head)[0]) == pytest.approx(start, rel=0.02)
    assert loss(teacher, with_map(a, ids)) > np.log(VD)  # no better than a head that knows nothing


@pytest.mark.skipif(demo_target_path() is None, reason="the demo target is not on this machine")
@torch.no_grad()
def test_loss_after_remap_on_smollm2():
    """1000 of the 8192 ids exchanged: the shipped draft starts where it was with its rows moved, and worse than nothing without."""
    path = str(demo_target_path())
    target = load_target(path)
    net = load_trainable(str(SHIPPED_DRAFT), target=target)
    tok = load_tokenizer(path)
    prompts = [np.array(tok.apply_chat_template([{"role": "user", "content": p.text}])) for p in read_prompts(OWN)[::5]]
    replies = Generator(target, [2], rows=len(prompts), seed=0).many(prompts, 40, None, log=lambda text: None)
    texts = [(len(p), torch.from_numpy(np.concatenate([p, r])).long()) for p, r in zip(prompts, replies)]
    old, seen = net.vocab_ids, torch.cat([t for _, t in texts]).unique()
    spare = old[~torch.isin(old, seen)][-1000:]
    free = torch.arange(49152)[~torch.isin(torch.arange(49152), old)][:1000]
    ids = torch.cat([old[~torch.isin(old, spare)], free]).sort().values
    moved, counts = remapped(net, ids, target)
    assert (counts.new, counts.dropped) == (1000, 1000) and counts.moved > 6000
    unmoved = Eagle3Draft(moved.config)
    unmoved.load_state_dict(net.state_dict() | {k: moved.state_dict()[k] for k in ("d2t", "t2d")})

    def loss(draft) -> float:
        nats = []
        for first, text in texts:
            want = torch.arange(len(text))[None] >= first - 1
            want[:, -1] = False
            t = teach(target, draft, text[None], torch.zeros(1, len(text)), torch.arange(len(text))[None], want)
            nats.append(float(ttt_loss(target, draft, t, 1, 1.0)[0]))
        return float(np.mean(nats))

    start = loss(net)
    assert start < 3 and loss(moved) == pytest.approx(start, rel=0.02) and loss(unmoved) > np.log(8192)


# ---- command and errors ---------------------------------------------------------------------------------------------------


def test_command(command, tmp_path):
    """--like and --ids of the same map write the same draft; counts are printed; the result is healthy for inspect."""
    other = write(tmp_path / "other", with_map(tensors(), other_ids()))
    code, text, err = command("remap", GOLDEN / "draft", "--like", other, "--target", TARGET, "--out", tmp_path / "a")
    lines = text.splitlines()
    assert (code, err) == (0, "") and lines[1] == f"written: {tmp_path / 'a'} (480 ids)"
    assert lines[0].startswith("kept ") and ", new 32 (from the target's head, times 0.9" in lines[0] and "dropped 32" in lines[0]
    shuffled = other_ids()[torch.randperm(VD)]
    (tmp_path / "ids.txt").write_text("\n".join(map(str, shuffled.tolist())))
    (tmp_path / "ids.json").write_text(json.dumps(shuffled.tolist()))
    torch.save(shuffled, tmp_path / "ids.pt")
    want = load_file(tmp_path / "a/model.safetensors")
    for name in ("ids.txt", "ids.json", "ids.pt"):
        out = tmp_path / f"of {name}"
        assert command("remap", GOLDEN / "draft", "--ids", tmp_path / name, "--target", TARGET, "--out", out)[0] == 0
        got = load_file(out / "model.safetensors")
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    assert command("inspect", tmp_path / "a", "--target", TARGET)[0] == 0
    assert command("inspect", other, "--target", TARGET)[0] == 1


def test_repairs_an_absolute_map(command, tmp_path):
    a = tensors()
    wrong = write(tmp_path / "absolute", a | {"d2t": ids_of(a)})
    code, _, _ = command("remap", wrong, "--like", wrong, "--d2t-format", "absolute", "--out", tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert code == 0 and all(torch.equal(got[k], a[k]) for k in a)


def test_wrong_input(command, tmp_path):
    """One sentence on stderr, exit code 2, nothing written."""
    draft, out, ids = GOLDEN / "draft", tmp_path / "out", tmp_path / "ids"

    def refused(message: str, content: str, *args) -> None:
        ids.write_text(content)
        code, text, err = command("remap", draft, *(args or ("--ids", ids, "--target", TARGET)), "--out", out)
        assert (code, text, err.count("\n")) == (2, "", 1) and message in err and "Fix: " in err, err
        assert not out.exists()

    refused("remap: --ids must be a file of integers; got", "1 2 x")
    refused("values that are not integers", "[1, 2.5]")
    refused("No such file", "", "--ids", tmp_path / "none", "--target", TARGET)
    refused("remap: the new map must hold ids in [0, 512); got 2 ids from 3 to 512.", "3 512")
    refused("remap: the new map must hold ids in [0, 512); got 2 ids from -1 to 3.", "-1 3")
    refused("remap: the new map must hold ids in [0, 512); got 0 ids.", "")
    refused("remap: the new map must hold every id once; got 1 repeated.", "3 4 4")
    missing = str((set(range(V)) - set(ids_of(tensors()).tolist())).pop())
    refused("remap: 1 ids that the draft does not know must come from a target head of width 64; got no target and no embedding",
            missing, "--ids", ids)
    refused("not allowed with argument --ids", "1", "--ids", ids, "--like", draft)
    refused("one of the arguments --ids --like is required", "1", "--target", TARGET)
    absolute = write(tmp_path / "absolute", tensors() | {"d2t": ids_of(tensors())})
    refused("load_draft: d2t must hold offsets (target id = i + d2t[i]); got increasing values", "1", "--like", absolute)
    small = write(tmp_path / "small", tensors(), config() | {"vocab_size": 500})
    refused("remap: both drafts must be made for one vocabulary; got 512 and 500 ids.", "1", "--like", small)
    wide = tmp_path / "wide"
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 4096, "num_hidden_layers": 8}))
    refused("remap: the draft's vocab_size must be the target's 4096; got 512.", "1 2", "--ids", ids, "--target", wide)
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    ids.write_text("1 2")
    code, _, err = command("remap", draft, "--ids", ids, "--out", full)
    assert code == 2 and "remap: the output must be a new or empty folder" in err and len(list(full.iterdir())) == 1


def test_target_facts(tmp_path):
    """Sizes, tables and stop ids without the network: tied heads, nested text_config, config without weights, bad sizes."""
    facts, want = read_target(TARGET), load_file(TARGET / "model.safetensors")
    assert facts.config == {"hidden_size": 64, "vocab_size": 512, "num_layers": 8} and facts.eos_ids == (2,)
    assert torch.equal(facts.embed_weight, want["model.embed_tokens.weight"])
    assert torch.equal(facts.lm_head_weight, want["lm_head.weight"])
    sizes = {"hidden_size": 4, "vocab_size": 6, "num_hidden_layers": 9, "eos_token_id": [3, 5]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": sizes}))
    facts = read_target(tmp_path)
    assert (facts.config["num_layers"], facts.eos_ids, facts.embed_weight) == (9, (3, 5), None)
    table = torch.arange(24.).view(6, 4)
    save_file({"language_model.model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    facts = read_target(tmp_path)
    assert torch.equal(facts.embed_weight, table) and facts.lm_head_weight is facts.embed_weight
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": "6"}))
    with pytest.raises(ValueError, match="must state hidden_size, vocab_size and the number of layers; got hidden_size None"):
        read_target(tmp_path)

