"""next_inputs: what one verify leaves for the next cycle, and the record of it that the host reads behind the GPU."""

from typing import Any, NamedTuple, Optional

import torch

from .. import _ops
from ..accept.verify_tree import Verified
from ..tree.build_tree import Tree

HEADER, FIELDS = 4, 5  # csrc/algo/next_inputs.h


class Pairs(NamedTuple):
    """True pairs that plain cycles produced and the draft has not seen: P places per request and one for rows without.

    tokens int32 [B*P + 1], count int32 [B], slots int64 [R]: where each row of the last forward goes
    """

    tokens: torch.Tensor
    count: torch.Tensor
    slots: torch.Tensor


def next_inputs(out: Verified, tree: Tree, active: torch.Tensor, prefix_len: torch.Tensor, root: torch.Tensor, *,
                next_tokens: Optional[torch.Tensor] = None, pairs: Optional[Pairs] = None, ring: Any = None,
                first: int = 0) -> None:
    """Advances every active request by what verify_tree emitted; nothing is read on the host.

    out, tree    of the verify (B <= 1024); the tree's cu_nodes and depth are read
    active, prefix_len, root  int32 [B] (in/out): prefix_len += num_tokens_out, root = next_root, active = 0 where the flags
                 hold STOP, BUDGET, BAD_ROW or EMPTY_ROW. Inactive requests are left alone
    next_tokens  int32 [>= B*D], written: emitted tokens flat in the order of requests, then zeros
    pairs        Pairs (in/out) of one-node trees: the emitted token joins its request's list, `slots` says where its features go
    ring         Ring (eagle3/ring.py), written: one record more. `first`: row of the batch that request 0 is; copied to the record
    Errors: RuntimeError on a wrong shape, dtype or device. Cost: one launch of one block. Graph-safe.
    Source: csrc/kv/next_inputs.cpp, .cu, csrc/algo/next_inputs.h.
    """
    _ops.require_kernel("next_inputs", active.device)
    tokens, count, slots = pairs if pairs else (None, None, None)
    _ops.get("next_inputs")(
        out.out_tokens, out.num_tokens_out, out.path, out.next_root, out.flags, tree.cu_nodes, tree.depth, active, prefix_len, root,
        next_tokens, slots, tokens, count, ring.sequence if ring else None, ring.words if ring else None, first)
