"""What stands between the products of a few rows, in Triton: RMSNorm, SiLU-mul, the input of a draft layer."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, columns, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < columns
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    tl.store(out + row * columns + i, (v * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(x, out, stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < columns
    gate = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + columns + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _draft_input_kernel(tokens, embed, hidden, embed_norm, hidden_norm, x, residual, columns, eps, NORMED: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < columns
    h = tl.load(hidden + row * columns + i, mask=inside, other=0.0)
    e = tl.load(embed + tl.load(tokens + row).to(tl.int64) * columns + i, mask=inside, other=0.0).to(tl.float32)
    v = h.to(tl.float32)
    e = e / tl.sqrt(tl.sum(e * e, 0) / columns + eps) * tl.load(embed_norm + i, mask=inside, other=0.0).to(tl.float32)
    v = v / tl.sqrt(tl.sum(v * v, 0) / columns + eps) * tl.load(hidden_norm + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * 2 * columns + i, e.to(x.dtype.element_ty), mask=inside)
    tl.store(x + row * 2 * columns + columns + i, v.to(x.dtype.element_ty), mask=inside)
    tl.store(residual + row * columns + i, v.to(x.dtype.element_ty) if NORMED else h, mask=inside)


def draft_input(tokens: torch.Tensor, embed: torch.Tensor, hidden: torch.Tensor, embed_norm: torch.Tensor, hidden_norm: torch.Tensor,
                eps: float, normed_residual: bool) -> tuple:
    """What stands before a draft's first layer, in one launch: (cat[norm(embed[tokens]), norm(hidden)] [R, 2 H], residual [R, H]).

    residual is a copy of hidden, or its normed form. hidden contiguous [R, H]; tokens int32|int64 in [0, V).
    """
    rows, columns = hidden.shape
    x = torch.empty(rows, 2 * columns, dtype=hidden.dtype, device=hidden.device)
    residual = torch.empty_like(hidden)
    block = triton.next_power_of_2(columns)
    if rows:
        _draft_input_kernel[(rows,)](tokens, embed, hidden, embed_norm, hidden_norm, x, residual, columns, eps, NORMED=normed_residual,
                                     BLOCK=block, num_warps=min(16, max(1, block // 256)))
    return x, residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [R, H] dense in H -> RMSNorm(x) * weight, fp32 inside, rounded once. One launch, a block per row."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        _rms_norm_kernel[(x.shape[0],)](x, weight, out, x.stride(0), x.shape[1], eps, BLOCK=block, num_warps=min(16, max(1, block // 256)))
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [R, 2 I] -> silu(first half) * second half [R, I], rounded once. One launch."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(columns, 1024))](x, out, x.stride(0), columns, BLOCK=1024, num_warps=4)
    return out
