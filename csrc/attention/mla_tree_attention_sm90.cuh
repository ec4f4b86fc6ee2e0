// SPDX-License-Identifier: Apache-2.0
// Attention over a latent cache on sm_90a: the pieces, masks, splits and merges of mla_tree_attention_kernel.cuh, the products
// by wgmma.
//
// Two warpgroups share 64 packed rows and tiles of 64 tokens. Warpgroup w scores the rows against tokens 32 w .. of a tile; the
// two exchange row maxima, put their weights side by side in shared memory, and warpgroup w adds the weighted values of all 64
// tokens in dims 256 w .. of the 512. Cost: one read of the visible latent rows per 64 rows; one launch.
#pragma once
#include "attention/attention_merge.cuh"
#include "attention/mla_tile.cuh"
#include "common/wgmma.cuh"

namespace fv {

template <class Kv>
struct MlaAttendWgmma {
    static constexpr int kRows = kMlaWgmmaRows, kTokens = kMlaWgmmaTokens, kParts = kLatentDims / 64, kBlock = kTokens * 128;
    static constexpr int kStage = kTokens * kLatentRowBytes, kLoadTokens = kTokens / 8;
    static constexpr int kNt = kTokens / 2 / 8, kOt = kLatentOut / 2 / 8;
    const AttentionParams& p;
    unsigned char *q_smem, *ring, *weights;  // [kParts][rows][128 bytes], stages of the same, [kRows][kTokens] 16 bits
    float* maxima;                           // [2][kRows]
    const int lane, warp, half;              // half: of the tokens, and of the dims of the result
    float o[kOt][4];
    float top[2], sum[2];                    // of rows 16 (warp % 4) + lane / 4 and + 8; sum: of this half, this lane

    __device__ __forceinline__ MlaAttendWgmma(const AttentionParams& params, unsigned char* shared)
        : p(params), q_smem(shared), ring(shared + kRows * kLatentRowBytes), weights(ring + params.stages * kStage),
          maxima(reinterpret_cast<float*>(weights + kRows * kTokens * 2)), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
          half(threadIdx.x >> 7) {}

    __device__ __forceinline__ int row_of(int h) { return 16 * (warp & 3) + 8 * h + lane / 4; }

    __device__ __forceinline__ void load_q(const Piece& piece) {
#pragma unroll 1
        for (int row = warp; row < kRows; row += 8) {
            const RowTarget t = row_target(p, piece, kRows, row);
            const unsigned char* src = static_cast<const unsigned char*>(p.q) + (t.live ? 2 * (t.row * p.q_row + t.head * p.q_head) : 0);
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int chunk = lane + 32 * i;
                if (chunk < kLatentRowBytes / 16) {
                    cp_async_16(q_smem + (chunk >> 3) * (kRows * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), src + 16 * chunk, t.live);
                }
            }
        }
    }

