"""Oracle of the comm stage: sums over ranks in float64, rounded where the wire rounds."""

import torch

__all__ = ["all_reduce", "all_reduce_columns", "all_reduce_rms_norm", "all_gather_small"]


def all_reduce(x, out, comm) -> None:
    """x [world, ...] of all ranks -> their sum, into out [...] or into every rank's part of out [world, ...]."""
    out.copy_(x.double().sum(0).to(x.dtype).expand_as(out))


def all_reduce_columns(x, out, ready, add, comm) -> None:
    """The sum of x [world, pieces, rows, width], into (or, with add, onto) out [rows, pieces * width] or every rank's part of it."""
    total = x.double().sum(0).to(x.dtype).transpose(0, 1).flatten(1)
    out.copy_((total.double() + out.double()).to(x.dtype) if add else total.expand_as(out))


def all_reduce_rms_norm(x, residual, weight, out, prefetch, comm, eps) -> None:
    """residual += sum of x [world, rows, H] (rounded as it travels), out = RMSNorm(residual) * weight. See csrc/ops.cpp."""
    total = residual.double() + x.double().sum(0).to(x.dtype).double()
    residual.copy_(total.to(x.dtype))
    r = residual.double()
    out.copy_((r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype))


def all_gather_small(x, out, comm) -> None:
    """x [world, ...] -> out [world, ...] of one rank, or [world, world, ...] of every rank."""
    out.copy_(x.expand(out.shape) if out.dim() == x.dim() else x.unsqueeze(0).expand(out.shape))
