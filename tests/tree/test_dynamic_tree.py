"""The EAGLE-2 dynamic tree, end to end: draft_topk -> grow_tree per level -> build_tree against a naive construction.

The draft network is a deterministic stand-in whose logits depend on everything the ops must route: the feedback row of the
true parent, the token, the position and the tokens that the mask row lets it see.
"""

import pytest
import torch
from conftest import run_op

from fastverify.tree import DraftState, Tree

VOCAB, ROOT, I32 = 97, 3, torch.int32


def feedback(hidden: int, token: int, position: int, seen: list) -> int:
    """The next feedback value, an integer below 2^20 (exact in float32)."""
    mix = hidden * 31 + token * 7919 + position * 104729
    for t in seen:
        mix = mix * 13 + t
    return mix % 1048573


def topk_of(hidden: int, k: int, backend: str) -> tuple:
    """Children of a node whose output feedback is `hidden`: (log-probabilities, tokens)."""
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(hidden))
    out = run_op(backend, "draft_topk", logits=logits, values=torch.empty(1, k), tokens=torch.empty(1, k, dtype=I32))
    return out["values"], out["tokens"]


class Node:
    def __init__(self, parent, token: int, score: torch.Tensor, hidden: int) -> None:
        self.parent, self.token, self.score = parent, token, score
        self.hidden = hidden  # feedback row that the node's own forward reads: its parent's output
        self.path = [*(parent.path if parent else []), token]


def naive(start: int, prefix: int, k: int, levels: int, total: int, backend: str) -> dict:
    """The rule as research papers and the EAGLE code state it, on paths and Python lists."""
    values, tokens = topk_of(start, k, backend)
    pool = [Node(None, int(t), v, start) for v, t in zip(values[0], tokens[0])]
    beam = list(pool)
    for level in range(1, levels):
        fresh = []
        for node in beam:
            out = feedback(node.hidden, node.token, prefix + level - 1, node.path)
            values, tokens = topk_of(out, k, backend)
            fresh += [Node(node, int(t), node.score + v, out) for v, t in zip(values[0], tokens[0])]
        pool += fresh
        beam = sorted(fresh, key=lambda n: -float(n.score))[:k]  # stable: ties keep pool order
    order = sorted(range(len(pool)), key=lambda i: (-float(pool[i].score), i))[: total - 1]
    kept = [pool[i] for i in sorted(order)]
    place = {None: 0, **{node: i + 1 for i, node in enumerate(kept)}}
    parents = [-1] + [place[node.parent] for node in kept]
    tree_mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i, p in enumerate(parents):
        tree_mask[i] = tree_mask[p] if p >= 0 else False
        tree_mask[i, i] = True
    depth = (tree_mask.sum(1) - 1).tolist()
    leaves = [i for i in range(len(parents)) if i not in parents]
    paths = [[j for j in range(len(parents)) if tree_mask[leaf, j]] for leaf in leaves]
    return dict(tokens=[ROOT] + [n.token for n in kept], parents=parents, depth=depth, mask=tree_mask,
                positions=[prefix + d for d in depth], paths=paths)


