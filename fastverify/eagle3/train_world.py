"""The processes of one training run: one, or those that torchrun started, one per GPU. Every process holds all weights."""

from __future__ import annotations

import os
from typing import Callable, Iterable

import torch
from torch import Tensor


class World:
    """rank, size and device of this process. With size 1 nothing here communicates.

    device  "auto" (the GPU of LOCAL_RANK where there is one), "cpu" or "cuda"
    Gradients are summed in one flat all-reduce a step: NCCL on GPUs, gloo on CPUs.
    """

    def __init__(self, device: str = "auto") -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpu else "cpu"
        if gpu:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            torch.distributed.init_process_group("nccl" if gpu else "gloo")

    @property
    def first(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> None:
        """Each tensor becomes its sum over all processes, in place."""
        if self.size == 1:
            return
        for group in _by_dtype(tensors):
            flat = torch.cat([t.flatten() for t in group])
            torch.distributed.all_reduce(flat)
            for t, part in zip(group, flat.split([t.numel() for t in group])):
                t.copy_(part.view_as(t))

    def any(self, value: bool) -> bool:
        """Whether any process says so."""
        if self.size == 1:
            return value
        flag = torch.tensor(float(value), device=self.device)
        self.sum(flag)
        return bool(flag > 0)

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def total(self) -> "Callable | None":
        return self.sum if self.size > 1 else None


def _by_dtype(tensors: Iterable[Tensor]) -> list:
    groups: dict = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())
