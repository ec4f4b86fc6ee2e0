// SPDX-License-Identifier: Apache-2.0
// The four vector loops of CPU attention: load a KV tile, multiply, softmax, gather. Plain pointers, fp32.
//
// Every output element is one chain of multiply-adds in ascending key (or dim) order, whatever the block shape, so a
// row's bits do not depend on its neighbours. With FMA units the compiler fuses each multiply-add
// (-ffp-contract=fast on this file), so bits may differ between x86 levels, but not between runs.
#pragma once
#include <cmath>

#include "common/convert.h"

namespace fv {

constexpr int kLanes = 16;      // floats of one vector
constexpr int kTileKeys = 64;   // keys of one KV tile

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Vec4Int __attribute__((vector_size(16)));

FV_HD const Vec& vec(const float* p) { return *reinterpret_cast<const Vec*>(p); }
FV_HD Vec& vec(float* p) { return *reinterpret_cast<Vec*>(p); }

// c[r][0 .. 16 n) += sum over k in [k0, k1) of a[r][k] * b[k][...], r < m.
template <int m, int n>
FV_HD void multiply_block(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k0, int k1) {
    Vec acc[m][n];
#pragma GCC unroll 8
    for (int r = 0; r < m; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) acc[r][j] = vec(c + r * ldc + j * kLanes);
    }
    for (int k = k0; k < k1; ++k) {
        Vec row[n];
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) row[j] = vec(b + static_cast<int64_t>(k) * ldb + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < m; ++r) {
            const float x = a[r * lda + k];
#pragma GCC unroll 8
            for (int j = 0; j < n; ++j) acc[r][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < m; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) vec(c + r * ldc + j * kLanes) = acc[r][j];
    }
}

// The same for any width that is a multiple of 16.
template <int m, int n>
FV_HD void multiply_rows(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int width, int k0, int k1) {
    int j = 0;
    for (; j + n * kLanes <= width; j += n * kLanes) multiply_block<m, n>(a, lda, b + j, ldb, c + j, ldc, k0, k1);
    for (; j < width; j += kLanes) multiply_block<m, 1>(a, lda, b + j, ldb, c + j, ldc, k0, k1);
}

// c [m, width] += a [m, k0..k1) b [k0..k1, width]; width a multiple of 16.
FV_CLONES static void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int width, int k0,
                        int k1) {
    // 6 x 16 accumulators fit the 16 ymm registers of AVX2; few rows take more columns to hide the latency
    for (; m >= 6; m -= 6, a += 6 * lda, c += 6 * ldc) multiply_rows<6, 1>(a, lda, b, ldb, c, ldc, width, k0, k1);
    if (m == 5) multiply_rows<5, 1>(a, lda, b, ldb, c, ldc, width, k0, k1);
    if (m == 4) multiply_rows<4, 1>(a, lda, b, ldb, c, ldc, width, k0, k1);
    if (m == 3) multiply_rows<3, 2>(a, lda, b, ldb, c, ldc, width, k0, k1);
    if (m == 2) multiply_rows<2, 2>(a, lda, b, ldb, c, ldc, width, k0, k1);
    if (m == 1) multiply_rows<1, 4>(a, lda, b, ldb, c, ldc, width, k0, k1);
}

// c [width] += sum over i of a[i] * b[keys[i]][...]: one row against scattered keys, in the order given.
FV_CLONES static void multiply_gather(const float* a, const int32_t* keys, int count, const float* b, int ldb, float* c,
                               int width) {
    for (int j = 0; j < width; j += kLanes) {
        Vec acc = vec(c + j);
        for (int i = 0; i < count; ++i) acc += a[i] * vec(b + static_cast<int64_t>(keys[i]) * ldb + j);
        vec(c + j) = acc;
    }
}

// rows[0..count) of d elements -> dst [count, ld].
FV_CLONES static void load_rows(const void* const* rows, ScalarType type, int count, int d, float* dst, int ld) {
    for (int i = 0; i < count; ++i) load_row(rows[i], type, dst + static_cast<int64_t>(i) * ld, d);
}

