"""The draft network of the EAGLE-3 trainer, its training-time unroll, and its files.

Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), section 3.1 for the fused low/mid/high features and section 3.2 for the
training-time test.

Shapes: B rows, T tokens a row, H draft hidden, Ht target hidden, d head size, V target vocabulary, Vd draft vocabulary.

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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.config import Rope
from . import draft_config
from .checkpoint import check_tensors, normalise_names, read_files, vocabulary_map
from .train_target import MLP, Attention, LlamaConfig, RMSNorm, TargetLlama, load_target, packed_mask, rope_tables

__all__ = ["DraftConfig", "Eagle3Draft", "LlamaConfig", "TargetLlama", "load_draft", "load_target", "packed_mask", "save_draft"]


@dataclass
class DraftConfig(LlamaConfig):
    """The draft: a ``LlamaConfig`` of one layer plus the draft vocabulary and the three feature layers."""

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    aux_layers: tuple = (2, 3, 4)

    @classmethod
    def for_target(cls, t: LlamaConfig, draft_vocab_size: int, **kw) -> "DraftConfig":
        """EAGLE's default shape for a target: its widths, one layer without biases and q/k norms, plain RoPE of its theta,
        features before {2, L//2, L-3}."""
        n = t.num_hidden_layers
        aux = tuple(kw.pop("aux_layers", (2, n // 2, n - 3)))
        if len(set(aux)) != 3 or sorted(aux) != list(aux):
            raise ValueError(f"aux_layers must be three increasing layers; got {aux}. Fix: use a target of >= 7 layers")
        plain = dict(rope=None, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
        base = {k: getattr(t, k) for k in LlamaConfig.__dataclass_fields__} | plain
        base |= dict(num_hidden_layers=1, tie_word_embeddings=False, draft_vocab_size=draft_vocab_size,
                     target_hidden_size=t.hidden_size, aux_layers=aux) | kw
        return cls(**base)

    @classmethod
    def from_saved(cls, saved: dict) -> "DraftConfig":
        """Of asdict's form, as a training checkpoint holds it."""
        rope = saved.get("rope")
        aux = tuple(saved["aux_layers"])
        return cls(**saved | dict(aux_layers=aux, rope=Rope(**rope) if isinstance(rope, dict) else rope))


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
            q, k, v = att.qkv(x, *rope_tables(pos + j, c.head_dim, c.rotary()))
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


def draft_config_json(c: DraftConfig, target: dict, dtype: str = "bfloat16", num_target_layers: int | None = None) -> dict:
    """``config.json`` in the flat EAGLE / SpecForge keys; ``target`` records what the draft was trained for.

    EAGLE's default aux layers are left out where num_target_layers tells that they are: every reader then takes them, while
    a written list is read as layer outputs by SGLang and TensorRT-LLM and as inputs by vLLM. target_hidden_size is left out too
    (it is hidden_size): EAGLE takes it to mean that the draft brings its own embedding."""
    n = num_target_layers
    out = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "hidden_act": "silu", "bias": False,
        "attention_bias": False, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": False, "torch_dtype": dtype,
        "num_aux_hidden_states": len(c.aux_layers), "target": target,
    }
    if n is None or tuple(c.aux_layers) != (2, n // 2, n - 3):
        out["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(c.aux_layers), "use_aux_hidden_state": True,
                               "aux_convention": "input"}
    return out


def save_draft(net: Eagle3Draft, path: str, target: dict, dtype: torch.dtype = torch.bfloat16,
               num_target_layers: int | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` (weights in ``dtype``, d2t int64 offsets, t2d bool)."""
    from safetensors.torch import save_file

    os.makedirs(path, exist_ok=True)
    state = {
        k: (v.to(dtype) if v.is_floating_point() else v).detach().cpu().contiguous()
        for k, v in net.state_dict().items()
    }
    save_file(state, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    config = draft_config_json(net.config, target, str(dtype).removeprefix("torch."), num_target_layers)
    Path(path, "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_draft(path: "str | Path", device: str = "cpu", dtype: torch.dtype = torch.float32, target: TargetLlama | None = None,
               aux_convention: str | None = None) -> Eagle3Draft:
    """A draft folder of any format that load_draft of checkpoint.py reads -> the trainable network.

    target: checks sizes, and tells default aux layers and their convention; without it the config must state them.
    Errors: LoadError for what cannot be read, ValueError for a draft whose layer is not the plain EAGLE-3 layer that is
    trained here (norm flags, biases, q/k norms, several layers, another hidden size, scaled RoPE)."""
    raw, stored = read_files(Path(path))
    tensors = {k: v for k, v in normalise_names(stored)[0].items() if k != "embed_tokens.weight"}
    flat = draft_config.flatten_config(raw)[0]
    t = target.config if target is not None else None
    if t is None and flat.get("eagle_aux_hidden_state_layer_ids") is None:
        raise ValueError("train: target must be given for a draft that does not state its aux layers; got none. Fix: pass target=.")
    sizes = (t.hidden_size, t.vocab_size, t.num_hidden_layers) if t else (
        flat.get("target_hidden_size") or flat.get("hidden_size"), flat.get("vocab_size"), 4096)
    c = draft_config.resolve_config(raw, {k: tuple(v.shape) for k, v in tensors.items()}, *sizes, aux_convention)
    check_tensors(c, tensors)
    _check_trainable(c, tensors)
    offsets = vocabulary_map(c, tensors.pop("d2t", None), tensors.pop("t2d", None))
    config = DraftConfig(
        c.vocab_size, c.hidden_size, c.intermediate_size, 1, c.num_heads, c.num_kv_heads, c.head_dim, c.rope.theta,
        c.rms_norm_eps, c.max_position, draft_vocab_size=c.draft_vocab_size, target_hidden_size=c.target_hidden_size,
        aux_layers=tuple(c.aux_layers))
    net = Eagle3Draft(config)
    index = torch.arange(c.draft_vocab_size)
    ids, order = (index if offsets is None else index + offsets).sort()  # increasing, as it is exported
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    net.set_vocab(ids)
    named = {k.replace("layers.0.", "midlayer."): v.to(dtype) for k, v in tensors.items()}
    net.load_state_dict(named | {"d2t": net.d2t, "t2d": net.t2d}, strict=True)
    return net.to(device=device, dtype=dtype)


def _check_trainable(c: draft_config.DraftConfig, tensors: dict) -> None:
    """Raises unless the draft is the plain EAGLE-3 layer: the one the trainer unrolls and exports."""
    odd = [f for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(c, f)]
    odd += [f"{c.num_layers} layers"] if c.num_layers != 1 else []
    odd += [f"hidden size {c.hidden_size} (the target's is {c.target_hidden_size})"] if c.hidden_size != c.target_hidden_size else []
    odd += [f"RoPE scaling {c.rope.kind}"] if c.rope.kind != "none" else []
    odd += [f"hidden_act {c.hidden_act}"] if c.hidden_act != "silu" else []
    odd += sorted(k for k in tensors if k.endswith(".bias") or "self_attn.q_norm" in k or "self_attn.k_norm" in k)
    odd += ["no lm_head.weight"] if "lm_head.weight" not in tensors else []
    if odd:
        raise ValueError(f"train: the draft to start from must be a plain EAGLE-3 layer with its own head; got {', '.join(odd)}. "
                         "Fix: start from another draft, or without --init.")
