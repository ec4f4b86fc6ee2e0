"""Rows of verify_tree in Triton that have filters: exact top-k, top-p and min-p cuts, and the winner."""

import triton
import triton.language as tl

from .._triton_numeric import (MAX, MINUS_INF, NO_KEY, exp_below, gumbel, log_exact, make_key, mass, may_exceed, ordered,
                               philox, unordered)
from .verify_row_triton import BAD_KEY, noise_of_ids, process, request_of_row, resolve, seed_words
from .verify_scan_triton import MARKS, depth_of, mark


@triton.jit
def as_unsigned(order):
    return order.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def as_ordered(u):
    return (u ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def largest_with_count(order, need, low, high, STEPS: tl.constexpr):
    """The largest o in [low, high] with at least `need` entries >= o, two bits a step; something <= low if there is none.
    STEPS < 16 leaves the low bits 0: something that is not above it."""
    u = as_unsigned(order)
    top = as_unsigned(high)
    differ = as_unsigned(low) ^ top
    prefix = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    for _step in range(STEPS):
        digit = (top & (3 * one)) // one  # above the first bit in which low and high differ
        if differ >= one:
            a = (u >= prefix + one).to(tl.int64)
            b = (u >= prefix + 2 * one).to(tl.int64)
            c = (u >= prefix + 3 * one).to(tl.int64)
            sums = tl.sum(a + (b << 20) + (c << 40), 0)
            digit = ((sums & 0xFFFFF) >= need).to(tl.uint32) + (((sums >> 20) & 0xFFFFF) >= need).to(tl.uint32)
            digit += ((sums >> 40) >= need).to(tl.uint32)
        prefix += digit * one
        one = one >> 2
    return as_ordered(prefix)


@triton.jit
def largest_with_mass(order, weight, need, low, high):
    """The largest o in [low, high] whose entries >= o weigh at least `need`; something <= low if there is none."""
    u = as_unsigned(order)
    top = as_unsigned(high)
    differ = as_unsigned(low) ^ top
    prefix = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 31, tl.uint32)
    for _step in range(32):
        bit = top & one
        if differ >= one:
            bit = tl.where(tl.sum(tl.where(u >= prefix + one, weight, 0), 0) >= need, one, 0)
        prefix += bit
        one = one >> 1
    return as_ordered(prefix)


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
        keys,       # int64 [R, SPLITS] in: keys of splits; out: the row's key at split 0
        maxima,     # int32 [R, GROUPS]
        masses,     # int64 [R, SPLITS]
        marks,      # int64 [R, SPLITS, MARKS]
        listed,     # int32 [R, GROUPS] scratch: groups that hold candidates
        found,      # int32 [R, CAP] scratch: candidates, ordered z
        found_ids,  # int32 [R, CAP] scratch
        V, R, B, BP: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, GROUPS, SPLITS, GROUPS_PADDED: tl.constexpr,
        SPLITS_PADDED: tl.constexpr, CAP: tl.constexpr, FEW: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    b = request_of_row(row, cu_nodes, R, B, BP)
    live = b < B
    if live:
        live = tl.load(active + b) != 0
    if live:
        T, K, P, M, _flag = resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE)
        splits = tl.arange(0, SPLITS_PADDED)
        scanned = tl.load(keys + row.to(tl.int64) * SPLITS + splits, splits < SPLITS, other=NO_KEY)
        best = tl.max(scanned & ~BAD_KEY, 0)
        bad_bit = tl.max(scanned & BAD_KEY, 0)
        if (T != 0.0) & ((K > 0) | (P < 1.0) | (M > 0.0)):
            at = tl.arange(0, GROUPS_PADDED)
            tops = tl.load(maxima + row.to(tl.int64) * GROUPS + at, at < GROUPS, other=MINUS_INF)
            top = tl.max(tops, 0)
            if top > MINUS_INF:
                total = tl.full((), 0, tl.int64)
                low = tl.full((), MINUS_INF, tl.int32)  # the cut of top-p without top-k lies in [low, high]
                high = top
                if (P < 1.0) & (K == 0):
                    total = tl.sum(tl.load(masses + row.to(tl.int64) * SPLITS + splits, splits < SPLITS, other=0), 0)
                    at_mark = (row.to(tl.int64) * SPLITS + splits)[:, None] * MARKS + tl.arange(0, MARKS)[None, :]
                    marked = tl.sum(tl.load(marks + at_mark, (splits < SPLITS)[:, None], other=0), 0)
                    j = tl.sum((marked < needed_mass(total, P)).to(tl.int32), 0)
                    zmax = unordered(top)
                    low = tl.where(j < MARKS, ordered(mark(zmax, j)), MINUS_INF)
                    high = tl.where(j > 0, ordered(mark(zmax, j - 1)) - 1, top)
                best = best_filtered(
                    logits, row, row_stride, T, K, P, M, total, low, high, tops, top, seed, prefix_len, b, cu_nodes, tokens,
                    parents, penalties, bias, bitmask, counts, listed + row.to(tl.int64) * GROUPS, found + row.to(tl.int64) * CAP,
                    found_ids + row.to(tl.int64) * CAP, V, GROUP, GROUPS, GROUPS_PADDED, CAP, FEW, BLOCKS)
        tl.debug_barrier()
        tl.store(keys + row.to(tl.int64) * SPLITS, best | bad_bit)