def through_ops(starts: list, prefixes: list, active: list, k: int, levels: int, total: int, backend: str) -> tuple:
    batch = len(starts)
    state = DraftState.empty(batch, k, levels, 1)
    common = dict(prefix_len=torch.tensor(prefixes, dtype=I32), active=torch.tensor(active, dtype=I32))
    live = [b for b in range(batch) if active[b]]
    hidden = [starts[b] for b in live] + [0] * (batch - len(live))
    seen = {}  # (rank, forest column) -> token
    for level in range(levels):
        if level > 0:
            hidden = []
            for row in range(k * batch):
                if row >= int(state.cu_nodes[-1]):
                    hidden.append(0)
                    continue
                rank, column = row // k, (level - 1) * k + row % k
                seen[rank, column] = int(state.next_tokens[row])
                words = [int(w) & (2**64 - 1) for w in state.mask[row]]
                path = [seen[rank, c] for c in range(column + 1) if words[c // 64] >> (c % 64) & 1]
                hidden.append(feedback(int(state.next_hidden[row]), int(state.next_tokens[row]), int(state.next_positions[row]), path))
        rows = [topk_of(h, k, backend) for h in hidden]
        args = dict(values=torch.cat([v for v, _ in rows]), tokens=torch.cat([t for _, t in rows]),
                    hidden=torch.tensor(hidden, dtype=torch.float32).view(-1, 1), level=level, **common)
        state = DraftState(**run_op(backend, "grow_tree", **args, **state._asdict()))
    tree = run_op(backend, "build_tree", pool_scores=state.pool_scores, pool_tokens=state.pool_tokens,
                  pool_parents=state.pool_parents, root_tokens=torch.full((batch,), ROOT, dtype=I32), num_nodes=total,
                  vocab_size=VOCAB, **common, **Tree.empty(batch, total)._asdict())
    return state, Tree(**tree)


@pytest.mark.parametrize("k,levels,total", [(1, 4, 6), (6, 4, 20), (10, 5, 60), (4, 2, 8), (8, 7, 64), (10, 8, 129), (3, 1, 2)])
def test_matches_the_naive_rule(backend, rng, k, levels, total):
    starts = torch.randint(0, 1000000, (4,), generator=rng).tolist()
    prefixes, active = [17, 0, 900, 4], [1, 0, 1, 1]
    _, tree = through_ops(starts, prefixes, active, k, levels, total, backend)
    for b in range(4):
        start, end = int(tree.cu_nodes[b]), int(tree.cu_nodes[b + 1])
        if not active[b]:
            assert start == end
            continue
        want = naive(starts[b], prefixes[b], k, levels, total, backend)
        assert end - start == len(want["parents"]) == min(total, 1 + k + (levels - 1) * k * k)
        for name in ("tokens", "parents", "depth", "positions"):
            assert getattr(tree, name)[start:end].tolist() == want[name], name
        bits = torch.stack([tree.mask[start:end, c // 64] >> (c % 64) & 1 for c in range(end - start)], 1).bool()
        assert torch.equal(bits, want["mask"])
        paths = [[j for j in range(end - start) if bits[leaf, j]] for leaf in range(end - start)
                 if leaf not in tree.parents[start:end].tolist()]
        assert paths == want["paths"]
        assert tree.flags[b] == 0


def test_a_request_drafts_the_same_alone_and_in_a_batch(backend, rng):
    starts = torch.randint(0, 1000000, (5,), generator=rng).tolist()
    _, tree = through_ops(starts, [5, 6, 7, 8, 9], [1, 1, 0, 1, 1], 4, 4, 12, backend)
    for b in (0, 1, 3, 4):
        _, alone = through_ops([starts[b]], [5 + b], [1], 4, 4, 12, backend)
        rows = slice(int(tree.cu_nodes[b]), int(tree.cu_nodes[b + 1]))
        for name in ("tokens", "parents", "mask", "depth", "positions"):
            assert torch.equal(getattr(tree, name)[rows], getattr(alone, name)), name


def test_scores_are_cumulative_log_probabilities(backend, rng):
    """Each pool score is the float32 sum of its path; beams are sorted and belong to the pool."""
    k, levels = 5, 4
    state, _ = through_ops([1234], [0], [1], k, levels, 16, backend)
    total = torch.zeros(state.pool_scores.size(1))
    for i, parent in enumerate(state.pool_parents[0].tolist()):
        own = state.pool_scores[0, i] - (state.pool_scores[0, parent] if parent >= 0 else 0.0)
        assert own <= 0.0
        total[i] = own + (total[parent] if parent >= 0 else 0.0)
    assert torch.allclose(total, state.pool_scores[0], atol=1e-5)
    assert (state.scores[:-1] >= state.scores[1:]).all()
    assert torch.equal(state.scores, state.pool_scores[0, state.pool_index.long()])
    assert torch.equal(state.next_tokens, state.pool_tokens[0, state.pool_index.long()])
