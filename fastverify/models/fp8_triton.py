"""Quantisation to float8_e4m3fn with a scale per row, alone or behind RMSNorm or SiLU-mul, and products of a few rows; one launch each."""

import torch
import triton
import triton.language as tl

from .fp8 import FEW_ROWS


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


@triton.jit
def _few_rows_kernel(x, x_scale, weight, w_scale, out, rows, outer, inner, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                     EVEN: tl.constexpr):
    n, r, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BR), tl.arange(0, BK)
    w_at = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    x_at = x + r[None, :] * inner + k[:, None]
    acc = tl.zeros((BN, BR), tl.float32)
    for i in tl.range(0, inner, BK, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_at + i, cache_modifier=".cg", eviction_policy="evict_first")
            v = tl.load(x_at + i, mask=r[None, :] < rows, other=0.0)
        else:
            w = tl.load(w_at + i, mask=(n[:, None] < outer) & (k[None, :] + i < inner), other=0.0)
            v = tl.load(x_at + i, mask=(r[None, :] < rows) & (k[:, None] + i < inner), other=0.0)
        acc = tl.dot(w, v, acc, max_num_imprecise_acc=0)
    acc = acc * tl.load(w_scale + n, mask=n < outer, other=0.0)[:, None] * tl.load(x_scale + r, mask=r < rows, other=0.0)[None, :]
    tl.store(out + r[None, :] * outer + n[:, None], acc.to(out.dtype.element_ty), mask=(r[None, :] < rows) & (n[:, None] < outer))


def few_rows_product(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [R, K], weight [N, K], both float8_e4m3fn, R <= 16, with their scales [R, 1] and [1, N] -> x @ weight.T [R, N] in dtype, fp32 sums."""
    (rows, inner), outer = x.shape, weight.shape[0]
    out = torch.empty(rows, outer, dtype=dtype, device=x.device)
    if rows:
        wide, deep = 64, 256 if inner % 256 == 0 else 128
        _few_rows_kernel[(triton.cdiv(outer, wide),)](x, x_scale, weight, w_scale, out, rows, outer, inner, BR=FEW_ROWS, BN=wide, BK=deep,
                                                      STAGES=5, EVEN=outer % wide == 0 and inner % deep == 0, num_warps=4)
    return out
