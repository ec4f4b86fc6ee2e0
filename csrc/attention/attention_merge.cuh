// SPDX-License-Identifier: Apache-2.0
// Writing rows out, and merging the pieces of a split sequence in a fixed order, by all blocks that hold one.
// A partial result: O f32 [tile_rows, head_dim] unnormalised, then per row the maximum (log2 domain) and the sum.
#pragma once
#include "algo/numeric.h"
#include "attention/attention_tile.cuh"
#include "attention/attention_work.cuh"

namespace fv {

// Where packed row `row` (node x head of the group) of a sequence goes.
struct RowTarget {
    int64_t row;   // flat
    int head;      // query head
    bool live;
};
__device__ __forceinline__ RowTarget row_target(const AttentionParams& p, const Piece& piece, int tile_rows, int row) {
    const unsigned packed = static_cast<unsigned>(piece.tile) * tile_rows + row, node = p.by_group.quotient(packed);
    return {piece.keys.row0 + static_cast<int64_t>(node), static_cast<int>(piece.head * p.group + packed - node * p.group),
            node < static_cast<unsigned>(piece.keys.nodes)};
}

// Factor from unnormalised O to out, given the row's maximum and sum; lse is written by the way.
__device__ __forceinline__ float finish_row(const AttentionParams& p, const RowTarget& t, int kv_head, float top, float sum, bool write_lse) {
    if (write_lse && p.lse) p.lse[t.row * p.lse_row + t.head] = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * kLn2;
    if (sum == 0.0f) return 0.0f;
    float weight = p.v_scale ? p.v_scale[kv_head * p.v_scale_stride] : 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[t.head] * kLog2E, shift = fmaxf(sink, top);
        const float own = exp2_approx(top - shift);
        sum = sum * own + exp2_approx(sink - shift);
        weight *= own;
    }
    return weight / sum;
}

__device__ __forceinline__ void store_out(const AttentionParams& p, const RowTarget& t, int dim, float4 v) {
    const int64_t at = t.row * p.out_row + t.head * p.out_head + dim;
    uint2 w;
    if (p.q_type == Element::kBf16) w.x = pack_bf16(v.x, v.y), w.y = pack_bf16(v.z, v.w);
    else w.x = pack_f16(v.x, v.y), w.y = pack_f16(v.z, v.w);
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = w;
}

// Rows that belong to no request: out 0, lse -inf.
__device__ __forceinline__ void clear_padding(const AttentionParams& p) {
    const int used = p.batch > 0 ? p.cu_nodes[p.batch] : 0, heads = p.kv_heads * p.group;
#pragma unroll 1
    for (int64_t row = (used < 0 ? 0 : used) + blockIdx.x; row < p.rows; row += gridDim.x) {
#pragma unroll 1
        for (int head = 0; head < heads; ++head) {
#pragma unroll 1
            for (int i = static_cast<int>(threadIdx.x); i < p.v_dim; i += static_cast<int>(blockDim.x)) {
                const int64_t at = row * p.out_row + head * p.out_head + i;
                if (p.q_type == Element::kF32) static_cast<float*>(p.out)[at] = 0.0f;
                else static_cast<uint16_t*>(p.out)[at] = 0;
            }
            if (p.lse && threadIdx.x == 0) p.lse[row * p.lse_row + head] = -INFINITY;
        }
    }
}

// The partial results of a split sequence, one per piece.
struct Partials {
    const float *first, *rest;
    int64_t step;
    __device__ __forceinline__ Partials(const AttentionParams& p, int start, Pieces pieces, int length, int tile_rows, int head_dim) {
        const int64_t floats = partial_floats(tile_rows, head_dim);
        first = p.partials + piece_slot(pieces.first, start, length) * floats;
        rest = p.partials + 2 * pieces.first * floats;  // the later ones each go on from the block before
        step = 2 * floats;
    }
    __device__ __forceinline__ const float* operator[](int j) const { return j == 0 ? first : rest + j * step; }
};

