"""The EAGLE-3 draft network over the paged KV cache: one decoder layer that predicts from the target's own features.

    e = embedding(token)                  the target's table, or the draft's own
    h = fc(aux)                           aux: residual stream before three target layers; only on true target features
    x = cat[input_norm(e), hidden_norm(h)]           width 2H, the embedding first
    h1 = h + o(attention(qkv(x)))         RoPE of the DRAFT's config
    h2 = h1 + mlp(post_norm(h1))          fed back as the next step's h, not normed
    logits = head(norm(h2))               over the draft vocabulary; target id = i + d2t[i]

Pairing: row k holds token k+1 and the target's features of position k, at RoPE position k of the draft's cache. A drafted
token's row takes its parent's h2. Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), sections 3.1 and 3.2.
"""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from ..attention.rope_append import rope_append
from ..attention.tree_attention import tree_attention, workspace_for
from ..linear.skinny_linear import ADD, SILU_MUL, skinny_linear, skinny_pays
from ..linear.skinny_qkv import skinny_qkv
from ..models.batch import ForwardBatch, KVCache
from ..models.linear import fused, linear, rms_norm, silu_mul
from .draft_config import DraftConfig


@dataclass
class DraftLayer:
    """Weights of one layer, [out, in]. Layer 0 reads 2H columns (embedding half, then hidden half); later layers H."""

    input_norm: torch.Tensor             # [H]
    hidden_norm: Optional[torch.Tensor]  # [H], layer 0 only
    qkv: torch.Tensor                    # [(Hq + 2 Hkv) D, 2H | H]: q rows, then k, then v
    qkv_bias: Optional[torch.Tensor]
    q_norm: Optional[torch.Tensor]       # [D]
    k_norm: Optional[torch.Tensor]       # [D]
    o: torch.Tensor                      # [H, Hq D]
    o_bias: Optional[torch.Tensor]
    post_norm: torch.Tensor              # [H]
    gate_up: torch.Tensor                # [2 I, H]: gate rows, then up
    down: torch.Tensor                   # [H, I]


