"""First passes of verify_tree in Triton over all rows: best keys without filters, block maxima and masses with them."""

import triton
import triton.language as tl

from .._triton_numeric import MAX, MINUS_INF, NO_KEY, gumbel, make_key, mass, may_exceed, ordered, unordered
from .verify_row_triton import (BAD_KEY, load_raw, noise_bits, process, process_raw, request_of_row, resolve, seed_words)


MARKS = tl.constexpr(16)


@triton.jit
def mark(zmax, j):
    """Mark j below the maximum: 12 in 16 steps."""
    return zmax - (j + 1) * 0.75


@triton.jit
def depth_of(node, begin, parents):
    """Edges between a node and its root; parents are below their children or the walk ends."""
    depth = node * 0
    at = node
    while at > 0:
        depth += 1
        up = tl.load(parents + begin + at)
        at = tl.where(up < at, up, -1)
    return depth


@triton.jit(do_not_specialize=["R", "B", "GROUPS", "SPLITS", "span"])
def _scan(
        logits, row_stride, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed, penalties,
        bias, bitmask, counts,
        keys,    # int64 [R, SPLITS] out: best key of a split, bit 20: bad
        maxima,  # int32 [R, GROUPS] out, filtered rows only: ordered maximum of GROUP entries
        span, V, R, B, BP: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, GROUPS, SPLITS, TILE: tl.constexpr):
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = request_of_row(row, cu_nodes, R, B, BP)
    live = b < B
    if live:
        live = tl.load(active + b) != 0
    if live:
        begin = tl.load(cu_nodes + b)
        node = row - begin
        T, K, P, M, _flag = resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE)
        filtered = (T != 0.0) & ((K > 0) | (P < 1.0) | (M > 0.0))
        start = tl.multiple_of(split * span, TILE)
        last = tl.minimum(start + span, V)
        lane = tl.arange(0, TILE)
        key = tl.full((), NO_KEY, tl.int64)
        num_bad = tl.full((), 0, tl.int32)
        raw = load_raw(logits, row, row_stride, start + lane, start + lane < V)  # always one tile ahead
        if (T != 0.0) & (filtered == 0):
            t = tl.load(prefix_len + b) + 1 + depth_of(node, begin, parents)
            seed_lo, seed_hi = seed_words(b, seed)
            for first in range(start, last, TILE):
                ids = first + lane
                ahead = load_raw(logits, row, row_stride, ids + TILE, (ids + TILE < V) & (first + TILE < last))
                z, bad = process_raw(raw, row, ids, ids < V, T, b, node, begin, tokens, parents, penalties, bias, bitmask, counts,
                                     V)
                raw = ahead
                bits = noise_bits(first, t, seed_lo, seed_hi, TILE)
                score = tl.where(key == NO_KEY, -MAX, unordered((key >> 32).to(tl.int32)))
                hits = tl.sum(may_exceed(bits, score - z).to(tl.int32) + bad.to(tl.int32) * 65536, 0)
                num_bad += hits >> 16
                if (hits & 0xFFFF) > 0:  # logarithms only where an entry may still win
                    tile = tl.where(z > -float("inf"), make_key(z + gumbel(bits), ids), NO_KEY)
                    key = tl.maximum(key, tl.max(tile, 0))
        elif filtered:
            any_bad = tl.zeros((TILE,), tl.int32)
            for first in range(start, last, TILE):
                ids = first + lane
                ahead = load_raw(logits, row, row_stride, ids + TILE, (ids + TILE < V) & (first + TILE < last))
                z, bad = process_raw(raw, row, ids, ids < V, T, b, node, begin, tokens, parents, penalties, bias, bitmask, counts,
                                     V)
                raw = ahead
                any_bad |= bad.to(tl.int32)
                groups = tl.max(tl.reshape(ordered(z), [TILE // GROUP, GROUP]), 1)
                at = first // GROUP + tl.arange(0, TILE // GROUP)
                tl.store(maxima + row.to(tl.int64) * GROUPS + at, groups, at < GROUPS)
            num_bad += tl.sum(any_bad, 0)
        else:
            best = tl.full((TILE,), MINUS_INF, tl.int32)  # of a lane, and where it was first met
            best_at = tl.zeros((TILE,), tl.int32)
            any_bad = tl.zeros((TILE,), tl.int32)
            for first in range(start, last, TILE):
                ids = first + lane
                ahead = load_raw(logits, row, row_stride, ids + TILE, (ids + TILE < V) & (first + TILE < last))
                z, bad = process_raw(raw, row, ids, ids < V, T, b, node, begin, tokens, parents, penalties, bias, bitmask, counts,
                                     V)
                raw = ahead
                any_bad |= bad.to(tl.int32)
                order = ordered(z)
                best_at = tl.where(order > best, first, best_at)
                best = tl.maximum(best, order)
            num_bad += tl.sum(any_bad, 0)
            key = tl.max(tl.where(best > MINUS_INF, make_key(unordered(best), best_at + lane), NO_KEY), 0)
        key |= tl.where(num_bad != 0, BAD_KEY, 0).to(tl.int64)
        tl.store(keys + row.to(tl.int64) * SPLITS + split, key)


@triton.jit(do_not_specialize=["R", "B", "GROUPS", "SPLITS", "span"])
def _masses(
        logits, row_stride, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed, penalties,
        bias, bitmask, counts,
        maxima,  # int32 [R, GROUPS]
        masses,  # int64 [R, SPLITS] out: fixed-point mass of a split
        marks,   # int64 [R, SPLITS, MARKS] out: its mass of entries >= mark(zmax, j)
        span, V, R, B, BP: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, GROUPS, SPLITS, TILE: tl.constexpr,
        GROUPS_PADDED: tl.constexpr):
    """Masses of the rows whose request has top-p and no top-k, in all and down to each mark."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = request_of_row(row, cu_nodes, R, B, BP)
    live = b < B
    if live:
        T, K, P, M, _flag = resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE)
        live = (tl.load(active + b) != 0) & (T != 0.0) & (K == 0) & (P < 1.0)
        if live:
            begin = tl.load(cu_nodes + b)
            at = tl.arange(0, GROUPS_PADDED)
            top = tl.max(tl.load(maxima + row.to(tl.int64) * GROUPS + at, at < GROUPS, other=MINUS_INF), 0)
            zmax = unordered(top)
            total = tl.zeros((TILE,), tl.int64)
            mark_at = tl.arange(0, MARKS)
            marked = tl.zeros((MARKS,), tl.int64)
            last = tl.minimum((split + 1) * span, V)
            for first in range(tl.multiple_of(split * span, TILE), last, TILE):
                ids = first + tl.arange(0, TILE)
                z, _bad = process(logits, row, row_stride, ids, ids < V, T, b, row - begin, begin, tokens, parents, penalties,
                               bias, bitmask, counts, V)
                weight = tl.where(z > -float("inf"), mass(z, zmax), 0)
                total += weight
                for j in range(MARKS):
                    marked += tl.where(mark_at == j, tl.sum(tl.where(z >= mark(zmax, j), weight, 0), 0), 0)
            tl.store(marks + (row.to(tl.int64) * SPLITS + split) * MARKS + mark_at, marked)
            tl.store(masses + row.to(tl.int64) * SPLITS + split, tl.sum(total, 0))
