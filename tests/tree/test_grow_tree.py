"""grow_tree: one draft level; the beam, its mask rows, and the pool."""

import math

import pytest
import torch
from conftest import mutable_names, positional, run_op
from torch.library import opcheck
from torch.testing import assert_close

from fastverify import _ops
from fastverify.tree import DraftState, grow_tree

INF = math.inf
STATE = DraftState._fields


def poisoned(batch: int, k: int, levels: int, hidden: int, dtype=torch.float32) -> DraftState:
    state = DraftState.empty(batch, k, levels, hidden, dtype)
    for t in state:
        t.fill_(math.nan if t.is_floating_point() else -77)
    return state


def candidates(rows: int, k: int, hidden: int, rng, dtype=torch.float32) -> dict:
    values = torch.log_softmax(torch.randn(rows, 4 * k, generator=rng), 1).sort(1, descending=True).values[:, :k]
    return dict(values=values.contiguous(), tokens=torch.randint(0, 1000, (rows, k), generator=rng, dtype=torch.int32),
                hidden=torch.randn(rows, hidden, generator=rng).to(dtype))


def both(backend: str, state: DraftState, level: int, **args) -> DraftState:
    """Runs `backend` and the oracle on one level and compares every buffer bit for bit."""
    full = dict(args, level=level, **state._asdict())
    got, want = run_op(backend, "grow_tree", **full), run_op("reference", "grow_tree", **full)
    for name in STATE:
        assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}, level {level}: {m}")
    return DraftState(*(got[name] for name in STATE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch,k,levels,hidden", [(1, 1, 5, 3), (3, 4, 4, 8), (2, 10, 7, 5), (64, 2, 3, 4), (1, 64, 2, 2),
                                                   (5, 16, 8, 1), (2, 3, 3, 0)])
