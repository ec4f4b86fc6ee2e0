"""grow_tree in Triton: one launch decides, one copies the hidden rows. Equal to the CPU op bit for bit."""

import torch
import triton
import triton.language as tl

from .. import _checks as check
from .._triton_numeric import EXACT, NO_KEY, make_key

_OP = "grow_tree"


@triton.jit
def _own_bit(words, column):
    """int64 [rows, words]: bit `column` [rows, 1] of a row of mask words."""
    one = tl.zeros_like(words + column).to(tl.int64) + 1
    return tl.where(words == column // 64, one << (column % 64).to(tl.int64), 0)


@triton.jit(do_not_specialize=["k", "W", "M", "B", "level", "offset"])
def _grow(
        values, tokens, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens, pool_parents,
        next_tokens, next_positions,
        source,  # int32 [B*k] out: hidden row of each next node, -1: padding
        k, W, M, B, level, offset, FIRST: tl.constexpr, BP: tl.constexpr, KP: tl.constexpr, KKP: tl.constexpr,
        WP: tl.constexpr, POOL_TILE: tl.constexpr):
    b = tl.program_id(0)
    at = tl.arange(0, BP)
    live = (tl.load(active + at, at < B, other=0) != 0).to(tl.int32)
    rank = tl.sum(tl.where(at < b, live, 0), 0)
    total = tl.sum(live, 0)
    i = tl.arange(0, KP)
    words = tl.arange(0, WP)[None, :]
    column = (level * k + i)[:, None]
    is_live = tl.load(active + b) != 0
    if FIRST:
        tl.store(cu_nodes + b + 1, k * (rank + is_live.to(tl.int32)))
        if b == 0:
            tl.store(cu_nodes, 0)
    if is_live:
        row = k * rank
        position = tl.load(prefix_len + b) + level
        pool = b.to(tl.int64) * M
        if FIRST:
            for first in range(0, M, POOL_TILE):
                j = first + tl.arange(0, POOL_TILE)
                value = tl.load(values + rank * k + j, j < k, other=-float("inf"))
                tl.store(pool_scores + pool + j, tl.where(value == value, value, -float("inf")), j < M)
                tl.store(pool_tokens + pool + j, tl.load(tokens + rank * k + j, j < k, other=0), j < M)
                tl.store(pool_parents + pool + j, -1, j < M)
            score = tl.load(values + rank * k + i, i < k, other=0.0)
            score = tl.where(score == score, score, -float("inf"))
            choice = i
            token = tl.load(tokens + rank * k + i, i < k, other=0)
            parent = i * 0
            old = tl.zeros((KP, WP), tl.int64)
        else:
            c = tl.arange(0, KKP)
            inside = c < k * k
            sums = tl.load(scores + row + c // k, inside, other=0.0) + tl.load(values + row * k + c, inside, other=0.0)
            sums = tl.where(sums == sums, sums, -float("inf"))
            tl.store(pool_scores + pool + offset + c, sums, inside)
            tl.store(pool_tokens + pool + offset + c, tl.load(tokens + row * k + c, inside, other=0), inside)
            tl.store(pool_parents + pool + offset + c, tl.load(pool_index + row + c // k, inside, other=0), inside)
            keys = tl.where(inside, make_key(sums, c), NO_KEY)
            choice = tl.zeros((KP,), tl.int32)
            for n in range(0, k):
                best = (0xFFFFF - (tl.max(keys, 0) & 0xFFFFF)).to(tl.int32)
                choice = tl.where(i == n, best, choice)
                keys = tl.where(c == best, NO_KEY, keys)
            parent = choice // k
            score = tl.load(scores + row + parent, i < k, other=0.0) + tl.load(values + row * k + choice, i < k, other=0.0)
            score = tl.where(score == score, score, -float("inf"))
            token = tl.load(tokens + row * k + choice, i < k, other=0)
            old = tl.load(mask + (row + parent).to(tl.int64)[:, None] * W + words, (i < k)[:, None] & (words < W), other=0)
            tl.debug_barrier()  # the old beam was read; now it is replaced
        tl.store(scores + row + i, score, i < k)
        tl.store(pool_index + row + i, offset + choice, i < k)
        tl.store(mask + (row + i).to(tl.int64)[:, None] * W + words, old | _own_bit(words, column),
                 (i < k)[:, None] & (words < W))
        tl.store(next_tokens + row + i, token, i < k)
        tl.store(next_positions + row + i, tl.zeros((KP,), tl.int32) + position, i < k)
        tl.store(source + row + i, (rank if FIRST else row) + parent, i < k)
    else:
        row = k * (total + b - rank)  # padding rows, k for each inactive request
        tl.store(scores + row + i, 0.0, i < k)
        tl.store(pool_index + row + i, 0, i < k)
        tl.store(mask + (row + i).to(tl.int64)[:, None] * W + words, tl.zeros((KP, WP), tl.int64),
                 (i < k)[:, None] & (words < W))
        tl.store(next_tokens + row + i, 0, i < k)
        tl.store(next_positions + row + i, 0, i < k)
        tl.store(source + row + i, -1, i < k)


@triton.jit
def _copy_rows(rows, row_stride, source, out, H, TILE: tl.constexpr):
    """out[r] = rows[source[r]], or 0 where source is negative."""
    r = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    from_row = tl.load(source + r)
    x = tl.load(rows + from_row.to(tl.int64) * row_stride + at, (at < H) & (from_row >= 0), other=0)
    tl.store(out + r.to(tl.int64) * H + at, x, at < H)


def check_arguments(values, tokens, hidden, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
           pool_parents, next_tokens, next_positions, next_hidden, level) -> None:
    """The checks of csrc/tree/grow_tree.cpp, in their order."""
    t = lambda name, value, kinds, shape, free=False: check.tensor(_OP, name, value, kinds, shape, values, free)  # noqa: E731
    t("values", values, check.F32, (None, None))
    t("prefix_len", prefix_len, check.I32, (None,))
    batch, k = prefix_len.shape[0], values.shape[1]
    check.that(1 <= k <= check.MAX_BEAM, _OP, f"values must be 1..{check.MAX_BEAM} candidates wide; got "
               f"{check.describe(values)}. Fix: draft with k in that range.")
    check.that(0 <= level < check.MAX_NODES, _OP, f"level must be in 0..{check.MAX_NODES - 1}; got {level}. "
               "Fix: count draft levels from 0.")
    beam = batch * k
    rows = batch if level == 0 else beam
    t("values", values, check.F32, (rows, k))
    t("tokens", tokens, check.I32, (rows, k))
    t("hidden", hidden, (*check.FLOATS, "float64"), (rows, None), True)
    t("active", active, check.I32, (batch,))
    t("cu_nodes", cu_nodes, check.I32, (batch + 1,))
    t("scores", scores, check.F32, (beam,))
    t("pool_index", pool_index, check.I32, (beam,))
    t("mask", mask, check.I64, (beam, None))
    t("pool_scores", pool_scores, check.F32, (batch, None))
    pool, words, columns = pool_scores.shape[1], mask.shape[1], (level + 1) * k
    t("pool_tokens", pool_tokens, check.I32, (batch, pool))
    t("pool_parents", pool_parents, check.I32, (batch, pool))
    t("next_tokens", next_tokens, check.I32, (beam,))
    t("next_positions", next_positions, check.I32, (beam,))
    t("next_hidden", next_hidden, (check.dtype_name(hidden.dtype),), (beam, hidden.shape[1]))
    end = k + level * k * k
    check.that(pool >= end, _OP, f"pool_scores must be at least {end} entries wide at level {level} with k {k}; got {pool}. "
               "Fix: allocate k + (levels-1)*k*k entries per request.")
    check.that(words <= check.MAX_MASK_WORDS and 64 * words >= columns, _OP, f"mask must be {(columns + 63) // 64}.."
               f"{check.MAX_MASK_WORDS} words wide at level {level} with k {k}; got {words}. "
               "Fix: allocate ceil(levels*k/64) words per row.")
    check.that(beam == 0 or hidden.shape[1] == 0 or hidden.data_ptr() != next_hidden.data_ptr(), _OP,
               "next_hidden must be another buffer than hidden; got the same one. Fix: use two buffers in turn.")


def grow_tree(values: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, prefix_len: torch.Tensor,
              active: torch.Tensor, cu_nodes: torch.Tensor, scores: torch.Tensor, pool_index: torch.Tensor,
              mask: torch.Tensor, pool_scores: torch.Tensor, pool_tokens: torch.Tensor, pool_parents: torch.Tensor,
              next_tokens: torch.Tensor, next_positions: torch.Tensor, next_hidden: torch.Tensor, level: int) -> None:
    """The schema of csrc/ops.cpp."""
    check_arguments(values, tokens, hidden, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
           pool_parents, next_tokens, next_positions, next_hidden, level)
    batch, k = prefix_len.shape[0], values.shape[1]
    if batch == 0:
        if level == 0:
            cu_nodes.zero_()
        return
    pow2 = triton.next_power_of_2
    source = torch.empty(batch * k, dtype=torch.int32, device=values.device)
    offset = 0 if level == 0 else k + (level - 1) * k * k
    _grow[(batch,)](values, tokens, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
                    pool_parents, next_tokens, next_positions, source, k, mask.shape[1], pool_scores.shape[1], batch, level,
                    offset, FIRST=level == 0, BP=max(32, pow2(batch)), KP=pow2(k), KKP=pow2(k * k), WP=pow2(mask.shape[1]),
                    POOL_TILE=min(1024, pow2(pool_scores.shape[1])), num_warps=4, **EXACT)
    if hidden.shape[1]:
        as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[hidden.element_size()]
        tile = min(2048, pow2(hidden.shape[1]))
        _copy_rows[(batch * k, triton.cdiv(hidden.shape[1], tile))](
            hidden.view(as_int), hidden.stride(0), source, next_hidden.view(as_int), hidden.shape[1], TILE=tile, num_warps=4)
