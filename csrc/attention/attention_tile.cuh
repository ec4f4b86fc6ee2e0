// SPDX-License-Identifier: Apache-2.0
// Tiles of tensor-core attention: element kinds of the cache, swizzled shared memory, fragments.
//
// Shared rows are cut into chunks of 16 bytes, chunk c of row r at c ^ (r % 8), so that the 8 rows an ldmatrix reads lie
// in different banks. fp8 is multiplied in f16 (exact): a 16-bit element of ldmatrix is then a pair of fp8, so dims are
// taken in the order pair_slot() gives, in Q and K alike, and the transposed load of V yields two neighbouring dims.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "algo/attention_plan.h"
#include "common/ptx.cuh"

namespace fv {

__device__ __forceinline__ uint32_t pack_f16(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&h);
}

struct KvBf16 {
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_16816_bf16(d, a, b0, b1);
    }
    static __device__ __forceinline__ uint32_t pack(float a, float b) { return pack_bf16(a, b); }
};
struct KvF16 {
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_16816_f16(d, a, b0, b1);
    }
    static __device__ __forceinline__ uint32_t pack(float a, float b) { return pack_f16(a, b); }
};
struct KvE4m3 : KvF16 {
    static constexpr int kBytes = 1;
};

template <class Kv>
inline constexpr bool is_bf16 = false;
template <>
inline constexpr bool is_bf16<KvBf16> = true;

template <int kHeadDim_, int kRows_, class Kv_>
struct AttentionTile {
    using Kv = Kv_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kThreads = 128;
    static constexpr int kTokens = tile_tokens(kHeadDim), kWarpRows = warp_rows(kHeadDim, kRows);
    static constexpr int kSplit = 4 * kWarpRows / kRows;     // warps that share the tokens of a tile
    static constexpr int kWarpTokens = kTokens / kSplit;     // tokens of a tile that a warp works on
    static constexpr int kSub = kWarpTokens < 32 || (kHeadDim == 128 && kSplit == 1 && Kv::kBytes == 1) ? 16 : 32;  // of them at a time (registers)
    static constexpr int kLoadTokens = kTokens / 4;          // tokens of a tile that a warp loads
    static constexpr bool kOwnTokens = kSplit == 4;          // a warp reads only what it loaded itself
    static constexpr int kMt = kWarpRows / 16, kNt = kSub / 8, kOt = kHeadDim / 8;
    static constexpr int kKvRow = kHeadDim * Kv::kBytes, kQRow = kHeadDim * 2;  // bytes
    static constexpr int kStage = 2 * kTokens * kKvRow, kQBytes = kRows * kQRow;
    static constexpr bool kQInRegisters = kWarpRows == 16 && kHeadDim <= 128;
    static_assert(kWarpTokens % 16 == 0 && kSplit >= 1 && kSplit <= 4);
};

// Byte offset of 16-byte chunk `chunk` of row `row`, rows of kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    if (kRowBytes >= 128) return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
    return row * kRowBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

// K of 16 tokens x 16 dims (fp8: 32 dims, two of `b`): b[0..1] the lower 8 tokens, b[2..3] the upper 8.
template <class T>
__device__ __forceinline__ void load_k(uint32_t (&b)[2][4], const unsigned char* k, int token, int step, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, k + swizzled<T::kKvRow>(token + (lane & 7) + (lane >> 4 & 1) * 8, 2 * step + (lane >> 3 & 1)));
    if constexpr (T::Kv::kBytes == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[0][i] = r[i];
    } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                b[s][2 * h] = e4m3x2_to_f16x2(r[2 * h + s]);
                b[s][2 * h + 1] = e4m3x2_to_f16x2(r[2 * h + s] >> 16);
            }
        }
    }
}

// V of 16 tokens x 16 dims (fp8: 32 dims): b[..][0..1] one column block of 8, b[..][2..3] the next.
template <class T>
__device__ __forceinline__ void load_v(uint32_t (&b)[2][4], const unsigned char* v, int token, int step, int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, v + swizzled<T::kKvRow>(token + (lane & 15), 2 * step + (lane >> 4)));
    if constexpr (T::Kv::kBytes == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[0][i] = r[i];
    } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const uint32_t even = __byte_perm(r[2 * s], r[2 * s + 1], 0x6420), odd = __byte_perm(r[2 * s], r[2 * s + 1], 0x7531);
            b[s][0] = e4m3x2_to_f16x2(even);
            b[s][1] = e4m3x2_to_f16x2(even >> 16);
            b[s][2] = e4m3x2_to_f16x2(odd);
            b[s][3] = e4m3x2_to_f16x2(odd >> 16);
        }
    }
}

// Eight 16-bit floats of q at chunk `chunk` of a row, as fp8 kernels want them: f16, words in the order that pairs the
// dims 4t..4t+3 of lane t (see load_k). Beyond f16's range: the largest f16.
__device__ __forceinline__ void store_q_paired(unsigned char* q, int row_bytes_swizzled_lo, int row_bytes_swizzled_hi, int half,
                                               uint4 v, bool bf16) {
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
    if (bf16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float lo = __uint_as_float(w[i] << 16), hi = __uint_as_float(w[i] & 0xffff0000u);
            w[i] = pack_f16(fminf(fmaxf(lo, -65504.0f), 65504.0f), fminf(fmaxf(hi, -65504.0f), 65504.0f));
        }
    }
    uint2 first, second;
    first.x = w[0], first.y = w[2], second.x = w[1], second.y = w[3];
    *reinterpret_cast<uint2*>(q + row_bytes_swizzled_lo + 8 * half) = first;
    *reinterpret_cast<uint2*>(q + row_bytes_swizzled_hi + 8 * half) = second;
}

}  // namespace fv
