"""fastverify inspect: healthy drafts pass, every wrong variant is named, and the exit code says which."""

import json
import shutil

import pytest
import torch
from golden_drafts import GOLDEN, V, VD, command, config, ids_of, other_ids, tensors, with_map, write  # noqa: F401
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastverify.eagle3.inspection import _target_depth, inspect_draft
from fastverify.eagle3.map_health import FITS, head_fit, judge_head
from fastverify.eagle3.remap import remap_vocab
from fastverify.eagle3.target_facts import read_target
from fastverify.models.demo import SHIPPED_DRAFT, demo_target_path

DRAFT, TARGET = GOLDEN / "draft", GOLDEN / "target"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The golden target with a byte-level tokenizer and a chat template: a folder."""
    folder = tmp_path_factory.mktemp("chatty")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TARGET / name, folder)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(["hello world"], trainers.BpeTrainer(
        vocab_size=V, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"}))
    return folder


def said(result, level: str) -> str:
    """All findings of one level, one a line."""
    return "\n".join(f"{f.topic}: {f.text}" for f in result.findings if f.level == level)


def wrong(folder, target=True, **kw) -> str:
    result = inspect_draft(folder, read_target(TARGET) if target else None, **kw)
    assert bool(result.wrong) == bool(said(result, "wrong"))
    return said(result, "wrong")


# ---- healthy --------------------------------------------------------------------------------------------------------------


def test_healthy(command):
    """What it is, what it was made for, and a verdict; with and without its target; exit code 0."""
    code, text, err = command("inspect", DRAFT, "--target", TARGET)
    assert code == 0 and err == "" and text.splitlines()[-1] == "healthy" and "WRONG" not in text
    for line in ("ok     load: loads for this target",
                 "note   made for: golden-random-llama: hidden size 64, 512 ids, 8 layers (aux ids [2, 4, 5] are the default of that "
                 "depth), 3 aux layers (fc reads 192 columns)",
                 "ok     vocabulary map: 480 different ids from 0 to 511 of 512, increasing; t2d agrees",
                 "ok     head: 100 % of its rows are nearer to their own id's row of the target's head than to another's (chance: "
                 "50 %)",
                 "ok     embedding: the target's"):
        assert line in text.splitlines()
    assert "aux layers, outputs" in text and "after 1, 3, 4" in text
    assert "note   special ids: not checked: load_tokenizer: tokenizer.json must be in" in text
    code, text, _ = command("inspect", DRAFT)
    assert code == 0 and "ok     load: loads by its own config (add --target to compare it with its target)" in text


def test_json(command, chatty, tmp_path):
    """One object, nothing else; the same exit codes; the measured numbers."""
    (tmp_path / "text").write_text("hello world")
    args = ("--target", chatty, "--text", tmp_path / "text", "--against", DRAFT, "--json")
    code, text, err = command("inspect", DRAFT, *args)
    data = json.loads(text)
    assert code == 0 and err == "" and data["healthy"] is True
    assert data["vocabulary"]["entries"] == VD and data["vocabulary"]["t2d_agrees"] is True
    assert data["head"]["n"] == VD and data["head"]["direct"] > 0.99 and data["head"]["structure"] > 0.99
    assert data["against"]["differ"] == 0 and data["against"]["same_fc"] is True
    assert data["special_ids"]["stop"] == [2] and data["special_ids"]["chat"] == [1]
    assert data["coverage"]["inside"] <= data["coverage"]["tokens"] > 0
    assert {f["level"] for f in data["findings"]} == {"ok", "note"}
    assert data["tensors"]["fc.weight"] == ["float32", 64, 192]
    assert {"what": "max position", "value": "1024", "source": "config max_position_embeddings"} in data["rows"]
    broken = write(tmp_path / "broken", with_map(tensors(), other_ids()))
    code, text, _ = command("inspect", broken, *args)
    data = json.loads(text)
    assert code == 1 and data["healthy"] is False and data["against"]["differ"] > 400


# ---- wrong maps -----------------------------------------------------------------------------------------------------------


def test_absolute_d2t(tmp_path):
    """Named with load_draft's refusal; also where the offsets happen to stay inside the vocabulary; not when read as absolute."""
    a = tensors()
    del a["t2d"]
    folder = write(tmp_path / "d", a | {"d2t": ids_of(a)})
    text = wrong(folder)
    assert ("load: refused: load_draft: d2t must hold offsets (target id = i + d2t[i]); got increasing values that look like "
            "absolute ids. Fix: d2t_format='absolute'") in text
    assert "vocabulary map: d2t looks absolute (it rises at every entry, from 0 to 511)" in text
    assert "of 480 entries map outside [0, 512)" in text
    assert wrong(folder, d2t_format="absolute") == ""
    few = dict(a) | {"lm_head.weight": a["lm_head.weight"][:40], "d2t": ids_of(a)[:40]}
    short = write(tmp_path / "e", few, config() | {"draft_vocab_size": 40})
    text = wrong(short)
    assert "refused" not in text and f"d2t looks absolute (it rises at every entry, from 0 to {int(ids_of(a)[39])})" in text


