"""grow_tree: one level of a dynamic draft tree (the EAGLE-2 rule) in one launch."""

from typing import NamedTuple

import torch

from .. import _ops


class DraftState(NamedTuple):
    """Buffers of one draft phase; rows are flat, request of rank r among the active ones owns rows k*r .. k*r+k-1."""

    cu_nodes: torch.Tensor        # int32 [B+1] rows of the beam (k or 0 per request)
    scores: torch.Tensor          # float32 [B*k] cumulative log-probabilities of the beam
    pool_index: torch.Tensor      # int32 [B*k] place of each beam node in the pool
    mask: torch.Tensor            # int64 [B*k, W] ancestor words of the beam over forest columns
    pool_scores: torch.Tensor     # float32 [B, M], M >= k + (levels - 1) * k * k
    pool_tokens: torch.Tensor     # int32 [B, M]
    pool_parents: torch.Tensor    # int32 [B, M] pool index of the parent, -1: child of the root
    next_tokens: torch.Tensor     # int32 [B*k] inputs of the next draft forward
    next_positions: torch.Tensor  # int32 [B*k]
    next_hidden: torch.Tensor     # [B*k, H]

    @classmethod
    def empty(cls, batch: int, k: int, levels: int, hidden_size: int, dtype: torch.dtype = torch.float32,
              device: "torch.device | str" = "cpu") -> "DraftState":
        """Buffers for `levels` calls of grow_tree (level 0 .. levels-1)."""
        rows, pool, words = batch * k, k + (levels - 1) * k * k, -(-levels * k // 64)
        kinds = ((torch.int32, batch + 1), (torch.float32, rows), (torch.int32, rows), (torch.int64, rows, words),
                 (torch.float32, batch, pool), (torch.int32, batch, pool), (torch.int32, batch, pool),
                 (torch.int32, rows), (torch.int32, rows), (dtype, rows, hidden_size))
        return cls(*(torch.zeros(shape, dtype=kind, device=device) for kind, *shape in kinds))


def grow_tree(values: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, prefix_len: torch.Tensor,
              active: torch.Tensor, state: DraftState, level: int) -> DraftState:
    """Writes the candidates of `level` into the pool and makes the k best of them the next beam.

    values, tokens  float32, int32 [rows, k] of draft_topk; rows = B at level 0 (row r: the r-th active request's last
                    true pair), B*k later (the beam)
    hidden          any float dtype [rows, H]: what those rows feed back; copied to the children as bytes
    prefix_len      int32 [B] length of the draft's KV cache; positions of the next beam are prefix_len + level
    active          int32 [B]
    state           DraftState, mutated in place and returned. The new beam node i gets forest column level*k + i

    Score = parent's score + value in float32; NaN counts as -inf; ties go to the lower pool index; the beam is sorted.
    Errors: RuntimeError on a wrong shape, dtype or device, or when columns or candidates do not fit the buffers.
    Cost: O(B * (k*k + k*H)), one launch. Graph-safe. Source: csrc/tree/grow_tree.cpp, .cu.
    """
    _ops.require_kernel("grow_tree", values.device)
    _ops.get("grow_tree")(values, tokens, hidden, prefix_len, active, *state, level)
    return state
