"""The dense Llama-family decoder over the paged KV cache: one class for plain decoding, prefill and tree verification."""

from dataclasses import dataclass
from typing import Optional, Protocol

import torch
import torch.nn.functional as F

from ..attention.rope_append import rope_append
from ..attention import workspace as attention_workspace
from ..attention.tree_attention import tree_attention, workspace_for
from ..comm.all_reduce_rms_norm import all_reduce_rms_norm
from ..comm.linear_all_reduce import linear_all_reduce, overlaps
from ..linear.skinny_linear import ADD, SILU_MUL, skinny_fits, skinny_linear, skinny_pays
from ..linear.skinny_qkv import skinny_qkv
from .batch import ForwardBatch, KVCache
from .config import LoadError, ModelConfig
from .fp8 import Fp8Weight
from .linear import add_linear, few_rows, linear, norm_before, rms_norm, silu_mul_before


class TensorSource(Protocol):
    """Where weights come from: a checkpoint that answers by Hugging Face tensor names."""

    def shapes(self) -> dict:
        """{name: shape} of every tensor of the checkpoint."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Copies the tensor `name` into `out` (same shape), converting dtype and device."""


@dataclass
class Layer:
    """Weights of one decoder layer; [out, in] matrices as F.linear takes them, biases None where the family has none."""

    input_norm: torch.Tensor            # [H]
    qkv: torch.Tensor                   # [(Hq + 2 Hkv) D, H]: q rows, then k, then v (matrices may be Fp8Weight: models/fp8.py)
    qkv_bias: Optional[torch.Tensor]
    q_norm: Optional[torch.Tensor]      # [D]
    k_norm: Optional[torch.Tensor]      # [D]
    o: torch.Tensor                     # [H, Hq D]
    o_bias: Optional[torch.Tensor]
    post_norm: torch.Tensor             # [H]
    gate_up: torch.Tensor               # [2 I, H]: gate rows, then up
    gate_up_bias: Optional[torch.Tensor]
    down: torch.Tensor                  # [H, I]
    down_bias: Optional[torch.Tensor]


