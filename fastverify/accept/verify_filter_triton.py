"""Rows of verify_tree in Triton: the best key of every row, under exact top-k, top-p and min-p cuts."""

import triton
import triton.language as tl

from .._triton_numeric import MINUS_INF, NO_KEY, exp_below, log_exact, make_key, mass, ordered, unordered
from .verify_row_triton import (BAD_KEY, best_sampled, noise_of_ids, process, request_of_row, resolve, seed_words)


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
        seed_lo, seed_hi = seed_words(b, seed)
        t = tl.load(prefix_len + b) + 1
        if (T != 0.0) & (filtered == 0):
            t += depth_of(node, begin, parents)
        best = tl.full((), NO_KEY, tl.int64)
        any_bad = tl.zeros((TILE,), tl.int32)
        last = tl.minimum((split + 1) * span, V)
        for first in range(split * span, last, TILE):
            ids = first + tl.arange(0, TILE)
            z, bad = process(logits, row, row_stride, ids, ids < last, T, b, node, begin, tokens, parents, penalties, bias,
                             bitmask, counts, V)
            any_bad |= bad.to(tl.int32)
            if filtered:
                groups = tl.max(tl.reshape(ordered(z), [TILE // GROUP, GROUP]), 1)
                at = first // GROUP + tl.arange(0, TILE // GROUP)
                tl.store(maxima + row.to(tl.int64) * GROUPS + at, groups, at < GROUPS)
            elif T == 0.0:
                key = tl.where(z > -float("inf"), make_key(z, ids), NO_KEY)
                best = tl.maximum(best, tl.max(key, 0))
            else:
                best = best_sampled(best, z, first, ids, t, seed_lo, seed_hi, TILE)
        best |= tl.where(tl.max(any_bad, 0) != 0, BAD_KEY, 0).to(tl.int64)
        tl.store(keys + row.to(tl.int64) * SPLITS + split, best)


@triton.jit(do_not_specialize=["R", "B", "GROUPS", "SPLITS", "span"])
def _masses(
        logits, row_stride, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed, penalties,
        bias, bitmask, counts,
        maxima,  # int32 [R, GROUPS]
        masses,  # int64 [R, SPLITS] out: fixed-point mass of a split
        span, V, R, B, BP: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, GROUPS, SPLITS, TILE: tl.constexpr,
        GROUPS_PADDED: tl.constexpr):
    """Total masses of the rows whose request has top-p and no top-k."""
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
            last = tl.minimum((split + 1) * span, V)
            for first in range(split * span, last, TILE):
                ids = first + tl.arange(0, TILE)
                z, _bad = process(logits, row, row_stride, ids, ids < last, T, b, row - begin, begin, tokens, parents, penalties,
                               bias, bitmask, counts, V)
                total += tl.where(z > -float("inf"), mass(z, zmax), 0)
            tl.store(masses + row.to(tl.int64) * SPLITS + split, tl.sum(total, 0))


@triton.jit
def largest_with_count(order, need):
    """The largest value o with at least `need` entries >= o, or MINUS_INF; two bits a step. order int32 [n]."""
    u = order.to(tl.uint32, bitcast=True) ^ 0x80000000
    prefix = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    for _step in range(16):
        a = (u >= prefix + one).to(tl.int64)
        b = (u >= prefix + 2 * one).to(tl.int64)
        c = (u >= prefix + 3 * one).to(tl.int64)
        sums = tl.sum(a + (b << 20) + (c << 40), 0)
        digit = ((sums & 0xFFFFF) >= need).to(tl.uint32) + (((sums >> 20) & 0xFFFFF) >= need).to(tl.uint32)
        digit += ((sums >> 40) >= need).to(tl.uint32)
        prefix += digit * one
        one = one >> 2
    found = (prefix ^ 0x80000000).to(tl.int32, bitcast=True)
    return tl.maximum(found, MINUS_INF)


@triton.jit
def largest_with_mass(order, weight, need):
    """The largest value o whose entries >= o weigh at least `need`, or MINUS_INF. weight int64 [n]."""
    u = order.to(tl.uint32, bitcast=True) ^ 0x80000000
    prefix = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    for _step in range(16):
        a = tl.sum(tl.where(u >= prefix + one, weight, 0), 0)
        b = tl.sum(tl.where(u >= prefix + 2 * one, weight, 0), 0)
        c = tl.sum(tl.where(u >= prefix + 3 * one, weight, 0), 0)
        prefix += ((a >= need).to(tl.uint32) + (b >= need).to(tl.uint32) + (c >= need).to(tl.uint32)) * one
        one = one >> 2
    found = (prefix ^ 0x80000000).to(tl.int32, bitcast=True)
    return tl.maximum(found, MINUS_INF)


@triton.jit
def needed_mass(total, P):
    """floor(P * total) on a 2^-24 grid of P, at least 1."""
    p24 = (P * 16777216.0).to(tl.int64)
    need = (total >> 24) * p24 + (((total & 0xFFFFFF) * p24) >> 24)
    return tl.maximum(need, 1)


@triton.jit
def min_p_bound(zmax, M):
    """An ordered value below every entry that min-p keeps."""
    bound = ordered(zmax + log_exact(tl.maximum(M, 1e-30)) - 1.0)
    return tl.where(M > 1e-30, bound, MINUS_INF)


@triton.jit(do_not_specialize=["R", "B", "GROUPS", "SPLITS"])
def _filter(
        logits, row_stride, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed, penalties,
        bias, bitmask, counts,
        keys,       # int64 [R, SPLITS] in: bad bits; out: the row's key at split 0
        maxima,     # int32 [R, GROUPS]
        masses,     # int64 [R, SPLITS]
        listed,     # int32 [R, GROUPS] scratch: groups that hold candidates
        found,      # int32 [R, CAP] scratch: candidates, ordered z
        found_ids,  # int32 [R, CAP] scratch
        V, R, B, BP: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, GROUPS, SPLITS, GROUPS_PADDED: tl.constexpr,
        SPLITS_PADDED: tl.constexpr, CAP: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    b = request_of_row(row, cu_nodes, R, B, BP)
    live = b < B
    if live:
        T, K, P, M, _flag = resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE)
        live = (tl.load(active + b) != 0) & (T != 0.0) & ((K > 0) | (P < 1.0) | (M > 0.0))
        row_groups = row.to(tl.int64) * GROUPS
        at = tl.arange(0, GROUPS_PADDED)
        tops = tl.load(maxima + row_groups + at, (at < GROUPS) & live, other=MINUS_INF)
        top = tl.max(tops, 0)
        if live & (top > MINUS_INF):
            zmax = unordered(top)
            begin = tl.load(cu_nodes + b)
            node = row - begin
            splits = tl.arange(0, SPLITS_PADDED)
            total = tl.full((), 0, tl.int64)
            # 1. a lower bound of the cut, from one entry per group: the cut of a part is never above the whole's
            bound = tl.full((), MINUS_INF, tl.int32)
            if K > 0:
                bound = largest_with_count(tops, K)
            elif P < 1.0:
                total = tl.sum(tl.load(masses + row.to(tl.int64) * SPLITS + splits, splits < SPLITS, other=0), 0)
                weight = tl.where(tops > MINUS_INF, mass(unordered(tops), zmax), 0)
                bound = largest_with_mass(tops, weight, needed_mass(total, P))
            if M > 0.0:
                bound = tl.maximum(bound, min_p_bound(zmax, M))
            bound = tl.maximum(bound, MINUS_INF + 1)  # excluded entries are no candidates
            # 2. the groups that reach it, then their entries
            reach = tops >= bound
            num_groups = tl.sum(reach.to(tl.int32), 0)
            tl.store(listed + row_groups + tl.cumsum(reach.to(tl.int32), 0) - 1, at, reach)
            tl.debug_barrier()
            num_found = tl.full((), 0, tl.int32)
            row_found = row.to(tl.int64) * CAP
            for chunk in range(0, num_groups, BLOCKS):
                ids, inside = listed_ids(listed + row_groups, chunk, num_groups, V, GROUP, BLOCKS)
                z, _bad = process(logits, row, row_stride, ids, inside, T, b, node, begin, tokens, parents, penalties, bias,
                               bitmask, counts, V)
                order = ordered(z)
                take = order >= bound
                place = num_found + tl.cumsum(take.to(tl.int32), 0) - 1
                tl.store(found + row_found + place, order, take & (place < CAP))
                tl.store(found_ids + row_found + place, ids, take & (place < CAP))
                num_found += tl.sum(take.to(tl.int32), 0)
            tl.debug_barrier()
            # 3. exact cuts and the winner
            t = tl.load(prefix_len + b) + 1 + depth_of(node, begin, parents)
            seed_lo, seed_hi = seed_words(b, seed)
            best = tl.full((), NO_KEY, tl.int64)
            if num_found <= CAP:
                place = tl.arange(0, CAP)
                order = tl.load(found + row_found + place, place < num_found, other=MINUS_INF)
                ids = tl.load(found_ids + row_found + place, place < num_found, other=0)
                z = unordered(order)
                cut = tl.full((), MINUS_INF, tl.int32)
                if K > 0:
                    cut = largest_with_count(order, K)
                if P < 1.0:
                    weight = tl.where((order > MINUS_INF) & (order >= cut), mass(z, zmax), 0)
                    if K > 0:
                        total = tl.sum(weight, 0)
                    cut = tl.maximum(cut, largest_with_mass(order, weight, needed_mass(total, P)))
                keep = (order > MINUS_INF) & (order >= cut)
                if M > 0.0:
                    keep = keep & (exp_below(z, zmax) >= M)
                best = tl.max(tl.where(keep, make_key(z + noise_of_ids(ids, t, seed_lo, seed_hi), ids), NO_KEY), 0)
            else:
                best = best_of_many(
                    logits, row, row_stride, T, K, P, M, total, zmax, t, seed_lo, seed_hi, b, node, begin, tokens, parents,
                    penalties, bias, bitmask, counts, listed + row_groups, num_groups, V, GROUP, BLOCKS)
            bad = tl.load(keys + row.to(tl.int64) * SPLITS + splits, splits < SPLITS, other=0) & BAD_KEY
            tl.debug_barrier()
            tl.store(keys + row.to(tl.int64) * SPLITS, best | tl.max(bad, 0))


@triton.jit
def listed_ids(listed, chunk, num_groups, V, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Vocabulary ids of listed groups chunk .. chunk + BLOCKS - 1, flat, and which of them exist."""
    lane = tl.arange(0, BLOCKS * GROUP)
    at = chunk + lane // GROUP
    group = tl.load(listed + at, at < num_groups, other=0)
    ids = group * GROUP + lane % GROUP
    return ids, (at < num_groups) & (ids < V)


@triton.jit
def best_of_many(
        logits, row, row_stride, T, K, P, M, total, zmax, t, seed_lo, seed_hi, b, node, begin, tokens, parents, penalties,
        bias, bitmask, counts, listed, num_groups, V, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """More candidates than fit the scratch: the cuts two bits a pass over the listed groups, then the winner. Slow, exact."""
    cut = tl.full((), MINUS_INF, tl.int32)
    for stage in range(2):  # top-k by counts, then top-p by masses of what top-k keeps
        by_count = stage == 0
        if (by_count & (K > 0)) | ((stage == 1) & (P < 1.0)):
            if (stage == 1) & (K > 0):
                total = tl.full((), 0, tl.int64)
                for chunk in range(0, num_groups, BLOCKS):
                    ids, inside = listed_ids(listed, chunk, num_groups, V, GROUP, BLOCKS)
                    z, _bad = process(logits, row, row_stride, ids, inside, T, b, node, begin, tokens, parents, penalties, bias,
                                   bitmask, counts, V)
                    total += tl.sum(tl.where((z > -float("inf")) & (ordered(z) >= cut), mass(z, zmax), 0), 0)
            need = tl.where(by_count, K.to(tl.int64), needed_mass(total, P))
            prefix = tl.full((), 0, tl.uint32)
            one = tl.full((), 1 << 30, tl.uint32)
            for _step in range(16):
                one_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                two_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                three_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                for chunk in range(0, num_groups, BLOCKS):
                    ids, inside = listed_ids(listed, chunk, num_groups, V, GROUP, BLOCKS)
                    z, _bad = process(logits, row, row_stride, ids, inside, T, b, node, begin, tokens, parents, penalties, bias,
                                   bitmask, counts, V)
                    order = ordered(z)
                    weight = tl.where(by_count, 1, mass(tl.where(z > -float("inf"), z, zmax), zmax))
                    weight = tl.where((order > MINUS_INF) & (order >= cut), weight, 0)
                    u = order.to(tl.uint32, bitcast=True) ^ 0x80000000
                    one_sum += tl.where(u >= prefix + one, weight, 0)
                    two_sum += tl.where(u >= prefix + 2 * one, weight, 0)
                    three_sum += tl.where(u >= prefix + 3 * one, weight, 0)
                digit = (tl.sum(one_sum, 0) >= need).to(tl.uint32) + (tl.sum(two_sum, 0) >= need).to(tl.uint32)
                prefix += (digit + (tl.sum(three_sum, 0) >= need).to(tl.uint32)) * one
                one = one >> 2
            cut = tl.maximum(cut, (prefix ^ 0x80000000).to(tl.int32, bitcast=True))
    best = tl.full((), NO_KEY, tl.int64)
    for chunk in range(0, num_groups, BLOCKS):
        ids, inside = listed_ids(listed, chunk, num_groups, V, GROUP, BLOCKS)
        z, _bad = process(logits, row, row_stride, ids, inside, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                       counts, V)
        order = ordered(z)
        keep = (order > MINUS_INF) & (order >= cut)
        if M > 0.0:
            keep = keep & (exp_below(tl.where(keep, z, zmax), zmax) >= M)
        key = make_key(z + noise_of_ids(ids, t, seed_lo, seed_hi), ids)
        best = tl.maximum(best, tl.max(tl.where(keep, key, NO_KEY), 0))
    return best
