"""mla_tree_attention: tree attention over the latent cache of DeepSeek and Kimi (absorbed form)."""

from typing import Optional

import torch

from .. import _ops
from .workspace import mla_workspace_for


def mla_tree_attention(q: torch.Tensor, kv_cache: torch.Tensor, cu_nodes: torch.Tensor, prefix_len: torch.Tensor,
                       page_table: torch.Tensor, scale: float, *, mask: Optional[torch.Tensor] = None, row_base: int = 0,
                       out_dim: int = 512, out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
                       workspace: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Attention of q [R, H, D] over latent rows of D dims, all heads over the same ones; returns out [R, H, out_dim].

    q bf16|fp16|fp32: a head's query in latent space, W_uk q_nope, then q_rope (512 + 64 dims). Rows may be strided.
    kv_cache [pages, page_size, D] bf16|fp16|fp32: normed latent, then the rotated key part; its first out_dim dims are also
        the values. Position p of request b is at page page_table[b, p // page_size], offset p % page_size. Not changed.
    cu_nodes int32 [B+1], prefix_len int32 [B], page_table int32 [B, P], mask int64 [R, W], row_base: as in tree_attention.
    scale: of the model's softmax, (qk_nope + qk_rope) ** -0.5 and its rope factor: it cannot be told from D.
    out in q's dtype, to be multiplied by W_uv. lse float32 [R, H], written when given: natural log.
    workspace: uint8 from mla_workspace_for, for the CUDA kernel to split long prefixes; made anew when not given.

    Padding rows and rows that see nothing: out 0, lse -inf. On the CPU a row's bits depend on its own keys only; on CUDA on
    shapes, lengths and the GPU, and repeats are bit-equal. A NaN in a row that one node sees may reach other nodes there.
    Errors: RuntimeError for shapes, dtypes, devices, tree_attention's limits of out, lse, row_base and scale; on the CPU also for bad cu_nodes, prefix_len or page ids, which the
    CUDA kernel clamps.
    Cost: one read of the visible latent rows per 64 rows of q (node x head; 32 with 99 KB of shared memory); one launch. Graph-safe when out and workspace are given. Tensor cores: D = 576, out_dim = 512, 16 bits.
    Source: DeepSeek-V2 2.1.2 (arXiv 2405.04434), absorbed as in its 2.1.3; splits as in tree_attention.
    """
    if out is None:
        out = torch.empty(*q.shape[:2], out_dim, dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = mla_workspace_for(q, prefix_len.shape[0], out.shape[-1])
    _ops.require_kernel("mla_tree_attention", q.device)
    _ops.get("mla_tree_attention")(q, kv_cache, mask, cu_nodes, prefix_len, page_table, out, lse, workspace, row_base, scale)
    return out
