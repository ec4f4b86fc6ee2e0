"""mla_tree_attention on random trees over a latent cache of 512 + 64 dims, beside FlashInfer's MLA (a causal chain: it takes no tree).

    python benchmarks/attention/bench_mla_tree_attention.py --out benchmarks/results
    FASTVERIFY_PROFILE=sm_120 python benchmarks/attention/bench_mla_tree_attention.py --only cuda     # the mma.sync kernel
"""

import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple, Optional

import torch

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (0, 1)]

import attention_inputs as inputs  # noqa: E402
from harness import Bench, options  # noqa: E402

from fastverify import _ops  # noqa: E402
from fastverify.attention.workspace import mla_workspace_for  # noqa: E402

SHAPES = ["8,1,8,8192", "8,4,8,32768", "16,1,8,8192", "16,4,8,32768", "64,1,8,8192", "128,1,4,8192"]  # H, B, N, prefix
LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (128 + 64) ** -0.5


class Inputs(NamedTuple):
    q: torch.Tensor           # [B*N, H, 576]
    kv: torch.Tensor          # [pages, PAGE, 576]
    mask: torch.Tensor        # int64 [B*N, ceil(N/64)]
    cu_nodes: torch.Tensor
    prefix_len: torch.Tensor
    table: torch.Tensor       # int32 [B, pages of a request]
    tree: torch.Tensor        # bool [B, N, N]
    out: torch.Tensor         # [B*N, H, 512]


def make(heads: int, batch: int, nodes: int, prefix: int, dtype, device, chain: bool = False, step: Optional[Inputs] = None) -> Inputs:
    """The keys of the tree lie along the queries, so that a wrong mask changes the output."""
    per = -(-(prefix + nodes) // PAGE)
    table = step.table if step else torch.randperm(batch * per, device=device).view(batch, per).int()
    along = torch.nn.functional.normalize(torch.randn(LATENT + ROPE, device=device), dim=0) * 9.5
    kv = torch.randn(batch * per, PAGE, LATENT + ROPE, device=device, dtype=dtype)
    at = prefix + torch.arange(nodes, device=device)
    kv[table[:, at // PAGE].long(), at % PAGE] += along.to(dtype)
    tree = torch.ones(batch, nodes, nodes, dtype=torch.bool, device=device).tril() if chain else inputs.random_trees(batch, nodes, device)
    rows = batch * nodes
    own = Inputs(torch.randn(rows, heads, LATENT + ROPE, device=device, dtype=dtype) + along.to(dtype), kv, inputs.mask_words(tree),
                 torch.arange(0, rows + 1, nodes, dtype=torch.int32, device=device),
                 torch.full((batch,), prefix, dtype=torch.int32, device=device), table, tree,
                 torch.full((rows, heads, LATENT), float("nan"), device=device, dtype=dtype))
    return own._replace(mask=step.mask, cu_nodes=step.cu_nodes, prefix_len=step.prefix_len, tree=step.tree) if step else own


def oracle(x: Inputs) -> torch.Tensor:
    batch, nodes = x.tree.shape[:2]
    length = int(x.prefix_len[0]) + nodes
    out = torch.empty_like(x.out, dtype=torch.float32)
    for b in range(batch):
        keys = x.kv[x.table[b].long()].flatten(0, 1)[:length].double()
        s = torch.einsum("nhd,kd->hnk", x.q.view(batch, nodes, *x.q.shape[1:])[b].double(), keys) * SCALE
        s[..., -nodes:].masked_fill_(~x.tree[b], -torch.inf)
        out.view(batch, nodes, *out.shape[1:])[b] = torch.einsum("hnk,kd->nhd", s.softmax(-1), keys[:, :LATENT]).float()
    return out


def ours(sets: list) -> tuple:
    op, workspace = _ops.get("mla_tree_attention"), mla_workspace_for(sets[0].q, len(sets[0].prefix_len))
    return [functools.partial(op, x.q, x.kv, x.mask, x.cu_nodes, x.prefix_len, x.table, x.out, None, workspace, 0, SCALE) for x in sets]


def flashinfer(sets: list, backend: str) -> tuple:
    """Planned beforehand: its host work of each step is not in the figure."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    def plan(x):
        batch, nodes = x.tree.shape[:2]
        length = int(x.prefix_len[0]) + nodes
        used = -(-length // PAGE)
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=x.q.device), backend=backend)
        wrapper.plan(x.cu_nodes, torch.arange(batch + 1, dtype=torch.int32, device=x.q.device) * used, x.table[:, :used].flatten().contiguous(),
                     torch.full((batch,), length, dtype=torch.int32, device=x.q.device), x.q.shape[1], LATENT, ROPE, PAGE, True, SCALE,
                     x.q.dtype, x.kv.dtype)
        return wrapper

    calls = []
    for x, wrapper in zip(sets, inputs.per_step(sets, plan)):
        calls.append(functools.partial(wrapper.run, x.q[..., :LATENT], x.q[..., LATENT:], x.kv[..., :LATENT], x.kv[..., LATENT:], out=x.out))
    return calls


def main() -> int:
    parser = options("mla_tree_attention against FlashInfer's MLA")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="H,B,N,KV")
    parser.add_argument("--own-tables", action="store_true", help="a page table, lengths and trees per buffer set, not one as for the layers of a step")
    args = parser.parse_args()
    bench = Bench("mla_tree_attention", args)
    on_gpu = bench.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = "cpu" if not on_gpu else "cuda, sm_120 configuration" if os.environ.get("FASTVERIFY_PROFILE") else "cuda"
    providers = {name: (ours, False)}
    if on_gpu:
        providers |= {f"flashinfer {b} (chain)": (functools.partial(flashinfer, backend=b), True) for b in ("fa3", "fa2")}
    for text in bench.shapes(args.shapes, ("heads", "B", "N", "KV")):
        heads, batch, nodes, prefix = map(int, text.split(","))
        shape = dict(H=heads, B=batch, N=nodes, KV=prefix)
        nbytes = batch * dtype.itemsize * ((prefix + nodes) * (LATENT + ROPE) + nodes * heads * (2 * LATENT + ROPE))
        for label, (prepare, chain) in providers.items():
            if not bench.wanted(label.split(",")[0].split(" (")[0]):
                continue
            torch.manual_seed(0)
            sets = inputs.layers(bench.sets(nbytes), lambda step: make(heads, batch, nodes, prefix, dtype, bench.device, chain, step),  # noqa: B023
                                 args.own_tables)
            wants = [oracle(x) for x in sets[:1]]
            try:
                calls = prepare(sets)
            except ImportError as error:
                bench.absent(label, shape, dtype, f"not installed: {error}")
                continue
            except Exception as error:  # a peer that cannot take this shape is a row, not the end of the run
                bench.absent(label, shape, dtype, f"failed: {str(error).strip().splitlines()[0][:160]}")
                continue
            right = lambda: all(bool(((x.out.float() - w).abs() <= 2e-2 * (1 + w.abs())).all()) for x, w in zip(sets, wants))  # noqa: B023, E731
            bench.measure(label, shape, dtype, calls, nbytes, check=right, note="own tables" if args.own_tables else "")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
