"""compact_kv_layers: compact_kv over lists of per-layer caches, one launch."""

from typing import Optional, Sequence

import torch

from .. import _ops


def compact_kv_layers(k_caches: Sequence[torch.Tensor], v_caches: Optional[Sequence[torch.Tensor]], path: torch.Tensor,
                      num_tokens_out: torch.Tensor, prefix_len: torch.Tensor, page_table: torch.Tensor, *,
                      cu_nodes: Optional[torch.Tensor] = None, aux: Optional[torch.Tensor] = None,
                      aux_out: Optional[torch.Tensor] = None, cu_out: Optional[torch.Tensor] = None) -> tuple:
    """compact_kv for engines that allocate every layer by itself; all arguments but the caches as there.

    k_caches, v_caches  1 to 128 tensors [pages, page_size, ...] each, changed in place; v_caches None or empty for latent
        caches. Layers of one list share shape, dtype, strides and device; K and V may differ past page_size.

    The addresses of the layers are kernel arguments: there is no table that could grow stale, and a captured graph keeps
    those it was captured with. Errors, cost and graph safety as compact_kv; an eager call also pays for boxing the list.
    Source: csrc/kv/compact_kv_layers.cpp, csrc/kv/compact_kernel.cuh.
    """
    if aux is not None and aux_out is None:
        aux_out = torch.empty(path.numel(), aux.shape[1], dtype=aux.dtype, device=aux.device)
    if aux is not None and cu_out is None:
        cu_out = torch.empty(path.shape[0] + 1, dtype=torch.int32, device=path.device)
    _ops.require_kernel("compact_kv_layers", path.device)
    _ops.get("compact_kv_layers")(list(k_caches), list(v_caches or ()), path, num_tokens_out, prefix_len, page_table, cu_nodes,
                                  aux, aux_out, cu_out)
    return aux_out, cu_out