def test_out_of_range(tmp_path):
    a = tensors()
    a["d2t"][7] = 600 - 7
    a["d2t"][9] = -50
    text = wrong(write(tmp_path / "d", a))
    assert "load: refused: load_draft: d2t must map into [0, 512); got id 600 for draft id 7 (2 out of range)" in text
    assert ("vocabulary map: 2 of 480 entries map outside [0, 512), the first is draft id 7 to 600: they can never be accepted"
            in text)


def test_duplicates(tmp_path):
    a = tensors()
    a["d2t"][10:14] = ids_of(a)[9] - torch.arange(10, 14)
    text = wrong(write(tmp_path / "d", a))
    assert "load: refused: load_draft: d2t must map to 480 different ids; got 476." in text
    assert "vocabulary map: 4 of 480 entries repeat an id that another entry has" in text


def test_t2d_of_another_draft(tmp_path):
    a = tensors()
    text = wrong(write(tmp_path / "d", a | {"t2d": with_map(a, other_ids())["t2d"]}))
    assert "load: refused: load_draft: t2d must mark exactly the 480 ids of d2t; got 480 marked, 448 of them in d2t." in text
    assert "vocabulary map: t2d marks 480 ids, 448 of them in d2t's 480: d2t and t2d are of two drafts" in text


def test_no_map_and_zero_map(tmp_path):
    a = tensors()
    bare = {k: v for k, v in a.items() if k not in ("d2t", "t2d")}
    assert "vocabulary map: no d2t for 480 draft ids of 512" in wrong(write(tmp_path / "d", bare))
    text = wrong(write(tmp_path / "e", bare | {"d2t": torch.zeros(VD, dtype=torch.int64)}))
    assert "vocabulary map: d2t is all zeros: it names the first 480 ids" in text
    assert "d2t must be a list of integers; it is torch.float32 [480]" in wrong(write(tmp_path / "f", bare | {"d2t": torch.ones(VD)}))
    assert "d2t has 479 entries for 480 head rows" in wrong(write(tmp_path / "g", a | {"d2t": a["d2t"][:-1]}))


def test_unsorted_map_is_a_note(tmp_path):
    a = tensors()
    b, _ = remap_vocab(a, ids_of(a).flip(0), V)
    result = inspect_draft(write(tmp_path / "d", b), read_target(TARGET))
    assert not result.wrong and "vocabulary map: d2t is not increasing: unusual for a map sorted by id" in said(result, "note")
    assert "in no order; t2d agrees" in said(result, "ok")


# ---- the head under another map -------------------------------------------------------------------------------------------


def test_other_targets_map(tmp_path):
    """load_draft cannot see it: the map is sound in itself. The target's head and the other draft both name it."""
    a = tensors()
    folder = write(tmp_path / "d", with_map(a, other_ids()))
    assert wrong(folder, target=False) == ""
    text = wrong(folder)
    assert "the head does not belong to this vocabulary map" in text and "(chance: 50 %)" in text and "refused" not in text
    result = inspect_draft(folder, against=DRAFT)
    differ = int((ids_of(a) != other_ids()).sum())
    assert f"against: {differ} of 480 d2t entries differ; both know 448 ids" in said(result, "wrong")
    assert (f"head: {differ} of {differ} head rows whose id differs are the same numbers in both: one of the two has its head under "
            "the other's map") in said(result, "wrong")
    assert "serving: not interchangeable" in said(result, "note") and "near 1.5 or below" in said(result, "note")
    assert f"Remap first: fastverify remap {folder} --like {DRAFT} --target TARGET --out DIR" in said(result, "note")


