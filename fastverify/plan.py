"""VerifyPlan: the only allocator of step buffers. A step writes into it and allocates nothing of its own."""

from typing import Any

import torch

from . import _ops
from .accept.verify_tree import Verified, verify_tree_workspace
from .tree.build_tree import Tree
from .tree.prepare_tree import Prepared


class VerifyPlan:
    """Buffers of one verify step for `batch` requests of at most `nodes` tree nodes and `max_path` path entries.

    tree        Tree                   R = batch * nodes rows: what is verified
    prepared    Prepared               slots, schedule and flags of those rows
    out         Verified               the accepted path and the emitted tokens
    verify_workspace uint8             of verify_tree
    aux_out     [B*D, A] or None       aux hidden states of the emitted rows, flat by cu_out
    cu_out      int32 [B+1]            prefix sums of num_tokens_out
    next_tokens int32 [B*D + 1]        the emitted tokens, flat by cu_out (the last entry takes what is cut)
    extend      Prepared               positions, slots and schedule of the draft's extend over those rows
    grow        GrowBuffers or None    what an EAGLE-3 draft phase of beams `k` and `levels` writes; owns the tree then
    ranks       int64 [B]: 1, 2, ... B
    no_pool     one dead pool entry per request: build_tree with it gives the bare root (plain decoding)

    Creating a plan also runs the probe op once, so that nothing is loaded later inside a graph capture.
    """

    def __init__(self, batch: int, nodes: int, max_path: int, aux_width: int = 0, dtype: torch.dtype = torch.float32,
                 device: "torch.device | str" = "cpu", logprobs: bool = False, draft: Any = None, k: int = 1,
                 levels: int = 1) -> None:
        self.batch, self.nodes, self.max_path = batch, nodes, max_path
        rows, out_rows = batch * nodes, batch * max_path
        i32 = dict(dtype=torch.int32, device=device)
        self.grow = None
        if draft is not None:
            from .eagle3.grow import GrowBuffers

            self.grow = GrowBuffers.empty(draft, batch, k, levels, nodes)
        self.tree = self.grow.tree if self.grow else Tree.empty(batch, nodes, torch.int32, device)
        self.prepared = Prepared(slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
                                 schedule=torch.zeros(batch + 3, **i32), flags=torch.zeros(batch, **i32))
        self.out = Verified.empty(batch, max_path, device, logprobs)
        self.verify_workspace = verify_tree_workspace(device)
        self.aux_out = torch.zeros(out_rows, aux_width, dtype=dtype, device=device) if aux_width else None
        self.cu_out = torch.zeros(batch + 1, **i32)
        self.next_tokens = torch.zeros(out_rows + 1, **i32)
        self.extend = Prepared(positions=torch.zeros(out_rows, **i32),
                               slots=torch.full((out_rows,), -1, dtype=torch.int64, device=device),
                               schedule=torch.zeros(batch + 3, **i32))
        self.no_pool = (torch.full((batch, 1), -torch.inf, dtype=torch.float32, device=device), torch.zeros(batch, 1, **i32),
                        torch.full((batch, 1), -1, **i32))
        self._column = torch.arange(max_path, **i32)
        self.ranks = torch.arange(1, batch + 1, dtype=torch.int64, device=device)
        probe = torch.zeros(1, dtype=torch.float32, device=device)
        _ops.require_kernel("probe", probe.device)
        _ops.get("probe")(probe, probe.clone())

    def flatten_tokens(self) -> torch.Tensor:
        """out.out_tokens [B, D] -> next_tokens, row cu_out[b] + i; rows past the last are 0. Returns next_tokens[:B*D]."""
        place = self.cu_out[:-1, None] + self._column
        cut = self._column >= self.out.num_tokens_out[:, None]
        place = torch.where(cut, self.next_tokens.numel() - 1, place).flatten().long()
        self.next_tokens.zero_()
        self.next_tokens.scatter_(0, place, self.out.out_tokens.flatten().int())
        return self.next_tokens[:-1]
