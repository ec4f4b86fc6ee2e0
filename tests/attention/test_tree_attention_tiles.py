"""tree_attention's tensor-core tiles: head dims, dtypes, fp8, groups, split sequences and merges, on CUDA and its emulation."""

import random

import pytest
import torch

from cases import attention_case, cumulative
from conftest import BACKENDS, run_op
from fastverify.attention.tree_attention import COUNTER_BYTES, workspace_bytes

KERNELS = [b for b in BACKENDS if b in ("cuda", "emulated")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.skipif(not KERNELS, reason="needs a CUDA GPU or the emulator")


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """The back end; emulated with so few multiprocessors that sequences are split."""
    monkeypatch.setenv("FV_EMULATED_DEVICE", "90:3")
    return request.param


def workspace(case: dict) -> torch.Tensor:
    rows, heads, d = case["q"].shape
    sms = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
    space = torch.full((workspace_bytes(rows, len(case["prefix_len"]), heads, case["k_cache"].shape[2], d, sms),), 255, dtype=torch.uint8)
    space[:COUNTER_BYTES] = 0
    return space


def run(kernel: str, case: dict, split: bool = True, **over) -> dict:
    args = {k: v for k, v in {**case, **over}.items() if k != "parents"}
    if split and kernel != "reference":
        args["workspace"] = workspace(case)
    got = run_op(kernel, "tree_attention", **args)
    if "workspace" in got:
        assert not got["workspace"][:COUNTER_BYTES].any(), "counters reset themselves"
    return got


def compare(kernel: str, case: dict, split: bool = True) -> dict:
    got, want = run(kernel, case, split), run("reference", case)
    error = (got["out"].double() - want["out"].double()).abs() / (1 + want["out"].double().abs())
    assert not got["out"].isnan().any() and (error <= TOLERANCE[case["q"].dtype]).all(), error.max()
    assert torch.equal(got["lse"].isneginf(), want["lse"].isneginf())
    assert torch.allclose(got["lse"], want["lse"], rtol=1e-5, atol=1e-4)
    return got


@pytest.mark.parametrize("cache", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_equals_oracle(kernel, rng, head_dim, dtype, cache, group):
    """Every row tile (1..40 nodes x group), prefixes around tile and unit ends, ragged with zeros."""
    pick = random.Random(head_dim + group)
    for counts, prefixes in [([3], [300]), ([8, 0, 5], [63, 7, 65]), ([17, 16], [128, 0]), ([40], [190])]:
        case = attention_case(rng, counts, prefixes, pick.choice([1, 16, 17]), 2 * group, 2, head_dim, dtype, cache,
                              chain=pick.random() < 0.3, row_base=pick.choice([0, 5]), window=pick.choice([0, 0, 9, 100]),
                              softcap=pick.choice([0.0, 4.0]), sinks=pick.random() < 0.5, scales=cache is not None)
        compare(kernel, case)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("device", ["90:1", "90:3", "90:7", "120:5", "80:9"])
def test_any_share_of_the_work(kernel, rng, monkeypatch, device, split):
    """Few or many blocks: sequences end inside a range, cross one, or span several; a 99 KB device takes other tiles."""
    monkeypatch.setenv("FV_EMULATED_DEVICE", device)
    for counts, prefixes in [([4], [2500]), ([5, 2, 0, 9, 1], [700, 10, 40, 1300, 0])]:
        case = attention_case(rng, counts, prefixes, 16, 4, 1, 64, torch.bfloat16, sinks=True)
        whole, again = compare(kernel, case, split), run(kernel, case, split)
        assert torch.equal(whole["out"], again["out"]) and torch.equal(whole["lse"], again["lse"])


def test_masks_of_two_words_and_more(kernel, rng):
    for counts, row_base, window in [([100], 0, 0), ([90], 38, 30), ([150], 0, 0)]:
        compare(kernel, attention_case(rng, counts, [70], 16, 1, 1, 64, torch.float16, row_base=row_base, window=window))


@pytest.mark.parametrize("cache", [None, FP8])
def test_mean_of_visible_values_is_exact(kernel, rng, cache):
    """q = 0 and small integers in V: the sum over the visible keys is exact, the mean rounded twice at most."""
    case = attention_case(rng, [12, 7], [600, 45], 16, 4, 2, 128, torch.bfloat16, cache)
    case["q"].zero_()
    for name in ("v_cache", "k_cache"):
        wide = case[name].float()
        case[name] = torch.where(wide.isnan(), wide, (wide * 2).round().clamp(-3, 3)).to(case[name].dtype)
    got, want = run(kernel, case), run("reference", case)
    assert ((got["out"].float() - want["out"].float()).abs() <= 1e-12 + 2**-8 * want["out"].float().abs()).all()
    assert torch.allclose(got["lse"][:19], want["lse"][:19], rtol=1e-6)


def test_workspace_is_checked_and_shared_between_lengths(kernel, rng):
    """One workspace, other lengths and a smaller batch in the same buffers: as with a fresh one."""
    case = attention_case(rng, [6, 5], [1500, 900], 16, 4, 2, 64, torch.float16)  # bf16 would be short
    shared = workspace(case)
    with pytest.raises(RuntimeError, match="tree_attention: workspace must be at least [0-9]+ bytes, 16-byte aligned, zeroed once; got 100"):
        run_op(kernel, "tree_attention", **{k: v for k, v in case.items() if k != "parents"}, workspace=shared[:100].clone())
    for lengths in ([1500, 900], [3, 900], [1500, 0]):
        now = {**case, "prefix_len": torch.tensor(lengths, dtype=torch.int32)}
        args = {k: v for k, v in now.items() if k != "parents"}
        first = run_op(kernel, "tree_attention", **args, workspace=shared)
        shared = first.pop("workspace")
        fresh = run(kernel, now)
        assert torch.equal(first["out"].nan_to_num(7.0), fresh["out"].nan_to_num(7.0))
    for live in (1, 0):
        smaller = run(kernel, case, cu_nodes=cumulative([6, 5][:live] + [0] * (2 - live)))
        assert (smaller["out"][6 * live:] == 0).all() and smaller["lse"][6 * live:].isneginf().all()


def test_malformed_lengths_stay_in_bounds(kernel, rng):
    """Lengths beyond the page table, ids outside the pool, broken cu_nodes: finished, nothing outside the outputs written."""
    case = attention_case(rng, [6, 5], [100, 30], 16, 4, 2, 64, torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        case[name] = case[name].nan_to_num(0.5)
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    for over in (dict(prefix_len=i32(2**31 - 1, -7)), dict(page_table=case["page_table"] * 0 + 2**30), dict(page_table=case["page_table"] * 0 - 1),
                 dict(cu_nodes=i32(0, -4, 11)), dict(cu_nodes=i32(5, 3, 2**31 - 1)), dict(page_table=case["page_table"][:, :0])):
        run(kernel, case, **over)
