// SPDX-License-Identifier: Apache-2.0
// Writing rows out, and merging the pieces of a split sequence in the order of their keys.
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
    const unsigned packed = static_cast<unsigned>(piece.tile) * tile_rows + row, group = p.group;
    const unsigned node = packed / group;
    return {piece.keys.row0 + node, static_cast<int>(piece.head * group + (packed - node * group)), node < piece.keys.nodes};
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

// Rows [row0, row0 + count) of a sequence split into `pieces`. 128 threads; `weights`: count x (pieces.count + 1) floats,
// `ring`: kMergeRing bytes, both in shared memory and not in use.
template <int kHeadDim>
__device__ __forceinline__ void merge_rows(const AttentionParams& p, const Piece& piece, Pieces pieces, int length,
                                           int tile_rows, int row0, int count, float* weights, unsigned char* ring) {
    const int64_t floats = partial_floats(tile_rows, kHeadDim);
    const int64_t first = piece_slot(pieces.first, piece.start, length) * floats;   // then one slot 2 i per block
    const int64_t rest = 2 * pieces.first * floats;
    const auto partial = [&](int j) { return p.partials + (j == 0 ? first : rest + 2 * j * floats); };
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stride = pieces.count + 1;
#pragma unroll 1
    for (int i = warp; i < count; i += 4) {
        const int row = row0 + i;
        const RowTarget target = row_target(p, piece, tile_rows, row);
        float top = -INFINITY;
#pragma unroll 1
        for (int j = lane; j < pieces.count; j += 32) top = fmaxf(top, __ldcg(partial(j) + tile_rows * kHeadDim + row));
        top = warp_max(top);
        const float shift = top == -INFINITY ? 0.0f : top;
        float sum = 0.0f;
#pragma unroll 1
        for (int j = lane; j < pieces.count; j += 32) {
            const float* stats = partial(j) + tile_rows * kHeadDim + row;
            const float w = exp2_approx(__ldcg(stats) - shift);
            weights[i * stride + j] = w;
            sum += w * __ldcg(stats + tile_rows);
        }
        sum = warp_sum(sum);
        const float factor = target.live ? finish_row(p, target, piece.head, top, sum, lane == 0) : 0.0f;
        if (lane == 0) weights[i * stride + pieces.count] = factor;
    }
    __syncthreads();
    // a stream of 16-byte loads per thread: for each of its columns, the pieces in order
    constexpr int kQuads = kHeadDim / 4;
    const int columns = count * kQuads, mine = (columns - static_cast<int>(threadIdx.x) + 127) / 128, loads = mine * pieces.count;
    unsigned char* slots = ring + threadIdx.x * 16;
    int piece_in = 0, column_in = threadIdx.x;
    const auto issue = [&](int i) {
        if (i < loads) {
            cp_async_16(slots + (i % kMergeDepth) * (128 * 16), partial(piece_in) + row0 * kHeadDim + column_in * 4);
            if (++piece_in == pieces.count) piece_in = 0, column_in += 128;
        }
        cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kMergeDepth - 1; ++i) issue(i);
    int column = threadIdx.x, j = 0;
    float4 sum = {};
#pragma unroll 1
    for (int i = 0; i < loads; ++i) {
        cp_async_wait<kMergeDepth - 2>();
        const float4 v = *reinterpret_cast<const float4*>(slots + (i % kMergeDepth) * (128 * 16));
        issue(i + kMergeDepth - 1);
        const float* w = weights + column / kQuads * stride;
        sum.x += w[j] * v.x, sum.y += w[j] * v.y, sum.z += w[j] * v.z, sum.w += w[j] * v.w;
        if (++j < pieces.count) continue;
        sum.x *= w[j], sum.y *= w[j], sum.z *= w[j], sum.w *= w[j];
        const RowTarget target = row_target(p, piece, tile_rows, row0 + column / kQuads);
        if (target.live) store_out(p, target, column % kQuads * 4, sum);
        sum = {};
        j = 0;
        column += 128;
    }
    cp_async_wait<0>();
}

constexpr int kMergeRows = 4;  // per item of the merge kernel

// The second launch where few sequences are split into many pieces: every (block whose range ends inside a sequence,
// kMergeRows rows) is an item. Cost: one read of the partial results.
template <int kHeadDim>
__global__ void __launch_bounds__(128) merge_kernel(const __grid_constant__ AttentionParams p, int tile_rows) {
    __shared__ int64_t scratch[4];
    int* prefix = reinterpret_cast<int*>(dynamic_shared());
    unsigned char* ring = dynamic_shared() + prefix_bytes(p.batch);
    float* weights = reinterpret_cast<float*>(ring + kMergeRing);
    const int total = lay_out_work(p, tile_rows, prefix, scratch);
    if (total == 0) return;
    const int length = range_length(total, p.blocks, p.least_units);
    const int groups = tile_rows / kMergeRows, items = p.blocks * groups;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t begin = static_cast<int64_t>(item / groups) * length;
        if (begin + length >= total) return;  // the last range ends with the line
        Piece piece;
        piece.request = request_at(p, prefix, static_cast<int>(begin) + length - 1);
        piece.keys = keys_of(p, piece.request);
        take_piece(p, prefix, tile_rows, static_cast<int>(begin) + length - 1, 1, piece);
        if (piece.start < begin || piece.stop <= begin + length) continue;  // began before, or ends here
        const int row0 = item % groups * kMergeRows;
        if (!row_target(p, piece, tile_rows, row0).live) continue;
        __syncthreads();
        merge_rows<kHeadDim>(p, piece, pieces_of(piece.start, piece.stop, length), length, tile_rows, row0, kMergeRows, weights, ring);
    }
}

inline int64_t merge_smem(int64_t batch, int64_t blocks) { return prefix_bytes(batch) + kMergeRing + kMergeRows * (blocks + 1) * 4; }

}  // namespace fv
