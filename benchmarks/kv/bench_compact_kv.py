"""compact_kv against torch index copies, over the whole slab and layer by layer.

    python benchmarks/kv/bench_compact_kv.py --out benchmarks/results
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Bench, options  # noqa: E402

from fastverify import compact_kv, compact_kv_layers  # noqa: E402

SHAPES = [dict(layers=61, B=b, accepted=4, kind=kind) for b in (8, 1, 64) for kind in ("latent 576", "GQA 8x128")]
PAGE, STEP = 64, 64  # tokens per page; tokens between the places that two buffer sets use
PATH = [0, 3, 9, 20, -1, -1, -1, -1, -1]


def main() -> int:
    bench = Bench("compact_kv", options(__doc__.splitlines()[0]).parse_args())
    for shape in bench.shapes(SHAPES):
        layers, batch, accepted, kind = shape.values()
        latent = kind.startswith("latent")
        row = (576,) if latent else (8, 128)
        width = 576 if latent else 1024
        moved = layers * batch * (accepted - 1) * width * 2 * (1 if latent else 2)
        count = min(bench.sets(2 * moved), 256 // batch + 8)
        pages = batch * (count * STEP // PAGE + 1)
        shape_k = (layers, pages, PAGE, *row)
        k = torch.randint(-99, 99, shape_k, dtype=torch.int16, device=bench.device).view(torch.bfloat16)
        v = None if latent else torch.randint(-99, 99, shape_k, dtype=torch.int16, device=bench.device).view(torch.bfloat16)
        table = torch.randperm(pages, device=bench.device)[: pages // batch * batch].view(batch, -1).int()
        path = torch.tensor([PATH] * batch, dtype=torch.int32, device=bench.device)
        out = torch.full((batch,), accepted, dtype=torch.int32, device=bench.device)
        prefixes = [torch.full((batch,), i * STEP + 5, dtype=torch.int32, device=bench.device) for i in range(count)]

        def slots(prefix: torch.Tensor, nodes: list) -> torch.Tensor:
            at = prefix[:, None].long() + torch.tensor(nodes, device=bench.device)
            return (table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()

        moves = [(slots(p, PATH[1:accepted]), slots(p, list(range(1, accepted)))) for p in prefixes]

        triton_op = bench.triton()

        def triton_move(*args) -> None:
            triton_op(*args, None, None, None, None)

        def right(op=compact_kv) -> bool:
            for prefix, (src, dst) in zip(prefixes[:3], moves):
                want = [c.view(layers, -1, width)[:, src].clone() for c in (k, v) if c is not None]
                op(k, v, path, out, prefix, table)
                got = [c.view(layers, -1, width)[:, dst] for c in (k, v) if c is not None]
                if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, want)):
                    return False
            return True

        def slab_copy(src: torch.Tensor, dst: torch.Tensor) -> None:
            for c in (k, v):
                if c is not None:
                    flat = c.view(layers, -1, width)
                    flat.index_copy_(1, dst, flat.index_select(1, src))

        def layer_copy(src: torch.Tensor, dst: torch.Tensor) -> None:
            for c in (k, v):
                for layer in () if c is None else c.view(layers, -1, width).unbind():
                    layer.index_copy_(0, dst, layer.index_select(0, src))

        bench.measure("fastverify", shape, "bfloat16", [partial(compact_kv, k, v, path, out, p, table) for p in prefixes], 2 * moved, right)
        if triton_op:
            bench.measure("triton", shape, "bfloat16", [partial(triton_move, k, v, path, out, p, table) for p in prefixes], 2 * moved,
                          partial(right, triton_move))
        lists = list(k), None if v is None else list(v)
        bench.measure("fastverify, list of layers", shape, "bfloat16",
                      [partial(compact_kv_layers, *lists, path, out, p, table) for p in prefixes], 2 * moved)
        bench.measure("torch, slab", shape, "bfloat16", [partial(slab_copy, *m) for m in moves], 2 * moved, note="slots given")
        if batch == 8:
            bench.measure("torch, per layer", shape, "bfloat16", [partial(layer_copy, *m) for m in moves[:8]], 2 * moved,
                          note="slots given")
        del k, v, lists
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
