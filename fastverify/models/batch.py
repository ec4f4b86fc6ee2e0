"""What one forward reads, and the paged KV cache: shared by targets, drafts and the decode loop."""

from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class ForwardBatch:
    """One forward over R node rows of B requests. All tensors live on the model's device; none is read on the host.

    tokens      int32|int64 [R]
    positions   int32 [R]      RoPE positions (prefix_len + depth)
    slots       int64 [R]      KV slot of each row, -1 for padding (prepare_tree)
    cu_nodes    int32 [B+1]    rows of request b: [cu_nodes[b], cu_nodes[b+1])
    prefix_len  int32 [B]      committed tokens in this model's cache, these rows excluded
    page_table  int32 [B, P]
    mask        int64 [R, W] ancestor words, or None for a causal chain (prefill, plain decoding, draft extend)
    row_base    forest column of each request's first row (draft levels; 0 elsewhere)
    schedule    int32 or None, from prepare_tree
    exact       the bits of a row must not depend on the rows beside it (LlamaModel only)
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_nodes: torch.Tensor
    prefix_len: torch.Tensor
    page_table: torch.Tensor
    mask: Optional[torch.Tensor] = None
    row_base: int = 0
    schedule: Optional[torch.Tensor] = None
    exact: bool = False


class KVCache:
    """Paged K and V of all layers of one model.

    k, v: [L, num_pages, page_size, Hkv, D]. Slot s of a layer is (page s // page_size, offset s % page_size). The page
    table (int32 [B, P]) belongs to the decode loop, so that target and draft share it. Not reallocated after creation.
    """

    def __init__(self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype = torch.float32, device: "torch.device | str" = "cpu") -> None:
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()
