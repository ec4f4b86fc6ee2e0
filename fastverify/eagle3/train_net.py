"""Networks of the EAGLE-3 trainer in plain PyTorch: a frozen Llama target and the one-layer draft.

Sources: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), section 3.1 for the fused low/mid/high features and section 3.2
for the training-time test; RoPE (Su et al. 2021, arXiv:2104.09864) in the half-split ("neox") layout; RMSNorm (Zhang
& Sennrich 2019, arXiv:1910.07467); SwiGLU (Shazeer 2020, arXiv:2002.05202); grouped-query attention (Ainslie et al.
2023, arXiv:2305.13245).

Shapes used below: B rows, T tokens a row, H draft hidden, Ht target hidden, n / m query / key heads, d head size, V
target vocabulary, Vd draft vocabulary, A the selected (assistant) positions of a batch.

Conventions of the draft (they must match the decoding network):

* pair k = (embedding of token k+1, target features of position k), RoPE position k;
* h = fc(cat(low, mid, high)), x = cat(input_layernorm(embedding), hidden_norm(h)), the residual is the un-normed h;
* what is fed back is h2, before ``norm``; ``norm`` is used only in front of ``lm_head``;
* aux features are the residual stream BEFORE the target layers ``aux_layers`` ("input" convention).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class LlamaConfig:
    """The numbers of a Llama-type decoder; field names are those of a Hugging Face ``config.json``."""

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

    @classmethod
    def from_dict(cls, d: dict) -> "LlamaConfig":
        """Read a ``config.json`` of either the flat (``rope_theta``) or the nested (``rope_parameters``) form."""
        d = dict(d)
        rope = d.get("rope_parameters") or {}
        if d.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ValueError("trainer: rope scaling must be absent; got one. Fix: train on an unscaled target")
        d.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        if d.get("head_dim") is None:
            d["head_dim"] = d["hidden_size"] // d["num_attention_heads"]
        d.setdefault("num_key_value_heads", d["num_attention_heads"])
        return cls(**{k: d[k] for k in cls.__dataclass_fields__ if k in d})


@dataclass
class DraftConfig(LlamaConfig):
    """The draft: a ``LlamaConfig`` of one layer plus the draft vocabulary and the three feature layers."""

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    aux_layers: tuple = (2, 3, 4)

    @classmethod
    def for_target(cls, t: LlamaConfig, draft_vocab_size: int, **kw) -> "DraftConfig":
        """EAGLE's default shape for a target: its widths, one layer, features before {2, L//2, L-3}."""
        n = t.num_hidden_layers
        aux = tuple(kw.pop("aux_layers", (2, n // 2, n - 3)))
        if len(set(aux)) != 3 or sorted(aux) != list(aux):
            raise ValueError(f"aux_layers must be three increasing layers; got {aux}. Fix: use a target of >= 7 layers")
        base = {k: v for k, v in asdict(t).items() if k in LlamaConfig.__dataclass_fields__}
        base |= (
            dict(
                num_hidden_layers=1,
                tie_word_embeddings=False,
                draft_vocab_size=draft_vocab_size,
                target_hidden_size=t.hidden_size,
                aux_layers=aux,
            )
            | kw
        )
        return cls(**base)


# ------------------------------------------------------------------------------------------------------------------
# Pieces


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype; the mean square is taken in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_tables(pos: Tensor, d: int, theta: float) -> tuple[Tensor, Tensor]:
    """pos [B, T] -> cos, sin [B, 1, T, d] float32, the half-split layout (frequency i serves dims i and i + d/2)."""
    inv = theta ** (-torch.arange(0, d, 2, device=pos.device, dtype=torch.float32) / d)
    ang = pos.float()[:, None, :, None] * inv
    ang = torch.cat([ang, ang], -1)
    return ang.cos(), ang.sin()


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
        self.q_proj = nn.Linear(in_size, self.n * self.d, bias=False)
        self.k_proj = nn.Linear(in_size, self.m * self.d, bias=False)
        self.v_proj = nn.Linear(in_size, self.m * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.d, c.hidden_size, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, in] -> q [B, n, T, d], k and v [B, m, T, d], q and k rotated."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.m, self.d).transpose(1, 2)
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
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

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
    """A frozen Llama decoder whose parameter names are Hugging Face's, without the leading ``model.``."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.config = c
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
        cos, sin = rope_tables(pos, c.head_dim, c.rope_theta)
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


# ------------------------------------------------------------------------------------------------------------------
# Draft


class ChainAttention(torch.autograd.Function):
    """Attention of one unrolled step: causal over the step-0 keys, plus this chain's own entries of the later steps.

    q [G, T, d] already scaled; keys0, values0 [G, T, d]; bias [B, T, T] additive in q's dtype, G = B * heads; own
    keys and values: j tensors [G, T, d] each (one entry per chain and step). -> [G, T, d]. Written as one function
    because the scores are the largest tensors of training: they are kept once, as probabilities, in a buffer whose
    row length stays a multiple of 8."""

    @staticmethod
    def forward(ctx, q: Tensor, keys0: Tensor, values0: Tensor, bias: Tensor, *own: Tensor) -> Tensor:
        j, (g, t, _), b = len(own) // 2, q.shape, bias.shape[0]
        with torch.autocast(q.device.type, enabled=False):
            scores = torch.full((g, t, t + (-t) % 8 + (8 if j else 0)), float("-inf"), dtype=q.dtype, device=q.device)
            torch.bmm(q, keys0.transpose(1, 2), out=scores[..., :t])
            scores[..., :t].view(b, g // b, t, t).add_(bias[:, None])
            for i in range(j):
                scores[..., t + i] = (q * own[i]).sum(-1)
            prob = scores.softmax(-1)
            y = torch.bmm(prob[..., :t], values0)
            for i in range(j):
                y += prob[..., t + i, None] * own[j + i]
        ctx.save_for_backward(q, keys0, values0, prob, *own)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        q, keys0, values0, prob, *own = ctx.saved_tensors
        j, t = len(own) // 2, q.shape[1]
        dy = dy.contiguous()
        dprob = torch.zeros_like(prob)
        torch.bmm(dy, values0.transpose(1, 2), out=dprob[..., :t])
        for i in range(j):
            dprob[..., t + i] = (dy * own[j + i]).sum(-1)
        ds = torch._softmax_backward_data(dprob, prob, -1, prob.dtype)
        dq = torch.bmm(ds[..., :t], keys0)
        dkeys, dvalues = [], []
        for i in range(j):
            dq += ds[..., t + i, None] * own[i]
            dkeys.append(ds[..., t + i, None] * q)
            dvalues.append(prob[..., t + i, None] * dy)
        dk0 = torch.bmm(ds[..., :t].transpose(1, 2), q)
        dv0 = torch.bmm(prob[..., :t].transpose(1, 2), dy)
        return (dq, dk0, dv0, None, *dkeys, *dvalues)


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, 2 * c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)


class Eagle3Draft(nn.Module):
    """The EAGLE-3 draft head; its state dict is the checkpoint (``midlayer.*``, ``fc``, ``norm``, ``lm_head``, d2t,
    t2d)."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        if c.hidden_size != c.target_hidden_size:
            raise ValueError(
                f"draft: hidden_size must equal the target's {c.target_hidden_size}; got {c.hidden_size}. "
                "Fix: leave hidden_size out (the embedding table is shared)"
            )
        self.config = c
        self.fc = nn.Linear(len(c.aux_layers) * c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = DraftLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def set_vocab(self, ids: Tensor) -> None:
        """ids [Vd]: strictly increasing target ids of the draft vocabulary. d2t holds offsets: target = i + d2t[i]."""
        ids = ids.to(self.d2t.device, torch.int64)
        if ids.numel() != self.config.draft_vocab_size or not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(
                f"draft vocabulary must be {self.config.draft_vocab_size} increasing ids; got {ids.numel()}. "
                "Fix: choose it with the vocab subcommand"
            )
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()[ids] = True

    @property
    def vocab_ids(self) -> Tensor:
        """[Vd] target ids of the draft vocabulary."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def unroll(self, embed, ids: Tensor, aux: Tensor, pos: Tensor, mask: Tensor, steps: int):
        """Training-time test: yield h2 [B, T, H] of steps 0 .. steps-1 (EAGLE-3, section 3.2).

        embed: callable ids -> embeddings (frozen). ids, pos [B, T]; aux [B, T, 3*Ht]; mask bool [B, 1, T, T] from
        ``packed_mask``. Index k of step j is the draft chain that starts at pair k and has been given the true tokens
        k+1 .. k+1+j; its position is k+j. It attends step-0 keys 0..k causally and, of every later step i <= j, only
        its own entry: exactly the KV a draft sees that free-runs from pair k. Tokens past the end of a row are 0; the
        caller ignores chains that leave their document."""
        layer, c = self.midlayer, self.config
        att = layer.self_attn
        b, t = ids.shape
        h = self.fc(aux).float()
        bias = keys0 = values0 = None
        chain_k: list[Tensor] = []
        chain_v: list[Tensor] = []
        for j in range(steps):
            tokens = F.pad(ids[:, 1 + j :], (0, min(1 + j, t)))
            e = embed(tokens).to(h.dtype)
            x = torch.cat([layer.input_layernorm(e), layer.hidden_norm(h)], -1)
            q, k, v = att.qkv(x, *rope_tables(pos + j, c.head_dim, c.rope_theta))
            q, k, v = (y.reshape(b * att.n, t, att.d) for y in (q * att.d**-0.5, att.repeat(k), att.repeat(v)))
            if j == 0:
                keys0, values0 = k, v
                bias = torch.zeros(b, t, t, dtype=q.dtype, device=ids.device).masked_fill_(~mask[:, 0], -1e30)
            else:
                chain_k.append(k)
                chain_v.append(v)
            y = ChainAttention.apply(q, keys0, values0, bias, *chain_k, *chain_v)
            h = h + att.out(y.view(b, att.n, t, att.d))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            yield h

    def logits(self, h2: Tensor) -> Tensor:
        """h2 [..., H] (pre-norm) -> [..., Vd]."""
        return self.lm_head(self.norm(h2))

    @torch.no_grad()
    def init_from_target(self, target: TargetLlama, seed: int = 0, layer: int = -2) -> None:
        """Start as a copy of a late target layer fed by the high feature; the embedding half starts as small noise.

        fc = [0 | 0 | I], q/k/v = [noise | W], MLP, o_proj and norms copied, head rows = the target head's rows."""
        g = torch.Generator().manual_seed(seed)
        src, me, hid = target.layers[layer], self.midlayer, self.config.hidden_size

        def noise(like: Tensor, sd: float) -> Tensor:
            return (torch.randn(like.shape, generator=g) * sd).to(like)

        self.fc.weight.copy_(noise(self.fc.weight, 0.002))
        self.fc.weight[:, -hid:] += torch.eye(hid, device=self.fc.weight.device)
        for name in ("q_proj", "k_proj", "v_proj"):
            w, s = getattr(me.self_attn, name).weight, getattr(src.self_attn, name).weight.float()
            w.copy_(noise(w, 0.02))
            w[:, hid:] = s.to(w)
        me.self_attn.o_proj.weight.copy_(src.self_attn.o_proj.weight.float())
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(me.mlp, name).weight.copy_(getattr(src.mlp, name).weight.float())
        me.hidden_norm.weight.copy_(src.input_layernorm.weight.float())
        me.post_attention_layernorm.weight.copy_(src.post_attention_layernorm.weight.float())
        self.norm.weight.copy_(target.norm.weight.float())
        self.lm_head.weight.copy_(target.lm_head.weight.float()[self.vocab_ids.to(target.lm_head.weight.device)])


# ------------------------------------------------------------------------------------------------------------------
# Files


def load_target(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TargetLlama:
    """Load a Llama target from a ``.gguf`` file (dequantised) or a Hugging Face directory."""
    config, state = _read_gguf(path) if path.endswith(".gguf") else _read_hf(path)
    with torch.device("meta"):
        net = TargetLlama(config)
    net.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        net.lm_head.weight = net.embed_tokens.weight
    return net.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _read_hf(path: str) -> tuple[LlamaConfig, dict]:
    from safetensors.torch import load_file

    with open(os.path.join(path, "config.json")) as f:
        config = LlamaConfig.from_dict(json.load(f))
    state: dict[str, Tensor] = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            state |= load_file(os.path.join(path, name))
    state = {k.removeprefix("model."): v for k, v in state.items() if "rotary" not in k}
    if "lm_head.weight" not in state:
        config.tie_word_embeddings = True
        state["lm_head.weight"] = state["embed_tokens.weight"]
    return config, state


_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _read_gguf(path: str) -> tuple[LlamaConfig, dict]:
    """GGUF stores q and k rows pair-interleaved for arch llama; they are put back into the half-split order here."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    r = GGUFReader(path)
    field = lambda k, default=None: r.fields[k].contents() if k in r.fields else default
    if field("general.architecture") != "llama":
        raise ValueError(
            f"target: GGUF architecture must be llama; got {field('general.architecture')}. Fix: use a Llama GGUF"
        )
    names = {t.name for t in r.tensors}
    h, n = field("llama.embedding_length"), field("llama.attention.head_count")
    embd = next(t for t in r.tensors if t.name == "token_embd.weight")
    c = LlamaConfig(
        vocab_size=int(embd.shape[1]),
        hidden_size=h,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=n,
        num_key_value_heads=field("llama.attention.head_count_kv", n),
        head_dim=field("llama.attention.key_length", h // n),
        rope_theta=float(field("llama.rope.freq_base", 10000.0)),
        rms_norm_eps=float(np.float32(field("llama.attention.layer_norm_rms_epsilon")).astype(str)),
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings="output.weight" not in names,
    )
    state = {}
    for t in r.tensors:
        w = torch.from_numpy(np.ascontiguousarray(dequantize(t.data, t.tensor_type), dtype=np.float32))
        parts = t.name.split(".")
        if parts[0] == "blk":
            key = f"layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                heads = w.shape[0] // c.head_dim
                w = w.view(heads, c.head_dim // 2, 2, -1).transpose(1, 2).reshape(w.shape).contiguous()
        else:
            key = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}.get(parts[0])
            if key is None:  # rope_freqs and the like carry no weights
                continue
            key += ".weight"
        state[key] = w
    state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    return c, state


def draft_config_json(c: DraftConfig, target: dict, dtype: str = "bfloat16") -> dict:
    """``config.json`` in the flat EAGLE / SpecForge keys; ``target`` records what the draft was trained for."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "bias": False,
        "attention_bias": False,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "num_aux_hidden_states": len(c.aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
            "use_aux_hidden_state": True,
            "aux_convention": "input",
        },
        "target": target,
    }


def save_draft(net: Eagle3Draft, path: str, target: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` (weights in ``dtype``, d2t int64 offsets, t2d bool)."""
    from safetensors.torch import save_file

    os.makedirs(path, exist_ok=True)
    state = {
        k: (v.to(dtype) if v.is_floating_point() else v).detach().cpu().contiguous()
        for k, v in net.state_dict().items()
    }
    save_file(state, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(draft_config_json(net.config, target, str(dtype).removeprefix("torch.")), f, indent=2)
        f.write("\n")


def load_draft(path: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Eagle3Draft:
    """Read what ``save_draft`` wrote."""
    from safetensors.torch import load_file

    with open(os.path.join(path, "config.json")) as f:
        d = json.load(f)
    ids = d["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    c = DraftConfig(**{k: d[k] for k in DraftConfig.__dataclass_fields__ if k in d}, aux_layers=tuple(ids))
    net = Eagle3Draft(c)
    net.load_state_dict(load_file(os.path.join(path, "model.safetensors")), strict=True)
    return net.to(device=device, dtype=dtype)
