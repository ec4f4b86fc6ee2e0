"""One tiny draft written in every published format loads to identical logits; what cannot is refused, or named by inspect."""

import json
from pathlib import Path

import pytest
import torch
from golden_drafts import GOLDEN, config, ids_of, other_ids, tensors, with_map, write
from safetensors.torch import save_file

from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.inspection import inspect_draft
from fastverify.eagle3.target_facts import read_target
from fastverify.models.batch import ForwardBatch
from fastverify.models.config import LoadError
from fastverify.models.load import load_target

TARGET = GOLDEN / "target"
FLAT = ("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings")


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET)


def logits(draft, flags: bool = True) -> torch.Tensor:
    """Of five pairs with fixed features: the whole network, fc to head."""
    ids = torch.tensor([7, 30, 201, 88, 5])
    aux = torch.randn(5, 192, generator=torch.Generator().manual_seed(2))
    index = torch.arange(5)
    batch = ForwardBatch(ids, index.int(), index, torch.tensor([0, 5], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), index.int()[None])
    return draft.logits(draft.forward(batch, draft.fuse(aux), draft.make_cache(5, 1)))


def plain() -> dict:
    c = config()
    return {k: c[k] for k in FLAT}


def layers0(t: dict, prefix: str = "") -> dict:
    return {prefix + k.replace("midlayer.", "layers.0."): v for k, v in t.items()}


def eagle(folder: Path) -> None:
    """SafeAILab: LlamaForCausalLM, midlayer.*, pytorch_model.bin, no aux ids, a target's layer count."""
    (folder / "config.json").write_text(json.dumps(plain() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "bias": False}))
    torch.save(tensors(), folder / "pytorch_model.bin")


