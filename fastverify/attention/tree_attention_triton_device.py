"""Device functions of tree_attention_triton: the units of work, the loops over keys, the end of a row."""

import triton
import triton.language as tl


# ---- units of work, from device lengths; bounded whatever the tensors hold --------------------------------------------

@triton.jit
def request_shape(cu_nodes, prefix_len, rows, capacity, row_base, b, valid, WINDOW: tl.constexpr, NODES: tl.constexpr,
                  BLOCK_N: tl.constexpr):
    """(first row, nodes, prefix, first key, keys, tiles) of requests b, a scalar or a vector."""
    first = tl.minimum(tl.maximum(tl.load(cu_nodes + b, mask=valid, other=0), 0), rows)
    n = tl.minimum(tl.load(cu_nodes + b + 1, mask=valid, other=0), rows) - first
    n = tl.maximum(n, 0)
    prefix = tl.minimum(tl.maximum(tl.load(prefix_len + b, mask=valid, other=0), 0), capacity)
    start = prefix * 0
    if WINDOW > 0:  # nothing before it is seen, by the shallowest row either
        start = tl.maximum(prefix - WINDOW, 0) // BLOCK_N * BLOCK_N
    keys = tl.where(n > 0, prefix - start + row_base + n, 0)
    return first, n, prefix, start, keys, (n + NODES - 1) // NODES


