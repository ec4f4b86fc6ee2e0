"""One verify step of a dense target with random weights: every stage alone, and the whole step in one run.

    python benchmarks/step/bench_step.py --model llama-3-8b --batch 1,8 --nodes 16,64 --prefix 8192

A stage is all of its calls in a step (tree_attention: every layer, each with its own cache, so that weights and caches are as
cold as in decoding). Stages: tree (build_tree, prepare_tree), rope_append, tree_attention, linears (of all layers, norms and SiLU
included; torch), lm_head (torch), verify_tree (greedy), compact_kv (three accepted drafts). whole: the same calls in their order, one
CUDA graph, where the model takes products of ours for few rows; what it takes less than the sum is that and what neighbours hide. Not in it: the draft model, collectives. correct: the tokens of
the whole step are the CPU op's on its logits. floor: weights, the caches of the prefix and logits read once.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Bench, options  # noqa: E402

from fastverify import VerifyPlan, build_tree, compact_kv, prepare_tree, rope_append, tree_attention, verify_tree  # noqa: E402
from fastverify.accept.verify_tree import Sampling, Verified  # noqa: E402
from fastverify.attention.tree_attention import workspace_for  # noqa: E402
from fastverify.models.batch import ForwardBatch  # noqa: E402
from fastverify.models.dummy import CONFIGS, dummy_target  # noqa: E402
from fastverify.models.linear import add_linear, linear  # noqa: E402

SHAPES = {"cuda": [dict(B=b, N=n, KV=kv) for b, n, kv in ((1, 16, 8192), (1, 64, 8192), (8, 16, 8192), (8, 64, 2048))],
          "cpu": [dict(B=1, N=8, KV=256), dict(B=1, N=32, KV=256)]}
DEFAULT = {"cuda": "llama-3-8b", "cpu": "smollm2-135m"}
PAGE, CALLS = 16, 4  # steps of one CUDA graph


class Step:
    """Everything one step reads and writes."""

    def __init__(self, model, shape: dict) -> None:
        self.model, c, device = model, model.config, model.device
        batch, nodes, prefix = shape["B"], shape["N"], shape["KV"]
        self.rows, self.nodes = batch * nodes, nodes
        i32 = dict(dtype=torch.int32, device=device)
        pages = -(-(prefix + nodes) // PAGE)
        self.table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        self.cache = model.make_cache(batch * pages, PAGE)
        self.cache.k.normal_(0, 0.5), self.cache.v.normal_(0, 0.5)
        self.prefix, self.active = torch.full((batch,), prefix, **i32), torch.ones(batch, **i32)
        self.remaining, self.sampling = torch.full((batch,), 2**30, **i32), Sampling.make(batch, device)
        self.root = torch.randint(0, c.vocab_size, (batch,), **i32)
        size = 4 * nodes  # candidates of a draft phase: random trees of fan-out 4
        parents = (torch.arange(size, device=device) // 4 - 1).int()
        self.pool = (-torch.rand(batch, size, device=device).cumsum(1), torch.randint(0, c.vocab_size, (batch, size), **i32),
                     parents.expand(batch, size).contiguous())
        self.plan = VerifyPlan(batch, nodes, nodes, 0, model.dtype, device)
        self.moved = Verified.empty(batch, nodes, device)
        kept = [n for n in (0, 2, 4, 6) if n < nodes]  # none but the root is in its place
        self.moved.path[:, :len(kept)] = torch.tensor(kept, **i32)
        self.moved.num_tokens_out.fill_(len(kept))
        self.hidden = torch.randn(self.rows, c.hidden_size, device=device).to(model.dtype)
        self.q = torch.randn(self.rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, device=device).to(model.dtype)
        self.tree()
        self.logits = model.logits(self.hidden)

    def tree(self) -> None:
        p = self.plan
        build_tree(*self.pool, self.root, self.prefix, self.active, self.nodes, self.model.config.vocab_size, p.tree)
        prepare_tree(p.tree.parents, p.tree.cu_nodes, self.prefix, self.table, PAGE, p.prepared)

    def heads(self) -> tuple:
        c = self.model.config
        return self.q.view(self.rows, -1, c.head_dim).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)

    def rope_append(self) -> None:
        q, k, v = self.heads()
        for i in range(self.model.config.num_layers):
            rope_append(q, k, v, self.plan.tree.positions, self.plan.prepared.slots, self.model.cos_sin, self.cache.k[i], self.cache.v[i])

    def tree_attention(self) -> None:
        q, t = self.heads()[0], self.plan.tree
        workspace = workspace_for(q, self.cache.k[0], self.prefix.shape[0])
        for i in range(self.model.config.num_layers):
            tree_attention(q, self.cache.k[i], self.cache.v[i], t.cu_nodes, self.prefix, self.table, mask=t.mask,
                           schedule=self.plan.prepared.schedule, workspace=workspace)

    def linears(self) -> None:
        c, eps = self.model.config, self.model.config.rms_norm_eps
        size, wide = (c.hidden_size,), c.intermediate_size
        h = self.hidden.clone()
        for w in self.model.layers:
            qkv = linear(F.rms_norm(h, size, w.input_norm, eps), w.qkv, w.qkv_bias)
            add_linear(h, qkv[:, : c.num_heads * c.head_dim], w.o, w.o_bias)
            up = linear(F.rms_norm(h, size, w.post_norm, eps), w.gate_up, w.gate_up_bias)
            add_linear(h, F.silu(up[:, :wide], inplace=True).mul_(up[:, wide:]), w.down, w.down_bias)

    def lm_head(self) -> None:
        self.logits = self.model.logits(self.hidden)

    def accept(self, logits: torch.Tensor, out: Verified) -> None:
        t = self.plan.tree
        verify_tree(logits, t.tokens, t.parents, t.cu_nodes, self.prefix, self.active, self.remaining, self.sampling,
                    vocab_size=self.model.config.vocab_size, out=out, workspace=self.plan.verify_workspace)

    def verify_tree(self) -> None:
        self.accept(self.logits, self.plan.out)

    def compact_kv(self) -> None:
        compact_kv(self.cache.k, self.cache.v, self.moved.path, self.moved.num_tokens_out, self.prefix, self.table)

    def whole(self) -> None:
        self.tree()
        t, p = self.plan.tree, self.plan.prepared
        batch = ForwardBatch(t.tokens, t.positions, p.slots, t.cu_nodes, self.prefix, self.table, t.mask, schedule=p.schedule)
        self.last = self.model.logits(self.model.forward(batch, self.cache)[0])
        self.accept(self.last, self.plan.out)
        self.compact_kv()

    def right(self) -> bool:
        t, got = self.plan.tree, self.plan.out
        want = Verified.empty(self.prefix.shape[0], self.nodes)
        cpu = lambda x: x.cpu()  # noqa: E731
        verify_tree(cpu(self.last), cpu(t.tokens), cpu(t.parents), cpu(t.cu_nodes), cpu(self.prefix), cpu(self.active), cpu(self.remaining),
                    Sampling(*map(cpu, self.sampling)), vocab_size=self.model.config.vocab_size, out=want)
        return torch.equal(got.out_tokens.cpu(), want.out_tokens) and torch.equal(got.path.cpu(), want.path)


STAGES = ("tree", "rope_append", "tree_attention", "linears", "lm_head", "verify_tree", "compact_kv")


def floors(step: Step, shape: dict) -> dict:
    """Bytes of each stage that has a floor of any size."""
    c, item = step.model.config, step.hidden.element_size()
    kv = 2 * c.num_layers * shape["B"] * shape["KV"] * c.num_kv_heads * c.head_dim * item
    layer = sum(t.numel() for w in step.model.layers for t in (w.qkv, w.o, w.gate_up, w.down)) * item
    head, rows = step.model.lm_head_weight.numel() * item, step.rows * c.vocab_size * item
    return dict(tree_attention=kv, linears=layer, lm_head=head + rows, verify_tree=shape["B"] * c.vocab_size * item,
                whole=kv + layer + head + rows)


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="NAME,...", help=f"{', '.join(CONFIGS)} (default: llama-3-8b on a GPU, smollm2-135m on a CPU)")
    args = parser.parse_args()
    bench = Bench("step", args)
    kind, dtype = bench.device.type, torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    for name in (args.model or DEFAULT[kind]).split(","):
        shapes = bench.shapes(SHAPES[kind])
        model = dummy_target(name, dtype, bench.device)
        for shape in shapes:
            with torch.inference_mode():
                step = Step(model, shape)
                nbytes = floors(step, shape)
                step.whole()  # what the stages read is what a step leaves
                for stage in (*STAGES, "whole"):
                    bench.measure("fastverify", dict(model=name, **shape, stage=stage), dtype, [getattr(step, stage)], nbytes.get(stage, 0),
                                  check=step.right if stage == "whole" else None, min_calls=CALLS, cold=True)
                    if bench.rows[-1]["correct"] is False:
                        print(f"{stage}: the tokens are not the CPU op's", file=sys.stderr)
            del step
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
