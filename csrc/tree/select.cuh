// SPDX-License-Identifier: Apache-2.0
// Exact selection of the n largest of many distinct keys by one block: the device twin of nth_largest (algo/tree.h).
#pragma once
#include <cstdint>

#include "algo/tree.h"
#include "common/warp.cuh"

namespace fv {

constexpr int kIdBits = 20;                       // indices below kMaxVocab
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;
static_assert(kMaxVocab <= 1 << kIdBits, "an index must fit its bits");

// rank_key in 52 bits: ordered_bits(score) above, the lower index larger below.
FV_HD uint64_t short_key(uint32_t order, uint32_t index) {
    return static_cast<uint64_t>(order) << kIdBits | (kIdMask - index);
}
FV_HD uint32_t short_key_order(uint64_t key) { return static_cast<uint32_t>(key >> kIdBits); }
FV_HD uint32_t short_key_index(uint64_t key) { return kIdMask - (static_cast<uint32_t>(key) & kIdMask); }

struct SelectShared {
    uint32_t histogram[2][256];
    uint32_t digit, above, count;
};

// Warp 0: the bin that holds the n-th largest entry, how many lie above it, how many in it.
__device__ __forceinline__ void find_digit(const uint32_t* histogram, uint32_t n, SelectShared& s) {
    const int lane = threadIdx.x & 31, top = 255 - 8 * lane;
    uint32_t own[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += own[i] = histogram[top - i];
    uint32_t inclusive = sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const uint32_t below = __shfl_up_sync(kFullWarp, inclusive, d);
        inclusive += lane >= d ? below : 0;
    }
    uint32_t above = inclusive - sum;
    if (above < n && inclusive >= n) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (above < n && above + own[i] >= n) {
                s.digit = static_cast<uint32_t>(top - i);
                s.above = above;
                s.count = own[i];
            }
            above += own[i];
        }
    }
}

// A bound with exactly n keys >= it. each(f) calls f(key) for every key of this thread; keys are distinct, at least n of
// them lie in [low, high] and none above high. All threads of the block call it. At most 8 passes over the keys.
template <class Each>
__device__ __forceinline__ uint64_t block_select(const Each& each, uint64_t low, uint64_t high, uint32_t n, SelectShared& s) {
    for (uint32_t i = threadIdx.x; i < 512; i += blockDim.x) s.histogram[i >> 8][i & 255] = 0;
    __syncthreads();
    for (int pass = 0;; ++pass) {
        uint32_t* const histogram = s.histogram[pass & 1];
        uint32_t* const next = s.histogram[(pass + 1) & 1];
        const int bits = 64 - __clzll(static_cast<long long>(high - low));
        const int shift = bits > 8 ? bits - 8 : 0;
        uint32_t run = 0, run_digit = 0;  // equal digits in a row cost one atomic
        each([&](uint64_t key) {
            if (key < low || key > high) return;
            const uint32_t digit = static_cast<uint32_t>((key - low) >> shift);
            if (digit != run_digit && run != 0) {
                atomicAdd(histogram + run_digit, run);
                run = 0;
            }
            run_digit = digit;
            ++run;
        });
        if (run != 0) atomicAdd(histogram + run_digit, run);
        __syncthreads();
        if (threadIdx.x < 32) find_digit(histogram, n, s);
        if (pass > 0) {
            for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) next[i] = 0;
        }
        __syncthreads();
        low += static_cast<uint64_t>(s.digit) << shift;
        n -= s.above;
        if (s.count == n || shift == 0) return low;
        high = low + ((1ull << shift) - 1);
    }
}

}  // namespace fv
