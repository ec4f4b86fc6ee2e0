"""tree_attention: the rows of each request's token tree against its paged prefix and their ancestors."""

from typing import Optional

import torch

from .. import _ops
from .workspace import COUNTER_BYTES, exact_workspace_for, workspace_bytes, workspace_for  # noqa: F401


def tree_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cu_nodes: torch.Tensor,
                   prefix_len: torch.Tensor, page_table: torch.Tensor, *, mask: Optional[torch.Tensor] = None,
                   row_base: int = 0, scale: Optional[float] = None, window: int = 0, softcap: float = 0.0,
                   sinks: Optional[torch.Tensor] = None, k_scale: Optional[torch.Tensor] = None,
                   v_scale: Optional[torch.Tensor] = None, schedule: Optional[torch.Tensor] = None,
                   out: Optional[torch.Tensor] = None, lse: Optional[torch.Tensor] = None,
                   workspace: Optional[torch.Tensor] = None, exact: bool = False, settled: bool = False) -> torch.Tensor:
    """Attention of q [R, Hq, D] (bf16|fp16|fp32, rows may be strided); returns out [R, Hq, D] in q's dtype.

    k_cache, v_cache [pages, page_size, Hkv, D] bf16|fp16|fp32|fp8 e4m3: position p of request b is at page
        page_table[b, p // page_size], offset p % page_size. Not changed.
    cu_nodes int32 [B+1], prefix_len int32 [B], page_table int32 [B, P].
    mask int64 [R, W]: row i sees forest column j (cache position prefix_len + j) iff bit j is set and
        j < row_base + n; None: a chain, j <= row_base + i. row_base: forest column of a request's first row.
    Every row also sees the whole prefix. window > 0 keeps the last `window` keys by depth, itself included: siblings
    share a position. scale None: D ** -0.5. softcap > 0: s = softcap * tanh(s / softcap). sinks float32 [Hq]: one more
    logit per head in the denominator. k_scale, v_scale float32 [1] or [Hkv] multiply K and V; None is 1.
    lse float32 [R, Hq], written when given: natural log of the sum over keys, sinks excluded.
    workspace: uint8 from workspace_for, for the CUDA kernel to split long prefixes; made anew when not given (one more
        small kernel). schedule: from prepare_tree; today's kernels find their share of the work from the lengths.

    Padding rows and rows that see nothing: out 0, lse -inf. Slots that a row does not see never reach it, NaN or not;
    in the CUDA kernel's tiles (head_dim 64, 128, 256; bf16, fp16, fp8 cache) that holds for slots that no row of the
    request sees, while a NaN in V of one node may reach the other rows of that request. An fp8 cache is multiplied in
    fp16 (exact; q beyond +-65504 saturates).
    On the CPU a row's bits depend on its own keys only: not on the batch, the page size, the thread count, nor on whether
    its ancestors are tree columns or committed tokens.
    On CUDA bits depend on the shapes, the lengths of the batch and the GPU; repeats are bit-equal. exact=True: as on the CPU, a
    row has the bits of the plain decoding row at its position on that GPU (both calls exact); each row then reads its own KV,
    and the workspace is exact_workspace_for's. The CPU op is always exact; the Triton version refuses it.
    settled=True promises that everything but q and the rows of the tree itself (lengths, page table, mask, K and V of the prefix) was
    written before the launch before this one in the stream began: small models' kernel then reads it while that launch still runs.
    out and lse may have strides of their own, but none that lets two elements meet; q may have no heads. row_base + R below 2^31;
    |scale| and softcap at most 2e38, softcap 0 or at least 1e-37.
    Errors: RuntimeError for shapes, dtypes, devices and those limits; on the CPU also for bad cu_nodes, prefix_len or page ids, which the
    CUDA kernel clamps.
    Cost: one read of the visible KV per 96 rows of a kv head (CUDA: per 128 rows, 64 for head_dim 256); one launch (exact: two). Graph-safe when out and workspace are given.
    Source: online softmax over tiles (Milakov, Gimelshein 2018; FlashAttention-2, Dao 2023); split by equal ranges (stream-K,
    Osama et al. 2023).
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = exact_workspace_for(q, k_cache, page_table) if exact else workspace_for(q, k_cache, prefix_len.shape[0])
    _ops.require_kernel("tree_attention", q.device)
    _ops.get("tree_attention")(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, schedule, sinks, k_scale, v_scale, out,
                               lse, workspace, row_base, max(1, q.shape[-1]) ** -0.5 if scale is None else scale, window, softcap, exact, settled)
    return out
