"""skinny_linear: RMSNorm, the product of a few rows with a weight, and a residual add or SiLU-mul, in one launch."""

from typing import Optional

import torch

from .. import _ops

PLAIN, ADD, SILU_MUL = 0, 1, 2
MAX_ROWS = 32            # a second pass over the weight for more
MAX_INNER = 2048         # beyond it a block's own norm of all rows, and one pass of eight warps over K, take too long


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, *, bias: Optional[torch.Tensor] = None,
                  norm: Optional[torch.Tensor] = None, out: Optional[torch.Tensor] = None, eps: float = 1e-6,
                  kind: int = PLAIN, copy: Optional[torch.Tensor] = None) -> torch.Tensor:
    """out = f(RMSNorm(x) @ weight.T + bias), fp32 sums, rounded once.

    x [R, K], weight [N, K] (K a multiple of 32, N of 16), bias [N]; one dtype, bfloat16 on CUDA, any float on the CPU.
    norm [K]: of an RMSNorm of x. On CUDA it is multiplied into the weight, rounded there, and the factor of a row of x is applied to
          its sums; on the CPU x is normed first and rounded. None: x as it is.
    kind  PLAIN: out [R, N]. ADD: out [R, N] (in/out) += product. SILU_MUL: out [R, N/2] = silu(first half) * second half
    out   written and returned; allocated when None, which ADD refuses. As copy, every element must have memory of its own
    copy  [R, N], rows may be strided: gets out's values too (not for SILU_MUL)
    The bits of a row depend on K and N alone, not on the rows beside it, their number or their place (CUDA; the basis of
    exact mode). Errors: RuntimeError on a wrong shape, dtype or device. Cost: the weight once per 32 rows, one launch, which
    may start while the launch before it ends (sm_90 and newer). Graph-safe with `out`. Source: csrc/linear/skinny_linear.cu.
    """
    if out is None:
        if kind == ADD:
            raise RuntimeError("skinny_linear: out must be given for kind 1, which adds to it; got None. Fix: pass the residual as out, "
                               "or kind=PLAIN.")
        out = torch.empty(x.shape[0], weight.shape[0] // (2 if kind == SILU_MUL else 1), dtype=x.dtype, device=x.device)
    _ops.require_kernel("skinny_linear", x.device)
    _ops.get("skinny_linear")(x, weight, bias, norm, out, eps, kind, copy)
    return out


def skinny_fits(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether skinny_linear takes these products: sizes that its tiles divide and, on a GPU, bfloat16."""
    device = _ops.has_native_kernel("skinny_linear", "cuda") and x.dtype is torch.bfloat16 if x.is_cuda else x.is_cpu
    return device and all(w.shape[1] % 32 == 0 and w.shape[0] % 16 == 0 and w.is_contiguous() for w in weights)


def skinny_pays(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether it is also the faster way: few rows of a small model on a GPU (docs/performance.md)."""
    return (x.is_cuda and x.shape[0] <= MAX_ROWS and max(w.shape[1] for w in weights) <= MAX_INNER and skinny_fits(x, *weights))