// A partial result in shared memory, unnormalised: dims 4 quad .. of row `row`, and its maximum and sum. swizzle: quads of 4
// neighbouring rows lie at quad ^ 2 (row & swizzle).
struct StagedRows {
    const float* o;
    const float2* stats;
    int row_floats, swizzle;
    __device__ __forceinline__ const float* quad_at(int row, int quad) const { return o + row * row_floats + 4 * (quad ^ (row & swizzle) << 1); }
};

constexpr int kMergeFloats = 6;  // of shared memory per thread that merges

// Adds `other` to `mine`, the later keys second.
struct Merged {
    float top = -INFINITY, sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    __device__ __forceinline__ void scale(float now) {
        const float w = exp2_approx(top - (now == -INFINITY ? 0.0f : now));
        top = now, sum *= w, o.x *= w, o.y *= w, o.z *= w, o.w *= w;
    }
    __device__ __forceinline__ void add(float part, float part_sum, float4 v) {  // part <= top
        const float w = exp2_approx(part - (top == -INFINITY ? 0.0f : top));
        sum += part_sum * w, o.x += v.x * w, o.y += v.y * w, o.z += v.z * w, o.w += v.w * w;
    }
};

// This block's share of a split sequence's output: every block that holds one of its pieces merges as many quads of four dims.
// All kThreads threads call it; `scratch`: kMergeFloats of shared memory per thread, not in use.
template <int kThreads>
__device__ __forceinline__ void merge_share(const AttentionParams& p, const Piece& piece, Pieces pieces, int length, int tile_rows,
                                            float* scratch) {
    constexpr int kAtOnce = 20;  // loads on their way: all of the usual 17 or 33 pieces of a group or two
    const int dims = p.v_dim, quads = dims / 4, tid = threadIdx.x;
    const Partials partials(p, piece.start, pieces, length, tile_rows, dims);
    const int live = min(tile_rows, piece.keys.nodes * p.group - piece.tile * tile_rows), total = live * quads;
    const int share = (total + pieces.count - 1) / pieces.count, begin = (static_cast<int>(blockIdx.x) - pieces.first) * share;
    const int end = min(total, begin + share);
    const int width = min(kThreads, (share + 31) / 32 * 32), groups = kThreads / width;  // threads per group of pieces
    const int group = tid / width;
#pragma unroll 1
    for (int base = begin; base < end; base += width) {
        const int at = base + tid - group * width;
        const bool mine = at < end && group < groups;
        const int row = mine ? at / quads : 0, quad = mine ? at - row * quads : 0;
        Merged m;
#pragma unroll 1
        for (int j0 = group; j0 < pieces.count && mine; j0 += kAtOnce * groups) {
            float tops[kAtOnce], sums[kAtOnce], now = m.top;
            float4 v[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int j = j0 + i * groups;
                tops[i] = -INFINITY, sums[i] = 0.0f, v[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
                if (j < pieces.count) {
                    const float* from = partials[j];
                    tops[i] = __ldcg(from + tile_rows * dims + row);
                    sums[i] = __ldcg(from + tile_rows * (dims + 1) + row);
                    v[i] = __ldcg(reinterpret_cast<const float4*>(from + row * dims) + quad);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) now = fmaxf(now, tops[i]);
            m.scale(now);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) m.add(tops[i], sums[i], v[i]);
        }
        if (groups > 1) {
            __syncthreads();  // scratch of the round before has been read
            float* own = scratch + tid * kMergeFloats;
            own[0] = m.top, own[1] = m.sum, own[2] = m.o.x, own[3] = m.o.y, own[4] = m.o.z, own[5] = m.o.w;
            __syncthreads();
#pragma unroll 1
            for (int g = 1; g < groups && group == 0; ++g) {
                const float* other = scratch + (g * width + tid) * kMergeFloats;
                m.scale(fmaxf(m.top, other[0]));
                m.add(other[0], other[1], float4{other[2], other[3], other[4], other[5]});
            }
        }
        if (!mine || group > 0) continue;
        const RowTarget target = row_target(p, piece, tile_rows, row);
        const float w = finish_row(p, target, piece.head, m.top, m.sum, quad == 0);
        store_out(p, target, 4 * quad, float4{m.o.x * w, m.o.y * w, m.o.z * w, m.o.w * w});
    }
}

// The split sequences that a block holds pieces of: one that goes on from the block before, one that goes on to the next.
struct Pending {
    Piece pieces[2];
    int count;
};

// What the threads of a block share about its place in the work, in dynamic shared memory.
struct BlockWords {
    int scratch[16];
    int flag;
    Worker worker;
    Piece piece;
    Pending pending;
};
static_assert(sizeof(BlockWords) <= kBlockWords);

// After the partial result of `piece` is written: all threads call it. counters[first block of the sequence]: arrivals in
// the low half, departures in the high half.
__device__ __forceinline__ void arrive(const AttentionParams& p, const Piece& piece, Pieces pieces, Pending& pending) {
    __syncthreads();
    if (threadIdx.x == 0) {
        atomic_add_acq_rel(p.counters + pieces.first, 1);
        pending.pieces[pending.count & 1] = piece;
        ++pending.count;
    }
}

// Once a block has no pieces left: waits for the others of each sequence it took part in (all blocks of the grid run at the
// same time) and merges its share. The last to leave a sequence resets its counter.
template <int kThreads>
__device__ __forceinline__ void merge_pending(const AttentionParams& p, const Pending& pending, int length, int tile_rows, float* scratch) {
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < min(pending.count, 2); ++i) {
        const Piece& piece = pending.pieces[i];
        const Pieces pieces = pieces_of(piece.start, piece.stop, length);
        uint32_t* counter = p.counters + pieces.first;
        if (threadIdx.x == 0) {
            while ((ld_acquire(counter) & 0xffffu) < static_cast<uint32_t>(pieces.count)) spin_pause();
        }
        __syncthreads();
        merge_share<kThreads>(p, piece, pieces, length, tile_rows, scratch);
        if (threadIdx.x == 0) {
            const uint32_t left = atomic_add_acq_rel(counter, 1u << 16) >> 16;
            if (left + 1 == static_cast<uint32_t>(pieces.count)) *counter = 0;
        }
    }
}

