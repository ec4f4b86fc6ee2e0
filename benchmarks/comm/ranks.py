"""One process per GPU that measures together: spawning, timing of chained calls in a graph, rows on rank 0."""

import os
import socket
import sys
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Bench, Timing, summary

CHAIN = 100  # calls of one replay


def fold(parts: list) -> torch.Tensor:
    """The sum in rank order in fp32, rounded once."""
    total = parts[0].float()
    for p in parts[1:]:
        total = total + p.float()
    return total.to(parts[0].dtype)


def spawn(body: Callable, args, world: int) -> None:
    """body(Rank, args) in `world` processes; raises if one fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_enter, (body, args, world, port), nprocs=world)


def _enter(rank: int, body: Callable, args, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(4)
    me = Rank(rank, world, args)
    status = body(me, args) or 0
    me.together()
    sys.stdout.flush()
    os._exit(status)  # a group with captured calls may hang in its destructor


class Rank:
    """One process: its device, timing of chained calls, and the rows (on rank 0)."""

    def __init__(self, rank: int, world: int, args) -> None:
        self.rank, self.world, self.args = rank, world, args
        self.device = torch.device("cuda", 0 if getattr(args, "same_gpu", False) else rank)
        torch.cuda.set_device(self.device)
        self.gloo = dist.new_group(backend="gloo")
        args.device = str(self.device)
        self.bench: Optional[Bench] = Bench("all_reduce", args) if rank == 0 else None
        self.together()

    def together(self) -> None:
        dist.barrier(self.gloo)

    def gathered(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def time(self, call: Callable, chain: int = CHAIN, repeats: Optional[int] = None) -> list:
        """Medians, p20 and p80 of every rank, microseconds per call; on every rank, or RuntimeError on every rank."""
        graph, error = None, ""
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(chain):
                    call()
        except RuntimeError as exc:
            error = (str(exc).strip().splitlines() or ["RuntimeError"])[0]
        errors = [e for e in self.gathered(error) if e]
        if errors:
            raise RuntimeError(errors[0])
        samples = []
        for i in range((repeats or self.args.repeats) + 2):
            self.together()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                samples.append(start.elapsed_time(end) * 1e3 / chain)
        return self.gathered(summary(samples, True))

    def row(self, provider: str, op: str, shape: dict, dtype: str, call: Callable, right: Callable = lambda: True,
            note: str = "", chain: int = CHAIN, repeats: Optional[int] = None) -> Optional[float]:
        """Measures and stores; returns us (minimum over ranks of the medians) on every rank, None where it failed."""
        try:
            timings = self.time(call, chain, repeats)
            correct = all(self.gathered(bool(right())))
        except RuntimeError as error:
            self.absent(provider, op, shape, dtype, f"failed: {str(error).strip().splitlines()[0][:160]}")
            return None
        best = min(timings, key=lambda t: t[0])
        middle = sorted(t[0] for t in timings)[len(timings) // 2]
        if self.bench:
            self.bench.op = op
            text = f"median over ranks {middle:.2f}" + (f"; {note}" if note else "")
            self.bench._add(provider, shape, dtype, Timing(*best), 0, correct, text, True)
        return best[0]

    def time_or_none(self, call: Callable, chain: int = CHAIN, repeats: Optional[int] = None) -> Optional[float]:
        """us (minimum over ranks of the medians), None where it failed."""
        try:
            return min(t[0] for t in self.time(call, chain, repeats))
        except RuntimeError:
            return None

    def known_row(self, provider: str, op: str, shape: dict, dtype: str, us: float, right: bool, note: str) -> None:
        """A row whose time is known already."""
        correct = all(self.gathered(right))
        if self.bench:
            self.bench.op = op
            self.bench._add(provider, shape, dtype, Timing(us, us, us, True), 0, correct, note, True)

    def absent(self, provider: str, op: str, shape: dict, dtype: str, why: str) -> None:
        if self.bench:
            self.bench.op = op
            self.bench.absent(provider, shape, dtype, why)
