"""build_tree: pool -> verify tree. Golden tree, an independent construction, malformed pools."""

import math

import pytest
import torch
from cases import mask_words, randint
from conftest import mutable_names, positional, run_op
from torch.library import opcheck
from torch.testing import assert_close

from fastverify import _ops
from fastverify.tree import Tree, build_tree

INF, I32, I64 = math.inf, torch.int32, torch.int64
BAD_TREE, BAD_TOKEN = 4, 8


def poisoned(batch: int, num_nodes: int, extra: int = 0, dtype=I32) -> dict:
    tree = Tree.empty(batch, num_nodes, dtype)
    rows = batch * num_nodes + extra
    grown = [torch.full((rows, *t.shape[1:]), -77, dtype=t.dtype) for t in tree[:5]]
    return dict(zip(Tree._fields, grown + [t.fill_(-77) for t in tree[5:]]))


def run(backend: str, scores, tokens, parents, num_nodes: int, *, active=None, prefix=None, roots=None, vocab=1000,
        extra: int = 0, dtype=I32) -> Tree:
    """Runs `backend` and the oracle; every output equal bit for bit."""
    batch = scores.size(0)
    args = dict(pool_scores=scores, pool_tokens=tokens, pool_parents=parents,
                root_tokens=torch.arange(batch, dtype=dtype) if roots is None else roots,
                prefix_len=torch.arange(batch, dtype=I32) * 10 if prefix is None else prefix,
                active=torch.ones(batch, dtype=I32) if active is None else active,
                num_nodes=num_nodes, vocab_size=vocab, **poisoned(batch, num_nodes, extra, dtype))
    got, want = run_op(backend, "build_tree", **args), run_op("reference", "build_tree", **args)
    for name in Tree._fields:
        assert_close(got[name], want[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    return Tree(**got)


def random_pool(batch: int, size: int, rng, levels: int = 12) -> tuple:
    """Scores fall along paths most of the time, with ties; parents before children."""
    parents = torch.stack([(torch.rand(size, generator=rng) * (torch.arange(size) + 1)).long() - 1 for _ in range(batch)])
    own = -torch.randint(0, levels, (batch, size), generator=rng).float() / 4
    scores = own.clone()
    for i in range(size):
        up = parents[:, i]
        scores[:, i] += torch.where(up >= 0, scores[torch.arange(batch), up.clamp(min=0)], 0.0)
    tokens = torch.randint(0, 1000, (batch, size), generator=rng, dtype=I32)
    return scores, tokens, parents.to(I32)


def expand(scores: list, parents: list, count: int) -> list:
    """Independent construction: grow from the root, always taking the best reachable entry (ties: lowest index)."""
    best, chosen = {-1: 0.0}, []
    while len(chosen) < count:
        reach = [(-min(s, best[p]), i) for i, (s, p) in enumerate(zip(scores, parents))
                 if i not in best and p in best and -1 <= p < i and s == s and min(s, best[p]) > -INF]
        if not reach:
            break
        score, index = min(reach)
        best[index] = -score
        chosen.append(index)
    return sorted(chosen)


def assert_tree(tree: Tree, b: int, scores: list, tokens: list, parents: list, chosen: list, root: int, prefix: int) -> None:
    start, end = int(tree.cu_nodes[b]), int(tree.cu_nodes[b + 1])
    place = {-1: 0, **{index: node + 1 for node, index in enumerate(chosen)}}
    links = [-1] + [place[parents[i]] for i in chosen]  # a KeyError here: not closed under ancestors
    depth = []
    for p in links:
        depth.append(0 if p < 0 else depth[p] + 1)
    assert end - start == len(links)
    assert tree.tokens[start:end].tolist() == [root] + [tokens[i] for i in chosen]
    assert tree.parents[start:end].tolist() == links
    assert torch.equal(tree.mask[start:end], mask_words(links, tree.mask.size(1)))
    assert tree.depth[start:end].tolist() == depth
    assert tree.positions[start:end].tolist() == [prefix + d for d in depth]


def test_seven_nodes_by_hand(backend):
    """k = 2, three levels:  root > A B;  A > C D, B > E F;  C > G H, E > I J.  The best six: A C G B E D."""
    scores = torch.tensor([[-0.3, -1.5, -0.5, -2.0, -1.9, -4.0, -0.7, -2.5, -2.2, -5.0]])
    tokens = torch.arange(101, 111, dtype=I32)[None]
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]], dtype=I32)
    tree = run(backend, scores, tokens, parents, 7, roots=torch.tensor([100], dtype=I32), prefix=torch.tensor([12], dtype=I32))
    assert tree.tokens.tolist() == [100, 101, 102, 103, 104, 105, 107]  # root A B C D E G
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.mask.flatten().tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 2, 3] and tree.positions.tolist() == [12, 13, 13, 14, 14, 14, 15]
    assert tree.cu_nodes.tolist() == [0, 7] and tree.flags.tolist() == [0]


