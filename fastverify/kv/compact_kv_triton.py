"""compact_kv in Triton: one launch moves K and V rows of all layers; with aux, one counts and one gathers."""

from typing import Optional

import torch
import triton
import triton.language as tl

from .. import _checks as check

_OP = "compact_kv"
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _kept(path, num_tokens_out, cu_nodes, b, D, at, DP: tl.constexpr):
    """Usable entries of one request's path (csrc/algo/compact.h, compact_length). at = arange(DP)."""
    limit = tl.minimum(tl.load(num_tokens_out + b), D)
    node = tl.load(path + b.to(tl.int64) * D + at, at < D, other=0)
    before = tl.load(path + b.to(tl.int64) * D + at - 1, (at > 0) & (at < D), other=-1)
    nodes = 0x7FFFFFFF
    if cu_nodes is not None:
        nodes = tl.load(cu_nodes + b + 1) - tl.load(cu_nodes + b)
    stop = (at >= limit) | (node <= before) | (node >= nodes)
    return tl.minimum(tl.min(tl.where(stop, at, DP), 0), tl.maximum(limit, 0))


@triton.jit
def _move(
        cache,  # int8|16|32|64 [L, pages, page_size, ROW], strides in elements
        layer, page_stride, slot_stride, layer_stride, row_length, first_column,
        path, prefix, page_table, table_stride, columns, page_size, num_pages, b, D, first, length,
        ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows path[first..length) -> first.., columns first_column .. + CHUNK; ascending, ROWS at a time, reads before writes."""
    column = first_column + tl.arange(0, CHUNK)
    table = page_table + b.to(tl.int64) * table_stride
    base = cache + layer.to(tl.int64) * layer_stride
    for start in range(first, length, ROWS):
        i = start + tl.arange(0, ROWS)
        node = tl.load(path + b.to(tl.int64) * D + i, i < length, other=0)
        src = prefix.to(tl.int64) + node
        dst = prefix.to(tl.int64) + i
        ok = (i < length) & (node != i) & (dst >= 0) & (src // page_size < columns)
        src_page = tl.load(table + src // page_size, ok, other=-1).to(tl.int64)
        dst_page = tl.load(table + dst // page_size, ok, other=-1).to(tl.int64)
        ok = ok & (src_page >= 0) & (src_page < num_pages) & (dst_page >= 0) & (dst_page < num_pages)
        both = ok[:, None] & (column < row_length)[None, :]
        src = src_page * page_stride + (src % page_size) * slot_stride
        dst = dst_page * page_stride + (dst % page_size) * slot_stride
        x = tl.load(base + src[:, None] + column[None, :], both, other=0)
        tl.debug_barrier()
        tl.store(base + dst[:, None] + column[None, :], x, both)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["table_stride", "columns", "num_pages", "D"])
def _compact(
        k_cache, v_cache, k_layer, k_page, k_slot, k_row, v_layer, v_page, v_slot, v_row,
        path, num_tokens_out, prefix_len, page_table, table_stride, columns, page_size, num_pages, cu_nodes, D,
        DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    layer = tl.program_id(0)
    b = tl.program_id(1)
    first_column = tl.program_id(2) * CHUNK
    at = tl.arange(0, DP)
    length = _kept(path, num_tokens_out, cu_nodes, b, D, at, DP)
    node = tl.load(path + b.to(tl.int64) * D + at, at < length, other=-1)
    first = tl.min(tl.where((at < length) & (node == at), DP, at), 0)
    prefix = tl.load(prefix_len + b)
    if first < length:
        if first_column < k_row:
            _move(k_cache, layer, k_page, k_slot, k_layer, k_row, first_column, path, prefix, page_table, table_stride,
                  columns, page_size, num_pages, b, D, first, length, ROWS, CHUNK)
        if v_cache is not None:
            if first_column < v_row:
                _move(v_cache, layer, v_page, v_slot, v_layer, v_row, first_column, path, prefix, page_table, table_stride,
                      columns, page_size, num_pages, b, D, first, length, ROWS, CHUNK)


@triton.jit(do_not_specialize=["D", "B"])
def _count(path, num_tokens_out, cu_nodes, cu_out, D, B, DP: tl.constexpr):
    """cu_out [B+1]: prefix sums of the kept rows; one program."""
    at = tl.arange(0, DP)
    total = 0
    tl.store(cu_out, 0)
    for i in range(0, B):
        total += _kept(path, num_tokens_out, cu_nodes, tl.zeros((), tl.int32) + i, D, at, DP)
        tl.store(cu_out + i + 1, total)


@triton.jit(do_not_specialize=["D", "B", "R"])
def _gather(aux, aux_stride, aux_out, cu_out, cu_nodes, path, A, D, B, R, BP: tl.constexpr, CHUNK: tl.constexpr):
    r = tl.program_id(0)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = tl.arange(0, BP)
    b = tl.sum(tl.where((at < B) & (tl.load(cu_out + at + 1, at < B, other=0) <= r), 1, 0), 0)
    source = tl.zeros((), tl.int64) - 1
    if b < B:
        i = r - tl.load(cu_out + b)
        source = tl.load(cu_nodes + b).to(tl.int64) + tl.load(path + b.to(tl.int64) * D + i)
    real = (source >= 0) & (source < R)
    x = tl.load(aux + source * aux_stride + column, (column < A) & real, other=0)
    tl.store(aux_out + r.to(tl.int64) * A + column, x, column < A)


def _check_cache(name: str, t: torch.Tensor, k_cache: torch.Tensor) -> None:
    ok = t.dim() >= 3 and t.shape[:3] == k_cache.shape[:3] and t.shape[2] >= 1
    check.that(ok, _OP, f"{name} must be [layers, pages, page_size, ...] like k_cache; got {check.describe(t)}. "
               "Fix: pass the whole cache; give a single layer as cache[None].")
    check.that(t.device == k_cache.device, _OP, f"{name} must be on the device of k_cache; got {check.describe(t)}. "
               "Fix: move it with .to(device).")


def _row_length(name: str, t: torch.Tensor) -> int:
    """Elements of one slot, dense."""
    row = 1
    for d in range(t.dim() - 1, 2, -1):
        check.that(t.shape[d] <= 1 or t.stride(d) == row, _OP, f"{name} must be dense in the dimensions past page_size; got "
                   f"{check.describe(t)} with other strides. Fix: allocate the cache as [L, pages, page_size, ...].")
        row *= t.shape[d]
    check.own_memory(_OP, name, t)
    return row


def check_arguments(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out) -> None:
    """The checks of csrc/kv/compact_kv.cpp that need no device value, in their order."""
    _check_cache("k_cache", k_cache, k_cache)
    if v_cache is not None:
        _check_cache("v_cache", v_cache, k_cache)
    check.tensor(_OP, "path", path, check.I32, (None, None), k_cache)
    batch, depth = path.shape
    check.tensor(_OP, "num_tokens_out", num_tokens_out, check.I32, (batch,), k_cache)
    check.tensor(_OP, "prefix_len", prefix_len, check.I32, (batch,), k_cache)
    check.tensor(_OP, "page_table", page_table, check.I32, (batch, None), k_cache, rows_free=True)
    check.optional(_OP, "cu_nodes", cu_nodes, check.I32, (batch + 1,), k_cache)
    check.optional(_OP, "cu_out", cu_out, check.I32, (batch + 1,), k_cache)
    check.that((aux is None) == (aux_out is None), _OP, "aux and aux_out must be given together; got only "
               f"{'aux_out' if aux is None else 'aux'}. Fix: pass both or neither.")
    check.that(aux is None or cu_nodes is not None, _OP, "cu_nodes must be given with aux; got None. "
               "Fix: pass the rows of each request.")
    if aux is not None:
        check.tensor(_OP, "aux", aux, (check.dtype_name(aux.dtype),), (None, None), k_cache, rows_free=True)
        check.tensor(_OP, "aux_out", aux_out, (check.dtype_name(aux.dtype),), (batch * depth, aux.shape[1]), k_cache)
    _row_length("k_cache", k_cache)
    if v_cache is not None:
        _row_length("v_cache", v_cache)


def compact_kv(k_cache: torch.Tensor, v_cache: Optional[torch.Tensor], path: torch.Tensor, num_tokens_out: torch.Tensor,
               prefix_len: torch.Tensor, page_table: torch.Tensor, cu_nodes: Optional[torch.Tensor],
               aux: Optional[torch.Tensor], aux_out: Optional[torch.Tensor], cu_out: Optional[torch.Tensor]) -> None:
    """The schema of csrc/ops.cpp. Rows on page ids out of range stay where they are (the CPU op raises)."""
    check_arguments(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out)
    batch, depth = path.shape
    k_row = _row_length("k_cache", k_cache)
    v_row = 0 if v_cache is None else _row_length("v_cache", v_cache)
    pow2 = triton.next_power_of_2
    depth_padded = pow2(max(depth, 1))
    ints = lambda t: None if t is None else t.view(_INTS[t.element_size()])  # noqa: E731
    widest = max(k_row, v_row)
    if batch and depth and k_cache.shape[0] and widest:
        chunk = min(1024, pow2(widest))
        v = k_cache if v_cache is None else v_cache
        _compact[(k_cache.shape[0], batch, triton.cdiv(widest, chunk))](
            ints(k_cache), ints(v_cache), *k_cache.stride()[:3], k_row, *v.stride()[:3], v_row, path, num_tokens_out,
            prefix_len, page_table, page_table.stride(0), page_table.shape[1], k_cache.shape[2], k_cache.shape[1], cu_nodes,
            depth, DP=depth_padded, ROWS=4, CHUNK=chunk, num_warps=4)
    if aux is not None and cu_out is None:
        cu_out = torch.empty(batch + 1, dtype=torch.int32, device=k_cache.device)
    if cu_out is not None:
        _count[(1,)](path, num_tokens_out, cu_nodes, cu_out, depth, batch, DP=depth_padded, num_warps=1)
    if aux is not None and aux_out.numel():
        chunk = min(2048, pow2(aux.shape[1]))
        _gather[(batch * depth, triton.cdiv(aux.shape[1], chunk))](
            ints(aux), aux.stride(0), ints(aux_out), cu_out, cu_nodes, path, aux.shape[1], depth, batch, aux.shape[0],
            BP=max(32, pow2(batch)), CHUNK=chunk, num_warps=4)
