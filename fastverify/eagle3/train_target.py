"""The frozen target of the EAGLE-3 trainer: a dense decoder over packed rows, for any model that load_target loads.

The serving network (models/llama.py) runs flat rows over a paged cache; training runs [B, T] rows with a block-diagonal mask
and no cache. Both read their weights through models.load: Hugging Face folders, GGUF files, biases (Qwen2), q/k norms
(Qwen3) and scaled RoPE work alike.

Shapes: B rows, T tokens a row, Ht target hidden, n / m query / key heads, d head size, V target vocabulary, A selected
positions. RoPE (Su et al. 2021, arXiv:2104.09864) is in the half-split ("neox") layout; RMSNorm is Zhang & Sennrich 2019
(arXiv:1910.07467), SwiGLU Shazeer 2020 (arXiv:2002.05202), grouped-query attention Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.config import ModelConfig, Rope
from ..models.load import load_target as load_model


@dataclass
class LlamaConfig:
    """The numbers of a Llama-type decoder. rope None: plain, with rope_theta. bias_*: which projections have one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    rope: Rope | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of(cls, c: ModelConfig) -> "LlamaConfig":
        """The same numbers from a loaded model's config."""
        return cls(c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim,
                   c.rope.theta, c.rms_norm_eps, c.max_position, c.tie_word_embeddings, c.rope, c.qkv_bias, c.o_bias,
                   c.mlp_bias, c.qk_norm)

    def rotary(self) -> Rope:
        return self.rope or Rope(theta=self.rope_theta)


# ------------------------------------------------------------------------------------------------------------------
# Pieces


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype; the mean square is taken in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


@lru_cache(maxsize=16)
def _inv_freq(rope: Rope, d: int, device: torch.device) -> Tensor:
    """Rope.inv_freq on the device, kept: a captured graph may not copy from the host."""
    return rope.inv_freq(d).to(device)


def rope_tables(pos: Tensor, d: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """pos [B, T] -> cos, sin [B, 1, T, d] float32, the half-split layout (frequency i serves dims i and i + d/2)."""
    ang = pos.float()[:, None, :, None] * _inv_freq(rope, d, pos.device)
    ang = torch.cat([ang, ang], -1)
    scale = rope.yarn_scale() if rope.kind == "yarn" else 1.0
    return ang.cos() * scale, ang.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, d] rotated in float32, returned in its own dtype."""
    f = x.float()
    a, b = f.chunk(2, -1)
    return (f * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def packed_mask(doc: Tensor) -> Tensor:
    """doc [B, T] (document number of each token; < 0: padding) -> bool [B, 1, T, T]: causal inside each document.

    The diagonal is always set, so that padding rows have a finite softmax."""
    t = doc.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=doc.device).tril()
    return ((doc[:, :, None] == doc[:, None, :]) & causal)[:, None]


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig, in_size: int):
        super().__init__()
        self.n, self.m, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(in_size, self.n * self.d, bias=c.qkv_bias)
        self.k_proj = nn.Linear(in_size, self.m * self.d, bias=c.qkv_bias)
        self.v_proj = nn.Linear(in_size, self.m * self.d, bias=c.qkv_bias)
        self.o_proj = nn.Linear(self.n * self.d, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(self.d, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, in] -> q [B, n, T, d], k and v [B, m, T, d], q and k (normed and) rotated."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.n, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.m, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.m, self.d).transpose(1, 2)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def repeat(self, x: Tensor) -> Tensor:
        """Key heads [B, m, ...] -> query heads [B, n, ...]."""
        return x if self.n == self.m else x.repeat_interleave(self.n // self.m, 1)

    def out(self, y: Tensor) -> Tensor:
        """y [B, n, T, d] -> [B, T, H]."""
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# ------------------------------------------------------------------------------------------------------------------
# Target


class TargetLayer(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, T, Ht]; bias additive [B, 1, T, T] or None (causal) -> new h and this layer's k, v [B, m, T, d]."""
        a = self.self_attn
        q, k, v = a.qkv(self.input_layernorm(h), cos, sin)
        y = F.scaled_dot_product_attention(q, a.repeat(k), a.repeat(v), attn_mask=bias, is_causal=bias is None)
        h = h + a.out(y)
        return h + self.mlp(self.post_attention_layernorm(h)), k, v


class TargetLlama(nn.Module):
    """A frozen decoder whose parameter names are Hugging Face's, without the leading ``model.``. eos_ids end a reply."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.config, self.eos_ids = c, ()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, pos: Tensor, mask: Tensor | None, aux_layers=()) -> tuple[Tensor, Tensor | None]:
        """ids, pos [B, T]; mask bool [B, 1, T, T] or None (causal) -> normed hidden [B, T, Ht], aux [B, T,
        len(aux)*Ht]."""
        c = self.config
        cos, sin = rope_tables(pos, c.head_dim, c.rotary())
        h = self.embed_tokens(ids)
        bias = (
            None if mask is None else torch.zeros(mask.shape, dtype=h.dtype, device=h.device).masked_fill_(~mask, -1e4)
        )
        aux = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                aux.append(h)
            h, _, _ = layer(h, cos, sin, bias)
        return self.norm(h), torch.cat(aux, -1) if aux else None

    def logits(self, h: Tensor) -> Tensor:
        """h [A, Ht] (normed) -> float32 logits [A, V]; a bf16 product keeps its float32 accumulator where the GPU
        can."""
        return matmul_float32(h, self.lm_head.weight)


def matmul_float32(x: Tensor, w: Tensor) -> Tensor:
    """x [A, in], w [out, in] -> x w^T as float32 without a rounding of the result to bf16."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, w.to(x.dtype).t(), out_dtype=torch.float32)
    return F.linear(x, w.to(x.dtype)).float()


def load_target(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TargetLlama:
    """The frozen target at `path` (Hugging Face folder or GGUF file), its weights those of models.load.load_target.

    dtype float32, bfloat16 or float16. Errors: LoadError, one sentence. Cost: reads every weight once."""
    model = load_model(path, dtype, device)
    c = LlamaConfig.of(model.config)
    with torch.device("meta"):
        net = TargetLlama(c)
    n, m, width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
    state = {"embed_tokens.weight": model.embed_weight, "norm.weight": model.norm, "lm_head.weight": model.lm_head_weight}
    for i, w in enumerate(model.layers):
        p = f"layers.{i}."
        named = {"input_layernorm.weight": w.input_norm, "post_attention_layernorm.weight": w.post_norm,
                 "self_attn.o_proj.weight": w.o, "self_attn.o_proj.bias": w.o_bias, "mlp.down_proj.weight": w.down,
                 "mlp.down_proj.bias": w.down_bias, "self_attn.q_norm.weight": w.q_norm, "self_attn.k_norm.weight": w.k_norm}
        for kind, qkv, gate_up in (("weight", w.qkv, w.gate_up), ("bias", w.qkv_bias, w.gate_up_bias)):
            if qkv is not None:
                named |= {f"self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", qkv.split([n, m, m]))}
            if gate_up is not None:
                named |= {f"mlp.{x}_proj.{kind}": part for x, part in zip(("gate", "up"), gate_up.split([width, width]))}
        state |= {p + k: v for k, v in named.items() if v is not None}
    net.load_state_dict(state, strict=True, assign=True)
    if c.tie_word_embeddings:
        net.lm_head.weight = net.embed_tokens.weight
    net.eos_ids = model.config.eos_ids
    return net.requires_grad_(False).eval()
