"""Targets and drafts of random weights, by the shapes of a known model: for timing, never for text. Everything that prints
their numbers says so (`label`)."""

from dataclasses import dataclass
from typing import Optional

import torch

from .config import LoadError, ModelConfig, Rope
from .llama import Layer, LlamaModel

_LLAMA3 = dict(architecture="llama", max_position=131072, rms_norm_eps=1e-5, rope=Rope(theta=5e5))
CONFIGS = {
    "llama-3-8b": ModelConfig(num_layers=32, hidden_size=4096, intermediate_size=14336, vocab_size=128256, num_heads=32,
                              num_kv_heads=8, head_dim=128, **_LLAMA3),
    # one rank of eight: heads, columns and vocabulary of one shard, no communication
    "qwen3-32b-tp8-shard": ModelConfig(architecture="qwen3", num_layers=64, hidden_size=5120, intermediate_size=3200, vocab_size=18992,
                                       num_heads=8, num_kv_heads=1, head_dim=128, max_position=40960, rms_norm_eps=1e-6,
                                       rope=Rope(theta=1e6), qk_norm=True),
    "smollm2-135m": ModelConfig(architecture="llama", num_layers=30, hidden_size=576, intermediate_size=1536, vocab_size=49152,
                                num_heads=9, num_kv_heads=3, head_dim=64, max_position=8192, rms_norm_eps=1e-5,
                                rope=Rope(theta=1e5), tie_word_embeddings=True),
    "tiny": ModelConfig(architecture="llama", num_layers=7, hidden_size=64, intermediate_size=96, vocab_size=512, num_heads=4,
                        num_kv_heads=2, head_dim=16, max_position=4096, rms_norm_eps=1e-5, rope=Rope()),
}
DRAFT_VOCAB = 32000


def label(name: str, acceptance: Optional[float] = None) -> str:
    """What every output of a dummy says about itself."""
    return f"{name}: random weights" + (f", imposed acceptance {acceptance:g}" if acceptance is not None else "")


def dummy_config(name: str) -> ModelConfig:
    if name not in CONFIGS:
        raise LoadError(f"dummy: the name must be one of {', '.join(CONFIGS)}; got {name!r}. Fix: use one of them.")
    return CONFIGS[name]


def _random(generator: torch.Generator, device, dtype: torch.dtype):
    def make(*shape: int) -> torch.Tensor:
        """Uniform with the variance that keeps a hidden state's size: weights of a plain initialisation."""
        bound = (3.0 / shape[-1]) ** 0.5
        return torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)
    return make


def dummy_target(name: str, dtype: torch.dtype = torch.bfloat16, device: "torch.device | str" = "cpu", seed: int = 0,
                 num_layers: Optional[int] = None) -> LlamaModel:
    """A LlamaModel of `name`'s shapes with random weights; num_layers: fewer than the model has (tests)."""
    from dataclasses import replace
    c = dummy_config(name)
    c = c if num_layers is None else replace(c, num_layers=num_layers)
    make = _random(torch.Generator(device).manual_seed(seed), device, dtype)
    h, i, d = c.hidden_size, c.intermediate_size, c.head_dim
    ones = lambda n: torch.ones(n, dtype=dtype, device=device)  # noqa: E731

    def layer() -> Layer:
        qk = ones(d) if c.qk_norm else None
        return Layer(ones(h), make((c.num_heads + 2 * c.num_kv_heads) * d, h), None, qk, qk, make(h, c.num_heads * d), None,
                     ones(h), make(2 * i, h), None, make(h, i), None)

    embed = make(c.vocab_size, h)
    return LlamaModel(c, embed, [layer() for _ in range(c.num_layers)], ones(h), embed if c.tie_word_embeddings else make(c.vocab_size, h))


def dummy_draft(target: LlamaModel, seed: int = 1):
    """An EAGLE-3 draft of one layer in the target's shapes (Vd = min(V, 32000)), random weights."""
    from ..eagle3.draft import Eagle3Draft
    from ..eagle3.draft_config import DraftConfig, default_aux_layers
    c, dtype, device = target.config, target.dtype, target.device
    make = _random(torch.Generator(device).manual_seed(seed), device, dtype)
    h, i, d, vd = c.hidden_size, c.intermediate_size, c.head_dim, min(c.vocab_size, DRAFT_VOCAB)
    aux = default_aux_layers(c.num_layers)
    config = DraftConfig(vocab_size=c.vocab_size, draft_vocab_size=vd, hidden_size=h, target_hidden_size=h, intermediate_size=i,
                         num_layers=1, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_dim=d, rms_norm_eps=c.rms_norm_eps,
                         hidden_act="silu", rope=c.rope, max_position=c.max_position, aux_layers=aux, norm_before_residual=False,
                         norm_before_fc=False, fc_norm=False, norm_output=False, trained_for="nothing (random weights)")
    ones, p = torch.ones(h, dtype=dtype, device=device), "layers.0."
    weights = {"fc.weight": make(h, len(aux) * h), "norm.weight": ones, p + "hidden_norm.weight": ones,
               p + "input_layernorm.weight": ones, p + "post_attention_layernorm.weight": ones,
               p + "self_attn.q_proj.weight": make(c.num_heads * d, 2 * h), p + "self_attn.k_proj.weight": make(c.num_kv_heads * d, 2 * h),
               p + "self_attn.v_proj.weight": make(c.num_kv_heads * d, 2 * h), p + "self_attn.o_proj.weight": make(h, c.num_heads * d),
               p + "mlp.gate_proj.weight": make(i, h), p + "mlp.up_proj.weight": make(i, h), p + "mlp.down_proj.weight": make(h, i)}
    return Eagle3Draft(config, weights, make(vd, h), target.embed_weight, None)


@dataclass
class ImposedAcceptance:
    """Hook of a cycle: at every node, with probability `rate`, the target's choice is made the node's first child.

    The rest of the cycle runs as it is, so that times are those of a draft that is right that often. Graph-safe: the coins are
    Philox noise of torch's CUDA generator, whose state a capture registers.
    """

    rate: float
    value: float = 1e4

    def __call__(self, logits: torch.Tensor, plan) -> None:
        t = plan.tree
        rows, nodes = t.tokens.numel(), plan.nodes
        if nodes == 1:
            return
        row = torch.arange(rows, device=logits.device)
        request = torch.searchsorted(t.cu_nodes[1:].contiguous(), row.int(), right=True)  # of every row; B for padding
        base = torch.cat([t.cu_nodes, t.cu_nodes[-1:]])[request]
        parent = torch.where((t.parents >= 0) & (request < t.cu_nodes.numel() - 1), t.parents + base, rows).long()
        # first child of every row: the lowest row that names it (rows where there is none)
        child = torch.full((rows + 1,), rows, device=logits.device).scatter_reduce_(0, parent, row, "amin")[:rows]
        wanted = (torch.rand(rows, device=logits.device) < self.rate) & (child < rows)
        token = t.tokens[child.clamp(max=rows - 1)].long()[:, None]
        old = logits.gather(1, token)
        logits.scatter_(1, token, torch.where(wanted[:, None], torch.full_like(old, self.value), old))
