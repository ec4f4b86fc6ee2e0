"""compact_kv: oracle, every dtype, canaries, malformed paths, aux gather, and a whole step against a fresh prefill."""

import pytest
import torch

from cases import cumulative, mask_words, page_tables, randint
from conftest import positional, run_op
from fastverify import _ops
from fastverify.attention.rope_append import rope_append
from fastverify.attention.tree_attention import tree_attention
from fastverify.kv.compact_kv import compact_kv

OP = "compact_kv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int16]


def random_path(nodes: int, rng) -> list:
    """An ascending set of nodes that starts with the root."""
    return [0] * (nodes > 0) + [i for i in range(1, nodes) if float(torch.rand((), generator=rng)) < 0.4]


def random_bytes(shape: tuple, dtype: torch.dtype, rng) -> torch.Tensor:
    """Any bit pattern, so that a copy through floats would show (NaN payloads)."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=rng).to(torch.uint8).view(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def compact_case(rng, counts: list, prefixes: list, page_size: int = 16, layers: int = 3, row: tuple = (2, 8), dtype=torch.float32,
                 v_cache: bool = True, aux: int = 5, depth: int = 0) -> dict:
    """Keyword arguments of compact_kv with random bytes everywhere and poisoned outputs."""
    batch, depth = len(counts), depth or max(counts + [1])
    table, pages = page_tables(batch, max([p + n for p, n in zip(prefixes, counts)] + [1]), page_size, rng)
    path, out = torch.full((batch, depth), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    for b, n in enumerate(counts):
        nodes = random_path(n, rng)[:depth]
        path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        out[b] = int(randint(0, len(nodes) + 1, rng))
    shape = (layers, pages, page_size, *row)
    rows = sum(counts) + 2
    return dict(
        k_cache=random_bytes(shape, dtype, rng), v_cache=random_bytes(shape, dtype, rng) if v_cache else None, path=path,
        num_tokens_out=out, prefix_len=torch.tensor(prefixes, dtype=torch.int32), page_table=table, cu_nodes=cumulative(counts),
        aux=torch.randn(rows, aux, generator=rng) if aux else None,
        aux_out=torch.full((batch * depth, aux), float("nan")) if aux else None,
        cu_out=torch.full((batch + 1,), -99, dtype=torch.int32))


def compare(backend: str, case: dict) -> dict:
    got, want = run_op(backend, OP, **case), run_op("reference", OP, **case)
    for name, value in got.items():
        assert torch.equal(bits(value), bits(want[name])), name
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 17])
def test_equals_oracle(backend, rng, dtype, page_size):
    """Bit for bit, every cache byte: what does not move stays."""
    for i in range(4):
        counts = [int(randint(0, 14, rng)) for _ in range(1 + i)]
        prefixes = [int(randint(0, 40, rng)) * (i != 1) for _ in counts]
        compare(backend, compact_case(rng, counts, prefixes, page_size, layers=1 + i, row=[(2, 8), (3, 1), (7,), (2, 2, 3)][i],
                                      dtype=dtype, v_cache=i != 2, aux=[5, 0, 3, 1][i]))


def test_rows_land_where_the_rule_says(backend, rng):
    """Without the oracle: after the call, position prefix + i holds what prefix + path[i] held, in every layer."""
    case = compact_case(rng, [20, 9], [30, 3], 4)
    case["num_tokens_out"] = (case["path"] >= 0).sum(1).to(torch.int32)
    got = run_op(backend, OP, **case)
    for name in ("k_cache", "v_cache"):
        for b in range(2):
            prefix, count = int(case["prefix_len"][b]), int(case["num_tokens_out"][b])
            cell = lambda t, pos: t[:, case["page_table"][b].long()[pos // 4], pos % 4]  # noqa: E731
            src = prefix + case["path"][b, :count].long()
            assert torch.equal(bits(cell(got[name], prefix + torch.arange(count))), bits(cell(case[name], src)))
            before = torch.arange(prefix)
            assert torch.equal(bits(cell(got[name], before)), bits(cell(case[name], before)))
    assert got["cu_out"].tolist() == [0, *case["num_tokens_out"].cumsum(0).tolist()]
    rows = torch.cat([case["aux"][base + case["path"][b, :n].long()] for b, (base, n) in enumerate(zip([0, 20], case["num_tokens_out"].tolist()))])
    assert torch.equal(got["aux_out"][: len(rows)], rows) and (got["aux_out"][len(rows):] == 0).all()


def test_nothing_moves(backend, rng):
    """num_tokens_out 0, a path in place, an empty batch: no byte changes."""
    case = compact_case(rng, [6, 6], [5, 20])
    in_place = torch.arange(6, dtype=torch.int32).expand(2, 6).contiguous()
    for over in (dict(num_tokens_out=torch.zeros(2, dtype=torch.int32)), dict(num_tokens_out=torch.full((2,), -3, dtype=torch.int32)),
                 dict(path=in_place, num_tokens_out=torch.full((2,), 6, dtype=torch.int32))):
        got = compare(backend, {**case, **over})
        assert torch.equal(bits(got["k_cache"]), bits(case["k_cache"])) and torch.equal(bits(got["v_cache"]), bits(case["v_cache"]))
    empty = compact_case(rng, [], [], aux=0)
    assert run_op(backend, OP, **empty)["cu_out"].tolist() == [0]


@pytest.mark.parametrize("entries,kept", [
    ([0, 3, 3, 5], 2), ([0, 3, 2, 5], 2), ([0, 2, -1, 5], 2), ([0, 2, 8, 9], 2), ([-1, 2, 3, 4], 0), ([8, 9, 10, 11], 0),
    ([0, 2**31 - 1, 5, 6], 1), ([0, -2**31, 5, 6], 1), ([2, 3, 5, 7], 4), ([0, 1, 5, 7], 4),
])
def test_malformed_paths_end_their_request_there(backend, rng, entries, kept):
    """The head of the path counts, the other request is whole, nothing is out of bounds (canaries: every other byte)."""
    case = compact_case(rng, [8, 8], [10, 0], 4, depth=4)
    case["path"] = torch.tensor([entries, [0, 2, 5, 6]], dtype=torch.int32)
    case["num_tokens_out"] = torch.tensor([4, 4], dtype=torch.int32)
    got = compare(backend, case)
    assert got["cu_out"].tolist() == [0, kept, kept + 4]


def test_more_tokens_than_the_path_holds(backend, rng):
    case = compact_case(rng, [8], [10], depth=3)
    case["path"][0], case["num_tokens_out"][0] = torch.tensor([0, 4, 6]), 10**6
    assert compare(backend, case)["cu_out"].tolist() == [0, 3]


def test_without_cu_nodes_only_the_page_table_bounds_nodes(backend, rng):
    case = compact_case(rng, [8, 5], [10, 2], aux=0)
    got = compare(backend, {**case, "cu_nodes": None, "cu_out": None})
    full = run_op(backend, OP, **case)
    assert torch.equal(bits(got["k_cache"]), bits(full["k_cache"]))


def test_views_of_one_cache_tensor_and_strided_aux(backend, rng):
    """K and V interleaved as [L, pages, page, 2, ...] and aux as a column slice of a wider matrix."""
    case = compact_case(rng, [12, 7], [9, 33], aux=6)
    want = run_op(backend, OP, **case)
    device = "cuda" if backend == "cuda" else "cpu"
    both = torch.stack([case["k_cache"], case["v_cache"]], 3).to(device)
    wide = torch.cat([case["aux"], case["aux"] * 0 + 5], 1).to(device)
    aux_out, cu_out = compact_kv(both[:, :, :, 0], both[:, :, :, 1], *(case[k].to(device) for k in (
        "path", "num_tokens_out", "prefix_len", "page_table")), cu_nodes=case["cu_nodes"].to(device), aux=wide[:, :6])
    assert torch.equal(bits(both[:, :, :, 0].cpu()), bits(want["k_cache"])) and torch.equal(bits(both[:, :, :, 1].cpu()), bits(want["v_cache"]))
    assert torch.equal(aux_out.cpu(), want["aux_out"]) and torch.equal(cu_out.cpu(), want["cu_out"])


def test_repeats_and_threads_are_bit_equal(rng):
    case = compact_case(rng, [40] * 7, [50] * 7, layers=8)
    want = run_op("cpu", OP, **case)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = run_op("cpu", OP, **case)
            assert all(torch.equal(bits(got[k]), bits(want[k])) for k in want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_step_after_compaction_equals_a_fresh_prefill(rng, dtype, page_size):
    """Tree step, accept a branch that is not the first, compact, next step: K and V as in one prefill of the whole text,
    bit for bit, and attention equal to it."""
    tokens = torch.randint(0, 50, (60,), generator=rng)
    embed = torch.randn(3, 50, 6, 16, generator=rng).to(dtype)  # q (all 6 heads), k and v (2 heads) of a token: no real model needed
    angle = torch.arange(100).double()[:, None] * 10000.0 ** (-torch.arange(8).double() / 8)
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1).float()
    prefix, n = 21, 13
    parents = [-1, 0, 0, 1, 2, 2, 4, 5, 5, 6, 8, 8, 11]
    path = [0, 2, 5, 8, 11]
    drafted = torch.randint(0, 50, (n,), generator=rng)
    drafted[0] = tokens[prefix]
    text = torch.cat([tokens[: prefix + 1], drafted[path[1:]], tokens[40:44]])  # prompt, accepted, next step's four
    table, pages = page_tables(1, 64, page_size, rng)
    depth = [0] * n
    for i in range(1, n):
        depth[i] = depth[parents[i]] + 1

    def forward(cache, ids, positions, columns, prefix_len, mask):
        q, k, v = embed[0][ids], embed[1][ids][:, :2], embed[2][ids][:, :2]
        q = q.clone()
        cells = prefix_len + columns
        slots = table[0].long()[cells // page_size] * page_size + cells % page_size
        rope_append(q, k, v, positions.to(torch.int32), slots, cos_sin, cache[0, 0], cache[1, 0])
        return tree_attention(q, cache[0, 0], cache[1, 0], cumulative([len(ids)]), torch.tensor([prefix_len], dtype=torch.int32),
                              table, mask=mask)

    def cells(cache, count):
        pos = torch.arange(count)
        return cache[:, 0][:, table[0].long()[pos // page_size], pos % page_size]

    cache = torch.full((2, 1, pages, page_size, 2, 16), float("nan")).to(dtype)
    steps = torch.arange(prefix)
    forward(cache, text[:prefix], steps, steps, 0, None)
    forward(cache, drafted, prefix + torch.tensor(depth), torch.arange(n), prefix, mask_words(parents, 1))
    compact_kv(cache[0], cache[1], torch.tensor([path], dtype=torch.int32), torch.tensor([5], dtype=torch.int32),
               torch.tensor([prefix], dtype=torch.int32), table, cu_nodes=cumulative([n]))
    four = torch.arange(4)
    out = forward(cache, text[prefix + 5:], prefix + 5 + four, four, prefix + 5, mask_words([-1, 0, 1, 2], 1))

    fresh = torch.full_like(cache, float("nan"))
    every = torch.arange(len(text))
    want = forward(fresh, text, every, every, 0, None)
    assert torch.equal(cells(cache, len(text)), cells(fresh, len(text)))
    assert torch.equal(out, want[-4:])


def base_case() -> dict:
    case = compact_case(torch.Generator().manual_seed(0), [6, 5], [5, 2], 4, aux=3)
    case["path"] = torch.tensor([[0, 2, 3, 5, -1, -1], [0, 1, 4, -1, -1, -1]], dtype=torch.int32)
    case["num_tokens_out"] = torch.tensor([4, 3], dtype=torch.int32)
    assert case["k_cache"].shape == (3, 9, 4, 2, 8)
    return case


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_ARGUMENTS = [
    (dict(k_cache=torch.zeros(3, 9)), "k_cache must be .layers, pages, page_size, .... like k_cache; got float32 .3, 9. on cpu. Fix: "),
    (dict(v_cache=torch.zeros(2, 9, 4, 2, 8)), "v_cache must be .layers, pages, page_size, .... like k_cache; got float32 .2, 9, 4, 2, 8."),
    (dict(v_cache=torch.zeros(3, 9, 4, 8, 2).transpose(3, 4)), "v_cache must be dense in the dimensions past page_size; got .* Fix: "),
    (dict(k_cache=torch.zeros(3, 1, 4, 2, 8).expand(3, 9, 4, 2, 8)), "k_cache must have memory of its own for every element; got float32 .3, 9, 4, 2, 8. "
                                                                     "on cpu with strides that overlap. Fix: "),
    (dict(path=torch.zeros(2, 6, dtype=torch.int64)), "path must be int32 .any, any. on cpu; got int64 .2, 6."),
    (dict(path=torch.zeros(6, 2, dtype=torch.int32).T), "path must be contiguous"),
    (dict(num_tokens_out=i32(1)), "num_tokens_out must be int32 .2. on cpu; got int32 .1."),
    (dict(prefix_len=torch.tensor([5, 2])), "prefix_len must be int32 .2. on cpu; got int64"),
    (dict(prefix_len=i32(5, -2)), "prefix_len must be >= 0; got -2 at request 1. Fix: "),
    (dict(prefix_len=i32(5, 8)), "page_table must cover positions .0, 13. of request 1; got 3 pages of 4 tokens. Fix: "),
    (dict(page_table=i32(0, 1, 2, 3, 9, 5).view(2, 3)), "page_table must hold page ids in .0, 9. for positions .4, 7. of request 1; got 9 in column 1. Fix: "),
    (dict(page_table=i32(0, 1, -1, 3, 4, 5).view(2, 3)), "page_table must hold page ids in .0, 9. for positions .6, 11. of request 0; got -1 in column 2"),
    (dict(page_table=i32(0, 1)), "page_table must be int32 .2, any."),
    (dict(cu_nodes=i32(0, 6)), "cu_nodes must be int32 .3. on cpu; got int32 .2."),
    (dict(cu_nodes=i32(0, 6, 5)), "cu_nodes must not decrease nor pass 13 rows; got 6 then 5 at request 1. Fix: "),
    (dict(cu_nodes=i32(0, 6, 14)), "cu_nodes must not decrease nor pass 13 rows; got 6 then 14 at request 1"),
    (dict(cu_nodes=None), "cu_nodes must be given with aux; got None. Fix: "),
    (dict(aux=None), "aux and aux_out must be given together; got only aux_out. Fix: "),
    (dict(aux_out=None), "aux and aux_out must be given together; got only aux. Fix: "),
    (dict(aux_out=torch.zeros(11, 3)), "aux_out must be float32 .12, 3. on cpu; got float32 .11, 3."),
    (dict(aux_out=torch.zeros(12, 3).half()), "aux_out must be float32 .12, 3. on cpu; got float16"),
    (dict(cu_out=torch.zeros(3, dtype=torch.int64)), "cu_out must be int32 .3. on cpu; got int64"),
]


@pytest.mark.parametrize("over,message", BAD_ARGUMENTS)
def test_bad_arguments_raise_before_anything_moves(over, message):
    case = {**base_case(), **over}
    before = {k: case[k].clone() for k in ("k_cache", "v_cache", "aux_out", "cu_out") if case[k] is not None}
    with pytest.raises(RuntimeError, match="compact_kv: " + message):
        _ops.get(OP)(*positional(OP, **case))
    assert all(torch.equal(bits(case[k]), bits(v)) for k, v in before.items())


@pytest.mark.parametrize("latent", [False, True])
def test_opcheck(rng, latent):
    case = compact_case(rng, [6, 0, 5], [5, 3, 2], 4, dtype=torch.int8, v_cache=not latent, aux=0 if latent else 3)
    if not latent:
        case["aux_out"].zero_()
    torch.library.opcheck(_ops.get(OP), positional(OP, **case))
