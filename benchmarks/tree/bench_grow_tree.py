"""grow_tree against the same level in torch ops (the order of operations of SGLang's select_top_k_tokens).

    python benchmarks/tree/bench_grow_tree.py --out benchmarks/results
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from harness import Bench, options  # noqa: E402
from inputs import drafted_pool  # noqa: E402

from fastverify.tree import DraftState, draft_topk, grow_tree  # noqa: E402

SHAPES = [dict(B=b, k=k, H=h) for b, k, h in ((8, 10, 4096), (8, 10, 7168), (1, 10, 7168), (64, 10, 4096), (8, 32, 4096))]
LEVELS = 4


def torch_level(values: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, scores: torch.Tensor) -> tuple:
    """Next beam: scores, tokens, hidden rows. No masks, no pool, no positions."""
    batch, k = scores.shape
    total = scores.unsqueeze(2) + values.view(batch, k, k)
    best, index = torch.topk(total.flatten(1), k)
    rows = index // k + torch.arange(0, batch * k, k, device=scores.device).unsqueeze(1)
    return best, torch.gather(tokens.view(batch, k * k), 1, index), hidden.index_select(0, rows.flatten())


def main() -> int:
    bench = Bench("grow_tree", options(__doc__.splitlines()[0]).parse_args())
    for shape in bench.shapes(SHAPES):
        batch, k, hidden = shape.values()
        rows, nbytes = batch * k, 2 * batch * k * hidden * 2
        level, sets = LEVELS - 1, []
        start = drafted_pool(batch, k, LEVELS - 1, bench.device, 1)
        for i in range(bench.sets(nbytes)):
            state = DraftState.empty(batch, k, LEVELS, hidden, torch.bfloat16, bench.device)
            for name in ("scores", "pool_index"):
                getattr(state, name).copy_(getattr(start.state, name))
            values, tokens = draft_topk(torch.randn(rows, 2048, device=bench.device), k)
            rows_of_hidden = torch.randn(rows, hidden, device=bench.device).bfloat16()
            sets.append((values, tokens, rows_of_hidden, start.prefix_len, start.active, state, level))
        before = [s[5].scores.clone() for s in sets]

        def restore() -> None:
            for s, scores in zip(sets, before):
                s[5].scores.copy_(scores)

        triton_op = bench.triton()

        def triton_level(values, tokens, h, prefix, active, state, at) -> None:
            triton_op(values, tokens, h, prefix, active, *state, at)

        def right(op=grow_tree) -> bool:
            restore()
            for values, tokens, h, prefix, active, state, at in sets[:3]:
                cpu = DraftState(*(t.cpu() for t in state))
                op(values, tokens, h, prefix, active, state, at)
                grow_tree(values.cpu(), tokens.cpu(), h.cpu(), prefix.cpu(), active.cpu(), cpu, at)
                if not all(torch.equal(a.cpu(), b) for a, b in zip(state, cpu)):
                    return False
            return True

        bench.measure("fastverify", shape, "bfloat16", [partial(grow_tree, *s) for s in sets], nbytes, right)
        if triton_op:
            bench.measure("triton", shape, "bfloat16", [partial(triton_level, *s) for s in sets], nbytes, partial(right, triton_level))
        bench.measure("torch", shape, "bfloat16", [partial(torch_level, s[0], s[1], s[2], b.view(batch, k)) for s, b in zip(sets, before)],
                      nbytes, note="beam only: no masks, no pool")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
