"""tree_attention(exact=True): a node's row has the bits of the plain decoding row at its position, whatever the tree."""

import pytest
import torch

from cases import attention_case
from conftest import BACKENDS, run_op
from fastverify.attention.workspace import exact_workspace_bytes

KERNELS = [b for b in BACKENDS if b in ("cpu", "cuda", "emulated")]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def run(backend: str, case: dict, **over) -> dict:
    args = {k: v for k, v in {**case, **over}.items() if k != "parents"}
    k = args["k_cache"]
    rows, heads, d = args["q"].shape
    if backend not in ("cpu", "reference"):
        nbytes = exact_workspace_bytes(rows, heads, k.shape[2], d, args["page_table"].shape[1] * k.shape[1])
        args["workspace"] = torch.full((nbytes,), 255, dtype=torch.uint8)
    return run_op(backend, "tree_attention", exact=True, **args)


def decode_case(case: dict, b: int, node: int) -> dict:
    """The same row as a chain of one node: its ancestors have become committed tokens of the cache."""
    row, prefix, base = int(case["cu_nodes"][b]) + node, int(case["prefix_len"][b]), case["row_base"]
    columns = base + int(case["cu_nodes"][b + 1]) - int(case["cu_nodes"][b])
    page_size, table = case["k_cache"].shape[1], case["page_table"][b : b + 1]
    if case["mask"] is None:
        seen = list(range(base + node + 1))
    else:
        seen = [j for j in range(columns) if case["mask"][row, j // 64] >> (j % 64) & 1]
    cell = lambda p: (int(table[0, p // page_size]), p % page_size)  # noqa: E731
    caches = {}
    for name in ("k_cache", "v_cache"):
        wide = case[name].float()
        moved = wide.clone()
        for r, j in enumerate(seen):
            moved[cell(prefix + r)] = wide[cell(prefix + j)]
        for p in range(prefix + len(seen), page_size * table.shape[1]):
            moved[cell(p)] = float("nan")
        caches[name] = moved.to(case[name].dtype)
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    one = slice(row, row + 1)
    return {**case, **caches, "q": case["q"][one], "out": case["out"][one], "lse": case["lse"][one], "mask": None, "row_base": 0,
            "cu_nodes": i32(0, 1), "prefix_len": i32(prefix + len(seen) - 1), "page_table": table}


@pytest.mark.skipif(not KERNELS, reason="needs a back end with an exact mode")
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype,cache,head_dim", [
    (torch.bfloat16, None, 64), (torch.float16, None, 128), (torch.bfloat16, torch.float8_e4m3fn, 64), (torch.bfloat16, None, 256),
    (torch.float32, None, 16)])
@pytest.mark.parametrize("window,chain", [(0, False), (9, False), (40, True)])
def test_a_row_has_the_bits_of_the_decoding_row(backend, rng, dtype, cache, head_dim, window, chain):
    """Prefixes around a tile's end and, once, a chunk's; rows of a forest, of two requests; the oracle within tolerance."""
    counts, prefixes = ([6, 4], [60, 3]) if window else ([3, 5], [1021, 66])
    case = attention_case(rng, counts, prefixes, 16, 4, 2, head_dim, dtype, cache, chain=chain, row_base=2 * (window == 9), window=window,
                          sinks=True, scales=cache is not None)
    got, want = run(backend, case), run_op("reference", "tree_attention", **{k: v for k, v in case.items() if k != "parents"})
    error = (got["out"].double() - want["out"].double()).abs() / (1 + want["out"].double().abs())
    assert not got["out"].isnan().any() and (error <= TOLERANCE[dtype]).all()
    assert torch.equal(got["lse"].isneginf(), want["lse"].isneginf())
    for b, nodes in enumerate(counts):
        for node in range(nodes):
            row = int(case["cu_nodes"][b]) + node
            alone = run(backend, decode_case(case, b, node))
            assert torch.equal(got["out"][row], alone["out"][0]) and torch.equal(got["lse"][row], alone["lse"][0])


@pytest.mark.skipif("emulated" not in KERNELS and "cuda" not in KERNELS, reason="needs a CUDA GPU or the emulator")
def test_the_workspace_is_checked(rng):
    kernel = next(b for b in KERNELS if b != "cpu")
    case = attention_case(rng, [3], [20], 16, 2, 1, 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="tree_attention: workspace of exact mode must be at least [0-9]+ bytes, 16-byte aligned; got 0"):
        run_op(kernel, "tree_attention", exact=True, **{k: v for k, v in case.items() if k != "parents"})
