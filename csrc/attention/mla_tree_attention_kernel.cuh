// SPDX-License-Identifier: Apache-2.0
// Tensor-core attention over a latent cache, one kernel for sm_80..sm_120: mma.m16n8k16 fed by a cp.async ring.
//
// A block of 8 warps takes pieces of sequences (attention_work.cuh): tile_rows packed rows (node x head) against a run of
// cache positions, so a latent row is read once for all heads and nodes of a tile. Per tile of 32 (16) tokens: each warp
// scores 32 (16) rows over a share of the 576 dims, which stays in its registers where 64 rows of Q find no room; the shares are summed while 8 rows per warp take their softmax step; then
// each warp adds the weighted values of all rows in 64 of the 512 dims. Split sequences: as in tree_attention_kernel.cuh.
// Cost: one read of the visible latent rows per tile of 64 (32) rows; one launch.
#pragma once
#include "attention/attention_merge.cuh"
#include "attention/mla_tile.cuh"

namespace fv {

template <class T>
struct MlaAttend {
    using Kv = typename T::Kv;
    const AttentionParams& p;
    unsigned char *q_smem, *ring;
    float* scores;            // [kSplit][kRows][kScoreRow]
    unsigned char* weights;   // [kRows][kTokens] 16 bits
    float* factors;           // [2][kRows]: rescaling of o; in the end maximum and sum
    const int lane, warp;
    float o[T::kMt][T::kOt][4];
    float top, sum;           // of row 8 warp + lane % 8, sum: this lane's share
    uint32_t q_fragments[T::kQInRegisters ? T::kSteps / T::kSplit : 1][T::kQm][4];  // of this warp's rows and dims

    __device__ __forceinline__ MlaAttend(const AttentionParams& params, unsigned char* shared)
        : p(params), q_smem(shared), ring(shared + T::kQBytes), scores(reinterpret_cast<float*>(ring + params.stages * T::kStage)),
          weights(reinterpret_cast<unsigned char*>(scores) + T::kScoreBytes),
          factors(reinterpret_cast<float*>(weights + T::kWeightBytes)), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

