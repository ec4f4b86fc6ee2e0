// SPDX-License-Identifier: Apache-2.0
// csrc/common/wgmma.cuh for the emulator: the same functions in plain C++, in double, rounded once. A warp's rows of the
// product depend on its own fragments and on shared memory only.
#pragma once

#include "emulated_ptx.h"

namespace fv {

struct MatrixDescriptor {
    const unsigned char* p;
    int stride, lead;
};
inline MatrixDescriptor matrix_descriptor(const void* p, int stride, int lead = 16) {
    return {static_cast<const unsigned char*>(p), stride, lead};
}
inline MatrixDescriptor advance(MatrixDescriptor d, int bytes) { return {d.p + bytes, d.stride, d.lead}; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kTiles>
inline void wgmma_hold(float (&)[kTiles][4]) {}
template <int kTiles>
inline void wgmma_hold(uint32_t (&)[kTiles][4]) {}
inline void fence_shared_for_async() {}

// Low 16 bits: the count; next 16: arrivals; above: phases that ended.
inline void mbarrier_init(uint64_t* b, int count) { *b = static_cast<uint64_t>(count); }
inline void mbarrier_arrive(uint64_t* b) {
    *b += 1 << 16;
    if ((*b >> 16 & 0xffff) == (*b & 0xffff)) *b = (*b & 0xffff) | (*b >> 32) + 1 << 32;
}
inline void mbarrier_arrive_after_copies(uint64_t* b) { mbarrier_arrive(b); }
inline void mbarrier_wait(uint64_t* b, int phase) {
    while (static_cast<int>(*b >> 32 & 1) == phase) emu::spin();
}

// The 16 bits at `offset` bytes past the descriptor's start: address bits 4..6 are xored with bits 7..9.
inline uint16_t emulated_swizzled(const MatrixDescriptor& m, int64_t offset) {
    const int64_t at = m.p - emu::dynamic_memory + offset;
    return *reinterpret_cast<const uint16_t*>(emu::dynamic_memory + (at ^ (at >> 7 & 7) << 4));
}
inline uint16_t emulated_by_row(const MatrixDescriptor& m, int row, int k) {
    return emulated_swizzled(m, static_cast<int64_t>(row / 8) * m.stride + row % 8 * 128 + k * 2);
}
inline uint16_t emulated_by_sum(const MatrixDescriptor& m, int k, int column) {
    return emulated_swizzled(m, static_cast<int64_t>(column / 64) * m.lead + static_cast<int64_t>(k / 8) * m.stride + k % 8 * 128 + column % 64 * 2);
}

template <float (*kConvert)(uint16_t), int kTiles, class A, class B>
inline void emulated_wgmma(float (&d)[kTiles][4], const A& a, const B& b, bool add) {
    const int lane = emu::current->lane;
    for (int i = 0; i < kTiles; ++i) {
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + 8 * (e / 2), column = 8 * i + 2 * (lane % 4) + e % 2;
            double sum = add ? d[i][e] : 0.0;
            for (int k = 0; k < 16; ++k) sum += static_cast<double>(kConvert(a(row, k))) * kConvert(b(k, column));
            d[i][e] = static_cast<float>(sum);
        }
    }
}
template <float (*kConvert)(uint16_t), int kTiles>
inline void emulated_ss(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b, bool add, bool b_by_sum) {
    const int base = 16 * (emu::current->warp & 3);
    emulated_wgmma<kConvert>(d, [&](int row, int k) { return emulated_by_row(a, base + row, k); },
                             [&](int k, int n) { return b_by_sum ? emulated_by_sum(b, k, n) : emulated_by_row(b, n, k); }, add);
}
template <float (*kConvert)(uint16_t), int kTiles>
inline void emulated_rs(float (&d)[kTiles][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add) {
    struct Mine { uint32_t a[4]; } mine = {{a[0], a[1], a[2], a[3]}}, all[32];
    emu::warp_share(0xffffffffu, &mine, sizeof(mine), all);
    const auto at_a = [&](int row, int k) {
        return static_cast<uint16_t>(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)] >> 16 * (k % 2));
    };
    emulated_wgmma<kConvert>(d, at_a, [&](int k, int n) { return emulated_by_sum(b, k, n); }, add);
}

template <int kTiles>
inline void wgmma_ss_bf16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b, bool add) { emulated_ss<emulated_bf16>(d, a, b, add, false); }
template <int kTiles>
inline void wgmma_ss_f16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b, bool add) { emulated_ss<emulated_f16>(d, a, b, add, false); }
template <int kTiles>
inline void wgmma_st_bf16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b, bool add) { emulated_ss<emulated_bf16>(d, a, b, add, true); }
template <int kTiles>
inline void wgmma_st_f16(float (&d)[kTiles][4], MatrixDescriptor a, MatrixDescriptor b, bool add) { emulated_ss<emulated_f16>(d, a, b, add, true); }
template <int kTiles>
inline void wgmma_rs_bf16(float (&d)[kTiles][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add) { emulated_rs<emulated_bf16>(d, a, b, add); }
template <int kTiles>
inline void wgmma_rs_f16(float (&d)[kTiles][4], const uint32_t (&a)[4], MatrixDescriptor b, bool add) { emulated_rs<emulated_f16>(d, a, b, add); }

}  // namespace fv
