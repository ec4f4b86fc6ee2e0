"""GGUF models: metadata -> ModelConfig, and weights by Hugging Face names, dequantised and with q/k rows un-permuted."""

import re

import torch

from .config import LoadError, ModelConfig, Rope, check_size, merge_ids
from .gguf_file import GGUFFile
from .hf import refuse

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral models are written as "llama"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
          "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
          "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "final_logit_softcapping",
           "attn_logit_softcapping")


def parse_config(file: GGUFFile) -> ModelConfig:
    """Metadata and tensor names of a GGUF file -> ModelConfig; refuses what is not supported."""
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        refuse(f"GGUF architecture {arch!r}")

    def key(name: str, default=None):
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise LoadError(f"load_target: {file.path.name} must state {arch}.{name}; got no such key. "
                            "Fix: convert the model again.")
        return value

    if key("expert_count", 0):
        refuse(f"a mixture of {key('expert_count')} experts")
    for name in _SCALES:
        if key(name, 0.0) not in (0.0, 1.0):
            refuse(f"{arch}.{name} = {key(name)}")
    context, heads = check_size("context_length", key("context_length")), key("attention.head_count")
    kv_heads = key("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        refuse("head counts that differ between layers")
    check_size("attention.head_count", heads)
    window = key("attention.sliding_window", 0)
    if 0 < window < context:
        refuse(f"a sliding window of {window} tokens below its context of {context}")
    if "token_embd.weight" not in file.tensors:
        raise LoadError(f"load_target: {file.path.name} must hold token_embd.weight; got no such tensor. "
                        "Fix: use a file with the model's weights.")
    head_dim = key("attention.key_length", key("embedding_length") // heads)
    if key("rope.dimension_count", head_dim) != head_dim or key("attention.value_length", head_dim) != head_dim:
        refuse(f"rotary or value width other than the head size {head_dim}")
    return ModelConfig(
        architecture=arch, num_layers=key("block_count"), hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"), vocab_size=file.tensors["token_embd.weight"][0][0],
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=context,
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")), rope=_parse_rope(file, key, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors, qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors, mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=arch == "qwen3", bos_id=meta.get("tokenizer.ggml.bos_token_id"), eos_ids=eos_ids(meta))


def eos_ids(meta: dict) -> tuple:
    """Stop ids of the metadata: end of sequence, of turn, of message."""
    return merge_ids(*(meta.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")))


def _parse_rope(file: GGUFFile, key, head_dim: int) -> Rope:
    theta, kind = float(key("rope.freq_base", 10000.0)), key("rope.scaling.type", "none")
    factor = float(key("rope.scaling.factor", 0.0) or key("rope.scale_linear", 0.0) or 1.0)
    if kind not in ("none", "linear", "yarn"):
        refuse(f"rope scaling {kind!r}", "use a model with rope scaling none, linear or yarn")
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1's scaling, stored as one divisor per frequency
        factors = file.array("rope_freqs.weight").reshape(-1)
        if len(factors) != head_dim // 2 or kind != "none" and factor != 1.0:
            raise LoadError(f"load_target: rope_freqs.weight must be {head_dim // 2} divisors without other scaling; got "
                            f"{len(factors)} and {kind} scaling by {factor}. Fix: convert the model again.")
        return Rope(theta, "factors", factors=tuple(factors.tolist()))
    if kind == "none" or factor == 1.0:
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = int(key("rope.scaling.original_context_length", key("context_length")))
    scale = float(key("rope.scaling.attn_factor", 0.0) or key("rope.scaling.yarn_attn_factor", 0.0))
    attention = None if scale in (0.0, 1.0) else scale * Rope(kind="yarn", factor=factor).yarn_scale()
    return Rope(theta, "yarn", factor, original, beta_fast=float(key("rope.scaling.yarn_beta_fast", 32.0)),
                beta_slow=float(key("rope.scaling.yarn_beta_slow", 1.0)), attention_factor=attention)


class GGUFSource:
    """Weights of a GGUF file under Hugging Face names."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._names = {_hf_name(n): n for n in file.tensors if n != "rope_freqs.weight"}

    def shapes(self) -> dict:
        return {hf: self._file.tensors[n][0] for hf, n in self._names.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = torch.from_numpy(self._file.array(self._names[name]))
        if self._config.architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.", name):
            tensor = unpermute(tensor, self._config.num_heads if ".q_proj." in name else self._config.num_kv_heads)
        out.copy_(tensor)


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k rows [heads * D, ...] from GGUF's order (pairs 2i, 2i+1 rotate together) to ours (i, i + D/2)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; names we do not know stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    return f"model.layers.{layer}.{_BLOCK[stem]}.{kind}" if stem in _BLOCK else name
