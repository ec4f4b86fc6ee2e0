"""build_tree: the pool of drafted candidates -> the verify tree."""

from typing import NamedTuple, Optional

import torch

from .. import _ops


class Tree(NamedTuple):
    """A batch of verify trees, rows flat by cu_nodes; node 0 of a request is its root. Padding rows: 0, parents -1."""

    tokens: torch.Tensor     # int32|int64 [R]
    parents: torch.Tensor    # int32 [R] request-local, -1: root
    mask: torch.Tensor       # int64 [R, W] ancestor words, self included
    depth: torch.Tensor      # int32 [R]
    positions: torch.Tensor  # int32 [R] prefix_len + depth
    cu_nodes: torch.Tensor   # int32 [B+1]
    flags: torch.Tensor      # int32 [B] bits 2 (malformed parents) and 3 (an id was clamped)

    @classmethod
    def empty(cls, batch: int, num_nodes: int, token_dtype: torch.dtype = torch.int32,
              device: "torch.device | str" = "cpu") -> "Tree":
        """Buffers for `batch` trees of at most `num_nodes` nodes."""
        rows, words = batch * num_nodes, -(-num_nodes // 64)
        kinds = ((token_dtype, rows), (torch.int32, rows), (torch.int64, rows, words), (torch.int32, rows),
                 (torch.int32, rows), (torch.int32, batch + 1), (torch.int32, batch))
        return cls(*(torch.zeros(shape, dtype=kind, device=device) for kind, *shape in kinds))


def build_tree(pool_scores: torch.Tensor, pool_tokens: torch.Tensor, pool_parents: torch.Tensor,
               root_tokens: torch.Tensor, prefix_len: torch.Tensor, active: torch.Tensor, num_nodes: int,
               vocab_size: int, out: Optional[Tree] = None) -> Tree:
    """The root and the num_nodes - 1 best pool entries, kept in pool order: closed under ancestors, siblings ascending.

    pool_scores, pool_tokens, pool_parents  float32, int32|int64, int32 [B, M], filled by grow_tree or NgramDrafter.pool
    root_tokens  int32|int64 [B]: the last emitted token of each request
    prefix_len   int32 [B], active int32 [B]; an inactive request gets no rows
    num_nodes    1 <= N <= 1024, the root included; a request with fewer live entries gets fewer rows
    out          Tree whose tensors have at least B*N rows; written and returned, allocated when None

    Effective score = min(score, 0, parent's effective score), NaN = -inf, ties to the lower pool index. A parent not
    in [-1, own index) makes the entry invalid and sets flag bit 2; an id of a chosen node outside [0, vocab_size) is
    clamped and sets bit 3. Errors: RuntimeError on a wrong shape, dtype or device; on CUDA also for M above 2^19.
    Cost: O(B * (M + N * W)), one launch. Graph-safe with `out`.
    Source: csrc/tree/build_tree.cpp, .cu.
    """
    if out is None:
        out = Tree.empty(pool_scores.size(0), num_nodes, root_tokens.dtype, pool_scores.device)
    _ops.require_kernel("build_tree", pool_scores.device)
    _ops.get("build_tree")(pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, *out, num_nodes,
                           vocab_size)
    return out
