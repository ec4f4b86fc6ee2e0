"""csrc/algo/numeric.h and csrc/common/philox.h in Triton: the same float32 operations in the same order, so the same bits.

A kernel that uses them is launched with **EXACT (a * b + c stays two roundings); fused steps are written as fma().
"""

import os

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
# numpy, behind Triton's interpreter, rounds a * b + c twice: fma() then goes through float64 with rounding to odd
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"))
MINUS_INF = tl.constexpr(-2139095041)  # ordered(-inf)
NO_KEY = tl.constexpr(-9223372036854775808)
MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def fma(a, b, c):
    """a * b + c in one rounding."""
    if INTERPRETED:
        product = a.to(tl.float64) * (b + tl.zeros_like(a)).to(tl.float64)  # exact: 48 bits
        addend = (c + tl.zeros_like(a)).to(tl.float64)
        total = product + addend
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        bits = total.to(tl.int64, bitcast=True)
        # towards the exact value's odd neighbour: float64 is wide enough that float32 then rounds as if once
        inexact = (error != 0.0) & ((bits & 1) == 0)
        away = (error > 0.0) == (total > 0.0)
        bits = tl.where(inexact, tl.where(away, bits + 1, bits - 1), bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def ordered(x):
    """Order-preserving float32 -> int32 (no NaN; -0 sorts below +0)."""
    bits = float_bits(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(order):
    return bits_float(order ^ ((order >> 31) & 0x7FFFFFFF))


@triton.jit
def log_poly(f, e):
    """log(1 + f) + e * ln2."""
    z = f * f
    p = tl.zeros_like(f) + 7.0376836292e-2
    p = fma(p, f, -1.1514610310e-1)
    p = fma(p, f, 1.1676998740e-1)
    p = fma(p, f, -1.2420140846e-1)
    p = fma(p, f, 1.4249322787e-1)
    p = fma(p, f, -1.6668057665e-1)
    p = fma(p, f, 2.0000714765e-1)
    p = fma(p, f, -2.4999993993e-1)
    p = fma(p, f, 3.3333331174e-1)
    y = (f * z) * p
    y = fma(e, -2.12194440e-4, y)
    y = fma(z, -0.5, y)
    return fma(e, 0.693359375, f + y)


@triton.jit
def log_exact(x):
    """log of a normal x > 0."""
    u = float_bits(x)
    e = (u - 0x3F3504F3) >> 23
    return log_poly(bits_float(u - (e << 23)) - 1.0, e.to(tl.float32))


@triton.jit
def exp2_exact(t):
    """2^t for t <= 0, 0 below -126."""
    tc = tl.where(t < -126.0, -126.0, t)
    shifted = tc + 12582912.0
    f = tc - (shifted - 12582912.0)
    p = tl.zeros_like(f) + 1.535336188319500e-4
    p = fma(p, f, 1.339887440266574e-3)
    p = fma(p, f, 9.618437357674640e-3)
    p = fma(p, f, 5.550332471162809e-2)
    p = fma(p, f, 2.402264791363012e-1)
    p = fma(p, f, 6.931472028550421e-1)
    p = fma(p, f, 1.0)
    scale = bits_float((float_bits(shifted) - 0x4B400000 + 127) << 23)
    return tl.where(t < -126.0, 0.0, p * scale)


@triton.jit
def exp_below(z, zmax):
    """exp(z - zmax) for z <= zmax."""
    return exp2_exact((z - zmax) * 1.44269504088896340736)


@triton.jit
def mass(z, zmax):
    """exp(z - zmax) as fixed point, 1 = 2^43: int64 sums do not depend on their order."""
    return (exp_below(z, zmax) * 8796093022208.0).to(tl.int64)


@triton.jit
def log_mass(m):
    """log of a fixed-point mass, float32; -inf for 0."""
    lead = tl.zeros_like(m).to(tl.int32)
    rest = m
    for step in tl.static_range(6):
        shift = 32 >> step
        high = (rest >> shift) != 0
        lead += tl.where(high, shift, 0)
        rest = tl.where(high, rest >> shift, rest)
    drop = tl.where(lead > 23, lead - 23, 0)
    mantissa = (m >> drop.to(tl.int64)).to(tl.int32).to(tl.float32)
    value = log_exact(tl.where(m == 0, 1.0, mantissa)) + (drop - 43).to(tl.float32) * 0.69314718055994530942
    return tl.where(m == 0, -float("inf"), value)


@triton.jit
def philox(c0, t, key_lo, key_hi):
    """Philox-4x32-7 of the counters (c0, t, 0, 0); all uint32."""
    c1 = tl.zeros_like(c0) + t
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = key_lo
    k1 = key_hi
    for _ in tl.static_range(7):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = (k0.to(tl.int64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.int64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel(r):
    """A standard Gumbel variate from 32 random bits."""
    small = r < 0x4A000000
    x = (r.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((r ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    ub = float_bits(u)
    e = (ub - 0x3F3504F3) >> 23
    m = bits_float(ub - (e << 23)) - 1.0
    exponential = -log_poly(tl.where(small, -x, m), tl.where(small, 0.0, e.to(tl.float32)))
    return -log_exact(exponential)


@triton.jit
def may_exceed(r, gap):
    """False only if gumbel(r) <= gap, |gap| < 10^4 or so; a fifth of the cost of gumbel.

    -log x <= ln2 * (151 - bits(r >> 8) / 2^23), log2 being concave; 0.002 covers rounding.
    """
    bits = float_bits((r >> 8).to(tl.float32)).to(tl.float32)
    return bits < tl.fma(gap, -12102203.1615614, 104.667 * 12102203.1615614)


@triton.jit
def make_key(score, ids):
    """int64: the larger score first, then the lower id; ids below 2^20. Bits 20..31 are free."""
    return (ordered(score + 0.0).to(tl.int64) << 32) | (0xFFFFF - ids).to(tl.int64)
