// SPDX-License-Identifier: Apache-2.0
// The LM-head product of lm_head_verify_tree: weight [V,H] x hidden^T [H,R], f32 accumulators, no logits in memory.
//   head_mma_kernel   bf16 or fp16: cp.async ring of K steps, ldmatrix, mma.m16n8k16; memory-bound up to 64 node rows
//   head_simt_kernel  any mix of f32, fp16, bf16 and any width: four ids x eight node rows per warp
// Vocabulary row 4g + 2i + h of 32 sits in row g + 8h of MMA tile i, so that a thread holds ids 4g..4g+3 of a
// node row: one Philox call serves all four.
#pragma once
#include "accept/head_score.cuh"
#include "algo/convert.h"
#include "common/ptx.cuh"

namespace fv {

// New best keys of the block -> memory; the memory's -> bounds. Barriers on both sides are the caller's.
__device__ __forceinline__ void publish_keys(const HeadArgs& a, const HeadShared& s, int64_t row0, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (s.best[i]) atomicMax(a.keys + row0 + i, s.best[i]);
    }
}
__device__ __forceinline__ void read_bounds(const HeadArgs& a, const HeadShared& s, int64_t row0, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (s.row[i].mode != kHeadKey) continue;
        const Word seen = *const_cast<const volatile Word*>(a.keys + row0 + i), key = seen > s.best[i] ? seen : s.best[i];
        if (key) s.bound[i] = below(from_ordered_bits(static_cast<uint32_t>(key >> 32)));
    }
}