def specforge(folder: Path) -> None:
    """SpecForge: ids as layer outputs in eagle_config, safetensors, no embedding."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    write(folder, tensors(), plain() | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_config": ids})


def angelslim(folder: Path) -> None:
    """AngelSlim: flat, sharded safetensors with an index, its own copy of the target's embedding."""
    from safetensors.torch import load_file
    t = tensors() | {"embed_tokens.weight": load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]}
    (folder / "config.json").write_text(json.dumps(plain() | {"architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 1}))
    names = sorted(t)
    for i in range(2):
        save_file({n: t[n] for n in names[i::2]}, folder / f"model-{i}.safetensors")
    files = {n: f"model-{i}.safetensors" for i in range(2) for n in names[i::2]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def aq_medai(folder: Path) -> None:
    """AQ-MedAI: ids as layer inputs at the top level, `model.` prefixes, eos as a list, d2t alone."""
    t = {"model." + k: v for k, v in tensors().items() if k != "t2d"}
    write(folder, t, plain() | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eos_token_id": [2, 3],
                                "eagle_aux_hidden_state_layer_ids": [2, 4, 5]})


def speculators(folder: Path) -> None:
    """RedHat speculators: nested layer config, null ids, layers.0, int t2d, norm_before_residual stated, the target named."""
    outer = ("draft_vocab_size",)
    c = plain()
    nested = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "norm_before_residual": False,
              "eagle_aux_hidden_state_layer_ids": None, "transformer_layer_config": {k: v for k, v in c.items() if k not in outer},
              **{k: c[k] for k in outer}, "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}}}
    t = layers0(tensors())
    write(folder, t | {"t2d": t["t2d"].int()}, nested)


def modelopt(folder: Path) -> None:
    """ModelOpt / nvidia: switches in eagle_config, draft_model. prefixes, int32 d2t, no t2d, transformers 5 RoPE keys."""
    t = layers0({k: v for k, v in tensors().items() if k != "t2d"}, "draft_model.")
    t["draft_model.d2t"] = t["draft_model.d2t"].int()
    c = {k: v for k, v in plain().items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "num_hidden_layers": 1,
        "eagle_config": {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
                         "next_layer_regular": True, "eh_proj_before_attn": False, "norm_before_fc": False, "parallel_draft_step": 1}}
    write(folder, t, c)


def nemo(folder: Path) -> None:
    """NeMo: the map as absolute ids in speculative_token_map.pt, none among the tensors."""
    write(folder, {k: v for k, v in tensors().items() if k not in ("d2t", "t2d")}, plain())
    torch.save(ids_of(tensors()), folder / "speculative_token_map.pt")


def vllm_names(folder: Path) -> None:
    """vLLM's own names: draft_id_to_target_id, model.layers.0."""
    t = layers0(tensors(), "model.")
    t["model.draft_id_to_target_id"] = t.pop("model.d2t")
    write(folder, t, plain() | {"num_hidden_layers": 1})


def exported(folder: Path) -> None:
    """What `fastverify train` writes."""
    from fastverify.eagle3.train_net import load_draft as trainable
    from fastverify.eagle3.train_net import save_draft
    save_draft(trainable(GOLDEN / "draft"), str(folder), {"name": "golden"}, torch.float32, 8)


@pytest.mark.parametrize("form", [eagle, specforge, angelslim, aq_medai, speculators, modelopt, nemo, vllm_names, exported],
                         ids=lambda f: f.__name__)
def test_every_format_is_the_same_draft(form, target, tmp_path):
    form(tmp_path)
    want, draft = load_draft(GOLDEN / "draft", target), load_draft(tmp_path, target)
    assert torch.equal(logits(draft), logits(want)) and torch.equal(draft.d2t, want.d2t)
    c = draft.config
    assert c.aux_layers == (2, 4, 5) and c.aux_layers_output == (1, 3, 4) and c.rope == want.config.rope
    assert draft.embed is target.embed_weight and c.fingerprint == want.config.fingerprint
    table = {k: v for k, v, _ in draft.report()}
    assert table["aux layers, inputs"] == "before 2, 4, 5" and table["aux layers, outputs"] == "after 1, 3, 4"
    assert not inspect_draft(tmp_path, read_target(TARGET)).wrong


EXTRAS = {
    "fc_norm": ({f"fc_norm.{i}.weight": 64 for i in range(3)}, {f"aux_norm_{n}.weight": 64 for n in ("low", "mid", "high")}, {"fc_norm": True},
                {"use_aux_norm": True}),
    "norm_before_fc": ({"input_norm.weight": 192}, {"draft_model.input_norm.weight": 192}, {"norm_before_fc": True},
                       {"eagle_config": {"norm_before_fc": True}}),
    "norm_output": ({}, {}, {"norm_output": True}, {"eagle_config": {"return_hidden_post_norm": True}}),
    "bias": ({f"midlayer.self_attn.{x}_proj.bias": n for x, n in (("q", 64), ("k", 32), ("v", 32))},
             {f"layers.0.self_attn.{x}_proj.bias": n for x, n in (("q", 64), ("k", 32), ("v", 32))}, {"attention_bias": True}, {}),
    "q/k norm": ({f"midlayer.self_attn.{x}_norm.weight": 16 for x in "qk"}, {f"layers.0.self_attn.{x}_norm.weight": 16 for x in "qk"}, {}, {}),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_both_spellings_of_every_extra(name, target, tmp_path):
    """The EAGLE spelling and the other projects' give the same logits, which are not the plain draft's."""
    one, two, keys, others = EXTRAS[name]
    values = [torch.rand(n, generator=torch.Generator().manual_seed(i)) + 0.5 for i, n in enumerate(one.values())]
    a = load_draft(write(tmp_path / "a", tensors() | dict(zip(one, values)), plain() | keys), target)
    b = load_draft(write(tmp_path / "b", tensors() | dict(zip(two, values)), plain() | others), target)
    assert torch.equal(logits(a), logits(b))
    assert name == "norm_output" or not torch.equal(logits(a), logits(load_draft(GOLDEN / "draft", target)))


def kimi(h: int = 64, heads: int = 4) -> tuple:
    """(config, tensors) of an MLA draft as Kimi's are, small."""
    sizes = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    attn = {"q_a_proj": (24, 2 * h), "q_a_layernorm": (24,), "q_b_proj": (heads * 12, 24), "kv_a_proj_with_mqa": (20, 2 * h),
            "kv_a_layernorm": (16,), "kv_b_proj": (heads * 16, 16), "o_proj": (h, heads * 8)}
    t = {k: v for k, v in layers0(tensors()).items() if "self_attn" not in k}
    t |= {f"layers.0.self_attn.{k}.weight": torch.ones(s) for k, s in attn.items()}
    return plain() | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]} | sizes, t


def test_mla_drafts_are_known_by_their_tensors(tmp_path):
    """The network comes later; sizes, completeness, map and head are said now."""
    c, t = kimi()
    with pytest.raises(LoadError, match=r"got an MLA draft \(4 heads; q rank 24, kv rank 16 \+ 4 rotary, head 8 \+ 4, value 8\), its 13 layer "
                                        r"tensors complete\. Fix: use a draft with grouped-query attention"):
        load_draft(write(tmp_path / "a", t, c), read_target(TARGET))
    result = inspect_draft(tmp_path / "a", read_target(TARGET))
    assert [f.topic for f in result.wrong] == ["load"] and any(f.topic == "vocabulary map" and f.level == "ok" for f in result.findings)
    del t["layers.0.self_attn.kv_b_proj.weight"]
    t["layers.0.self_attn.q_a_proj.weight"] = torch.ones(24, 64)
    with pytest.raises(LoadError, match=r"missing \['layers.0.self_attn.kv_b_proj.weight'\], unexpected \[\], wrong shapes "
                                        r"\['layers.0.self_attn.q_a_proj.weight \[24, 64\] instead of \[24, 128\]'\]"):
        load_draft(write(tmp_path / "b", t, c), read_target(TARGET))


# Wrong variants: refused by load_draft with this sentence, or named by inspect (those that only running it shows: test_wiring_probe.py).
WRONG = {
    "absolute d2t": (lambda t, c: t.update(d2t=ids_of(t)), "refused", "d2t must hold offsets (target id = i + d2t[i])"),
    "d2t of zeros": (lambda t, c: (t.update(d2t=torch.zeros_like(t["d2t"])), t.pop("t2d")), "refused", "got all zeros (the first 480 ids)"),
    "another target's map": (lambda t, c: t.update(with_map(t, other_ids())), "named", "the head does not belong to this vocabulary map"),
    "missing tensor": (lambda t, c: t.pop("norm.weight"), "refused", "got missing ['norm.weight'], unexpected []"),
    "extra tensor": (lambda t, c: t.update({"mask_hidden": torch.zeros(64)}), "refused", "unexpected ['mask_hidden']"),
    "parallel heads": (lambda t, c: t.update({"parallel_draft_heads.0.weight": torch.zeros(64)}), "refused", "unexpected ['parallel_draft_heads"),
    "aux ids too deep": (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "refused", "the convention of aux layer ids"),
    "aux ids off the rule": (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[3, 5, 6], aux_convention="input"), "note",
                             "before (3, 5, 6), where EAGLE's default for 8 layers is before (2, 4, 5)"),
    "fc_norm denied": (lambda t, c: (c.update(fc_norm=False), t.update({f"fc_norm.{i}.weight": torch.ones(64) for i in range(3)})), "refused",
                       "fc_norm.0.weight must be absent"),
    "another embedding": (lambda t, c: t.update({"embed_tokens.weight": torch.randn(512, 64)}), "named", "the draft's embedding is not this target's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants(name, tmp_path):
    change, how, message = WRONG[name]
    t, c = tensors(), plain()
    change(t, c)
    folder = write(tmp_path / "d", t, c)
    result = inspect_draft(folder, read_target(TARGET))
    said = [f.text for f in result.findings if f.level == ("note" if how == "note" else "wrong")]
    assert any(message in text for text in said), said
    if how == "refused":
        with pytest.raises(LoadError) as refusal:
            load_draft(folder, read_target(TARGET))
        assert message in str(refusal.value) and "Fix: " in str(refusal.value)
    else:
        assert not any("refused" in f.text for f in result.wrong)
