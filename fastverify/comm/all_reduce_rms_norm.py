"""all_reduce_rms_norm: tensor-parallel sum, residual add and RMSNorm in one launch, next weights pulled into L2 meanwhile."""

from typing import Optional

import torch

from .. import _ops


def all_reduce_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, comm, eps: float = 1e-6,
                        prefetch: Optional[torch.Tensor] = None, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    """residual += sum over ranks of x; returns RMSNorm(residual) * weight.

    x [rows, H] float32|float16|bfloat16, this rank's partial result; residual [rows, H] the same on every rank, changed;
        weight [H]. A virtual communicator takes x, residual and out with a leading [world].
    prefetch int64 [P, 2] on the device: (address, bytes) ranges that idle blocks pull into L2 (see prefetch_table).
    out: like residual, written; allocated if not given. out, residual and weight must not share memory: refused. On CUDA x may be
        out itself but not overlap it otherwise.

    The sum is rounded to x's dtype (as it travels), added to the residual in fp32 and rounded again; the norm is taken of
    that in fp32 and rounded once (Zhang and Sennrich 2019, RMSNorm). All ranks get the same bits.
    Errors and deadline: see all_reduce. Cost: one launch, 3 rows read and 2 written per row. Graph-safe on CUDA.
    """
    out = torch.empty_like(residual) if out is None else out
    comm.begin("all_reduce_rms_norm", x)
    if comm.gathers:
        _ops.get("all_reduce_rms_norm")(comm.gather(x), residual, weight, out, None, comm.handle, eps)
        return out
    _ops.require_kernel("all_reduce_rms_norm", x.device)
    _ops.get("all_reduce_rms_norm")(x, residual, weight, out, prefetch, comm.handle_for(x.nbytes), eps)
    return out


def prefetch_table(weights: list, limit: Optional[int] = None) -> torch.Tensor:
    """Addresses and sizes of contiguous CUDA tensors as all_reduce_rms_norm takes them; make it once, keep the tensors. limit: bytes
    in all (the first ones are taken): more than the L2 holds would push out what was pulled in."""
    rows, left = [], limit if limit is not None else sum(w.nbytes for w in weights)
    for w in weights:
        if left > 0:
            rows.append([w.data_ptr(), min(w.nbytes, left)])
            left -= rows[-1][1]
    return torch.tensor(rows, dtype=torch.int64, device=weights[0].device).reshape(-1, 2)