    // This lane's token of a tile, of the 8 of its warp.
    __device__ __forceinline__ int own_token() { return warp * kLoadTokens + (lane & 7); }
    __device__ __forceinline__ int find_page(const Piece& piece, int tile_begin) {
        const int at = tile_begin + own_token();
        if (at >= piece.end) return -1;
        return p.table[piece.request * p.table_row + p.by_page_size.quotient(static_cast<unsigned>(at))];
    }
    __device__ __forceinline__ const unsigned char* find_cell(int tile_begin, int page) {
        if (page < 0 || page >= p.num_pages) return nullptr;
        const unsigned at = static_cast<unsigned>(tile_begin + own_token());
        const int slot = static_cast<int>(at - p.by_page_size.quotient(at) * p.page_size);
        return p.k + page * p.k_page + slot * p.k_slot;
    }
    // This warp's tokens of one tile into `stage`; cells that do not exist become zeros.
    __device__ __forceinline__ void load_tile(unsigned char* stage, const unsigned char* cell) {
        const uint64_t mine = reinterpret_cast<uint64_t>(cell);
        const int chunk = lane & 7;
#pragma unroll
        for (int h = 0; h < kLoadTokens / 4; ++h) {
            const int token = (lane >> 3) + 4 * h, row = warp * kLoadTokens + token;
            const uint64_t from = __shfl_sync(kFullWarp, mine, token);
            unsigned char* to = stage + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                cp_async_16(to + part * kBlock, reinterpret_cast<const unsigned char*>(from) + part * 128 + chunk * 16, from != 0);
            }
        }
    }

    __device__ __forceinline__ void tile(const Piece& piece, const unsigned char* stage, int begin, bool masked) {
        float s[kNt][4];
        const MatrixDescriptor a = matrix_descriptor(q_smem, 1024), b = matrix_descriptor(stage + half * (kTokens / 2) * 128, 1024);
        wgmma_hold(s);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const MatrixDescriptor left = advance(a, part * kRows * 128 + i * 32), right = advance(b, part * kBlock + i * 32);
                if constexpr (is_bf16<Kv>) wgmma_ss_bf16(s, left, right, part + i > 0);
                else wgmma_ss_f16(s, left, right, part + i > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        float alpha[2], scale = p.scale;
        bool moved = false;
        if (!(scale > 0.0f)) {
#pragma unroll
            for (int n = 0; n < kNt; ++n) s[n][0] *= scale, s[n][1] *= scale, s[n][2] *= scale, s[n][3] *= scale;
            scale = 1.0f;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (masked) {
                const RowTarget t = row_target(p, piece, kRows, row_of(h));
                uint64_t seen = 0;
                if (t.live) {
                    const RowSight sight = row_sight(p.mask ? p.mask + t.row * p.mask_row : nullptr, p.words,
                                                     p.row_base + t.row - piece.keys.row0, piece.keys.columns, piece.keys.prefix, 0);
                    seen = visible_positions(sight, piece.keys.prefix, begin);
                }
                const uint32_t bits = static_cast<uint32_t>(seen >> 32 * half) >> 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < kNt; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!(bits >> (8 * n + e) & 1)) s[n][2 * h + e] = -INFINITY;
                    }
                }
            }
            float high = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < kNt; ++n) high = fmaxf(high, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
            high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
            alpha[h] = high;
            if ((lane & 3) == 0) maxima[half * kRows + row_of(h)] = high;
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float other = maxima[(half ^ 1) * kRows + row_of(h)], old = top[h];
            const float high = fmaxf(old, fmaxf(alpha[h], other) * scale);
            const float shift = high == -INFINITY ? 0.0f : high;  // nothing seen yet: all weights are 2^-inf = 0
            alpha[h] = exp2_approx(old - shift);
            moved = moved || high != old;
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
                const int row = row_of(h), chunk = half * kNt + n;
                *reinterpret_cast<uint32_t*>(weights + row * 128 + ((chunk ^ (row & 7)) << 4) + 4 * (lane & 3)) = Kv::pack(s[n][2 * h], s[n][2 * h + 1]);
            }
            sum[h] = sum[h] * alpha[h] + part;
        }
        if (__any_sync(kFullWarp, moved)) {
#pragma unroll
            for (int n = 0; n < kOt; ++n) o[n][0] *= alpha[0], o[n][1] *= alpha[0], o[n][2] *= alpha[1], o[n][3] *= alpha[1];
        }
        fence_shared_for_async();
        __syncthreads();
        const MatrixDescriptor w = matrix_descriptor(weights, 1024), v = matrix_descriptor(stage + half * 4 * kBlock, 1024, kBlock);
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTokens / 16; ++i) {
            if constexpr (is_bf16<Kv>) wgmma_st_bf16(o, advance(w, i * 32), advance(v, i * 2048), true);
            else wgmma_st_f16(o, advance(w, i * 32), advance(v, i * 2048), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
    }

    __device__ __forceinline__ void run(const Piece& piece) {
        int end = piece.end;
        if (p.mask == nullptr) {  // a chain's last row sees the most
            const int64_t last = static_cast<int64_t>(piece.tile + 1) * kRows / p.group + 1;
            end = static_cast<int>(min(static_cast<int64_t>(end), piece.keys.prefix + p.row_base + last));
        }
        const int tiles = end > piece.begin ? (end - piece.begin + kTokens - 1) / kTokens : 0;
        int page = tiles > 0 ? find_page(piece, piece.begin) : -1;
        load_q(piece);
        cp_async_commit();  // a group of its own: also a block without tokens waits for it
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kOt; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
        // two stages: while one tile is worked on, the next arrives
#pragma unroll 1
        for (int i = -2; i < tiles; ++i) {
            const int load = i + 2;
            if (i >= 0) {
                if (i + 1 < tiles) cp_async_wait<1>(); else cp_async_wait<0>();
                fence_shared_for_async();
                __syncthreads();  // the tile is there
                tile(piece, ring + (i & 1) * kStage, piece.begin + i * kTokens, piece.begin + (i + 1) * kTokens > piece.keys.prefix);
                __syncthreads();  // and has been read
            }
            if (load < tiles) {
                load_tile(ring + (load & 1) * kStage, find_cell(piece.begin + load * kTokens, page));
                cp_async_commit();
                if (load + 1 < tiles) page = find_page(piece, piece.begin + (load + 1) * kTokens);
            }
        }
        cp_async_wait<0>();
    }

    // The partial result goes to shared memory, in place of Q and the tiles.
    static_assert(mla_staged_bytes(kRows) <= kRows * kLatentRowBytes + 2 * kStage);
    __device__ __forceinline__ StagedRows staged() {
        const float* o_at = reinterpret_cast<const float*>(q_smem);
        return {o_at, reinterpret_cast<const float2*>(o_at + kRows * kLatentStagedRow), kLatentStagedRow, 0};
    }
    __device__ __forceinline__ void stage(const Piece&) {
        const StagedRows to = staged();
        __syncthreads();  // maxima, Q and the ring have been read
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
            const int row = row_of(h);
            if (half == 1 && (lane & 3) == 0) maxima[row] = sum[h];
            float* at = const_cast<float*>(to.o) + row * kLatentStagedRow + half * (kLatentOut / 2) + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < kOt; ++n) *reinterpret_cast<float2*>(at + 8 * n) = float2{o[n][2 * h], o[n][2 * h + 1]};
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (half == 0 && (lane & 3) == 0) const_cast<float2*>(to.stats)[row_of(h)] = float2{top[h], sum[h] + maxima[row_of(h)]};
        }
    }

    // Writes the rows out, or the partial result to `partial`.
    __device__ __forceinline__ void finish(const Piece& piece, float* partial) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
            if ((lane & 3) == 0) maxima[half * kRows + row_of(h)] = sum[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row_of(h), dim = half * (kLatentOut / 2) + 2 * (lane & 3);
            const float all = maxima[row] + maxima[kRows + row];
            if (partial) {
                if (half == 0 && (lane & 3) == 0) {
                    __stcg(partial + kRows * kLatentOut + row, top[h]);
                    __stcg(partial + kRows * (kLatentOut + 1) + row, all);
                }
                float* to = partial + row * kLatentOut + dim;
#pragma unroll
                for (int n = 0; n < kOt; ++n) __stcg(reinterpret_cast<float2*>(to + 8 * n), float2{o[n][2 * h], o[n][2 * h + 1]});
            } else {
                const RowTarget t = row_target(p, piece, kRows, row);
                if (!t.live) continue;
                const float factor = finish_row(p, t, 0, top[h], all, half == 0 && (lane & 3) == 0);
                uint16_t* to = static_cast<uint16_t*>(p.out) + t.row * p.out_row + t.head * p.out_head + dim;
#pragma unroll
                for (int n = 0; n < kOt; ++n) {
                    *reinterpret_cast<uint32_t*>(to + 8 * n) = Kv::pack(o[n][2 * h] * factor, o[n][2 * h + 1] * factor);
                }
            }
        }
    }
};

// grid: persistent; block: 256 threads; dynamic shared memory: Q, stages, weights, maxima, prefix sums, a few words.
template <class Kv>
__global__ void __launch_bounds__(kMlaThreads, 1) mla_tree_attention_sm90_kernel(const __grid_constant__ AttentionParams p) {
    using Attend = MlaAttendWgmma<Kv>;
    unsigned char* shared = dynamic_shared_aligned();
    unsigned char* rest = shared + Attend::kRows * kLatentRowBytes + p.stages * Attend::kStage + Attend::kRows * Attend::kTokens * 2 +
                          2 * Attend::kRows * 4;
    int* prefix = reinterpret_cast<int*>(rest);
    BlockWords& words = *reinterpret_cast<BlockWords*>(rest + prefix_bytes(p.batch));
    start_work(p, Attend::kRows, prefix, words.scratch, words.worker);
    Attend attend(p, shared);
    attend_pieces<kMlaThreads, Attend::kRows, kLatentOut>(p, attend, prefix, words);
}

}  // namespace fv
