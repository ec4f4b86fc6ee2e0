"""tree_attention's kernels of short sequences (head_dim 64, bf16) against the oracle, on CUDA and its emulation: clusters, and one
block per kv head that may read before the launch before has ended (settled)."""

import random

import pytest
import torch

from cases import attention_case
from conftest import BACKENDS, run_op

KERNELS = [b for b in BACKENDS if b in ("cuda", "emulated")]
pytestmark = pytest.mark.skipif(not KERNELS, reason="needs a CUDA GPU or the emulator")
BF16 = torch.bfloat16


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setenv("FV_EMULATED_DEVICE", "90:132")
    if request.param == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need sm_90")
    return request.param


@pytest.fixture(params=[False, True], ids=["", "settled"])
def settled(request):
    return request.param


def compare(kernel: str, case: dict, settled: bool) -> None:
    case = {k: v for k, v in case.items() if k != "parents"} | dict(settled=settled)
    got, want = run_op(kernel, "tree_attention", **case), run_op("reference", "tree_attention", **case)
    error = (got["out"].double() - want["out"].double()).abs() / (1 + want["out"].double().abs())
    assert not got["out"].isnan().any() and (error <= 1.2e-2).all(), error.max()
    assert torch.equal(got["lse"].isneginf(), want["lse"].isneginf())
    assert torch.allclose(got["lse"], want["lse"], rtol=1e-5, atol=1e-4)


def case_of(rng, counts: list, prefixes: list, kv_heads: int, group: int, page_size: int = 16, **kw) -> dict:
    return attention_case(rng, counts, prefixes, page_size, kv_heads * group, kv_heads, 64, dtype=BF16, **kw)


@pytest.mark.parametrize("group,kv_heads", [(1, 2), (3, 3), (4, 2), (9, 1)])
@pytest.mark.parametrize("counts,prefixes", [([1], [0]), ([1], [15]), ([4], [16]), ([5, 1], [37, 300]), ([0, 7, 0], [9, 130, 0]), ([20], [517])])
def test_trees(kernel, settled, rng, group, kv_heads, counts, prefixes):
    compare(kernel, case_of(rng, counts, prefixes, kv_heads, group), settled)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("window", [0, 1, 5, 40, 500])
def test_chains_and_windows(kernel, settled, rng, chain, window):
    compare(kernel, case_of(rng, [9, 3], [70, 18], 2, 3, chain=chain, window=window), settled)


def test_row_base_and_other_page_sizes(kernel, settled, rng):
    pick = random.Random(2)
    for page in (1, 5, 16, 64):
        n = pick.randrange(1, 30)
        compare(kernel, case_of(rng, [n], [pick.randrange(0, 400)], 3, 3, page_size=page), settled)


def test_a_long_capacity_goes_elsewhere_and_agrees(kernel, rng):
    """The same rows with a page table beyond the kernel's limit: another kernel, the same result to its tolerance."""
    case = case_of(rng, [6], [200], 3, 3)
    short = run_op(kernel, "tree_attention", **{k: v for k, v in case.items() if k != "parents"})["out"]
    wide = torch.zeros(1, 2048 // case["k_cache"].shape[1] + 9, dtype=torch.int32)
    wide[:, :case["page_table"].shape[1]] = case["page_table"]
    other = run_op(kernel, "tree_attention", **{k: v for k, v in (case | dict(page_table=wide)).items() if k != "parents"})["out"]
    assert not torch.equal(short, torch.zeros_like(short))
    torch.testing.assert_close(short.float(), other.float(), rtol=2e-2, atol=1e-2)


def test_repeats_are_bit_equal(kernel, settled, rng):
    case = {k: v for k, v in case_of(rng, [20, 3], [300, 41], 3, 3).items() if k != "parents"} | dict(settled=settled)
    first = run_op(kernel, "tree_attention", **case)["out"]
    for _ in range(3):
        assert torch.equal(run_op(kernel, "tree_attention", **case)["out"], first)


@pytest.mark.parametrize("prefix,nodes", [(0, 1), (1, 1), (15, 1), (16, 1), (17, 2), (255, 1), (511, 3), (513, 5), (900, 8), (1500, 20)])
def test_settled_prefixes_around_what_is_held(kernel, rng, prefix, nodes):
    """Steps of 16 keys: wholly in the prefix (loaded before the wait), across its end, behind it; more of them than a warp holds."""
    compare(kernel, case_of(rng, [nodes], [prefix], 3, 3), True)


@pytest.mark.gpu
def test_settled_reads_what_the_launch_before_wrote():
    """q and the rows of the tree come from the launch right before, again and again: 250 replays of a chain of eight."""
    from fastverify import skinny_qkv, tree_attention
    torch.manual_seed(0)
    rows, heads, kv, d, prefix, width = 4, 9, 3, 64, 200, 576
    new = lambda *shape: torch.randn(*shape, device="cuda").to(BF16)  # noqa: E731
    i32 = lambda *v: torch.tensor(v, dtype=torch.int32, device="cuda")  # noqa: E731
    x, weight, k, v = new(rows, width), new((heads + 2 * kv) * d, width), new(32, 16, kv, d), new(32, 16, kv, d)
    table, slots = torch.arange(32, dtype=torch.int32, device="cuda")[None], torch.arange(prefix, prefix + rows, device="cuda")
    positions, cos_sin, q = slots.int(), torch.randn(512, d, device="cuda"), new(rows, heads, d)
    outs, inputs = torch.zeros(8, rows, heads, d, dtype=BF16, device="cuda"), new(8, rows, width)

    def chain(wait: bool) -> None:
        done = torch.cuda.synchronize if wait else lambda: None
        for i in range(8):
            x.copy_(inputs[i])
            done()
            skinny_qkv(x, weight, positions, slots, cos_sin, q, k, v, settled=True)
            done()
            tree_attention(q, k, v, cu, length, table, out=outs[i], settled=True)
            done()

    cu, length = i32(0, rows), i32(prefix)
    chain(True)
    want = outs.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(False)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(250):
        outs.zero_()
        graph.replay()
        wrong += (outs != want).any().long()
    assert int(wrong) == 0 and not torch.equal(want[0], want[1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        chain(True)
    assert sum("tree_attention_block_kernel" in e.name for e in profile.events()) == 8
