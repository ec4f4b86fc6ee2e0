"""lm_head_verify_tree against cuBLAS alone and cuBLAS + verify_tree: one request of N nodes, at 3 accepted drafts.

    python benchmarks/accept/bench_lm_head_verify_tree.py --out benchmarks/results

Correct: tokens equal those of verify_tree on float32 logits of the same hidden states (rows that differ are counted: rounding of
the products can turn a near tie). floor: the weight read once.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from bench_verify_tree import kernels, workspace_maker
from harness import Bench, options
from trees import LAWS, Grove, drawn_tokens

from fastverify import _ops

HEADS = ((4096, 128256, "Llama-3 8B"), (7168, 20480, "one of 8 ranks of Kimi-K2.5"))
NODES = (8, 16, 64)


def head_workspace(rows: int, vocab: int, device: torch.device):
    """The op's workspace, None where the build wants none."""
    make = getattr(importlib.import_module("fastverify.accept.lm_head_verify_tree"), "head_workspace", None)
    return make(rows, vocab, device) if make and device.type == "cuda" else None


class HeadCall:
    """lm_head_verify_tree under verify_tree's positional arguments: hidden states stand where logits would."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.op = weight, _ops.get("lm_head_verify_tree")

    def __call__(self, hidden, *rest) -> None:
        self.op(hidden, self.weight, *rest[:-2], self.weight.shape[0], rest[-1])


def measure_head(bench: Bench, hidden_size: int, vocab: int, nodes: int, law: str, weight: torch.Tensor) -> None:
    device, axes = bench.device, dict(N=nodes, H=hidden_size, V=vocab, law=law)
    rng = torch.Generator(device=device).manual_seed(nodes)
    hidden = [torch.randn(nodes, hidden_size, generator=rng, device=device, dtype=weight.dtype) for _ in range(2)]
    kind, nbytes = str(weight.dtype).removeprefix("torch."), weight.numel() * weight.element_size()
    verify, make_workspace = kernels(device)[device.type], workspace_maker(device)
    logits = torch.empty(nodes, vocab, dtype=weight.dtype, device=device)
    if device.type == "cuda" and not _ops.has_kernel("lm_head_verify_tree", "cuda"):
        bench.absent("cuda", axes, kind, "no CUDA kernel in this build")
    else:
        head, space = HeadCall(weight), head_workspace(nodes, vocab, device)
        grove = Grove(head, hidden, 1, nodes, law, lambda rows, batch: space)
        batches = grove.plant(3)

        def right():
            same = rows = 0
            for h, drawn in zip(hidden, grove.drawn):
                exact = h.float() @ weight.float().T
                per_row = [x.repeat_interleave(nodes) for x in grove.sampling]
                want = drawn_tokens(verify, exact, grove.positions, type(grove.sampling)(*per_row), make_workspace)
                same, rows = same + int((want == drawn).sum()), rows + nodes
            walked = bool((batches[0].out.num_tokens_out == 4).all())
            return walked and (same == rows or f"{rows - same} of {rows} rows differ")

        bench.measure("cuda" if device.type == "cuda" else "cpu", axes, kind, [partial(head, *b.arguments(space)) for b in batches], nbytes,
                      check=right if callable(verify) else None)
    bench.measure("cuBLAS alone" if device.type == "cuda" else "matmul alone", axes, kind,
                  [partial(torch.mm, h, weight.T, out=logits) for h in hidden], nbytes)
    if not callable(verify):
        bench.absent("matmul + verify_tree", axes, kind, verify)
        return

    def two(h, arguments):
        torch.mm(h, weight.T, out=logits)
        verify(*arguments)

    grove = Grove(lambda h, *rest: verify(torch.mm(h, weight.T), *rest[:-2], vocab, rest[-1]), hidden, 1, nodes, law, make_workspace)
    batches = [b._replace(logits=logits) for b in grove.plant(3)]
    space = make_workspace(nodes, 1)
    bench.measure("matmul + verify_tree", axes, kind, [partial(two, h, b.arguments(space)) for h, b in zip(hidden, batches)], nbytes,
                  check=lambda: bool((batches[0].out.num_tokens_out == 4).all()))


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--law", default=",".join(LAWS), help="greedy,temperature,top-k+top-p (default: all)")
    parser.add_argument("--head", action="append", metavar="H,V", help="instead of the two heads; may be repeated")
    args = parser.parse_args()
    bench = Bench("lm_head_verify_tree", args)
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    for hidden_size, vocab in [tuple(map(int, h.split(","))) for h in args.head or []] or [h[:2] for h in HEADS]:
        weight = torch.randn(vocab, hidden_size, device=bench.device, dtype=dtype) * (2 / hidden_size**0.5)
        for nodes in NODES:
            for law in args.law.split(","):
                measure_head(bench, hidden_size, vocab, nodes, law, weight)
        del weight
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
