// SPDX-License-Identifier: Apache-2.0
// Tensor-core tree attention, one kernel for sm_80..sm_120: mma.m16n8k16 fed by a cp.async ring through the page table.
//
// A block of 4 warps takes pieces of sequences (attention_work.cuh): tile_rows packed rows (node x query head of the
// group) against a run of cache positions, so KV is read once per kv head where nodes x group <= tile_rows. Tiles of 64
// tokens (32 for head_dim 256) pass through a ring of stages; the running softmax is kept per warp in the exp2 domain;
// warps that share a tile's tokens are merged at the end of the piece. Tiles inside the prefix have no mask code; in the
// others each row tests 64 bits of visible_positions(). Split sequences: partial results, which the blocks that made them
// merge together once all are there (attention_merge.cuh). Cost: one read of the visible KV per row tile; one launch.
#pragma once
#include <type_traits>

#include "attention/attention_merge.cuh"

namespace fv {

// kExact: a piece is one row's own keys in their order (row_keys), not a request's.
template <class T, bool kExact = false>
struct Attend {
    using Kv = typename T::Kv;
    const AttentionParams& p;
    unsigned char *q_smem, *ring;
    uint64_t* seen;                          // [kRows]
    const int lane, warp, row_group, share;  // share: which of the kSplit warps of its row group
    float o[T::kMt][T::kOt][4];
    float top[T::kMt][2], sum[T::kMt][2];    // of rows lane / 4 and lane / 4 + 8
    uint32_t q_fragments[T::kQInRegisters ? T::kHeadDim / 16 : 1][4];

    // shared: Q, the ring of stages, seen
    __device__ __forceinline__ Attend(const AttentionParams& params, unsigned char* shared)
        : p(params), q_smem(shared), ring(shared + T::kQBytes),
          seen(reinterpret_cast<uint64_t*>(ring + params.stages * T::kStage)), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
          row_group(warp / T::kSplit), share(warp % T::kSplit) {}

    __device__ __forceinline__ Attend(const AttentionParams& params, unsigned char* q_at, unsigned char* ring_at, uint64_t* seen_at)
        : p(params), q_smem(q_at), ring(ring_at), seen(seen_at), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
          row_group(warp / T::kSplit), share(warp % T::kSplit) {}

    __device__ __forceinline__ void load_q(const Piece& piece) {
        constexpr int kChunks = T::kHeadDim / 8, kStep = T::kThreads / kChunks;
        const int chunk = threadIdx.x % kChunks;
#pragma unroll 4
        for (int row = threadIdx.x / kChunks; row < T::kRows; row += kStep) {
            const RowTarget t = row_target(p, piece, T::kRows, row);
            const uint16_t* src = static_cast<const uint16_t*>(p.q) + (t.live ? t.row * p.q_row + t.head * p.q_head : 0) + chunk * 8;
            if constexpr (Kv::kBytes == 2) {
                cp_async_16(q_smem + swizzled<T::kQRow>(row, chunk), src, t.live);
            } else {
                const uint4 v = t.live ? *reinterpret_cast<const uint4*>(src) : uint4{0, 0, 0, 0};
                store_q_paired(q_smem, swizzled<T::kQRow>(row, chunk & ~1), swizzled<T::kQRow>(row, chunk | 1), chunk & 1, v,
                               p.q_type == Element::kBf16);
            }
        }
    }

    // This lane's token of a tile: lanes 0..15 look after K, 16..31 after V of the warp's tokens.
    __device__ __forceinline__ int position_of(int tile_begin) { return tile_begin + warp * T::kLoadTokens + (lane & 15); }

    // The page of that token, -1: none. The load is used one tile later.
    __device__ __forceinline__ int find_page(const Piece& piece, int tile_begin) {
        const int at = position_of(tile_begin);
        if ((lane & 15) >= T::kLoadTokens || at < piece.keys.first || at >= piece.end) return -1;
        return p.table[piece.request * p.table_row + p.by_page_size.quotient(static_cast<unsigned>(cell_position(piece, at)))];
    }

    // Where a key position lies in the cache.
    __device__ __forceinline__ int cell_position(const Piece& piece, int at) {
        if (!kExact || at < piece.keys.prefix) return at;
        return piece.keys.prefix + static_cast<int>(max(nth_column(row_sight_of(piece), at - piece.keys.prefix), int64_t{0}));
    }
    __device__ __forceinline__ RowSight row_sight_of(const Piece& piece) {  // kExact
        return RowSight{p.mask ? p.mask + piece.keys.row0 * p.mask_row : nullptr, p.words, piece.forest_columns, 0, 0};
    }

