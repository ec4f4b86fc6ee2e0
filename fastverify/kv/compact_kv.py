"""compact_kv: the KV rows of the accepted path move to the front of the tree, every layer, one launch."""

from typing import Optional, Sequence, Union

import torch

from .. import _ops
from .compact_kv_layers import compact_kv_layers

Caches = Union[torch.Tensor, Sequence[torch.Tensor]]


def compact_kv(k_cache: Caches, v_cache: Optional[Caches], path: torch.Tensor,
               num_tokens_out: torch.Tensor, prefix_len: torch.Tensor, page_table: torch.Tensor, *,
               cu_nodes: Optional[torch.Tensor] = None, aux: Optional[torch.Tensor] = None,
               aux_out: Optional[torch.Tensor] = None, cu_out: Optional[torch.Tensor] = None) -> tuple:
    """Cache position prefix_len[b] + path[b, i] -> prefix_len[b] + i for i < num_tokens_out[b], in place.

    k_cache, v_cache [L, pages, page_size, ...] of any dtype (bytes are copied; v_cache None for latent caches);
        dimensions past page_size dense, no two elements in one place. Both are changed. Lists of layers [pages, page_size, ...]: compact_kv_layers.
    path int32 [B, D]: accepted nodes, root 0 first, -1 after the end. num_tokens_out int32 [B]: rows to keep.
    prefix_len int32 [B] (before this step's tokens are added), page_table int32 [B, P].
    aux [R, A] (rows flat by cu_nodes int32 [B+1], any dtype): row cu_nodes[b] + path[b, i] -> aux_out row
        cu_out[b] + i; aux_out [B * D, A], rows past cu_out[B] zero. cu_out int32 [B+1]: prefix sums of the kept rows.
    Returns (aux_out, cu_out); with aux, missing ones are allocated.

    Path entries increase strictly. The first entry that does not, or that is outside [0, n) (n from cu_nodes; without
    it only the page table bounds it), ends its request there: what came before is moved and counted.
    Errors: RuntimeError for shapes, dtypes and devices; on the CPU also for page ids, prefix_len or cu_nodes out of range,
    before anything moves (CUDA skips the rows concerned; aux rows out of range become zero). Cost: two passes over the moved rows; rows in place are skipped. Graph-safe when the outputs are given.
    """
    if not isinstance(k_cache, torch.Tensor):
        return compact_kv_layers(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes=cu_nodes, aux=aux,
                                 aux_out=aux_out, cu_out=cu_out)
    if aux is not None and aux_out is None:
        aux_out = torch.empty(path.numel(), aux.shape[1], dtype=aux.dtype, device=aux.device)
    if aux is not None and cu_out is None:
        cu_out = torch.empty(path.shape[0] + 1, dtype=torch.int32, device=path.device)
    _ops.require_kernel("compact_kv", k_cache.device)
    _ops.get("compact_kv")(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out)
    return aux_out, cu_out