def test_levels_match_the_oracle(backend, rng, dtype, batch, k, levels, hidden):
    state = poisoned(batch, k, levels, hidden, dtype)
    active = torch.randint(0, 4, (batch,), generator=rng, dtype=torch.int32).clamp_(max=1)
    active[batch // 2] = 1
    prefix = torch.randint(0, 500, (batch,), generator=rng, dtype=torch.int32)
    for level in range(levels):
        rows = batch if level == 0 else batch * k
        state = both(backend, state, level, prefix_len=prefix, active=active, **candidates(rows, k, hidden, rng, dtype))


def test_two_levels_by_hand(backend):
    state = poisoned(2, 2, 2, 1)
    common = dict(prefix_len=torch.tensor([50, 7], dtype=torch.int32), active=torch.tensor([0, 1], dtype=torch.int32))
    state = both(backend, state, 0, values=torch.tensor([[-1.0, -2.0], [math.nan] * 2]),
                 tokens=torch.tensor([[10, 20], [0, 0]], dtype=torch.int32), hidden=torch.tensor([[5.0], [0.0]]), **common)
    assert state.cu_nodes.tolist() == [0, 0, 2]
    assert state.pool_scores[1].tolist() == [-1.0, -2.0, -INF, -INF, -INF, -INF]
    assert state.pool_parents[1].tolist() == [-1] * 6 and state.pool_tokens[1].tolist() == [10, 20, 0, 0, 0, 0]
    assert state.pool_tokens[0].eq(-77).all()  # an inactive request's pool is not touched
    assert state.mask.flatten().tolist() == [1, 2, 0, 0] and state.next_positions.tolist() == [7, 7, 0, 0]
    assert state.next_hidden.flatten().tolist() == [5.0, 5.0, 0.0, 0.0]
    # the second beam node has the best child: the beams swap
    state = both(backend, state, 1, values=torch.tensor([[-3.0, -4.0], [-0.5, -5.0], [0.0, 0.0], [0.0, 0.0]]),
                 tokens=torch.tensor([[11, 12], [21, 22], [0, 0], [0, 0]], dtype=torch.int32),
                 hidden=torch.tensor([[1.0], [2.0], [0.0], [0.0]]), **common)
    assert state.pool_scores[1].tolist() == [-1.0, -2.0, -4.0, -5.0, -2.5, -7.0]
    assert state.pool_parents[1].tolist() == [-1, -1, 0, 0, 1, 1]
    assert state.next_tokens.tolist() == [21, 11, 0, 0] and state.pool_index.tolist() == [4, 2, 0, 0]
    assert state.mask.flatten().tolist() == [0b0110, 0b1001, 0, 0]
    assert state.next_positions.tolist() == [8, 8, 0, 0] and state.next_hidden.flatten().tolist() == [2.0, 1.0, 0.0, 0.0]


def test_ties_and_nan(backend):
    """Equal scores go to the lower pool index; NaN and -inf sums come last but stay in the beam."""
    state = poisoned(1, 3, 2, 1)
    common = dict(prefix_len=torch.zeros(1, dtype=torch.int32), active=torch.ones(1, dtype=torch.int32))
    ids = torch.arange(9, dtype=torch.int32).view(3, 3)
    state = both(backend, state, 0, values=torch.tensor([[-1.0, -1.0, math.nan]]), tokens=ids[:1], hidden=torch.zeros(1, 1), **common)
    assert state.scores.tolist() == [-1.0, -1.0, -INF]
    values = torch.tensor([[-2.0, math.nan, -INF], [-2.0, -INF, INF], [INF, 0.0, -1.0]])
    state = both(backend, state, 1, values=values, tokens=ids, hidden=torch.zeros(3, 1), **common)
    assert state.pool_index.tolist() == [8, 3, 6] and state.scores.tolist() == [INF, -3.0, -3.0]
    # inf - inf is NaN: kept as -inf
    state = both(backend, poisoned(1, 3, 2, 1), 0, values=torch.full((1, 3), -INF), tokens=ids[:1], hidden=torch.zeros(1, 1), **common)
    state = both(backend, state, 1, values=torch.full((3, 3), INF), tokens=ids, hidden=torch.zeros(3, 1), **common)
    assert state.pool_index.tolist() == [3, 4, 5] and state.scores.eq(-INF).all()


def test_mask_rows_are_true_paths(backend, rng):
    """Every beam node sees itself and exactly the forest columns of its drafted ancestors; several words."""
    batch, k, levels = 2, 40, 5
    state = poisoned(batch, k, levels, 2)
    common = dict(prefix_len=torch.tensor([3, 9], dtype=torch.int32), active=torch.ones(batch, dtype=torch.int32))
    columns = [{} for _ in range(batch)]  # pool index -> forest column, of nodes that were in a beam
    for level in range(levels):
        state = both(backend, state, level, **common, **candidates(batch if level == 0 else batch * k, k, 2, rng))
        for row in range(batch * k):
            b, index = row // k, int(state.pool_index[row])
            columns[b][index] = level * k + row % k
            want, node = 0, index
            while node >= 0:
                want |= 1 << columns[b][node]
                node = int(state.pool_parents[b, node])
            words = [int(w) & (2**64 - 1) for w in state.mask[row]]
            assert sum(w << 64 * i for i, w in enumerate(words)) == want
            assert bin(want).count("1") == level + 1


def test_inactive_rows_and_their_inputs_do_not_matter(backend, rng):
    args = candidates(4, 3, 2, rng)
    active = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    prefix = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    state = both(backend, poisoned(4, 3, 2, 2), 0, prefix_len=prefix, active=active, **args)
    assert state.cu_nodes.tolist() == [0, 3, 3, 3, 6]
    for name in ("values", "hidden"):
        args[name][2:] = math.nan  # two requests are active: rows 2, 3 are padding
    args["tokens"][2:] = -5
    prefix[1:3] = -1
    again = both(backend, poisoned(4, 3, 2, 2), 0, prefix_len=prefix, active=active, **args)
    for a, b in zip(state, again):
        assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_all_inactive_and_empty_batch(backend, rng):
    for batch in (0, 3):
        zeros = torch.zeros(batch, dtype=torch.int32)
        state = both(backend, poisoned(batch, 2, 2, 4), 0, prefix_len=zeros, active=zeros, **candidates(batch, 2, 4, rng))
        assert state.cu_nodes.eq(0).all() and state.mask.eq(0).all() and state.next_hidden.eq(0).all()
        both(backend, state, 1, prefix_len=zeros, active=zeros, **candidates(2 * batch, 2, 4, rng))


def test_strided_hidden_wrapper_and_canaries(rng):
    args = candidates(3, 2, 4, rng)
    wide = torch.randn(3, 9, generator=rng)
    args["hidden"] = wide[:, 3:7]
    one = torch.ones(3, dtype=torch.int32)
    want = grow_tree(prefix_len=one, active=one, state=DraftState.empty(3, 2, 2, 4), level=0, **args)
    assert torch.equal(want.next_hidden, wide[:, 3:7].repeat_interleave(2, 0))
    guarded = [torch.full((t.size(0) + 2, *t.shape[1:]), 9, dtype=t.dtype) for t in want]
    state = DraftState(*(g[1:-1] for g in guarded))
    grow_tree(prefix_len=one, active=one, state=state, level=0, **args)
    for g, t in zip(guarded, want):
        assert torch.equal(g[1:-1], t) and g[0].eq(9).all() and g[-1].eq(9).all()


def test_repeatable(backend, rng):
    args = dict(candidates(64, 8, 16, rng), prefix_len=torch.ones(64, dtype=torch.int32), active=torch.ones(64, dtype=torch.int32))
    runs = [run_op(backend, "grow_tree", level=0, **args, **poisoned(64, 8, 2, 16)._asdict()) for _ in range(3)]
    assert all(torch.equal(runs[0][n], r[n]) for r in runs for n in STATE)


def test_opcheck_and_compile(rng):
    one = torch.ones(2, dtype=torch.int32)
    for level, rows in ((0, 2), (1, 6)):
        args = dict(candidates(rows, 3, 4, rng), prefix_len=one, active=one, level=level)
        opcheck(_ops.get("grow_tree"), positional("grow_tree", **args, **DraftState.empty(2, 3, 2, 4)._asdict()))
    args["level"], state = 0, DraftState.empty(2, 3, 2, 4)
    args.update(candidates(2, 3, 4, rng))
    compiled = torch.compile(grow_tree, fullgraph=True, backend="eager")(state=DraftState.empty(2, 3, 2, 4), **args)
    assert all(torch.equal(a, b) for a, b in zip(compiled, grow_tree(state=state, **args)))
    assert mutable_names("grow_tree") == list(STATE)


I32, I64 = torch.int32, torch.int64
BAD = {
    "values dtype": (1, dict(values=torch.zeros(6, 3, dtype=torch.bfloat16)),
                     "values must be float32 [any, any] on cpu; got bfloat16 [6, 3] on cpu. Fix: cast with .to(dtype)."),
    "level 0 rows": (0, dict(), "values must be float32 [2, 3] on cpu; got float32 [6, 3] on cpu. Fix: pass that shape."),
    "level 1 rows": (1, dict(values=torch.zeros(2, 3)),
                     "values must be float32 [6, 3] on cpu; got float32 [2, 3] on cpu. Fix: pass that shape."),
    "k": (0, dict(values=torch.zeros(2, 65)),
          "values must be 1..64 candidates wide; got float32 [2, 65] on cpu. Fix: draft with k in that range."),
    "level": (-1, dict(), "level must be in 0..1023; got -1. Fix: count draft levels from 0."),
    "tokens": (1, dict(tokens=torch.zeros(6, 3, dtype=I64)),
               "tokens must be int32 [6, 3] on cpu; got int64 [6, 3] on cpu. Fix: cast with .to(dtype)."),
    "hidden": (1, dict(hidden=torch.zeros(6, 4, dtype=I32)),
               "hidden must be float32|float16|bfloat16|float64 [6, any] on cpu; got int32 [6, 4] on cpu. Fix: cast with .to(dtype)."),
    "prefix_len": (1, dict(prefix_len=torch.ones(2, dtype=I64)),
                   "prefix_len must be int32 [any] on cpu; got int64 [2] on cpu. Fix: cast with .to(dtype)."),
    "active": (1, dict(active=torch.ones(3, dtype=I32)),
               "active must be int32 [2] on cpu; got int32 [3] on cpu. Fix: pass that shape."),
    "cu_nodes": (1, dict(cu_nodes=torch.zeros(2, dtype=I32)),
                 "cu_nodes must be int32 [3] on cpu; got int32 [2] on cpu. Fix: pass that shape."),
    "scores": (1, dict(scores=torch.zeros(5)),
               "scores must be float32 [6] on cpu; got float32 [5] on cpu. Fix: pass that shape."),
    "pool_index": (1, dict(pool_index=torch.zeros(6, dtype=I64)),
                   "pool_index must be int32 [6] on cpu; got int64 [6] on cpu. Fix: cast with .to(dtype)."),
    "mask": (1, dict(mask=torch.zeros(6, 1, dtype=I32)),
             "mask must be int64 [6, any] on cpu; got int32 [6, 1] on cpu. Fix: cast with .to(dtype)."),
    "pool_scores": (1, dict(pool_scores=torch.zeros(3, 12)),
                    "pool_scores must be float32 [2, any] on cpu; got float32 [3, 12] on cpu. Fix: pass that shape."),
    "pool_tokens": (1, dict(pool_tokens=torch.zeros(2, 11, dtype=I32)),
                    "pool_tokens must be int32 [2, 12] on cpu; got int32 [2, 11] on cpu. Fix: pass that shape."),
    "pool_parents": (1, dict(pool_parents=torch.zeros(2, 12)),
                     "pool_parents must be int32 [2, 12] on cpu; got float32 [2, 12] on cpu. Fix: cast with .to(dtype)."),
    "next_tokens": (1, dict(next_tokens=torch.zeros(6, dtype=I64)),
                    "next_tokens must be int32 [6] on cpu; got int64 [6] on cpu. Fix: cast with .to(dtype)."),
    "next_positions": (1, dict(next_positions=torch.zeros(1, dtype=I32)),
                       "next_positions must be int32 [6] on cpu; got int32 [1] on cpu. Fix: pass that shape."),
    "next_hidden": (1, dict(next_hidden=torch.zeros(6, 4, dtype=torch.float16)),
                    "next_hidden must be float32 [6, 4] on cpu; got float16 [6, 4] on cpu. Fix: cast with .to(dtype)."),
    "small pool": (2, dict(), "pool_scores must be at least 21 entries wide at level 2 with k 3; got 12. "
                              "Fix: allocate k + (levels-1)*k*k entries per request."),
    "columns": (21, dict(**{n: torch.zeros(2, 200, dtype=d) for n, d in (("pool_scores", torch.float32), ("pool_tokens", I32),
                                                                         ("pool_parents", I32))}),
                "mask must be 2..16 words wide at level 21 with k 3; got 1. Fix: allocate ceil(levels*k/64) words per row."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    level, change, message = BAD[case]
    ones = torch.ones(2, dtype=I32)
    args = dict(values=torch.zeros(6, 3), tokens=torch.zeros(6, 3, dtype=I32), hidden=torch.zeros(6, 4), prefix_len=ones,
                active=ones, **DraftState.empty(2, 3, 2, 4)._asdict())
    args = {**args, **change}
    before = {n: args[n].clone() for n in STATE}
    with pytest.raises(RuntimeError) as error:
        _ops.get("grow_tree")(*positional("grow_tree", level=level, **args))
    assert str(error.value) == "grow_tree: " + message
    assert all(torch.equal(before[n], args[n]) for n in STATE)  # nothing was written


def test_hidden_must_not_be_the_output(rng):
    state, ones = DraftState.empty(2, 3, 2, 4), torch.ones(2, dtype=I32)
    with pytest.raises(RuntimeError) as error:
        grow_tree(torch.zeros(6, 3), torch.zeros(6, 3, dtype=I32), state.next_hidden, ones, ones, state, 1)
    assert str(error.value) == ("grow_tree: next_hidden must be another buffer than hidden; got the same one. "
                                "Fix: use two buffers in turn.")