    // The token's row in K or V; null: no such cell.
    __device__ __forceinline__ const unsigned char* find_cell(const Piece& piece, int tile_begin, int page) {
        if (page < 0 || page >= p.num_pages) return nullptr;
        const bool is_k = lane < 16;
        const unsigned at = static_cast<unsigned>(cell_position(piece, position_of(tile_begin)));
        const int slot = static_cast<int>(at - p.by_page_size.quotient(at) * p.page_size);
        return (is_k ? p.k : p.v) + piece.head * (is_k ? p.k_head : p.v_head) + page * (is_k ? p.k_page : p.v_page) +
               slot * (is_k ? p.k_slot : p.v_slot);
    }

    // This warp's tokens of one tile into `stage`; cells that do not exist become zeros.
    __device__ __forceinline__ void load_tile(unsigned char* stage, const unsigned char* cell) {
        constexpr int kChunks = T::kKvRow / 16, kAtOnce = 32 / kChunks, kLoads = T::kLoadTokens / kAtOnce;
        const unsigned there = __ballot_sync(kFullWarp, cell != nullptr);
        const uint64_t mine = reinterpret_cast<uint64_t>(cell);
        const int first = lane / kChunks, chunk = lane % kChunks;  // the token of the first load, of kAtOnce
        const int base = swizzled<T::kKvRow>(first, chunk);        // rows of a warp begin at a multiple of 8
        unsigned char* to = stage + warp * T::kLoadTokens * T::kKvRow;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int at = (T::kKvRow >= 128 ? base ^ (kAtOnce * i & 7) << 4 : base) + kAtOnce * i * T::kKvRow;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int source = first + kAtOnce * i + 16 * v;
                const uint64_t row = __shfl_sync(kFullWarp, mine, source);
                cp_async_16(to + v * (T::kStage / 2) + at, reinterpret_cast<const unsigned char*>(row) + chunk * 16, there >> source & 1);
            }
        }
    }

    __device__ __forceinline__ void q_fragment(uint32_t (&a)[4], int m, int step) {
        const int row = row_group * T::kWarpRows + 16 * m + (lane & 15);
        ldmatrix_x4(a, q_smem + swizzled<T::kQRow>(row, 2 * step + (lane >> 4)));
    }

    // Scores of this warp's rows against kSub tokens from `token` of the tile.
    __device__ __forceinline__ void score(float (&s)[T::kMt][T::kNt][4], const unsigned char* k, int token) {
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int n = 0; n < T::kNt; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
        }
        constexpr int kSteps = T::kKvRow / 32, kParts = T::kHeadDim / 16 / kSteps;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[kParts][T::kMt][4];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int m = 0; m < T::kMt; ++m) {
                    if constexpr (T::kQInRegisters) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[part][m][i] = q_fragments[step * kParts + part][i];
                    } else {
                        q_fragment(a[part][m], m, step * kParts + part);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < T::kNt; n += 2) {
                uint32_t b[2][4];
                load_k<T>(b, k, token + 8 * n, step, lane);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
#pragma unroll
                    for (int m = 0; m < T::kMt; ++m) {
                        Kv::mma(s[m][n], a[part][m], b[part][0], b[part][1]);
                        Kv::mma(s[m][n + 1], a[part][m], b[part][2], b[part][3]);
                    }
                }
            }
        }
    }

    // seen[row]: the cache positions start .. start + 63 that each row of the tile sees. All threads; ends with a barrier.
    __device__ __forceinline__ void look(const Piece& piece, int start) {
        __syncthreads();
#pragma unroll 1
        for (int row = threadIdx.x; row < T::kRows; row += T::kThreads) {
            const RowTarget t = row_target(p, piece, T::kRows, row);
            uint64_t bits = 0;
            if (kExact) {
                bits = low_bits(piece.keys.end - start) & ~low_bits(piece.keys.first - start);
            } else if (t.live) {
                const RowSight sight = row_sight(p.mask ? p.mask + t.row * p.mask_row : nullptr, p.words,
                                                 p.row_base + t.row - piece.keys.row0, piece.keys.columns, piece.keys.prefix, p.window);
                bits = visible_positions(sight, piece.keys.prefix, start);
            }
            seen[row] = bits;
        }
        __syncthreads();
    }

    // -inf where a row does not see a key; the scores are of kSub tokens from `token` of the tile.
    __device__ __forceinline__ void mask(float (&s)[T::kMt][T::kNt][4], int token) {
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row_group * T::kWarpRows + 16 * m + 8 * h + lane / 4;
                using Bits = std::conditional_t<T::kSub == 64, uint64_t, uint32_t>;
                const Bits bits = static_cast<Bits>(seen[row] >> token) >> 2 * (lane & 3);
#pragma unroll
                for (int n = 0; n < T::kNt; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!(bits >> (8 * n + e) & 1)) s[m][n][2 * h + e] = -INFINITY;
                    }
                }
            }
        }
    }

    // One step of the running softmax; s becomes the weights, alpha what o has to be multiplied by. `scale` > 0. True: some alpha of
    // the warp is not 1.
    __device__ __forceinline__ bool weigh(float (&s)[T::kMt][T::kNt][4], float scale, float (&alpha)[T::kMt][2]) {
        bool moved = false;
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float high = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
                for (int n = 1; n < T::kNt; ++n) high = fmaxf(high, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
                high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
                high = fmaxf(top[m][h], high * scale);
                const float shift = high == -INFINITY ? 0.0f : high;  // nothing seen yet: all weights are 2^-inf = 0
                alpha[m][h] = exp2_approx(top[m][h] - shift);
                moved = moved || high != top[m][h];
                top[m][h] = high;
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < T::kNt; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float w = exp2_approx(fmaf(s[m][n][2 * h + e], scale, -shift));
                        s[m][n][2 * h + e] = w;
                        part += w;
                    }
                }
                sum[m][h] = sum[m][h] * alpha[m][h] + part;
            }
        }
        return __any_sync(kFullWarp, moved);
    }
    __device__ __forceinline__ void rescale(const float (&alpha)[T::kMt][2]) {
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int n = 0; n < T::kOt; ++n) {
                o[m][n][0] *= alpha[m][0], o[m][n][1] *= alpha[m][0];
                o[m][n][2] *= alpha[m][1], o[m][n][3] *= alpha[m][1];
            }
        }
    }
    __device__ __forceinline__ void softmax(float (&s)[T::kMt][T::kNt][4], float scale) {
        float alpha[T::kMt][2];
        if (weigh(s, scale, alpha)) rescale(alpha);
    }

    // o += weights x V of kSub tokens from `token` of the tile.
    __device__ __forceinline__ void add_values(const float (&s)[T::kMt][T::kNt][4], const unsigned char* v, int token) {
        constexpr int kSteps = T::kKvRow / 32, kParts = T::kHeadDim / 16 / kSteps;
#pragma unroll
        for (int n = 0; n < T::kNt; n += 2) {
            uint32_t a[T::kMt][4];
#pragma unroll
            for (int m = 0; m < T::kMt; ++m) {
                a[m][0] = Kv::pack(s[m][n][0], s[m][n][1]);
                a[m][1] = Kv::pack(s[m][n][2], s[m][n][3]);
                a[m][2] = Kv::pack(s[m][n + 1][0], s[m][n + 1][1]);
                a[m][3] = Kv::pack(s[m][n + 1][2], s[m][n + 1][3]);
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t b[2][4];
                load_v<T>(b, v, token + 8 * n, step, lane);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
#pragma unroll
                    for (int m = 0; m < T::kMt; ++m) {
                        Kv::mma(o[m][2 * (step * kParts + part)], a[m], b[part][0], b[part][1]);
                        Kv::mma(o[m][2 * (step * kParts + part) + 1], a[m], b[part][2], b[part][3]);
                    }
                }
            }
        }
    }

    // Softcap, or a scale that is not positive: s becomes the scores in the log2 domain. Returns the scale that is left.
    __device__ __forceinline__ float cap(float (&s)[T::kMt][T::kNt][4], float scale) {
        if (p.softcap == 0.0f && scale > 0.0f) return scale;
        const float inverse = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int n = 0; n < T::kNt; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float x = s[m][n][e] * scale;  // log2 domain
                    const float w = exp2_approx(-2.0f * fabsf(x) * inverse);  // exp(-2 |score| / softcap)
                    s[m][n][e] = p.softcap > 0.0f ? p.softcap * kLog2E * copysignf(__fdividef(1.0f - w, 1.0f + w), x) : x;
                }
            }
        }
        return 1.0f;
    }

    __device__ __forceinline__ void tile(const unsigned char* stage, bool masked, float scale) {
#pragma unroll 1
        for (int sub = 0; sub < T::kWarpTokens; sub += T::kSub) {
            const int token = share * T::kWarpTokens + sub;
            float s[T::kMt][T::kNt][4];
            score(s, stage, token);
            const float factor = cap(s, scale);
            if (masked) mask(s, token);
            softmax(s, factor);
            add_values(s, stage + T::kStage / 2, token);
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

    // Streams the piece's keys; afterwards o, top and sum hold this warp's share of them.
    __device__ __forceinline__ void run(const Piece& piece) {
        const int stages = p.stages;
        int end = piece.end;
        if (!kExact && p.mask == nullptr) {  // a chain's last row sees the most
            const int64_t last = static_cast<int64_t>(piece.tile + 1) * T::kRows / p.group + 1;
            end = static_cast<int>(min(static_cast<int64_t>(end), piece.keys.prefix + p.row_base + last));
        }
        const int tiles = end > piece.begin ? (end - piece.begin + T::kTokens - 1) / T::kTokens : 0;
        int page = tiles > 0 ? find_page(piece, piece.begin) : -1;
        load_q(piece);
        const float scale = p.scale * (p.k_scale ? p.k_scale[piece.head * p.k_scale_stride] : 1.0f);
        const int free_end = kExact ? piece.keys.end : piece.keys.prefix;  // tiles that end here or before: seen by all rows
        const int free_begin = kExact ? piece.keys.first : p.window > 0 ? piece.keys.prefix + piece.keys.columns - p.window : 0;
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
            top[m][0] = top[m][1] = -INFINITY;
            sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
            for (int n = 0; n < T::kOt; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
        }
        unsigned char *into = ring, *from = ring, *const ring_end = ring + stages * T::kStage;
#pragma unroll 1
        for (int i = 1 - stages; i < tiles; ++i) {  // loads tile i + stages - 1, then works on tile i
            const int load = i + stages - 1, begin = piece.begin + i * T::kTokens;
            if (i >= 0) {
                wait(stages);
                if (T::kOwnTokens && i > 0) __syncwarp(); else __syncthreads();  // the first tile also waits for Q
            }
            if (load < tiles) {
                load_tile(into, find_cell(piece, begin + (stages - 1) * T::kTokens, page));
                if ((into += T::kStage) == ring_end) into = ring;
                if (load + 1 < tiles) page = find_page(piece, begin + stages * T::kTokens);
            }
            cp_async_commit();
            if (i < 0) continue;
            if constexpr (T::kQInRegisters) {
                if (i == 0) {
#pragma unroll
                    for (int step = 0; step < T::kHeadDim / 16; ++step) q_fragment(q_fragments[step], 0, step);
                }
            }
            const bool masked = begin + T::kTokens > free_end || begin < free_begin;
            if (masked) look(piece, begin);
            tile(from, masked, scale);
            if ((from += T::kStage) == ring_end) from = ring;
        }
        cp_async_wait<0>();
    }

    // A partial result in this block's shared memory, after stage().
    __device__ __forceinline__ StagedRows staged() {
        return {reinterpret_cast<const float*>(ring), reinterpret_cast<const float2*>(q_smem) + T::kSplit * T::kRows, T::kHeadDim, 3};
    }
    __device__ __forceinline__ void stage(const Piece& piece) { finish<true>(piece, nullptr); }

    // Merges the warps of a row group and writes out, or the partial result to `partial`. kStage: the partial result stays in shared
    // memory instead, where staged() describes it.
    template <bool kStage = false>
    __device__ __forceinline__ void finish(const Piece& piece, float* partial) {
        const int rows = kExact ? p.exact_heads : T::kRows;              // of a partial result
        float* stats = reinterpret_cast<float*>(q_smem);                 // [kSplit][kRows][2], then [kRows][2]
        float* total = stats + T::kSplit * T::kRows * 2;
        float* staged = reinterpret_cast<float*>(ring);                  // [kSplit][kRows][kHeadDim], quads swizzled
        __syncthreads();                                                 // Q and the ring have been read
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[m][h] += __shfl_xor_sync(kFullWarp, sum[m][h], 1);
                sum[m][h] += __shfl_xor_sync(kFullWarp, sum[m][h], 2);
                const int row = row_group * T::kWarpRows + 16 * m + 8 * h + lane / 4;
                if ((lane & 3) == 0) {
                    stats[(share * T::kRows + row) * 2] = top[m][h];
                    stats[(share * T::kRows + row) * 2 + 1] = sum[m][h];
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int row = threadIdx.x; row < T::kRows; row += T::kThreads) {
            float high = -INFINITY, all = 0.0f;
            for (int w = 0; w < T::kSplit; ++w) high = fmaxf(high, stats[(w * T::kRows + row) * 2]);
            const float shift = high == -INFINITY ? 0.0f : high;
            for (int w = 0; w < T::kSplit; ++w) {
                all += stats[(w * T::kRows + row) * 2 + 1] * exp2_approx(stats[(w * T::kRows + row) * 2] - shift);
            }
            if (kStage) {
                total[2 * row + 1] = all;
            } else if (partial) {
                if (row < rows) {
                    partial[rows * T::kHeadDim + row] = high;
                    partial[rows * (T::kHeadDim + 1) + row] = all;
                }
            } else {
                const RowTarget t = row_target(p, piece, T::kRows, row);
                total[2 * row + 1] = t.live ? finish_row(p, t, piece.head, high, all, true) : 0.0f;
            }
            total[2 * row] = kStage ? high : shift;
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < T::kMt; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row_group * T::kWarpRows + 16 * m + 8 * h + lane / 4;
                const float most = total[2 * row], factor = exp2_approx(top[m][h] - (kStage && most == -INFINITY ? 0.0f : most));
                float* to = staged + (share * T::kRows + row) * T::kHeadDim;
                const int swizzle = (row & 3) << 3;
                if constexpr (Kv::kBytes == 2) {
#pragma unroll
                    for (int n = 0; n < T::kOt; ++n) {
                        *reinterpret_cast<float2*>(to + (8 * n ^ swizzle) + 2 * (lane & 3)) =
                            float2{o[m][n][2 * h] * factor, o[m][n][2 * h + 1] * factor};
                    }
                } else {  // the dims of load_v
#pragma unroll
                    for (int n = 0; n < T::kOt; n += 2) {
                        *reinterpret_cast<float4*>(to + ((8 * n + 4 * (lane & 3)) ^ swizzle)) =
                            float4{o[m][n][2 * h] * factor, o[m][n + 1][2 * h] * factor, o[m][n][2 * h + 1] * factor,
                                   o[m][n + 1][2 * h + 1] * factor};
                    }
                }
            }
        }
        __syncthreads();
        constexpr int kQuads = T::kHeadDim / 4, kStep = T::kThreads / kQuads;
        const int quad = threadIdx.x % kQuads, first = threadIdx.x / kQuads;
        const float4* quads = reinterpret_cast<const float4*>(staged);
        const auto gather = [&](int row) {
            float4 v = quads[row * kQuads + (quad ^ (row & 3) << 1)];
#pragma unroll
            for (int w = 1; w < T::kSplit; ++w) {
                const float4 x = quads[(w * T::kRows + row) * kQuads + (quad ^ (row & 3) << 1)];
                v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
            }
            return v;
        };
        if (kStage) {
            if (T::kSplit == 1) return;
#pragma unroll 4
            for (int row = first; row < T::kRows; row += kStep) {
                reinterpret_cast<float4*>(staged)[row * kQuads + (quad ^ (row & 3) << 1)] = gather(row);  // read by this thread alone
            }
            return;
        }
        if (partial) {
#pragma unroll 8
            for (int row = first; row < rows; row += kStep) {
                __stcg(reinterpret_cast<float4*>(partial + row * T::kHeadDim) + quad, gather(row));
            }
            return;
        }
#pragma unroll 4
        for (int row = first; row < T::kRows; row += kStep) {
            const RowTarget t = row_target(p, piece, T::kRows, row);
            const float factor = total[2 * row + 1];
            const float4 v = gather(row);
            if (t.live) store_out(p, t, 4 * quad, float4{v.x * factor, v.y * factor, v.z * factor, v.w * factor});
        }
    }

    // Streams the piece's keys and writes the rows out, or the partial result to `partial`; staged: it stays in shared memory, where staged()
    // describes it.
    __device__ __forceinline__ void take(const Piece& piece, float* partial, bool staged) {
        run(piece);
        if (staged) stage(piece); else finish(piece, partial);
    }
};

// grid: persistent; block: 128 threads; dynamic shared memory: prefix sums, Q, ring (attention_launch).
template <class T>
__global__ void __launch_bounds__(128, most_blocks(T::kHeadDim, T::kRows, T::Kv::kBytes)) tree_attention_kernel(const __grid_constant__ AttentionParams p) {
    int* prefix = reinterpret_cast<int*>(dynamic_shared());
    BlockWords& words = *reinterpret_cast<BlockWords*>(dynamic_shared() + prefix_bytes(p.batch));
    start_work(p, T::kRows, prefix, words.scratch, words.worker);
    Attend<T> attend(p, dynamic_shared() + prefix_bytes(p.batch) + kBlockWords);
    attend_pieces<T::kThreads, T::kRows, T::kHeadDim>(p, attend, prefix, words);
}

}  // namespace fv
