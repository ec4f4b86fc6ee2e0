// SPDX-License-Identifier: Apache-2.0
// The sum over ranks of one segment of vectors, one-shot or two-shot, in three stages that a kernel runs over all its
// segments in turn. fp32 sums in rank order, rounded once: both forms, all ranks and all runs give the same bits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/protocol.cuh"

namespace fv {

template <class T>
struct Wire;  // 16 bytes of T as floats and back; round to nearest even
template <>
struct Wire<float> {
    static constexpr int kElements = 4;
    static constexpr uint32_t kNan = 0x7fffffffu;
    static __device__ __forceinline__ void unpack(uint4 v, float* f) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
    }
};
template <>
struct Wire<__nv_bfloat16> {
    static constexpr int kElements = 8;
    static constexpr uint32_t kNan = 0x7fff7fffu;
    static __device__ __forceinline__ void unpack(uint4 v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f[2 * i] = __uint_as_float(w[i] << 16);
            f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ uint32_t two(float a, float b) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        uint32_t u;
        memcpy(&u, &h, 4);
        return u;
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(two(f[0], f[1]), two(f[2], f[3]), two(f[4], f[5]), two(f[6], f[7]));
    }
};
template <>
struct Wire<__half> {
    static constexpr int kElements = 8;
    static constexpr uint32_t kNan = 0x7fff7fffu;
    static __device__ __forceinline__ void unpack(uint4 v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            __half2 h;
            memcpy(&h, &w[i], 4);
            f[2 * i] = __low2float(h);
            f[2 * i + 1] = __high2float(h);
        }
    }
    static __device__ __forceinline__ uint32_t two(float a, float b) {
        const __half2 h = __floats2half2_rn(a, b);
        uint32_t u;
        memcpy(&u, &h, 4);
        return u;
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return make_uint4(two(f[0], f[1]), two(f[2], f[3]), two(f[4], f[5]), two(f[6], f[7]));
    }
};

// Vector i of n elements at x: the last one may be short (zeros behind the end); unaligned pointers go by elements.
template <class T>
__device__ __forceinline__ uint4 load_vector(const T* x, int64_t i, int64_t n) {
    constexpr int kN = 16 / sizeof(T);
    const T* p = x + i * kN;
    if ((i + 1) * kN <= n && (reinterpret_cast<uintptr_t>(p) & 15) == 0) return *reinterpret_cast<const uint4*>(p);
    T part[kN];
    const uint4 zero = make_uint4(0, 0, 0, 0);
    memcpy(part, &zero, 16);
    for (int k = 0; k < kN; ++k) {
        if (i * kN + k < n) part[k] = p[k];
    }
    uint4 v;
    memcpy(&v, part, 16);
    return v;
}
template <class T>
__device__ __forceinline__ void store_vector(T* x, int64_t i, int64_t n, uint4 v) {
    constexpr int kN = 16 / sizeof(T);
    T* p = x + i * kN;
    if ((i + 1) * kN <= n && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        *reinterpret_cast<uint4*>(p) = v;
        return;
    }
    T part[kN];
    memcpy(part, &v, 16);
    for (int k = 0; k < kN; ++k) {
        if (i * kN + k < n) p[k] = part[k];
    }
}

// One segment: n elements at x, whose vectors use slot vectors [at, at + vectors) one-shot, or
// [at, at + ceil(vectors / world)) two-shot. `thread` of `threads` take part.
template <class T, bool kHooks>
struct Segment {
    Exchange<kHooks>& exchange;
    const T* x;
    int64_t n, at;
    int64_t thread, threads;

    __device__ __forceinline__ int64_t vectors() const { return (n + Wire<T>::kElements - 1) / Wire<T>::kElements; }
    __device__ __forceinline__ int64_t slice() const { return (vectors() + world() - 1) / world(); }
    __device__ __forceinline__ int world() const { return exchange.args.world; }
    // `first`: this thread's own vector number `first_at`, loaded before the epoch was known (-1: none).
    uint4 first = make_uint4(0, 0, 0, 0);
    int64_t first_at = -1;
    __device__ __forceinline__ uint4 own(int64_t j) const {
        return Exchange<kHooks>::escape(j == first_at ? first : load_vector(x, j, n), Wire<T>::kNan);
    }

    // Stage 1: everything peers need of this rank's input.
    __device__ __forceinline__ void send_input() const {
        const int rank = exchange.rank;
        if (exchange.args.two_shot) {
            const int64_t s = slice();
            for (int64_t i = thread; i < s; i += threads) {
                for (int k = 1; k < world(); ++k) {  // every rank starts at another peer
                    const int owner = rank + k < world() ? rank + k : rank + k - world();
                    const int64_t j = owner * s + i;
                    if (j < vectors()) exchange.send(owner, 0, at + i, own(j));
                }
            }
        } else {
            for (int64_t i = thread; i < vectors(); i += threads) {
                const uint4 v = own(i);
                for (int k = 1; k < world(); ++k) exchange.send(rank + k < world() ? rank + k : rank + k - world(), 0, at + i, v);
            }
        }
    }

    // The sum of vector j, which peers put at slot vector i of region 0.
    __device__ __forceinline__ uint4 sum(int64_t i, int64_t j) {
        constexpr int kN = Wire<T>::kElements;
        uint4 got[kMaxRanks];
        exchange.take(((1u << world()) - 1) & ~(1u << exchange.rank), 0, i, got);
        float total[kN];
#pragma unroll
        for (int k = 0; k < kN; ++k) total[k] = 0.0f;
#pragma unroll
        for (int r = 0; r < kMaxRanks; ++r) {
            if (r >= world()) continue;
            float f[kN];
            Wire<T>::unpack(r == exchange.rank ? own(j) : got[r], f);
#pragma unroll
            for (int k = 0; k < kN; ++k) total[k] = r == 0 ? f[k] : total[k] + f[k];
        }
        return Wire<T>::pack(total);
    }

    // Stage 2. One-shot: every vector; two-shot: this rank's slice, sent on to all. sink(j, vector).
    template <class Sink>
    __device__ __forceinline__ void reduce(Sink sink) {
        if (exchange.args.two_shot) {
            const int64_t s = slice();
            for (int64_t i = thread; i < s; i += threads) {
                const int64_t j = exchange.rank * s + i;
                if (j >= vectors()) continue;
                const uint4 v = Exchange<kHooks>::escape(sum(at + i, j), Wire<T>::kNan);
                if (!exchange.failed) {
                    for (int k = 1; k < world(); ++k) {
                        exchange.send(exchange.rank + k < world() ? exchange.rank + k : exchange.rank + k - world(), 1, at + i, v);
                    }
                }
                sink(j, v);
            }
        } else {
            for (int64_t i = thread; i < vectors(); i += threads) {
                sink(i, Exchange<kHooks>::escape(sum(at + i, i), Wire<T>::kNan));
            }
        }
    }

    // Stage 3, two-shot only: the slices of the other owners.
    template <class Sink>
    __device__ __forceinline__ void gather(Sink sink) {
        if (!exchange.args.two_shot) return;
        const int64_t s = slice();
        for (int64_t i = thread; i < s; i += threads) {
            uint32_t owners = 0;  // that have a vector i in their slice
            for (int r = 0; r < world(); ++r) owners |= r != exchange.rank && r * s + i < vectors() ? 1u << r : 0u;
            uint4 got[kMaxRanks];
            exchange.take(owners, 1, at + i, got);
#pragma unroll
            for (int r = 0; r < kMaxRanks; ++r) {
                if (owners >> r & 1) sink(r * s + i, got[r]);
            }
        }
    }
};

}  // namespace fv
