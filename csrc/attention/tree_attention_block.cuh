// SPDX-License-Identifier: Apache-2.0
// Tree attention of small models behind settled prefixes, bf16, head_dim 64: what does not depend on the launch before is done
// before the wait for it.
//
// A block of 16 warps takes one (request, kv head). Up to 64 packed rows (node x query head of the group) at a time: their 16-row
// groups and the keys, in steps of 16, are dealt to the warps, each with a running softmax of its own. The first steps of a
// warp are copied to shared memory before the wait where they lie wholly in the prefix (both operands of QK are permuted alike
// along the head); later ones are asked of the L2. After it q and the rows of the tree follow. Then the warps' results
// are merged through shared memory. The order of every sum depends on shapes and lengths only. Cost: the visible KV once per 16
// packed rows; one launch.
#pragma once
#include "algo/short_plan.h"
#include "attention/attention_merge.cuh"
#include "common/ptx.cuh"

namespace fv {

constexpr int kBlockWarps = 16, kBlockThreads = 32 * kBlockWarps, kBlockVRow = 64 * 2 + 16;  // bytes of a row of V: no two rows share banks

template <int kHeld>  // steps of a warp in flight
struct BlockShared {
    struct Step {
        uint4 k[4][32];  // what a lane asks for it reads itself
        unsigned char v[16 * kBlockVRow];
    };
    union {
        Step step[kHeld];
        float o[16][64 + 4];  // unnormalised, when the warp has read its last keys
    } warp[kBlockWarps];
    float top[kBlockWarps][16], sum[kBlockWarps][16];
};

template <int kHeld>
__global__ void __launch_bounds__(kBlockThreads) tree_attention_block_kernel(const __grid_constant__ AttentionParams p) {
    BlockShared<kHeld>& shared = *reinterpret_cast<BlockShared<kHeld>*>(dynamic_shared());
    allow_next_launch();
    bool waited = false;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int request = blockIdx.y, kv = blockIdx.x;
    // past the L1, which may hold what these words were in an earlier launch
    const RequestKeys keys = request_keys(__ldcg(p.cu_nodes + request), __ldcg(p.cu_nodes + request + 1), __ldcg(p.prefix + request), p.rows, p.row_base,
                                          p.capacity, p.window, p.mask == nullptr);
    const int packed = keys.nodes * p.group, base = keys.first / 16 * 16;
    const float scale = p.scale * (p.k_scale ? p.k_scale[kv * p.k_scale_stride] : 1.0f);
    auto& mine = shared.warp[warp];

    for (int row0 = 0; row0 < packed; row0 += 64) {
        const int live = min(64, packed - row0), groups = live <= 16 ? 1 : live <= 32 ? 2 : 4;
        const int slices = kBlockWarps / groups, group = warp % groups, slice = warp / groups;
        const int all_steps = (keys.end - base + 15) / 16, steps = max(0, (all_steps - slice + slices - 1) / slices);

        // A key's row in K or V; null: no such cell.
        auto cell = [&](int at, const unsigned char* cache, int64_t page_bytes, int64_t slot_bytes, int64_t head_bytes) -> const unsigned char* {
            if (at < keys.first || at >= keys.end) return nullptr;
            const uint32_t page = p.by_page_size.quotient(static_cast<uint32_t>(at));
            const int id = __ldcg(p.table + request * p.table_row + page);
            if (id < 0 || id >= p.num_pages) return nullptr;
            return cache + id * page_bytes + (at - static_cast<int>(page) * p.page_size) * slot_bytes + kv * head_bytes;
        };
        auto start_of = [&](int step) { return base + 16 * (slice + step * slices); };
        auto fetch = [&](int step, int at) {  // a group of copies, empty or not
            if (step < steps) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const unsigned char* from = cell(start_of(step) + 8 * n + g, p.k, p.k_page, p.k_slot, p.k_head);
                    cp_async_16(&mine.step[at].k[2 * n][lane], from ? from + 16 * c : p.k, from != nullptr);
                    cp_async_16(&mine.step[at].k[2 * n + 1][lane], from ? from + 64 + 16 * c : p.k, from != nullptr);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = (lane + 32 * i) / 8, chunk = lane % 8;
                    const unsigned char* from = cell(start_of(step) + row, p.v, p.v_page, p.v_slot, p.v_head);
                    cp_async_16(mine.step[at].v + row * kBlockVRow + 16 * chunk, from ? from + 16 * chunk : p.v, from != nullptr);
                }
            }
            cp_async_commit();
        };
        auto early = [&](int step) { return !waited && step < steps && start_of(step) + 16 <= keys.prefix; };

