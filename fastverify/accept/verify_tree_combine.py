"""verify_tree_combine, and the vocab-parallel verify built from it and verify_tree_partials."""

from typing import Callable, Optional

import torch

from .. import _ops
from .rule import Rule
from .verify_tree import Sampling, Verified
from .verify_tree_partials import STATE_WORDS, num_rounds, verify_tree_partials

_op = None


def verify_tree_combine(partials: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor,
                        prefix_len: torch.Tensor, active: torch.Tensor, remaining: torch.Tensor, sampling: Sampling,
                        state: torch.Tensor, out: Verified, *, vocab_offset: int, vocab_size: int, round: int, rounds: int,
                        stop_ids: Optional[torch.Tensor] = None, counts: Optional[torch.Tensor] = None,
                        rule: Rule = Rule.SAMPLE_MATCH) -> Verified:
    """Folds all ranks' words int64 [W, R, K] into state (in/out); in the last round walks the trees and writes `out`.

    Every rank runs it on the same words, so all get the same tokens. counts int32 [B, shard] (in/out) gains the emitted
    ids of this rank's shard. remaining int32 [B] (in/out) changes in the last round only. Other arguments: verify_tree.
    A request with filters in a run of fewer than 10 rounds is sampled without them and flagged BAD_PARAM.
    Cost: W * R * K words. Graph-safe: yes. Inference only.
    """
    global _op
    if _op is None:
        _op = _ops.get("verify_tree_combine")
    if partials.device.type != "cpu":
        _ops.require_kernel("verify_tree_combine", partials.device)
    _op(partials, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, sampling.temperature, sampling.top_k,
        sampling.top_p, sampling.min_p, counts, state, out.out_tokens, out.num_tokens_out, out.path, out.next_root,
        out.flags, out.logprobs, vocab_offset, vocab_size, round, rounds, int(rule))
    return out


def verify_tree_sharded(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor,
                        prefix_len: torch.Tensor, active: torch.Tensor, remaining: torch.Tensor, sampling: Sampling,
                        gather: Callable[[torch.Tensor], torch.Tensor], *, vocab_offset: int, vocab_size: int,
                        filters: bool, max_path: int, stop_ids: Optional[torch.Tensor] = None,
                        bias: Optional[torch.Tensor] = None, bitmask: Optional[torch.Tensor] = None,
                        penalties: Optional[torch.Tensor] = None, counts: Optional[torch.Tensor] = None,
                        rule: Rule = Rule.SAMPLE_MATCH, logprobs: bool = False) -> Verified:
    """verify_tree over a vocabulary sharded across ranks; logits never cross the wire.

    gather(words int64 [R, K]) -> int64 [W, R, K] in rank order (an all-gather). filters: whether any request of the batch
    may use top-k, top-p or min-p. The tokens are those of verify_tree on the whole vocabulary, bit for bit, on every rank.
    """
    rounds = num_rounds(filters, logprobs)
    rows, batch = logits.shape[0], cu_nodes.numel() - 1
    state = torch.zeros(rows, STATE_WORDS, dtype=torch.int64, device=logits.device)
    out = Verified.empty(batch, max_path, logits.device, logprobs)
    for r in range(rounds):
        words = verify_tree_partials(
            logits, tokens, parents, cu_nodes, prefix_len, active, sampling, state, vocab_offset=vocab_offset,
            vocab_size=vocab_size, round=r, rounds=rounds, bias=bias, bitmask=bitmask, penalties=penalties, counts=counts,
            rule=rule)
        verify_tree_combine(
            gather(words), tokens, parents, cu_nodes, prefix_len, active, remaining, sampling, state, out,
            vocab_offset=vocab_offset, vocab_size=vocab_size, round=r, rounds=rounds, stop_ids=stop_ids, counts=counts,
            rule=rule)
    return out
