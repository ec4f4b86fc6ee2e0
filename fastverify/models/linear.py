"""x @ w.T for few rows: the same product, asked of the BLAS in the orientation it runs well."""

from typing import Optional

import torch
import torch.nn.functional as F

from .. import _triton
from ..linear.skinny_linear import MAX_INNER
from .fp8 import Fp8Weight, rms_norm_quantised, silu_mul_quantised

# On x86 float32 GEMM with 2..6 rows is up to 2.5 times slower as [rows, K] x [K, N] than as [N, K] x [K, rows]: only the
# second form streams the weight once (docs/performance.md, "matrix products of a verify on the CPU").
_SWAPPED_ROWS = range(2, 7)


def linear(x: torch.Tensor, weight: "torch.Tensor | Fp8Weight", bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x [R, K], weight [N, K] -> contiguous [R, N]. The form depends on R, dtype and device only, so repeats are bit-equal."""
    if isinstance(weight, Fp8Weight):
        return weight.product(x, bias)
    rows = x.shape[0]
    if rows not in _SWAPPED_ROWS or x.dtype is not torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if rows == 3:  # four columns run faster than three
        x = F.pad(x, (0, 0, 0, 1))
    y = torch.mm(weight, x.t()).t()[:rows].contiguous()
    return y if bias is None else y.add_(bias)


def fused(x: torch.Tensor) -> bool:
    """Whether what stands between products runs in Triton (models/fused_triton.py): rows of 16 bits on a GPU with Triton."""
    return x.is_cuda and x.dtype is not torch.float32 and _triton.installed()


def few_rows(x: torch.Tensor, *weights) -> bool:
    """Whether products of x run in models/few_rows_triton.py: at most 16 rows of bfloat16 on sm_90 or sm_100, weights too wide for skinny_linear."""
    if not fused(x) or any(isinstance(w, Fp8Weight) or w.shape[1] <= MAX_INNER for w in weights):
        return False
    from .few_rows_triton import fits
    return fits(x, *weights)


def add_linear(h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> None:
    """h += x @ weight.T (+ bias), in place."""
    if isinstance(weight, Fp8Weight):
        h.add_(weight.product(x, bias))
        return
    if x.shape[0] in _SWAPPED_ROWS and x.dtype is torch.float32 and x.device.type == "cpu":
        h.add_(linear(x, weight))
    else:
        h.addmm_(x, weight.t())
    if bias is not None:
        h.add_(bias)


def norm_before(product: "torch.Tensor | Fp8Weight", x: torch.Tensor, weight: torch.Tensor, eps: float) -> "torch.Tensor | tuple":
    """rms_norm as `product` takes it: quantised for a float8 weight."""
    return rms_norm_quantised(x, weight, eps) if isinstance(product, Fp8Weight) else rms_norm(x, weight, eps)


def silu_mul_before(product: "torch.Tensor | Fp8Weight", gate_up: torch.Tensor) -> "torch.Tensor | tuple":
    """silu_mul as `product` takes it."""
    return silu_mul_quantised(gate_up) if isinstance(product, Fp8Weight) else silu_mul(gate_up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the rows of x [R, H], times weight [H]."""
    if fused(x):
        from .fused_triton import rms_norm as run
        return run(x, weight, eps)
    return F.rms_norm(x, (x.shape[1],), weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [R, 2 I] (overwritten where torch computes it) -> silu(first half) * second half."""
    if fused(gate_up):
        from .fused_triton import silu_mul as run
        return run(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate, inplace=True).mul_(up)
