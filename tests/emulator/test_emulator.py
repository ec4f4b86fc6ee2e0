"""The emulator against known answers: barriers, shuffles, reductions, last-block pattern, cp.async, ldmatrix, mma."""

import pytest
import torch
from conftest import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="tests/emulator/build.sh has not been run")


def test_emulator(rng):
    rows, n = 5, 1000
    x = torch.randint(-8, 9, (rows, n), generator=rng).float()
    sums, total, counter = torch.full((rows,), float("nan")), torch.full((1,), float("nan")), torch.zeros(1, dtype=torch.int32)
    a = torch.randn(16, 16, generator=rng).bfloat16()
    b = torch.randn(16, 8, generator=rng).bfloat16()
    c, lanes = torch.full((16, 8), float("nan")), torch.zeros(32, dtype=torch.int32)
    for _ in range(2):  # the counter resets itself
        torch.ops.fastverify_emulated.selftest(x, sums, total, counter, a, b, c, lanes)
        assert torch.equal(sums, x.sum(1)) and total.item() == x.sum().item() and counter.item() == 0
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)
    i = torch.arange(32)
    down = torch.where(i % 16 + 2 < 16, i + 2, i)
    want = (i + 1) % 32 * 10 + (i - 1).clamp(min=0) + down + (i < 16) * 120 + 7 + 16000
    assert torch.equal(lanes.long(), want)
