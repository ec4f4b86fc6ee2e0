// SPDX-License-Identifier: Apache-2.0
// Exact float32 arithmetic of our own: log, log1p(-x), exp2 and fixed-point masses.
// Every step is one IEEE operation or an explicit fmaf, so host (any vector width) and device give the same bits.
// Compile with -ffp-contract=off / --fmad=false and without fast-math.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/types.h"

namespace fv {

FV_HD float bits_to_float(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float f;
    std::memcpy(&f, &u, 4);
    return f;
#endif
}

FV_HD uint32_t float_to_bits(float f) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
#endif
}

FV_HD float fma_exact(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// Order-preserving map float -> uint32 (-inf lowest); NaN must be excluded by the caller. -0 maps below +0,
// so callers add 0.0f first where the two must be equal.
FV_HD uint32_t ordered_bits(float f) {
    const uint32_t u = float_to_bits(f);
    return u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
}
FV_HD float from_ordered_bits(uint32_t o) {
    return bits_to_float(o ^ ((o & 0x80000000u) ? 0x80000000u : 0xffffffffu));
}

// log(1 + f) + e*ln2 for f in [sqrt(1/2)-1, sqrt(2)-1]; the minimax polynomial of Cephes logf (S. Moshier),
// relative error < 2^-23 (also for tiny f with e = 0).
FV_HD float log_poly(float f, float e) {
    const float z = f * f;
    float p = 7.0376836292e-2f;
    p = fma_exact(p, f, -1.1514610310e-1f);
    p = fma_exact(p, f, 1.1676998740e-1f);
    p = fma_exact(p, f, -1.2420140846e-1f);
    p = fma_exact(p, f, 1.4249322787e-1f);
    p = fma_exact(p, f, -1.6668057665e-1f);
    p = fma_exact(p, f, 2.0000714765e-1f);
    p = fma_exact(p, f, -2.4999993993e-1f);
    p = fma_exact(p, f, 3.3333331174e-1f);
    float y = (f * z) * p;
    y = fma_exact(e, -2.12194440e-4f, y);
    y = fma_exact(-0.5f, z, y);
    return fma_exact(e, 0.693359375f, f + y);
}

// log(x) for normal x > 0.
FV_HD float log_exact(float x) {
    const uint32_t u = float_to_bits(x);
    // subtracting the bits of sqrt(1/2) puts the mantissa in [sqrt(1/2), sqrt(2))
    const int32_t e = static_cast<int32_t>(u - 0x3f3504f3u) >> 23;
    const float m = bits_to_float(u - (static_cast<uint32_t>(e) << 23));
    return log_poly(m - 1.0f, static_cast<float>(e));
}

constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer (ties to even)

// 2^t = p * 2^k: round-to-nearest split t = k + f, degree-6 polynomial on [-1/2, 1/2], error < 2^-23. Returns p;
// *shifted holds k in its low bits (as a float, kRoundMagic + k).
FV_HD float exp2_split(float t, float* shifted) {
    *shifted = t + kRoundMagic;
    const float n = *shifted - kRoundMagic;
    const float f = t - n;
    float p = 1.535336188319500e-4f;
    p = fma_exact(p, f, 1.339887440266574e-3f);
    p = fma_exact(p, f, 9.618437357674640e-3f);
    p = fma_exact(p, f, 5.550332471162809e-2f);
    p = fma_exact(p, f, 2.402264791363012e-1f);
    p = fma_exact(p, f, 6.931472028550421e-1f);
    return fma_exact(p, f, 1.0f);
}

// 2^t for t <= 0 (0 below -126).
FV_HD float exp2_exact(float t) {
    const float tc = t < -126.0f ? -126.0f : t;
    float shifted;
    const float p = exp2_split(tc, &shifted);
    const int32_t k = static_cast<int32_t>(float_to_bits(shifted)) - static_cast<int32_t>(float_to_bits(kRoundMagic));
    const float scale = bits_to_float(static_cast<uint32_t>(k + 127) << 23);
    return t < -126.0f ? 0.0f : p * scale;
}

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr int kMassShift = 43;  // a mass of 1 is 2^43: 2^20 entries sum below 2^63

// Integer part of x in [2^-20, 2^43].
FV_HD uint64_t integer_part(float x) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
    // these convert to 64 bits at 1/64 of the rate of a shift
    const uint32_t bits = float_to_bits(x);
    return (static_cast<uint64_t>((bits & 0x7fffffu) | 0x800000u) << 20) >> (170 - (bits >> 23));
#else
    return static_cast<uint64_t>(static_cast<int64_t>(x));
#endif
}

// exp(z - zmax) as unsigned fixed point: integer sums are the same in any order, sharding and back end.
// floor(2^43 * exp2_exact((z - zmax) * log2 e)): scaling by 2^43 first and stopping at 2^-62 changes no integer.
FV_HD uint64_t mass_of(float z, float zmax) {
    const float t = (z - zmax) * kLog2E;
    float shifted;
    const float p = exp2_split(t < -62.0f ? -62.0f : t, &shifted);
    const uint32_t exponent = (float_to_bits(shifted) << 23) + (static_cast<uint32_t>(127 + kMassShift) << 23);
    return integer_part(p * bits_to_float(exponent));
}

// log of a fixed-point mass (relative to 2^43), float32.
FV_HD float log_mass(uint64_t m) {
    if (m == 0) return -bits_to_float(0x7f800000u);
    int lead = 63;
    while (!(m >> lead)) --lead;
    // keep 24 significant bits (truncated) so that the conversion is exact everywhere
    const int drop = lead > 23 ? lead - 23 : 0;
    const float mant = static_cast<float>(static_cast<uint32_t>(m >> drop));
    return log_exact(mant) + static_cast<float>(drop - kMassShift) * kLn2;
}

}  // namespace fv
