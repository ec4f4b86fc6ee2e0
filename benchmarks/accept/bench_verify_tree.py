"""verify_tree: ours (CUDA, Triton), plain torch, and SGLang's pipeline on sglang-kernel, at 0, 3 and the most accepted drafts.

    python benchmarks/accept/bench_verify_tree.py --out benchmarks/results
    python benchmarks/accept/bench_verify_tree.py --logits smollm2-logits.xz      # real logits of save_logits.py instead of noise

Time of torch and SGLang does not depend on the number of accepted drafts: they are measured at 3, and so is Triton's version. Correct: ours equals the CPU op
bit for bit on that set; SGLang accepted as many drafts as were planted (it draws with its own coins); torch emitted the planted
drafts and one token more (greedy), or any token (it has noise of its own). floor: the visited rows read once.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from harness import Bench, options
from peers import SglangPipeline, TorchPipeline, load_sglang
from trees import LAWS, Grove, chain_depth, matches_cpu, real_rows

from fastverify import _ops

SHAPES = ((1, 16, 128256), (1, 64, 128256), (8, 32, 128256), (32, 16, 128256), (1, 16, 163840))
REAL_SHAPES = ((1, 16, 49152), (1, 64, 49152), (8, 32, 49152), (32, 16, 49152))


def kernels(device: torch.device) -> dict:
    """{provider: the op as a callable on its positional arguments, or the reason why it is absent}."""
    have = _ops.get("verify_tree") if _ops.has_native_kernel("verify_tree", device.type) else f"no {device.type} kernel in this build"
    found = {device.type: have}
    if device.type == "cuda":
        try:
            from fastverify import _triton
            found["triton"] = _triton.function("verify_tree") if _triton.exists("verify_tree") else "triton not installed"
        except ImportError:
            found["triton"] = "no Triton version in this build"
    return found


def workspace_maker(device: torch.device):
    """() -> the op's workspace on this device, None where the build wants none."""
    make = getattr(importlib.import_module("fastverify.accept.verify_tree"), "verify_tree_workspace", None)
    return lambda: make(device) if make and device.type == "cuda" else None


def logit_sets(count: int, rows: int, vocab: int, device: torch.device, real) -> list:
    """`count` bfloat16 [rows, vocab]: noise of standard deviation 2, or the saved rows in random order."""
    rng = torch.Generator(device=device).manual_seed(7)
    if real is None:
        return [torch.randn(rows, vocab, generator=rng, device=device, dtype=torch.bfloat16) * 2 for _ in range(count)]
    pick = lambda: torch.randint(0, real.shape[0], (rows,), generator=rng, device=device)  # noqa: E731
    return [real[pick()].contiguous() for _ in range(count)]


def measure_shape(bench: Bench, shape: tuple, laws: list, found: dict, sgl, real, max_bytes: int) -> None:
    batch, nodes, vocab = shape
    count = min(bench.sets(2 * batch * vocab), max(2, max_bytes // (2 * batch * nodes * vocab)))
    sets = logit_sets(count, batch * nodes, vocab, bench.device, real)
    for law in laws:
        axes = dict(B=batch, N=nodes, V=vocab, law=law, logits="random" if real is None else "SmolLM2")
        for provider, f in found.items():
            if not callable(f):
                bench.absent(provider, axes, "bfloat16", f)
        if any(map(callable, found.values())):
            measure_law(bench, axes, sets, found, sgl)


def measure_law(bench: Bench, axes: dict, sets: list, found: dict, sgl) -> None:
    batch, nodes, law, row_bytes = axes["B"], axes["N"], axes["law"], 2 * axes["V"]
    make_workspace, reference = workspace_maker(bench.device), next(f for f in found.values() if callable(f))
    grove = Grove(reference, sets, batch, nodes, law, make_workspace)
    workspace, most = make_workspace(), chain_depth(nodes)
    for accepted in dict.fromkeys((0, min(3, most), most)):
        batches, visited = grove.plant(accepted), batch * (accepted + 1) * row_bytes
        at = axes | dict(accepted=accepted)
        for provider, f in found.items():
            if callable(f) and (provider != "triton" or accepted == min(3, most)):
                calls = [partial(f, *b.arguments(workspace)) for b in batches]
                bench.measure(provider, at, "bfloat16", calls, visited, check=partial(matches_cpu, batches[0]))
        if accepted == min(3, most):
            nbytes = batch * nodes * row_bytes  # they read every row: fewer sets are cold
            peers(bench, at, batches[:bench.sets(nbytes)], law, sgl, nbytes)


def peers(bench: Bench, at: dict, batches: list, law: str, sgl, nbytes: int) -> None:
    if bench.wanted("torch"):
        plain = [TorchPipeline(b, law) for b in batches]
        right = lambda: walked_as_planted(plain[0].emitted(), batches[0], law)  # noqa: E731
        bench.measure("torch", at, "bfloat16", plain, nbytes, check=right)
    if sgl is None:
        bench.absent("sglang-kernel", at, "bfloat16", "not installed")
        return
    scratch = None if law == "greedy" else torch.zeros(at["B"], at["N"], at["V"], device=bench.device)
    for name, ours in (("sglang-kernel", False), ("sglang + our drop-in", True)):
        theirs = [SglangPipeline(b, law, sgl, ours, scratch) for b in batches] if bench.wanted(name) else []
        bench.measure(name, at, "bfloat16", theirs, nbytes, check=lambda t=theirs: bool((t[0].accepted() == at["accepted"]).all()))


def walked_as_planted(emitted: torch.Tensor, b, law: str) -> bool:
    """Greedy: the planted drafts and one token more. Else (noise of its own): a token for every request."""
    if law != "greedy":
        return bool((emitted[:, 0] >= 0).all())
    planted = b.tokens.view(emitted.shape[0], b.nodes)[:, 1:b.accepted + 1]
    return torch.equal(emitted[:, :b.accepted], planted) and bool(((emitted >= 0).sum(1) == b.accepted + 1).all())


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--logits", type=Path, help="real logits (SmolLM2, V = 49152) written by save_logits.py")
    parser.add_argument("--law", default=",".join(LAWS), help="greedy,temperature,top-k+top-p (default: all)")
    parser.add_argument("--shape", action="append", metavar="B,N,V", help="instead of the table's shapes; may be repeated")
    parser.add_argument("--max-gib", type=float, default=16, help="memory for the buffer sets of one shape")
    args = parser.parse_args()
    bench = Bench("verify_tree", args)
    real = real_rows(args.logits, 49152).to(bench.device) if args.logits else None
    shapes = [tuple(map(int, s.split(","))) for s in args.shape or []] or (SHAPES if real is None else REAL_SHAPES)
    found, sgl = kernels(bench.device), load_sglang() if bench.device.type == "cuda" else None
    for shape in bench.shapes(shapes, ("B", "N", "V")):
        measure_shape(bench, shape, args.law.split(","), found, sgl, real, int(args.max_gib * 2**30))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()  # the sets of the next shape
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