// Adds `count` partial results of one quad in order, kAtOnce loads on their way. load(j, top, sum, o) fetches result j.
template <int kAtOnce, class Load>
__device__ __forceinline__ Merged fold(int count, const Load& load) {
    Merged m;
#pragma unroll 1
    for (int j0 = 0; j0 < count; j0 += kAtOnce) {
        float tops[kAtOnce], sums[kAtOnce], now = m.top;
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            tops[i] = -INFINITY, sums[i] = 0.0f, v[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            if (j0 + i < count) load(j0 + i, tops[i], sums[i], v[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) now = fmaxf(now, tops[i]);
        m.scale(now);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) m.add(tops[i], sums[i], v[i]);
    }
    return m;
}

// The cluster's pieces of one sequence: the block of rank r merges the r-th share of the rows from the shared memory of all. With
// more clusters than one per sequence it leaves the result in `partials`, and the last of the blocks of rank r merges those.
// All threads call it, after stage(); they may not touch the staged rows afterwards.
template <int kThreads, int kRows, int kDims>
__device__ __forceinline__ void merge_cluster(const AttentionParams& p, const Piece& piece, const StagedRows& staged, BlockWords& words) {
    constexpr int kQuads = kDims / 4;
    cluster_arrive();
    const int blocks = p.cluster, clusters = words.worker.per / blocks, rank = static_cast<int>(cluster_rank());
    const int live = min(kRows, piece.keys.nodes * p.group - piece.tile * kRows), share = (live + blocks - 1) / blocks;
    const int begin = min(rank * share, live), items = (min(begin + share, live) - begin) * kQuads;
    const int64_t floats = static_cast<int64_t>((kRows + blocks - 1) / blocks) * (kDims + 4);  // of a merged share; stats as quads
    float* own = p.partials + blockIdx.x * floats;
    const auto put = [&](int item, const Merged& m) {
        const int quad = item % kQuads;
        const RowTarget target = row_target(p, piece, kRows, begin + item / kQuads);
        const float w = finish_row(p, target, piece.head, m.top, m.sum, quad == 0);
        store_out(p, target, 4 * quad, float4{m.o.x * w, m.o.y * w, m.o.z * w, m.o.w * w});
    };
    cluster_wait();  // all have staged their rows
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += kThreads) {
        const int row = begin + item / kQuads, quad = item % kQuads;
        const float* o_at = staged.quad_at(row, quad);
        const float2* stats_at = staged.stats + row;
        const Merged m = fold<8>(blocks, [&](int j, float& top, float& sum, float4& o) {
            const float2 stats = *cluster_map(stats_at, j);
            top = stats.x, sum = stats.y;
            o = *reinterpret_cast<const float4*>(cluster_map(o_at, j));
        });
        if (clusters == 1) {
            put(item, m);
        } else {
            __stcg(reinterpret_cast<float4*>(own) + item, m.o);
            if (quad == 0) __stcg(reinterpret_cast<float2*>(own + share * kDims) + item / kQuads, float2{m.top, m.sum});
        }
    }
    cluster_arrive_relaxed();  // what was read has been used
    if (clusters > 1) {
        uint32_t* counter = p.counters + piece.start + rank;
        __syncthreads();
        if (threadIdx.x == 0) {
            words.flag = atomic_add_acq_rel(counter, 1) + 1 == static_cast<uint32_t>(clusters);
            if (words.flag) *counter = 0;
        }
        __syncthreads();
        if (words.flag) {
            const float* first = p.partials + (piece.start + rank) * floats;
            const int64_t step = blocks * floats;
#pragma unroll 1
            for (int item = threadIdx.x; item < items; item += kThreads) {
                put(item, fold<16>(clusters, [&](int j, float& top, float& sum, float4& o) {
                    const float* from = first + j * step;
                    const float2 stats = __ldcg(reinterpret_cast<const float2*>(from + share * kDims) + item / kQuads);
                    top = stats.x, sum = stats.y;
                    o = __ldcg(reinterpret_cast<const float4*>(from) + item);
                }));
            }
        }
    }
    cluster_wait();  // nobody leaves while others read
}

