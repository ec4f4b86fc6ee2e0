// SPDX-License-Identifier: Apache-2.0
// 16 bytes of a float type as floats and back, and tensors as 16-byte vectors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

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

}  // namespace fv
