"""lm_head_verify_tree against the LM-head GEMM alone, and against GEMM + verify_tree, 3 drafts accepted.

    python benchmarks/accept/bench_lm_head_verify_tree.py --out benchmarks/results

Hidden states and weights are small integers, so every order of summation gives the same float32 logits. Correct: tokens, path and
flags equal the CPU's verify_tree on those logits. The GEMM writes bf16 logits (as engines do), so the tokens of GEMM + verify_tree
may differ where bf16 makes ties. floor: the weight read once.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Bench, options

import fastverify.accept.lm_head_verify_tree  # noqa: F401  (the package re-exports the function under the module's name)
from fastverify import _ops
from fastverify.accept.verify_tree import Sampling, Verified

HEADS = ((4096, 128256), (7168, 20480))  # hidden, vocabulary: Llama-3 8B; one of 8 shards of Kimi-K2.5
CPU_HEADS = ((576, 49152),)  # SmolLM2: the others take a CPU minutes
NODES = (8, 16, 32, 64)
LAWS = {"greedy": dict(temperature=0.0), "temperature": dict(temperature=0.8),
        "top-k+top-p": dict(temperature=0.8, top_k=50, top_p=0.95)}
ACCEPTED = 3


class Step:
    """One request: a chain of `nodes` nodes, ACCEPTED of which carry the target's tokens."""

    def __init__(self, weight: torch.Tensor, nodes: int, law: str) -> None:
        device, hidden = weight.device, weight.shape[1]
        i32 = dict(dtype=torch.int32, device=device)
        self.weight = weight
        self.hidden = torch.randint(-3, 4, (nodes, hidden), device=device).to(weight.dtype)
        self.parents = torch.arange(-1, nodes - 1, **i32)
        self.cu_nodes, self.prefix_len = torch.tensor([0, nodes], **i32), torch.full((1,), 100, **i32)
        self.active, self.remaining = torch.ones(1, **i32), torch.full((1,), 2**30, **i32)
        self.sampling, self.vocab = Sampling.make(1, device, **LAWS[law]), weight.shape[0]
        self.out = Verified.empty(1, nodes, device)
        self.tokens = torch.full((nodes,), -1, dtype=torch.int64, device=device)
        self.exact = torch.cat([self.hidden.float() @ w.float().T for w in weight.split(8192)], 1).cpu()
        for i in range(ACCEPTED):  # the token of row i does not depend on what node i + 1 carries
            self.tokens[i + 1] = self.on_cpu().out_tokens[0, i]

    def rest(self, out: Verified, workspace, to=lambda x: x) -> tuple:
        s = self.sampling
        moved = [to(x) for x in (self.tokens, self.parents, self.cu_nodes, self.prefix_len, self.active, self.remaining)]
        return (*moved, None, *(to(x) for x in s), None, None, None, None, out.out_tokens, out.num_tokens_out, out.path,
                out.next_root, out.flags, None, workspace, self.vocab, 1)

    def on_cpu(self) -> Verified:
        out = Verified.empty(1, self.hidden.shape[0])
        _ops.get("verify_tree")(self.exact, *self.rest(out, None, lambda x: x.cpu().clone()))
        return out

    def right(self) -> bool:
        want = self.on_cpu()
        return all(torch.equal(a.cpu(), b) for a, b in zip(self.out, want) if b is not None)


def measure(bench: Bench, head: tuple, nodes: int, law: str, weights: list) -> None:
    modules, (h, v), nbytes = sys.modules, head, 2 * head[0] * head[1]
    axes, cuda = dict(N=nodes, H=h, V=v, law=law), bench.device.type == "cuda"
    steps = [Step(w, nodes, law) for w in weights]
    make = modules["fastverify.accept.lm_head_verify_tree"].lm_head_verify_tree_workspace
    space = make(nodes, v, bench.device) if cuda else None
    op = _ops.get("lm_head_verify_tree")
    if _ops.has_kernel("lm_head_verify_tree", bench.device.type):
        bench.measure(bench.device.type, axes, "bfloat16", [partial(op, s.hidden, s.weight, *s.rest(s.out, space)) for s in steps],
                      nbytes, check=steps[0].right)
    logits = torch.empty(nodes, v, dtype=torch.bfloat16, device=bench.device)
    gemms = [partial(torch.mm, s.hidden, s.weight.T, out=logits) for s in steps]
    bench.measure("GEMM alone", axes, "bfloat16", gemms, nbytes)
    if not _ops.has_kernel("verify_tree", bench.device.type):
        return
    make_verify = getattr(modules["fastverify.accept.verify_tree"], "verify_tree_workspace", None)
    verify_space = make_verify(bench.device) if make_verify and cuda else None
    verify = _ops.get("verify_tree")

    def both(gemm, step) -> None:
        gemm()
        verify(logits, *step.rest(step.out, verify_space))

    bench.measure("GEMM + verify_tree", axes, "bfloat16", [partial(both, g, s) for g, s in zip(gemms, steps)], nbytes)


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--law", default=",".join(LAWS), help="greedy,temperature,top-k+top-p (default: all)")
    parser.add_argument("--head", action="append", metavar="H,V", help="instead of the table's; may be repeated")
    args = parser.parse_args()
    bench = Bench("lm_head_verify_tree", args)
    for head in bench.shapes([tuple(map(int, x.split(","))) for x in args.head or []] or (HEADS if bench.device.type == "cuda" else CPU_HEADS), "HV"):
        h, v = head
        weights = [(torch.randint(-3, 4, (v, h), dtype=torch.int8, device=bench.device).bfloat16() / 4) for _ in range(bench.sets(2 * h * v))]
        for (nodes,) in bench.shapes([(n,) for n in NODES], "N"):
            for law in args.law.split(","):
                measure(bench, head, nodes, law, weights)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
