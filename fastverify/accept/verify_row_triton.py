"""One row of logits in Triton, as in csrc/algo/sampling.h: request of a row, sampling parameters, processors, noise, keys."""

import triton
import triton.language as tl

from .._triton_numeric import MAX, gumbel, philox

BAD_KEY = tl.constexpr(1 << 20)  # bit of a stored key: a NaN or +inf was seen
BAD_TREE = tl.constexpr(4)
BAD_PARAM = tl.constexpr(128)


@triton.jit
def request_of_row(row, cu_nodes, R, B, BP: tl.constexpr):
    """The first request whose rows hold `row`, or B."""
    at = tl.arange(0, BP)
    low = tl.load(cu_nodes + at, at < B, other=0)
    high = tl.load(cu_nodes + at + 1, at < B, other=0)
    holds = (at < B) & (low >= 0) & (high <= R) & (high - low <= 1024) & (low <= row) & (row < high)
    return tl.min(tl.where(holds, at, B), 0)


@triton.jit
def resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE: tl.constexpr):
    """(temperature, top_k, top_p, min_p, flag): what is out of range is replaced and flagged."""
    t = tl.load(temperature + b)
    p = tl.load(top_p + b)
    m = tl.load(min_p + b)
    k = tl.load(top_k + b)
    ok_t = (t >= 0.0) & (t <= MAX)
    ok_p = (p >= 0.0) & (p <= 1.0)
    ok_m = (m >= 0.0) & (m <= 1.0)
    ok = ok_t & ok_p & ok_m
    if penalties is not None:
        ok = ok & penalties_ok(b, penalties)
    t = tl.where(ok_t, t, 0.0)
    if RULE == 0:
        t = t * 0.0
    k = tl.where((k <= 0) | (k >= V), 0, k)
    return t, k, tl.where(ok_p, p, 1.0), tl.where(ok_m, m, 0.0), tl.where(ok, 0, BAD_PARAM)


@triton.jit
def penalties_ok(b, penalties):
    r = tl.load(penalties + 3 * b)
    f = tl.load(penalties + 3 * b + 1)
    s = tl.load(penalties + 3 * b + 2)
    return (r > 0.0) & (r <= MAX) & (f >= -MAX) & (f <= MAX) & (s >= -MAX) & (s <= MAX)


@triton.jit
def seed_words(b, seed):
    s = tl.load(seed + b)
    return s.to(tl.uint32), (s >> 32).to(tl.uint32)


@triton.jit
def penalise(x, ids, inside, b, node, begin, tokens, parents, penalties, counts, V):
    """Repetition, frequency and presence penalties; the drafted tokens from `node` up count as emitted."""
    r = tl.load(penalties + 3 * b)
    f = tl.load(penalties + 3 * b + 1)
    s = tl.load(penalties + 3 * b + 2)
    r = tl.where((r > 0.0) & (r <= MAX), r, 1.0)
    f = tl.where((f >= -MAX) & (f <= MAX), f, 0.0)
    s = tl.where((s >= -MAX) & (s <= MAX), s, 0.0)
    count = tl.load(counts + b.to(tl.int64) * V + ids, inside, other=0)
    at = node
    while at > 0:  # a parent is below its child or the walk ends: at most `node` steps
        count += (ids == tl.load(tokens + begin + at)).to(tl.int32)
        up = tl.load(parents + begin + at)
        at = tl.where(up < at, up, -1)
    repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + r), x * r)
    return tl.where(count > 0, repeated - f * count.to(tl.float32) - s, x)


@triton.jit
def load_raw(logits, row, row_stride, ids, inside):
    return tl.load(logits + row.to(tl.int64) * row_stride + ids, inside, other=-float("inf"))


@triton.jit
def process_raw(raw, row, ids, inside, temperature, b, node, begin, tokens, parents, penalties, bias, bitmask, counts, V):
    """Logits `raw` of entries `ids`, -inf where not `inside` -> (z, -inf where excluded; bad: NaN or +inf)."""
    x = raw.to(tl.float32)
    if penalties is not None:
        x = penalise(x, ids, inside, b, node, begin, tokens, parents, penalties, counts, V)
    if bias is not None:
        x += tl.load(bias + b.to(tl.int64) * V + ids, inside, other=0.0)
    if bitmask is not None:
        words = (V + 31) // 32
        word = tl.load(bitmask + row.to(tl.int64) * words + (ids >> 5), inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, -float("inf"))
    good = x <= MAX
    x = tl.where(good, x, -float("inf"))
    z = x + 0.0
    if (temperature != 0.0) & (temperature != 1.0):
        q = tl.div_rn(x, tl.zeros_like(x) + temperature)
        q = tl.where(q > MAX, MAX, tl.where(q < -MAX, -MAX, q)) + 0.0
        z = tl.where(x < -MAX, -float("inf"), q)
    return z, good == 0


@triton.jit
def process(logits, row, row_stride, ids, inside, temperature, b, node, begin, tokens, parents, penalties, bias, bitmask,
            counts, V):
    raw = load_raw(logits, row, row_stride, ids, inside)
    return process_raw(raw, row, ids, inside, temperature, b, node, begin, tokens, parents, penalties, bias, bitmask, counts, V)


@triton.jit
def noise_bits(first_id, t, seed_lo, seed_hi, COUNT: tl.constexpr):
    """Random words of ids first_id .. first_id + COUNT - 1; first_id a multiple of 4."""
    group = (first_id // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    r0, r1, r2, r3 = philox(group, t.to(tl.uint32), seed_lo, seed_hi)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [COUNT])


@triton.jit
def noise_of_ids(ids, t, seed_lo, seed_hi):
    """Gumbel noise of single ids."""
    r0, r1, r2, r3 = philox((ids >> 2).to(tl.uint32), t.to(tl.uint32), seed_lo, seed_hi)
    word = ids & 3
    return gumbel(tl.where(word == 0, r0, tl.where(word == 1, r1, tl.where(word == 2, r2, r3))))
