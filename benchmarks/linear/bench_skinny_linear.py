"""skinny_linear and skinny_qkv beside the torch calls they replace: products of SmolLM2-135M and two of Llama-3-8B.

    python benchmarks/linear/bench_skinny_linear.py --tree-rows 1,4,8,20
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402

from fastverify.linear.skinny_linear import ADD, PLAIN, SILU_MUL, skinny_linear  # noqa: E402

# name, K, N, kind, norm
PRODUCTS = [("qkv", 576, 960, PLAIN, True), ("o", 576, 576, ADD, False), ("gate_up", 576, 3072, SILU_MUL, True), ("down", 1536, 576, ADD, False),
            ("head", 576, 49152, PLAIN, False), ("8B o", 4096, 4096, ADD, False), ("8B qkv", 4096, 6144, PLAIN, True), ("8B gate_up", 4096, 28672, SILU_MUL, True), ("8B down", 14336, 4096, ADD, False),
            ("8B head", 4096, 128256, PLAIN, False)]


def torch_product(x, w, norm, out, kind):
    a = x if norm is None else F.rms_norm(x, (x.shape[1],), norm, 1e-5)
    if kind == ADD:
        return out.addmm_(a, w.t())
    y = F.linear(a, w)
    if kind == PLAIN:
        return y
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def main() -> int:
    parser = harness.options(__doc__.splitlines()[0])
    parser.add_argument("--tree-rows", default="1,4,8,16,20,32")
    args = parser.parse_args()
    bench, dtype = harness.Bench("skinny_linear", args), torch.bfloat16
    draw = lambda *s: torch.randn(*s, device=bench.device).to(dtype)  # noqa: E731
    for name, inner, outer, kind, normed in PRODUCTS[: harness.QUICK_SHAPES] if args.quick else PRODUCTS:
        nbytes = 2 * inner * outer
        weights = [draw(outer, inner) / inner**0.5 for _ in range(bench.sets(nbytes))]
        for rows in map(int, args.tree_rows.split(",")):
            x, norm = draw(rows, inner), draw(inner) if normed else None
            width = outer // 2 if kind == SILU_MUL else outer
            start, out = draw(rows, width), torch.empty(rows, width, dtype=dtype, device=bench.device)

            def check() -> bool:
                one = start.clone() if kind == ADD else out.clone()
                skinny_linear(x, weights[0], norm=norm, out=one, eps=1e-5, kind=kind)
                want = torch_product(x.float(), weights[0].float(), None if norm is None else norm.float(), start.float(), kind)
                return bool(((one.float() - want).abs() <= 0.03 * want.abs() + 0.03).all())

            shape = dict(product=name, R=rows, K=inner, N=outer)
            bench.measure(bench.device.type, shape, "bfloat16", [lambda w=w: skinny_linear(x, w, norm=norm, out=out, eps=1e-5, kind=kind) for w in weights],
                          nbytes, check)
            bench.measure("torch", shape, "bfloat16", [lambda w=w: torch_product(x, w, norm, out, kind) for w in weights], nbytes)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
