"""prepare_tree in Triton: one launch for flags and the schedule, one for the rows. Equal to the CPU op."""

from typing import Optional

import torch
import triton
import triton.language as tl

from .. import _checks as check
from .grow_tree_triton import _own_bit

_OP = "prepare_tree"
BAD_TREE = tl.constexpr(4)
MIN_CHUNK, CHUNK_STEP, TARGET_UNITS, MAX_KV = (tl.constexpr(256), tl.constexpr(64), tl.constexpr(264),
                                               tl.constexpr((1 << 31) - 64))  # csrc/algo/schedule.h


@triton.jit
def _cu_nodes_ok(cu_nodes, B, R, BP: tl.constexpr):
    at = tl.arange(0, BP)
    low = tl.load(cu_nodes + at, at < B, other=0)
    high = tl.load(cu_nodes + at + 1, at < B, other=0)
    wrong = tl.max(((at < B) & (low > high)).to(tl.int32), 0) != 0
    return (tl.load(cu_nodes) == 0) & (wrong == 0) & (tl.load(cu_nodes + B) <= R)


@triton.jit(do_not_specialize=["B", "R", "row_base"])
def _plan(cu_nodes, prefix_len, schedule, flags, B, R, row_base, BP: tl.constexpr):
    """flags [B] and schedule [B+3]; one program."""
    ok = _cu_nodes_ok(cu_nodes, B, R, BP)
    at = tl.arange(0, BP)
    if flags is not None:
        tl.store(flags + at, tl.zeros((BP,), tl.int32) + tl.where(ok, 0, BAD_TREE), at < B)
    if schedule is not None:
        n = tl.load(cu_nodes + at + 1, at < B, other=0) - tl.load(cu_nodes + at, at < B, other=0)
        prefix = tl.load(prefix_len + at, at < B, other=0).to(tl.int64)
        kv = tl.minimum(tl.maximum(prefix, 0) + row_base + n, MAX_KV)
        kv = tl.where(ok & (at < B) & (n > 0), kv, 0)
        low = tl.full((), MIN_CHUNK // CHUNK_STEP, tl.int64)
        high = tl.maximum(low, (tl.max(kv, 0) + CHUNK_STEP - 1) // CHUNK_STEP)
        while low < high:
            middle = (low + high) // 2
            chunk = middle * CHUNK_STEP
            fits = tl.sum((kv + chunk - 1) // chunk, 0) <= TARGET_UNITS
            high = tl.where(fits, middle, high)
            low = tl.where(fits, low, middle + 1)
        chunk = low * CHUNK_STEP
        units = (kv + chunk - 1) // chunk
        ends = tl.cumsum(units, 0)
        total = tl.sum(units, 0)
        tl.store(schedule, chunk.to(tl.int32))
        tl.store(schedule + 1, total.to(tl.int32))
        tl.store(schedule + 2 + at, (ends - units).to(tl.int32), at < B)
        tl.store(schedule + 2 + B, total.to(tl.int32))


@triton.jit(do_not_specialize=["B", "R", "W", "pages", "row_base"])
def _rows(
        parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, flags,
        B, R, W, pages, page_size, row_base, BP: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(cu_nodes + B)
    if _cu_nodes_ok(cu_nodes, B, R, BP) == 0:
        count = count * 0
    real = row < count
    b = tl.zeros((ROWS,), tl.int32)
    for first in range(0, B, 64):
        at = first + tl.arange(0, 64)
        ends = tl.load(cu_nodes + at + 1, at < B, other=0x7FFFFFFF)
        b += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    b = tl.where(real, b, 0)
    base = tl.load(cu_nodes + b, real, other=0)
    i = row - base
    column = row_base + i
    prefix = tl.load(prefix_len + b, real, other=0)
    flag = tl.zeros((ROWS,), tl.int32)
    words = tl.arange(0, WP)[None, :]
    if parents is None:
        level = column
        up = i - 1
        low_bits = column[:, None] + 1 - 64 * words
        one = tl.zeros((ROWS, WP), tl.int64) + 1
        bits = tl.where(low_bits >= 64, -1, tl.where(low_bits > 0, (one << tl.maximum(low_bits, 0).to(tl.int64)) - 1, 0))
    else:
        up = tl.load(parents + row, real, other=-1)
        wrong = real & ((up < -1) | (up >= i))
        flag |= tl.where(wrong, BAD_TREE, 0)
        up = tl.where(wrong, -1, up)
        level = tl.zeros((ROWS,), tl.int32)
        bits = _own_bit(words, column[:, None])
        above = up
        while tl.max(above, 0) >= 0:
            bits |= tl.where((above >= 0)[:, None], _own_bit(words, (row_base + above)[:, None]), 0)
            level += (above >= 0).to(tl.int32)
            next_above = tl.load(parents + base + above, above >= 0, other=-1)
            above = tl.where((next_above < -1) | (next_above >= above), -1, next_above)
    level = tl.where(real, level, 0)
    inside = row < R
    if depth is not None:
        tl.store(depth + row, level, inside)
    if positions is not None:
        tl.store(positions + row, tl.where(real, prefix + level, 0), inside)
    if mask is not None:
        flag |= tl.where(real & (column >= 64 * W), BAD_TREE, 0)
        tl.store(mask + row.to(tl.int64)[:, None] * W + words, tl.where(real[:, None], bits, 0),
                 inside[:, None] & (words < W))
    if slots is not None:
        place = prefix.to(tl.int64) + column
        page = place // page_size
        known = real & (place >= 0) & (page < pages)
        page = tl.load(page_table + b.to(tl.int64) * pages + page, known, other=-1).to(tl.int64)
        tl.store(slots + row, tl.where(page < 0, -1, page * page_size + place % page_size), inside)
        flag |= tl.where(real & (page < 0), BAD_TREE, 0)
    if (first_child is not None) or (next_sibling is not None):
        child = tl.full((ROWS,), 0x7FFFFFFF, tl.int32)
        sibling = tl.full((ROWS,), 0x7FFFFFFF, tl.int32)
        end = tl.load(cu_nodes + b + 1, real, other=0)
        if parents is None:
            child = tl.where(row + 1 < end, i + 1, child)
        else:
            for first in range(tl.program_id(0) * ROWS, tl.max(end, 0), 32):
                at = first + tl.arange(0, 32)
                other = tl.load(parents + at, at < tl.max(end, 0), other=-1)[None, :]
                later = (at[None, :] > row[:, None]) & (at[None, :] < end[:, None])
                local = at[None, :] - base[:, None]
                child = tl.minimum(child, tl.min(tl.where(later & (other == i[:, None]), local, 0x7FFFFFFF), 1))
                same = later & (other == up[:, None]) & (up >= 0)[:, None]
                sibling = tl.minimum(sibling, tl.min(tl.where(same, local, 0x7FFFFFFF), 1))
        if first_child is not None:
            tl.store(first_child + row, tl.where(real & (child != 0x7FFFFFFF), child, -1), inside)
        if next_sibling is not None:
            tl.store(next_sibling + row, tl.where(real & (sibling != 0x7FFFFFFF), sibling, -1), inside)
    if flags is not None:
        tl.atomic_or(flags + b, flag, real & (flag != 0))


def check_arguments(parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, schedule, flags,
           page_size: int, row_base: int) -> Optional[int]:
    """The checks of csrc/tree/prepare_tree.cpp, in their order. Returns R, None if no per-row tensor is given."""
    t = lambda name, value, kinds, shape: check.optional(_OP, name, value, kinds, shape, cu_nodes)  # noqa: E731
    t("cu_nodes", cu_nodes, check.I32, (None,))
    check.that(cu_nodes.shape[0] >= 1, _OP, f"cu_nodes must be int32 [B+1]; got {check.describe(cu_nodes)}. "
               "Fix: pass prefix sums that start with 0.")
    batch = cu_nodes.shape[0] - 1
    per_row = (parents, mask, depth, positions, slots, first_child, next_sibling)
    rows = next((v.shape[0] for v in per_row if v is not None and v.dim() > 0), None)
    t("prefix_len", prefix_len, check.I32, (batch,))
    t("page_table", page_table, check.I32, (batch, None))
    t("parents", parents, check.I32, (rows,))
    t("mask", mask, check.I64, (rows, None))
    t("depth", depth, check.I32, (rows,))
    t("positions", positions, check.I32, (rows,))
    t("slots", slots, check.I64, (rows,))
    t("first_child", first_child, check.I32, (rows,))
    t("next_sibling", next_sibling, check.I32, (rows,))
    t("schedule", schedule, check.I32, (batch + 3,))
    t("flags", flags, check.I32, (batch,))
    check.that(mask is None or 1 <= mask.shape[1] <= check.MAX_MASK_WORDS, _OP, f"mask must be 1..{check.MAX_MASK_WORDS} words "
               f"wide; got {'' if mask is None else check.describe(mask)}. Fix: allocate ceil(columns/64) words per row.")
    check.that(page_size >= 1, _OP, f"page_size must be at least 1; got {page_size}. Fix: pass the cache's page size.")
    check.that(page_size <= 2**31 - 1, _OP, f"page_size must be at most {2**31 - 1}; got {page_size}. Fix: pass the cache's page size.")
    check.that(0 <= row_base <= 2**31 - 1, _OP, f"row_base must be in 0..{2**31 - 1}; got {row_base}. "
               "Fix: pass the forest column of the first row (0 for a verify tree).")
    return rows


def prepare_tree(parents: Optional[torch.Tensor], cu_nodes: torch.Tensor, prefix_len: torch.Tensor,
                 page_table: torch.Tensor, mask: Optional[torch.Tensor], depth: Optional[torch.Tensor],
                 positions: Optional[torch.Tensor], slots: Optional[torch.Tensor], first_child: Optional[torch.Tensor],
                 next_sibling: Optional[torch.Tensor], schedule: Optional[torch.Tensor], flags: Optional[torch.Tensor],
                 page_size: int, row_base: int) -> None:
    """The schema of csrc/ops.cpp."""
    rows = check_arguments(parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, schedule,
                  flags, page_size, row_base)
    batch, pow2 = cu_nodes.shape[0] - 1, triton.next_power_of_2
    bound = 2**31 - 1 if rows is None else rows
    if schedule is not None or flags is not None:
        _plan[(1,)](cu_nodes, prefix_len, schedule, flags, batch, bound, row_base, BP=max(32, pow2(batch)), num_warps=4)
    if rows:
        words = 1 if mask is None else mask.shape[1]
        _rows[(triton.cdiv(rows, 64),)](
            parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, flags, batch,
            rows, words, page_table.shape[1], page_size, row_base, BP=max(32, pow2(batch)), WP=pow2(words), ROWS=64, num_warps=4)
