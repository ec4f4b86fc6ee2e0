"""all_reduce_rms_norm form by form against all_reduce, in one run: blocks per row, registers or shared memory, overlapped launches.

    python benchmarks/comm/bench_norm_forms.py --world 2 --out benchmarks/results     # --same-gpu under MPS

Calls are chained in a CUDA graph as in bench_all_reduce.py. Every form must give the bits of the first.
"""

import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_all_reduce import EPS, Rank, free_port, join
from harness import Bench, names, numbers, options

from fastverify import Communicator, all_reduce, all_reduce_rms_norm

NO_OVERLAP, NO_REGISTERS = 1 << 8, 1 << 9
FORMS = [("as chosen", 0), ("8 blocks a row", 8), ("4 blocks a row", 4), ("2 blocks a row", 2), ("1 block a row", 1),
         ("8 blocks, shared memory", NO_REGISTERS | 8), ("1 block, shared memory", NO_REGISTERS | 1), ("as chosen, no overlap", NO_OVERLAP)]


def measure(me: Rank, bench, comm, name: str) -> None:
    for rows in me.args.rows:
        shape = dict(W=me.args.world, rows=rows, H=me.args.hidden)
        g = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, me.args.hidden, generator=g).bfloat16().to(me.device) + me.rank
        before = torch.randn(rows, me.args.hidden, generator=g).bfloat16().to(me.device)
        weight = torch.rand(me.args.hidden, generator=g).bfloat16().to(me.device)
        out, residual, first = torch.empty_like(x), before.clone(), []

        def right() -> bool:
            residual.copy_(before)
            all_reduce_rms_norm(x, residual, weight, comm, EPS, out=out)
            first[:] = first or [residual.clone(), out.clone()]
            return torch.equal(first[0], residual) and torch.equal(first[1], out)

        for label, forced in (("sum", 0), ("sum, no overlap", NO_OVERLAP)):
            comm._handle.set_forced(forced)
            me.row(bench, f"{name}: {label}", "all_reduce", shape, x.dtype, lambda: all_reduce(x, comm, out), lambda: True)
        for label, forced in FORMS:
            comm._handle.set_forced(forced)
            me.row(bench, f"{name}: {label}", "all_reduce_rms_norm", shape, x.dtype,
                   lambda: all_reduce_rms_norm(x, residual, weight, comm, EPS, out=out), right)
        comm._handle.set_forced(0)


def worker(rank: int, args, port: int) -> None:
    me = join(rank, args, port)
    bench = Bench("all_reduce_rms_norm", args) if rank == 0 else None
    for name in args.transports:
        with Communicator(device=me.device, backend=name, max_bytes=max(args.rows) * args.hidden * 2) as comm:
            comm.set_one_shot_bytes(comm.max_bytes)
            measure(me, bench, comm, name)
            comm.check()
    if bench:
        bench.finish()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = options("forms of all_reduce_rms_norm")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--transports", type=names("peer", "host"), default=["peer", "host"])
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on GPU 0; start nvidia-cuda-mps-control first")
    arguments = parser.parse_args()
    mp.spawn(worker, (arguments, free_port()), nprocs=arguments.world)
