// SPDX-License-Identifier: Apache-2.0
// Attention over a latent cache on sm_90a: the pieces, masks, splits and merges of mla_tree_attention_kernel.cuh, the products
// by wgmma.
//
// Three warpgroups share 64 packed rows and tiles of 64 tokens. Warpgroup 0 scores the rows against a tile and turns the scores into
// weights, in shared memory; warpgroups 1 and 2 add the weighted values, 256 of the 512 dims each. They also load: half of a tile's
// dims has been read once their own product with it is done, so that each fills it again without asking anybody. Warpgroup 0 thus
// works on one tile while the others work on the tile before. Cost: one read of the visible latent rows per 64 rows; one launch.
#pragma once
#include "attention/attention_merge.cuh"
#include "attention/mla_tile.cuh"
#include "common/wgmma.cuh"

namespace fv {

template <class Kv>
struct MlaAttendWgmma {
    static constexpr int kThreads = kMlaWgmmaThreads, kGroup = 128;  // of a warpgroup
    static constexpr int kRows = kMlaWgmmaRows, kTokens = kMlaWgmmaTokens, kParts = kLatentDims / 64, kBlock = kTokens * 128;
    static constexpr int kStage = kTokens * kLatentRowBytes, kStages = 2;
    static constexpr int kNt = kTokens / 8, kOt = kLatentOut / 2 / 8;

    const AttentionParams& p;
    unsigned char *q_smem, *ring, *weights;  // [kParts][rows][128 bytes], stages of the same, [kRows][kTokens] 16 bits
    float* factors;                          // [kRows]: of the values so far
    float2* stats;                           // [kRows]: maximum and sum
    // mbarriers. [kStages] full: loaded. ready, read: a tile's weights and factors are there; have been read. done: all warps are at the end
    // of a piece that is no partial result. queries: Q is there. own [2]: a warpgroup has read its half of a tile. No named barriers: racecheck
    // and synccheck lose track of those that warps reach at different instructions.
    uint64_t *full, *ready, *read, *done, *queries, *own;
    const int lane, warp, role;              // warp of the warpgroup; role 0: scores, 1 and 2: values
    int loaded, whole, taken, turns;         // so far: tiles of all pieces, pieces without a partial result, pieces, stages filled again

