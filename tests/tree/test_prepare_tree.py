"""prepare_tree: masks, depths, slots, child links and the attention schedule."""

import pytest
import torch
from cases import cumulative, mask_words, page_tables, randint, random_parents
from conftest import mutable_names, positional, run_op
from torch.library import opcheck
from torch.testing import assert_close

from fastverify import _ops
from fastverify.tree import Prepared, prepare_tree

I32, I64, BAD_TREE = torch.int32, torch.int64, 4


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def poisoned(rows: int, batch: int, words: int = 1) -> dict:
    return {name: t.fill_(-77) for name, t in Prepared.empty(rows, batch, words)._asdict().items()}


def run(backend: str, parents, cu, prefix, table, *, rows=None, words=1, page_size=16, row_base=0, leave_out=()) -> dict:
    """Runs `backend` and the oracle; every output equal bit for bit."""
    rows = parents.numel() if rows is None else rows
    out = {n: t for n, t in poisoned(rows, cu.numel() - 1, words).items() if n not in leave_out}
    args = dict(parents=parents, cu_nodes=cu, prefix_len=prefix, page_table=table, page_size=page_size, row_base=row_base, **out)
    got, want = run_op(backend, "prepare_tree", **args), run_op("reference", "prepare_tree", **args)
    assert set(got) == set(want) == set(out)
    for name in out:
        assert_close(got[name], want[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    return got


TABLE = ints(*range(8)).view(1, 8)


def test_known_golden_tree(backend):
    """Mask rows 1000, 1100, 1010, 1011 (leftmost = node 0) after 12 tokens: the example other engines test against."""
    got = run(backend, ints(-1, 0, 0, 2), ints(0, 4), ints(12), TABLE)
    assert got["mask"].flatten().tolist() == [0b0001, 0b0011, 0b0101, 0b1101]
    assert got["first_child"].tolist() == [1, -1, 3, -1] and got["next_sibling"].tolist() == [-1, 2, -1, -1]
    assert got["positions"].tolist() == [12, 13, 13, 14] and got["depth"].tolist() == [0, 1, 1, 2]
    assert got["slots"].tolist() == [12, 13, 14, 15]
    assert got["schedule"].tolist() == [256, 1, 0, 1] and got["flags"].tolist() == [0]


def test_seven_nodes_by_hand(backend):
    got = run(backend, ints(-1, 0, 0, 1, 1, 2, 3), ints(0, 7), ints(30), ints(5, 1, 9).view(1, 3), rows=7)
    assert got["first_child"].tolist() == [1, 3, 5, 6, -1, -1, -1]
    assert got["next_sibling"].tolist() == [-1, 2, -1, 4, -1, -1, -1]
    assert got["mask"].flatten().tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011]
    assert got["slots"].tolist() == [16 + 14, 16 + 15] + [144 + i for i in range(5)]  # 30, 31 on page 1; 32.. on page 9


@pytest.mark.parametrize("batch,most,page_size,forest", [(1, 1, 1, False), (3, 20, 16, False), (64, 9, 4, True), (4, 200, 64, False),
                                                         (2, 1000, 7, True)])
def test_random_trees(backend, rng, batch, most, page_size, forest):
    counts = [int(randint(0, most + 1, rng)) for _ in range(batch)]
    counts[batch // 2] = most
    trees = [random_parents(n, rng, forest) for n in counts]
    prefix = torch.randint(0, 300, (batch,), generator=rng, dtype=I32)
    table, _ = page_tables(batch, 300 + most, page_size, rng)
    rows = sum(counts) + 5
    parents = torch.full((rows,), 12345, dtype=I32)  # padding is never read
    parents[: rows - 5] = torch.tensor([p for tree in trees for p in tree], dtype=I32)
    cu, words = cumulative(counts), -(-most // 64)
    got = run(backend, parents, cu, prefix, table, words=words, page_size=page_size)
    assert got["flags"].eq(0).all()
    for b, tree in enumerate(trees):
        rows_b = slice(int(cu[b]), int(cu[b + 1]))
        assert torch.equal(got["mask"][rows_b], mask_words(tree, words))
        children = [[c for c in range(len(tree)) if tree[c] == i] for i in range(len(tree))]
        first, sibling = got["first_child"][rows_b].tolist(), got["next_sibling"][rows_b].tolist()
        for i in range(len(tree)):
            walk, node = [], first[i]
            while node >= 0:
                walk.append(node)
                node = sibling[node]
            assert walk == children[i]
    assert got["slots"][rows - 5:].eq(-1).all() and got["mask"][rows - 5:].eq(0).all()


@pytest.mark.parametrize("counts,prefix,row_base", [([4], [10], 0), ([1, 0, 3], [0, 5, 20], 0), ([130, 2], [7, 0], 0), ([2, 2], [3, 9], 63)])
def test_chain(backend, counts, prefix, row_base):
    """parents None: node i follows node i-1; with row_base the chain goes on from the columns before."""
    words = -(-(row_base + max(counts)) // 64)
    table = torch.arange(12 * len(counts), dtype=I32).view(len(counts), 12)
    got = run(backend, None, cumulative(counts), ints(*prefix), table, rows=sum(counts) + 2, words=words, row_base=row_base)
    assert got["depth"][: sum(counts)].tolist() == [row_base + i for n in counts for i in range(n)]
    last = [int(w) & (2**64 - 1) for w in got["mask"][counts[0] - 1]]
    assert sum(w << 64 * i for i, w in enumerate(last)) == 2 ** (row_base + counts[0]) - 1
    assert got["flags"].eq(0).all() and got["next_sibling"].eq(-1).all()
    if row_base == 0:  # the same as the chain spelt out
        spelt = torch.tensor([i - 1 for n in counts for i in range(n)] + [-9, -9], dtype=I32)
        again = run(backend, spelt, cumulative(counts), ints(*prefix), table, words=words)
        assert all(torch.equal(got[n], again[n]) for n in got)


def test_row_base_moves_slots_and_columns(backend):
    got = run(backend, ints(-1, -1, 0), ints(0, 2, 3), ints(14, 40), torch.arange(8, dtype=I32).view(2, 4), row_base=5, words=1)
    assert got["slots"].tolist() == [19, 20, 64 + 45]
    assert got["mask"].flatten().tolist() == [1 << 5, 1 << 6, 1 << 5]
    assert got["flags"].tolist() == [0, BAD_TREE]  # a first node cannot have parent 0


def test_malformed_parents(backend):
    """Self, cycle, forward, out of range: flag, the node counts as parentless, the others go on; duplicates are legal."""
    trees = [[-1, 1, 0], [-1, 2, 1], [-1, 0, 5], [-1, 0, 2**31 - 1], [-1, 0, -2], [-(2**31), 0, 0], [-1, 0, 0], [-1, -1, -1]]
    got = run(backend, ints(*[p for t in trees for p in t]), ints(*range(0, 25, 3)), ints(*[0] * 8), torch.zeros(8, 1, dtype=I32))
    assert got["flags"].tolist() == [BAD_TREE] * 6 + [0, 0]
    assert got["depth"].view(8, 3).tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 0, 0]]
    assert got["first_child"].view(8, 3).tolist() == [[2, -1, -1], [-1, 2, -1]] + [[1, -1, -1]] * 5 + [[-1, -1, -1]]
    assert got["next_sibling"].view(8, 3)[5:].tolist() == [[-1, 2, -1], [-1, 2, -1], [-1, -1, -1]]


@pytest.mark.parametrize("cu", [[0, 5, 3], [0, -1, 2], [0, 2, 5], [1, 2, 3], [0, 2**31 - 1, 2], [0, -(2**31), 3], [-1, 0, 2]])
def test_malformed_cu_nodes(backend, cu):
    """Decreasing, past R, not from 0: every request is flagged and has no rows."""
    got = run(backend, ints(-1, 0, 0, 0), ints(*cu), ints(3, 4), torch.zeros(2, 4, dtype=I32))
    assert got["flags"].tolist() == [BAD_TREE] * 2 and got["schedule"].tolist() == [256, 0, 0, 0, 0]
    assert got["mask"].eq(0).all() and got["slots"].eq(-1).all() and got["first_child"].eq(-1).all()


def test_columns_past_the_page_table_and_the_words(backend):
    table = ints(0, 1, 2, -1).view(2, 2)
    got = run(backend, ints(*[-1, 0, 0, 0] * 2), ints(0, 4, 8), ints(30, 14), table)
    assert got["slots"].tolist() == [30, 31, -1, -1, 46, 47, -1, -1] and got["flags"].tolist() == [BAD_TREE] * 2
    got = run(backend, ints(-1, 0, 0), ints(0, 3), ints(-2), table[:1])
    assert got["slots"].tolist() == [-1, -1, 0] and got["flags"].tolist() == [BAD_TREE]
    got = run(backend, torch.arange(-1, 65, dtype=I32), ints(0, 66), ints(0), TABLE)
    assert got["mask"][63:].flatten().tolist() == [-1, -1, -1] and got["flags"].tolist() == [BAD_TREE]
    got = run(backend, ints(-1, 0), ints(0, 2), ints(0), TABLE, row_base=64)
    assert got["mask"].eq(0).all() and got["flags"].tolist() == [BAD_TREE]
    got = run(backend, ints(-1), ints(0, 1), ints(2**31 - 2), TABLE, row_base=2**31 - 1, leave_out=("positions", "mask"))
    assert got["slots"].tolist() == [-1] and got["schedule"][1] == 264


def test_positions_past_int32_are_flagged_on_the_cpu():
    """A kernel on a GPU writes the same wrapped value and no flag."""
    out = Prepared.empty(4, 2, 1)
    prepare_tree(ints(-1, 0, -1, 0), ints(0, 2, 4), ints(2**31 - 1, 2**31 - 2), torch.zeros(2, 1, dtype=I32), 2**31 - 1, out._replace(slots=None))
    assert out.positions.tolist() == [2**31 - 1, -(2**31), 2**31 - 2, 2**31 - 1] and out.flags.tolist() == [BAD_TREE, 0]


@pytest.mark.parametrize("wanted", [f for f in Prepared._fields] + ["nothing"])
def test_only_what_was_asked_for_is_written(backend, rng, wanted):
    parents, cu = ints(*random_parents(9, rng), *random_parents(6, rng), 7), ints(0, 9, 9, 15)
    prefix, table = ints(3, 4, 20), torch.arange(12, dtype=I32).view(3, 4)
    whole = run(backend, parents, cu, prefix, table)
    got = run(backend, parents, cu, prefix, table, leave_out=[f for f in Prepared._fields if f != wanted])
    assert all(torch.equal(got[name], whole[name]) for name in got)
    if wanted in ("schedule", "flags"):  # no per-row tensor at all: R is not known
        alone = run(backend, None, cu, prefix, table, rows=0, leave_out=[f for f in Prepared._fields if f != wanted])
        assert torch.equal(alone[wanted], whole[wanted])


def test_garbage_is_bounded_and_defined(backend, rng):
    """Random structure full of absurd values: the oracle and the kernel still agree on every output."""
    odd = [-(2**31), -7, -2, -1, -1, 0, 0, 1, 2, 3, 5, 9, 70, 2**31 - 1]
    for _ in range(60):
        rows, batch = int(randint(0, 12, rng)), int(randint(0, 5, rng))
        parents = ints(*(odd[int(randint(0, len(odd), rng))] for _ in range(rows)))
        cu = cumulative([int(randint(0, 4, rng)) for _ in range(batch)])
        if randint(0, 3, rng) == 0:
            cu[int(randint(0, batch + 1, rng))] = odd[int(randint(0, len(odd), rng))]
        prefix = ints(*(odd[int(randint(0, len(odd) - 1, rng))] for _ in range(batch)))
        table = torch.randint(-1, 5, (batch, 3), generator=rng, dtype=I32)
        run(backend, parents, cu, prefix, table, page_size=2, row_base=int(randint(0, 3, rng)) * 31, words=1)


def test_empty(backend):
    got = run(backend, ints(), ints(0), ints(), torch.zeros(0, 3, dtype=I32))
    assert got["schedule"].tolist() == [256, 0, 0]
    got = run(backend, ints(5, 6), ints(0, 0, 0), ints(4, 9), torch.zeros(2, 0, dtype=I32))
    assert got["schedule"].tolist() == [256, 0, 0, 0, 0] and got["depth"].eq(0).all() and got["flags"].eq(0).all()


def units(kv_lens: list, chunk: int) -> list:
    return [-(-n // chunk) for n in kv_lens]


@pytest.mark.parametrize("lens", [[1], [256], [257], [70000], [300000], [264 * 256], [264 * 256 + 1], [4096] * 64, [100] * 300,
                                  [1000] * 300, [131072, 5, 0, 2048], [8192] * 16 + [0] * 16, [0, 0], list(range(0, 6000, 37))])
def test_schedule(backend, lens):
    """chunk is the smallest multiple of 64 from 256 on that gives at most max(264, non-empty requests) units."""
    nodes = [min(n, 5) for n in lens]
    prefix = [n - m for n, m in zip(lens, nodes)]
    got = run(backend, None, cumulative(nodes), ints(*prefix), torch.zeros(len(lens), 1, dtype=I32), rows=0,
              leave_out=("mask", "depth", "positions", "slots", "first_child", "next_sibling"))
    chunk, total, *prefix_sums = got["schedule"].tolist()
    limit = max(264, sum(n > 0 for n in lens))
    assert chunk % 64 == 0 and chunk >= 256 and sum(units(lens, chunk)) == total <= limit
    assert chunk == 256 or sum(units(lens, chunk - 64)) > limit
    assert prefix_sums == cumulative(units(lens, chunk)).tolist()
    assert got["flags"].eq(0).all()


def test_schedule_counts_row_base_and_survives_absurd_lengths(backend):
    lone = dict(rows=0, leave_out=("mask", "depth", "positions", "slots", "first_child", "next_sibling"))
    table = torch.zeros(2, 1, dtype=I32)
    assert run(backend, None, ints(0, 1, 2), ints(255, 0), table, row_base=1, **lone)["schedule"].tolist() == [256, 3, 0, 2, 3]
    got = run(backend, None, ints(0, 2**31 - 1, 2**31 - 1), ints(2**31 - 1, -5), table, **lone)["schedule"].tolist()
    assert got[0] % 64 == 0 and got[1] == 264 and got[2:] == [0, 264, 264]


def test_wrapper_canaries_and_repeats(rng):
    parents, cu = ints(*random_parents(40, rng), *random_parents(24, rng)), ints(0, 40, 64)
    prefix, table = ints(3, 4), torch.arange(12, dtype=I32).view(2, 6)
    want = prepare_tree(parents, cu, prefix, table, 16, Prepared.empty(64, 2, 1))
    for _ in range(3):
        guarded = [torch.full((t.size(0) + 2, *t.shape[1:]), 9, dtype=t.dtype) for t in want]
        prepare_tree(parents, cu, prefix, table, 16, Prepared(*(g[1:-1] for g in guarded)))
        for g, t in zip(guarded, want):
            assert torch.equal(g[1:-1], t) and g[0].eq(9).all() and g[-1].eq(9).all()


def test_opcheck_and_compile(rng):
    args = dict(parents=ints(-1, 0, 0, -1), cu_nodes=ints(0, 3, 4), prefix_len=ints(3, 4), page_table=torch.zeros(2, 6, dtype=I32),
                page_size=16)
    out = Prepared.empty(4, 2, 1)
    opcheck(_ops.get("prepare_tree"), positional("prepare_tree", row_base=0, **args, **out._asdict()))
    opcheck(_ops.get("prepare_tree"), positional("prepare_tree", row_base=0, slots=torch.zeros(4, dtype=I64), **args))
    compiled = torch.compile(prepare_tree, fullgraph=True, backend="eager")(out=Prepared.empty(4, 2, 1), **args)
    assert all(torch.equal(a, b) for a, b in zip(compiled, prepare_tree(out=out, **args)))
    assert mutable_names("prepare_tree") == list(Prepared._fields)


BAD = {
    "cu_nodes": (dict(cu_nodes=torch.zeros(3, dtype=I64)), "cu_nodes must be int32 [any] on cpu; got int64 [3] on cpu. Fix: cast with .to(dtype)."),
    "no cu_nodes": (dict(cu_nodes=ints()), "cu_nodes must be int32 [B+1]; got int32 [0] on cpu. Fix: pass prefix sums that start with 0."),
    "prefix_len": (dict(prefix_len=ints(1)), "prefix_len must be int32 [2] on cpu; got int32 [1] on cpu. Fix: pass that shape."),
    "page_table": (dict(page_table=torch.zeros(2, 6)), "page_table must be int32 [2, any] on cpu; got float32 [2, 6] on cpu. Fix: cast with .to(dtype)."),
    "parents": (dict(parents=torch.zeros(4, dtype=I64)), "parents must be int32 [4] on cpu; got int64 [4] on cpu. Fix: cast with .to(dtype)."),
    "mask": (dict(mask=torch.zeros(5, 1, dtype=I64)), "mask must be int64 [4, any] on cpu; got int64 [5, 1] on cpu. Fix: pass that shape."),
    "words": (dict(mask=torch.zeros(4, 17, dtype=I64)), "mask must be 1..16 words wide; got int64 [4, 17] on cpu. Fix: allocate ceil(columns/64) words per row."),
    "no words": (dict(mask=torch.zeros(4, 0, dtype=I64)), "mask must be 1..16 words wide; got int64 [4, 0] on cpu. Fix: allocate ceil(columns/64) words per row."),
    "depth": (dict(depth=torch.zeros(4)), "depth must be int32 [4] on cpu; got float32 [4] on cpu. Fix: cast with .to(dtype)."),
    "positions": (dict(positions=torch.zeros(3, dtype=I32)), "positions must be int32 [4] on cpu; got int32 [3] on cpu. Fix: pass that shape."),
    "slots": (dict(slots=torch.zeros(4, dtype=I32)), "slots must be int64 [4] on cpu; got int32 [4] on cpu. Fix: cast with .to(dtype)."),
    "first_child": (dict(first_child=torch.zeros(4, dtype=I64)), "first_child must be int32 [4] on cpu; got int64 [4] on cpu. Fix: cast with .to(dtype)."),
    "next_sibling": (dict(next_sibling=torch.zeros(4, 1, dtype=I32)), "next_sibling must be int32 [4] on cpu; got int32 [4, 1] on cpu. Fix: pass that shape."),
    "schedule": (dict(schedule=torch.zeros(4, dtype=I32)), "schedule must be int32 [5] on cpu; got int32 [4] on cpu. Fix: pass that shape."),
    "flags": (dict(flags=torch.zeros(3, dtype=I32)), "flags must be int32 [2] on cpu; got int32 [3] on cpu. Fix: pass that shape."),
    "page_size": (dict(page_size=0), "page_size must be at least 1; got 0. Fix: pass the cache's page size."),
    "large page_size": (dict(page_size=2**62), "page_size must be at most 2147483647; got 4611686018427387904. Fix: pass the cache's page size."),
    "row_base": (dict(row_base=-1), "row_base must be in 0..2147483647; got -1. Fix: pass the forest column of the first row "
                                    "(0 for a verify tree)."),
    "chain rows": (dict(parents=None, depth=torch.zeros(3, dtype=I32)), "depth must be int32 [4] on cpu; got int32 [3] on cpu. Fix: pass that shape."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    args = dict(parents=ints(-1, 0, 0, -1), cu_nodes=ints(0, 3, 4), prefix_len=ints(3, 4), page_table=torch.zeros(2, 6, dtype=I32),
                page_size=16, row_base=0, **Prepared.empty(4, 2, 1)._asdict())
    with pytest.raises(RuntimeError) as error:
        _ops.get("prepare_tree")(*positional("prepare_tree", **{**args, **change}))
    assert str(error.value) == "prepare_tree: " + message
