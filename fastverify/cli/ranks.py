"""Several ranks under torchrun: the group, this rank's part of the target, and what its collectives take."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

from ..eagle3.stats import Stats, SynchronizedStats
from .output import Output

TIMEOUT = 300  # seconds that a rank waits for one that has failed


def world_size() -> int:
    """Processes of this run: what torchrun says, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Silent(Output):
    """Output of the ranks other than the first: nothing but errors."""

    def __init__(self) -> None:
        super().__init__(json_only=True)
        self.out_terminal = self.err_terminal = False

    def json(self, data: dict) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Ranks:
    """The ranks of a run. One rank alone (comm None) is a run like any other."""

    def __init__(self, comm=None) -> None:
        self.comm = comm
        self.rank, self.world = (0, 1) if comm is None else (comm.rank, comm.world)

    @classmethod
    def join(cls, command: str, device: torch.device) -> "Ranks":
        """The group of the processes that torchrun started; set-up goes through gloo, sums through a Communicator."""
        if world_size() == 1:
            return cls()
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing or not dist.is_available() or not dist.is_gloo_available():
            raise ValueError(f"{command}: WORLD_SIZE={world_size()} must come with a group that can be joined; got "
                             f"{'no ' + ', '.join(missing) if missing else 'a torch without gloo'}. Fix: torchrun --nproc-per-node N -m "
                             f"fastverify {command} ...")
        from .. import Communicator
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        return cls(Communicator(device=device))

    def agree(self, value: Any) -> Any:
        """What the first rank says: for choices that depend on a clock."""
        return value if self.comm is None else self.comm.from_first(value)

    def gathered(self, value: Any) -> list:
        """The value of every rank, on every rank."""
        if self.comm is None:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def shard(self, target):
        from ..models.parallel import shard
        return target if self.comm is None else shard(target, self.comm)

    def leave(self) -> None:
        """Collective. gloo's threads abort a process that exits with them running."""
        if self.comm is not None:
            dist.barrier()
            self.comm.close()
            dist.destroy_process_group()
            self.comm = None


def local_device(device: torch.device) -> torch.device:
    """This process's GPU under torchrun; the device itself else."""
    if device.type != "cuda" or world_size() == 1:
        return device
    index = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    if index >= torch.cuda.device_count():
        raise ValueError(f"ranks: every rank must have a GPU; got {torch.cuda.device_count()} GPUs for local rank {index}. "
                         "Fix: start fewer processes, or --device cpu.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# ---- collectives of a round --------------------------------------------------------------------------------------------


class GatherStats(Stats):
    """Stats of a run on the CPU that also clock every gather: `communication` has the ms of each round."""

    def __init__(self, comm) -> None:
        super().__init__()
        self._comm, self._ms, self.communication = comm, 0.0, []

    @contextmanager
    def timer(self, stage: str):
        before = self._ms
        with super().timer(stage):
            yield
        if stage == "target":  # once a round
            self.communication.append(0.0)
        if stage != "prefill" and self.communication:
            self.communication[-1] += self._ms - before

    @contextmanager
    def clocking(self):
        gather = self._comm.gather

        def timed(x: torch.Tensor) -> torch.Tensor:
            start = time.perf_counter()
            try:
                return gather(x)
            finally:
                self._ms += (time.perf_counter() - start) * 1e3

        self._comm.gather = timed
        try:
            yield self
        finally:
            del self._comm.gather  # the method again


class KernelStats(SynchronizedStats):
    """Stats of a run on a GPU under torch.profiler, from the end of prefill on: the ms of the collectives' kernels.

    All ranks must run it: they meet before the first round, or the start of the slowest profiler would count as waiting.
    """

    def __init__(self) -> None:
        super().__init__(torch.cuda.synchronize)
        from torch.profiler import ProfilerActivity, profile
        self._profile, self._runs = profile(activities=[ProfilerActivity.CUDA], acc_events=True), False

    @contextmanager
    def timer(self, stage: str):
        with super().timer(stage):
            yield
        if stage == "prefill":
            self._profile.start()
            self._runs = True
            dist.barrier()

    def communication(self, rounds: int) -> list:
        """ms of each round. Ends the profile."""
        if not self._runs:
            return [0.0] * rounds
        self._profile.stop()
        return by_round([(e.time_range.start, e.time_range.elapsed_us(), e.name) for e in self._profile.events()
                         if e.device_type == torch.autograd.DeviceType.CUDA], rounds)


def by_round(kernels: list, rounds: int) -> list:
    """ms of collectives per round, from (start us, duration us, name) of all kernels of so many rounds of one shape: each has the same
    number of collectives. Where they do not divide, the mean."""
    from ..trace.events import KERNELS, kind_of
    found = [us for _, us, name in sorted(kernels) if kind_of(KERNELS, name)]
    per = len(found) // rounds if rounds else 0
    if not per or len(found) % rounds:
        return [sum(found) / 1e3 / max(1, rounds)] * rounds
    return [sum(found[i * per:(i + 1) * per]) / 1e3 for i in range(rounds)]


def time_rounds(decoder, prompts: list, shape, rounds: int) -> list:
    """Decoder.time_rounds of a sharded target; every round also has "communication": ms of this rank's collectives, its
    waiting for the others included."""
    comm = decoder.target.comm
    if comm.gathers:
        stats = GatherStats(comm)
        with stats.clocking():
            found = decoder.time_rounds(prompts, shape, rounds, stats)
        return [r | {"communication": c} for r, c in zip(found, stats.communication)]
    stats = KernelStats()
    found = decoder.time_rounds(prompts, shape, rounds, stats)
    return [r | {"communication": c} for r, c in zip(found, stats.communication(len(found)))]


def split_of(rows: list, ranks: Ranks) -> Optional[list]:
    """Per row, the pieces of its round on every rank; None with one rank."""
    if ranks.comm is None:
        return None
    mine = [row.round(row.stats).as_dict() for row in rows]
    everyone = ranks.gathered(mine)
    return [[dict(rank=r, **pieces[i]) for r, pieces in enumerate(everyone)] for i in range(len(rows))]
