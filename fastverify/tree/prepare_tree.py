"""prepare_tree: what every layer's attention and the acceptance walk need, computed once per step."""

from typing import NamedTuple, Optional

import torch

from .. import _ops


class Prepared(NamedTuple):
    """Outputs of prepare_tree; a field that is None is not computed."""

    mask: Optional[torch.Tensor] = None          # int64 [R, W] ancestor words over forest columns
    depth: Optional[torch.Tensor] = None         # int32 [R]
    positions: Optional[torch.Tensor] = None     # int32 [R] prefix_len + depth
    slots: Optional[torch.Tensor] = None         # int64 [R] KV slot of column row_base + i, -1: none
    first_child: Optional[torch.Tensor] = None   # int32 [R] request-local, -1: none; the lowest child
    next_sibling: Optional[torch.Tensor] = None  # int32 [R] request-local, -1: none; siblings ascend
    schedule: Optional[torch.Tensor] = None      # int32 [B+3] chunk tokens, total units, unit prefix sums [B+1]
    flags: Optional[torch.Tensor] = None         # int32 [B] bit 2: malformed parents, cu_nodes or page table

    @classmethod
    def empty(cls, rows: int, batch: int, words: int, device: "torch.device | str" = "cpu") -> "Prepared":
        """Buffers of every output."""
        kinds = ((torch.int64, rows, words), (torch.int32, rows), (torch.int32, rows), (torch.int64, rows),
                 (torch.int32, rows), (torch.int32, rows), (torch.int32, batch + 3), (torch.int32, batch))
        return cls(*(torch.zeros(shape, dtype=kind, device=device) for kind, *shape in kinds))


def prepare_tree(parents: Optional[torch.Tensor], cu_nodes: torch.Tensor, prefix_len: torch.Tensor,
                 page_table: torch.Tensor, page_size: int, out: Prepared, row_base: int = 0) -> Prepared:
    """Fills the outputs that `out` holds, for the rows [row_base, row_base + n_b) of every request's forest.

    parents     int32 [R] request-local, -1: none (forests are legal); None: a chain (node i's parent is i-1), which
                continues the columns before row_base, so depth = row_base + i
    cu_nodes    int32 [B+1], prefix_len int32 [B], page_table int32 [B, P]
    out         Prepared: tensors to write, mutated in place and returned

    A parent outside [-1, i) counts as -1 and sets flag bit 2. So do, where those outputs are asked for, a column past
    the mask words (its bit is left out) and one past the page table or on a negative page (slot -1); on the CPU also a
    position past int32, which wraps (a GPU writes the same and no flag). A cu_nodes that
    does not start at 0, decreases or passes R: flag bit 2 for all, no rows. Never a hang.
    Errors: RuntimeError on a wrong shape, dtype or device. Cost: O(R * W), one launch. Graph-safe.
    Source: csrc/tree/prepare_tree.cpp, .cu, csrc/algo/tree.h, csrc/algo/schedule.h.
    """
    _ops.require_kernel("prepare_tree", cu_nodes.device)
    _ops.get("prepare_tree")(parents, cu_nodes, prefix_len, page_table, *out, page_size, row_base)
    return out