template <bool kBf16, int kRows>
__global__ void __launch_bounds__(head_tile(kRows), 2) head_mma_kernel(const HeadArgs a, const HeadPlan plan) {
    constexpr int kStages = head_stages(kRows), kStageBytes = head_stage_bytes(kRows), kN = kRows / 8;
    constexpr int kTile = head_tile(kRows), kThreads = kTile, kWarpRows = 32, kM = kWarpRows / 16;
    constexpr int kRowBytes = kHeadStep * 2, kWeightBytes = kTile * kRowBytes;
    __shared__ int flag;
    unsigned char* const ring = dynamic_shared();
    const HeadShared s(ring + kStages * kStageBytes, kRows);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int chunk = static_cast<int>(blockIdx.x) % plan.chunks, slot = static_cast<int>(blockIdx.x) / plan.chunks;
    const int64_t row0 = static_cast<int64_t>(chunk) * kRows;
    const int begin = slot * plan.steps, total = plan.tiles * plan.k_steps;
    const int end = begin + plan.steps < total ? begin + plan.steps : total;

    // ---- loading: 8 threads fetch the 128 bytes of one row --------------------------------------------------------
    constexpr int kAtOnce = kThreads / 8;
    const int chunk16 = tid & 7, first_row = tid >> 3;
    int load_tile = begin / plan.k_steps, load_k = begin % plan.k_steps, load_stage = 0;
    const auto load_step = [&]() {
        unsigned char* const stage = ring + load_stage * kStageBytes;
        const int64_t column = static_cast<int64_t>(load_k) * kHeadStep + chunk16 * 8;
        const bool inside = column < a.hidden_size;
        const int64_t v = static_cast<int64_t>(load_tile) * kTile + first_row;
        const auto* w = static_cast<const uint16_t*>(a.weight) + v * a.weight_stride + column;
#pragma unroll
        for (int i = 0; i < kTile / kAtOnce; ++i) {
            const int r = first_row + kAtOnce * i;
            const bool ok = inside && v + kAtOnce * i < a.task.in.vocab;
            cp_async_16_stream(stage + r * kRowBytes + ((chunk16 ^ (r >> 2 & 7)) << 4),
                               ok ? w + kAtOnce * i * a.weight_stride : a.weight, ok);
        }
        const auto* x = static_cast<const uint16_t*>(a.hidden) + (row0 + first_row) * a.hidden_stride + column;
#pragma unroll
        for (int i = 0; i < (kRows + kAtOnce - 1) / kAtOnce; ++i) {
            const int r = first_row + kAtOnce * i;
            if (r >= kRows) break;
            const bool ok = inside && row0 + r < a.task.in.rows;
            cp_async_16(stage + kWeightBytes + r * kRowBytes + ((chunk16 ^ (r & 7)) << 4),
                        ok ? x + kAtOnce * i * a.hidden_stride : a.hidden, ok);
        }
        load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
        if (++load_k == plan.k_steps) load_k = 0, ++load_tile;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (begin + i < end) load_step();
        cp_async_commit();
    }
    describe_rows(a, row0, kRows, s);

    float acc[kM][kN][4];
    const auto clear = [&]() {
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][n][j] = 0.0f;
    };
    // ---- one K step: 4 x k16 --------------------------------------------------------------------------------------
    const int g = lane & 7, matrix = lane >> 3;  // row and matrix whose address this lane gives to ldmatrix
    const auto multiply = [&](const unsigned char* stage) {
        const unsigned char* const w = stage + (warp * kWarpRows + 4 * g + (matrix & 1)) * kRowBytes;
        const unsigned char* const x = stage + kWeightBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t fa[kM][4], fb[kN][2];
            const int at = ((2 * k + (matrix >> 1)) ^ g) << 4;  // (row / 4) % 8 = g
#pragma unroll
            for (int i = 0; i < kM; ++i) ldmatrix_x4(fa[i], w + ((i >> 1) * 32 + (i & 1) * 2) * kRowBytes + at);
            if constexpr (kN == 1) {
                ldmatrix_x2(fb[0], x + g * kRowBytes + (((2 * k + (matrix & 1)) ^ g) << 4));
            } else {
#pragma unroll
                for (int n = 0; n < kN; n += 2) {
                    uint32_t f[4];
                    ldmatrix_x4(f, x + (8 * (n + (matrix >> 1)) + g) * kRowBytes + (((2 * k + (matrix & 1)) ^ g) << 4));
                    fb[n][0] = f[0], fb[n][1] = f[1], fb[n + 1][0] = f[2], fb[n + 1][1] = f[3];
                }
            }
#pragma unroll
            for (int i = 0; i < kM; ++i)
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    if constexpr (kBf16) mma_16816_bf16(acc[i][n], fa[i], fb[n][0], fb[n][1]);
                    else mma_16816_f16(acc[i][n], fa[i], fb[n][0], fb[n][1]);
                }
        }
    };
    // ---- a tile that several blocks share: true for the block that arrives last, with the sum in acc ---------------
    const auto part = [&](int of_slot, int tile) {
        const int which = tile == of_slot * plan.steps / plan.k_steps ? 0 : 1;
        const int64_t block = static_cast<int64_t>(of_slot) * plan.chunks + chunk;
        return reinterpret_cast<float4*>(a.partials + (2 * block + which) * (kRows * kTile)) + tid;
    };
    const auto join_parts = [&](int tile) {
        float4* mine = part(slot, tile);
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int n = 0; n < kN; ++n)
                __stcg(mine + (i * kN + n) * kThreads, make_float4(acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]));
        const int first = head_first_slot(plan, tile), last = head_last_slot(plan, tile);
        if (!last_block(a.counters + static_cast<int64_t>(chunk) * plan.tiles + tile, last - first + 1, &flag)) return false;
        clear();
        for (int other = first; other <= last; ++other) {  // in order: the same sum whoever arrives last
            const float4* theirs = part(other, tile);
#pragma unroll
            for (int i = 0; i < kM; ++i)
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    const float4 f = __ldcg(theirs + (i * kN + n) * kThreads);
                    acc[i][n][0] += f.x, acc[i][n][1] += f.y, acc[i][n][2] += f.z, acc[i][n][3] += f.w;
                }
        }
        return true;
    };
    // ---- logits of a finished tile: through this thread's own corner of a free stage, so that the loop stays rolled --
    const auto take_tile = [&](int tile, unsigned char* stage) {
        constexpr int kTiles = kN < 4 ? kN : 4;  // n-tiles at a time: 2 node rows of this thread each
        float4* const corner = reinterpret_cast<float4*>(stage + warp * (kTiles * 2 * 512)) + lane;
        const int64_t v0 = static_cast<int64_t>(tile) * kTile + warp * kWarpRows + (lane >> 2) * 4;
#pragma unroll
        for (int base = 0; base < kN * kM / 2; base += kTiles) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const int i = (base + n) / kN * 2, at = (base + n) % kN;
                corner[64 * n] = make_float4(acc[i][at][0], acc[i][at][2], acc[i + 1][at][0], acc[i + 1][at][2]);
                corner[64 * n + 32] = make_float4(acc[i][at][1], acc[i][at][3], acc[i + 1][at][1], acc[i + 1][at][3]);
            }
