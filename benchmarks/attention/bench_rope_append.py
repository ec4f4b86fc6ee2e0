"""rope_append: norm, RoPE and append in one launch, beside the same work as plain torch ops.

    python benchmarks/attention/bench_rope_append.py --out benchmarks/results
"""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Bench, options  # noqa: E402

from fastverify import _ops, reference  # noqa: E402

SHAPES = ["1,16", "8,16", "32,8", "64,64"]  # B, N
PAGE, CONTEXT, EPS = 16, 8192, 1e-6
NAMES = ("q", "k", "v", "positions", "slots", "cos_sin", "q_norm", "k_norm", "k_scale", "v_scale", "k_cache", "v_cache", "eps",
         "rotary_style")


def make(rows: int, q_heads: int, kv_heads: int, d: int, dtype, cache_dtype, norm: bool, device) -> dict:
    """Rows of a merged QKV matrix, slots on random pages of a pool that is 4 times as large as needed."""
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * d, device=device, dtype=dtype)
    q, k, v = (t.view(rows, -1, d) for t in qkv.split([q_heads * d, kv_heads * d, kv_heads * d], 1))
    pages = 4 * -(-rows // PAGE)
    cache = lambda: torch.zeros(pages, PAGE, kv_heads, d, device=device).to(cache_dtype)  # noqa: E731
    angle = torch.arange(CONTEXT, device=device)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, device=device) / d)
    weight = lambda: torch.rand(d, device=device).to(dtype) + 0.5 if norm else None  # noqa: E731
    return dict(q=q, k=k, v=v, positions=torch.randint(0, CONTEXT, (rows,), device=device, dtype=torch.int32),
                slots=torch.randperm(pages * PAGE, device=device)[:rows], cos_sin=torch.cat([angle.cos(), angle.sin()], 1).float(),
                q_norm=weight(), k_norm=weight(), k_scale=None, v_scale=None, k_cache=cache(), v_cache=cache(), eps=EPS, rotary_style=0)


def plain(x: dict) -> None:
    """What a model in plain torch launches for it, in float32."""
    def norm(t, weight):
        return t.float() if weight is None else torch.nn.functional.rms_norm(t.float(), (t.shape[-1],), weight.float(), EPS)

    cos, sin = x["cos_sin"][x["positions"].long()][:, None].chunk(2, -1)

    def turn(t):
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x["q"].copy_(turn(norm(x["q"], x["q_norm"])))
    for cache, value in (("k_cache", turn(norm(x["k"], x["k_norm"]))), ("v_cache", x["v"])):
        x[cache].view(-1, *x[cache].shape[2:])[x["slots"]] = value.to(x[cache].dtype)


def right(x: dict) -> bool:
    """The caches hold what the float64 oracle appends; within one rounding step of the cache's dtype."""
    want = {k: v.clone().cpu() if isinstance(v, torch.Tensor) else v for k, v in x.items()}
    want["k_cache"].zero_(), want["v_cache"].zero_()
    reference.rope_append(*(want[n] for n in NAMES))
    step = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float8_e4m3fn: 2.0**-3}[x["k_cache"].dtype]
    near = lambda n: ((x[n].float().cpu() - want[n].float()).abs() <= 1.5 * step * want[n].float().abs() + 2e-3).all()  # noqa: E731
    return bool(near("k_cache") and near("v_cache"))


def main() -> int:
    parser = options("rope_append beside plain torch ops")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,N")
    parser.add_argument("--heads", default="32,8,128", metavar="Q,KV,DIM")
    args = parser.parse_args()
    bench = Bench("rope_append", args)
    on_gpu = bench.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q_heads, kv_heads, d = map(int, args.heads.split(","))
    for text in bench.shapes(args.shapes, ("B", "N")):
        rows = rows_of(text)
        for norm, cache in ((False, dtype), (True, dtype), (True, torch.float8_e4m3fn)):
            shape = dict(R=rows, Hq=q_heads, Hkv=kv_heads, D=d, norm=norm, cache=str(cache).removeprefix("torch."))
            read = rows * ((q_heads + 2 * kv_heads) * d * dtype.itemsize + d * 4)
            nbytes = read + rows * (q_heads * d * dtype.itemsize + 2 * kv_heads * d * cache.itemsize)
            torch.manual_seed(0)
            sets = [make(rows, q_heads, kv_heads, d, dtype, cache, norm, bench.device) for _ in range(bench.sets(nbytes))]
            check = lambda: right(sets[0])  # noqa: B023, E731  (the oracle takes a second for 4096 rows)

            def call(op, sets=sets):
                for x in sets:
                    x["k_cache"].zero_(), x["v_cache"].zero_()
                return [functools.partial(op, *(x[n] for n in NAMES)) for x in sets]

            bench.measure("cuda" if on_gpu else "cpu", shape, dtype, call(_ops.get("rope_append")), nbytes, check)
            if on_gpu and bench.wanted("triton"):
                from fastverify.attention.rope_append_triton import rope_append

                bench.measure("triton", shape, dtype, call(rope_append), nbytes, check)
            bench.measure("torch ops", shape, dtype, call(lambda *a: plain(dict(zip(NAMES, a)))), nbytes, check)
    return bench.finish()


def rows_of(text: str) -> int:
    batch, nodes = map(int, text.split(","))
    return batch * nodes


if __name__ == "__main__":
    sys.exit(main())
