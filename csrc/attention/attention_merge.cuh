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

// All rows of a sequence, by the block that comes last, of kThreads. `weights`: kMergeBytes of shared memory not in use.
template <int kHeadDim, int kRows, int kThreads = 128>
__device__ __forceinline__ void merge_pieces(const AttentionParams& p, const Piece& piece, Pieces pieces, int length, float* weights) {
    constexpr int kQuads = kHeadDim / 4, kStep = kThreads / kQuads, kAtOnce = 8;  // rows between two quads of a thread
    const Partials partials(p, piece.start, pieces, length, kRows, kHeadDim);
    const int stride = pieces.count + 1, quad = threadIdx.x % kQuads;
    int rows = kRows;  // at a time
    while (rows > 16 && rows * stride * 4 > kMergeBytes) rows /= 2;
#pragma unroll 1
    for (int row0 = 0; row0 < kRows; row0 += rows) {
        if (static_cast<int>(threadIdx.x) < rows) {
            const int row = row0 + threadIdx.x;
            float *mine = weights + threadIdx.x * stride, top = -INFINITY, sum = 0.0f;
#pragma unroll 4
            for (int j = 0; j < pieces.count; ++j) {
                const float m = __ldcg(partials[j] + kRows * kHeadDim + row);
                mine[j] = m;
                top = fmaxf(top, m);
            }
            const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll 4
            for (int j = 0; j < pieces.count; ++j) {
                const float w = exp2_approx(mine[j] - shift);
                mine[j] = w;
                sum += w * __ldcg(partials[j] + kRows * (kHeadDim + 1) + row);
            }
            const RowTarget target = row_target(p, piece, kRows, row);
            mine[pieces.count] = target.live ? finish_row(p, target, piece.head, top, sum, true) : 0.0f;
        }
        __syncthreads();
#pragma unroll 1
        for (int first = threadIdx.x / kQuads; first < rows; first += kStep * kAtOnce) {
            float4 sum[kAtOnce] = {};
#pragma unroll 1
            for (int j = 0; j < pieces.count; ++j) {
                const float* from = partials[j] + (row0 + first) * kHeadDim + quad * 4;
                float4 v[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    v[i] = first + i * kStep < rows ? __ldcg(reinterpret_cast<const float4*>(from + i * kStep * kHeadDim)) : float4{};
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const float w = first + i * kStep < rows ? weights[(first + i * kStep) * stride + j] : 0.0f;
                    sum[i].x += w * v[i].x, sum[i].y += w * v[i].y, sum[i].z += w * v[i].z, sum[i].w += w * v[i].w;
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int row = first + i * kStep;
                const RowTarget target = row_target(p, piece, kRows, row0 + row);
                if (row >= rows || !target.live) continue;
                const float w = weights[row * stride + pieces.count];
                store_out(p, target, quad * 4, float4{sum[i].x * w, sum[i].y * w, sum[i].z * w, sum[i].w * w});
            }
        }
        __syncthreads();
    }
}

// The second launch where few sequences are split into many pieces. grid: rows of a tile x sequences x parts of kHeadDim
// columns; 4 warps share a row's pieces. Cost: one read of the partial results.
template <int kHeadDim>
__global__ void __launch_bounds__(128) merge_kernel(const __grid_constant__ AttentionParams p, int tile_rows) {
    __shared__ int scratch[16];
    __shared__ float stats[4][2];
    int* prefix = reinterpret_cast<int*>(dynamic_shared());
    float* weights = reinterpret_cast<float*>(dynamic_shared() + prefix_bytes(p.batch));  // [pieces]
    float4* sums = reinterpret_cast<float4*>(weights + (p.blocks + 3) / 4 * 4);           // [4][kHeadDim / 4]
    constexpr int kQuads = kHeadDim / 4, kPerLane = kQuads > 32 ? kQuads / 32 : 1, kAtOnce = 8 / kPerLane;
    const Line line = lay_out_work(p, tile_rows, prefix, scratch);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dims = p.v_dim, column = static_cast<int>(blockIdx.z) * kHeadDim;
    wait_for_previous_launch();  // in every case: what comes after this launch counts on both
    if (line.total == 0) return;
    const int length = line.cut.length, row = blockIdx.x;
    Piece piece;
    int before = 0, sequence = blockIdx.y;  // sequences of the requests before piece.request
#pragma unroll 1
    for (piece.request = 0; piece.request < p.batch; ++piece.request) {
        piece.keys = keys_of(p, piece.request);
        const int tiles = row_tiles(piece.keys.nodes, p.group, tile_rows), count = tiles * p.kv_heads;
#pragma unroll 1
        for (; sequence < before + count; sequence += gridDim.y) {
            const int units = padded_units(piece.keys.units, line.cut.pad), local = sequence - before;
            const int start = prefix[piece.request] * p.kv_heads + local * units;
            const Pieces pieces = pieces_of(start, start + units, length);
            piece.head = local / tiles;
            piece.tile = local - piece.head * tiles;
            const RowTarget target = row_target(p, piece, tile_rows, row);
            if (pieces.count == 1 || !target.live) continue;
            const Partials partials(p, start, pieces, length, tile_rows, dims);
            float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
            for (int j = threadIdx.x; j < pieces.count; j += 128) {
                const float m = __ldcg(partials[j] + tile_rows * dims + row);
                weights[j] = m;
                top = fmaxf(top, m);
            }
            top = warp_max(top);
            if (lane == 0) stats[warp][0] = top;
            __syncthreads();
            top = fmaxf(fmaxf(stats[0][0], stats[1][0]), fmaxf(stats[2][0], stats[3][0]));
            const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll 1
            for (int j = threadIdx.x; j < pieces.count; j += 128) {
                const float w = exp2_approx(weights[j] - shift);
                weights[j] = w;
                sum += w * __ldcg(partials[j] + tile_rows * (dims + 1) + row);
            }
            sum = warp_sum(sum);
            if (lane == 0) stats[warp][1] = sum;
            __syncthreads();
            float4 acc[kPerLane] = {};
            if (lane < kQuads) {
#pragma unroll 1
                for (int j0 = warp; j0 < pieces.count; j0 += 4 * kAtOnce) {
                    float4 v[kAtOnce][kPerLane];
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int j = j0 + 4 * i;
#pragma unroll
                        for (int c = 0; c < kPerLane; ++c) {
                            v[i][c] = j < pieces.count
                                ? __ldcg(reinterpret_cast<const float4*>(partials[j] + row * dims + column) + lane + 32 * c) : float4{};
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const float w = j0 + 4 * i < pieces.count ? weights[j0 + 4 * i] : 0.0f;
#pragma unroll
                        for (int c = 0; c < kPerLane; ++c) {
                            acc[c].x += w * v[i][c].x, acc[c].y += w * v[i][c].y, acc[c].z += w * v[i][c].z, acc[c].w += w * v[i][c].w;
                        }
                    }
                }
#pragma unroll
                for (int c = 0; c < kPerLane; ++c) sums[warp * kQuads + lane + 32 * c] = acc[c];
            }
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < kQuads) {
                const float all = (stats[0][1] + stats[1][1]) + (stats[2][1] + stats[3][1]);
                const float factor = finish_row(p, target, piece.head, top, all, threadIdx.x == 0 && column == 0);
                float4 v = {};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float4 x = sums[w * kQuads + threadIdx.x];
                    v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
                }
                store_out(p, target, column + 4 * threadIdx.x, float4{v.x * factor, v.y * factor, v.z * factor, v.w * factor});
            }
            __syncthreads();
        }
        before += count;
    }
}

inline int64_t merge_smem(int64_t batch, int64_t blocks) { return prefix_bytes(batch) + (blocks + 3) / 4 * 16 + 4 * 256 * 4; }

}  // namespace fv
