"""Float8 weights: what the rounding costs, the fused kernels against their plain forms, and a loop over such a target."""

import pytest
import torch

from fastverify import SamplingParams
from fastverify.cli.main import main
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape
from fastverify.models.dummy import dummy_draft, dummy_target
from fastverify.models.fp8 import Fp8Weight, check_device, quantised, rms_norm_quantised, silu_mul_quantised, to_fp8

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def back(pair: tuple) -> torch.Tensor:
    values, scale = pair
    return values.float() * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows,inner,outer", [(1, 64, 96), (3, 576, 960), (16, 4096, 512), (70, 256, 48)])
def test_product(device, rows, inner, outer):
    """Within what two roundings to three bits of mantissa allow; the values and scales of the weight row by row."""
    torch.manual_seed(rows)
    x = torch.randn(rows, inner, device=device).to(torch.bfloat16)
    w = (torch.randn(outer, inner, device=device) / inner**0.5).to(torch.bfloat16)
    w[3] *= 100
    w[5] = 0
    fp8 = Fp8Weight(w)
    assert fp8.shape == w.shape and fp8.data.dtype is torch.float8_e4m3fn and fp8.element_size() == 1 and fp8.numel() == w.numel()
    assert ((fp8.data.float() * fp8.scale.t() - w.float()).abs() <= w.float().abs() / 16 + w.float().abs().amax(1, keepdim=True) / 448 / 64).all()
    got, want = fp8.product(x).float(), back(quantised(x)) @ (fp8.data.float() * fp8.scale.t()).t()
    assert got.shape == (rows, outer) and torch.allclose(got, want, rtol=2e-2, atol=2e-2 * float(want.std()))
    plain = [n for n in range(outer) if n != 3]  # the large row alone would decide the spread
    assert float((got - x.float() @ w.float().t())[:, plain].std() / want[:, plain].std()) < 0.08 and torch.equal(got[:, 5], torch.zeros_like(got[:, 5]))
    bias = torch.randn(outer, device=device).to(torch.bfloat16)
    assert torch.allclose(fp8.product(x, bias).float(), got + bias.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows,columns", [(1, 96), (16, 4096), (5, 14336), (33, 577 * 16)])
def test_fused_kernels(rows, columns):
    torch.manual_seed(columns)
    x = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
    g = torch.randn(rows, 2 * columns, device="cuda").to(torch.bfloat16)
    weight = torch.rand(columns, device="cuda").to(torch.bfloat16)
    for got, want in ((quantised(x), quantised(x.cpu())), (rms_norm_quantised(x, weight, 1e-5), rms_norm_quantised(x.cpu(), weight.cpu(), 1e-5)),
                      (silu_mul_quantised(g), silu_mul_quantised(g.cpu()))):
        assert torch.allclose(got[1].cpu(), want[1], rtol=1e-5)
        assert torch.allclose(back(got).cpu(), back(want), rtol=0.13, atol=float(want[1].max())), "one step of three bits at most"
        assert float((got[0].cpu().float() != want[0].float()).float().mean()) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_over_a_float8_target(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain = dummy_target("tiny", dtype, device)
    target = to_fp8(dummy_target("tiny", dtype, device))
    assert not target.exact_fits() and plain.layers[0].qkv.shape == target.layers[0].qkv.shape
    draft, texts = dummy_draft(target), {}
    for shape in ("off", "chain-3"):
        loop = GraphLoop(target, None if shape == "off" else draft, shapes=(parse_shape(shape),), max_length=128, stop_ids=[])
        job = loop.submit([3, 4, 5], 40, SamplingParams())
        for _ in loop.run():
            pass
        texts[shape] = job.tokens
    assert len(texts["off"]) == 40 and (device == "cuda" or texts["off"] == texts["chain-3"])


def test_what_cannot_be():
    target = dummy_target("tiny", torch.float32)
    target.layers[1].o = torch.zeros(64, 40)
    with pytest.raises(ValueError, match="o must have sizes that 16 divides"):
        to_fp8(target)
    target.comm = object()
    with pytest.raises(ValueError, match="the target must be whole"):
        to_fp8(target)


def test_the_command(capsys):
    assert main(["generate", "--dummy", "tiny", "--weights", "fp8", "--token-ids", "3,4,5", "--device", "cpu", "--max-new-tokens", "8"]) == 0
    assert "weights: the target's matrices are rounded to float8" in capsys.readouterr().err


@pytest.mark.parametrize("capability,refused", [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)])
def test_gpu_without_float8_is_refused(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if refused:
        with pytest.raises(ValueError, match=rf"to_fp8: the GPU must have float8 products \(sm_89 or later\); got sm_{capability[0]}{capability[1]}. Fix:"):
            check_device(torch.device("cuda"))
    else:
        check_device(torch.device("cuda"))
