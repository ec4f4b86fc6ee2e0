"""GGUF targets: every architecture and some quantisations against transformers, and one sentence for what is wrong."""

import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from tiny_gguf import write_gguf
from tiny_models import Requests, hf_logits, make_hf, random_tokens

from fastverify.models.config import LoadError
from fastverify.models.gguf import parse_config
from fastverify.models.gguf_file import GGUFFile
from fastverify.models.load import load_target

CASES = {
    "f32": ("llama3_plain", "llama", {}),
    "f16": ("llama2", "llama", {"proj": Q.F16}),
    "bf16": ("llama2", "llama", {"proj": Q.BF16}),
    "q8_0_q4_1": ("smollm2", "llama", {"embed": Q.Q8_0, "proj": Q.Q4_1}),
    "q4_0_q5_1": ("biases", "llama", {"q_proj.weight": Q.Q4_0, "mlp.up_proj.weight": Q.Q5_1}),
    "wide_heads": ("wide_heads", "llama", {"q_proj": Q.Q5_0}),
    "qwen2": ("qwen2", "qwen2", {"proj.weight": Q.Q8_0}),
    "qwen3": ("qwen3", "qwen3", {"embed": Q.Q8_0}),
}


def make(family: str):
    if family == "llama3_plain":
        return make_hf("llama3", rope_parameters=dict(rope_type="default", rope_theta=5000.0))
    if family == "smollm2":
        return make_hf(family, hidden_size=96, num_attention_heads=3, head_dim=32)
    return make_hf(family)


@pytest.mark.parametrize("case", list(CASES))
def test_equals_transformers(case, tmp_path, rng):
    family, arch, kinds = CASES[case]
    hf = make(family)
    ours = load_target(write_gguf(tmp_path / "m.gguf", hf, arch, kinds))
    assert ours.config.tie_word_embeddings == hf.config.tie_word_embeddings
    prompt = random_tokens(37, rng)
    logits, _ = Requests(ours, 1, rng).chain([prompt])
    assert (logits - hf_logits(hf, prompt)).abs().max() <= 1e-4


def test_folder_with_one_gguf(tmp_path):
    write_gguf(tmp_path / "m.gguf", make("llama2"), "llama")
    assert load_target(tmp_path).config.architecture == "llama"
    write_gguf(tmp_path / "n.gguf", make("llama2"), "llama")
    with pytest.raises(LoadError, match="must hold config.json or one .gguf file; got .* with 2 .gguf files"):
        load_target(tmp_path)


def test_llama3_scaling_as_rope_freqs(tmp_path, rng):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    hf = make_hf("llama3")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf.config, "cpu")
    plain = 1.0 / 5000.0 ** (torch.arange(0, 16, 2) / 16)
    ours = load_target(write_gguf(tmp_path / "m.gguf", hf, "llama", tensors={"rope_freqs.weight": (plain / scaled).numpy()}))
    assert ours.config.rope.kind == "factors"
    prompt = random_tokens(60, rng)
    logits, _ = Requests(ours, 1, rng).chain([prompt])
    assert (logits - hf_logits(hf, prompt)).abs().max() <= 1e-4


@pytest.mark.parametrize("family, keys", [
    ("linear_rope", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
    ("qwen2_yarn", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}),
])
def test_rope_scaling_keys(family, keys, tmp_path, rng):
    hf = make_hf(family)
    arch = "llama" if family == "linear_rope" else "qwen2"
    ours = load_target(write_gguf(tmp_path / "m.gguf", hf, arch, keys=keys))
    prompt = random_tokens(60, rng)
    logits, _ = Requests(ours, 1, rng).chain([prompt])
    assert (logits - hf_logits(hf, prompt)).abs().max() <= 1e-4


def test_stop_ids(tmp_path):
    ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.bos_token_id": 3}
    config = load_target(write_gguf(tmp_path / "m.gguf", make("llama2"), "llama", keys=ids)).config
    assert (config.eos_ids, config.bos_id) == ((7, 9), 3)


# ---- what is refused --------------------------------------------------------------------------------------------------


def refused(path, *parts) -> None:
    with pytest.raises(LoadError) as info:
        load_target(path)
    message = str(info.value)
    assert "\n" not in message and message.startswith("load") and " Fix: " in message, message
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"