class LlamaModel:
    """Llama 2/3, SmolLM2, Mistral without windows, Qwen2/2.5 and Qwen3 decoders. Made by load_target; weights are fixed.

    config          ModelConfig
    embed_weight    [V, H], lm_head_weight [V, H] (the same tensor when the head is tied)
    cos_sin         float32 [max_position, D], the table of rope_append
    dtype, device   of weights, hidden states and KV cache
    """

    def __init__(self, config: ModelConfig, embed_weight: torch.Tensor, layers: list, norm: torch.Tensor,
                 lm_head_weight: torch.Tensor) -> None:
        self.config = config
        self.embed_weight, self.layers, self.norm, self.lm_head_weight = embed_weight, layers, norm, lm_head_weight
        self.dtype, self.device = embed_weight.dtype, embed_weight.device
        # set by models/parallel.py: the communicator, this rank's token ids, and whether attention is split
        self.comm, self.vocab_range, self.split_heads = None, (0, config.vocab_size), False
        self.filters = True  # a captured cycle of a split target allows top-k, top-p and min-p: 10 small gathers instead of 1
        self.prefetch = [(None, None)] * len(layers)  # what the sums after attention and MLP pull into L2 (prefetch_table)
        self.cos_sin = config.rope.cos_sin(config.head_dim, config.max_position).to(self.device)

    def make_cache(self, num_pages: int, page_size: int) -> KVCache:
        """A zeroed paged cache of this model's shape, dtype and device."""
        c = self.config
        return KVCache(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache, aux_layers: tuple = ()) -> tuple:
        """One forward of R rows. Writes their K and V to `cache`; returns (hidden [R, H] after the final norm, aux).

        aux is [R, len(aux_layers) * H], or None without aux_layers: the residual stream BEFORE layer i for each i in the
        order given; i == num_layers is the stream after the last layer, before the final norm.

        Token ids must lie in [0, V), those of padding rows too (their hidden rows are finite and mean nothing).
        Errors: ValueError for an aux layer out of range; the ops' own errors for the rest. Cost: every weight is read
        once. Reads no device value on the host; allocates temporaries of R rows only.
        """
        c = self.config
        h = F.embedding(batch.tokens, self.embed_weight)
        rows, eps = h.shape[0], c.rms_norm_eps
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        aux = self._aux_buffer(rows, aux_layers)
        if batch.exact or self._skinny(h):
            if batch.exact and not self.exact_fits(h):
                raise ValueError("forward: exact must have a whole target whose matrices are multiples of 16 x 32, bfloat16 on a GPU; got "
                                 f"{self.dtype}. Fix: leave exact mode off.")
            return self._forward_skinny(h, batch, cache, aux, aux_layers), aux
        if self._few_rows(h):
            return self._forward_few_rows(h, batch, cache, aux, aux_layers), aux
        x, workspace = norm_before(self.layers[0].qkv, h, self.layers[0].input_norm, eps), None
        for i, w in enumerate(self.layers):
            self._keep_aux(aux, aux_layers, i, h)
            qkv = linear(x, w.qkv, w.qkv_bias)
            a, workspace = self._attention(i, qkv, batch, cache, workspace)
            x = self._add_norm(h, a, w.o, w.o_bias, w.post_norm, w.gate_up, self.split_heads, self.prefetch[i][0])
            gate_up = linear(x, w.gate_up, w.gate_up_bias)
            x = silu_mul_before(w.down, gate_up)
            after, product = (self.layers[i + 1].input_norm, self.layers[i + 1].qkv) if i + 1 < c.num_layers else (self.norm, self.lm_head_weight)
            x = self._add_norm(h, x, w.down, w.down_bias, after, product, self.comm is not None, self.prefetch[i][1])
        self._keep_aux(aux, aux_layers, c.num_layers, h)
        return x, aux

    def _attention(self, i: int, qkv: torch.Tensor, batch: ForwardBatch, cache: KVCache, workspace: Optional[torch.Tensor]) -> tuple:
        """RoPE, append and attention of merged rows: ([R, Hq D], the workspace, which the first layer makes)."""
        c, w, k_cache, v_cache = self.config, self.layers[i], cache.k[i], cache.v[i]
        q, k, v = qkv.view(qkv.shape[0], -1, c.head_dim).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        rope_append(q, k, v, batch.positions, batch.slots, self.cos_sin, k_cache, v_cache, q_norm=w.q_norm, k_norm=w.k_norm, eps=c.rms_norm_eps)
        if workspace is None:
            workspace = workspace_for(q, k_cache, batch.prefix_len.shape[0])
        a = tree_attention(q, k_cache, v_cache, batch.cu_nodes, batch.prefix_len, batch.page_table, mask=batch.mask, row_base=batch.row_base,
                           schedule=batch.schedule, workspace=workspace)
        return a.view(qkv.shape[0], -1), workspace

    def _skinny(self, h: torch.Tensor) -> bool:
        w = self.layers[0]
        return (not isinstance(w.qkv, Fp8Weight) and skinny_pays(h, w.qkv, w.o, w.gate_up, w.down) and self.comm is None
                and w.o_bias is None and w.down_bias is None)

    def exact_fits(self, h: Optional[torch.Tensor] = None) -> bool:
        """Whether forward takes exact batches: every product through skinny_linear, whose rows do not depend on each other."""
        w, h = self.layers[0], self.embed_weight if h is None else h
        return (self.comm is None and w.o_bias is None and w.down_bias is None and not isinstance(w.qkv, Fp8Weight)
                and skinny_fits(h, w.qkv, w.o, w.gate_up, w.down, self.lm_head_weight))

    def _forward_skinny(self, h: torch.Tensor, batch: ForwardBatch, cache: KVCache, aux: Optional[torch.Tensor],
                        aux_layers: tuple) -> torch.Tensor:
        """The same network in five launches per layer: norms, RoPE, residual adds and SiLU-mul ride on the products."""
        c, rows, eps = self.config, h.shape[0], self.config.rms_norm_eps
        new = lambda width: torch.empty(rows, width, dtype=h.dtype, device=h.device)  # noqa: E731
        q, act = new(c.num_heads * c.head_dim).view(rows, -1, c.head_dim), new(c.intermediate_size)
        a = torch.empty_like(q)
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        workspace = (attention_workspace.exact_workspace_for(q, cache.k[0], batch.page_table) if batch.exact
                     else workspace_for(q, cache.k[0], batch.prefix_len.shape[0]))
        self._keep_aux(aux, aux_layers, 0, h)
        for i, w in enumerate(self.layers):
            k_cache, v_cache = cache.k[i], cache.v[i]
            if w.q_norm is None and c.head_dim % 16 == 0:
                skinny_qkv(h, w.qkv, batch.positions, batch.slots, self.cos_sin, q, k_cache, v_cache, bias=w.qkv_bias,
                           norm=w.input_norm, eps=eps, settled=True)
            else:
                qkv = skinny_linear(h, w.qkv, bias=w.qkv_bias, norm=w.input_norm, eps=eps)
                q, k, v = qkv.view(rows, -1, c.head_dim).split(heads, dim=1)
                rope_append(q, k, v, batch.positions, batch.slots, self.cos_sin, k_cache, v_cache, q_norm=w.q_norm,
                            k_norm=w.k_norm, eps=eps)
            tree_attention(q, k_cache, v_cache, batch.cu_nodes, batch.prefix_len, batch.page_table, mask=batch.mask,
                           row_base=batch.row_base, schedule=batch.schedule, workspace=workspace, out=a, exact=batch.exact, settled=True)
            skinny_linear(a.view(rows, -1), w.o, out=h, kind=ADD)
            skinny_linear(h, w.gate_up, bias=w.gate_up_bias, norm=w.post_norm, out=act, eps=eps, kind=SILU_MUL)
            places = self._aux_places(aux, aux_layers, i + 1)
            skinny_linear(act, w.down, out=h, kind=ADD, copy=places[0] if places else None)  # no launch of its own for what the draft reads
            for place in places[1:]:
                place.copy_(h)
        return self._norm(h, self.norm)

    def _few_rows(self, h: torch.Tensor) -> bool:
        w = self.layers[0]
        return (self.comm is None and w.qkv_bias is None and w.o_bias is None and w.gate_up_bias is None and w.down_bias is None
                and few_rows(h, w.qkv, w.o, w.gate_up, w.down))

    def _forward_few_rows(self, h: torch.Tensor, batch: ForwardBatch, cache: KVCache, aux: Optional[torch.Tensor],
                          aux_layers: tuple) -> torch.Tensor:
        """The same network for large weights and few rows in six launches per layer: norms, residual adds and SiLU-mul ride on the products."""
        from .few_rows_triton import DeferredNorm, product
        c, rows, eps = self.config, h.shape[0], self.config.rms_norm_eps
        ready, workspace = [DeferredNorm(rows, h.shape[1], h) for _ in range(2)], None
        x = ready[0].of(h, self.layers[0].input_norm)
        self._keep_aux(aux, aux_layers, 0, h)
        for i, w in enumerate(self.layers):
            a, workspace = self._attention(i, product(x, w.qkv, eps=eps), batch, cache, workspace)
            product(a, w.o, out=h, add=True, then=ready[1], norm=w.post_norm)
            act = product(ready[1], w.gate_up, silu=True, eps=eps)
            after = self.layers[i + 1].input_norm if i + 1 < c.num_layers else None
            product(act, w.down, out=h, add=True, then=None if after is None else ready[0], norm=after)
            self._keep_aux(aux, aux_layers, i + 1, h)
        return self._norm(h, self.norm)

    def _add_norm(self, h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor],
                  norm: torch.Tensor, product, split: bool, prefetch: Optional[torch.Tensor]) -> torch.Tensor:
        """h += x @ weight.T (+ bias), in place; returns RMSNorm(h) * norm as `product` takes it. split: x and weight are one rank's columns: the sum
        over ranks overlaps the product where cutting pays (prefill), else it is fused with residual and norm."""
        if not split:
            add_linear(h, x, weight, bias)
            return norm_before(product, h, norm, self.config.rms_norm_eps)
        bias = bias if self.comm.rank == 0 else None  # added once
        if overlaps(h.shape[0], weight, self.comm):
            linear_all_reduce(x, weight, self.comm, bias=bias, residual=h)
            return self._norm(h, norm)
        return all_reduce_rms_norm(linear(x, weight, bias), h, norm, self.comm, self.config.rms_norm_eps, prefetch=prefetch)

    def _norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(h, weight, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """hidden [R, H] as forward returns it -> logits [R, V] in the model's dtype (of this rank's ids, if split)."""
        if exact:
            return skinny_linear(hidden, self.lm_head_weight)
        if few_rows(hidden, self.lm_head_weight):  # cuBLAS would clear a workspace first, 5 us before it starts
            from .few_rows_triton import product
            return product(hidden, self.lm_head_weight)
        return linear(hidden, self.lm_head_weight)

    def _aux_buffer(self, rows: int, aux_layers: tuple) -> Optional[torch.Tensor]:
        if not aux_layers:
            return None
        if not all(0 <= i <= self.config.num_layers for i in aux_layers):
            raise ValueError(f"forward: aux_layers must be in 0..{self.config.num_layers}; got {tuple(aux_layers)}. "
                             "Fix: give ids in the input convention (before layer i).")
        return torch.empty(rows, len(aux_layers) * self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _keep_aux(self, aux: Optional[torch.Tensor], aux_layers: tuple, layer: int, h: torch.Tensor) -> None:
        for place in self._aux_places(aux, aux_layers, layer):
            place.copy_(h)

    def _aux_places(self, aux: Optional[torch.Tensor], aux_layers: tuple, layer: int) -> list:
        """The columns of aux [R, H] that want the stream before `layer`."""
        width = self.config.hidden_size
        return [aux[:, slot * width:(slot + 1) * width] for slot, wanted in enumerate(aux_layers) if wanted == layer]


def build(config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: "torch.device | str") -> LlamaModel:
    """Reads every weight of `config` from `source`, merging q/k/v and gate/up. LoadError lists what does not fit."""
    _check_tensors(config, source)
    kw = dict(dtype=dtype, device=device)

    def load(*names: str) -> torch.Tensor:
        """The named tensors stacked along their first dimension."""
        shapes = [wanted[n] for n in names]
        out = torch.empty(sum(s[0] for s in shapes), *shapes[0][1:], **kw)
        for name, part in zip(names, out.split([s[0] for s in shapes])):
            source.read(name, part)
        return out

    def layer(i: int) -> Layer:
        p = f"model.layers.{i}."
        q, k, v = (f"{p}self_attn.{x}_proj." for x in "qkv")
        o, gate, up, down = (p + x for x in ("self_attn.o_proj.", "mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj."))
        return Layer(
            input_norm=load(p + "input_layernorm.weight"),
            qkv=load(q + "weight", k + "weight", v + "weight"),
            qkv_bias=load(q + "bias", k + "bias", v + "bias") if config.qkv_bias else None,
            q_norm=load(p + "self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=load(p + "self_attn.k_norm.weight") if config.qk_norm else None,
            o=load(o + "weight"), o_bias=load(o + "bias") if config.o_bias else None,
            post_norm=load(p + "post_attention_layernorm.weight"),
            gate_up=load(gate + "weight", up + "weight"),
            gate_up_bias=load(gate + "bias", up + "bias") if config.mlp_bias else None,
            down=load(down + "weight"), down_bias=load(down + "bias") if config.mlp_bias else None)

    wanted = config.tensors()
    with torch.no_grad():
        embed = load("model.embed_tokens.weight")
        head = embed if config.tie_word_embeddings else load("lm_head.weight")
        return LlamaModel(config, embed, [layer(i) for i in range(config.num_layers)], load("model.norm.weight"), head)


def _check_tensors(config: ModelConfig, source: TensorSource) -> None:
    wanted, found = config.tensors(), source.shapes()
    ignored = {n for n in found if n.endswith(".rotary_emb.inv_freq")}  # recomputed from the config
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")  # a tied head is the embedding, whatever a copy in the file says
    problems = []
    for kind, names in (("missing", wanted.keys() - found.keys()), ("unexpected", found.keys() - wanted.keys() - ignored)):
        if names:
            problems.append(f"{len(names)} {kind} ({_some(sorted(names))})")
    wrong = [f"{n} {list(found[n])} instead of {list(wanted[n])}"
             for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]
    if wrong:
        problems.append(f"{len(wrong)} of another shape ({_some(wrong)})")
    if problems:
        raise LoadError(f"load_target: the checkpoint must hold exactly the {len(wanted)} tensors of its "
                        f"{config.architecture} config; got {'; '.join(problems)}. "
                        "Fix: use a complete checkpoint of this architecture.")


def _some(items: list, limit: int = 4) -> str:
    return ", ".join(items[:limit]) + (f", and {len(items) - limit} more" if len(items) > limit else "")
