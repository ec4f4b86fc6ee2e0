"""rope_append: per-head q/k norm, RoPE and the append of K and V to the paged cache, one launch."""

from typing import Optional

import torch

from .. import _ops

NEOX, GPTJ = 0, 1  # rotary_style: pairs (i, i + rot/2), or (2i, 2i + 1)


def rope_append(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
                q_norm: Optional[torch.Tensor] = None, k_norm: Optional[torch.Tensor] = None,
                k_scale: Optional[torch.Tensor] = None, v_scale: Optional[torch.Tensor] = None,
                eps: float = 1e-6, rotary_style: int = NEOX) -> None:
    """Rotates q in place and appends rotated k and plain v to the cache; every row on its own.

    q [R, Hq, D], k, v [R, Hkv, D] bf16|fp16|fp32, one dtype: may be views of one merged QKV matrix (last dimension
        dense). q is changed, k and v are not.
    positions int32 [R], slots int64 [R] (page * page_size + offset). A row with a negative slot is not touched.
    cos_sin float32 [max_positions, rot]: rot/2 cosines, then rot/2 sines; dims rot..D of a head pass through.
    k_cache, v_cache [pages, page_size, Hkv, D] bf16|fp16|fp32|fp8 e4m3, written at the slots. fp8 saturates at 448.
        Any strides with a dense last dimension, but no two elements of q or of a cache may meet (an expanded tensor).
    q_norm, k_norm [D]: weights of an RMSNorm per head before RoPE (eps); None: no norm.
    k_scale, v_scale float32 [1] or [Hkv]: the appended values are divided by it; None is 1.
    rotary_style: NEOX (0) or GPTJ (1). All arithmetic is fp32 in one order: the CUDA kernel has the CPU op's bits, NaN
        payloads aside; Triton's too without a norm, else it is within one rounding step. Two rows with one slot: either
        may stay.

    Errors: RuntimeError for shapes, dtypes and devices; on the CPU also for a slot or a position out of range, before
    anything is written (a GPU leaves such a row alone). Cost: one launch, one read of q, k, v and one write of q and the
    new rows. Graph-safe: reads no device value on the host, allocates nothing.
    """
    _ops.require_kernel("rope_append", q.device)
    _ops.get("rope_append")(q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, eps,
                            rotary_style)