    __device__ __forceinline__ void load_q(const Piece& piece) {
        if constexpr (T::kQInRegisters) {
            constexpr int kOwn = T::kSteps / T::kSplit;
#pragma unroll
            for (int i = 0; i < 2 * T::kQm; ++i) {  // rows lane / 4 + 8 i of the group
                const RowTarget t = row_target(p, piece, T::kRows, warp / T::kSplit * T::kGroupRows + 8 * i + lane / 4);
                const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.q) + (t.live ? t.row * p.q_row + t.head * p.q_head : 0)) +
                                       (warp % T::kSplit * kOwn * 8 + (lane & 3));
#pragma unroll
                for (int step = 0; step < kOwn; ++step) {
                    q_fragments[step][i / 2][i % 2] = t.live ? from[8 * step] : 0;
                    q_fragments[step][i / 2][2 + i % 2] = t.live ? from[8 * step + 4] : 0;
                }
            }
            return;
        }
#pragma unroll 1
        for (int row = warp; row < T::kRows; row += T::kWarps) {
            const RowTarget t = row_target(p, piece, T::kRows, row);
            const unsigned char* src = static_cast<const unsigned char*>(p.q) + (t.live ? 2 * (t.row * p.q_row + t.head * p.q_head) : 0);
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int chunk = lane + 32 * i;
                if (chunk < kLatentRowBytes / 16) cp_async_16(q_smem + latent_offset(row, chunk), src + 16 * chunk, t.live);
            }
        }
    }

    // This lane's token of a tile: lanes / kLoadTokens look after one of the warp's tokens.
    __device__ __forceinline__ int own_token() { return warp * T::kLoadTokens + lane / (32 / T::kLoadTokens); }
    __device__ __forceinline__ int find_page(const Piece& piece, int tile_begin) {
        const int at = tile_begin + own_token();
        if (at >= piece.end) return -1;
        return p.table[piece.request * p.table_row + p.by_page_size.quotient(static_cast<unsigned>(at))];
    }
    // The token's row; null: no such cell.
    __device__ __forceinline__ const unsigned char* find_cell(int tile_begin, int page) {
        if (page < 0 || page >= p.num_pages) return nullptr;
        const unsigned at = static_cast<unsigned>(tile_begin + own_token());
        const int slot = static_cast<int>(at - p.by_page_size.quotient(at) * p.page_size);
        return p.k + page * p.k_page + slot * p.k_slot;
    }
    // This warp's tokens of one tile into `stage`; cells that do not exist become zeros.
    __device__ __forceinline__ void load_tile(unsigned char* stage, const unsigned char* cell) {
        constexpr int kGroups = kLatentRowBytes / 128, kAtOnce = 4 / T::kLoadTokens;  // groups of 8 chunks
        const int token = own_token(), part = kAtOnce == 1 ? 0 : lane >> 3 & 1;
        unsigned char* to = stage + latent_offset(token, lane & 7) + part * 128;
        const unsigned char* from = cell + (lane & 7) * 16 + part * 128;
#pragma unroll
        for (int g = 0; g < kGroups; g += kAtOnce) {
            if (g + part < kGroups) cp_async_16(to + g * 128, from + g * 128, cell != nullptr);
        }
    }

    // This warp's share of the scores: its group's rows x the tile's tokens over its dims.
    __device__ __forceinline__ void score(const unsigned char* stage) {
        const int group = warp / T::kSplit, share = warp % T::kSplit;
        float s[T::kQm][T::kNt][4];
#pragma unroll
        for (int m = 0; m < T::kQm; ++m) {
#pragma unroll
            for (int n = 0; n < T::kNt; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
        }
        const auto add = [&](const uint32_t (&a)[T::kQm][4], int step) {
#pragma unroll
            for (int n = 0; n < T::kNt; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, stage + latent_offset(8 * n + (lane & 7) + (lane >> 4 & 1) * 8, 2 * step + (lane >> 3 & 1)));
#pragma unroll
                for (int m = 0; m < T::kQm; ++m) {
                    Kv::mma(s[m][n], a[m], b[0], b[1]);
                    Kv::mma(s[m][n + 1], a[m], b[2], b[3]);
                }
            }
        };
        if constexpr (T::kQInRegisters) {
            constexpr int kOwn = T::kSteps / T::kSplit;
#pragma unroll
            for (int step = 0; step < kOwn; ++step) add(q_fragments[step], share * kOwn + step);
        } else {
            const int first = T::kSteps * share / T::kSplit, last = T::kSteps * (share + 1) / T::kSplit;
#pragma unroll 3
            for (int step = first; step < last; ++step) {
                uint32_t a[T::kQm][4];
#pragma unroll
                for (int m = 0; m < T::kQm; ++m) {
                    ldmatrix_x4(a[m], q_smem + latent_offset(group * T::kGroupRows + 16 * m + (lane & 15), 2 * step + (lane >> 4)));
                }
                add(a, step);
            }
        }
        // lane 4 g + t holds tokens 8 n + 2 t + e of row g: stored as floats t * 2 kNt + 2 n + e
#pragma unroll
        for (int m = 0; m < T::kQm; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = group * T::kGroupRows + 16 * m + 8 * h + lane / 4;
                float* to = scores + (share * T::kRows + row) * T::kScoreRow + (lane & 3) * 2 * T::kNt;
#pragma unroll
                for (int n = 0; n < T::kNt; n += 2) {
                    *reinterpret_cast<float4*>(to + 2 * n) =
                        float4{s[m][n][2 * h], s[m][n][2 * h + 1], s[m][n + 1][2 * h], s[m][n + 1][2 * h + 1]};
                }
            }
        }
    }

    // A step of the running softmax: 8 rows per warp, 4 lanes per row.
    __device__ __forceinline__ void softmax(const Piece& piece, int begin, bool masked, float scale) {
        if (warp >= T::kRows / 8) return;
        const int row = 8 * warp + (lane & 7), t = lane >> 3;
        float v[2 * T::kNt];
#pragma unroll
        for (int i = 0; i < 2 * T::kNt; ++i) v[i] = 0.0f;
#pragma unroll
        for (int share = 0; share < T::kSplit; ++share) {
            const float* from = scores + (share * T::kRows + row) * T::kScoreRow + t * 2 * T::kNt;
#pragma unroll
            for (int i = 0; i < 2 * T::kNt; i += 4) {
                const float4 x = *reinterpret_cast<const float4*>(from + i);
                v[i] += x.x, v[i + 1] += x.y, v[i + 2] += x.z, v[i + 3] += x.w;
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * T::kNt; ++i) v[i] *= scale;
        if (masked) {
            const RowTarget target = row_target(p, piece, T::kRows, row);
            uint64_t seen = 0;
            if (target.live) {
                const RowSight sight = row_sight(p.mask ? p.mask + target.row * p.mask_row : nullptr, p.words,
                                                 p.row_base + target.row - piece.keys.row0, piece.keys.columns, piece.keys.prefix, 0);
                seen = visible_positions(sight, piece.keys.prefix, begin);
            }
            const uint32_t bits = static_cast<uint32_t>(seen) >> 2 * t;
#pragma unroll
            for (int i = 0; i < 2 * T::kNt; ++i) {
                if (!(bits >> (8 * (i / 2) + i % 2) & 1)) v[i] = -INFINITY;
            }
        }
        float high = v[0];
#pragma unroll
        for (int i = 1; i < 2 * T::kNt; ++i) high = fmaxf(high, v[i]);
        high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 8));
        high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 16));
        high = fmaxf(high, top);
        const float shift = high == -INFINITY ? 0.0f : high;  // nothing seen yet: all weights are 2^-inf = 0
        const float alpha = exp2_approx(top - shift);
        top = high;
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * T::kNt; ++i) {
            v[i] = exp2_approx(v[i] - shift);
            part += v[i];
        }
        sum = sum * alpha + part;
        if (t == 0) factors[row] = alpha;