@triton.jit
def split_count(keys, total, target, MIN_CHUNK: tl.constexpr):
    """Splits of a request's tiles: its share of `target`, rounded, as long as a split has MIN_CHUNK keys."""
    share = (keys.to(tl.int64) * target + total // 2) // total
    most = ((keys + MIN_CHUNK - 1) // MIN_CHUNK).to(tl.int64)
    return tl.maximum(tl.minimum(share, most), 1).to(tl.int32)


@triton.jit
def plan(cu_nodes, prefix_len, rows, batch, capacity, target, row_base, WINDOW: tl.constexpr, NODES: tl.constexpr,
         BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, MIN_CHUNK: tl.constexpr):
    """(b, end row, units) of every request, and the batch's keys times tiles."""
    b = tl.arange(0, BLOCK_B)
    first, n, prefix, start, keys, tiles = request_shape(cu_nodes, prefix_len, rows, capacity, row_base, b, b < batch,
                                                         WINDOW, NODES, BLOCK_N)
    total = tl.maximum(tl.sum(keys.to(tl.int64) * tiles, 0), 1)
    return b, tl.where(b < batch, first + n, rows), tiles * split_count(keys, total, target, MIN_CHUNK), total


# ---- keys -------------------------------------------------------------------------------------------------------------

@triton.jit
def count_bits(x):
    """Set bits of int64 words."""
    x = x.to(tl.uint64, bitcast=True)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def mask_word(mask, at, ok, word, words, columns):
    """Word `word` of mask rows `at`, without the bits of columns that do not exist."""
    bits = tl.load(mask + at + word, mask=ok & (word >= 0) & (word < words), other=0)
    left = columns - 64 * word
    keep = tl.where(left >= 64, -1, (tl.full([], 1, tl.int64) << tl.minimum(tl.maximum(left, 0), 63).to(tl.int64)) - 1)
    return bits & keep


@triton.jit
def visible_after(mask, at, ok, word, words, columns):
    """Visible columns of each row in the words after `word`."""
    count = tl.zeros_like(at).to(tl.int32)
    for w in range(word + 1, words):
        count += count_bits(mask_word(mask, at, ok, w, words, columns))
    return count


@triton.jit
def visible(pos, start, mask, at, ok, words, node, prefix, columns, row_base, edge, WINDOW: tl.constexpr,
            HAS_MASK: tl.constexpr):
    """[rows, keys]: does the row see the key at position pos; start = pos[0], at most 64 keys."""
    seen = (pos < prefix)[None, :]
    if WINDOW > 0:
        seen = seen & (pos[None, :] >= edge[:, None])
    column = pos - prefix
    if HAS_MASK:
        word = tl.maximum(start - prefix, 0) // 64
        low, high = mask_word(mask, at, ok, word, words, columns), mask_word(mask, at, ok, word + 1, words, columns)
        e = (column - 64 * word)[None, :]  # in 0..127 where it is a column
        half = tl.where(e < 64, tl.where(e < 32, low.to(tl.int32)[:, None], (low >> 32).to(tl.int32)[:, None]),
                        tl.where(e < 96, high.to(tl.int32)[:, None], (high >> 32).to(tl.int32)[:, None]))
        tree = ((half >> (e & 31)) & 1) != 0
        if WINDOW > 0:  # by depth: the visible columns after this one
            second = e >= 64
            bits = tl.where(second, high[:, None], low[:, None])
            rest = (bits.to(tl.uint64, bitcast=True) >> (e & 63).to(tl.uint64)) >> 1
            after_low = visible_after(mask, at, ok, word, words, columns)
            after_high = visible_after(mask, at, ok, word + 1, words, columns)
            after = count_bits(rest.to(tl.int64, bitcast=True)) + tl.where(second, after_high[:, None], after_low[:, None])
            tree = tree & (after < WINDOW)
        tree = tree & ((column >= 0) & (column < columns))[None, :]
    else:
        back = row_base + node[:, None] - column[None, :]
        tree = (back >= 0) & (column >= 0)[None, :]
        if WINDOW > 0:
            tree = tree & (back < WINDOW)
    return (seen | tree) & ok[:, None]


@triton.jit
def cell_offsets(pos, start, page_row, pages, table_columns, ok, page_stride, slot_stride, PAGE_SIZE: tl.constexpr,
                 BLOCK_N: tl.constexpr):
    """Element offsets of the cache rows at pos, whatever the page ids (bad ones: page 0), and which are backed."""
    if PAGE_SIZE % BLOCK_N == 0:  # one page
        page = tl.load(page_row + start // PAGE_SIZE, mask=start // PAGE_SIZE < table_columns, other=-1)
        backed = ok & (page >= 0) & (page < pages)
        page = tl.where((page >= 0) & (page < pages), page, 0).to(tl.int64)
        return page * page_stride + (pos % PAGE_SIZE).to(tl.int64) * slot_stride, backed
    index = pos // PAGE_SIZE
    page = tl.load(page_row + index, mask=ok & (index < table_columns), other=-1)
    backed = ok & (page >= 0) & (page < pages)
    page = tl.where(backed, page, 0).to(tl.int64)
    return page * page_stride + (pos % PAGE_SIZE).to(tl.int64) * slot_stride, backed


@triton.jit
def operand(x, query, DOT_F32: tl.constexpr, E4M3: tl.constexpr):
    """Cache elements as dot operands: exact. fp8 e4m3 arrives as bits (E4M3 2: the GPU converts them; 1: by hand, as
    float16, whose exponent bias is 15 for 7)."""
    if E4M3 == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif E4M3 == 1:
        bits = x.to(tl.uint16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)
    if DOT_F32:
        return x.to(tl.float32)
    else:
        return x.to(query.dtype)


@triton.jit
def scores(query, keys, factor, softcap, SOFTCAP: tl.constexpr, DOT_F32: tl.constexpr):
    """query [M, D] . keys [D, N] in base-2 logits."""
    if DOT_F32:
        s = tl.dot(query.to(tl.float32), keys, input_precision="ieee")
    else:
        s = tl.dot(query, keys)
    s = s * factor  # softcap: s / softcap, else s in base 2
    if SOFTCAP:
        t = tl.exp2(-2.8853900817779268 * tl.abs(s))  # exp(-2 |s|)
        s = (softcap * 1.4426950408889634) * tl.where(s < 0, t - 1, 1 - t) / (1 + t)
    return s


@triton.jit
def fold_step(acc, top, total, s, values, CLEAN: tl.constexpr, DOT_F32: tl.constexpr, BLOCK_N: tl.constexpr):
    """One step of the online softmax. CLEAN False: values may hold NaN or infinity that some rows do not see."""
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    keep = tl.exp2(top - safe)
    acc = acc * keep[:, None]
    total = total * keep + tl.sum(p, 1)
    if not CLEAN:  # a key that a row does not see is skipped, not multiplied by zero
        finite = tl.abs(values) < float("inf")
        odd = tl.where(finite, 0.0, values)
        if tl.max(tl.max(tl.where(finite, 0, 1), 1), 0) > 0:
            key = tl.arange(0, BLOCK_N)
            for j in tl.range(0, BLOCK_N, num_stages=1):
                weight = tl.sum(tl.where((key == j)[None, :], p, 0.0), 1)
                value = tl.sum(tl.where((key == j)[:, None], odd, 0.0).to(tl.float32), 0)
                acc += tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * value[None, :])
        values = tl.where(finite, values, 0.0)
    if DOT_F32:
        acc = tl.dot(p, values, acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(values.dtype), values, acc)
    return acc, new, total


@triton.jit
def attend_unit(q, k_cache, v_cache, mask, page_row, words, pages, table_columns, capacity, row_base, factor, softcap, q_row,
                q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, mask_row, head, tile, first, n, prefix, begin, end,
                WINDOW: tl.constexpr, HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, DOT_F32: tl.constexpr,
                E4M3: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, NODES: tl.constexpr, HEAD_DIM: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys [begin, end) for one tile of nodes: (acc, top, total, flat rows, rows that exist)."""
    r, j, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    node = tile * NODES + r // GROUP
    ok = (r < NODES * GROUP) & (node < n)
    row = (first + node).to(tl.int64)
    in_head = (dims < HEAD_DIM)[None, :]
    query = tl.load(q + row[:, None] * q_row + (head * GROUP + r % GROUP)[:, None] * q_head + dims[None, :],
                    mask=ok[:, None] & in_head, other=0.0)
    columns = row_base + n
    at = row * mask_row
    edge = tl.zeros([BLOCK_M], tl.int32)
    full_from, full_to = begin, prefix // BLOCK_N * BLOCK_N  # keys that every row sees
    if WINDOW > 0:
        if HAS_MASK:
            depth = visible_after(mask, at, ok, -1, words, columns) - 1
        else:
            depth = row_base + node
        edge = prefix + depth + 1 - WINDOW
        lowest = tl.min(tl.where(ok, edge, 2147483647), 0)
        begin = tl.maximum(begin, tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N)
        full_from = tl.maximum(begin, (tl.maximum(tl.max(tl.where(ok, edge, 0), 0), 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    if not HAS_MASK:
        end = tl.minimum(end, prefix + row_base + tl.minimum(n, (tile + 1) * NODES))
        full_to = (prefix + row_base + tile * NODES + 1) // BLOCK_N * BLOCK_N
    full_to = tl.minimum(full_to, tl.minimum(end, capacity) // BLOCK_N * BLOCK_N)
    full_from = tl.minimum(full_from, end)
    full_to = tl.maximum(full_to, full_from)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_base, v_base = k_cache + head * k_head, v_cache + head * v_head
    for start in range(full_from, full_to, BLOCK_N):
        pos = start + j
        offsets, backed = cell_offsets(pos, start, page_row, pages, table_columns, pos >= 0, k_page, k_slot, PAGE_SIZE, BLOCK_N)
        keys = tl.load(k_base + offsets[None, :] + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0)
        offsets, backed = cell_offsets(pos, start, page_row, pages, table_columns, pos >= 0, v_page, v_slot, PAGE_SIZE, BLOCK_N)
        values = tl.load(v_base + offsets[:, None] + dims[None, :], mask=in_head, other=0)
        s = scores(query, operand(keys, query, DOT_F32, E4M3), factor, softcap, SOFTCAP, DOT_F32)
        acc, top, total = fold_step(acc, top, total, s, operand(values, query, DOT_F32, E4M3), True, DOT_F32, BLOCK_N)
    masked = (full_from - begin + BLOCK_N - 1) // BLOCK_N  # steps before those, then the steps after them
    steps = masked + tl.maximum(end - full_to + BLOCK_N - 1, 0) // BLOCK_N
    for step in tl.range(0, steps, num_stages=1):
        start = tl.where(step < masked, begin + step * BLOCK_N, full_to + (step - masked) * BLOCK_N)
        pos = start + j
        offsets, backed = cell_offsets(pos, start, page_row, pages, table_columns, pos < end, k_page, k_slot, PAGE_SIZE, BLOCK_N)
        keys = tl.load(k_base + offsets[None, :] + dims[:, None], mask=backed[None, :] & (dims < HEAD_DIM)[:, None], other=0)
        offsets, backed = cell_offsets(pos, start, page_row, pages, table_columns, pos < end, v_page, v_slot, PAGE_SIZE, BLOCK_N)
        values = tl.load(v_base + offsets[:, None] + dims[None, :], mask=backed[:, None] & in_head, other=0)
        s = scores(query, operand(keys, query, DOT_F32, E4M3), factor, softcap, SOFTCAP, DOT_F32)
        seen = visible(pos, start, mask, at, ok, words, node, prefix, columns, row_base, edge, WINDOW, HAS_MASK)
        s = tl.where(seen & backed[None, :], s, float("-inf"))
        acc, top, total = fold_step(acc, top, total, s, operand(values, query, DOT_F32, E4M3), False, DOT_F32, BLOCK_N)
    return acc, top, total, row, ok