def test_sibling_drafts(tmp_path):
    """Two sound drafts with different maps: they differ, and no head is under the other's map."""
    b, _ = remap_vocab(tensors(), other_ids(), V, read_target(TARGET).lm_head_weight)
    result = inspect_draft(DRAFT, read_target(TARGET), against=write(tmp_path / "d", b))
    assert [f.topic for f in result.wrong] == ["against"] and result.data["against"]["rows_carried_over"] == 0
    result = inspect_draft(DRAFT, against=write(tmp_path / "e", tensors() | {"fc.weight": torch.ones(64, 192)}))
    assert not result.wrong and "same map of 480 ids: head rows mean the same tokens; fc differs" in said(result, "ok")
    whole = {k: v for k, v in tensors().items() if k not in ("t2d", "lm_head.weight")}
    other = write(tmp_path / "f", whole, config() | {"vocab_size": 9000})
    assert "vocabularies of 512 and 9000 ids: drafts of unrelated targets" in wrong(DRAFT, against=other)
    broken = write(tmp_path / "g", tensors() | {"d2t": torch.full((VD,), 700)})
    assert "against: g: 480 of 480 entries map outside" in wrong(DRAFT, against=broken)


def test_head_fit_needs_no_common_basis(rng):
    """A head in a basis of its own (trained from random weights) fits by structure; a shifted one fits by neither."""
    a, table = tensors(), read_target(TARGET).lm_head_weight
    rotation = torch.linalg.qr(torch.randn(64, 64, generator=rng))[0]
    fit = head_fit(a["lm_head.weight"] @ rotation, ids_of(a), table)
    assert fit["structure"] > FITS and fit["direct"] < 0.6
    shifted = head_fit(a["lm_head.weight"].roll(1, 0), ids_of(a), table)
    assert 0.4 < shifted["structure"] < 0.6 and 0.4 < shifted["direct"] < 0.6
    assert "structure" not in head_fit(a["lm_head.weight"][:50], ids_of(a)[:50], table)
    half = a["lm_head.weight"].clone()
    half[240:] = half[240:].roll(1, 0)  # the second half belongs elsewhere
    assert 0.6 < head_fit(half, ids_of(a), table)["direct"] < 0.8


