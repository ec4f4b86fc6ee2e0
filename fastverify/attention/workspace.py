"""Scratch of the CUDA attention kernel: counters and the partial results of split sequences."""

from typing import Optional

import torch

COUNTER_BYTES = 4096  # csrc/algo/attention_plan.h


def workspace_bytes(rows: int, batch: int, q_heads: int, kv_heads: int, head_dim: int, sms: int) -> int:
    """Bytes that suffice for every call with these sizes on a GPU of `sms` multiprocessors (csrc/algo/attention_plan.h)."""
    wide, want = head_dim > 128, -(-rows // max(batch, 1)) * (q_heads // kv_heads)
    tile, most = (32, 64) if wide else (16, 128)
    while tile < min(want, most):
        tile *= 2
    return COUNTER_BYTES + 4 * sms * tile * (head_dim + 2) * 4


def workspace_for(q: torch.Tensor, k_cache: torch.Tensor, batch: int) -> Optional[torch.Tensor]:
    """Workspace of the CUDA kernel for q [R, Hq, D] of `batch` requests; None where none is used (other devices).

    One call at a time may use it; calls in stream order may share it, whatever their lengths, while R, B and heads stay.
    """
    if q.device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    nbytes = workspace_bytes(q.shape[0], batch, q.shape[1], k_cache.shape[2], q.shape[2], sms)
    space = torch.empty(nbytes, dtype=torch.uint8, device=q.device)
    space[:COUNTER_BYTES].zero_()
    return space
