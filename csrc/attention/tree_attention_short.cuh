// SPDX-License-Identifier: Apache-2.0
// Tree attention over short sequences, bf16, head_dim 64: one launch whose length is that of a few dependent loads.
//
// A cluster of 8 blocks takes one (request, kv head). Up to 64 packed rows (node x query head of the group) at a time: their
// 16-row groups and the keys, in steps of 16, are dealt to the cluster's 32 warps, each with a running softmax of its own. K goes
// straight from the cache to registers (both operands of QK are permuted alike along the head), V through a ring in shared memory.
// Then each block merges its share of the rows, reading the others' results from their shared memory. The order of every sum
// depends on shapes and lengths only. Cost: the visible KV once per 16 packed rows; one launch.
#pragma once
#include "algo/short_plan.h"
#include "attention/attention_merge.cuh"
#include "common/ptx.cuh"

namespace fv {

constexpr int kShortThreads = 128, kShortStages = 4, kShortVRow = 64 * 2 + 16;  // bytes of a row of V: no two rows share banks

struct ShortShared {
    unsigned char v[4][kShortStages][16 * kShortVRow];  // per warp
    float o[4][16][64 + 4];                             // per warp: unnormalised
    float top[4][16], sum[4][16];
};

__global__ void __launch_bounds__(kShortThreads) tree_attention_short_kernel(const __grid_constant__ AttentionParams p) {
    ShortShared& shared = *reinterpret_cast<ShortShared*>(dynamic_shared());
    allow_next_launch();
    wait_for_previous_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int request = blockIdx.z, kv = blockIdx.y, blocks = gridDim.x, rank = blockIdx.x;
    const RequestKeys keys = keys_of(p, request);
    const int packed = keys.nodes * p.group, base = keys.first / 16 * 16;
    const float scale = p.scale * (p.k_scale ? p.k_scale[kv * p.k_scale_stride] : 1.0f);
    if (kv == 0 && request == 0) clear_padding(p);

    for (int row0 = 0; row0 < packed; row0 += 64) {
        const int live = min(64, packed - row0), groups = live <= 16 ? 1 : live <= 32 ? 2 : 4;
        const int per_block = 4 / groups, slices = blocks * per_block;
        const int group = warp % groups, slice = rank * per_block + warp / groups;
        const int steps = max(0, ((keys.end - base + 15) / 16 - slice + slices - 1) / slices);

        RowSight sight[2];
        uint4 q[2][2];  // [row g, g + 8][dims 8 c.., 32 + 8 c..]
        bool on[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = row0 + 16 * group + 8 * h + g;
            on[h] = i < packed;
            const int node = static_cast<int>(p.by_group.quotient(static_cast<uint32_t>(on[h] ? i : 0)));
            const int64_t row = keys.row0 + node;
            const int head = kv * p.group + (on[h] ? i : 0) - node * p.group;
            sight[h] = row_sight(p.mask ? p.mask + row * p.mask_row : nullptr, p.words, p.row_base + node, keys.columns, keys.prefix, p.window);
            const uint16_t* at = static_cast<const uint16_t*>(p.q) + row * p.q_row + head * p.q_head + 8 * c;
            q[h][0] = on[h] ? *reinterpret_cast<const uint4*>(at) : uint4{0, 0, 0, 0};
            q[h][1] = on[h] ? *reinterpret_cast<const uint4*>(at + 32) : uint4{0, 0, 0, 0};
        }

        // A key's row in K or V; null: no such cell.
        auto cell = [&](int at, const unsigned char* cache, int64_t page_bytes, int64_t slot_bytes, int64_t head_bytes) -> const unsigned char* {
            if (at < keys.first || at >= keys.end) return nullptr;
            const uint32_t page = p.by_page_size.quotient(static_cast<uint32_t>(at));
            const int id = p.table[request * p.table_row + page];
            if (id < 0 || id >= p.num_pages) return nullptr;
            return cache + id * page_bytes + (at - static_cast<int>(page) * p.page_size) * slot_bytes + kv * head_bytes;
        };
        auto start_of = [&](int step) { return base + 16 * (slice + step * slices); };
        auto load_k = [&](int step, uint4 (&k)[2][2]) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned char* at = step < steps ? cell(start_of(step) + 8 * n + g, p.k, p.k_page, p.k_slot, p.k_head) : nullptr;
                k[n][0] = at ? *reinterpret_cast<const uint4*>(at + 16 * c) : uint4{0, 0, 0, 0};
                k[n][1] = at ? *reinterpret_cast<const uint4*>(at + 64 + 16 * c) : uint4{0, 0, 0, 0};
            }
        };
        auto load_v = [&](int step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (lane + 32 * i) / 8, chunk = lane % 8;
                const unsigned char* at = step < steps ? cell(start_of(step) + row, p.v, p.v_page, p.v_slot, p.v_head) : nullptr;
                cp_async_16(shared.v[warp][step % kShortStages] + row * kShortVRow + 16 * chunk, at ? at + 16 * chunk : p.v, at != nullptr);
            }
            cp_async_commit();
        };

        float o[8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        uint4 k[2][2], next[2][2];
        load_k(0, k);
#pragma unroll
        for (int step = 0; step < kShortStages - 1; ++step) load_v(step);
        for (int step = 0; step < steps; ++step) {
            load_k(step + 1, next);
            load_v(step + kShortStages - 1);
            float s[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t first[4] = {q[0][half].x, q[1][half].x, q[0][half].y, q[1][half].y};
                    const uint32_t second[4] = {q[0][half].z, q[1][half].z, q[0][half].w, q[1][half].w};
                    mma_16816_bf16(s[n], first, k[n][half].x, k[n][half].y);
                    mma_16816_bf16(s[n], second, k[n][half].z, k[n][half].w);
                }
            }
            const int start = start_of(step);
            uint32_t weights[2][2];  // [row][keys 0-7, 8-15]: pairs of this lane
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint64_t seen = on[h] ? visible_positions(sight[h], keys.prefix, start) : 0;
                float x[4], high = top[h];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[i] = seen >> (8 * (i / 2) + 2 * c + i % 2) & 1 ? s[i / 2][2 * h + i % 2] * scale : -INFINITY;
                    high = fmaxf(high, x[i]);
                }
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                const float shift = high == -INFINITY ? 0.0f : high, alpha = exp2_approx(top[h] - shift);
                top[h] = high;
                sum[h] *= alpha;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[i] = exp2_approx(x[i] - shift);
                    sum[h] += x[i];
                }