@pytest.mark.skipif(demo_target_path() is None, reason="the demo target is not on this machine")
def test_maps_that_nearly_fit_a_trained_head(rng):
    """Rows of a trained table are related: of the shipped head under a wrong map, 58 to 66 % are nearer to the wrong id's row than to another's.

    Off by a few ids, wholly or from some entry on, is found and named, also for a head in a basis of its own; so is a sibling's map.
    """
    files = load_file(SHIPPED_DRAFT / "model.safetensors")
    head, ids, table = files["lm_head.weight"].float(), ids_of(files), read_target(demo_target_path()).lm_head_weight.float()
    n, rotation = ids.numel(), torch.linalg.qr(torch.randn(576, 576, generator=rng))[0]
    later = lambda first, s: torch.where(torch.arange(n) >= first, ids + s, ids)  # noqa: E731
    kept = torch.ones(n, dtype=torch.bool)
    kept[torch.randperm(n, generator=rng)[:50]] = False
    unknown = torch.ones(table.size(0), dtype=torch.bool)
    unknown[ids] = False
    sibling = torch.cat([ids[kept], unknown.nonzero()[:, 0][torch.randperm(table.size(0) - n, generator=rng)[:50]]]).sort().values
    few = torch.randperm(n, generator=rng)[:n // 20]
    exchanged = ids.clone()
    exchanged[few] = ids[few.roll(1)]
    for h in (head, head @ rotation):
        judged = lambda ids, h=h: judge_head(head_fit(h, ids, table))[0]  # noqa: E731
        assert judged(ids).level == "ok" and judged(ids).text.startswith("100 % of its rows")
        for map_, said in ((later(0, 1), "From draft id 0 to 8191 the map is off by +1: with target ids -1, 100 %"),
                           (later(0, -3), "From draft id 0 to 8191 the map is off by -3: with target ids +3, 100 %"),
                           (later(n // 2, 1), "From draft id 4096 to 8191 the map is off by +1"),
                           (later(n * 7 // 8, 2), "From draft id 7168 to 8191 the map is off by +2"),
                           (ids.roll(1), "does not belong to this vocabulary map"), (sibling, "does not belong to this vocabulary map"),
                           (later(0, 100), "does not belong to this vocabulary map")):
            assert judged(map_).level == "wrong" and said in judged(map_).text, judged(map_).text
        assert judged(exchanged).level == "note" and "may belong to other ids" in judged(exchanged).text


# ---- embedding, stop ids, text --------------------------------------------------------------------------------------------


def test_embedding(tmp_path):
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    same = inspect_draft(write(tmp_path / "d", tensors() | {"embed_tokens.weight": table}), read_target(TARGET))
    assert not same.wrong and "embedding: the draft's own equals the target's (mean cosine 1.0000 over 512 rows)" in said(same, "ok")
    other = tensors() | {"embed_tokens.weight": table.flip(0)}
    text = wrong(write(tmp_path / "e", other))
    assert text.startswith("embedding: the draft's embedding is not this target's (mean cosine ") and text.count("\n") == 0


def test_stop_ids_and_coverage(command, chatty, tmp_path):
    """The map keeps or loses chosen ids: a lost stop id is wrong, a lost chat id is a note, coverage is counted by hand."""
    a, words = tensors(), tmp_path / "text"
    words.write_text("hello " * 50)
    tokens = Tokenizer.from_file(str(chatty / "tokenizer.json")).encode("hello " * 50).ids
    missing = tokens[0]

    def draft(name: str, lose: set) -> tuple:
        ids = torch.tensor([i for i in range(V) if i not in lose][:VD])
        ids = remap_vocab(a, ids, V, read_target(TARGET).lm_head_weight)[0]
        return command("inspect", write(tmp_path / name, ids), "--target", chatty, "--text", words)

    code, text, _ = draft("all", set())
    assert code == 0 and "ok     special ids: stop ids are inside: <|im_end|> (id 2)" in text
    assert f"ok     coverage: 100.0 % of the text's {len(tokens)} tokens are inside the draft vocabulary" in text
    code, text, _ = draft("stop", {2})
    assert code == 1 and ("WRONG  special ids: outside the draft vocabulary: stop id <|im_end|> (id 2): the end of a reply can never "
                          "be drafted") in text
    code, text, _ = draft("chat", {1})
    assert code == 0 and "note   special ids: outside the draft vocabulary: <|im_start|> (id 1) of the chat template" in text
    code, text, _ = draft("word", {missing})
    count = tokens.count(missing)
    assert code == 1 and f"WRONG  coverage: {100 * (1 - count / len(tokens)):.1f} % of the text's {len(tokens)} tokens" in text
    assert f"x {count}" in text
    words.write_text("")
    assert "note   coverage: the text has no tokens" in draft("none", set())[1]


# ---- drafts that do not load ----------------------------------------------------------------------------------------------


def test_refused_drafts_are_inspected_all_the_same(tmp_path):
    """A missing tensor, an MLA head, an aux id too deep: the refusal's sentence, then map and head as usual."""
    a = tensors()
    cases = {
        "missing": (lambda t, c: t.pop("norm.weight"), "missing ['norm.weight'], unexpected []"),
        "mla": (lambda t, c: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}), "got an MLA draft"),
        "deep": (lambda t, c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 90]), "must be increasing and in [0, 8)"),
        "target": (lambda t, c: c.update(target_hidden_size=96), "the draft's target_hidden_size must be this target's 64; got 96."),
        "twice": (lambda t, c: t.update({"model.fc.weight": t["fc.weight"].clone()}), "tensor names must be unique"),
    }
    for name, (change, sentence) in cases.items():
        t, c = dict(a), config()
        change(t, c)
        result = inspect_draft(write(tmp_path / name, t, c), read_target(TARGET))
        assert [f.topic for f in result.wrong] == ["load"] and sentence in said(result, "wrong"), name
        assert "vocabulary map: 480 different ids" in said(result, "ok") and "head: 100 %" in said(result, "ok")
        assert ("lm_head.weight", "[480, 64] float32", "tensor") in result.rows
    foreign = read_target(TARGET)
    foreign.config = foreign.config | {"num_layers": 30}
    result = inspect_draft(DRAFT, foreign)
    assert "made for: its aux ids are the default of 8 layers; this target has 30" in said(result, "note")
    assert "aux layers: before (2, 4, 5), where EAGLE's default for 30 layers is before (2, 15, 27)" in said(result, "note")


JUNK = (None, "x", -1, 0, [], {}, 1.5, True, [1, "a"])


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "speculators_config",
                                 "eagle_aux_hidden_state_layer_ids", "target", "rope_scaling", "rms_norm_eps", "eagle_config",
                                 "transformer_layer_config", "num_attention_heads", "hidden_act", "aux_convention"])
