"""all_reduce_columns: the sum over ranks of pieces of columns, each sent as soon as it is there, in one launch."""

from typing import Optional

import torch

from .. import _ops
from .._checks import describe


def all_reduce_columns(x: torch.Tensor, comm, out: Optional[torch.Tensor] = None, *, ready: bool = False, add: bool = False) -> torch.Tensor:
    """Sum of x over the ranks of `comm`, in rank order in fp32, rounded once; piece p becomes columns [p width, (p + 1) width) of out.

    x float32|float16|bfloat16 [pieces, rows, width], contiguous, rows of whole 16-byte vectors, at most comm.max_bytes bytes. A
        virtual communicator takes x and out with a leading [world].
    out [rows, pieces * width]: written, or with add=True (which needs it) the sum is added to it; allocated if not given. It must not
        overlap x (on the CPU it may: x is copied first).
    ready: the kernel is launched before x is there, on a stream of its own, and sends piece p once comm.mark(p) has run behind
        whatever writes it. It stays resident on at most 16 multiprocessors meanwhile.

    The bits are those of all_reduce (and out.add_()). One-shot: (W - 1) S bytes out of every rank. Half of its warps send while the
    other half receives, so a wire is used in both directions at once; all_reduce sends first. Not over NCCL (comm.transport).
    Errors and deadline: see all_reduce; a piece that is never marked ends at the deadline too. Cost: one launch. Graph-safe on CUDA.
    """
    stacked = comm.virtual and comm.world > 1
    if x.dim() != 3 + stacked:
        raise RuntimeError(f"all_reduce_columns: x must be {'[world, pieces, rows, width]' if stacked else '[pieces, rows, width]'}; "
                           f"got {describe(x)}. Fix: x.view(pieces, rows, width).")
    if out is None:
        if add:
            raise RuntimeError("all_reduce_columns: out must be given with add=True, which adds to it; got None. Fix: pass what the sum is "
                               "added to, or add=False.")
        lead, (pieces, rows, width) = x.shape[:-3], x.shape[-3:]
        out = x.new_empty(*lead, rows, pieces * width)
    comm.begin("all_reduce_columns", x)
    if comm.gathers:
        _ops.get("all_reduce_columns")(comm.gather(x), out, None, add, comm.handle)
        return out
    _ops.require_kernel("all_reduce_columns", x.device)
    _ops.get("all_reduce_columns")(x, out, comm.ready[:x.shape[-3]] if ready else None, add, comm.handle)
    return out