// All pieces of this block, then its share of the merges. After start_work, no barrier since.
template <int kThreads, int kRows, int kDims, class A>
__device__ __forceinline__ void attend_pieces(const AttentionParams& p, A& attend, const int* prefix, BlockWords& words) {
    if (threadIdx.x == 0) words.pending.count = 0;
#pragma unroll 1
    for (;;) {
        if (threadIdx.x == 0) words.flag = words.worker.next(p, prefix, kRows, words.piece);
        __syncthreads();
        if (!words.flag) break;
        const Piece& piece = words.piece;
        const bool cluster = words.worker.per > 0;  // the only piece of this block
        const Pieces pieces = piece.stop > 0 && !cluster ? pieces_of(piece.start, piece.stop, words.worker.length) : Pieces{0, 1};
        float* partial = pieces.count == 1 ? nullptr
            : p.partials + piece_slot(blockIdx.x, piece.start, words.worker.length) * partial_floats(kRows, kDims);
        attend.take(piece, partial, cluster);
        if (cluster) {
            merge_cluster<kThreads, kRows, kDims>(p, piece, attend.staged(), words);
            break;
        }
        if (partial) arrive(p, piece, pieces, words.pending);
        __syncthreads();
    }
    clear_padding(p);
    merge_pending<kThreads>(p, words.pending, words.worker.length, kRows, reinterpret_cast<float*>(attend.ring));
}

}  // namespace fv