def test_junk_in_the_config_never_ends_in_another_error(tmp_path, key):
    """Whatever config.json says, inspect ends with findings."""
    raw = config()
    raw.pop("eagle_config")
    for value in JUNK:
        for target in (None, read_target(TARGET)):
            assert inspect_draft(write(tmp_path / "d", tensors(), raw | {key: value}), target).findings
    raw.pop(key, None)
    assert inspect_draft(write(tmp_path / "d", tensors(), raw)).findings


def test_odd_tensors_never_end_in_another_error(tmp_path):
    for name in tensors():
        for value in (torch.tensor(1.0), torch.ones(0), torch.ones(3, 3), torch.ones(480, 64, dtype=torch.int8)):
            result = inspect_draft(write(tmp_path / "d", tensors() | {name: value}), read_target(TARGET), against=DRAFT)
            assert result.wrong, name


def test_depth_of_the_target_from_aux_ids():
    """Both conventions of eagle's default; anything else tells nothing."""
    for n in (7, 8, 30, 61, 94):
        assert _target_depth([2, n // 2, n - 3]) == n and _target_depth([1, n // 2 - 1, n - 4]) == n
    assert [_target_depth(x) for x in (None, [2, 5, 9], [1, 16, 33], [3, 4, 5], [2], [0, 0, 0])] == [None] * 6


def test_convention_that_only_the_target_tells(tmp_path):
    raw = config()
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}
    folder = write(tmp_path / "d", tensors(), raw)
    result = inspect_draft(folder)
    assert not result.wrong and "cannot be told without --target" in said(result, "note")
    assert "load: refused: load_draft: the convention of aux layer ids [3, 4, 5] must be known" in wrong(folder)


# ---- exit code 2 ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read(command, chatty, tmp_path):
    """One sentence on stderr, exit code 2, nothing on stdout."""
    broken = write(tmp_path / "broken", tensors())
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:1000])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for args, message in (
        ((tmp_path / "none",), "load_draft: path must be a folder with config.json and weights; got"),
        ((broken,), "must be a whole weight file; got 1000 bytes that cannot be read"),
        ((DRAFT, "--against", tmp_path / "none"), "load_draft: path must be a folder"),
        ((DRAFT, "--target", tmp_path / "none"), "which does not exist"),
        ((DRAFT, "--text", __file__), "inspect: --text must go with --target"),
        ((DRAFT, "--target", TARGET, "--text", __file__), "load_tokenizer: tokenizer.json must be in"),
        ((DRAFT, "--target", chatty, "--text", tmp_path / "none"), "inspect: --text must be a readable text file; got"),
        ((DRAFT, "--target", chatty, "--text", tmp_path / "bytes"), "bytes that are not UTF-8"),
        ((), "the following arguments are required: DRAFT"),
        ((DRAFT, "--d2t-format", "x"), "argument --d2t-format: invalid choice: 'x'"),
    ):
        for extra in ((), ("--json",)):
            code, text, err = command("inspect", *args, *extra)
            assert (code, text, err.count("\n")) == (2, "", 1) and message in err and "Fix: " in err, err
