"""The Triton attention ops without a GPU: launch choices, the bound of units, and that every architecture compiles."""

import pytest
import torch

from cases import attention_case, randint
from conftest import INTERPRETED, positional
from fastverify import _triton
from triton_compile import DEVICES, compile_only

if not _triton.installed():
    pytest.skip("triton is not installed", allow_module_level=True)

import triton  # noqa: E402

from fastverify.attention import rope_append_triton, tree_attention_triton  # noqa: E402
from fastverify.attention.tree_attention_triton import MIN_CHUNK, choose, max_units  # noqa: E402


@pytest.mark.parametrize("capability", DEVICES)
def test_launch_choices_fit_the_device(capability):
    sms, smem = DEVICES[capability]
    for nodes in (1, 3, 8, 16, 64, 500):
        for group in (1, 3, 4, 8, 16, 128):
            for d in (8, 64, 80, 128, 256, 512):
                for item in (2, 4):
                    for kv_heads in (1, 8, 400):
                        c = choose(nodes, group, d, item, kv_heads, sms, smem)
                        block_d = max(16, triton.next_power_of_2(d))
                        assert c.block_m >= max(16, group) and c.block_m & (c.block_m - 1) == 0
                        assert c.block_n in (16, 32, 64) and c.warps in (4, 8) and c.stages in (3, 5) and c.target >= 1
                        tiles = (c.stages - 1) // 2 + (c.block_m >= 64)
                        if group <= 64 and d <= 256:
                            assert (c.block_m + 2 * tiles * c.block_n) * block_d * item <= smem
    few, many = choose(16, 4, 128, 2, 8, sms, smem), choose(64, 4, 128, 2, 8, sms, smem)
    assert few.block_m == 64 and few.block_m <= many.block_m <= 128  # 16 nodes of 4 heads: one tile, K and V read once


def test_units_stay_below_their_bound(rng):
    """tree_attention_triton_device.plan in Python, on random lengths: what the grid must cover."""
    for _ in range(300):
        batch, per_tile, target = (int(randint(1, high, rng)) for high in (40, 33, 300))
        nodes, prefix = (randint(0, high, rng, (batch,)).tolist() for high in (int(randint(1, 100, rng)), int(randint(1, 20000, rng))))
        keys = [p + n if n else 0 for p, n in zip(prefix, nodes)]
        tiles = [-(-n // per_tile) for n in nodes]
        total = max(sum(k * t for k, t in zip(keys, tiles)), 1)
        splits = [max(1, min((k * target + total // 2) // total, -(-k // MIN_CHUNK))) for k in keys]
        units = sum(t * s for t, s in zip(tiles, splits))
        assert units <= max_units(sum(nodes) + int(randint(0, 3, rng)), batch, per_tile, target)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("capability", DEVICES)
def test_compiles_for_every_architecture(rng, monkeypatch, capability):
    """bf16 with a tree mask, or fp8 with window, softcap, sinks and scales; shared memory within the device's."""
    sms, smem = DEVICES[capability]
    monkeypatch.setattr(tree_attention_triton, "device_limits", lambda _: (sms, smem, capability >= 89))
    full = dict(cache_dtype=torch.float8_e4m3fn, window=100, softcap=3.0, sinks=True, scales=True) if capability in (80, 120) else {}
    case = attention_case(rng, [16], [600], 16, 8, 2, 64, torch.bfloat16, padding=0, **full)
    case.pop("parents")
    with compile_only(capability) as kernels:
        tree_attention_triton.tree_attention(*positional("tree_attention", **case))
    assert len(kernels) == 2 and all(k.metadata.shared <= smem and k.asm["cubin"] for k in kernels)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("capability", DEVICES)
def test_rope_append_compiles_for_every_architecture(rng, capability):
    from test_rope_append import NEOX, rope_case

    case = rope_case(rng, head_dim=64, rot=32, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, style=NEOX, norm=True, scales=True)
    with compile_only(capability) as kernels:
        rope_append_triton.rope_append(*positional("rope_append", **case))
    assert len(kernels) == 1 and kernels[0].asm["cubin"]