@pytest.mark.parametrize("batch,size,num_nodes", [(1, 1, 2), (3, 30, 8), (5, 110, 60), (2, 10, 20), (64, 21, 8), (4, 700, 130),
                                                  (1, 1500, 1024), (3, 12, 1)])
def test_random_pools(backend, rng, batch, size, num_nodes):
    scores, tokens, parents = random_pool(batch, size, rng)
    dead = torch.rand(batch, size, generator=rng) < 0.1
    scores[dead] = -INF
    scores[torch.rand(batch, size, generator=rng) < 0.03] = math.nan
    active = (torch.rand(batch, generator=rng) < 0.8).to(I32)
    active[batch // 2] = 1
    tree = run(backend, scores, tokens, parents, num_nodes, active=active, extra=3)
    for b in range(batch):
        if not active[b]:
            assert tree.cu_nodes[b] == tree.cu_nodes[b + 1] and tree.flags[b] == 0
            continue
        row = [t[b].tolist() for t in (scores, tokens, parents)]
        assert_tree(tree, b, *row, expand(row[0], row[2], num_nodes - 1), b, 10 * b)
    end = int(tree.cu_nodes[-1])
    assert tree.parents[end:].eq(-1).all()
    assert all(t[end:].eq(0).all() for t in (tree.tokens, tree.mask, tree.depth, tree.positions))
    assert torch.equal(tree.flags, torch.zeros(batch, dtype=I32))


def test_all_equal_scores_take_the_lowest_indices(backend, rng):
    parents = random_pool(1, 50, rng)[2]
    tree = run(backend, torch.full((1, 50), -1.0), torch.arange(50, dtype=I32)[None], parents, 20)
    assert tree.tokens[1:].tolist() == list(range(19))


def test_scores_that_rise_are_held_down(backend):
    """A child never ranks above its parent, positive scores count as 0, -0 equals 0, NaN kills the subtree."""
    scores = torch.tensor([[-2.0, 5.0, 3.0, math.nan, -0.5, -0.0, INF]])
    parents = torch.tensor([[-1, 0, -1, -1, 3, -1, 4]], dtype=I32)
    tokens = torch.arange(7, dtype=I32)[None]
    assert run(backend, scores, tokens, parents, 3).tokens.tolist() == [0, 2, 5]
    assert run(backend, scores, tokens, parents, 4).tokens.tolist() == [0, 0, 2, 5]
    tree = run(backend, scores, tokens, parents, 7)
    assert tree.tokens.tolist() == [0, 0, 1, 2, 5, 0, 0] and tree.parents.tolist() == [-1, 0, 1, 0, 0, -1, -1]


def test_nothing_alive_leaves_the_root(backend):
    none = torch.full((3, 6), -INF)
    none[1] = math.nan
    tree = run(backend, none, torch.zeros(3, 6, dtype=I32), torch.full((3, 6), -1, dtype=I32), 4)
    assert tree.cu_nodes.tolist() == [0, 1, 2, 3] and tree.tokens[:3].tolist() == [0, 1, 2] and tree.flags.eq(0).all()


def test_inactive_in_the_middle(backend, rng):
    scores, tokens, parents = random_pool(5, 9, rng)
    active = torch.tensor([1, 0, 1, 0, 0], dtype=I32)
    tree = run(backend, scores, tokens, parents, 4, active=active)
    assert tree.cu_nodes.tolist() == [0, 4, 4, 8, 8, 8]
    scores[1], parents[3], tokens[4] = math.nan, 99, -1  # of inactive requests: not looked at
    again = run(backend, scores, tokens, parents, 4, active=active)
    assert all(torch.equal(a, b) for a, b in zip(tree, again))


def test_bad_parents_are_flagged_and_left_out(backend):
    scores = torch.full((6, 4), -1.0)
    parents = torch.tensor([[-1, 0, 1, 2], [-1, 1, 0, 0], [-1, 2, 1, 0], [-1, 0, -2, 2], [-1, 0, 4, 2**31 - 1],
                            [0, 0, 1, -(2**31)]], dtype=I32)  # good, self, forward + cycle, below, past the end, no start
    tree = run(backend, scores, torch.arange(1, 5, dtype=I32).expand(6, 4).contiguous(), parents, 5)
    assert tree.flags.tolist() == [0] + [BAD_TREE] * 5
    nodes = [tree.tokens[tree.cu_nodes[b] + 1:tree.cu_nodes[b + 1]].tolist() for b in range(6)]
    assert nodes == [[1, 2, 3, 4], [1, 3, 4], [1, 4], [1, 2], [1, 2], []]


def test_garbage_is_bounded_and_defined(backend, rng):
    odd_int = torch.tensor([-(2**31), -2, -1, -1, 0, 0, 1, 2, 3, 5, 2**31 - 1], dtype=I32)
    odd_float = torch.tensor([-INF, INF, math.nan, 0.0, -0.0, 1.0, -1.0, -1.0, -1e-40, -3e38, 3e38])
    for _ in range(60):
        batch, size, num_nodes = (int(randint(low, high, rng)) for low, high in ((0, 4), (0, 9), (1, 9)))
        pick = lambda values, *shape: values[torch.randint(0, len(values), shape, generator=rng)]  # noqa: E731
        run(backend, pick(odd_float, batch, size), pick(odd_int, batch, size), pick(odd_int, batch, size), num_nodes, vocab=3,
            active=pick(odd_int, batch), roots=pick(odd_int, batch), prefix=pick(odd_int[1:-1], batch))


def test_ids_are_clamped_and_flagged(backend):
    scores = torch.tensor([[-1.0, -2.0, -3.0]]).expand(4, 3).contiguous()
    tokens = torch.tensor([[-1, 5, 0], [9, 10, 0], [1, 2, 50], [1, 2, 3]], dtype=I32)
    parents = torch.full((4, 3), -1, dtype=I32)
    tree = run(backend, scores, tokens, parents, 3, vocab=10, roots=torch.tensor([1, 1, 1, 12], dtype=I32))
    assert tree.tokens.view(4, 3)[:, 1:].tolist() == [[0, 5], [9, 9], [1, 2], [1, 2]] and tree.tokens[9] == 9
    assert tree.flags.tolist() == [BAD_TOKEN, BAD_TOKEN, 0, BAD_TOKEN]  # an id that is not taken is not judged


@pytest.mark.parametrize("out,pool", [(I64, I64), (I32, I64), (I64, I32)])
def test_wide_ids(backend, rng, out, pool):
    scores, tokens, parents = random_pool(2, 9, rng)
    tokens = tokens.to(pool)
    tokens[0, 0] = 2**40 if pool == I64 else -1
    scores[0, 0] = 0.0
    tree = run(backend, scores, tokens, parents, 5, dtype=out)
    assert tree.tokens.dtype == out and tree.tokens[1] == (999 if pool == I64 else 0) and tree.flags.tolist() == [BAD_TOKEN, 0]


@pytest.mark.parametrize("batch,size", [(0, 5), (2, 0)])
def test_empty(backend, batch, size):
    tree = run(backend, torch.zeros(batch, size), torch.zeros(batch, size, dtype=I32), torch.zeros(batch, size, dtype=I32), 3)
    assert tree.cu_nodes.tolist() == list(range(batch + 1))


def test_more_mask_words_than_needed_and_deep_chain(backend):
    size = 200
    scores, parents = -torch.arange(size).float()[None], torch.arange(-1, size - 1, dtype=I32)[None]
    tree = run(backend, scores, torch.zeros(1, size, dtype=I32), parents, size + 1)
    assert tree.depth.tolist() == list(range(size + 1)) and tree.mask.size(1) == 4
    assert tree.mask[-1].tolist() == [-1, -1, -1, 2**9 - 1]
    wide = Tree.empty(1, 3)._replace(mask=torch.full((3, 16), -77, dtype=I64))
    one = torch.ones(1, dtype=I32)
    build_tree(scores, torch.zeros(1, size, dtype=I32), parents, one, one, one, 3, 10, wide)
    assert wide.mask[:, 0].tolist() == [1, 3, 7] and wide.mask[:, 1:].eq(0).all()


def test_repeatable_canaries_and_inputs_untouched(rng):
    scores, tokens, parents = random_pool(64, 110, rng)
    roots = prefix = active = torch.ones(64, dtype=I32)
    kept = [t.clone() for t in (scores, tokens, parents)]
    want = build_tree(scores, tokens, parents, roots, prefix, active, 30, 1000)
    for _ in range(3):
        guarded = [torch.full((t.size(0) + 2, *t.shape[1:]), 9, dtype=t.dtype) for t in want]
        build_tree(scores, tokens, parents, roots, prefix, active, 30, 1000, Tree(*(g[1:-1] for g in guarded)))
        for g, t in zip(guarded, want):
            assert torch.equal(g[1:-1], t) and g[0].eq(9).all() and g[-1].eq(9).all()
    assert all(torch.equal(a, b) for a, b in zip(kept, (scores, tokens, parents)))


def test_opcheck_and_compile(rng):
    scores, tokens, parents = random_pool(2, 12, rng)
    one = torch.ones(2, dtype=I32)
    args = dict(pool_scores=scores, pool_tokens=tokens, pool_parents=parents, root_tokens=one, prefix_len=one, active=one,
                num_nodes=5, vocab_size=1000)
    opcheck(_ops.get("build_tree"), positional("build_tree", **args, **Tree.empty(2, 5)._asdict()))
    compiled = torch.compile(build_tree, fullgraph=True, backend="eager")(**args)
    assert all(torch.equal(a, b) for a, b in zip(compiled, build_tree(**args)))
    assert mutable_names("build_tree") == list(Tree._fields)


BAD = {
    "pool_scores": (dict(pool_scores=torch.zeros(2, 12, dtype=torch.float64)),
                    "pool_scores must be float32 [any, any] on cpu; got float64 [2, 12] on cpu. Fix: cast with .to(dtype)."),
    "pool_tokens": (dict(pool_tokens=torch.zeros(2, 11, dtype=I32)),
                    "pool_tokens must be int32|int64 [2, 12] on cpu; got int32 [2, 11] on cpu. Fix: pass that shape."),
    "pool_parents": (dict(pool_parents=torch.zeros(2, 12, dtype=I64)),
                     "pool_parents must be int32 [2, 12] on cpu; got int64 [2, 12] on cpu. Fix: cast with .to(dtype)."),
    "strides": (dict(pool_parents=torch.zeros(12, 2, dtype=I32).t()),
                "pool_parents must be contiguous; got int32 [2, 12] on cpu with other strides. "
                "Fix: call .contiguous() once, outside the loop."),
    "root_tokens": (dict(root_tokens=torch.zeros(2)),
                    "root_tokens must be int32|int64 [2] on cpu; got float32 [2] on cpu. Fix: cast with .to(dtype)."),
    "prefix_len": (dict(prefix_len=torch.zeros(3, dtype=I32)),
                   "prefix_len must be int32 [2] on cpu; got int32 [3] on cpu. Fix: pass that shape."),
    "active": (dict(active=torch.ones(2, dtype=torch.bool)),
               "active must be int32 [2] on cpu; got bool [2] on cpu. Fix: cast with .to(dtype)."),
    "tokens": (dict(tokens=torch.zeros(10, dtype=torch.int16)),
               "tokens must be int32|int64 [any] on cpu; got int16 [10] on cpu. Fix: cast with .to(dtype)."),
    "parents": (dict(parents=torch.zeros(9, dtype=I32)),
                "parents must be int32 [10] on cpu; got int32 [9] on cpu. Fix: pass that shape."),
    "mask": (dict(mask=torch.zeros(10, dtype=I64)),
             "mask must be int64 [10, any] on cpu; got int64 [10] on cpu. Fix: pass that shape."),
    "depth": (dict(depth=torch.zeros(10)), "depth must be int32 [10] on cpu; got float32 [10] on cpu. Fix: cast with .to(dtype)."),
    "positions": (dict(positions=torch.zeros(10, dtype=I64)),
                  "positions must be int32 [10] on cpu; got int64 [10] on cpu. Fix: cast with .to(dtype)."),
    "cu_nodes": (dict(cu_nodes=torch.zeros(2, dtype=I32)),
                 "cu_nodes must be int32 [3] on cpu; got int32 [2] on cpu. Fix: pass that shape."),
    "flags": (dict(flags=torch.zeros(1, dtype=I32)), "flags must be int32 [2] on cpu; got int32 [1] on cpu. Fix: pass that shape."),
    "N = 0": (dict(num_nodes=0), "num_nodes must be in 1..1024; got 0. Fix: pass the number of verify nodes per request, "
                                 "the root included."),
    "N = 1025": (dict(num_nodes=1025), "num_nodes must be in 1..1024; got 1025. Fix: pass the number of verify nodes per request, "
                                       "the root included."),
    "vocabulary": (dict(vocab_size=0), "vocab_size must be in 1..1048576; got 0. Fix: pass the target's vocabulary size."),
    "rows": (dict(num_nodes=6), "tokens must be at least B*num_nodes = 12 rows; got 10. "
                                "Fix: allocate the outputs with B*num_nodes rows."),
    "words": (dict(num_nodes=65, **{n: t for n, t in Tree.empty(2, 65)._asdict().items() if n != "mask"},
                   mask=torch.zeros(130, 1, dtype=I64)),
              "mask must be 2..16 words wide for 65 nodes; got 1. Fix: allocate ceil(num_nodes/64) words per row."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    one = torch.ones(2, dtype=I32)
    args = dict(pool_scores=torch.zeros(2, 12), pool_tokens=torch.zeros(2, 12, dtype=I32),
                pool_parents=torch.full((2, 12), -1, dtype=I32), root_tokens=one, prefix_len=one, active=one, num_nodes=5,
                vocab_size=10, **Tree.empty(2, 5)._asdict())
    with pytest.raises(RuntimeError) as error:
        _ops.get("build_tree")(*positional("build_tree", **{**args, **change}))
    assert str(error.value) == "build_tree: " + message
