"""build_tree against torch.topk + sort + gather and sglang-kernel's build_tree_kernel_efficient (bit-packed masks).

    python benchmarks/tree/bench_build_tree.py --out benchmarks/results
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from harness import Bench, options  # noqa: E402
from inputs import Pool, drafted_pool  # noqa: E402

from fastverify.tree import Tree, build_tree  # noqa: E402

SHAPES = [dict(B=b, k=k, levels=l, N=n) for b, k, l, n in (
    (8, 10, 8, 64), (1, 10, 8, 64), (64, 10, 8, 64), (8, 4, 6, 16), (8, 32, 8, 256), (1, 32, 8, 1024))]
VOCAB = 163840


def sglang_kernel():
    """The peer's op, if sglang-kernel is installed or SGL_KERNEL_LIBRARY names its library."""
    try:
        if os.environ.get("SGL_KERNEL_LIBRARY"):
            torch.ops.load_library(os.environ["SGL_KERNEL_LIBRARY"])
        else:
            import sgl_kernel  # noqa: F401
    except (ImportError, OSError):
        pass
    return getattr(torch.ops.sgl_kernel, "build_tree_kernel_efficient", None)


def peer(op, pool: Pool, roots: torch.Tensor, k: int, levels: int, nodes: int) -> tuple:
    """What SGLang runs after the last draft forward: choose, sort, gather, prefill, build."""
    batch, device = roots.numel(), roots.device
    index = torch.sort(torch.topk(pool.state.pool_scores, nodes - 1).indices).values
    tokens = torch.cat([roots.unsqueeze(1), torch.gather(pool.state.pool_tokens, 1, index)], 1)
    if op is None:
        return tokens, index
    mask = torch.ones(batch * nodes * nodes, dtype=torch.bool, device=device)
    links = torch.full((3, batch, nodes), -1, dtype=torch.int64, device=device)
    positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
    op(pool.parent_list, index, pool.prefix_len.long(), mask, positions, *links, k, levels, nodes, 1)
    return tokens, mask


def main() -> int:
    bench, op = Bench("build_tree", options(__doc__.splitlines()[0]).parse_args()), sglang_kernel()
    for shape in bench.shapes(SHAPES):
        batch, k, levels, nodes = shape.values()
        size = k + (levels - 1) * k * k
        nbytes = batch * (size * 8 + nodes * (20 + 8 * -(-nodes // 64)))
        pools = [drafted_pool(batch, k, levels, bench.device, 100 * i) for i in range(min(bench.sets(nbytes), 64))]
        roots = torch.arange(batch, dtype=torch.int32, device=bench.device)
        trees = [Tree.empty(batch, nodes, torch.int32, bench.device) for _ in pools]

        def right() -> bool:
            for pool, tree in zip(pools[:4], trees):
                s = pool.state
                want = build_tree(*(t.cpu() for t in (s.pool_scores, s.pool_tokens, s.pool_parents, roots, pool.prefix_len, pool.active)),
                                  nodes, VOCAB)
                if not all(torch.equal(a.cpu(), b) for a, b in zip(tree, want)):
                    return False
                if not torch.equal(peer(None, pool, roots, k, levels, nodes)[0].flatten(), tree.tokens):
                    return "differs from torch.topk (ties?)"
            return True

        bench.measure("fastverify", shape, "float32", [
            partial(build_tree, p.state.pool_scores, p.state.pool_tokens, p.state.pool_parents, roots, p.prefix_len, p.active, nodes, VOCAB, t)
            for p, t in zip(pools, trees)], nbytes, right)
        if triton_op := bench.triton():
            bench.measure("triton", shape, "float32", [
                partial(triton_op, p.state.pool_scores, p.state.pool_tokens, p.state.pool_parents, roots, p.prefix_len, p.active, *t,
                        nodes, VOCAB) for p, t in zip(pools, trees)], nbytes, right)
        bench.measure("torch", shape, "float32", [partial(peer, None, p, roots, k, levels, nodes) for p in pools], nbytes,
                      note="choice only: no masks, parents, positions")
        if op is None:
            bench.absent("sglang-kernel", shape, "float32", "not installed")
        else:
            bench.measure("sglang-kernel", shape, "float32", [partial(peer, op, p, roots, k, levels, nodes) for p in pools], nbytes,
                          note="topk, sort, gather, fills and the kernel")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
