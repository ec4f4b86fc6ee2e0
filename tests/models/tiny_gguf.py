"""Writes tiny GGUF files with the gguf package: weights of a transformers model, and tokenizer metadata."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

STEMS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name: str) -> str:
    """model.layers.1.mlp.up_proj.weight -> blk.1.ffn_up.weight."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{STEMS[stem]}.{kind}"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{STEMS[stem]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to q and k of Llama: rows i and i + D/2 of a head become neighbours."""
    width = rows.shape[0] // heads
    order = [h * width + (i // 2) + (i % 2) * (width // 2) for h in range(heads) for i in range(width)]
    return rows[order]


def write_gguf(path, hf, arch: str, kinds: dict = {}, skip: tuple = (), keys: dict = {}, tensors: dict = {}, tokenizer=None):
    """kinds: {part of a tensor's name: quantisation}; skip: keys and tensors left out; keys, tensors: extra ones.

    hf is changed to hold the dequantised weights, so that it computes what the file says.
    """
    c = hf.config
    writer = gguf.GGUFWriter(path, arch)
    numbers = {"block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
               "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
               "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
               "rope.freq_base": float(c.rope_parameters["rope_theta"]),
               "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps)}
    head_dim = getattr(c, "head_dim", None)
    if head_dim and head_dim * c.num_attention_heads != c.hidden_size:
        numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for k, v in {**numbers, **keys}.items():
        if k in skip:
            continue
        name = k if k.startswith(("general.", "tokenizer.")) else f"{arch}.{k}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool,
               list: writer.add_array}[type(v)]
        add(name, v)
    for k, v in (tokenizer or {}).items():
        {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}[type(v)](
            f"tokenizer.{k}", v)
    for name, p in hf.named_parameters():
        if gguf_name(name) in skip:
            continue
        kind = next((q for part, q in kinds.items() if part in name), Q.F32)
        data = gguf.quants.quantize(p.detach().numpy(), kind)
        dequantised = np.array(gguf.quants.dequantize(data, kind), np.float32).reshape(p.shape)
        p.data.copy_(p.new_tensor(dequantised))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            data = interleave(data, heads)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
