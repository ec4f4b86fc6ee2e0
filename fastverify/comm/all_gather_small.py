"""all_gather_small: a few KiB from every rank to every rank, one launch."""

from typing import Optional

import torch

from .. import _ops


def all_gather_small(x: torch.Tensor, comm, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x of every rank -> out [world, *x.shape], in rank order.

    x of any dtype, contiguous, the same shape on every rank, at most 64 KiB. out: written; allocated if not given; on CUDA
        x may be out[rank] but not overlap out otherwise.
        A virtual communicator takes x [world, ...] and gives out [world, world, ...].

    For keys, candidates and draft top-k: what verify_tree_combine folds. Errors and deadline: see all_reduce.
    Cost: one launch; every 4 bytes travel with a 4-byte tag. Graph-safe on CUDA.
    """
    shape = (comm.world, *x.shape) if not comm.virtual else (comm.world, comm.world, *x.shape[1:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    comm.begin("all_gather_small", x)
    if comm.gathers:
        _ops.get("all_gather_small")(comm.gather(x), out, comm.handle)
        return out
    _ops.require_kernel("all_gather_small", x.device)
    _ops.get("all_gather_small")(x, out, comm.handle)
    return out
