"""One process per GPU that measures together: spawning, timing of chained calls in a graph, rows on rank 0. With args.cpu the same over
CPU processes (gloo): a rehearsal of everything but the numbers."""

import faulthandler
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Bench, Timing, summary

CHAIN = 100  # calls of one replay
SECONDS = 120  # a rank that does not come within so long is an error on the others
LOST = 9  # exit status of a rank whose section did not end in time


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
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    torch.set_num_threads(1 if getattr(args, "cpu", False) else 4)
    me = Rank(rank, world, args)
    status = body(me, args) or 0
    me.together()
    sys.stdout.flush()
    os._exit(status)  # a group with captured calls may hang in its destructor


class Rank:
    """One process: its device, timing of chained calls, and the rows (on rank 0)."""

    def __init__(self, rank: int, world: int, args) -> None:
        self.rank, self.world, self.args = rank, world, args
        self.cuda = not getattr(args, "cpu", False)
        self.device = torch.device("cuda", 0 if getattr(args, "same_gpu", False) else rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.gloo, self._fabric, self.broken = self.group("gloo"), None, []
        args.device = str(self.device)
        self.bench: Optional[Bench] = Bench("all_reduce", args) if rank == 0 else None
        self.together()

    def group(self, backend: str):
        """A process group of all ranks. Every group has a deadline."""
        return dist.new_group(backend=backend, timeout=timedelta(seconds=SECONDS))

    @property
    def fabric(self):
        """The group of torch's own collectives on the ranks' devices: NCCL; gloo in a rehearsal."""
        if self._fabric is None:
            self._fabric = self.group("nccl" if self.cuda else "gloo")
        return self._fabric

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def limit(self, seconds: float, what: str):
        """Ends this process (exit status LOST) with the place it is at if the block takes longer: kernels that wait for ever, or a lost rank."""
        def lost() -> None:
            print(f"rank {self.rank}: {what} did not end within {seconds:.0f} s", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(LOST)
        timer = threading.Timer(seconds, lost)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def together(self) -> None:
        dist.barrier(self.gloo)

    def gathered(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def time(self, call: Callable, chain: int = CHAIN, repeats: Optional[int] = None, captured: Optional[Callable] = None) -> list:
        """Medians, p20 and p80 of every rank, microseconds per call; on every rank, or RuntimeError on every rank. captured: called
        between capture and the first replay."""
        run, error = None, ""
        try:
            for _ in range(3):
                call()
            self.sync()
            run = self._captured(call, chain) if self.cuda else call
        except RuntimeError as exc:
            error = (str(exc).strip().splitlines() or ["RuntimeError"])[0]
        errors = [e for e in self.gathered(error) if e]
        if errors:
            raise RuntimeError(errors[0])
        if captured:
            captured()
        samples = []
        for i in range((repeats or self.args.repeats) + 2):
            self.together()
            us = self.elapsed(run)
            if i >= 2:
                samples.append(us / (chain if self.cuda else 1))
        return self.gathered(summary(samples, self.cuda))

    def _captured(self, call: Callable, chain: int) -> Callable:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(chain):
                    call()
        except BaseException:
            self.broken.append(graph)  # the destructor of a graph whose capture was lost ends the process
            torch.cuda.set_stream(before)
            raise
        return graph.replay

    def elapsed(self, run: Callable) -> float:
        """us of one run, between two events on the GPU; by the clock in a rehearsal."""
        if not self.cuda:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def row(self, provider: str, op: str, shape: dict, dtype: str, call: Callable, right: Callable = lambda: True,
            note: str = "", chain: int = CHAIN, repeats: Optional[int] = None, captured: Optional[Callable] = None) -> Optional[float]:
        """Measures and stores; returns us (minimum over ranks of the medians) on every rank, None where it failed."""
        try:
            timings = self.time(call, chain, repeats, captured)
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
