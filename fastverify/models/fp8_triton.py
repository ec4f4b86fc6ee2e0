"""Quantisation to float8_e4m3fn with a scale per row, alone or behind RMSNorm or SiLU-mul, one launch each."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_quantised(v, inside, out, scales, row, columns, i):
    largest = tl.maximum(tl.max(tl.abs(tl.where(inside, v, 0.0)), 0), 1e-12)
    scale = largest / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * columns + i, (v / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _quantise_kernel(x, out, scales, stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < columns
    v = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    _store_quantised(v, inside, out, scales, row, columns, i)


@triton.jit
def _rms_norm_quantise_kernel(x, weight, out, scales, stride, columns, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < columns
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    v = v / tl.sqrt(tl.sum(v * v, 0) / columns + eps) * w
    _store_quantised(v, inside, out, scales, row, columns, i)


@triton.jit
def _silu_mul_quantise_kernel(x, out, scales, stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < columns
    gate = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + columns + i, mask=inside, other=0.0).to(tl.float32)
    _store_quantised(gate / (1.0 + tl.exp(-gate)) * up, inside, out, scales, row, columns, i)


def _outputs(x: torch.Tensor, columns: int) -> tuple:
    rows = x.shape[0]
    block = triton.next_power_of_2(columns)
    return (torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty(rows, 1, dtype=torch.float32, device=x.device), dict(BLOCK=block, num_warps=min(16, max(1, block // 512))))


def quantise(x: torch.Tensor) -> tuple:
    """x [R, K] dense in K -> (float8_e4m3fn [R, K], float32 [R, 1])."""
    out, scales, how = _outputs(x, x.shape[1])
    if x.shape[0]:
        _quantise_kernel[(x.shape[0],)](x, out, scales, x.stride(0), x.shape[1], **how)
    return out, scales


def rms_norm_quantise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple:
    """RMSNorm(x) * weight, the same way."""
    out, scales, how = _outputs(x, x.shape[1])
    if x.shape[0]:
        _rms_norm_quantise_kernel[(x.shape[0],)](x, weight, out, scales, x.stride(0), x.shape[1], eps, **how)
    return out, scales


def silu_mul_quantise(x: torch.Tensor) -> tuple:
    """silu(first half) * second half of x [R, 2 I], the same way."""
    columns = x.shape[1] // 2
    out, scales, how = _outputs(x, columns)
    if x.shape[0]:
        _silu_mul_quantise_kernel[(x.shape[0],)](x, out, scales, x.stride(0), columns, **how)
    return out, scales