#pragma unroll
                for (int d = 0; d < 8; ++d) {
                    o[d][2 * h] *= alpha;
                    o[d][2 * h + 1] *= alpha;
                }
                weights[h][0] = pack_bf16(x[0], x[1]);
                weights[h][1] = pack_bf16(x[2], x[3]);
            }
            cp_async_wait<kShortStages - 1>();
            __syncwarp();
            const uint32_t a[4] = {weights[0][0], weights[1][0], weights[0][1], weights[1][1]};
            const unsigned char* v = shared.v[warp][step % kShortStages];
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v + (lane / 8 % 2 * 8 + lane % 8) * kShortVRow + (2 * d + lane / 16) * 16);
                mma_16816_bf16(o[2 * d], a, b[0], b[1]);
                mma_16816_bf16(o[2 * d + 1], a, b[2], b[3]);
            }
            __syncwarp();
#pragma unroll
            for (int n = 0; n < 2; ++n) k[n][0] = next[n][0], k[n][1] = next[n][1];
        }
        cp_async_wait<0>();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
            const int r = g + 8 * h;
            if (c == 0) shared.top[warp][r] = top[h], shared.sum[warp][r] = sum[h];
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                shared.o[warp][r][8 * d + 2 * c] = o[d][2 * h];
                shared.o[warp][r][8 * d + 2 * c + 1] = o[d][2 * h + 1];
            }
        }
        cluster_barrier();
        for (int row = rank + blocks * warp; row < live; row += 4 * blocks) {  // packed rows of this block, one per warp at a time
            const int from = row / 16, r = row % 16;
            // lane j looks after slice j: block j / per_block, its warp j % per_block * groups + from
            const bool mine = lane < slices;
            const int block = mine ? lane / per_block : 0, w = (mine ? lane % per_block : 0) * groups + from;
            const float high = mine ? *cluster_map(&shared.top[w][r], block) : -INFINITY;
            const float part = mine ? *cluster_map(&shared.sum[w][r], block) : 0.0f;
            float most = high;
            for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
            const float weight = mine ? exp2_approx(high - (most == -INFINITY ? 0.0f : most)) : 0.0f;
            float total = weight * part;
            for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
            float2 y = {0.0f, 0.0f};
#pragma unroll 8
            for (int j = 0; j < slices; ++j) {
                const float2 v = *reinterpret_cast<const float2*>(cluster_map(&shared.o[j % per_block * groups + from][r][2 * lane], j / per_block));
                const float other = __shfl_sync(0xffffffffu, weight, j);
                y.x += other * v.x;
                y.y += other * v.y;
            }
            const int i = row0 + row, node = static_cast<int>(p.by_group.quotient(static_cast<uint32_t>(i)));
            const RowTarget target{keys.row0 + node, kv * p.group + i - node * p.group, true};
            const float factor = finish_row(p, target, kv, most, total, lane == 0);
            const uint32_t bits = pack_bf16(y.x * factor, y.y * factor);
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + target.row * p.out_row + target.head * p.out_head + 2 * lane) = bits;
        }
        cluster_barrier();  // nobody leaves, or writes again, while others read
    }
}

}  // namespace fv
