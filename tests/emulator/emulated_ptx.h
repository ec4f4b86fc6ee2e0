// SPDX-License-Identifier: Apache-2.0
// csrc/common/ptx.cuh for the emulator: the same functions in plain C++ (fragment layouts: PTX ISA, "Matrix
// Fragments for mma.m16n8k16" and "ldmatrix").
#pragma once
#include "emulator.h"

#include <chrono>

namespace fv {

inline uint32_t shared_address(const void*) { return 0; }

inline void cp_async_16(void* dst, const void* src, bool pred = true) {
    if (pred) std::memcpy(dst, src, 16);
    else std::memset(dst, 0, 16);
}
inline void cp_async_16_stream(void* dst, const void* src, bool pred = true) { cp_async_16(dst, src, pred); }
inline void cp_async_commit() {}
template <int kPending>
inline void cp_async_wait() {}

template <int kMatrices, bool kTrans>
inline void emulated_ldmatrix(uint32_t* r, const void* row) {
    const uint64_t* seen = emu::warp_exchange(0xffffffffu, reinterpret_cast<uint64_t>(row), "ldmatrix");
    uint64_t rows[32];
    std::memcpy(rows, seen, sizeof(rows));
    const int lane = emu::current->lane;
    for (int m = 0; m < kMatrices; ++m) {
        auto at = [&](int i, int j) {
            return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(rows[8 * m + i])[j]);
        };
        const int i = lane / 4, j = 2 * (lane % 4);
        r[m] = kTrans ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
    }
    emu::warp_exchange(0xffffffffu, 0, "ldmatrix end");
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emulated_ldmatrix<4, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emulated_ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) { emulated_ldmatrix<2, false>(r, row); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) { emulated_ldmatrix<2, true>(r, row); }

inline float emulated_f16(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, e = h >> 10 & 31, f = h & 1023;
    float v;
    if (e == 0) v = static_cast<float>(f) * 0x1p-24f;
    else if (e == 31) v = emu::from_bits<float>(0x7f800000u | f << 13);
    else v = emu::from_bits<float>((e + 112) << 23 | f << 13);
    return emu::from_bits<float>(static_cast<uint32_t>(emu::to_bits(v)) | sign);
}
inline float emulated_bf16(uint16_t h) { return emu::from_bits<float>(static_cast<uint32_t>(h) << 16); }

// Sums in double and rounds once: the hardware's order of additions is its own, so tests compare with a tolerance.
template <float (*kConvert)(uint16_t)>
inline void emulated_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Mine { uint32_t a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}}, all[32];
    emu::warp_share(0xffffffffu, &mine, sizeof(mine), all);
    auto half = [](uint32_t v, int i) { return kConvert(static_cast<uint16_t>(v >> 16 * i)); };
    auto at_a = [&](int row, int k) { return half(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k % 2); };
    auto at_b = [&](int k, int n) { return half(all[n * 4 + k % 8 / 2].b[k / 8], k % 2); };
    const int lane = emu::current->lane;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(at_a(row, k)) * at_b(k, col);
        d[i] = static_cast<float>(sum);
    }
}
inline void mma_16816_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma<emulated_bf16>(d, a, b0, b1);
}
inline void mma_16816_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma<emulated_f16>(d, a, b0, b1);
}

inline float max_nan(float a, float b) {
    if (a != a || b != b) return emu::from_bits<float>(0x7fffffffu);
    if (a == b) return emu::from_bits<float>(static_cast<uint32_t>(emu::to_bits(a)) & static_cast<uint32_t>(emu::to_bits(b)));
    return a > b ? a : b;
}
// The half whose value is the larger, or a NaN.
template <float (*kConvert)(uint16_t)>
inline uint32_t emulated_max_x2(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 2; ++i) {
        const uint16_t x = static_cast<uint16_t>(a >> 16 * i), y = static_cast<uint16_t>(b >> 16 * i);
        const float m = max_nan(kConvert(x), kConvert(y));
        const uint16_t bits = m != m ? 0x7fffu : static_cast<uint32_t>(emu::to_bits(m)) == static_cast<uint32_t>(emu::to_bits(kConvert(x))) ? x : y;
        r |= static_cast<uint32_t>(bits) << 16 * i;
    }
    return r;
}
inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) { return emulated_max_x2<emulated_bf16>(a, b); }
inline uint32_t max_nan_f16x2(uint32_t a, uint32_t b) { return emulated_max_x2<emulated_f16>(a, b); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t e4m3x2_to_f16x2(uint32_t v) {
    uint32_t r = 0;
    for (int i = 0; i < 2; ++i) {
        const __half h = __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(v >> 8 * i), __NV_E4M3));
        r |= static_cast<uint32_t>(static_cast<__half_raw>(h).x) << 16 * i;
    }
    return r;
}

inline uint32_t ld_acquire(const uint32_t* p) { return *p; }
inline void st_release(uint32_t* p, uint32_t v) { *p = v; }
inline uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v) {
    const uint32_t old = *p;
    *p = old + v;
    return old;
}
inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}
inline void prefetch_l2(const void*) {}
template <class T>
T* known_shared(T* p) {
    return p;
}
inline uint4 load_readonly_16(const void* p) {
    uint4 v;
    std::memcpy(&v, p, 16);
    return v;
}
inline uint4 load_streaming_16(const void* p) {
    uint4 v;
    std::memcpy(&v, p, 16);
    return v;
}
inline uint32_t load_here_4(const void* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
inline unsigned long long load_here_8(const void* p) {
    unsigned long long v;
    std::memcpy(&v, p, 8);
    return v;
}
inline uint4 ld_relaxed_sys_16(const void* p) { return load_streaming_16(p); }
inline void st_relaxed_sys_16(void* p, uint4 v) { std::memcpy(p, &v, 16); }
inline uint32_t ld_relaxed_sys(const uint32_t* p) { return *p; }
inline void st_relaxed_sys(uint32_t* p, uint32_t v) { *p = v; }
inline uint4 ld_relaxed_gpu_16(const void* p) { return load_streaming_16(p); }
inline void st_relaxed_gpu_16(void* p, uint4 v) { std::memcpy(p, &v, 16); }
inline void fence_gpu() {}
inline uint64_t global_timer() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline void spin_pause() { emu::spin(); }

inline uint32_t opaque(uint32_t x) { return x; }
inline void cluster_barrier() { emu::cluster_barrier(); }
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { emu::cluster_barrier(); }
inline uint32_t cluster_rank() { return emu::block_idx.x % emu::cluster_blocks; }
template <class T>
T* cluster_map(T* p, uint32_t rank) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(emu::dynamic_memory) +
                                reinterpret_cast<uintptr_t>(emu::cluster_memory(rank)));
}

}  // namespace fv
