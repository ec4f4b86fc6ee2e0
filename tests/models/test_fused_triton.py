"""Triton's RMSNorm, SiLU-mul and draft input against torch, on a GPU or in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from conftest import INTERPRETED, TRITON

pytestmark = pytest.mark.skipif(not TRITON, reason="needs a GPU with Triton, or TRITON_INTERPRET=1")
DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)


def draw(rng, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(DTYPE).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("rows,columns", [(1, 64), (20, 576), (3, 4096), (2, 5120), (0, 64)])
def test_rms_norm(rng, rows, columns):
    from fastverify.models.fused_triton import rms_norm
    x, w = draw(rng, rows, columns + 32)[:, :columns], draw(rng, columns)
    close(rms_norm(x, w, 1e-5), F.rms_norm(x.float(), (columns,), w.float(), 1e-5))


@pytest.mark.parametrize("rows,columns", [(1, 96), (20, 1536), (3, 3200), (0, 64)])
def test_silu_mul(rng, rows, columns):
    from fastverify.models.fused_triton import silu_mul
    x = draw(rng, rows, 2 * columns)
    close(silu_mul(x), F.silu(x[:, :columns].float()) * x[:, columns:].float())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
def test_draft_input(rng, normed, tokens):
    from fastverify.models.fused_triton import draft_input
    embed, hidden, a, b = draw(rng, 50, 576), draw(rng, 7, 576), draw(rng, 576), draw(rng, 576)
    ids = torch.randint(0, 50, (7,), generator=rng).to(tokens).to(DEVICE)
    x, residual = draft_input(ids, embed, hidden, a, b, 1e-5, normed)
    want = F.rms_norm(hidden.float(), (576,), b.float(), 1e-5)
    close(x[:, :576], F.rms_norm(embed[ids.long()].float(), (576,), a.float(), 1e-5))
    close(x[:, 576:], want)
    close(residual, want if normed else hidden)
    assert normed or torch.equal(residual, hidden)