@pytest.mark.parametrize("arch, keys, found", [
    ("gemma3", {}, "got GGUF architecture 'gemma3'"),
    ("llama", {"expert_count": 8}, "got a mixture of 8 experts"),
    ("llama", {"attention.sliding_window": 16}, "got a sliding window of 16 tokens below its context of 128"),
    ("llama", {"rope.dimension_count": 8}, "rotary or value width other than the head size 16"),
    ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "got rope scaling 'longrope'"),
    ("llama", {"logit_scale": 0.5}, "got llama.logit_scale = 0.5"),
    ("llama", {"attention.head_count_kv": [2, 2, 4]}, "head counts that differ between layers"),
])
def test_unsupported_models(tmp_path, arch, keys, found):
    refused(write_gguf(tmp_path / "m.gguf", make("llama2"), arch, keys=keys), "must be a dense decoder", found)


def test_keys_and_tensors_that_do_not_fit(tmp_path):
    f = tmp_path / "m.gguf"
    refused(write_gguf(f, make("llama2"), "llama", skip=("block_count",)), "must state llama.block_count")
    refused(write_gguf(f, make("llama2"), "llama", skip=("token_embd.weight",)), "must hold token_embd.weight")
    refused(write_gguf(f, make("llama2"), "llama", skip=("blk.1.ffn_up.weight",), tensors={"v.x": np.ones(3, np.float32)}),
            "must hold exactly the 30 tensors", "1 missing (model.layers.1.mlp.up_proj.weight)", "1 unexpected (v.x)")
    refused(write_gguf(f, make("llama2"), "llama", keys={"feed_forward_length": 95}), "9 of another shape",
            "model.layers.0.mlp.gate_proj.weight [96, 64] instead of [95, 64]")
    refused(write_gguf(f, make("llama2"), "llama", keys={"attention.head_count": 0}), "head_count must be an integer in 1..")
    refused(write_gguf(f, make("llama2"), "llama", tensors={"rope_freqs.weight": np.ones(5, np.float32)}),
            "rope_freqs.weight must be 8 divisors")


def test_type_that_gguf_cannot_dequantise(tmp_path):
    f = write_gguf(tmp_path / "m.gguf", make("llama2"), "llama")
    data = bytearray(f.read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    assert data[at : at + 4] == struct.pack("<I", Q.F32)
    data[at : at + 4] = struct.pack("<I", Q.I32)
    f.write_bytes(data)
    refused(f, "output_norm.weight must be of a type the gguf package can dequantise; got I32")


def test_not_a_gguf(tmp_path):
    f = tmp_path / "m.gguf"
    for data, part in ((b"", "must be a readable GGUF file"), (b"PK\3\4" + bytes(90), "got one that starts with b'PK"),
                       (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "(version 9)"), (b"GGUF", "breaks off or does not parse"),
                       (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "breaks off or does not parse")):
        f.write_bytes(data)
        refused(f, part)


def test_every_cut_is_noticed(tmp_path, rng):
    f = write_gguf(tmp_path / "m.gguf", make("qwen2"), "qwen2", tokenizer={"ggml.tokens": ["a", "b"] * 20})
    data, short = f.read_bytes(), tmp_path / "short.gguf"
    for cut in [*range(0, 2000, 13), *range(2000, len(data), 997), len(data) - 1]:
        short.write_bytes(data[:cut])
        with pytest.raises(LoadError, match="Fix: "):
            GGUFFile(short)


def test_flipped_bytes_never_escape(tmp_path, rng):
    """Damaged headers load as something else or fail as LoadError: no other exception, no endless loop."""
    f = write_gguf(tmp_path / "m.gguf", make("qwen2"), "qwen2", tokenizer={"ggml.tokens": ["a", "b"] * 20})
    data, bad, failures = f.read_bytes(), tmp_path / "bad.gguf", 0
    for at in torch.randint(4, 3500, (400,), generator=rng).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(torch.randint(0, 8, (), generator=rng))
        bad.write_bytes(damaged)
        try:
            parse_config(GGUFFile(bad))
        except LoadError:
            failures += 1
    assert failures > 50
