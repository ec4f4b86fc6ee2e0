// SPDX-License-Identifier: Apache-2.0
// 16 bytes of a float type as floats and back, and tensors as 16-byte vectors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/ptx.cuh"

namespace fv {

// Two 16-bit floats in a word, the low half first.
template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
    static __device__ __forceinline__ void unpack(uint32_t w, float* f) {
        f[0] = __uint_as_float(w << 16);
        f[1] = __uint_as_float(w & 0xffff0000u);
    }
    static __device__ __forceinline__ __nv_bfloat162 round(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct Pair<__half> {
    static __device__ __forceinline__ void unpack(uint32_t w, float* f) {
        __half2 h;
        memcpy(&h, &w, 4);
        f[0] = __low2float(h);
        f[1] = __high2float(h);
    }
    static __device__ __forceinline__ __half2 round(float a, float b) { return __floats2half2_rn(a, b); }
};

// 16 bytes of T as floats and back; round to nearest even. kNan: a word of canonical NaNs.
template <class T>
struct Wire {
    static constexpr int kElements = 8;
    static constexpr uint32_t kNan = 0x7fff7fffu;
    static __device__ __forceinline__ void unpack(uint4 v, float* f) {
        Pair<T>::unpack(v.x, f), Pair<T>::unpack(v.y, f + 2), Pair<T>::unpack(v.z, f + 4), Pair<T>::unpack(v.w, f + 6);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) { return make_uint4(word(f), word(f + 2), word(f + 4), word(f + 6)); }

private:
    static __device__ __forceinline__ uint32_t word(const float* f) {
        const auto h = Pair<T>::round(f[0], f[1]);
        uint32_t u;
        memcpy(&u, &h, 4);
        return u;
    }
};
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

// a + b, rounded once.
template <class T>
__device__ __forceinline__ uint4 add_vectors(uint4 a, uint4 b) {
    constexpr int kN = Wire<T>::kElements;
    float f[kN], g[kN];
    Wire<T>::unpack(a, f);
    Wire<T>::unpack(b, g);
#pragma unroll
    for (int k = 0; k < kN; ++k) f[k] += g[k];
    return Wire<T>::pack(f);
}
// The sum of of(r) for the ranks r < kRanks in `members` (bits), in rank order in fp32, rounded once.
template <class T, int kRanks, class Of>
__device__ __forceinline__ uint4 add_ranks(uint32_t members, Of of) {
    constexpr int kN = Wire<T>::kElements;
    float total[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) total[k] = -0.0f;  // -0 + x is x for every x, both zeros included
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
        if (!(members >> r & 1)) continue;
        float f[kN];
        Wire<T>::unpack(of(r), f);
#pragma unroll
        for (int k = 0; k < kN; ++k) total[k] += f[k];
    }
    return Wire<T>::pack(total);
}

// 1 / sqrt(x), rounded to nearest.
__device__ __forceinline__ float rsqrt_rn(float x) {
#ifdef FV_EMULATE
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
#else
    return __frsqrt_rn(x);
#endif
}

// Brings at most 1 KiB from p on into L2, or not: a hint.
__device__ __forceinline__ void pull_into_l2(const char* p, int64_t bytes) {
#if !defined(FV_EMULATE) && __CUDA_ARCH__ >= 900
    const uint64_t begin = reinterpret_cast<uint64_t>(p) & ~uint64_t{15}, end = reinterpret_cast<uint64_t>(p) + bytes;
    const uint32_t size = static_cast<uint32_t>(end - begin) & ~15u;
    if (size > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(size) : "memory");
#else
    for (int64_t i = 0; i < bytes; i += 128) prefetch_l2(p + i);
#endif
}

// 16 bytes of global memory, as an instruction of its own: where such a load was left to the compiler and could also have been
// a value at hand, nvcc 13.0 read local memory instead (tests/test_kernel_budget.py looks for that).
__device__ __forceinline__ uint4 load_global_16(const void* p) {
#ifdef FV_EMULATE
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
#endif
}

// The vector one element further up (down): its first element comes in as (goes out from) the low bits.
template <class T>
__device__ __forceinline__ uint4 shift_in(uint4 v, uint32_t bits) {
    if constexpr (sizeof(T) == 4) return make_uint4(bits, v.x, v.y, v.z);
    constexpr int kBits = 8 * sizeof(T) % 32;
    return make_uint4(v.x << kBits | bits, __funnelshift_l(v.x, v.y, kBits), __funnelshift_l(v.y, v.z, kBits), __funnelshift_l(v.z, v.w, kBits));
}
template <class T>
__device__ __forceinline__ uint4 shift_out(uint4 v) {
    if constexpr (sizeof(T) == 4) return make_uint4(v.y, v.z, v.w, 0);
    constexpr int kBits = 8 * sizeof(T) % 32;
    return make_uint4(__funnelshift_r(v.x, v.y, kBits), __funnelshift_r(v.y, v.z, kBits), __funnelshift_r(v.z, v.w, kBits), v.w >> kBits);
}

// Vector i of n elements at x: the last one may be short (zeros behind the end); unaligned pointers go by elements. What is
// rare is a call, so that it costs neither registers nor instruction cache where it does not happen.
template <class T>
static __device__ __noinline__ uint4 load_elements(const T* x, int64_t i, int64_t n) {
    constexpr int kN = 16 / sizeof(T);
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int64_t k = n - i * kN < kN ? n - i * kN - 1 : kN - 1; k >= 0; --k) {
        uint32_t bits = 0;
        memcpy(&bits, x + i * kN + k, sizeof(T));
        v = shift_in<T>(v, bits);
    }
    return v;
}
template <class T>
static __device__ __noinline__ void store_elements(T* x, int64_t i, int64_t n, uint4 v) {
    constexpr int kN = 16 / sizeof(T);
    T* p = x + i * kN;
#pragma unroll 1
    for (T* const end = n - i * kN < kN ? x + n : p + kN; p < end; ++p, v = shift_out<T>(v)) memcpy(p, &v.x, sizeof(T));
}

// A tensor in global memory as vectors.
template <class T>
struct Vectors {
    static constexpr int kN = 16 / sizeof(T);
    T* x;
    int64_t n;       // elements
    uint32_t whole;  // vectors that may be accessed as such: 0 if x is not aligned
    __device__ __forceinline__ Vectors(T* p, int64_t elements)
        : x(p), n(elements), whole(reinterpret_cast<uintptr_t>(p) & 15 ? 0 : static_cast<uint32_t>(elements / kN)) {}
    __device__ __forceinline__ uint32_t count() const { return static_cast<uint32_t>((n + kN - 1) / kN); }
    __device__ __forceinline__ uint4 load(uint32_t j) const {
        return j < whole ? load_global_16(x + uint64_t{j} * kN) : load_elements(x, j, n);
    }
    __device__ __forceinline__ void store(uint32_t j, uint4 v) const {
        if (j < whole) reinterpret_cast<uint4*>(x)[j] = v;
        else store_elements(x, j, n, v);
    }
};

template <class T>
__device__ __forceinline__ uint4 load_vector(const T* x, int64_t i, int64_t n) {
    return Vectors<const T>(x, n).load(static_cast<uint32_t>(i));
}
template <class T>
__device__ __forceinline__ void store_vector(T* x, int64_t i, int64_t n, uint4 v) {
    Vectors<T>(x, n).store(static_cast<uint32_t>(i), v);
}

}  // namespace fv
