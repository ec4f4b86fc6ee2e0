"""SGLang's tree kernels, ours against sglang-kernel's, each kernel alone: the same inputs, outputs compared.

    SGL_KERNEL_LIBRARY=common_ops.abi3.so python benchmarks/accept/bench_sglang.py --out benchmarks/results
"""

import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "benchmarks"), str(ROOT / "tests/integrations")]
from harness import Bench, options
from peers import load_sglang
from sglang_cases import build_case, greedy_case, mask_case
from trees import chain_depth, links, tree_parents

import fastverify.integrations.sglang as drop_in

SHAPES = ((1, 16, 128256), (1, 64, 128256), (8, 32, 128256), (32, 16, 128256), (1, 16, 163840), (32, 16, 32000))
OPS = {"verify_tree_greedy": ("predicts", "accept_index", "accept_token_num"),
       "tree_speculative_sampling_target_only": ("predicts", "accept_index", "accept_token_num"),
       "build_tree_kernel_efficient": ("tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling"),
       "reconstruct_indices_from_tree_mask": ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")}


def on(device: torch.device, case: dict) -> dict:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}


def sampling_set(rng, batch: int, nodes: int, vocab: int, accepted: int, device) -> dict:
    """Softmax rows of noise; the chain of the benchmark's tree carries the best tokens of its rows up to `accepted`."""
    gpu = torch.Generator(device=device).manual_seed(int(torch.randint(0, 2**31, (), generator=rng)))
    probs = torch.softmax(torch.randn(batch, nodes, vocab, generator=gpu, device=device) * 2, -1)
    parents, depth = tree_parents(nodes), chain_depth(nodes)
    best = probs.argmax(-1)
    right = torch.arange(nodes, device=device) <= accepted
    wanted = best[:, [0, *parents[1:]]]
    first, sibling = (torch.tensor(x, device=device).repeat(batch, 1) for x in links(parents))
    coins = torch.full((batch, nodes), 0.9999999, device=device)
    coins[:, :accepted] = 1e-30
    return dict(predicts=torch.full((batch * nodes,), -7, dtype=torch.int32, device=device),
                accept_index=torch.full((batch, depth + 1), -1, dtype=torch.int32, device=device),
                accept_token_num=torch.zeros(batch, dtype=torch.int32, device=device),
                candidates=torch.where(right, wanted, (wanted + 1 + torch.arange(nodes, device=device)) % vocab),
                retrive_index=torch.arange(batch * nodes, device=device).view(batch, nodes), retrive_next_token=first,
                retrive_next_sibling=sibling, uniform_samples=coins,
                uniform_samples_for_final_sampling=torch.rand(batch, generator=gpu, device=device), target_probs=probs,
                draft_probs=torch.zeros_like(probs), threshold_single=1.0, threshold_acc=1.0)


def compare(bench: Bench, name: str, shape: dict, sets: list, nbytes: int, sgl, kind: str) -> None:
    """Ours, then theirs. Correct: one more call of each on fresh copies of the timed inputs gives equal outputs (a call
    over its own outputs is not what SGLang's contract allows: links must be filled with -1 before)."""
    fresh = lambda s: s | {k: s[k].clone() for k in OPS[name]}  # noqa: E731
    extra = (True,) if name.startswith("tree_spec") else ()
    ours, theirs = getattr(drop_in, name), getattr(sgl, name) if sgl else None
    bench.op = f"sglang.{name}"

    def same(function, more: tuple, **changes) -> bool:
        for s in sets[:4]:
            a, b = fresh(s) | changes, fresh(s)
            function(*a.values(), *more)
            (theirs or ours)(*b.values(), *(extra if theirs else ()))
            if not all(torch.equal(a[k], b[k]) for k in OPS[name]):
                return False
        return True

    provider, pristine = "cuda" if bench.device.type == "cuda" else "cpu", [fresh(s) for s in sets]
    cases = [(provider, ours, (), {})] + ([(f"{provider}, no draft_probs", ours, (), dict(draft_probs=None))] if extra else [])
    for label, function, more, changes in cases + ([("sglang-kernel", theirs, extra, {})] if sgl else []):
        inputs = [fresh(s) | changes for s in pristine]
        bench.measure(label, shape, kind, [partial(function, *s.values(), *more) for s in inputs], nbytes,
                      check=partial(same, function, more, **changes))
    if not sgl:
        bench.absent("sglang-kernel", shape, kind, "not installed")


def main() -> int:
    args = options(__doc__.splitlines()[0]).parse_args()
    bench, rng = Bench("sglang", args), torch.Generator().manual_seed(3)
    sgl = load_sglang() if bench.device.type == "cuda" else None
    for batch, nodes, vocab in bench.shapes(SHAPES if bench.device.type == "cuda" else ((2, 8, 1000),), "BNV"):
        most = chain_depth(nodes)
        for accepted in (0, 3, most):
            row = 4 * vocab * batch
            room = max(2, 2**33 // (8 * vocab * batch * nodes))  # 8 GiB of probabilities
            sets = [sampling_set(rng, batch, nodes, vocab, accepted, bench.device) for _ in range(min(bench.sets(row), room))]
            compare(bench, "tree_speculative_sampling_target_only", dict(B=batch, N=nodes, V=vocab, accepted=accepted), sets, row, sgl, "float32")
    for batch, nodes in bench.shapes(((1, 16), (1, 64), (8, 32), (32, 16), (64, 64)), "BN"):
        shape = dict(B=batch, N=nodes)
        makers = {"verify_tree_greedy": (lambda: greedy_case(rng, batch, nodes, 8), 40 * batch * nodes),
                  "build_tree_kernel_efficient": (lambda: build_case(rng, batch, nodes, 8, 6, 1), batch * nodes * (nodes + 40)),
                  "reconstruct_indices_from_tree_mask": (lambda: mask_case(rng, batch, nodes), batch * nodes * (nodes + 32))}
        for name, (make, nbytes) in makers.items():
            compare(bench, name, shape, [on(bench.device, make()) for _ in range(16)], nbytes, sgl, "int64")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
