"""prepare_tree: all outputs of a verify tree, and the slots and schedule of a chain.

    python benchmarks/tree/bench_prepare_tree.py --out benchmarks/results
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from harness import Bench, options  # noqa: E402
from inputs import drafted_pool  # noqa: E402

from fastverify.tree import Prepared, build_tree, prepare_tree  # noqa: E402

SHAPES = [dict(B=b, N=n, kv=kv) for b, n, kv in ((8, 64, 8192), (1, 64, 131072), (64, 64, 8192), (8, 256, 8192))]
PAGE = 64


def main() -> int:
    bench = Bench("prepare_tree", options(__doc__.splitlines()[0]).parse_args())
    for shape in bench.shapes(SHAPES):
        batch, nodes, kv = shape.values()
        rows, words = batch * nodes, -(-nodes // 64)
        nbytes = rows * (4 + 8 * words + 4 + 4 + 8 + 4 + 4)
        prefix = torch.full((batch,), kv, dtype=torch.int32, device=bench.device)
        table = torch.arange(batch * (kv // PAGE + 8), dtype=torch.int32, device=bench.device).view(batch, -1)
        sets = []
        for i in range(min(bench.sets(nbytes), 64)):
            pool = drafted_pool(batch, 10, 8, bench.device, 100 * i)
            s = pool.state
            tree = build_tree(s.pool_scores, s.pool_tokens, s.pool_parents, pool.active, prefix, pool.active, nodes, 163840)
            sets.append((tree.parents, tree.cu_nodes, prefix, table, PAGE, Prepared.empty(rows, batch, words, bench.device)))

        def right() -> bool:
            for parents, cu, _, _, page, out in sets[:4]:
                want = prepare_tree(parents.cpu(), cu.cpu(), prefix.cpu(), table.cpu(), page, Prepared.empty(rows, batch, words))
                if not all(torch.equal(a.cpu(), b) for a, b in zip(out, want)):
                    return False
            return True

        bench.measure("fastverify", {**shape, "outputs": "all"}, "int32", [partial(prepare_tree, *s) for s in sets], nbytes, right)
        if triton_op := bench.triton():
            bench.measure("triton", {**shape, "outputs": "all"}, "int32",
                          [partial(triton_op, *s[:4], *s[5], PAGE, 0) for s in sets], nbytes, right)
        few = [Prepared(slots=s[5].slots, schedule=s[5].schedule) for s in sets]
        bench.measure("fastverify", {**shape, "outputs": "slots, schedule of a chain"}, "int32",
                      [partial(prepare_tree, None, *s[1:5], out) for s, out in zip(sets, few)], rows * 8)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