#pragma unroll 1
            for (int c = 0; c < 2 * kTiles; ++c) {
                const float4 f = corner[32 * c];
                float x[4] = {f.x, f.y, f.z, f.w};
                const int at = base + (c >> 1), i = at % kN * 8 + (lane & 3) * 2 + (c & 1);
                Word best = take_logits(a, s, i, row0 + i, v0 + at / kN * 32, x);
                if (!__any_sync(kFullWarp, best != 0)) continue;
#pragma unroll
                for (int d = 4; d < 32; d <<= 1) {  // the 8 lanes of a node row
                    const Word other = __shfl_xor_sync(kFullWarp, best, d);
                    best = other > best ? other : best;
                }
                if (lane < 4 && best) atomicMax(s.best + i, best);
            }
        }
    };

    clear();
    int tile = begin / plan.k_steps, k = begin % plan.k_steps, stage = 0;
    bool whole = k == 0;
    for (int step = begin; step < end; ++step) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // the step's data is there, and the stage before it is free
        if (step + kStages - 1 < end) load_step();
        cp_async_commit();
        multiply(ring + stage * kStageBytes);
        if (++k == plan.k_steps || step + 1 == end) {
            whole = whole && k == plan.k_steps;
            if (whole || join_parts(tile)) {
                read_bounds(a, s, row0, kRows);
                __syncthreads();  // bounds are set; every warp is done with the stage
                take_tile(tile, ring + stage * kStageBytes);
                __syncthreads();
                publish_keys(a, s, row0, kRows);
            }
            clear();
            k = 0, ++tile, whole = true;
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
}

__device__ __forceinline__ float head_element(const void* p, int type, int64_t i) {
    if (type == 0) return static_cast<const float*>(p)[i];
    const uint16_t h = static_cast<const uint16_t*>(p)[i];
    return type == 1 ? half_to_float(h) : bf16_to_float(h);
}

__global__ void __launch_bounds__(kHeadSimtThreads) head_simt_kernel(const HeadArgs a, const HeadPlan plan) {
    constexpr int kRows = kHeadSimtRows;
    const HeadShared s(dynamic_shared(), kRows);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int chunk = static_cast<int>(blockIdx.x) % plan.chunks, slot = static_cast<int>(blockIdx.x) / plan.chunks;
    const int64_t row0 = static_cast<int64_t>(chunk) * kRows;
    describe_rows(a, row0, kRows, s);
    const int64_t groups = (a.task.in.vocab + 3) / 4;
    for (int64_t base = static_cast<int64_t>(slot) * 4; base < groups; base += static_cast<int64_t>(plan.slots) * 4) {
        const int64_t v = 4 * (base + warp);
        float acc[4][kRows] = {};
        for (int64_t c = lane; c < a.hidden_size; c += 32) {
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = v + j < a.task.in.vocab ? head_element(a.weight, a.weight_type, (v + j) * a.weight_stride + c) : 0.0f;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (s.row[r].mode == kHeadSkip) continue;
                const float x = head_element(a.hidden, a.hidden_type, (row0 + r) * a.hidden_stride + c);
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[j][r] = __fmaf_rn(w[j], x, acc[j][r]);
            }
        }
        float x[4] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float sum = warp_sum(acc[j][r]);
                if (lane == r) x[j] = sum;
            }
        if (lane < kRows && v < a.task.in.vocab) {
            const Word best = take_logits(a, s, lane, row0 + lane, v, x);
            if (best) atomicMax(s.best + lane, best);
        }
    }
    __syncthreads();
    publish_keys(a, s, row0, kRows);
}

}  // namespace fv
