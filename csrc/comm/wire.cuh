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

// A tensor as vectors.
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
        return j < whole ? reinterpret_cast<const uint4*>(x)[j] : load_elements(x, j, n);
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
