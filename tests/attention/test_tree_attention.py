"""tree_attention: float64 oracle on random forests, mask probes, poison, windows, sinks, scales, empty rows."""

import math

import pytest
import torch

from cases import attention_case, cumulative, mask_words, randint
from conftest import interpreted, need_kernel, run_op
from fastverify.attention.tree_attention import tree_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of outputs of size 1
INF = float("inf")


def run(backend: str, case: dict, **over) -> dict:
    return run_op(backend, "tree_attention", **{k: v for k, v in {**case, **over}.items() if k != "parents"})


def compare(backend: str, case: dict) -> dict:
    """Runs and checks every element of out and lse against the oracle, padding rows included."""
    got, want = run(backend, case), run("reference", case)
    error = (got["out"].double() - want["out"].double()).abs() / (1 + want["out"].double().abs())
    assert not got["out"].isnan().any() and (error <= TOLERANCE[case["q"].dtype]).all()
    assert torch.equal(got["lse"].isneginf(), want["lse"].isneginf())
    assert torch.allclose(got["lse"], want["lse"], rtol=2e-6, atol=2e-5)
    return got


def ragged(rng, batch: int, nodes: int, prefix: int) -> tuple:
    """Random node counts and prefixes, both with zeros."""
    pick = lambda high: [int(randint(0, high + 1, rng)) * (int(randint(0, 5, rng)) > 0) for _ in range(batch)]  # noqa: E731
    return pick(nodes), pick(prefix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_equals_oracle(backend, rng, dtype, page_size, group):
    kv_heads = {1: 3, 3: 3, 4: 2, 8: 1}[group]
    for i in [(group + page_size) % 8] if interpreted(backend) else range(8):
        counts, prefixes = ragged(rng, 1 + i % 4, [5, 20, 33, 70][i % 4], [0, 40, 130, 300][(i + i // 4) % 4])
        compare(backend, attention_case(
            rng, counts, prefixes, page_size, kv_heads * group, kv_heads, [16, 64, 40, 128][i % 4], dtype,
            chain=i % 4 == 3, row_base=[0, 0, 6, 0][i % 4], window=[0, 1, 7, 100][i // 2], softcap=3.0 * (i % 3 == 1),
            sinks=i % 2 == 1, scales=i % 3 == 2, spare_words=i % 2))


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("window", [0, 3, 600, 4000])
def test_long_prefix(backend, rng, chain, window):
    """Several chunks and tile boundaries: prefixes just below, at and above multiples of 64 and 512."""
    prefixes = [511, 512, 513, 1500, 63]
    compare(backend, attention_case(rng, [9, 1, 4, 3, 70], prefixes, 16, 4, 2, 32, chain=chain, window=window, sinks=True))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_cache_dtypes(backend, rng, cache_dtype):
    """The cache's dtype is its own; a narrow cache equals the fp32 cache of the same values."""
    case = attention_case(rng, [5, 9], [70, 3], cache_dtype=cache_dtype, scales=True)
    got = compare(backend, case)
    wide = run(backend, case, k_cache=case["k_cache"].float(), v_cache=case["v_cache"].float())
    assert torch.equal(got["out"], wide["out"]) and torch.equal(got["lse"], wide["lse"])


def read_back(cache: torch.Tensor) -> torch.Tensor:
    """What attention reads from one cache row: with q = 0 and one key, out is V itself."""
    one = torch.ones(1, dtype=torch.int32)
    cache = cache.view(1, 1, 1, -1)
    q = torch.zeros(1, 1, cache.shape[-1])
    return tree_attention(q, torch.zeros_like(cache), cache, torch.tensor([0, 1], dtype=torch.int32), one * 0,
                          (one * 0).view(1, 1)).view(-1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_every_narrow_value_is_read_right(dtype):
    """All 256 bytes or all 65536 words of the format: subnormals, infinities and NaN included."""
    if dtype == torch.float8_e4m3fn:
        rows = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 256)
    else:
        rows = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    for row in rows:
        assert torch.equal(read_back(row).nan_to_num(7777.0, posinf=8888.0, neginf=-8888.0),
                           row.float().nan_to_num(7777.0, posinf=8888.0, neginf=-8888.0))


@pytest.mark.parametrize("row_base", [0, 5])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 9, 50])
def test_mask_probe_without_the_oracle(backend, rng, row_base, window):
    """q = 0: out is the mean of the visible V, lse the log of their number; ancestors come from walking the parents."""
    case = attention_case(rng, [11, 0, 7], [6, 4, 0], 4, row_base=row_base, window=window)
    case["q"].zero_()
    got = run(backend, case)
    for b in (0, 2):
        base, prefix = int(case["cu_nodes"][b]), int(case["prefix_len"][b])
        for i in range(int(case["cu_nodes"][b + 1]) - base):
            path, node = [], row_base + i
            while node >= 0:  # nearest first
                path.append(prefix + node)
                node = case["parents"][b][node]
            path += range(prefix - 1, -1, -1)
            pos = torch.tensor(path[:window] if window else path)
            v = case["v_cache"][case["page_table"][b].long()[pos // 4], pos % 4]
            assert torch.allclose(got["out"][base + i], v.mean(0).repeat_interleave(3, 0), atol=1e-6)
            assert torch.allclose(got["lse"][base + i], torch.tensor(math.log(len(pos))), atol=1e-6)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 12, 60])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_in_a_key_reaches_only_the_rows_that_see_it(backend, rng, chain, window, name):
    """A key that a row does not see is skipped, not multiplied by zero; a NaN it sees is not hidden."""
    prefix, n = 60, 9
    for at in (0, 45, 55, 59, 60, 64, 68):  # prefix and tree, both sides of the tile boundary at 64
        case = attention_case(rng, [n], [prefix], 128, 3, 1, chain=chain, window=window)
        clean = run(backend, case)["out"]
        case[name][case["page_table"][0, 0], at] = float("nan")
        sees = []
        for i in range(n):
            keys = list(range(prefix)) + [prefix + j for j in range(n) if (j <= i if chain else case["mask"][i, 0] >> j & 1)]
            sees.append(at in (keys[-window:] if window else keys))
        sees = torch.tensor(sees + [False] * 3)
        out = run(backend, case)["out"]
        assert out[sees].isnan().all()
        assert torch.equal(out[~sees], clean[~sees])


def test_strictly_lower_tree_columns_are_masked_too(backend, rng):
    """No causal shortcut: a star over three tiles of columns; every leaf sees the root and itself only."""
    n = 150
    case = attention_case(rng, [n], [40], 16, 2, 1)
    case["mask"] = torch.cat([mask_words([-1] + [0] * (n - 1), 3), torch.full((3, 3), -1)])
    compare(backend, case)
    case["q"].zero_()
    assert torch.allclose(run(backend, case)["lse"][1:n], torch.tensor(math.log(42)), atol=1e-6)


@pytest.mark.parametrize("window", [0, 8])
def test_rows_of_very_different_depth(backend, rng, window):
    """A path of 1100 nodes, then children of the root: neighbours whose keys lie in different chunks, or none in most."""
    case = attention_case(rng, [1103], [2], 16, 1, 1, 8, window=window, padding=0)
    case["mask"] = mask_words([-1, *range(1099), 0, 0, 0], 18)
    compare(backend, case)


def test_requests_do_not_share_trees(backend, rng):
    """Two requests with different parents: each row equals that of its request alone."""
    case = attention_case(rng, [12, 12], [20, 20], 16)
    assert not torch.equal(case["mask"][:12], case["mask"][12:24])
    both = run(backend, case)
    for b in range(2):
        rows = slice(12 * b, 12 * b + 12)
        got = run(backend, case, cu_nodes=cumulative([12]), prefix_len=case["prefix_len"][b:b + 1],
                  page_table=case["page_table"][b:b + 1], **{k: case[k][rows].contiguous() for k in ("q", "mask", "out", "lse")})
        assert torch.allclose(got["out"], both["out"][rows], atol=1e-6)


def test_siblings_share_a_position(backend, rng):
    """With a window that cuts the prefix, siblings with equal q, K and V give equal rows in whatever column they sit."""
    case = attention_case(rng, [4], [20], 32, window=5)
    case["mask"][:4] = mask_words([-1, 0, 0, 0], 1)
    page = int(case["page_table"][0, 0])
    for cache in (case["k_cache"], case["v_cache"]):
        cache[page, 22:24] = cache[page, 21]
    case["q"][2:4] = case["q"][1]
    out = compare(backend, case)["out"]
    assert torch.allclose(out[2], out[1], atol=1e-6) and torch.allclose(out[3], out[1], atol=1e-6)


@pytest.mark.parametrize("page_size,prefix", [(16, 27), (1, 30), (8, 0)])
def test_table_capacity_is_reached_exactly(backend, rng, page_size, prefix):
    """prefix + n == pages * page_size, and one less."""
    for n in (32 - prefix, 31 - prefix):
        case = attention_case(rng, [n], [prefix], page_size)
        assert case["page_table"].shape[1] * page_size - prefix - n in (0, 1)
        compare(backend, case)


@pytest.mark.parametrize("chain", [False, True])
def test_window_may_forget_old_pages(backend, rng, chain):
    """Pages wholly outside the window may be gone (id -1)."""
    case = attention_case(rng, [3, 2], [100, 90], 16, window=20, chain=chain)
    want = run(backend, case)
    table = case["page_table"].clone()
    table[:, :4] = -1
    assert torch.equal(run(backend, case, page_table=table)["out"], want["out"])


def test_sink_is_counted_once(backend, rng):
    """out with sinks = out without * exp(lse) / (exp(lse) + exp(sink)); lse does not change."""
    case = attention_case(rng, [7, 3], [600, 5], q_heads=8, kv_heads=2, sinks=True, padding=0)
    with_sink, without = run(backend, case), run(backend, case, sinks=None)
    share = torch.sigmoid(without["lse"] - case["sinks"])[..., None]
    assert torch.allclose(with_sink["out"], without["out"] * share, atol=2e-6)
    assert torch.equal(with_sink["lse"], without["lse"])
    for weightless in (-INF, -1e4):
        none = run(backend, case, sinks=torch.full((8,), weightless))
        assert torch.allclose(none["out"], without["out"], atol=1e-6)
    assert (run(backend, case, sinks=torch.full((8,), 1e4))["out"] == 0).all()


def test_prefix_part_and_tree_part_merge_to_the_whole(backend, rng):
    """Two calls over disjoint keys, merged by lse, equal one call; the second takes a strided view of the page table."""
    case = attention_case(rng, [9, 4], [48, 48], 16, padding=0)
    whole = run(backend, case)
    prefix = run(backend, case, mask=torch.zeros_like(case["mask"]))
    tree = run(backend, case, prefix_len=case["prefix_len"] * 0, page_table=case["page_table"][:, 3:])
    weight = torch.sigmoid(prefix["lse"] - tree["lse"])[..., None]
    assert torch.allclose(prefix["out"] * weight + tree["out"] * (1 - weight), whole["out"], atol=2e-6)
    assert torch.allclose(torch.logaddexp(prefix["lse"], tree["lse"]), whole["lse"], atol=1e-5)


def test_scales_equal_dequantised_caches(backend, rng):
    """k_scale 0.5 and v_scale 4 undo a cache that holds 2 K and V / 4; None means 1."""
    case = attention_case(rng, [7], [33], padding=0)
    plain = run(backend, case)
    half, four = torch.tensor([0.5]), torch.tensor([4.0])
    scaled = run(backend, case, k_cache=case["k_cache"] * 2, v_cache=case["v_cache"] / 4, k_scale=half, v_scale=four)
    assert torch.equal(scaled["out"], plain["out"]) and torch.equal(scaled["lse"], plain["lse"])
    assert torch.equal(run(backend, case, k_scale=torch.ones(2), v_scale=torch.ones(1))["out"], plain["out"])
    assert not torch.allclose(run(backend, case, k_scale=half)["out"], plain["out"], atol=1e-3)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(backend, rng, sinks):
    """Empty mask rows without a prefix, empty requests, an empty batch, all padding: out 0, lse -inf, never NaN."""
    case = attention_case(rng, [3, 0, 2], [0, 5, 4], sinks=sinks)
    case["mask"][:3] = 0
    got = compare(backend, case)
    assert (got["out"][:3] == 0).all() and got["lse"][:3].isneginf().all() and got["lse"][3:5].isfinite().all()
    empty = run(backend, attention_case(rng, [0, 0], [9, 0], sinks=sinks))
    assert (empty["out"] == 0).all() and empty["lse"].isneginf().all()
    none = run(backend, case, cu_nodes=cumulative([]), prefix_len=case["prefix_len"][:0], page_table=case["page_table"][:0])
    assert (none["out"] == 0).all() and none["lse"].isneginf().all()
    assert run(backend, attention_case(rng, [], [], padding=0, sinks=sinks))["out"].shape[0] == 0


def test_large_negative_scores(backend, rng):
    """No finite sentinel stands for "masked": scores near -1e5 behave like any others, -inf scores weigh nothing."""
    case = attention_case(rng, [6], [70], 16)
    case["q"][:6] = 1.0
    page, slot = case["page_table"][0].long()[torch.arange(76) // 16], torch.arange(76) % 16
    case["k_cache"][page, slot] = -25000.0 + torch.randn(76, 2, 16, generator=rng)
    got, want = run(backend, case), run("reference", case)
    assert torch.allclose(got["lse"], want["lse"], rtol=1e-6) and got["lse"][:6].max() < -9e4
    case["k_cache"][page[:70], slot[:70]] = -INF  # the prefix weighs nothing: what is left is the tree alone
    got, want = run(backend, case), run("reference", case)
    assert torch.allclose(got["lse"], want["lse"], rtol=1e-6) and not got["out"].isnan().any()
    case["k_cache"][page, slot] = -INF
    got = run(backend, case)
    assert (got["out"] == 0).all() and got["lse"].isneginf().all()


def test_strided_q_layer_view_and_strided_out(backend, rng):
    """q as a slice of a merged QKV matrix, K and V interleaved in one layer of [L, ...], out with a gap."""
    case = attention_case(rng, [8, 5], [40, 3])
    want = run(backend, case)
    device = "cuda" if backend == "cuda" else "cpu"
    rows, heads, d = case["q"].shape
    qkv = torch.full((rows, (heads + 4) * d), float("nan"))
    qkv[:, : heads * d] = case["q"].view(rows, -1)
    layers = torch.full((3, *case["k_cache"].shape[:2], 2, 2, d), float("nan"))  # [L, pages, page, K|V, Hkv, D]
    layers[1, :, :, 0], layers[1, :, :, 1] = case["k_cache"], case["v_cache"]
    layers, wide = layers.to(device), torch.full((rows, heads + 1, d), 9.0, device=device)
    got = tree_attention(
        qkv.to(device)[:, : heads * d].view(rows, heads, d), layers[1, :, :, 0], layers[1, :, :, 1],
        *(case[k].to(device) for k in ("cu_nodes", "prefix_len", "page_table")), mask=case["mask"].to(device),
        out=wide[:, :heads])
    close = 2e-6 if backend in ("emulated", "triton") else 0.0  # the call above runs on the CPU's own kernel then
    assert ((got.cpu() - want["out"]).abs() <= close).all() and (wide[:, heads] == 9.0).all()


def test_stateless_and_repeatable(backend, rng):
    """A masked call leaves nothing behind for the chain call after it; repeats have equal bits."""
    case = attention_case(rng, [20, 7], [300, 61])
    chain, tree = run(backend, case, mask=None), run(backend, case)
    assert not torch.equal(tree["out"], chain["out"])
    for _ in range(3):
        again, masked = run(backend, case, mask=None), run(backend, case)
        assert torch.equal(again["out"], chain["out"]) and torch.equal(again["lse"], chain["lse"])
        assert torch.equal(masked["out"], tree["out"]) and torch.equal(masked["lse"], tree["lse"])


def test_a_smaller_batch_in_the_same_buffers(backend, rng):
    """As a captured graph replays it: R fixed, cu_nodes shrinks; live rows as before, the rest becomes padding."""
    counts = [6, 9, 4, 8]
    case = attention_case(rng, counts, [30, 2, 64, 17])
    full = run(backend, case)
    for live in (3, 2, 1, 0):
        got = run(backend, case, cu_nodes=cumulative(counts[:live] + [0] * (4 - live)))
        n = sum(counts[:live])
        assert torch.equal(got["out"][:n], full["out"][:n])
        assert (got["out"][n:] == 0).all() and got["lse"][n:].isneginf().all()


def test_cache_beyond_2_to_the_31_elements(backend):
    """Address arithmetic is 64-bit: the last page of a pool of 2^31 + 2^16 elements (reserved, hardly touched)."""
    need_kernel(backend, "tree_attention")
    rng = torch.Generator().manual_seed(1)
    device = "cuda" if backend == "cuda" else "cpu"
    pool = torch.empty(2**31 + 2**16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).view(-1, 16, 1, 64)
    last = pool.shape[0] - 1
    pool[last] = torch.randn(16, 1, 64, generator=rng).to(device, torch.float8_e4m3fn)
    q = torch.randn(2, 1, 64, generator=rng).to(device)
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    out = tree_attention(q, pool, pool, i32(0, 2), i32(10), i32(last).view(1, 1))
    small = pool[last:].clone()
    assert torch.equal(out, tree_attention(q, small, small, i32(0, 2), i32(10), i32(0).view(1, 1)))