#pragma unroll
        for (int n = 0; n < T::kNt; ++n) {
            *reinterpret_cast<uint32_t*>(weights + weight_offset<T::kTokens>(row, n) + 4 * t) = Kv::pack(v[2 * n], v[2 * n + 1]);
        }
    }

    // o = o x factors + weights x V, this warp's 64 dims.
    __device__ __forceinline__ void add_values(const unsigned char* stage) {
        float alpha[T::kMt][2];
        bool moved = false;
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                alpha[m][h] = factors[16 * m + 8 * h + lane / 4];
                moved = moved || alpha[m][h] != 1.0f;
            }
        }
        if (__any_sync(kFullWarp, moved)) {
#pragma unroll
            for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
                for (int n = 0; n < T::kOt; ++n) {
                    o[m][n][0] *= alpha[m][0], o[m][n][1] *= alpha[m][0];
                    o[m][n][2] *= alpha[m][1], o[m][n][3] *= alpha[m][1];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < T::kTokens / 16; ++k) {
            uint32_t a[T::kMt][4];
#pragma unroll
            for (int m = 0; m < T::kMt; ++m) {
                ldmatrix_x4(a[m], weights + weight_offset<T::kTokens>(16 * m + (lane & 15), 2 * k + (lane >> 4)));
            }
#pragma unroll
            for (int n = 0; n < T::kOt; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, stage + latent_offset(16 * k + (lane & 15), warp * T::kOt + n + (lane >> 4)));
#pragma unroll
                for (int m = 0; m < T::kMt; ++m) {
                    Kv::mma(o[m][n], a[m], b[0], b[1]);
                    Kv::mma(o[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void wait(int stages) {
        switch (stages) {  // all but the newest stages - 2 groups
            case 2: cp_async_wait<0>(); break;
            case 3: cp_async_wait<1>(); break;
            case 4: cp_async_wait<2>(); break;
            case 5: cp_async_wait<3>(); break;
            default: cp_async_wait<4>(); break;
        }
    }

    __device__ __forceinline__ void run(const Piece& piece) {
        const int stages = p.stages;
        int end = piece.end;
        if (p.mask == nullptr) {  // a chain's last row sees the most
            const int64_t last = static_cast<int64_t>(piece.tile + 1) * T::kRows / p.group + 1;
            end = static_cast<int>(min(static_cast<int64_t>(end), piece.keys.prefix + p.row_base + last));
        }
        const int tiles = end > piece.begin ? (end - piece.begin + T::kTokens - 1) / T::kTokens : 0;
        int page = tiles > 0 ? find_page(piece, piece.begin) : -1;
        load_q(piece);
        top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int n = 0; n < T::kOt; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
        }
        unsigned char *into = ring, *from = ring, *const ring_end = ring + stages * T::kStage;
#pragma unroll 1
        for (int i = 1 - stages; i < tiles; ++i) {  // the first stages - 1 rounds only load
            const int begin = piece.begin + i * T::kTokens, load = i + stages - 1;
            if (i >= 0) {
                wait(stages);
                __syncthreads();  // the tile is there, and the one before it has been read
            }
            if (load < tiles) {
                load_tile(into, find_cell(begin + (stages - 1) * T::kTokens, page));
                if ((into += T::kStage) == ring_end) into = ring;
                if (load + 1 < tiles) page = find_page(piece, begin + stages * T::kTokens);
            }
            cp_async_commit();
            if (i < 0) continue;
            score(from);
            __syncthreads();
            softmax(piece, begin, begin + T::kTokens > piece.keys.prefix, p.scale);
            __syncthreads();
            add_values(from);
            if ((from += T::kStage) == ring_end) from = ring;
        }
        cp_async_wait<0>();
    }

    // The partial result goes to shared memory, in place of Q and the ring (mla_launch sees to the room).
    __device__ __forceinline__ StagedRows staged() {
        const float* o_at = reinterpret_cast<const float*>(q_smem);
        return {o_at, reinterpret_cast<const float2*>(o_at + T::kRows * kLatentStagedRow), kLatentStagedRow, 0};
    }
    __device__ __forceinline__ void stage(const Piece&) {
        const StagedRows to = staged();
        __syncthreads();
        if (warp < T::kRows / 8) {
            sum += __shfl_xor_sync(kFullWarp, sum, 8);
            sum += __shfl_xor_sync(kFullWarp, sum, 16);
            if (lane < 8) const_cast<float2*>(to.stats)[8 * warp + lane] = float2{top, sum};
        }
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* at = const_cast<float*>(to.o) + (16 * m + 8 * h + lane / 4) * kLatentStagedRow + warp * 8 * T::kOt + 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < T::kOt; ++n) *reinterpret_cast<float2*>(at + 8 * n) = float2{o[m][n][2 * h], o[m][n][2 * h + 1]};
            }
        }
    }

    // Writes the rows out, or the partial result to `partial`.
    __device__ __forceinline__ void finish(const Piece& piece, float* partial) {
        __syncthreads();  // factors have been read
        if (warp < T::kRows / 8) {
            sum += __shfl_xor_sync(kFullWarp, sum, 8);
            sum += __shfl_xor_sync(kFullWarp, sum, 16);
            const int row = 8 * warp + (lane & 7);
            if (lane < 8) {
                if (partial) {
                    partial[T::kRows * kLatentOut + row] = top;
                    partial[T::kRows * (kLatentOut + 1) + row] = sum;
                } else {
                    const RowTarget t = row_target(p, piece, T::kRows, row);
                    factors[row] = t.live ? finish_row(p, t, 0, top, sum, true) : 0.0f;
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = 16 * m + 8 * h + lane / 4, dim = warp * 8 * T::kOt + 2 * (lane & 3);
                if (partial) {
                    float* to = partial + row * kLatentOut + dim;
#pragma unroll
                    for (int n = 0; n < T::kOt; ++n) {
                        __stcg(reinterpret_cast<float2*>(to + 8 * n), float2{o[m][n][2 * h], o[m][n][2 * h + 1]});
                    }
                } else {
                    const RowTarget t = row_target(p, piece, T::kRows, row);
                    if (!t.live) continue;
                    const float factor = factors[row];
                    uint16_t* to = static_cast<uint16_t*>(p.out) + t.row * p.out_row + t.head * p.out_head + dim;
#pragma unroll
                    for (int n = 0; n < T::kOt; ++n) {
                        *reinterpret_cast<uint32_t*>(to + 8 * n) = Kv::pack(o[m][n][2 * h] * factor, o[m][n][2 * h + 1] * factor);
                    }
                }
            }
        }
    }

    // Streams the piece's keys and writes the rows out, or the partial result to `partial`; staged: it stays in shared memory, where staged()
    // describes it.
    __device__ __forceinline__ void take(const Piece& piece, float* partial, bool staged) {
        run(piece);
        if (staged) stage(piece); else finish(piece, partial);
    }
};

// grid: persistent; block: 256 threads; dynamic shared memory: prefix sums, Q, ring, scores, weights (mla_launch).
template <class T>
__global__ void __launch_bounds__(kMlaThreads, 1) mla_tree_attention_kernel(const __grid_constant__ AttentionParams p) {
    int* prefix = reinterpret_cast<int*>(dynamic_shared());
    BlockWords& words = *reinterpret_cast<BlockWords*>(dynamic_shared() + prefix_bytes(p.batch));
    start_work(p, T::kRows, prefix, words.scratch, words.worker);
    MlaAttend<T> attend(p, dynamic_shared() + prefix_bytes(p.batch) + kBlockWords);
    attend_pieces<kMlaThreads, T::kRows, kLatentOut>(p, attend, prefix, words);
}

}  // namespace fv
