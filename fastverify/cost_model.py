"""Does speculation pay: the arithmetic of docs/plan_and_trace.md. Times in ms unless a name says us. No torch."""

from dataclasses import dataclass
from typing import Optional

# us of one all-reduce of at most 64 KiB, low and high, as reported for 2 to 8 GPUs.
ALLREDUCE_US = {
    "nccl-misconfigured": (205.0, 205.0),  # 8 GPUs, PCIe, two sockets, NCCL without P2P
    "nccl-p2p": (24.0, 56.0),              # PCIe, NCCL with P2P: tuned, untuned
    "host-mailbox": (17.0, 25.0),          # PCIe without P2P, through pinned host memory
    "kernel": (10.0, 10.0),                # PCIe with P2P, custom one-shot or two-shot
    "nvlink-kernel": (6.0, 7.0),
}
# GB/s that one GPU moves in an all-reduce while all its peers do (GPU loads and stores, not copy engines).
LINK_GB_S = {"pcie5": 25.4, "pcie4": 12.5, "nvlink": 200.0, "host": 7.0}
SMALL_BYTES = 64 << 10


def break_even_tau(plain: float, verify: float, draft: float, other: float = 0.0) -> float:
    """Accept length from which speculation is faster than plain decoding."""
    return (draft + verify + other) / plain


def tokens_per_second(tau: float, round_ms: float) -> float:
    return 1e3 * tau / round_ms


def implied_round_ms(tau: float, tokens_per_s: float) -> float:
    """Length of the round behind a reported speed and accept length."""
    return 1e3 * tau / tokens_per_s


def chain_tau(rates: list, length: int) -> float:
    """Accept length of a chain. rates: conditional acceptance per depth; the last one holds for all deeper ones."""
    tau, reach = 1.0, 1.0
    for depth in range(length):
        reach *= rates[min(depth, len(rates) - 1)]
        tau += reach
    return tau


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """Expected number of experts of a layer that `rows` tokens touch, routed independently: E (1 - (1 - k / E)^rows)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def allreduce_us(small_us: float, nbytes: float, ranks: int, link_gb_s: float) -> float:
    """us of one all-reduce: `small_us` up to 64 KiB; beyond, 2 (W - 1) / W bytes per byte of message at the link's speed."""
    return small_us + 2 * (ranks - 1) / ranks * max(0.0, nbytes - SMALL_BYTES) / link_gb_s / 1e3


@dataclass(frozen=True)
class Weights:
    """What one forward of a model reads and sends. Parameters are counts, of the whole model.

    shared: read once whatever the rows (attention, dense MLPs, shared experts, routers, output head)
    expert: of one routed expert of one layer   moe_layers, experts, top_k: 0 for a dense model
    kv_values: KV cache values per position, all layers
    """

    layers: int
    hidden: int
    shared: int
    expert: int = 0
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    kv_values: int = 0

    @property
    def allreduces(self) -> int:
        """Two per layer: after attention and after the MLP."""
        return 2 * self.layers

    def expert_bytes(self, rows: int, bits: float) -> float:
        if not self.moe_layers:
            return 0.0
        return self.moe_layers * distinct_experts(self.experts, self.top_k, rows) * self.expert * bits / 8


def read_config(config: dict) -> Weights:
    """Weights of a Hugging Face config.json: Llama-like (GQA) or DeepSeek-like (MLA) attention, gated MLPs, dense or MoE."""
    config = config.get("text_config") or config

    def need(*names: str, default: Optional[int] = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is not None:
            return default
        raise ValueError(f"plan: the model's config must have {' or '.join(names)} as an integer; got none. "
                         "Fix: pass the config.json of a decoder in Hugging Face's format.")

    layers, hidden, heads = need("num_hidden_layers"), need("hidden_size"), need("num_attention_heads")
    if not (layers and hidden and heads):
        raise ValueError("plan: layers, hidden size and heads of the config must be at least 1; got 0. "
                         "Fix: repair the config.")
    if config.get("kv_lora_rank"):
        rank, rope, nope, value = (need(n) for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        q_rank = need("q_lora_rank", default=0)
        q = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
        attention = q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        kv = rank + rope
    else:
        dim = need("head_dim", default=hidden // heads)
        kv_heads = need("num_key_value_heads", default=heads)
        attention, kv = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim, 2 * kv_heads * dim
    experts = need("n_routed_experts", "num_local_experts", "num_experts", default=0)
    head = hidden * need("vocab_size")
    if not experts:
        mlp = 3 * hidden * need("intermediate_size")
        return Weights(layers, hidden, layers * (attention + mlp) + head, kv_values=layers * kv)
    width = need("moe_intermediate_size", "intermediate_size")
    dense = min(layers, need("first_k_dense_replace", default=0))
    moe = layers - dense
    shared = moe * (3 * hidden * width * need("n_shared_experts", default=0) + hidden * experts)
    shared += 3 * hidden * dense * need("intermediate_size") if dense else 0
    top_k = need("num_experts_per_tok", "num_experts_per_token")
    if not 1 <= top_k <= experts:
        raise ValueError(f"plan: num_experts_per_tok must be in 1..{experts}; got {top_k}. Fix: repair the config.")
    return Weights(layers, hidden, layers * attention + shared + head, 3 * hidden * width, moe, experts, top_k, layers * kv)


@dataclass(frozen=True)
class Machine:
    """ranks GPUs that split the weights. memory_gb_s: what one GPU's memory really delivers. bits: per weight, all included."""

    ranks: int
    memory_gb_s: float
    link_gb_s: float
    expert_bits: float = 16.0
    shared_bits: float = 16.0
    context: int = 0
    activation_bytes: int = 2


@dataclass(frozen=True)
class Forward:
    """ms of one forward over `rows` rows, by what it spends them on."""

    rows: int
    shared: float
    experts: float
    kv: float
    allreduce: float
    allreduce_each_us: float
    message: int

    @property
    def total(self) -> float:
        return self.shared + self.experts + self.kv + self.allreduce


def forward(weights: Weights, machine: Machine, rows: int, small_us: float) -> Forward:
    """Memory-bound forward: bytes over bandwidth, plus the all-reduces. No launch gaps, no skew, no compute limit."""
    per_ms = machine.ranks * machine.memory_gb_s * 1e6
    message = rows * weights.hidden * machine.activation_bytes
    each = allreduce_us(small_us, message, machine.ranks, machine.link_gb_s) if machine.ranks > 1 else 0.0
    return Forward(rows, weights.shared * machine.shared_bits / 8 / per_ms,
                   weights.expert_bytes(rows, machine.expert_bits) / per_ms,
                   weights.kv_values * machine.context * machine.activation_bytes / per_ms,
                   weights.allreduces * each / 1e3 if machine.ranks > 1 else 0.0, each, message)
