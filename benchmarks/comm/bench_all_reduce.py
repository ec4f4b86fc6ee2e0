"""all_reduce and all_reduce_rms_norm of real ranks: each transport against NCCL, chained calls in one CUDA graph.

    python benchmarks/comm/bench_all_reduce.py --world 2 --out benchmarks/results
    python benchmarks/comm/bench_all_reduce.py --world 2 --same-gpu          # all ranks on one card (run it under MPS)

A sample is one replay of a graph of 100 calls, divided by 100; the row is the minimum over ranks of the medians (what
waiting for a late rank adds is not the collective's), the note has the median over ranks. Correct: bits of all ranks equal
the sum in rank order (NCCL, fp8: within rounding of it). floor: none; see docs/performance.md for the model.
"""

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Bench, Timing, names, numbers, options, summary

from fastverify import Communicator, all_reduce, all_reduce_rms_norm

CHAIN, EPS = 100, 1e-6
NEVER = (1 << 63) - 1


def fold(parts: list) -> torch.Tensor:
    total = parts[0].float()
    for p in parts[1:]:
        total = total + p.float()
    return total.to(parts[0].dtype)


class Rank:
    """One process: its device, its inputs, and timing of chained calls."""

    def __init__(self, rank: int, args) -> None:
        self.rank, self.args = rank, args
        self.device = torch.device("cuda", 0 if args.same_gpu else rank)
        torch.cuda.set_device(self.device)
        self.gloo = dist.new_group(backend="gloo")

    def gathered(self, value) -> list:
        values = [None] * self.args.world
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def time(self, call) -> list:
        """Medians of every rank, microseconds per call."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                call()
        samples = []
        for i in range(self.args.repeats + 2):
            dist.barrier(self.gloo)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                samples.append(start.elapsed_time(end) * 1e3 / CHAIN)
        return self.gathered(summary(samples, True))

    def row(self, bench, provider: str, op: str, shape: dict, dtype, call, right) -> None:
        try:
            timings = self.time(call)
            correct = all(self.gathered(right()))
        except RuntimeError as error:
            if bench:
                bench.op = op
                bench.absent(provider, shape, dtype, f"failed: {str(error).strip().splitlines()[0][:160]}")
            return
        if bench:
            best = min(timings, key=lambda t: t.median_us)
            middle = sorted(t.median_us for t in timings)[len(timings) // 2]
            bench.op = op
            bench._add(provider, shape, dtype, Timing(*best), 0, correct, f"median over ranks {middle:.2f}", True)


def measure(me: Rank, bench, comms: dict, nccl) -> None:
    args = me.args
    for rows in args.rows:
        shape = dict(W=args.world, rows=rows, H=args.hidden)
        g = torch.Generator().manual_seed(1000 * rows)
        parts = [torch.randn(rows, args.hidden, generator=g).bfloat16() for _ in range(args.world)]
        x, want = parts[me.rank].to(me.device), fold(parts)
        residual = torch.randn(rows, args.hidden, generator=g).bfloat16()
        weight = torch.ones(args.hidden, dtype=torch.bfloat16, device=me.device)
        for name, comm in comms.items():
            out, normed, res = torch.empty_like(x), torch.empty_like(x), residual.to(me.device)
            forms = [("one-shot", comm.max_bytes), ("two-shot", 0)] if args.world > 2 else [("one-shot", comm.max_bytes)]
            for form, limit in forms:
                comm._handle.set_one_shot_bytes(limit)
                me.row(bench, f"{name} {form}", "all_reduce", shape, x.dtype, lambda: all_reduce(x, comm, out),
                       lambda: torch.equal(out.cpu(), want))
                me.row(bench, f"{name} {form}", "all_reduce_rms_norm", shape, x.dtype,
                       lambda: all_reduce_rms_norm(x, res, weight, comm, EPS, out=normed), lambda: bool(normed.isfinite().all()))
            comm._handle.set_fp8_bytes(0)
            bound = sum(p.float().abs() for p in parts) / 16 + sum(p.float().abs().amax() for p in parts) / 256
            me.row(bench, f"{name} fp8 wire", "all_reduce", shape, x.dtype, lambda: all_reduce(x, comm, out),
                   lambda: bool(((out.cpu().float() - sum(p.float() for p in parts)).abs() <= bound).all()))
            comm._handle.set_fp8_bytes(NEVER)
        if nccl is not None:
            y = x.clone()
            me.row(bench, "NCCL", "all_reduce", shape, x.dtype, lambda: dist.all_reduce(y, group=nccl), lambda: True)
            res = residual.to(me.device)

            def step():
                dist.all_reduce(y, group=nccl)
                torch.nn.functional.rms_norm(res.add_(y), (args.hidden,), weight, EPS)
            me.row(bench, "NCCL + add + norm", "all_reduce_rms_norm", shape, x.dtype, step, lambda: True)


def join(rank: int, args, port: int) -> Rank:
    """This process as one of the ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=args.world)
    me = Rank(rank, args)
    args.device = str(me.device)
    return me


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank: int, args, port: int) -> None:
    me = join(rank, args, port)
    bench = Bench("all_reduce", args) if rank == 0 else None
    comms = {t: Communicator(device=me.device, backend=t, max_bytes=max(args.rows) * args.hidden * 2) for t in args.transports}
    nccl = dist.new_group(backend="nccl") if not args.same_gpu and not args.no_nccl else None
    measure(me, bench, comms, nccl)
    for comm in comms.values():
        comm.check()
        comm.close()
    status = bench.finish() if bench else 0
    dist.barrier(me.gloo)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    parser = options("all_reduce of real ranks against NCCL")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--transports", type=names("peer", "host"), default=["peer", "host"])
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on GPU 0; start nvidia-cuda-mps-control first")
    parser.add_argument("--no-nccl", action="store_true")
    arguments = parser.parse_args()
    mp.spawn(worker, (arguments, free_port()), nprocs=arguments.world)
