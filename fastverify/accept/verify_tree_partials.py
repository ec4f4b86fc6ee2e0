"""verify_tree_partials: one rank's words of one round of vocab-parallel verification."""

from typing import Optional

import torch

from .. import _ops
from .rule import Rule
from .verify_tree import Sampling

FILTER_ROUNDS = 10  # rounds when any request of a batch may use top-k, top-p or min-p
STATE_WORDS = 8


def num_rounds(filters: bool, logprobs: bool = False) -> int:
    """Rounds of the protocol: decided by what the batch may ask for (never read from the device)."""
    return FILTER_ROUNDS if filters else 2 if logprobs else 1


def partial_words(rounds: int) -> int:
    """int64 words per row that one rank sends in a round."""
    words = {1: 1, 2: 3, FILTER_ROUNDS: 256}
    if rounds not in words:
        raise RuntimeError(f"verify_tree_partials: rounds must be {'|'.join(map(str, words))}; got {rounds}. Fix: pass num_rounds(filters, "
                           "logprobs).")
    return words[rounds]


_op = None


def verify_tree_partials(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor,
                         prefix_len: torch.Tensor, active: torch.Tensor, sampling: Sampling, state: torch.Tensor, *,
                         vocab_offset: int, vocab_size: int, round: int, rounds: int,
                         bias: Optional[torch.Tensor] = None, bitmask: Optional[torch.Tensor] = None,
                         penalties: Optional[torch.Tensor] = None, counts: Optional[torch.Tensor] = None,
                         rule: Rule = Rule.SAMPLE_MATCH, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """This rank's words of round `round` from its logits shard.

    Args: as verify_tree, but
        logits   [R, shard]: ids vocab_offset .. vocab_offset + shard of the vocabulary of vocab_size ids
        bias     float32 [B, shard]; counts int32 [B, shard]; bitmask int32 [R, ceil(vocab_size/32)] of global ids
        state    int64 [R, 8]: what verify_tree_combine left after the round before (zeros in round 0)
    Returns int64 [R, partial_words(rounds)], to be gathered to [W, R, ...] in rank order.
    Rounds: 1 without filters (8 bytes a row), 2 with logprobs, 10 with filters (csrc/algo/partials.h).
    Cost: the shard read once a round. Graph-safe: yes. Inference only.
    """
    global _op
    if _op is None:
        _op = _ops.get("verify_tree_partials")
    if logits.device.type != "cpu":
        _ops.require_kernel("verify_tree_partials", logits.device)
    if out is None:
        out = torch.empty(logits.shape[0], partial_words(rounds), dtype=torch.int64, device=logits.device)
    _op(logits, tokens, parents, cu_nodes, prefix_len, active, sampling.temperature, sampling.top_k, sampling.top_p,
        sampling.min_p, sampling.seed, bias, bitmask, penalties, counts, state, out, vocab_offset, vocab_size, round,
        rounds, int(rule))
    return out
