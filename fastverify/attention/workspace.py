"""Scratch of the CUDA attention kernels: counters and the partial results of split sequences."""

from typing import Optional

import torch

COUNTER_BYTES = 4096  # csrc/algo/attention_plan.h


def workspace_bytes(rows: int, batch: int, q_heads: int, kv_heads: int, head_dim: int, sms: int) -> int:
    """Bytes that suffice for every call with these sizes on a GPU of `sms` multiprocessors (csrc/algo/attention_plan.h)."""
    wide, want = head_dim > 128, -(-rows // max(batch, 1)) * (q_heads // kv_heads)
    tile, most = (32, 64) if wide else (64, 128)
    while tile < min(want, most):
        tile *= 2
    return COUNTER_BYTES + (6 if tile <= 64 else 4) * sms * tile * (head_dim + 2) * 4


def exact_workspace_bytes(rows: int, q_heads: int, kv_heads: int, head_dim: int, capacity: int) -> int:
    """Bytes of tree_attention(exact=True): a partial result per row, head and 1024 positions that the page table can hold."""
    group, tile = q_heads // kv_heads, 32 if head_dim > 128 else 16
    partial = -(-min(group, tile) * (head_dim + 2) // 4) * 16
    return COUNTER_BYTES + rows * kv_heads * -(-group // tile) * max(1, -(-capacity // 1024)) * partial


def exact_workspace_for(q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor) -> Optional[torch.Tensor]:
    """Workspace of tree_attention(exact=True) for q [R, Hq, D]; None where none is used (other devices)."""
    if q.device.type != "cuda":
        return None
    nbytes = exact_workspace_bytes(q.shape[0], q.shape[1], k_cache.shape[2], q.shape[2], page_table.shape[1] * k_cache.shape[1])
    return torch.empty(nbytes, dtype=torch.uint8, device=q.device)


def mla_workspace_bytes(rows: int, batch: int, heads: int, out_dim: int, sms: int) -> int:
    """Bytes that suffice for every call of mla_tree_attention with these sizes (csrc/algo/mla_plan.h)."""
    return COUNTER_BYTES + 2 * sms * 64 * (out_dim + 2) * 4


def mla_workspace_for(q: torch.Tensor, batch: int, out_dim: int = 512) -> Optional[torch.Tensor]:
    """Workspace of mla_tree_attention for q [R, H, D] of `batch` requests; None where none is used. Used as workspace_for's."""
    if q.device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    space = torch.empty(mla_workspace_bytes(q.shape[0], batch, q.shape[1], out_dim, sms), dtype=torch.uint8, device=q.device)
    space[:COUNTER_BYTES].zero_()
    return space


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
