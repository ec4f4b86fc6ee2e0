"""Short sequences that get whole clusters: one cluster alone, several per sequence, every tile; beside lengths that are cut the other way."""

import pytest
import torch

from cases import attention_case
from test_mla_tree_attention import compare as compare_mla
from test_mla_tree_attention import mla_case
from test_mla_tree_attention import run as run_mla
from test_mla_tree_attention import workspace as mla_workspace
from test_tree_attention_tiles import FP8, KERNELS, compare, run

pytestmark = pytest.mark.skipif(not KERNELS, reason="needs a CUDA GPU or the emulator")


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setenv("FV_EMULATED_DEVICE", "90:16")
    return request.param


@pytest.mark.parametrize("nodes,head_dim,cache", [(2, 128, None), (2, 128, FP8), (12, 128, None), (12, 128, FP8), (40, 128, None), (9, 64, FP8), (3, 256, None)])
@pytest.mark.parametrize("counts,prefixes", [("n", [700]), ("n", [1990]), ("nn", [960, 950]), ("n0n", [5, 70, 600]), ("n", [2600])])
def test_tree_attention(kernel, rng, nodes, head_dim, cache, counts, prefixes):
    counts = [nodes if c == "n" else 0 for c in counts]
    case = attention_case(rng, counts, prefixes, 16, 4, 1, head_dim, torch.bfloat16, cache, sinks=nodes == 12, scales=cache is not None)
    first, again = compare(kernel, case), run(kernel, case)
    assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])


@pytest.mark.parametrize("device", ["90:16", "120:24"])
@pytest.mark.parametrize("counts,prefixes", [([8], [800]), ([3, 8], [1000, 900]), ([8, 0, 1], [600, 0, 10]), ([8], [1900])])
def test_mla_tree_attention(kernel, rng, monkeypatch, device, counts, prefixes):
    monkeypatch.setenv("FV_EMULATED_DEVICE", device)
    case = mla_case(rng, counts, prefixes, 16, 8, 576, 512, torch.bfloat16)
    first, again = compare_mla(kernel, case, workspace=mla_workspace(case)), run_mla(kernel, case, workspace=mla_workspace(case))
    assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])