@triton.jit
def best_filtered(
        logits, row, row_stride, T, K, P, M, total, low, high, tops, top, seed, prefix_len, b, cu_nodes, tokens, parents,
        penalties, bias, bitmask, counts, listed, found, found_ids, V, GROUP: tl.constexpr, GROUPS, GROUPS_PADDED: tl.constexpr,
        CAP: tl.constexpr, FEW: tl.constexpr, BLOCKS: tl.constexpr):
    """The key of a row that has filters and a finite entry. tops int32 [GROUPS_PADDED]: maxima; top: their maximum."""
    zmax = unordered(top)
    begin = tl.load(cu_nodes + b)
    node = row - begin
    at = tl.arange(0, GROUPS_PADDED)
    # 1. a lower bound of the cut: of top-k, from one entry per group (k of a part are never above k of the whole)
    bound = low
    if K > 0:
        least = tl.min(tl.where(at < GROUPS, tops, top), 0)
        bound = tl.where(K <= GROUPS, largest_with_count(tops, K, least, top, 10), MINUS_INF)
    if (M > 0.0) & ((K == 0) | (P >= 1.0)):  # top-p weighs all that top-k keeps
        bound = tl.maximum(bound, min_p_bound(zmax, M))
    bound = tl.minimum(tl.maximum(bound, MINUS_INF + 1), top)  # excluded entries are no candidates
    # 2. the groups that reach it, then their entries
    reach = tops >= bound
    num_groups = tl.sum(reach.to(tl.int32), 0)
    tl.store(listed + tl.cumsum(reach.to(tl.int32), 0) - 1, at, reach)
    tl.debug_barrier()
    num_found = tl.full((), 0, tl.int32)
    chunk = tl.full((), 0, tl.int32)
    while (chunk < num_groups) & (num_found <= CAP):
        ids, z = listed_entries(logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                                counts, listed, chunk, num_groups, V, GROUP, BLOCKS)
        order = ordered(z)
        take = order >= bound
        place = num_found + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(found + place, order, take & (place < CAP))
        tl.store(found_ids + place, ids, take & (place < CAP))
        num_found += tl.sum(take.to(tl.int32), 0)
        chunk += BLOCKS
    tl.debug_barrier()
    # 3. exact cuts and the winner
    t = tl.load(prefix_len + b) + 1 + depth_of(node, begin, parents)
    seed_lo, seed_hi = seed_words(b, seed)
    best = tl.full((), NO_KEY, tl.int64)
    if num_found <= FEW:
        best = best_of_few(K, P, M, total, zmax, t, seed_lo, seed_hi, found, found_ids, num_found, FEW)
    elif num_found <= CAP:
        place = tl.arange(0, CAP)
        order = tl.load(found + place, place < num_found, other=MINUS_INF)
        ids = tl.load(found_ids + place, place < num_found, other=0)
        z = unordered(order)
        cut = tl.full((), MINUS_INF, tl.int32)
        if K > 0:
            cut = largest_with_count(order, K, bound, top, 16)
        if P < 1.0:
            weight = tl.where((order > MINUS_INF) & (order >= cut), mass(z, zmax), 0)
            if K > 0:
                total = tl.sum(weight, 0)
            cut = tl.maximum(cut, largest_with_mass(order, weight, needed_mass(total, P), tl.maximum(bound, cut), top))
        keep = (order > MINUS_INF) & (order >= cut)
        if M > 0.0:
            keep = keep & (exp_below(z, zmax) >= M)
        best = tl.max(tl.where(keep, make_key(z + noise_of_ids(ids, t, seed_lo, seed_hi), ids), NO_KEY), 0)
    else:
        best = best_of_many(
            logits, row, row_stride, T, K, P, M, total, zmax, bound, high, top, num_found, t, seed_lo, seed_hi, b, node, begin, tokens,
            parents, penalties, bias, bitmask, counts, listed, num_groups, found, V, GROUP, CAP, BLOCKS)
    return best


