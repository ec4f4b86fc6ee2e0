// SPDX-License-Identifier: Apache-2.0
// Tree attention on sm_90a: the same pieces, masks, splits and merges as tree_attention_kernel.cuh, the products by wgmma.
//
// One warpgroup per 64 packed rows; one takes tiles of 64 tokens, two share tiles of 128 tokens, which pass through a ring of stages. Scores
// and values stay in the registers of the row's warp, so the running softmax needs no other warp. fp8 tiles are converted to
// f16 once per block, in shared memory. Cost: one read of the visible KV per 64 or 128 rows; one launch.
#pragma once
#include "attention/tree_attention_kernel.cuh"
#include "common/wgmma.cuh"

namespace fv {

template <int kHeadDim_, int kRows_, class Kv_>
struct WgmmaTile {
    using Kv = Kv_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kThreads = 2 * kRows, kWarps = kThreads / 32;
    static constexpr int kTokens = wgmma_tokens(kRows), kWarpRows = 16, kSplit = 1, kSub = 64;
    static constexpr int kLoadTokens = kTokens / kWarps;
    static constexpr int kMt = 1, kNt = kTokens / 8, kOt = kHeadDim / 8, kParts = kHeadDim / 64;
    static constexpr int kKvRow = kHeadDim * Kv::kBytes, kQRow = kHeadDim * 2;
    static constexpr int kStage = 2 * kTokens * kKvRow, kQBytes = kRows * kQRow;
    static constexpr int kWideBytes = wgmma_wide_bytes(kRows, kHeadDim, Kv::kBytes);  // K, then V of one tile in f16
    static constexpr bool kQInRegisters = false;
    static constexpr bool kOverlaps = Kv::kBytes == 2;  // the products of one tile run beside the softmax of the next
    static_assert(kHeadDim == 128 && (kRows == 64 || kRows == 128));
};

// Byte offset of chunk `chunk` of 8 dims of row `row`: blocks of 64 dims, each [rows][128 bytes].
template <int kRowsOfBlock>
__device__ __forceinline__ int block_offset(int row, int chunk) {
    return (chunk >> 3) * (kRowsOfBlock * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <class T>
struct AttendWgmma : Attend<T> {
    using Kv = typename T::Kv;
    using Base = Attend<T>;
    using Base::lane, Base::warp, Base::o, Base::top, Base::sum, Base::p, Base::ring, Base::q_smem, Base::seen;
    unsigned char* wide;

    // shared: Q, f16 copies (fp8), the ring of stages, seen
    __device__ __forceinline__ AttendWgmma(const AttentionParams& params, unsigned char* shared)
        : Base(params, shared, shared + T::kQBytes + T::kWideBytes,
               reinterpret_cast<uint64_t*>(shared + T::kQBytes + T::kWideBytes + params.stages * T::kStage)),
          wide(shared + T::kQBytes) {}

    __device__ __forceinline__ void load_q(const Piece& piece) {
        constexpr int kChunks = T::kHeadDim / 8, kStep = T::kThreads / kChunks;
        const int chunk = threadIdx.x % kChunks;
#pragma unroll 4
        for (int row = threadIdx.x / kChunks; row < T::kRows; row += kStep) {
            const RowTarget t = row_target(p, piece, T::kRows, row);
            const uint16_t* src = static_cast<const uint16_t*>(p.q) + (t.live ? t.row * p.q_row + t.head * p.q_head : 0) + chunk * 8;
            unsigned char* to = q_smem + block_offset<T::kRows>(row, chunk);
            if (Kv::kBytes == 2 || p.q_type == Element::kF16) {
                cp_async_16(to, src, t.live);
            } else {
                const uint4 v = t.live ? *reinterpret_cast<const uint4*>(src) : uint4{0, 0, 0, 0};
                *reinterpret_cast<uint4*>(to) = uint4{narrow(v.x), narrow(v.y), narrow(v.z), narrow(v.w)};
            }
        }
    }
    // Two bf16 as f16; beyond its range: the largest.
    static __device__ __forceinline__ uint32_t narrow(uint32_t w) {
        const float low = __uint_as_float(w << 16), high = __uint_as_float(w & 0xffff0000u);
        return pack_f16(fminf(fmaxf(low, -65504.0f), 65504.0f), fminf(fmaxf(high, -65504.0f), 65504.0f));
    }

    // K or V (half 0 or 1) of this warp's tokens of one tile into `stage`; cells that do not exist become zeros.
    template <int kHalf>
    __device__ __forceinline__ void load_half(unsigned char* stage, const unsigned char* cell) {
        constexpr int kChunks = T::kKvRow / 16, kAtOnce = 32 / kChunks, kLoads = T::kLoadTokens / kAtOnce;
        const unsigned there = __ballot_sync(kFullWarp, cell != nullptr);
        const uint64_t mine = reinterpret_cast<uint64_t>(cell);
        const int first = lane / kChunks, chunk = lane % kChunks;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int token = first + kAtOnce * i, row = warp * T::kLoadTokens + token;
            const int at = Kv::kBytes == 2 ? block_offset<T::kTokens>(row, chunk) : row * T::kKvRow + ((chunk ^ (row & 1) << 2) << 4);
            const uint64_t from = __shfl_sync(kFullWarp, mine, token + 16 * kHalf);
            cp_async_16(stage + kHalf * (T::kStage / 2) + at, reinterpret_cast<const unsigned char*>(from) + chunk * 16,
                        there >> (token + 16 * kHalf) & 1);
        }
    }
    __device__ __forceinline__ void load_tile(unsigned char* stage, const unsigned char* cell) {
        load_half<0>(stage, cell);
        load_half<1>(stage, cell);
    }

    // K or V of an fp8 tile -> f16 in `wide`.
    __device__ __forceinline__ void widen(const unsigned char* tile) {
        // eight lanes take 64 dims of two tokens, so that they touch different banks on both sides
        const int chunk = threadIdx.x & 3, token = static_cast<int>(threadIdx.x >> 2);
        const int from = token * T::kKvRow + ((chunk ^ (token & 1) << 2) << 4), to = block_offset<T::kTokens>(token, 2 * chunk);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int block = i >> 1, more = (i & 1) * (T::kTokens / 2);  // 64 dims, tokens
            const uint4 x = *reinterpret_cast<const uint4*>(tile + (from ^ block << 6) + more * T::kKvRow);
            unsigned char* at = wide + block * T::kTokens * 128 + more * 128;
            *reinterpret_cast<uint4*>(at + to) = uint4{e4m3x2_to_f16x2(x.x), e4m3x2_to_f16x2(x.x >> 16), e4m3x2_to_f16x2(x.y), e4m3x2_to_f16x2(x.y >> 16)};
            *reinterpret_cast<uint4*>(at + (to ^ 16)) = uint4{e4m3x2_to_f16x2(x.z), e4m3x2_to_f16x2(x.z >> 16), e4m3x2_to_f16x2(x.w), e4m3x2_to_f16x2(x.w >> 16)};
        }
    }

    // seen[row], for every 64 tokens: the positions from `start` on that each row of the tile sees. All threads; ends with a barrier.
    __device__ __forceinline__ void look_at(const Piece& piece, int start) {
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < T::kRows * (T::kTokens / 64); i += T::kThreads) {
            const RowTarget t = row_target(p, piece, T::kRows, i % T::kRows);
            const int from = start + i / T::kRows * 64;
            uint64_t bits = 0;
            if (t.live) {
                const RowSight sight = row_sight(p.mask ? p.mask + t.row * p.mask_row : nullptr, p.words,
                                                 p.row_base + t.row - piece.keys.row0, piece.keys.columns, piece.keys.prefix, p.window);
                bits = visible_positions(sight, piece.keys.prefix, from) & low_bits(piece.end - from);
            }
            seen[i] = bits;
        }
        __syncthreads();
    }
    __device__ __forceinline__ void hide(float (&s)[1][T::kNt][4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 0; n < T::kNt; ++n) {
                const uint64_t bits = seen[n / 8 * T::kRows + 16 * warp + 8 * h + lane / 4] >> 2 * (lane & 3);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!(bits >> (8 * (n % 8) + e) & 1)) s[0][n][2 * h + e] = -INFINITY;
                }
            }
        }
    }

    using Weights = uint32_t[T::kTokens / 16][4];

    // s = Q K^T and o += w V of one tile: issued, and committed as a group.
    __device__ __forceinline__ void issue_scores(float (&s)[1][T::kNt][4], const unsigned char* k) {
        constexpr int kColumns = T::kOverlaps ? T::kNt : 8;  // of a product, in eights
        const MatrixDescriptor a = matrix_descriptor(q_smem + warp / 4 * 64 * 128, 1024), b = matrix_descriptor(k, 1024);
        wgmma_hold(s[0]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int n = 0; n < T::kNt / kColumns; ++n) {
                    const MatrixDescriptor left = advance(a, part * T::kRows * 128 + i * 32);
                    const MatrixDescriptor right = advance(b, part * T::kTokens * 128 + n * 64 * 128 + i * 32);
                    float(&to)[kColumns][4] = *reinterpret_cast<float(*)[kColumns][4]>(&s[0][kColumns * n]);
                    if constexpr (is_bf16<Kv>) wgmma_ss_bf16(to, left, right, part + i > 0);
                    else wgmma_ss_f16(to, left, right, part + i > 0);
                }
            }
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void pack(Weights& w, const float (&s)[1][T::kNt][4]) {
#pragma unroll
        for (int i = 0; i < T::kTokens / 16; ++i) {
            w[i][0] = Kv::pack(s[0][2 * i][0], s[0][2 * i][1]);
            w[i][1] = Kv::pack(s[0][2 * i][2], s[0][2 * i][3]);
            w[i][2] = Kv::pack(s[0][2 * i + 1][0], s[0][2 * i + 1][1]);
            w[i][3] = Kv::pack(s[0][2 * i + 1][2], s[0][2 * i + 1][3]);
        }
    }
    __device__ __forceinline__ void issue_values(Weights& w, const unsigned char* values) {
        const MatrixDescriptor v = matrix_descriptor(values, 1024, T::kTokens * 128);
        wgmma_hold(o[0]);
        wgmma_hold(w);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < T::kTokens / 16; ++i) {
            if constexpr (is_bf16<Kv>) wgmma_rs_bf16(o[0], w[i], advance(v, i * 2048), true);
            else wgmma_rs_f16(o[0], w[i], advance(v, i * 2048), true);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void tile(const unsigned char* stage, bool masked, float scale) {
        float s[1][T::kNt][4];
        issue_scores(s, Kv::kBytes == 2 ? stage : wide);
        wgmma_wait<0>();
        wgmma_hold(s[0]);
        if (Kv::kBytes == 1) {
            __syncthreads();  // K has been read
            widen(stage + T::kStage / 2);
        }
        const float factor = this->cap(s, scale);
        if (masked) hide(s);
        this->softmax(s, factor);
        if (Kv::kBytes == 1) {
            fence_shared_for_async();
            __syncthreads();
        }
        Weights w;
        pack(w, s);
        issue_values(w, Kv::kBytes == 2 ? stage + T::kStage / 2 : wide);
        wgmma_wait<0>();
        wgmma_hold(o[0]);
    }

    // The tiles of a piece so that the products of one tile run beside the softmax of the next: round i has the scores of tile i and the
    // values of tile i - 1 on their way together. V of a tile is loaded a round after its K.
    __device__ __forceinline__ void run_overlapping(const Piece& piece, int tiles, int page, float scale, int free_end, int free_begin) {
        const int stages = p.stages;
        unsigned char *into = ring, *into_before = ring, *from = ring, *from_before = ring, *const ring_end = ring + stages * T::kStage;
        const unsigned char* v_cell = nullptr;  // of the tile whose V comes next
        float s[1][T::kNt][4], alpha[1][2];
        Weights w;
        bool moved = false;
#pragma unroll 1
        for (int i = 1 - stages; i <= tiles; ++i) {
            const int begin = piece.begin + i * T::kTokens, load = i + stages - 1;
            if (i >= 0) {
                this->wait(stages);
                if (i > 0) {  // here, behind a branch: ptxas moves a wait to the top of its block, over the softmax before it
                    wgmma_wait<0>();
                    wgmma_hold(o[0]);
                    wgmma_hold(w);
                    if (moved) this->rescale(alpha);
                    pack(w, s);
                }
                fence_shared_for_async();
                __syncthreads();  // K of tile i and V of tile i - 1 are there; K of i - 1 and V of i - 2 have been read
            }
            if (load <= tiles) {
                const unsigned char* cell = load < tiles ? this->find_cell(piece, begin + (stages - 1) * T::kTokens, page) : nullptr;
                if (load < tiles) load_half<0>(into, cell);
                if (load > 0) load_half<1>(into_before, v_cell);
                v_cell = cell;
                into_before = into;
                if ((into += T::kStage) == ring_end) into = ring;
                if (load + 1 < tiles) page = this->find_page(piece, begin + stages * T::kTokens);
            }
            cp_async_commit();
            if (i < 0) continue;
            const bool masked = i < tiles && (begin + T::kTokens > free_end || begin < free_begin);
            if (masked) look_at(piece, begin);
            if (i == tiles) break;
            issue_scores(s, from);
            if (i > 0) {
                issue_values(w, from_before + T::kStage / 2);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            wgmma_hold(s[0]);
            const float factor = this->cap(s, scale);
            if (masked) hide(s);
            moved = this->weigh(s, factor, alpha);
            from_before = from;
            if ((from += T::kStage) == ring_end) from = ring;
        }
        if (tiles > 0) {
            issue_values(w, from_before + T::kStage / 2);
            wgmma_wait<0>();
            wgmma_hold(o[0]);
        }
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void run(const Piece& piece) {
        const int stages = p.stages;
        int end = piece.end;
        if (p.mask == nullptr) {  // a chain's last row sees the most
            const int64_t last = static_cast<int64_t>(piece.tile + 1) * T::kRows / p.group + 1;
            end = static_cast<int>(min(static_cast<int64_t>(end), piece.keys.prefix + p.row_base + last));
        }
        const int tiles = end > piece.begin ? (end - piece.begin + T::kTokens - 1) / T::kTokens : 0;
        int page = tiles > 0 ? this->find_page(piece, piece.begin) : -1;
        load_q(piece);
        const float scale = p.scale * (p.k_scale ? p.k_scale[piece.head * p.k_scale_stride] : 1.0f);
        const int free_end = min(piece.keys.prefix, piece.end);  // tiles that end here or before hold prefix only
        const int free_begin = p.window > 0 ? piece.keys.prefix + piece.keys.columns - p.window : 0;
        top[0][0] = top[0][1] = -INFINITY;
        sum[0][0] = sum[0][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < T::kOt; ++n) o[0][n][0] = o[0][n][1] = o[0][n][2] = o[0][n][3] = 0.0f;
        if constexpr (T::kOverlaps) {
            run_overlapping(piece, tiles, page, scale, free_end, free_begin);
            return;
        }
        unsigned char *into = ring, *from = ring, *const ring_end = ring + stages * T::kStage;
#pragma unroll 1
        for (int i = 1 - stages; i < tiles; ++i) {  // the first stages - 1 rounds only load
            const int begin = piece.begin + i * T::kTokens, load = i + stages - 1;
            if (i >= 0) {
                this->wait(stages);
                if (Kv::kBytes == 2) fence_shared_for_async();
                __syncthreads();  // the tile is there, and the one before it has been read
            }
            if (load < tiles) {
                load_tile(into, this->find_cell(piece, begin + (stages - 1) * T::kTokens, page));
                if ((into += T::kStage) == ring_end) into = ring;
                if (load + 1 < tiles) page = this->find_page(piece, begin + stages * T::kTokens);
            }
            cp_async_commit();
            if (i < 0) continue;
            if (Kv::kBytes == 1) {
                widen(from);
                fence_shared_for_async();
                __syncthreads();
            }
            const bool masked = begin + T::kTokens > free_end || begin < free_begin;
            if (masked) look_at(piece, begin);
            tile(from, masked, scale);
            if ((from += T::kStage) == ring_end) from = ring;
        }
        cp_async_wait<0>();
    }

    // The partial result goes to shared memory, in place of Q and the tiles.
    static constexpr int kStagedRow = T::kHeadDim + 8;
    static_assert(T::kRows * (kStagedRow + 2) * 4 <= T::kQBytes + T::kWideBytes + 2 * T::kStage);
    __device__ __forceinline__ StagedRows staged() {
        const float* o_at = reinterpret_cast<const float*>(q_smem);
        return {o_at, reinterpret_cast<const float2*>(o_at + T::kRows * kStagedRow), kStagedRow, 0};
    }
    __device__ __forceinline__ void stage(const Piece&) {
        const StagedRows to = staged();
        __syncthreads();  // Q and the ring have been read
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[0][h] += __shfl_xor_sync(kFullWarp, sum[0][h], 1);
            sum[0][h] += __shfl_xor_sync(kFullWarp, sum[0][h], 2);
            const int row = 16 * warp + 8 * h + lane / 4;
            if ((lane & 3) == 0) const_cast<float2*>(to.stats)[row] = float2{top[0][h], sum[0][h]};
            float* at = const_cast<float*>(to.o) + row * kStagedRow + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < T::kOt; ++n) *reinterpret_cast<float2*>(at + 8 * n) = float2{o[0][n][2 * h], o[0][n][2 * h + 1]};
        }
    }

    // Writes the rows out, or the partial result to `partial`.
    __device__ __forceinline__ void finish(const Piece& piece, float* partial) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[0][h] += __shfl_xor_sync(kFullWarp, sum[0][h], 1);
            sum[0][h] += __shfl_xor_sync(kFullWarp, sum[0][h], 2);
            const int row = 16 * warp + 8 * h + lane / 4;
            if (partial) {
                if ((lane & 3) == 0) {
                    __stcg(partial + T::kRows * T::kHeadDim + row, top[0][h]);
                    __stcg(partial + T::kRows * (T::kHeadDim + 1) + row, sum[0][h]);
                }
                float* to = partial + row * T::kHeadDim + 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < T::kOt; ++n) __stcg(reinterpret_cast<float2*>(to + 8 * n), float2{o[0][n][2 * h], o[0][n][2 * h + 1]});
            } else {
                const RowTarget t = row_target(p, piece, T::kRows, row);
                if (!t.live) continue;
                const float factor = finish_row(p, t, piece.head, top[0][h], sum[0][h], (lane & 3) == 0);
                uint16_t* to = static_cast<uint16_t*>(p.out) + t.row * p.out_row + t.head * p.out_head + 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < T::kOt; ++n) {
                    const float x = o[0][n][2 * h] * factor, y = o[0][n][2 * h + 1] * factor;
                    *reinterpret_cast<uint32_t*>(to + 8 * n) = p.q_type == Element::kBf16 ? pack_bf16(x, y) : pack_f16(x, y);
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

// grid: persistent; block: 2 threads per row; dynamic shared memory: Q, copies, ring, seen, prefix sums, a few words.
template <class T>
__global__ void __launch_bounds__(T::kThreads, wgmma_blocks(T::kRows, T::Kv::kBytes)) tree_attention_sm90_kernel(const __grid_constant__ AttentionParams p) {
    unsigned char* shared = dynamic_shared_aligned();
    unsigned char* rest = shared + T::kQBytes + T::kWideBytes + p.stages * T::kStage + T::kRows * (T::kTokens / 8);
    int* prefix = reinterpret_cast<int*>(rest);
    BlockWords& words = *reinterpret_cast<BlockWords*>(rest + prefix_bytes(p.batch));
    start_work(p, T::kRows, prefix, words.scratch, words.worker);
    AttendWgmma<T> attend(p, shared);
    attend_pieces<T::kThreads, T::kRows, T::kHeadDim>(p, attend, prefix, words);
}

}  // namespace fv