        int held = 0;
        while (held < kHeld && early(held)) fetch(held, held), ++held;
        for (int step = kHeld; early(step); ++step) {  // lane: 16 rows of K, then of V
            const unsigned char* at = lane < 16 ? cell(start_of(step) + lane, p.k, p.k_page, p.k_slot, p.k_head)
                                                : cell(start_of(step) + lane - 16, p.v, p.v_page, p.v_slot, p.v_head);
            if (at) prefetch_l2(at);
        }
        RowSight sight[2];
        const uint16_t* q_at[2];
        bool on[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = row0 + 16 * group + 8 * h + g;
            on[h] = i < packed;
            const int node = static_cast<int>(p.by_group.quotient(static_cast<uint32_t>(on[h] ? i : 0)));
            const int64_t row = keys.row0 + node;
            const int head = kv * p.group + (on[h] ? i : 0) - node * p.group;
            sight[h] = row_sight(p.mask ? p.mask + row * p.mask_row : nullptr, p.words, p.row_base + node, keys.columns, keys.prefix, p.window);
            q_at[h] = static_cast<const uint16_t*>(p.q) + row * p.q_row + head * p.q_head + 8 * c;
        }
        if (!waited) wait_for_previous_launch();
        waited = true;
        uint4 q[2][2];  // [row g, g + 8][dims 8 c.., 32 + 8 c..]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            q[h][0] = on[h] ? __ldcg(reinterpret_cast<const uint4*>(q_at[h])) : uint4{0, 0, 0, 0};
            q[h][1] = on[h] ? __ldcg(reinterpret_cast<const uint4*>(q_at[h] + 32)) : uint4{0, 0, 0, 0};
        }
        for (; held < kHeld; ++held) fetch(held, held);

        float o[8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        auto attend = [&](int step, int at) {
            cp_async_wait<kHeld - 1>();
            __syncwarp();
            float s[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 key = mine.step[at].k[2 * n + half][lane];
                    const uint32_t first[4] = {q[0][half].x, q[1][half].x, q[0][half].y, q[1][half].y};
                    const uint32_t second[4] = {q[0][half].z, q[1][half].z, q[0][half].w, q[1][half].w};
                    mma_16816_bf16(s[n], first, key.x, key.y);
                    mma_16816_bf16(s[n], second, key.z, key.w);
                }
            }
            const int start = start_of(step);
            const bool whole = p.window == 0 && start + 16 <= keys.prefix;  // what every row sees
            uint32_t weights[2][2];  // [row][keys 0-7, 8-15]: pairs of this lane
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint64_t seen = !on[h] ? 0 : whole ? ~0ull : visible_positions(sight[h], keys.prefix, start);
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
            const unsigned char* v = mine.step[at].v;
            const uint32_t a[4] = {weights[0][0], weights[1][0], weights[0][1], weights[1][1]};
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v + (lane / 8 % 2 * 8 + lane % 8) * kBlockVRow + (2 * d + lane / 16) * 16);
                mma_16816_bf16(o[2 * d], a, b[0], b[1]);
                mma_16816_bf16(o[2 * d + 1], a, b[2], b[3]);
            }
            __syncwarp();
        };
        for (int step = 0, at = 0; step < steps; ++step) {
            attend(step, at);
            fetch(step + kHeld, at);
            at = at + 1 == kHeld ? 0 : at + 1;
        }
        cp_async_wait<0>();
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
            const int r = g + 8 * h;
            if (c == 0) shared.top[warp][r] = top[h], shared.sum[warp][r] = sum[h];
#pragma unroll
            for (int d = 0; d < 8; ++d) *reinterpret_cast<float2*>(&mine.o[r][8 * d + 2 * c]) = float2{o[d][2 * h], o[d][2 * h + 1]};
        }
        __syncthreads();
        const int used = min(slices, all_steps);  // slices with keys
        for (int row = warp; row < live; row += kBlockWarps) {
            const int from = row / 16, r = row % 16;  // slice j: warp j * groups + from
            const float high = lane < used ? shared.top[lane * groups + from][r] : -INFINITY;
            float most = high;
#pragma unroll
            for (int d = 8; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            const float shift = most == -INFINITY ? 0.0f : most, weight = lane < used ? exp2_approx(high - shift) : 0.0f;
            float total = lane < used ? weight * shared.sum[lane * groups + from][r] : 0.0f;
#pragma unroll
            for (int d = 8; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            most = __shfl_sync(0xffffffffu, most, 0);
            total = __shfl_sync(0xffffffffu, total, 0);
            float2 y = {0.0f, 0.0f}, part[kBlockWarps];
#pragma unroll
            for (int j = 0; j < kBlockWarps; ++j) {  // all on their way at once
                part[j] = j < used ? *reinterpret_cast<const float2*>(&shared.warp[j * groups + from].o[r][2 * lane]) : float2{0.0f, 0.0f};
            }
#pragma unroll
            for (int j = 0; j < kBlockWarps; ++j) {
                const float other = __shfl_sync(0xffffffffu, weight, j);
                y.x += other * part[j].x;
                y.y += other * part[j].y;
            }
            const int i = row0 + row, node = static_cast<int>(p.by_group.quotient(static_cast<uint32_t>(i)));
            const RowTarget target{keys.row0 + node, kv * p.group + i - node * p.group, true};
            const float factor = finish_row(p, target, kv, most, total, lane == 0);
            const uint32_t bits = pack_bf16(y.x * factor, y.y * factor);
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + target.row * p.out_row + target.head * p.out_head + 2 * lane) = bits;
        }
        if (row0 + 64 < packed) __syncthreads();  // nobody writes again while others read
    }
    if (!waited) wait_for_previous_launch();
    if (request == 0) clear_padding(p);
}

}  // namespace fv