@triton.jit
def best_of_few(K, P, M, total, zmax, t, seed_lo, seed_hi, found, found_ids, num_found, FEW: tl.constexpr):
    """The winner of at most FEW candidates: every one against every other, no search for cuts."""
    place = tl.arange(0, FEW)
    inside = place < num_found
    order = tl.load(found + place, inside, other=MINUS_INF)
    ids = tl.load(found_ids + place, inside, other=0)
    z = unordered(order)
    higher = tl.zeros((FEW,), tl.int32)  # entries above this one: count and mass
    above = tl.zeros((FEW,), tl.int64)
    for first in range(0, num_found, 16):
        at = first + tl.arange(0, 16)
        other = tl.load(found + at, at < num_found, other=MINUS_INF)
        weight = tl.where(other > MINUS_INF, mass(unordered(other), zmax), 0)
        greater = other[None, :] > order[:, None]
        higher += tl.sum(greater.to(tl.int32), 1)
        above += tl.sum(tl.where(greater, weight[None, :], 0), 1)
    keep = inside & ((K == 0) | (higher < K))
    if P < 1.0:
        if K > 0:
            total = tl.sum(tl.where(keep, mass(z, zmax), 0), 0)
        keep = keep & (above < needed_mass(total, P))
    if M > 0.0:
        keep = keep & (exp_below(tl.where(keep, z, zmax), zmax) >= M)
    return tl.max(tl.where(keep, make_key(z + noise_of_ids(ids, t, seed_lo, seed_hi), ids), NO_KEY), 0)


