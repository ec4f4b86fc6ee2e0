"""tree_attention on random trees beside its peers: microseconds per layer, floor by bytes, correctness of the timed outputs.

    python benchmarks/attention/bench_tree_attention.py --out benchmarks/results
    python benchmarks/attention/bench_tree_attention.py --shapes 1,16,8192 --only cuda,triton,xqa
    python benchmarks/attention/bench_tree_attention.py --fp8 --shapes 8,16,8192 8,4,8192     # the cache in bf16 and in float8_e4m3fn
"""

import functools
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (0, 1)]

import attention_inputs as inputs  # noqa: E402
import attention_peers as peers  # noqa: E402
from harness import Bench, options  # noqa: E402

from fastverify import _ops  # noqa: E402
from fastverify.attention import tree_attention as wrapper  # noqa: E402

SHAPES = ["1,16,1024", "1,16,8192", "1,64,8192", "1,16,65536", "8,16,8192", "32,8,2048"]  # B, N, prefix


def ours(sets: list, page_size: int, backend: str) -> tuple:
    """The schema's positional call, with the plan's schedule and workspace where the kernel wants them."""
    if backend == "triton":
        from fastverify.attention.tree_attention_triton import tree_attention as op
    else:
        op = _ops.get("tree_attention")
    calls = []
    workspace_for = getattr(wrapper, "workspace_for", lambda *_: None)
    tables = inputs.per_step(sets, lambda x: x.paged(page_size)[2])
    for x, table in zip(sets, tables):
        k, v, _ = x.paged(page_size)
        workspace = workspace_for(x.q, k, len(x.prefix_len)) if not calls else workspace  # noqa: F821
        calls.append(functools.partial(op, x.q, k, v, x.mask, x.cu_nodes, x.prefix_len, table, None, None, None, None, x.out, None,
                                       workspace, 0, x.q.shape[2] ** -0.5, 0, 0.0))
    return calls, [x.out for x in sets]


def narrow(x: inputs.Inputs) -> tuple:
    """(x with its cache in float8, x with that cache's values): what runs, and what the oracle reads."""
    k, v = x.k.to(torch.float8_e4m3fn), x.v.to(torch.float8_e4m3fn)
    return x._replace(k=k, v=v), x._replace(k=k.to(x.k.dtype), v=v.to(x.v.dtype))


def measure_fp8(bench: Bench, name: str, shape: dict, make, nbytes: int, page_size: int, own_tables: bool) -> None:
    """Ours alone: a cache of half the bytes, scales of 1."""
    sets, wants = inputs.layers(bench.sets(nbytes), make, own_tables), []
    for i, x in enumerate(sets):
        sets[i], wide = narrow(x)
        wants += [inputs.oracle(wide)] if i < 2 else []
    calls, outs = ours(sets, page_size, "native")
    bench.measure(f"{name}, fp8 cache", shape, torch.bfloat16, calls, nbytes, note="own tables" if own_tables else "",
                  check=lambda: all(inputs.right(x, o, w) for x, o, w in zip(sets, outs, wants)))


def main() -> int:
    parser = options("tree_attention against its peers")
    parser.add_argument("--fp8", action="store_true", help="ours once more with a float8_e4m3fn cache")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,N,KV")
    parser.add_argument("--heads", default="32,8,128", metavar="Q,KV,DIM")
    parser.add_argument("--page-size", type=int, default=16, help="of ours and of fa2; a divisor of 64 (xqa: always 64)")
    parser.add_argument("--own-tables", action="store_true", help="a page table, lengths and trees per buffer set, not one as for the layers of a step")
    args = parser.parse_args()
    bench = Bench("tree_attention", args)
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    heads = tuple(map(int, args.heads.split(",")))
    on_gpu = bench.device.type == "cuda"
    own = "cpu" if not on_gpu else "cuda, sm_120 configuration" if os.environ.get("FASTVERIFY_PROFILE") else "cuda"
    providers = {own: lambda s: ours(s, args.page_size, "native"), "sdpa": peers.sdpa}
    if on_gpu:
        providers |= {"triton": lambda s: ours(s, args.page_size, "triton"), "xqa": peers.xqa,
                      "fa2": lambda s: peers.fa2(s, args.page_size)}
        if args.only and bench.wanted("flex"):  # not in a run of all: it compiles for 5 to 16 s per shape
            providers["flex"] = peers.flex
    for text in bench.shapes(args.shapes, ("B", "N", "KV")):
        batch, nodes, prefix = map(int, text.split(","))
        shape = dict(B=batch, N=nodes, KV=prefix, Hq=heads[0], Hkv=heads[1], D=heads[2])
        nbytes = inputs.bytes_of(batch, nodes, prefix, *heads, dtype.itemsize)
        torch.manual_seed(0)
        make = lambda step: inputs.make(batch, nodes, prefix, *heads, dtype, bench.device, step)  # noqa: B023, E731
        sets = inputs.layers(bench.sets(nbytes), make, args.own_tables)
        wants = [inputs.oracle(x) for x in sets[:2]]
        for name, prepare in providers.items():
            if not bench.wanted(name):
                continue
            if name == own == "cuda" and not _ops.has_native_kernel("tree_attention", "cuda"):
                bench.absent(name, shape, dtype, "no CUDA kernel in this build")
                continue
            for x in sets:
                x.out.fill_(float("nan"))
            try:
                calls, outs = prepare(sets)
            except ImportError as error:
                bench.absent(name, shape, dtype, f"not installed: {error}")
                continue
            except Exception as error:  # a peer that cannot take this shape is a row, not the end of the run
                bench.absent(name, shape, dtype, f"failed: {str(error).strip().splitlines()[0][:160]}")
                continue
            bench.measure(name, shape, dtype, calls, nbytes,
                          check=lambda: all(inputs.right(x, o, w) for x, o, w in zip(sets, outs, wants)),  # noqa: B023
                          note="own tables" if args.own_tables else "")
        if args.fp8 and on_gpu:
            del sets, wants
            half = inputs.bytes_of(batch, nodes, prefix, *heads, 1) + 2 * batch * nodes * heads[0] * heads[2]  # q and out stay bf16
            measure_fp8(bench, own, shape, make, half, args.page_size, args.own_tables)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
