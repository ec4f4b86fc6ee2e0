"""tree_attention: on the CPU a row's bits depend on its own keys only; every bad argument raises in words; opcheck."""

import pytest
import torch

from cases import attention_case, cumulative
from conftest import positional, run_op
from fastverify import _ops
from fastverify.attention.tree_attention import tree_attention

OP = "tree_attention"
INF = float("inf")


def run(case: dict, **over) -> dict:
    return run_op("cpu", OP, **{k: v for k, v in {**case, **over}.items() if k != "parents"})


def rows_of(case: dict, rows: slice) -> dict:
    return {k: case[k][rows].contiguous() for k in ("q", "out", "lse")}


def gather(case: dict, name: str, b: int, pos: torch.Tensor) -> torch.Tensor:
    """K or V of request b at cache positions pos."""
    page_size = case[name].shape[1]
    return case[name][case["page_table"][b].long()[pos // page_size], pos % page_size]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("prefix", [0, 50, 64, 500])
def test_a_tree_row_has_the_bits_of_plain_decoding(rng, window, prefix):
    """Ancestors copied to consecutive positions, one-node chain: the same out and lse, bit for bit."""
    case = attention_case(rng, [100], [prefix], 16, window=window)
    got = run(case)
    for node in range(0, 100, 7):
        path, at = [], node
        while at >= 0:
            path.insert(0, prefix + at)
            at = case["parents"][0][at]
        pos = torch.tensor(list(range(prefix)) + path)
        plain = run(case, mask=None, cu_nodes=cumulative([1]), prefix_len=torch.tensor([len(pos) - 1], dtype=torch.int32),
                    page_table=torch.arange(len(pos), dtype=torch.int32)[None], k_cache=gather(case, "k_cache", 0, pos)[:, None],
                    v_cache=gather(case, "v_cache", 0, pos)[:, None], **rows_of(case, slice(node, node + 1)))
        assert torch.equal(plain["out"][0], got["out"][node]) and torch.equal(plain["lse"][0], got["lse"][node])


def test_prefill_has_the_bits_of_decoding_token_by_token(rng):
    case = attention_case(rng, [150], [0], 16, 6, 2, 64, chain=True, padding=0)
    want = run(case)
    for first, n in ((0, 1), (63, 1), (64, 5), (100, 50), (149, 1)):
        rows = slice(first, first + n)
        got = run(case, cu_nodes=cumulative([n]), prefix_len=torch.tensor([first], dtype=torch.int32), **rows_of(case, rows))
        assert torch.equal(got["out"], want["out"][rows]) and torch.equal(got["lse"], want["lse"][rows])


@pytest.mark.parametrize("chain", [False, True])
def test_bits_do_not_depend_on_threads_batch_or_page_size(rng, chain):
    counts, prefixes = [40, 3, 17], [700, 1100, 0]
    case = attention_case(rng, counts, prefixes, 16, 6, 2, 64, chain=chain, padding=0)
    want = run(case)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            got = run(case)
            assert torch.equal(got["out"], want["out"]) and torch.equal(got["lse"], want["lse"]), threads
    finally:
        torch.set_num_threads(before)
    for b, n in enumerate(counts):  # alone
        rows = slice(sum(counts[:b]), sum(counts[:b]) + n)
        got = run(case, cu_nodes=cumulative([n]), prefix_len=case["prefix_len"][b:b + 1], page_table=case["page_table"][b:b + 1],
                  mask=None if chain else case["mask"][rows].contiguous(), **rows_of(case, rows))
        assert torch.equal(got["out"], want["out"][rows]) and torch.equal(got["lse"], want["lse"][rows])
    for size in (1, 7, 100, 512):  # the same tokens on pages of another size
        per = -(-1103 // size)
        caches = {}
        for name in ("k_cache", "v_cache"):
            flat = torch.full((3, per * size, 2, 64), float("nan"))
            for b, n in enumerate(counts):
                pos = torch.arange(prefixes[b] + n)
                flat[b, : len(pos)] = gather(case, name, b, pos)
            caches[name] = flat.view(3 * per, size, 2, 64)
        got = run(case, page_table=torch.arange(3 * per, dtype=torch.int32).view(3, per), **caches)
        assert torch.equal(got["out"], want["out"]) and torch.equal(got["lse"], want["lse"]), size


def base_case() -> dict:
    case = attention_case(torch.Generator().manual_seed(0), [3, 2], [5, 6], 4, padding=3)
    case.pop("parents")
    assert case["k_cache"].shape == (7, 4, 2, 16)
    return case


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_ARGUMENTS = [
    (dict(q=torch.zeros(8, 6, 16, dtype=torch.float64)), r"q must be float32\|bfloat16\|float16 \[any, any, any\] on cpu; got float64 \[8, 6, 16\] on cpu. Fix: cast"),
    (dict(q=torch.zeros(8, 96)), "q must be .* got float32 .8, 96. on cpu. Fix: pass that shape"),
    (dict(q=torch.zeros(8, 16, 6).transpose(1, 2)), "q must be dense in its last dimension"),
    (dict(q=torch.zeros(8, 5, 16)), "q must have a multiple of the cache's 2 kv heads; got float32 .8, 5, 16. on cpu. Fix: "),
    (dict(k_cache=torch.zeros(7, 4, 2, 8)), "k_cache must be .*any, any, any, 16.* got float32 .7, 4, 2, 8."),
    (dict(k_cache=torch.zeros(7, 4, 2, 16, dtype=torch.int8)), "k_cache must be .* got int8"),
    (dict(k_cache=torch.zeros(7, 0, 2, 16), v_cache=torch.zeros(7, 0, 2, 16)), "head_dim must be in .1, 1024. and page_size >= 1; got float32 .7, 0, 2, 16."),
    (dict(v_cache=torch.zeros(7, 4, 2, 16).half()), "v_cache must be float32 .* got float16"),
    (dict(v_cache=torch.zeros(6, 4, 2, 16)), "v_cache must be float32 .7, 4, 2, 16."),
    (dict(mask=torch.zeros(7, 1, dtype=torch.int64)), "mask must be int64 .8, any. on cpu; got int64 .7, 1."),
    (dict(mask=torch.zeros(8, 1)), "mask must be int64 .* got float32"),
    (dict(mask=torch.zeros(8, 0, dtype=torch.int64)), "mask must have a bit for each of the 3 forest columns of request 0; got int64 .8, 0. on cpu. Fix: "),
    (dict(row_base=62), "mask must have a bit for each of the 65 forest columns of request 0"),
    (dict(cu_nodes=i32(0, 3)), "cu_nodes must be int32 .3. on cpu; got int32 .2."),
    (dict(cu_nodes=torch.tensor([0, 3, 5])), "cu_nodes must be int32 .* got int64"),
    (dict(cu_nodes=i32(1, 3, 5)), "cu_nodes must start with 0; got 1. Fix: "),
    (dict(cu_nodes=i32(0, 3, 2)), "cu_nodes must not decrease nor pass 8 rows; got 3 then 2 at request 1. Fix: "),
    (dict(cu_nodes=i32(0, 3, 9)), "cu_nodes must not decrease nor pass 8 rows; got 3 then 9 at request 1"),
    (dict(prefix_len=i32(5, -1)), "prefix_len must be >= 0; got -1 at request 1. Fix: "),
    (dict(prefix_len=torch.tensor([5, 6])), "prefix_len must be int32"),
    (dict(prefix_len=i32(5, 7)), "page_table must cover positions .0, 9. of request 1; got 2 pages of 4 tokens. Fix: "),
    (dict(prefix_len=i32(5, 2**31 - 1)), "page_table must cover positions .0, 2147483649. of request 1"),
    (dict(page_table=i32(0, 1, 2, 7).view(2, 2)), "page_table must hold page ids in .0, 7. for positions .0, 8. of request 1; got 7 in column 1. Fix: "),
    (dict(page_table=i32(0, -1, 2, 3).view(2, 2)), "page_table must hold page ids in .0, 7. .* request 0; got -1 in column 1"),
    (dict(page_table=i32(0, 1, 2, 3)), "page_table must be int32 .2, any."),
    (dict(sinks=torch.zeros(5)), "sinks must be float32 .6. on cpu; got float32 .5."),
    (dict(k_scale=torch.ones(3)), "k_scale must be float32 .2. on cpu; got float32 .3."),
    (dict(k_scale=torch.tensor(1.0)), "k_scale must be float32 .2. on cpu; got float32 .. on cpu"),
    (dict(v_scale=torch.ones(2, dtype=torch.float16)), "v_scale must be float32 .2. on cpu; got float16"),
    (dict(out=torch.zeros(8, 6, 16).half()), "out must be float32 .8, 6, 16."),
    (dict(out=torch.zeros(7, 6, 16)), "out must be float32 .8, 6, 16. on cpu; got float32 .7, 6, 16."),
    (dict(lse=torch.zeros(8, 5)), "lse must be float32 .8, 6."),
    (dict(row_base=-1), "row_base must be >= 0; got -1. Fix: "),
    (dict(window=-1), "window must be in .0, 2.31.; got -1. Fix: "),
    (dict(softcap=-1.0), "softcap must be finite and >= 0; got -1. Fix: "),
    (dict(softcap=INF), "softcap must be finite and >= 0; got inf"),
    (dict(scale=float("nan")), "scale must be finite; got nan. Fix: "),
    (dict(row_base=2**63 - 1), "row_base must be at most 2147483639 with 8 rows; got 9223372036854775807. Fix: "),
    (dict(row_base=2**31 - 8), "row_base must be at most 2147483639 with 8 rows; got 2147483640. Fix: "),
    (dict(softcap=1e300), r"softcap must be 0 or in .1e-37, 2e.38. .float32.; got 1e.300. Fix: "),
    (dict(softcap=1e-300), r"softcap must be 0 or in .1e-37, 2e.38. .float32.; got 1e-300. Fix: "),
    (dict(scale=1e300), r"scale must be at most 2e.38 .float32.; got 1e.300. Fix: "),
    (dict(scale=-1e300), r"scale must be at most 2e.38 .float32.; got -1e.300. Fix: "),
    (dict(out=torch.zeros(1, 6, 16).expand(8, 6, 16)), "out must have memory of its own for every element; got float32 .8, 6, 16. on cpu with strides "
                                                       "that overlap. Fix: "),
    (dict(out=torch.zeros(8 * 96).as_strided((8, 6, 16), (80, 16, 1))), "out must have memory of its own for every element"),
    (dict(out=torch.zeros(8 * 96).as_strided((8, 6, 16), (16, 16, 1))), "out must have memory of its own for every element"),
    (dict(lse=torch.zeros(1, 6).expand(8, 6)), "lse must have memory of its own for every element"),
    (dict(q=torch.zeros(8, 6, 0), k_cache=torch.zeros(7, 4, 2, 0), v_cache=torch.zeros(7, 4, 2, 0)), "head_dim must be in .1, 1024. and page_size >= 1; got "),
    (dict(k_cache=torch.zeros(7, 4, 0, 16), v_cache=torch.zeros(7, 4, 0, 16)), "q must have a multiple of the cache's 0 kv heads; got "),
]


@pytest.mark.parametrize("over,message", BAD_ARGUMENTS)
def test_bad_arguments_raise_in_words(over, message):
    case = {**base_case(), **over}
    before = case["out"].clone()
    with pytest.raises(RuntimeError, match="tree_attention: " + message):
        _ops.get(OP)(*positional(OP, **case))
    assert torch.equal(case["out"].nan_to_num(7.0), before.nan_to_num(7.0))  # nothing was written


def test_no_query_heads_no_requests_and_the_largest_row_base(rng):
    case = attention_case(rng, [5, 2], [9, 3], padding=0)
    args = [case[k] for k in ("k_cache", "v_cache", "cu_nodes", "prefix_len", "page_table")]
    assert tree_attention(case["q"][:, :0], *args, mask=case["mask"]).shape == (7, 0, case["q"].shape[2])
    none = [case["k_cache"], case["v_cache"], i32(0), i32(), torch.zeros(0, 3, dtype=torch.int32)]
    assert tree_attention(case["q"], *none).eq(0).all() and tree_attention(case["q"][:0], *none).shape == case["q"][:0].shape
    with pytest.raises(RuntimeError, match="tree_attention: head_dim must be in "):
        tree_attention(torch.zeros(7, 2, 0), torch.zeros(7, 4, 2, 0), torch.zeros(7, 4, 2, 0), *args[2:])
    with pytest.raises(RuntimeError, match="page_table must cover positions"):
        tree_attention(case["q"], *args, row_base=2**31 - 1 - 7)


def test_outputs_with_strides_of_their_own(rng):
    """Rows of a wider matrix, and heads before rows: no two elements meet."""
    case = attention_case(rng, [5, 2], [9, 3], padding=0)
    want, (rows, heads, d) = run(case)["out"], case["q"].shape
    wide, turned = torch.full((rows, 2 * heads, d + 8), 7.0), torch.full((heads, rows, d), 7.0)
    for out in (wide[:, heads:, :d], turned.transpose(0, 1)):
        _ops.get(OP)(*positional(OP, **{**case, "out": out}))
        assert torch.equal(out, want)
    assert wide[:, :heads].eq(7).all() and wide[:, :, d:].eq(7).all()


def test_wrapper_allocates_and_defaults(rng):
    case = attention_case(rng, [5, 2], [9, 3], padding=0)
    got = tree_attention(case["q"], case["k_cache"], case["v_cache"], case["cu_nodes"], case["prefix_len"],
                         case["page_table"], mask=case["mask"])
    assert torch.equal(got, run(case)["out"]) and got.dtype == case["q"].dtype


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck(rng, chain, dtype):
    case = attention_case(rng, [4, 0, 2], [9, 3, 0], dtype=dtype, chain=chain, sinks=not chain, scales=chain)
    case["q"].nan_to_num_(0.0)  # opcheck compares inputs before and after with equal, which NaN is not
    case.pop("parents")
    for name in ("k_cache", "v_cache", "out", "lse"):
        case[name].nan_to_num_(0.0)
    torch.library.opcheck(_ops.get(OP), positional(OP, **case))
