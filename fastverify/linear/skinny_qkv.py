"""skinny_qkv: RMSNorm, merged QKV product, RoPE and the append of K and V, in one launch."""

from typing import Optional

import torch

from .. import _ops


def skinny_qkv(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cos_sin: torch.Tensor,
               q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, bias: Optional[torch.Tensor] = None,
               norm: Optional[torch.Tensor] = None, eps: float = 1e-6, settled: bool = False) -> None:
    """skinny_linear into a merged QKV matrix, rounded, then rope_append of it (neox, no norm per head), without the matrix.

    x [R, K], weight [(Hq + 2 Hkv) D, K] (q rows, then k, then v), bias, norm, eps: as in skinny_linear
    positions int32 [R], slots int64 [R]; a row with a negative slot is not touched
    cos_sin float32 [max_positions, D]; D a multiple of 16
    q [R, Hq, D], k_cache, v_cache [pages, page_size, Hkv, D] of x's dtype: written; no two elements of one may meet
    settled=True promises that positions and slots were written before the launch before this one in the stream began: they are read
    while that launch still runs.
    Errors: RuntimeError on a wrong shape, dtype or device; on the CPU also for a slot or position out of range (a GPU leaves
    such a row alone). Cost: the weight once per 32 rows, one launch. Graph-safe. Source: csrc/linear/skinny_qkv.cu.
    """
    _ops.require_kernel("skinny_qkv", x.device)
    _ops.get("skinny_qkv")(x, weight, bias, norm, positions, slots, cos_sin, q, k_cache, v_cache, eps, settled)
