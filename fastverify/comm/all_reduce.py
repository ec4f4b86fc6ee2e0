"""all_reduce: the sum over ranks, one launch, the same bits on every rank."""

from typing import Optional

import torch

from .. import _ops


def all_reduce(x: torch.Tensor, comm, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Sum of x over the ranks of `comm`, in rank order in fp32, rounded once to x's dtype.

    x float32|float16|bfloat16, contiguous, the same shape on every rank, at most comm.max_bytes bytes.
        A virtual communicator takes x [world, ...], one part per rank.
    comm: fastverify.Communicator. out: like x, written (may be x itself, on CUDA no other overlap); allocated if not given.

    Equal bits on all ranks, from run to run, and for every message size at which one-shot and two-shot exchange roles.
    Errors: RuntimeError for shapes, dtypes, devices, a closed communicator. A rank that does not come within the
    deadline makes `out` NaN and the next comm.check() raise with its number. Cost: one launch; bytes on the wire per
    rank: (W - 1) S one-shot, 2 (W - 1) / W S two-shot. Graph-safe on CUDA. On the CPU it goes through the process
    group: see Communicator for what that means for the deadline and for shapes that differ.
    """
    out = torch.empty_like(x) if out is None else out
    comm.begin("all_reduce", x)
    if comm.gathers:
        _ops.get("all_reduce")(comm.gather(x), out, comm.handle)
        return out
    _ops.require_kernel("all_reduce", x.device)
    _ops.get("all_reduce")(x, out, comm.handle_for(x.nbytes))
    return out
