"""tree_attention in Triton: the portable back end, the same contract as the C++ kernels (see tree_attention.py).

A unit of work is (request, tile of its nodes, split of its keys); a program takes one unit of one kv head, with the query
heads of the group packed as rows, so that K and V are read once per tile. Every program works out its unit from the device
lengths: no host plan, no schedule, a grid that depends on shapes only. Units that split a request leave partial results,
which a second kernel folds in split order, so repeats are bit-equal. A key on a page id out of range counts as page 0 where
every row sees it, and is not seen in the tree. Cost: two launches; scratch from torch's allocator.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import _checks as check
from .rope_append_triton import CACHES, head_scale
from .tree_attention_triton_device import attend_unit, plan, request_shape, split_count

OP = "tree_attention"
MIN_CHUNK = 128    # keys of a split, at least
LOG2_E = 1.4426950408889634


class Choice(NamedTuple):
    """Launch choice of one shape on one device."""

    block_m: int  # packed query rows of a tile
    block_n: int  # keys of a step
    warps: int
    stages: int
    target: int   # units per kv head that fill the device once


@functools.lru_cache(maxsize=None)
def choose(nodes: int, group: int, head_dim: int, item: int, kv_heads: int, sms: int, max_smem: int) -> Choice:
    """Pure function of the shape (nodes: rows per request on average; item: bytes of a dot operand) and of the device's
    multiprocessors and bytes of shared memory per block. A tile holds one request's packed rows up to 64, or up to 128
    where shared memory is large; one or two steps of K and V are on their way while one is worked on."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    tall = 16 if item == 4 else 128 if max_smem > 160 * 1024 and block_d * item <= 256 else 64
    rows = triton.next_power_of_2(max(nodes, 1) * group)
    block_m = max(16, triton.next_power_of_2(group), min(rows, tall))
    if block_m == 32 and tall == 128:
        block_m = 64  # half empty, but a wgmma tile
    per_sm = 1 if block_m > 64 or max_smem < 160 * 1024 else 2
    room = max_smem // per_sm - block_m * block_d * item - 1024
    block_n, step = 32 if block_m == 64 and tall == 128 else 64, 2 * block_d * item
    if item == 4:  # float32 products are unrolled: large ones take long to compile and spill
        block_n = 16 if block_d > 64 else 32
    while block_n > 16 and 2 * block_n * step > room:
        block_n //= 2
    ahead = 2 if (3 if block_m >= 64 else 2) * block_n * step <= room else 1  # tiles on their way; wgmma holds one more
    stages = 2 * ahead + 1  # a key waits for its page id, so Triton spends two stages on a tile
    warps = 8 if block_m > 64 or block_m * block_d > 64 * 128 else 4
    return Choice(block_m, block_n, warps, stages, max(1, per_sm * sms // max(kv_heads, 1)))


def max_units(rows: int, batch: int, nodes_per_tile: int, target: int) -> int:
    """An upper bound of the units of any batch: every tile once, and `target` more by splitting."""
    return target + (rows + batch * (nodes_per_tile - 1)) // nodes_per_tile


@triton.jit
def finish(acc, top, total, row, q_heads, head, ok, dims, sinks, v_scale, out, lse, out_row, out_head, lse_row, v_scale_step,
           HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """out and lse of rows from their sums, relative to 2^top; a row that saw nothing: 0 and -inf."""
    nothing = total == 0.0
    denominator = total
    if HAS_SINKS:
        sink = tl.load(sinks + q_heads, mask=ok, other=0.0) * 1.4426950408889634
        denominator = total + tl.exp2(sink - top)
    y = acc / tl.where(nothing, 1.0, denominator)[:, None]
    if HAS_V_SCALE:
        y = y * tl.load(v_scale + head * v_scale_step)
    y = tl.where(nothing[:, None], 0.0, y)
    tl.store(out + row[:, None] * out_row + q_heads[:, None] * out_head + dims[None, :], y.to(out.dtype.element_ty),
             mask=ok[:, None] & (dims < HEAD_DIM)[None, :])
    if HAS_LSE:
        value = (top + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453
        tl.store(lse + row * lse_row + q_heads, tl.where(nothing, float("-inf"), value), mask=ok)


@triton.jit
def attend_kernel(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, k_scale, v_scale, out, lse, partial,
                  sums, rows, batch, words, pages, table_columns, capacity, target, units, row_base, factor, softcap,
                  q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row, mask_row, out_row, out_head,
                  lse_row, k_scale_step, v_scale_step,
                  WINDOW: tl.constexpr, HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
                  HAS_LSE: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, DOT_F32: tl.constexpr,
                  E4M3: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, NODES: tl.constexpr,
                  HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_B: tl.constexpr, MIN_KEYS: tl.constexpr):
    """grid (kv heads, units + 1): one unit of one kv head; the last one clears the padding rows."""
    head, unit = tl.program_id(0), tl.program_id(1)
    dims, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    q_heads = head * GROUP + r % GROUP
    if unit == units:
        last = tl.minimum(tl.maximum(tl.load(cu_nodes + batch), 0), rows)
        for row in range(last, rows, NODES):
            at = (row + r // GROUP).to(tl.int64)
            ok = (r < NODES * GROUP) & (at < rows)
            tl.store(out + at[:, None] * out_row + q_heads[:, None] * out_head + dims[None, :],
                     tl.zeros([BLOCK_M, BLOCK_D], tl.float32).to(out.dtype.element_ty),
                     mask=ok[:, None] & (dims < HEAD_DIM)[None, :])
            if HAS_LSE:
                tl.store(lse + at * lse_row + q_heads, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=ok)
        return
    every, ends, counts, weight = plan(cu_nodes, prefix_len, rows, batch, capacity, target, row_base, WINDOW, NODES, BLOCK_N,
                                       BLOCK_B, MIN_KEYS)
    b = tl.sum(tl.where((tl.cumsum(counts, 0) <= unit) & (every < batch), 1, 0), 0)
    if b >= batch:
        return
    index = unit - tl.sum(tl.where(every < b, counts, 0), 0)
    first, n, prefix, begin, keys, tiles = request_shape(cu_nodes, prefix_len, rows, capacity, row_base, b, b < batch, WINDOW,
                                                         NODES, BLOCK_N)
    splits = split_count(keys, weight, target, MIN_KEYS)
    tile, split = index % tiles, index // tiles
    per_split = ((keys + BLOCK_N - 1) // BLOCK_N + splits - 1) // splits * BLOCK_N
    end = begin + keys
    begin = begin + split * per_split
    end = tl.minimum(end, begin + per_split)
    if HAS_K_SCALE:
        factor = factor * tl.load(k_scale + head * k_scale_step)
    acc, top, total, row, ok = attend_unit(
        q, k_cache, v_cache, mask, page_table + b.to(tl.int64) * table_row, words, pages, table_columns, capacity, row_base,
        factor, softcap, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, mask_row, head, tile, first, n, prefix,
        begin, end, WINDOW, HAS_MASK, SOFTCAP, DOT_F32, E4M3, PAGE_SIZE, GROUP, NODES, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D)
    if splits > 1:
        at = (unit.to(tl.int64) * tl.num_programs(0) + head) * BLOCK_M
        tl.store(partial + (at + r[:, None]) * BLOCK_D + dims[None, :], acc)
        tl.store(sums + 2 * (at + r), top)
        tl.store(sums + 2 * (at + r) + 1, total)
    else:
        finish(acc, top, total, row, q_heads, head, ok, dims, sinks, v_scale, out, lse, out_row, out_head, lse_row,
               v_scale_step, HAS_SINKS, HAS_LSE, HAS_V_SCALE, HEAD_DIM)


@triton.jit
def combine_kernel(partial, sums, cu_nodes, prefix_len, sinks, v_scale, out, lse, rows, batch, capacity, target, units,
                   row_base, kv_heads, out_row, out_head, lse_row, v_scale_step,
                   WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
                   GROUP: tl.constexpr, NODES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, MIN_KEYS: tl.constexpr,
                   HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """grid (rows, kv heads * ceil(GROUP / HEADS)): folds the partials of one row's splits, in order."""
    row, blocks = tl.program_id(0), tl.cdiv(GROUP, HEADS)
    head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    every, ends, counts, weight = plan(cu_nodes, prefix_len, rows, batch, capacity, target, row_base, WINDOW, NODES, BLOCK_N,
                                       BLOCK_B, MIN_KEYS)
    b = tl.sum(tl.where((ends <= row) & (every < batch), 1, 0), 0)
    if b >= batch:
        return
    first, n, prefix, start, keys, tiles = request_shape(cu_nodes, prefix_len, rows, capacity, row_base, b, b < batch, WINDOW,
                                                         NODES, BLOCK_N)
    splits = split_count(keys, weight, target, MIN_KEYS)
    node = row - first
    if (splits == 1) | (node < 0):
        return
    unit0 = tl.sum(tl.where(every < b, counts, 0), 0) + node // NODES  # splits of a tile lie `tiles` apart
    j, dims, s = block * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    ok = j < GROUP
    r = (node % NODES) * GROUP + j
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for begin in range(0, splits, SPLITS):
        unit = unit0 + (begin + s) * tiles
        at = (unit.to(tl.int64) * kv_heads + head)[:, None] * BLOCK_M + r[None, :]
        use = ((begin + s < splits) & (unit < units))[:, None] & ok[None, :]
        m = tl.load(sums + 2 * at, mask=use, other=float("-inf"))
        part_total = tl.load(sums + 2 * at + 1, mask=use, other=0.0)
        part = tl.load(partial + at[:, :, None] * BLOCK_D + dims[None, None, :], mask=use[:, :, None], other=0.0)
        new = tl.maximum(top, tl.max(m, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        scale, keep = tl.exp2(m - safe[None, :]), tl.exp2(top - safe)
        total = total * keep + tl.sum(part_total * scale, 0)
        acc = acc * keep[:, None] + tl.sum(part * scale[:, :, None], 0)
        top = new
    finish(acc, top, total, row + tl.zeros([HEADS], tl.int64), head * GROUP + j, head, ok, dims, sinks, v_scale, out, lse,
           out_row, out_head, lse_row, v_scale_step, HAS_SINKS, HAS_LSE, HAS_V_SCALE, HEAD_DIM)


def check_arguments(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, out, lse, row_base, scale, window,
                    softcap) -> None:
    """The checks of csrc/attention/tree_attention.cpp that need no device value."""
    check.tensor(OP, "q", q, ("float32", "bfloat16", "float16"), (None, None, None), q, True)
    rows, heads, d = q.shape
    check.tensor(OP, "k_cache", k_cache, CACHES, (None, None, None, d), q, True)
    pages, page_size, kv_heads, _ = k_cache.shape
    check.tensor(OP, "v_cache", v_cache, (check.dtype_name(k_cache.dtype),), (pages, page_size, kv_heads, d), q, True)
    check.that(kv_heads >= 1 and heads % kv_heads == 0, OP, f"q must have a multiple of the cache's {kv_heads} kv heads; got "
               f"{check.describe(q)}. Fix: pass q [R, Hq, D] and caches [pages, page_size, Hkv, D].")
    check.that(1 <= d <= 1024 and page_size >= 1, OP, "head_dim must be in [1, 1024] and page_size >= 1; got "
               f"{check.describe(k_cache)}. Fix: pass caches [pages, page_size, Hkv, D].")
    check.tensor(OP, "prefix_len", prefix_len, check.I32, (None,), q)
    requests = prefix_len.shape[0]
    check.tensor(OP, "cu_nodes", cu_nodes, check.I32, (requests + 1,), q)
    check.tensor(OP, "page_table", page_table, check.I32, (requests, None), q, True)
    check.optional(OP, "mask", mask, check.I64, (rows, None), q, True)
    check.optional(OP, "sinks", sinks, check.F32, (heads,), q)
    check.output(OP, "out", out, (check.dtype_name(q.dtype),), (rows, heads, d), q)
    check.output(OP, "lse", lse, check.F32, (rows, heads), q)
    check.that(row_base >= 0, OP, f"row_base must be >= 0; got {row_base}. Fix: pass the forest column of each request's first row.")
    check.that(row_base <= 2**31 - 1 - rows, OP, f"row_base must be at most {2**31 - 1 - rows} with {rows} rows; got {row_base}. "
               "Fix: pass the forest column of each request's first row.")
    check.that(0 <= window < 2**31, OP, f"window must be in [0, 2^31); got {window}. Fix: pass 0 for full attention.")
    check.that(0 <= softcap < math.inf, OP, f"softcap must be finite and >= 0; got {softcap:g}. Fix: pass 0 for none.")
    check.that(softcap == 0 or 1e-37 <= softcap <= 2e38, OP, f"softcap must be 0 or in [1e-37, 2e+38] (float32); got {softcap:g}. "
               "Fix: pass 0 for none.")
    check.that(math.isfinite(scale), OP, f"scale must be finite; got {scale:g}. Fix: pass head_dim ** -0.5.")
    check.that(abs(scale) <= 2e38, OP, f"scale must be at most 2e+38 (float32); got {scale:g}. Fix: pass head_dim ** -0.5.")


@functools.lru_cache(maxsize=None)
def device_limits(device: torch.device) -> tuple:
    """(multiprocessors, bytes of shared memory per block, converts fp8); a CPU stands for a small GPU (the interpreter)."""
    if device.type != "cuda":
        return 8, 99 * 1024, False
    props = torch.cuda.get_device_properties(device)
    return props.multi_processor_count, props.shared_memory_per_block_optin, (props.major, props.minor) >= (8, 9)


def tree_attention(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, schedule, sinks, k_scale, v_scale, out, lse,
                   workspace, row_base, scale, window, softcap, exact=False, settled=False) -> None:
    """The schema's positional arguments (csrc/ops.cpp); schedule and workspace are not used; no exact mode."""
    if exact:
        raise RuntimeError(f"{OP}: exact must be False in the Triton version; got True. Fix: use a build with CUDA kernels.")
    check_arguments(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, out, lse, row_base, scale, window, softcap)
    (rows, heads, d), (pages, page_size, kv_heads, _), batch = q.shape, k_cache.shape, prefix_len.shape[0]
    k_step, v_step = (head_scale(OP, n, s, kv_heads, q) for n, s in (("k_scale", k_scale), ("v_scale", v_scale)))
    if rows * heads == 0:
        return
    e4m3, group = k_cache.dtype == torch.float8_e4m3fn, heads // kv_heads
    dot_f32 = q.dtype == torch.float32 or not (e4m3 or k_cache.dtype == q.dtype)
    sms, smem, fp8 = device_limits(q.device)
    block_m, block_n, warps, stages, target = choose(triton.cdiv(rows, max(batch, 1)), group, d, 4 if dot_f32 else 2, kv_heads,
                                                     sms, smem)
    nodes, block_d, block_b = block_m // group, max(16, triton.next_power_of_2(d)), triton.next_power_of_2(max(batch, 1))
    units = max_units(rows, batch, nodes, target)
    partial = torch.empty(units * kv_heads * block_m * (block_d + 2), dtype=torch.float32, device=q.device)
    sums = partial[units * kv_heads * block_m * block_d:]
    columns = page_table.shape[1] if pages else 0
    capacity = min(columns * page_size, 2**30)
    heads_at_once = min(triton.next_power_of_2(group), max(1, 1024 // block_d))
    flags = dict(WINDOW=window, HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, HAS_V_SCALE=v_scale is not None, GROUP=group,
                 NODES=nodes, HEAD_DIM=d, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_B=block_b, MIN_KEYS=MIN_CHUNK)
    caches = [c.view(torch.uint8) if e4m3 else c for c in (k_cache, v_cache)]
    lse_row = lse.stride(0) if lse is not None else 0
    attend_kernel[(kv_heads, units + 1)](
        q, *caches, mask, cu_nodes, prefix_len, page_table, sinks, k_scale, v_scale, out, lse, partial, sums, rows, batch,
        mask.shape[1] if mask is not None else 0, pages, columns, capacity, target, units, min(row_base, 2**30),
        scale / softcap if softcap > 0 else scale * LOG2_E, softcap, q.stride(0), q.stride(1), *k_cache.stride()[:3],
        *v_cache.stride()[:3], page_table.stride(0), mask.stride(0) if mask is not None else 0, out.stride(0), out.stride(1),
        lse_row, k_step, v_step, HAS_MASK=mask is not None, SOFTCAP=softcap > 0, HAS_K_SCALE=k_scale is not None,
        DOT_F32=dot_f32, E4M3=(2 if fp8 else 1) if e4m3 else 0, PAGE_SIZE=page_size, **flags, num_warps=warps, num_stages=stages)
    if target > 1 and capacity + row_base + rows > MIN_CHUNK:
        combine_kernel[(rows, kv_heads * triton.cdiv(group, heads_at_once))](
            partial, sums, cu_nodes, prefix_len, sinks, v_scale, out, lse, rows, batch, capacity, target, units,
            min(row_base, 2**30), kv_heads, out.stride(0), out.stride(1), lse_row, v_step, **flags, HEADS=heads_at_once,
            SPLITS=max(1, min(16, 8192 // (heads_at_once * block_d))), num_warps=4)