@triton.jit
def listed_entries(
        logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask, counts, listed, chunk, num_groups,
        V, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Entries of listed groups chunk .. chunk + BLOCKS - 1, flat: (vocabulary ids, z; -inf where there is none)."""
    lane = tl.arange(0, BLOCKS * GROUP)
    at = chunk + lane // GROUP
    group = tl.load(listed + at, at < num_groups, other=0)
    ids = tl.max_contiguous(tl.multiple_of(group * GROUP + lane % GROUP, 8), 8)  # so that loads are wide
    z, _bad = process(logits, row, row_stride, ids, ids < V, T, b, node, begin, tokens, parents, penalties, bias, bitmask, counts,
                      V)
    return ids, tl.where(at < num_groups, z, -float("inf"))


@triton.jit
def listed_noise_bits(listed, chunk, num_groups, t, seed_lo, seed_hi, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Random words of the same entries: four ids share a call of philox."""
    lane = tl.arange(0, BLOCKS * GROUP // 4)
    at = chunk + lane // (GROUP // 4)
    fours = tl.load(listed + at, at < num_groups, other=0) * (GROUP // 4) + lane % (GROUP // 4)
    r0, r1, r2, r3 = philox(fours.to(tl.uint32), t.to(tl.uint32), seed_lo, seed_hi)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCKS * GROUP])


@triton.jit
def weights(order, zmax, by_count, low):
    """1 or the mass of every entry >= low; 0 below."""
    finite = order > MINUS_INF
    weight = tl.where(by_count, 1, mass(tl.where(finite, unordered(order), zmax), zmax))
    return tl.where(finite & (order >= low), weight, 0)


@triton.jit
def best_of_many(
        logits, row, row_stride, T, K, P, M, total, zmax, bound, high, top, num_found, t, seed_lo, seed_hi, b, node, begin, tokens,
        parents, penalties, bias, bitmask, counts, listed, num_groups, found, V, GROUP: tl.constexpr, CAP: tl.constexpr,
        BLOCKS: tl.constexpr):
    """More candidates than the scratch holds: passes over the listed groups narrow the cut, two bits each, until the entries
    that may be the cut fit; then as before. Slow, exact."""
    cut = tl.full((), MINUS_INF, tl.int32)
    for stage in range(2):  # top-k by counts, then top-p by masses of what top-k keeps
        by_count = (K * 0 + stage) == 0
        if (by_count & (K > 0)) | ((by_count == 0) & (P < 1.0)):
            low = tl.maximum(bound, cut)
            last = tl.maximum(low, tl.where(K > 0, top, high))  # the cut lies in [low, last]
            if (by_count == 0) & (K > 0):
                total = tl.full((), 0, tl.int64)
                for chunk in range(0, num_groups, BLOCKS):
                    ids, z = listed_entries(logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                                            counts, listed, chunk, num_groups, V, GROUP, BLOCKS)
                    total += tl.sum(weights(ordered(z), zmax, by_count, low), 0)
            need = tl.where(by_count, K.to(tl.int64), needed_mass(total, P))
            differ = as_unsigned(low) ^ as_unsigned(last)
            one = tl.full((), 1 << 30, tl.uint32)
            while (differ < one) & (one > 1):
                one = one >> 2
            # now in [prefix, prefix + 4 * one); 4 * one wraps to 0 for the whole range: prefix 0
            prefix = as_unsigned(last) & ((4 * one - 1) ^ 0xFFFFFFFF)
            inner = num_found  # entries in that range, or more
            while (inner > CAP) & (one > 0):
                sums = tl.zeros((BLOCKS * GROUP,), tl.int64)
                one_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                two_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                three_sum = tl.zeros((BLOCKS * GROUP,), tl.int64)
                for chunk in range(0, num_groups, BLOCKS):
                    ids, z = listed_entries(logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                                            counts, listed, chunk, num_groups, V, GROUP, BLOCKS)
                    order = ordered(z)
                    weight = weights(order, zmax, by_count, low)
                    u = as_unsigned(order)
                    offset = (u - prefix) // one
                    within = (u >= prefix) & (offset < 4) & (weight > 0)
                    sums += tl.where(within, tl.full((), 1, tl.int64) << (offset.to(tl.int64) * 16), 0)
                    one_sum += tl.where(u >= prefix + one, weight, 0)
                    two_sum += tl.where(u >= prefix + 2 * one, weight, 0)
                    three_sum += tl.where(u >= prefix + 3 * one, weight, 0)
                w1 = tl.sum(one_sum, 0)
                w2 = tl.sum(two_sum, 0)
                w3 = tl.sum(three_sum, 0)
                digit = (w1 >= need).to(tl.int32) + (w2 >= need).to(tl.int32) + (w3 >= need).to(tl.int32)
                inner = tl.sum(((sums >> (digit.to(tl.int64) * 16)) & 0xFFFF).to(tl.int32), 0)
                prefix += digit.to(tl.uint32) * one
                one = one >> 2
            if one == 0:  # one value left, CAP times or more
                cut = tl.maximum(cut, as_ordered(prefix))
            else:
                num_inner = tl.full((), 0, tl.int32)
                above = tl.zeros((BLOCKS * GROUP,), tl.int64)  # weight beyond the range
                tl.debug_barrier()
                for chunk in range(0, num_groups, BLOCKS):
                    ids, z = listed_entries(logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                                            counts, listed, chunk, num_groups, V, GROUP, BLOCKS)
                    order = ordered(z)
                    u = as_unsigned(order)
                    weight = weights(order, zmax, by_count, low)
                    within = (u - prefix) // one < 4
                    above += tl.where((u >= prefix) & (within == 0), weight, 0)
                    take = (u >= prefix) & within & (weight > 0)
                    place = num_inner + tl.cumsum(take.to(tl.int32), 0) - 1
                    tl.store(found + place, order, take & (place < CAP))
                    num_inner += tl.sum(take.to(tl.int32), 0)
                tl.debug_barrier()
                place = tl.arange(0, CAP)
                order = tl.load(found + place, place < num_inner, other=MINUS_INF)
                weight = weights(order, zmax, by_count, low)
                end = as_ordered(prefix + (4 * one - 1))
                cut = tl.maximum(cut, largest_with_mass(order, weight, need - tl.sum(above, 0), as_ordered(prefix), end))
    best = tl.full((), NO_KEY, tl.int64)
    for chunk in range(0, num_groups, BLOCKS):
        ids, z = listed_entries(logits, row, row_stride, T, b, node, begin, tokens, parents, penalties, bias, bitmask,
                                counts, listed, chunk, num_groups, V, GROUP, BLOCKS)
        order = ordered(z)
        keep = (order > MINUS_INF) & (order >= cut)
        if M > 0.0:
            keep = keep & (exp_below(tl.where(keep, z, zmax), zmax) >= M)
        bits = listed_noise_bits(listed, chunk, num_groups, t, seed_lo, seed_hi, GROUP, BLOCKS)
        score = tl.where(best == NO_KEY, -MAX, unordered((best >> 32).to(tl.int32)))
        if tl.max((keep & may_exceed(bits, score - z)).to(tl.int32), 0) > 0:
            key = make_key(z + gumbel(bits), ids)
            best = tl.maximum(best, tl.max(tl.where(keep, key, NO_KEY), 0))
    return best
