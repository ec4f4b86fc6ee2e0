"""draft_topk, plain and coupled, against torch (log_softmax, then topk).

    python benchmarks/tree/bench_draft_topk.py --out benchmarks/results
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from harness import Bench, options  # noqa: E402
from inputs import draft_logits  # noqa: E402

from fastverify.tree import Coupling, draft_topk  # noqa: E402

SHAPES = [dict(rows=r, V=v, k=k) for r, v, k in ((8, 32000, 10), (1, 32000, 10), (80, 32000, 10), (8, 32000, 64), (8, 163840, 10))]


def main() -> int:
    bench = Bench("draft_topk", options(__doc__.splitlines()[0]).parse_args())
    for shape in bench.shapes(SHAPES):
        rows, vocab, k = shape.values()
        nbytes = rows * vocab * 2
        sets = [draft_logits(rows, vocab, torch.bfloat16, bench.device, i) for i in range(bench.sets(nbytes))]
        outs = [draft_topk(x, k) for x in sets]

        def right(coupled=None) -> bool:
            on_cpu = coupled and Coupling(*(t.cpu() for t in coupled[:4]))
            cpu = [draft_topk(x.cpu(), k, d2t=coupled and d2t.cpu(), coupling=on_cpu, level=1) for x in sets[:4]]
            return all(torch.equal(a.cpu(), b) for got, want in zip(outs, cpu) for a, b in zip(got, want))

        bench.measure("fastverify", shape, "bfloat16",
                      [partial(draft_topk, x, values=o[0], tokens=o[1]) for x, o in zip(sets, outs)], nbytes, right)
        # one request a row: the most that a launch has to look up; every fourth target id is not the draft's
        request = dict(dtype=torch.int32, device=bench.device)
        coupled = Coupling(torch.full((rows,), 0.8, device=bench.device), torch.arange(rows, device=bench.device),
                           torch.full((rows,), 1000, **request), torch.ones(rows, **request))
        d2t = torch.arange(vocab, device=bench.device) // 3
        bench.measure("fastverify coupled", shape, "bfloat16",
                      [partial(draft_topk, x, d2t=d2t, values=o[0], tokens=o[1], coupling=coupled, level=1) for x, o in zip(sets, outs)],
                      nbytes, partial(right, coupled))
        if triton_op := bench.triton():
            plain = (None,) * 6
            bench.measure("triton", shape, "bfloat16", [partial(triton_op, x, *plain, *o) for x, o in zip(sets, outs)], nbytes, right)
        bench.measure("torch", shape, "bfloat16", [lambda x=x: torch.topk(torch.log_softmax(x.float(), 1), k) for x in sets], nbytes)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
