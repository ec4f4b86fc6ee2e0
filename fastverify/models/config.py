"""Architecture numbers of a dense Llama-family decoder, and its RoPE table."""

import math
from dataclasses import dataclass, field
from typing import Optional

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class LoadError(ValueError):
    """A model or tokenizer that cannot be loaded, in one line: `load_target: X must be Y; got Z. Fix: W.`"""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def check_size(name: str, value, limit: int = 1 << 24) -> int:
    """`value` if it is an int in 1..limit, else LoadError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise LoadError(f"load_target: {name} must be an integer in 1..{limit}; got {value!r}. Fix: repair the config.")
    return value


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one model. kind: "none" | "linear" | "llama3" | "yarn" | "factors".

    linear: every frequency divided by `factor`. llama3: long wavelengths divided by `factor`, short ones kept, smooth
    between (Llama 3.1). yarn: Peng et al. 2023, arXiv:2309.00071, as in Qwen2.5/Qwen3 configs. factors: one divisor per
    frequency, as GGUF files carry them. beta_*: rotations where yarn's ramp starts and ends. attention_factor: yarn's
    multiplier on cos and sin (None: 0.1 ln(factor) + 1).
    """

    theta: float = 10000.0
    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: Optional[float] = None
    factors: tuple = field(default=(), repr=False)

    def inv_freq(self, dim: int) -> torch.Tensor:
        """float32 [dim / 2]: radians per position of each pair. Computed in float32, as the models were trained."""
        base = 1.0 / self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
        if self.kind == "none":
            return base
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "factors":
            return base / torch.tensor(self.factors, dtype=torch.float32, device="cpu")
        if self.kind == "llama3":
            wavelength = 2 * math.pi / base
            turns = self.original_max_position / wavelength
            smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
            return (1 - smooth) * base / self.factor + smooth * base
        low, high = (self._yarn_dim(beta, dim) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 1e-3)).clamp(0, 1)
        return base / self.factor * ramp + base * (1 - ramp)

    def yarn_scale(self) -> float:
        """yarn's multiplier on cos and sin."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _yarn_dim(self, rotations: float, dim: int) -> float:
        """The pair index whose frequency makes `rotations` turns over the original context."""
        turns = self.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(self.theta))

    def cos_sin(self, dim: int, max_position: int) -> torch.Tensor:
        """float32 [max_position, dim]: dim/2 cosines, then dim/2 sines (the table of rope_append)."""
        angle = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * self.inv_freq(dim)
        scale = self.yarn_scale() if self.kind == "yarn" else 1.0
        return torch.cat([angle.cos() * scale, angle.sin() * scale], dim=1)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the network needs to know; field names are ours, values come from config.json or GGUF metadata."""

    architecture: str        # one of ARCHITECTURES
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int        # longest context the model was made for
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False    # RMSNorm per head on q and k before RoPE
    bos_id: Optional[int] = None
    eos_ids: tuple = ()      # any of them ends a generation

    def __post_init__(self):
        check_size("num_layers", self.num_layers, 1 << 12)
        for name in ("hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim",
                     "max_position"):
            check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise LoadError(f"load_target: the head counts must divide; got {self.num_heads} query and "
                            f"{self.num_kv_heads} key/value heads. Fix: repair the config.")
        if self.head_dim % 2:
            raise LoadError(f"load_target: head_dim must be even; got {self.head_dim}. Fix: repair the config.")

    def tensors(self) -> dict:
        """{Hugging Face tensor name: shape} of every weight such a model has."""
        h, i, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        out = {"model.embed_tokens.weight": (self.vocab_size, h), "model.norm.weight": (h,)}
        if not self.tie_word_embeddings:
            out["lm_head.weight"] = (self.vocab_size, h)
        for layer in range(self.num_layers):
            p = f"model.layers.{layer}."
            linears = [("self_attn.q_proj", q, h, self.qkv_bias), ("self_attn.k_proj", kv, h, self.qkv_bias),
                       ("self_attn.v_proj", kv, h, self.qkv_bias), ("self_attn.o_proj", h, q, self.o_bias),
                       ("mlp.gate_proj", i, h, self.mlp_bias), ("mlp.up_proj", i, h, self.mlp_bias),
                       ("mlp.down_proj", h, i, self.mlp_bias)]
            for name, rows, columns, bias in linears:
                out[f"{p}{name}.weight"] = (rows, columns)
                if bias:
                    out[f"{p}{name}.bias"] = (rows,)
            out[f"{p}input_layernorm.weight"] = out[f"{p}post_attention_layernorm.weight"] = (h,)
            if self.qk_norm:
                out[f"{p}self_attn.q_norm.weight"] = out[f"{p}self_attn.k_norm.weight"] = (d,)
        return out


def merge_ids(*values) -> tuple:
    """Ids out of ints, lists and None, in order, each once."""
    out = []
    for value in values:
        for i in value if isinstance(value, (list, tuple)) else [value]:
            if i is not None and i not in out:
                out.append(int(i))
    return tuple(out)
