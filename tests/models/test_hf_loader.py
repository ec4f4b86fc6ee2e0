"""Hugging Face folders: shards, tied and separate heads, stop ids, and one clear sentence for everything that is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Requests, hf_logits, make_hf, random_tokens

from fastverify.models.config import LoadError
from fastverify.models.load import load_target

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "target"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_hf("qwen2", tie_word_embeddings=False).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    for k, v in changes.items():
        data.pop(k, None) if v is ... else data.update({k: v})
    path.write_text(json.dumps(data))


def refused(folder, *parts) -> str:
    """Loading fails with one line that holds every part and a fix."""
    with pytest.raises(LoadError) as info:
        load_target(folder)
    message = str(info.value)
    assert "\n" not in message and message.startswith("load") and " Fix: " in message, message
    assert info.value.__cause__ is None and info.value.__suppress_context__ or info.value.__context__ is None
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"
    return message


def test_sharded_equals_single(folder, rng, tmp_path):
    hf = make_hf("qwen3")
    hf.save_pretrained(tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_target(tmp_path / "one"), load_target(tmp_path / "many")
    assert one.config == many.config
    prompt = random_tokens(9, rng)
    logits = [Requests(m, 1, rng).chain([prompt])[0] for m in (one, many)]
    assert torch.equal(*logits)
    assert (logits[0] - hf_logits(hf, prompt)).abs().max() <= 1e-4


def test_bfloat16_checkpoint_in_float32(tmp_path):
    hf = make_hf("llama2").to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    model = load_target(tmp_path)
    assert model.embed_weight.dtype == torch.float32
    assert torch.equal(model.layers[0].down, hf.state_dict()["model.layers.0.mlp.down_proj.weight"].float())


def test_config_fields(saved):
    c = load_target(saved).config
    assert (c.num_layers, c.hidden_size, c.vocab_size, c.num_heads, c.num_kv_heads, c.head_dim, c.max_position, c.bos_id,
            c.eos_ids, c.qkv_bias, c.o_bias, c.qk_norm, c.tie_word_embeddings) == (
                3, 64, 97, 4, 2, 16, 128, 1, (2,), True, False, False, False)


def test_keys_a_family_does_not_read_are_ignored(folder):
    edit(folder / "config.json", attention_bias=True, mlp_bias=True, head_dim=None, sliding_window=64)
    c = load_target(folder).config
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.head_dim) == (True, False, False, 16)


def test_stop_ids_of_both_files(folder):
    edit(folder / "config.json", eos_token_id=5)
    edit(folder / "generation_config.json", eos_token_id=[7, 5, 9])
    assert load_target(folder).config.eos_ids == (5, 7, 9)
    (folder / "generation_config.json").unlink()
    assert load_target(folder).config.eos_ids == (5,)


def test_make_cache(saved):
    cache = load_target(saved, dtype=torch.bfloat16).make_cache(5, 16)
    assert cache.k.shape == cache.v.shape == (3, 5, 16, 2, 16) and cache.k.dtype == torch.bfloat16 and not cache.k.any()


def test_golden_target(rng):
    model = load_target(GOLDEN)
    assert (model.config.num_layers, model.config.hidden_size, model.config.vocab_size) == (8, 64, 512)
    from transformers import AutoModelForCausalLM
    hf = AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32).eval()
    prompt = random_tokens(40, rng, 512)
    logits, _ = Requests(model, 1, rng).chain([prompt])
    assert (logits - hf_logits(hf, prompt)).abs().max() <= 1e-4


# ---- what is refused --------------------------------------------------------------------------------------------------

UNSUPPORTED = [
    (dict(model_type="gemma2"), "got model_type 'gemma2'"),
    (dict(model_type=...), "got model_type None"),
    (dict(model_type="qwen2_moe", num_experts=8), "got model_type 'qwen2_moe' with a mixture of experts"),
    (dict(num_local_experts=4), "got model_type 'qwen2' with a mixture of experts"),
    (dict(architectures=["Qwen2ForSequenceClassification"]), "got architectures ['Qwen2ForSequenceClassification']"),
    (dict(quantization_config=dict(quant_method="gptq")), "got weights quantised by 'gptq'"),
    (dict(hidden_act="gelu"), "got hidden_act 'gelu'"),
    (dict(rope_interleaved=True), "got rope_interleaved true"),
    (dict(use_sliding_window=True, sliding_window=64, max_window_layers=0, layer_types=...),
     "got a sliding window of 64 tokens below its context of 128"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "got layers of type 'sliding_attention'"),
    (dict(rope_parameters=dict(rope_type="longrope", factor=2.0)), "got rope type 'longrope'"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "got rope type 'dynamic'"),
    (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, mscale=1.0)), "got yarn with mscale"),
    (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), "got a partial rotary embedding"),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "got rope_parameters that differ between layer"),
]


@pytest.mark.parametrize("changes, found", UNSUPPORTED, ids=[f for _, f in UNSUPPORTED])
def test_unsupported_models(folder, changes, found):
    edit(folder / "config.json", **changes)
    refused(folder, "load_target: the model must be a dense decoder (Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3)", found)


@pytest.mark.parametrize("window, context, ok", [(4096, 32768, False), (..., 32768, False), (None, 32768, True),
                                                 (128, 128, True)])
def test_mistral_windows(tmp_path, window, context, ok):
    make_hf("mistral").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", sliding_window=window, max_position_embeddings=context)
    if ok:
        assert load_target(tmp_path).config.architecture == "mistral"
    else:
        refused(tmp_path, "a sliding window of 4096 tokens")


@pytest.mark.parametrize("changes, parts", [
    (dict(hidden_size=..., vocab_size=...), ["config.json must state hidden_size, vocab_size"]),
    (dict(num_attention_heads=0), ["num_attention_heads must be an integer in 1..", "got 0"]),
    (dict(num_hidden_layers="3"), ["num_hidden_layers must be an integer in 1..", "got '3'"]),
    (dict(num_hidden_layers=100000), ["num_layers must be an integer in 1..4096", "got 100000"]),
    (dict(num_key_value_heads=3), ["the head counts must divide; got 4 query and 3 key/value heads"]),
    (dict(head_dim=15), ["head_dim must be even; got 15"]),
    (dict(rope_parameters=dict(rope_type="linear")), ["rope type linear must state its factor"]),
    (dict(rope_parameters=..., rope_theta=None), ["load: every value of config.json must be of its kind; got float() argument"]),
    (dict(rms_norm_eps=None), ["load: every value of config.json must be of its kind"]),
    (dict(architectures=1), ["load: every value of config.json must be of its kind"]),
    (dict(eos_token_id="x"), ["load: every value of config.json must be of its kind; got invalid literal for int()"]),
    (dict(quantization_config="x"), ["load: every value of config.json must be of its kind"]),
    (dict(rope_parameters=..., rope_theta=0), ["load: rope_theta must be a positive number; got 0"]),
    (dict(rope_parameters=dict(rope_type="linear", factor=0)), ["load: factor must be a positive number; got 0"]),
])
def test_broken_config(folder, changes, parts):
    edit(folder / "config.json", **changes)
    refused(folder, *parts)


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors(folder):
    def change(t):
        del t["model.norm.weight"], t["model.layers.0.self_attn.q_proj.bias"]
        t["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
        t["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 95)

    rewrite(folder, change)
    refused(folder, "must hold exactly the 39 tensors of its qwen2 config",
            "2 missing (model.layers.0.self_attn.q_proj.bias, model.norm.weight)",
            "1 unexpected (model.layers.0.self_attn.q_norm.weight)",
            "1 of another shape (model.layers.2.mlp.down_proj.weight [64, 95] instead of [64, 96])")


def test_long_lists_are_cut(folder):
    rewrite(folder, lambda t: [t.pop(n) for n in list(t) if ".mlp." in n])
    assert refused(folder, "9 missing (").count("mlp") == 4


def test_untied_config_without_head(folder):
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "1 missing (lm_head.weight)")
    edit(folder / "config.json", tie_word_embeddings=True)
    assert load_target(folder).lm_head_weight.shape == (97, 64)


def test_recomputed_and_tied_tensors_are_ignored(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    edit(folder / "config.json", tie_word_embeddings=True)
    model = load_target(folder)
    assert model.lm_head_weight is model.embed_weight


def test_integer_weights(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    refused(folder, "model.norm.weight must be a floating-point tensor of 16 bits or more; got torch.int8")


@pytest.mark.parametrize("keep", [0, 4, 100, 20000, -1])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()[:keep]
    file.write_bytes(data)
    refused(folder, f"{file} must be a complete safetensors file; got {len(data)} bytes that do not parse")


def test_missing_files(folder, tmp_path):
    refused(tmp_path / "nowhere", "got", "nowhere, which does not exist")
    file = folder / "model.safetensors"
    file.rename(folder / "pytorch_model.bin")
    refused(folder, "the weights must be model.safetensors or its shards", "got pytorch_model.bin")
    (folder / "config.json").unlink()
    refused(folder, "must hold config.json or one .gguf file", "with 0 .gguf files")
    refused(folder / "pytorch_model.bin", "must be a Hugging Face folder or a .gguf file; got the file")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "config.json must be in", "got no such file")


@pytest.mark.parametrize("text, found", [("{", "must be readable JSON"), ("[1]", "must hold a JSON object; got a list"),
                                         ("\udcff", "must be readable JSON")])
def test_broken_json(folder, text, found):
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(folder, found)


def test_shards_that_do_not_match_their_index(tmp_path):
    make_hf("llama2").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    refused(tmp_path, "every shard of model.safetensors.index.json must be in", f"got no {shards[1].name}")
    shards[1].write_bytes(shards[0].read_bytes())
    refused(tmp_path, "must be in their shards; got shards without")
    shards[1].write_bytes(kept)
    edit(index, weight_map=...)
    refused(tmp_path, "must hold a weight_map")


def test_the_index_decides_between_copies(tmp_path):
    make_hf("llama2").save_pretrained(tmp_path, max_shard_size="60KB")
    want = load_target(tmp_path).norm
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(where.values()) - {where["model.norm.weight"]}:
        tensors = load_file(tmp_path / file)
        save_file({**tensors, "model.norm.weight": torch.zeros(64)}, tmp_path / file)
    assert torch.equal(load_target(tmp_path).norm, want) and want.any()


def test_dtype_of_the_call(saved):
    with pytest.raises(LoadError, match=re.escape("load_target: dtype must be float32, bfloat16 or float16; got torch.int8.")):
        load_target(saved, dtype=torch.int8)


def test_a_folder_needs_no_gguf_package():
    code = ("import sys; sys.modules['gguf'] = None\n"
            "from fastverify import load_target\n"
            f"print(load_target({str(GOLDEN)!r}).config.num_layers > 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(
        p for p in sys.path if p)))
    assert done.stdout == "True\n", done.stderr
