"""Handles and communicators for the tests of the comm stage."""

import torch
from conftest import BACKENDS

from fastverify import Communicator
from fastverify.comm.topology import _control

KERNELS = [b for b in BACKENDS if b in ("cuda", "emulated")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def gathered(world: int, max_bytes: int = 1 << 20):
    return _control().Handle(world=world, rank=0, local_ranks=1, transport="gathered", device=-1, blocks=1,
                             max_bytes=max_bytes, one_shot_bytes=0, deadline_ns=0, ranks=[])


def virtual(backend: str, world: int, **kwargs) -> Communicator:
    kwargs.setdefault("blocks", 2 if backend == "emulated" else 16)
    kwargs.setdefault("max_bytes", 1 << 16)
    return Communicator.make_virtual(world, "cpu" if backend == "emulated" else "cuda", emulated=backend == "emulated", **kwargs)


def fold(x: torch.Tensor) -> torch.Tensor:
    """The sum as the contract rounds it: fp32 in rank order, once to the dtype."""
    total = x[0].float()
    for part in x[1:]:
        total = total + part.float()
    return total.to(x.dtype)
