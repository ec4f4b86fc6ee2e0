"""Checks of the comm ops: folded parts on the CPU, virtual ranks on a GPU. Registered by importing it."""

import torch

from ..comm.communicator import Communicator
from ..comm.topology import _control
from .check_cases import SENTINEL, call, check, same

WORLD, ROWS, HIDDEN, EPS = 3, 4, 72, 1e-5


def _handles(device: str) -> list:
    """(handle address, owner) per form: one-shot and two-shot on a GPU, the fold on the CPU."""
    if device == "cpu":
        h = _control().Handle(world=WORLD, rank=0, local_ranks=1, transport="gathered", device=-1, blocks=1,
                              max_bytes=1 << 16, one_shot_bytes=0, deadline_ns=0, ranks=[])
        return [(h.address, h)]
    return [(c.handle, c) for limit in (0, 1 << 16)
            for c in [Communicator.make_virtual(WORLD, device, 1 << 16, one_shot_bytes=limit)]]


def _run(op: str, device: str, case: dict, per_rank: tuple, tolerance: dict) -> int:
    """per_rank: names of the outputs that virtual ranks have one each of. The oracle takes the same arguments."""
    handles = _handles(device)
    for address, _owner in handles:
        given = dict(case, comm=address)
        if device != "cpu":
            given |= {n: case[n].expand(WORLD, *case[n].shape).contiguous() for n in per_rank}
        same(call(op, device, given), call(op, "reference", given), tolerance)
    return len(handles)


@check("all_reduce")
def all_reduce(device: str, rng) -> int:
    x = torch.randn(WORLD, ROWS, HIDDEN, generator=rng)
    return _run("all_reduce", device, dict(x=x, out=torch.full((ROWS, HIDDEN), float(SENTINEL))), ("out",), dict(out=1e-6))


@check("all_reduce_columns")
def all_reduce_columns(device: str, rng) -> int:
    case = dict(x=torch.randn(WORLD, 2, ROWS, 36, generator=rng), out=torch.randn(ROWS, HIDDEN, generator=rng), ready=None, add=True)
    return _run("all_reduce_columns", device, case, ("out",), dict(out=1e-6))


@check("all_reduce_rms_norm")
def all_reduce_rms_norm(device: str, rng) -> int:
    case = dict(x=torch.randn(WORLD, ROWS, HIDDEN, generator=rng), residual=torch.randn(ROWS, HIDDEN, generator=rng),
                weight=torch.rand(HIDDEN, generator=rng), out=torch.full((ROWS, HIDDEN), float(SENTINEL)), eps=EPS)
    return _run("all_reduce_rms_norm", device, case, ("residual", "out"), dict(residual=1e-6, out=1e-5))


@check("all_gather_small")
def all_gather_small(device: str, rng) -> int:
    x = torch.randint(-(1 << 40), 1 << 40, (WORLD, 5), generator=rng)
    return _run("all_gather_small", device, dict(x=x, out=torch.full((WORLD, 5), SENTINEL)), ("out",), {})
