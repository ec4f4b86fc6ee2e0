"""compact_kv: the KV rows of the accepted path move to the front of the tree, every layer, one launch."""

from typing import Optional

import torch

from .. import _ops


def compact_kv(k_cache: torch.Tensor, v_cache: Optional[torch.Tensor], path: torch.Tensor,
               num_tokens_out: torch.Tensor, prefix_len: torch.Tensor, page_table: torch.Tensor, *,
               cu_nodes: Optional[torch.Tensor] = None, aux: Optional[torch.Tensor] = None,
               aux_out: Optional[torch.Tensor] = None, cu_out: Optional[torch.Tensor] = None) -> tuple:
    """Cache position prefix_len[b] + path[b, i] -> prefix_len[b] + i for i < num_tokens_out[b], in place.

    k_cache, v_cache [L, pages, page_size, ...] of any dtype (bytes are copied; v_cache None for latent caches);
        dimensions past page_size dense. Both are changed.
    path int32 [B, D]: accepted nodes, root 0 first, -1 after the end. num_tokens_out int32 [B]: rows to keep.
    prefix_len int32 [B] (before this step's tokens are added), page_table int32 [B, P].
    aux [R, A] (rows flat by cu_nodes int32 [B+1], any dtype): row cu_nodes[b] + path[b, i] -> aux_out row
        cu_out[b] + i; aux_out [B * D, A], rows past cu_out[B] zero. cu_out int32 [B+1]: prefix sums of the kept rows.
    Returns (aux_out, cu_out); with aux, missing ones are allocated.

    Path entries increase strictly. The first entry that does not, or that is outside [0, n) (n from cu_nodes; without
    it only the page table bounds it), ends its request there: what came before is moved and counted.
    Errors: RuntimeError for shapes, dtypes and devices; on the CPU also for page ids out of range, before anything
    moves. Cost: two passes over the moved rows; rows in place are skipped. Graph-safe when the outputs are given.
    """
    if aux is not None and aux_out is None:
        aux_out = torch.empty(path.numel(), aux.shape[1], dtype=aux.dtype, device=aux.device)
    if aux is not None and cu_out is None:
        cu_out = torch.empty(path.shape[0] + 1, dtype=torch.int32, device=path.device)
    _ops.require_kernel("compact_kv", k_cache.device)
    _ops.get("compact_kv")(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out)
    return aux_out, cu_out
