"""Acceptance where every rank holds the logits of its own part of the vocabulary."""

import torch

from ..accept.verify_tree_combine import verify_tree_sharded


def accept_sharded(target, logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor, req, out, *,
                   filters: bool = True, bitmask=None) -> None:
    """verify_tree over the ranks of target.comm into `out` (Verified): keys and partial sums travel, logits do not; every rank
    finds the same tokens. logits [R, shard] of this rank; req: Requests (remaining and counts change).

    filters: whether any request may use top-k, top-p or min-p (10 small gathers instead of 1). Graph-safe on CUDA.
    """
    found = verify_tree_sharded(
        logits, tokens, parents, cu_nodes, req.prefix_len, req.active, req.remaining, req.sampling, target.comm.gather_rows,
        vocab_offset=target.vocab_range[0], vocab_size=target.config.vocab_size, filters=filters, max_path=out.path.shape[1],
        stop_ids=req.stop_ids, bias=req.bias, bitmask=bitmask, penalties=req.penalties, counts=req.counts)
    for name in ("out_tokens", "num_tokens_out", "path", "next_root", "flags"):
        getattr(out, name).copy_(getattr(found, name))