// src [count, ld] (count <= 64) -> dst [ld, 64]; ld a multiple of 4; columns past count keep garbage.
FV_CLONES static void transpose_tile(const float* src, int count, int ld, float* dst) {
    for (int i = 0; i < count; i += 4) {
        for (int j = 0; j < ld; j += 4) {
            const float* s = src + i * ld + j;
            const Vec4 a = *reinterpret_cast<const Vec4*>(s), b = *reinterpret_cast<const Vec4*>(s + ld),
                       c = *reinterpret_cast<const Vec4*>(s + 2 * ld), e = *reinterpret_cast<const Vec4*>(s + 3 * ld);
            const Vec4 ab_lo = __builtin_shuffle(a, b, Vec4Int{0, 4, 1, 5}), ab_hi = __builtin_shuffle(a, b, Vec4Int{2, 6, 3, 7});
            const Vec4 ce_lo = __builtin_shuffle(c, e, Vec4Int{0, 4, 1, 5}), ce_hi = __builtin_shuffle(c, e, Vec4Int{2, 6, 3, 7});
            float* t = dst + j * kTileKeys + i;
            *reinterpret_cast<Vec4*>(t) = __builtin_shuffle(ab_lo, ce_lo, Vec4Int{0, 1, 4, 5});
            *reinterpret_cast<Vec4*>(t + kTileKeys) = __builtin_shuffle(ab_lo, ce_lo, Vec4Int{2, 3, 6, 7});
            *reinterpret_cast<Vec4*>(t + 2 * kTileKeys) = __builtin_shuffle(ab_hi, ce_hi, Vec4Int{0, 1, 4, 5});
            *reinterpret_cast<Vec4*>(t + 3 * kTileKeys) = __builtin_shuffle(ab_hi, ce_hi, Vec4Int{2, 3, 6, 7});
        }
    }
}

// exp(x) for x <= 0 through the 2^t polynomial of numeric.h (relative error < 2^-22 for x > -20, 0 below -87).
FV_HD float exp_nonpositive(float x) { return exp2_exact(x * kLog2E); }

// Maximum (NaN may be passed over) and sum of one row of a tile, pairwise in a fixed order.
FV_HD float greater(float a, float b) { return a > b ? a : b; }
FV_HD float tile_max(const float* s) {
    float lane[kLanes];
    for (int j = 0; j < kLanes; ++j) lane[j] = greater(greater(s[j], s[16 + j]), greater(s[32 + j], s[48 + j]));
    for (int j = 0; j < 8; ++j) lane[j] = greater(lane[j], lane[j + 8]);
    for (int j = 0; j < 4; ++j) lane[j] = greater(lane[j], lane[j + 4]);
    return greater(greater(lane[0], lane[1]), greater(lane[2], lane[3]));
}
FV_HD float tile_sum(const float* s) {
    float lane[kLanes];
    for (int j = 0; j < kLanes; ++j) lane[j] = (s[j] + s[16 + j]) + (s[32 + j] + s[48 + j]);
    for (int j = 0; j < 8; ++j) lane[j] += lane[j + 8];
    for (int j = 0; j < 4; ++j) lane[j] += lane[j + 4];
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

// One online-softmax step over a tile of scores s [m, 64], row r seeing keys [low[r], high[r]): s becomes the
// weights exp(s - max) (0 outside), maximum and sum are updated, o [m, width] is rescaled to the new maximum.
FV_CLONES static void softmax_tile(float* s, int m, const int32_t* low, const int32_t* high, float softcap, float* maximum,
                            float* sum, float* o, int ldo) {
    static_assert(kTileKeys == 64 && kLanes == 16);
    const float inf = __builtin_inff();
    for (int r = 0; r < m; ++r, s += kTileKeys) {
        if (low[r] >= high[r]) continue;
        if (softcap > 0.0f) {  // softcap * tanh(s / softcap), tanh from exp(-2|x|)
            const float inverse = 1.0f / softcap;
            for (int c = 0; c < kTileKeys; ++c) {
                const float x = s[c] * inverse;
                const float t = exp_nonpositive(-2.0f * __builtin_fabsf(x));
                s[c] = softcap * __builtin_copysignf((1.0f - t) / (1.0f + t), x);
            }
        }
        for (int c = 0; c < low[r]; ++c) s[c] = -inf;
        for (int c = high[r]; c < kTileKeys; ++c) s[c] = -inf;
        const float top = greater(tile_max(s), maximum[r]);
        const float shift = top == -inf ? 0.0f : top;  // nothing finite yet: all weights are exp(-inf) = 0
        for (int c = 0; c < kTileKeys; ++c) s[c] = exp_nonpositive(s[c] - shift);
        const float alpha = exp_nonpositive(maximum[r] - shift);
        maximum[r] = top;
        sum[r] = sum[r] * alpha + tile_sum(s);
        if (alpha != 1.0f) {
            for (int j = 0; j < ldo; ++j) o[static_cast<int64_t>(r) * ldo + j] *= alpha;
        }
    }
}

}  // namespace fv