    __device__ __forceinline__ MlaAttendWgmma(const AttentionParams& params, unsigned char* shared)
        : p(params), q_smem(shared), ring(shared + kRows * kLatentRowBytes), weights(ring + kStages * kStage),
          factors(reinterpret_cast<float*>(weights + kRows * kTokens * 2)), stats(reinterpret_cast<float2*>(factors + kRows)),
          full(reinterpret_cast<uint64_t*>(stats + kRows)), ready(full + kStages), read(ready + 1), done(read + 1), queries(read + 2), own(read + 3),
          lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3), role(threadIdx.x >> 7), loaded(0), whole(0), taken(0), turns(0) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) mbarrier_init(full + i, 2 * kGroup);
            mbarrier_init(ready, kGroup), mbarrier_init(read, 2 * kGroup), mbarrier_init(done, kThreads);
            mbarrier_init(queries, kGroup), mbarrier_init(own, kGroup), mbarrier_init(own + 1, kGroup);
        }
    }

    __device__ __forceinline__ int row_of(int h) { return 16 * warp + 8 * h + lane / 4; }

    // ---- warpgroup 0 -------------------------------------------------------------------------------------------
    __device__ __forceinline__ void load_q(const Piece& piece) {
        constexpr int kEach = kRows / 4;  // rows of a warp; lane i finds row i
        const RowTarget t = row_target(p, piece, kRows, kEach * warp + (lane & (kEach - 1)));
        const uint64_t mine = t.live ? reinterpret_cast<uint64_t>(static_cast<const uint16_t*>(p.q) + t.row * p.q_row + t.head * p.q_head) : 0;
        unsigned char* to = q_smem + kEach * warp * 128 + (lane >> 3) * (kRows * 128);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const uint64_t from = __shfl_sync(kFullWarp, mine, i);
            const unsigned char* src = reinterpret_cast<const unsigned char*>(from) + 16 * lane;
            unsigned char* at = to + i * 128 + (((lane & 7) ^ (i & 7)) << 4);
            cp_async_16(at, src, from != 0);
            cp_async_16(at + 4 * (kRows * 128), src + 512, from != 0);
            if (lane < 8) cp_async_16(at + 8 * (kRows * 128), src + 1024, from != 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_shared_for_async();
        mbarrier_arrive(queries);
        mbarrier_wait(queries, taken & 1);
    }

    __device__ __forceinline__ void hide(const Piece& piece, float (&s)[kNt][4], int begin) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const RowTarget t = row_target(p, piece, kRows, row_of(h));
            uint64_t seen = 0;
            if (t.live) {
                const RowSight sight = row_sight(p.mask ? p.mask + t.row * p.mask_row : nullptr, p.words,
                                                 p.row_base + t.row - piece.keys.row0, piece.keys.columns, piece.keys.prefix, 0);
                seen = visible_positions(sight, piece.keys.prefix, begin);
            }
            seen >>= 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < kNt; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!(seen >> (8 * n + e) & 1)) s[n][2 * h + e] = -INFINITY;
                }
            }
        }
    }

    __device__ __forceinline__ void score_tiles(const Piece& piece, int tiles, float* partial) {
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows row_of(0), row_of(1); sum: this lane's
        load_q(piece);
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) {
            const int n_tile = loaded + i, begin = piece.begin + i * kTokens;
            const unsigned char* stage = ring + (n_tile & (kStages - 1)) * kStage;
            mbarrier_wait(full + (n_tile & (kStages - 1)), n_tile / kStages & 1);
            fence_shared_for_async();
            float s[kNt][4];
            const MatrixDescriptor a = matrix_descriptor(q_smem, 1024), b = matrix_descriptor(stage, 1024);
            wgmma_hold(s);
            wgmma_fence();
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const MatrixDescriptor left = advance(a, part * kRows * 128 + k * 32), right = advance(b, part * kBlock + k * 32);
                    if constexpr (is_bf16<Kv>) wgmma_ss_bf16(s, left, right, part + k > 0);
                    else wgmma_ss_f16(s, left, right, part + k > 0);
                }
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(s);
            float scale = p.scale, alpha[2];
            if (!(scale > 0.0f)) {
#pragma unroll
                for (int n = 0; n < kNt; ++n) s[n][0] *= scale, s[n][1] *= scale, s[n][2] *= scale, s[n][3] *= scale;
                scale = 1.0f;
            }
            if (begin + kTokens > piece.keys.prefix) hide(piece, s, begin);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float high = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
                for (int n = 1; n < kNt; ++n) high = fmaxf(high, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
                high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
                high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
                high = fmaxf(top[h], high * scale);
                const float shift = high == -INFINITY ? 0.0f : high;  // nothing seen yet: all weights are 2^-inf = 0
                alpha[h] = exp2_approx(top[h] - shift);
                top[h] = high;
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < kNt; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float w = exp2_approx(fmaf(s[n][2 * h + e], scale, -shift));
                        s[n][2 * h + e] = w;
                        part += w;
                    }
                }
                sum[h] = sum[h] * alpha[h] + part;
            }
            if (n_tile > 0) mbarrier_wait(read, (n_tile - 1) & 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row_of(h);
                if ((lane & 3) == 0) factors[row] = alpha[h];
#pragma unroll
                for (int n = 0; n < kNt; ++n) {
                    *reinterpret_cast<uint32_t*>(weights + row * 128 + ((n ^ (row & 7)) << 4) + 4 * (lane & 3)) = Kv::pack(s[n][2 * h], s[n][2 * h + 1]);
                }
            }
            fence_shared_for_async();
            mbarrier_arrive(ready);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
            const int row = row_of(h);
            if ((lane & 3) == 0) {
                if (partial) __stcg(partial + kRows * kLatentOut + row, top[h]), __stcg(partial + kRows * (kLatentOut + 1) + row, sum[h]);
                if (!partial) stats[row] = float2{top[h], sum[h]};
            }
        }
        if (!partial) mbarrier_arrive(done);  // statistics are there, Q has been read
    }

    // ---- warpgroups 1 and 2 ------------------------------------------------------------------------------------
    // This lane's token of a tile: lanes 0..7 of its lower half, 8..15 of its upper one.
    __device__ __forceinline__ int own_token() { return (lane & 8 ? 32 : 0) + 8 * warp + (lane & 7); }
    __device__ __forceinline__ int find_page(const Piece& piece, int tile_begin) {
        const int at = tile_begin + own_token();
        if (at >= piece.end) return -1;
        return p.table[piece.request * p.table_row + p.by_page_size.quotient(static_cast<unsigned>(at))];
    }
    __device__ __forceinline__ uint64_t find_cell(int tile_begin, int page) {
        if (page < 0 || page >= p.num_pages) return 0;
        const unsigned at = static_cast<unsigned>(tile_begin + own_token());
        const int slot = static_cast<int>(at - p.by_page_size.quotient(at) * p.page_size);
        return reinterpret_cast<uint64_t>(p.k + page * p.k_page + slot * p.k_slot);
    }
    // This warpgroup's dims of tokens 32 h .. of a tile; cells that do not exist become zeros.
    __device__ __forceinline__ void load_half(unsigned char* stage, uint64_t mine, int h) {
        const int half = role - 1, chunk = lane & 7;
        unsigned char* to = stage + (half * 4 + (lane >> 3)) * kBlock + (32 * h + 8 * warp) * 128;
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const uint64_t from = __shfl_sync(kFullWarp, mine, 8 * h + t);
            cp_async_16(to + t * 128 + ((chunk ^ t) << 4), reinterpret_cast<const unsigned char*>(from) + half * 512 + 16 * lane, from != 0);
        }
        const int t = 4 * half + (lane >> 3);
        const uint64_t from = __shfl_sync(kFullWarp, mine, 8 * h + t);
        cp_async_16(stage + 8 * kBlock + (32 * h + 8 * warp + t) * 128 + ((chunk ^ t) << 4),
                    reinterpret_cast<const unsigned char*>(from) + 1024 + 16 * chunk, from != 0);
    }

    __device__ __forceinline__ void load_tile(int n_tile, uint64_t cell) {
        unsigned char* stage = ring + (n_tile & (kStages - 1)) * kStage;
        load_half(stage, cell, 0);
        load_half(stage, cell, 1);
        mbarrier_arrive_after_copies(full + (n_tile & (kStages - 1)));
    }

    __device__ __forceinline__ void add_values(const Piece& piece, int tiles, float* partial, bool staged) {
        float o[kOt][4];
        const int half = role - 1;
        int page;       // of this lane's token in the tile after `next`
        uint64_t next;  // and its row in the tile that is loaded next
        {
            int pages[kStages + 1];
#pragma unroll
            for (int i = 0; i <= kStages; ++i) pages[i] = i < tiles ? find_page(piece, piece.begin + i * kTokens) : -1;
            page = kStages + 1 < tiles ? find_page(piece, piece.begin + (kStages + 1) * kTokens) : -1;
#pragma unroll
            for (int i = 0; i < kStages; ++i) {
                if (i < tiles) load_tile(loaded + i, find_cell(piece.begin + i * kTokens, pages[i]));
            }
            next = find_cell(piece.begin + kStages * kTokens, pages[kStages]);
        }
#pragma unroll
        for (int n = 0; n < kOt; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) {
            const int n_tile = loaded + i;
            const unsigned char* stage = ring + (n_tile & (kStages - 1)) * kStage;
            mbarrier_wait(ready, n_tile & 1);
            const float alpha0 = factors[row_of(0)], alpha1 = factors[row_of(1)];
            if (__any_sync(kFullWarp, alpha0 != 1.0f || alpha1 != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kOt; ++n) o[n][0] *= alpha0, o[n][1] *= alpha0, o[n][2] *= alpha1, o[n][3] *= alpha1;
            }
            const MatrixDescriptor w = matrix_descriptor(weights, 1024), v = matrix_descriptor(stage + half * 4 * kBlock, 1024, kBlock);
            wgmma_hold(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kTokens / 16; ++k) {
                if constexpr (is_bf16<Kv>) wgmma_st_bf16(o, advance(w, k * 32), advance(v, k * 2048), true);
                else wgmma_st_f16(o, advance(w, k * 32), advance(v, k * 2048), true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(o);
            mbarrier_arrive(read);
            if (i + kStages < tiles) {
                mbarrier_arrive(own + half);  // all warps have read this half
                mbarrier_wait(own + half, turns++ & 1);
                load_tile(n_tile + kStages, next);
                next = find_cell(piece.begin + (i + kStages + 1) * kTokens, page);
                page = i + kStages + 2 < tiles ? find_page(piece, piece.begin + (i + kStages + 2) * kTokens) : -1;
            }
        }
        if (!partial) {
            mbarrier_arrive(done);
            mbarrier_wait(done, whole & 1);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row_of(h), dim = half * (kLatentOut / 2) + 2 * (lane & 3);
            if (partial || staged) {
                float* to = partial ? partial + row * kLatentOut + dim : reinterpret_cast<float*>(q_smem) + row * kLatentStagedRow + dim;
#pragma unroll
                for (int n = 0; n < kOt; ++n) {
                    if (partial) __stcg(reinterpret_cast<float2*>(to + 8 * n), float2{o[n][2 * h], o[n][2 * h + 1]});
                    else *reinterpret_cast<float2*>(to + 8 * n) = float2{o[n][2 * h], o[n][2 * h + 1]};
                }
            } else {
                const RowTarget t = row_target(p, piece, kRows, row);
                if (!t.live) continue;
                const float factor = finish_row(p, t, 0, stats[row].x, stats[row].y, half == 0 && (lane & 3) == 0);
                uint16_t* to = static_cast<uint16_t*>(p.out) + t.row * p.out_row + t.head * p.out_head + dim;
#pragma unroll
                for (int n = 0; n < kOt; ++n) {
                    *reinterpret_cast<uint32_t*>(to + 8 * n) = Kv::pack(o[n][2 * h] * factor, o[n][2 * h + 1] * factor);
                }
            }
        }
    }

    // Streams the piece's keys and writes the rows out, or the partial result to `partial`; staged: it stays in shared memory, where
    // staged() describes it, in place of Q and the tiles.
    __device__ __forceinline__ void take(const Piece& piece, float* partial, bool staged) {
        int end = piece.end;
        if (p.mask == nullptr) {  // a chain's last row sees the most
            const int64_t last = static_cast<int64_t>(piece.tile + 1) * kRows / p.group + 1;
            end = static_cast<int>(min(static_cast<int64_t>(end), piece.keys.prefix + p.row_base + last));
        }
        const int tiles = end > piece.begin ? (end - piece.begin + kTokens - 1) / kTokens : 0;
        if (role == 0) score_tiles(piece, tiles, partial);
        else add_values(piece, tiles, partial, staged);
        loaded += tiles;
        whole += partial == nullptr;
        ++taken;
    }

    static_assert(mla_staged_bytes(kRows) <= kRows * kLatentRowBytes + kStages * kStage);
    __device__ __forceinline__ StagedRows staged() { return {reinterpret_cast<const float*>(q_smem), stats, kLatentStagedRow, 0}; }
};

// grid: persistent; block: kMlaWgmmaThreads; dynamic shared memory: Q, stages, weights, factors, statistics, barriers, prefix sums, a few words.
template <class Kv>
__global__ void __launch_bounds__(kMlaWgmmaThreads, 1) mla_tree_attention_sm90_kernel(const __grid_constant__ AttentionParams p) {
    using Attend = MlaAttendWgmma<Kv>;
    unsigned char* shared = dynamic_shared_aligned();
    unsigned char* rest = shared + mla_wgmma_smem() - kBlockWords;
    int* prefix = reinterpret_cast<int*>(rest);
    BlockWords& words = *reinterpret_cast<BlockWords*>(rest + prefix_bytes(p.batch));
    start_work(p, Attend::kRows, prefix, words.scratch, words.worker);
    Attend attend(p, shared);
    attend_pieces<kMlaWgmmaThreads, Attend::kRows, kLatentOut>(p, attend, prefix, words);
}

}  // namespace fv
