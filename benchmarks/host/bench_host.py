"""What the host pays: Python and dispatch of every op of a step, and of a decode round. By pytest-benchmark, on the CPU.

    python -m pytest benchmarks/host/bench_host.py                                  # a table per group
    python -m pytest benchmarks/host/bench_host.py --benchmark-json host.json

Inputs are as small as they can be, so that a call is its overhead. Groups: `function` (fastverify.<op>: checks and call), `op`
(torch.ops.fastverify.<op> alone; what the function takes more is Python), `rounds` (prefill and six rounds of the decode loop on a tiny
target, its products included).
"""

import pytest
import torch

import fastverify as fv
from fastverify import _ops
from fastverify.models.dummy import dummy_target

pytest.importorskip("pytest_benchmark")
I32 = dict(dtype=torch.int32)
ONE, NODES, DIM = torch.ones(1, **I32), 4, 64


def _tree() -> tuple:
    pool = torch.tensor([[-0.1, -0.2, -0.3]]), torch.tensor([[5, 6, 7]], **I32), torch.tensor([[-1, -1, 0]], **I32)
    return (*pool, ONE, ONE, ONE, NODES, 100), fv.Tree.empty(1, NODES)


def cases() -> dict:
    """op -> (its function with all outputs given, the same call of the op)."""
    args, tree = _tree()
    fv.build_tree(*args, tree)
    table, prepared = torch.zeros(1, 1, **I32), fv.Prepared.empty(NODES, 1, 1)
    logits, sampling = torch.randn(NODES, 100), fv.Sampling.make(1)
    verified, remaining, draft = fv.Verified.empty(1, NODES), torch.full((1,), 2**30, **I32), torch.randn(1, 100)
    values, tokens = fv.draft_topk(draft, 3)
    q, k, v = (torch.randn(NODES, 1, DIM) for _ in "qkv")
    caches = [torch.zeros(1, 1, 16, 1, DIM) for _ in "kv"]
    cos_sin, slots, out = torch.ones(64, DIM), torch.arange(NODES), torch.empty(NODES, 1, DIM)
    path = torch.tensor([[0, 2, -1, -1]], **I32)
    rest = (tree.tokens, tree.parents, tree.cu_nodes, ONE, ONE, remaining)
    functions = dict(
        draft_topk=lambda: fv.draft_topk(draft, 3, values=values, tokens=tokens),
        build_tree=lambda: fv.build_tree(*args, tree),
        prepare_tree=lambda: fv.prepare_tree(tree.parents, tree.cu_nodes, ONE, table, 16, prepared),
        rope_append=lambda: fv.rope_append(q, k, v, tree.positions, slots, cos_sin, caches[0][0], caches[1][0]),
        tree_attention=lambda: fv.tree_attention(q, caches[0][0], caches[1][0], tree.cu_nodes, ONE, table, mask=tree.mask, out=out),
        verify_tree=lambda: fv.verify_tree(logits, *rest, sampling, out=verified),
        compact_kv=lambda: fv.compact_kv(*caches, path, ONE + 1, ONE, table))
    raw = dict(
        draft_topk=lambda: _ops.get("draft_topk")(draft, None, None, None, None, None, None, values, tokens),
        build_tree=lambda: _ops.get("build_tree")(*args[:6], *tree, NODES, 100),
        prepare_tree=lambda: _ops.get("prepare_tree")(tree.parents, tree.cu_nodes, ONE, table, *prepared, 16, 0),
        rope_append=lambda: _ops.get("rope_append")(q, k, v, tree.positions, slots, cos_sin, None, None, None, None, caches[0][0], caches[1][0],
                                                    1e-6, 0),
        tree_attention=lambda: _ops.get("tree_attention")(q, caches[0][0], caches[1][0], tree.mask, tree.cu_nodes, ONE, table, None, None, None,
                                                          None, out, None, None, 0, DIM**-0.5, 0, 0.0),
        verify_tree=lambda: _ops.get("verify_tree")(logits, *rest, None, *sampling, None, None, None, None, *verified[:5], None, None, 100, 1),
        compact_kv=lambda: _ops.get("compact_kv")(*caches, path, ONE + 1, ONE, table, None, None, None, None))
    return {op: (functions[op], raw[op]) for op in functions}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def calls() -> dict:
    return cases()


OPS = ("draft_topk", "build_tree", "prepare_tree", "rope_append", "tree_attention", "verify_tree", "compact_kv")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.benchmark(group="function")
def test_function(benchmark, calls, op):
    benchmark(calls[op][0])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.benchmark(group="op")
def test_op(benchmark, calls, op):
    benchmark(calls[op][1])


@pytest.mark.parametrize("tree", ["off", "tree-8"])
@pytest.mark.benchmark(group="rounds")
def test_rounds(benchmark, tree):
    target, text = dummy_target("tiny", torch.float32), [(7919 * (i % 4)) % 500 for i in range(32)]
    decoder = fv.Decoder(target, fv.NgramDrafter(num_draft=7, num_matches=2) if tree != "off" else None, tree=tree)
    benchmark.pedantic(lambda: decoder.time_rounds([text], decoder.shapes[0], 6), rounds=5, warmup_rounds=1)
