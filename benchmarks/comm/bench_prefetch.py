"""Does the weight that all_reduce_rms_norm pulls into L2 come from L2 afterwards? The product that follows says it.

    python benchmarks/comm/bench_prefetch.py --world 2 --out benchmarks/results     # --same-gpu under MPS

One call is all_reduce_rms_norm and then rows x weight [N, H]; 100 of them in a CUDA graph, over as many weights as pass three
L2 sizes between two uses of one. Rows: the norm alone; the product alone with cold and with warm weights (one weight over
and over); both in a row without prefetch; both with the weight of the product prefetched. Every sum is checked by all_reduce's
own benchmark; here the product with and without prefetch must be equal.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_all_reduce import EPS, Rank, free_port, join
from harness import COLD_L2S, Bench, numbers, options

from fastverify import Communicator, all_reduce_rms_norm
from fastverify.comm.all_reduce_rms_norm import prefetch_table


def measure(me: Rank, bench, comm) -> None:
    args = me.args
    g = torch.Generator(device=me.device).manual_seed(me.rank)
    l2 = torch.cuda.get_device_properties(me.device).L2_cache_size
    for out_features in args.outs:
        shape = dict(W=args.world, rows=args.rows, H=args.hidden, N=out_features)
        nbytes = out_features * args.hidden * 2
        count = -(-COLD_L2S * l2 // nbytes) + 1
        weights = [torch.randn(out_features, args.hidden, generator=g, device=me.device).bfloat16() for _ in range(count)]
        tables = [prefetch_table([w]) for w in weights]
        x = torch.randn(args.rows, args.hidden, generator=g, device=me.device).bfloat16()
        residual, norm = torch.zeros_like(x), torch.ones(args.hidden, device=me.device, dtype=torch.bfloat16)
        hidden, y = torch.ones_like(x), torch.empty(args.rows, out_features, device=me.device, dtype=torch.bfloat16)
        turn = iter(range(1 << 30))

        def step(sum_: bool, product: bool, prefetch: bool, cold: bool = True) -> None:
            i = next(turn) % count if cold else 0
            if sum_:
                all_reduce_rms_norm(x, residual, norm, comm, EPS, tables[i] if prefetch else None, out=hidden)
            if product:
                torch.mm(hidden, weights[i].t(), out=y)

        def right() -> bool:
            """The norm of the residual as it stands (rows without a sum leave both alone)."""
            r = residual.double()
            want = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS)
            return bool(((hidden.double() - want).abs() <= 2.0**-7 * (want.abs() + 1e-2)).all()) or not r.any()

        for name, kwargs in [("sum + norm", dict(sum_=True, product=False, prefetch=False)),
                             ("sum + norm, prefetch", dict(sum_=True, product=False, prefetch=True)),
                             ("product, cold", dict(sum_=False, product=True, prefetch=False)),
                             ("product, warm", dict(sum_=False, product=True, prefetch=False, cold=False)),
                             ("both", dict(sum_=True, product=True, prefetch=False)),
                             ("both, prefetch", dict(sum_=True, product=True, prefetch=True))]:
            residual.zero_()
            me.row(bench, name, "all_reduce_rms_norm + product", shape, x.dtype, lambda: step(**kwargs), right)


def worker(rank: int, args, port: int) -> None:
    me = join(rank, args, port)
    bench = Bench("all_reduce_rms_norm + product", args) if rank == 0 else None
    with Communicator(device=me.device, backend=args.transport, max_bytes=args.rows * args.hidden * 2) as comm:
        measure(me, bench, comm)
        comm.check()
    if bench:
        bench.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("L2 prefetch during all_reduce_rms_norm")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--outs", type=numbers, default=[512, 1024, 2112])
    parser.add_argument("--transport", default="peer")
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on GPU 0; start nvidia-cuda-mps-control first")
    arguments = parser.parse_args()
    mp.spawn(worker, (arguments, free_port()), nprocs=arguments.world)
