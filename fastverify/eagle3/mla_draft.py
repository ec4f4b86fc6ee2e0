"""What is known of EAGLE-3 drafts with multi-head latent attention (DeepSeek, Kimi): their tensors and sizes, not their network.

Layer 0 reads [embedding, hidden], 2H wide, through q_a_proj (or q_proj) and kv_a_proj_with_mqa; everything else of the draft is
as in drafts with q/k/v projections.
"""

from typing import Optional

_KEYS = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "hidden_size",
         "intermediate_size")


def is_mla(names) -> bool:
    return any("kv_a_proj_with_mqa" in n for n in names)


def mla_shapes(flat: dict) -> Optional[dict]:
    """{normalised tensor name: shape} of layer 0 as the flat config describes it; None where it lacks a size."""
    sizes = [flat.get(k) for k in _KEYS]
    if not all(type(s) is int and s > 0 for k, s in zip(_KEYS, sizes) if k != "q_lora_rank"):
        return None
    heads, q_lora, kv_lora, nope, rope, v, h, width = sizes
    out = {"kv_a_proj_with_mqa": (kv_lora + rope, 2 * h), "kv_a_layernorm": (kv_lora,), "kv_b_proj": (heads * (nope + v), kv_lora),
           "o_proj": (h, heads * v)}
    if q_lora:
        out |= {"q_a_proj": (q_lora, 2 * h), "q_a_layernorm": (q_lora,), "q_b_proj": (heads * (nope + rope), q_lora)}
    else:
        out["q_proj"] = (heads * (nope + rope), 2 * h)
    out = {f"self_attn.{k}": s for k, s in out.items()}
    out |= {"input_layernorm": (h,), "hidden_norm": (h,), "post_attention_layernorm": (h,), "mlp.gate_proj": (width, h),
            "mlp.up_proj": (width, h), "mlp.down_proj": (h, width)}
    return {f"layers.0.{k}.weight": s for k, s in out.items()}


def describe_mla(flat: dict, tensors: dict) -> str:
    """One clause: the sizes, and whether layer 0 has exactly the tensors of its config."""
    shapes = mla_shapes(flat)
    if shapes is None:
        return f"an MLA draft whose config.json lacks {', '.join(k for k in _KEYS if k != 'q_lora_rank' and type(flat.get(k)) is not int)}"
    heads, q_lora, kv_lora, nope, rope, v = (flat.get(k) for k in _KEYS[:6])
    text = (f"an MLA draft ({heads} heads; q rank {q_lora or 'none'}, kv rank {kv_lora} + {rope} rotary, head {nope} + {rope}, value {v})")
    mine = {k: tuple(t.shape) for k, t in tensors.items() if k.startswith("layers.0.")}
    missing, more = sorted(shapes.keys() - mine.keys()), sorted(mine.keys() - shapes.keys())
    wrong = [f"{k} {list(mine[k])} instead of {list(shapes[k])}" for k in sorted(shapes.keys() & mine.keys()) if mine[k] != shapes[k]]
    if missing or more or wrong:
        return f"{text} with missing {missing}, unexpected {more}, wrong shapes {wrong}"
    return f"{text}, its {len(shapes)} layer tensors complete"