class Eagle3Draft:
    """One loaded draft; made by load_draft. Weights are fixed; the embedding may be the target's own tensor.

    config   DraftConfig
    embed    [V, H] or None (loaded with a target config only: set it before forward)
    head     [Vd, H]
    d2t      int64 [Vd] offsets, None: draft ids are target ids
    cos_sin  float32 [max_position, D], the table of rope_append
    """

    def __init__(self, config: DraftConfig, weights: dict, head: torch.Tensor, embed: Optional[torch.Tensor],
                 d2t: Optional[torch.Tensor]) -> None:
        c = self.config = config
        self.head, self.embed, self.d2t = head, embed, d2t
        self.dtype, self.device = head.dtype, head.device
        self.fc, self.norm = weights["fc.weight"], weights["norm.weight"]
        self.input_norm = weights.get("input_norm.weight")
        self.fc_norm = torch.stack([weights[f"fc_norm.{i}.weight"] for i in range(len(c.aux_layers))]) if c.fc_norm else None
        self.layers = [_layer(weights, i) for i in range(c.num_layers)]
        self.cos_sin = c.rope.cos_sin(c.head_dim, c.max_position).to(self.device)

    def make_cache(self, num_pages: int, page_size: int) -> KVCache:
        """A zeroed paged cache of the draft's shape, dtype and device."""
        c = self.config
        return KVCache(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [R, A*Ht] (chunks in the order of config.aux_layers, target dtype) -> h [R, H] in the draft's dtype."""
        c, x = self.config, aux.to(self.dtype)
        if self.input_norm is not None:
            x = F.rms_norm(x, self.input_norm.shape, self.input_norm, c.rms_norm_eps)
        if self.fc_norm is not None:
            chunks = x.view(x.size(0), len(c.aux_layers), c.target_hidden_size)
            x = (F.rms_norm(chunks, chunks.shape[2:], None, c.rms_norm_eps) * self.fc_norm).flatten(1)
        return linear(x, self.fc)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """One draft forward of R rows; writes their K and V to `cache`, leaves `hidden` alone.

        batch   ForwardBatch: tokens are TARGET ids in [0, V), those of padding rows too; mask None: a causal chain (extend)
        hidden  [R, H]: fuse(aux) for true pairs, the parent's returned row for drafted tokens
        Returns [R, H]: what logits() takes and what the children are fed (h2; norm(h2) when config.norm_output).
        Errors: ValueError without an embedding; the ops' own errors for the rest. Cost: every weight is read once. Reads no
        device value on the host.
        """
        c = self.config
        if self.embed is None:
            raise ValueError("forward: the draft must have an embedding; got none (it was loaded for a target config). "
                             "Fix: load it for the target model, or set draft.embed")
        h, size, eps = hidden, (c.hidden_size,), c.rms_norm_eps
        if self._skinny(h):
            return self._forward_skinny(batch, h, cache)
        for i, w in enumerate(self.layers):
            if i == 0:
                x, h = self._input(batch.tokens, h)
            else:
                x = rms_norm(h, w.input_norm, eps)
            h = self._attend(i, w, x, h, batch, cache)
            gate_up = linear(rms_norm(h, w.post_norm, eps), w.gate_up)
            h = linear(_activated(gate_up, c.hidden_act), w.down).add_(h)
        return F.rms_norm(h, size, self.norm, eps) if c.norm_output else h

    def _input(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple:
        """(cat[norm(embedding), norm(hidden)] [R, 2 H], what the residual starts from: hidden itself, a copy, or its normed form)."""
        c, w, size, eps = self.config, self.layers[0], (self.config.hidden_size,), self.config.rms_norm_eps
        if fused(hidden) and hidden.is_contiguous():
            from ..models.fused_triton import draft_input
            return draft_input(tokens, self.embed, hidden, w.input_norm, w.hidden_norm, eps, c.norm_before_residual)
        normed = F.rms_norm(hidden, size, w.hidden_norm, eps)
        e = F.embedding(tokens, self.embed).to(hidden.dtype)
        x = torch.cat([F.rms_norm(e, size, w.input_norm, eps), normed], dim=1)
        return x, normed if c.norm_before_residual else hidden

    def _skinny(self, h: torch.Tensor) -> bool:
        w, c = self.layers[0], self.config
        return (c.num_layers == 1 and c.hidden_act == "silu" and w.q_norm is None and w.o_bias is None and c.head_dim % 16 == 0
                and skinny_pays(h, w.qkv, w.o, w.gate_up, w.down))

    def _forward_skinny(self, batch: ForwardBatch, hidden: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The same layer; RoPE, residual adds, the second norm and SiLU-mul ride on the products."""
        c, w, rows, size, eps = self.config, self.layers[0], hidden.size(0), (self.config.hidden_size,), self.config.rms_norm_eps
        q = torch.empty(rows, c.num_heads, c.head_dim, dtype=hidden.dtype, device=hidden.device)
        workspace = workspace_for(q, cache.k[0], batch.prefix_len.shape[0])  # here: a launch that would keep those below from overlapping
        x, h = self._input(batch.tokens, hidden)
        h = h.clone() if h is hidden else h
        skinny_qkv(x, w.qkv, batch.positions, batch.slots, self.cos_sin, q, cache.k[0], cache.v[0], bias=w.qkv_bias, eps=eps, settled=True)
        a = tree_attention(q, cache.k[0], cache.v[0], batch.cu_nodes, batch.prefix_len, batch.page_table, mask=batch.mask,
                           row_base=batch.row_base, schedule=batch.schedule, workspace=workspace, settled=True)
        skinny_linear(a.view(rows, -1), w.o, out=h, kind=ADD)
        act = skinny_linear(h, w.gate_up, norm=w.post_norm, eps=eps, kind=SILU_MUL)
        skinny_linear(act, w.down, out=h, kind=ADD)
        return F.rms_norm(h, size, self.norm, eps) if c.norm_output else h

    def _attend(self, i: int, w: DraftLayer, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch,
                cache: KVCache) -> torch.Tensor:
        c, rows = self.config, x.size(0)
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        q, k, v = linear(x, w.qkv, w.qkv_bias).view(rows, -1, c.head_dim).split(heads, dim=1)
        rope_append(q, k, v, batch.positions, batch.slots, self.cos_sin, cache.k[i], cache.v[i], q_norm=w.q_norm,
                    k_norm=w.k_norm, eps=c.rms_norm_eps)
        out = tree_attention(q, cache.k[i], cache.v[i], batch.cu_nodes, batch.prefix_len, batch.page_table, mask=batch.mask,
                             row_base=batch.row_base, schedule=batch.schedule)
        h = linear(out.view(rows, -1), w.o).add_(residual)
        return h if w.o_bias is None else h + w.o_bias

    @torch.inference_mode()
    def logits(self, h2: torch.Tensor) -> torch.Tensor:
        """h2 [R, H] as forward returns it -> logits [R, Vd] over the draft vocabulary."""
        c = self.config
        normed = h2 if c.norm_output else rms_norm(h2, self.norm, c.rms_norm_eps)
        return linear(normed, self.head)

    def report(self) -> list:
        """Rows (key, value, source), all str, of everything that was resolved: a table for the user."""
        c, first = self.config, self.layers[0]
        src = c.sources.get

        def listed(ids) -> str:
            return ", ".join(map(str, ids))

        rows = [("trained for", c.trained_for, "config"),
                ("fingerprint", c.fingerprint, "sha256 of d2t and the head of fc"),
                ("aux layers, inputs", "before " + listed(c.aux_layers), src("aux_layers")),
                ("aux layers, outputs", "after " + listed(c.aux_layers_output), "the same layers"),
                ("vocabulary", f"{c.draft_vocab_size} of {c.vocab_size} ids", src("d2t")),
                ("embedding", "to be set" if self.embed is None else f"[{listed(self.embed.shape)}]", src("embedding")),
                ("head", f"[{listed(self.head.shape)}]", src("head")),
                ("layers", str(c.num_layers), src("num_layers")),
                ("hidden size", str(c.hidden_size), src("hidden_size")),
                ("heads", f"{c.num_heads} query, {c.num_kv_heads} key/value of {c.head_dim}", src("num_attention_heads")),
                ("rope theta", f"{c.rope.theta:g}", src("rope_theta")),
                ("rope scaling", c.rope.kind, src("rope_scaling")),
                ("max position", str(c.max_position), src("max_position"))]
        rows += [(f.replace("_", " "), "yes" if getattr(c, f) else "no", src(f))
                 for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")]
        rows += [("qkv bias", "no" if first.qkv_bias is None else "yes", "tensors"),
                 ("q/k norm", "no" if first.q_norm is None else "yes", "tensors"),
                 ("dtype", str(self.dtype).removeprefix("torch."), "argument dtype")]
        return rows + [("note", note, "loader") for note in c.notes]


def _layer(w: dict, i: int) -> DraftLayer:
    p = f"layers.{i}."

    def stack(kind: str, *names: str) -> Optional[torch.Tensor]:
        parts = [w.get(f"{p}{n}.{kind}") for n in names]
        return None if parts[0] is None else torch.cat(parts)

    qkv = tuple(f"self_attn.{x}_proj" for x in "qkv")
    return DraftLayer(
        input_norm=w[p + "input_layernorm.weight"], hidden_norm=w.get(p + "hidden_norm.weight"),
        qkv=stack("weight", *qkv), qkv_bias=stack("bias", *qkv), q_norm=w.get(p + "self_attn.q_norm.weight"),
        k_norm=w.get(p + "self_attn.k_norm.weight"), o=w[p + "self_attn.o_proj.weight"],
        o_bias=w.get(p + "self_attn.o_proj.bias"), post_norm=w[p + "post_attention_layernorm.weight"],
        gate_up=stack("weight", "mlp.gate_proj", "mlp.up_proj"), down=w[p + "mlp.down_proj.weight"])


def _activated(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """activation(first half) * second half of gate_up [R, 2 I]."""
    if name == "silu":
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.gelu(gate, approximate="tanh" if name == "gelu_pytorch_tanh" else "none") * up
