// SPDX-License-Identifier: Apache-2.0
// Which piece of which sequence a block works on next: the line of work of algo/attention_plan.h on the device.
#pragma once
#include "algo/attention_plan.h"
#include "attention/attention_params.h"
#include "common/warp.cuh"

namespace fv {

__device__ __forceinline__ RequestKeys keys_of(const AttentionParams& p, int b) {
    return request_keys(p.cu_nodes[b], p.cu_nodes[b + 1], p.prefix[b], p.rows, p.row_base, p.capacity, p.window, p.mask == nullptr);
}

// prefix[b] = units x row tiles of the requests before b, prefix[batch] the total. Returns heads x total, or 0 where
// sequences are not to be split. All threads call it; `scratch`: 4 int64 of shared memory.
__device__ __forceinline__ int lay_out_work(const AttentionParams& p, int tile_rows, int* prefix, int64_t* scratch) {
    if (p.partials == nullptr || p.batch > kMaxSplitBatch) return 0;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int each = (p.batch + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    const int begin = static_cast<int>(threadIdx.x) * each, end = min(begin + each, p.batch);
    int64_t mine = 0;
#pragma unroll 1
    for (int b = begin; b < end; ++b) {
        const RequestKeys r = keys_of(p, b);
        mine += r.units * row_tiles(r.nodes, p.group, tile_rows);
    }
    int64_t sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int64_t other = __shfl_up_sync(kFullWarp, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int64_t before = sum - mine, total = 0;
#pragma unroll 1
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    if (total * p.kv_heads > INT32_MAX) return 0;
#pragma unroll 1
    for (int b = begin; b < end; ++b) {
        prefix[b] = static_cast<int>(before);
        if (b + 1 == end) break;
        const RequestKeys r = keys_of(p, b);
        before += r.units * row_tiles(r.nodes, p.group, tile_rows);
    }
    if (threadIdx.x == 0) prefix[p.batch] = static_cast<int>(total);
    __syncthreads();
    return static_cast<int>(total) * p.kv_heads;
}

struct Piece {
    RequestKeys keys;
    int request, head, tile;   // tile: of tile_rows rows
    int begin, end;            // cache positions, begin a multiple of kUnitTokens
    int start, stop;           // the whole sequence on the line of work; stop 0: not split
};

// The first request that ends beyond position `at` of the line.
__device__ __forceinline__ int request_at(const AttentionParams& p, const int* prefix, int at) {
    int low = 0, high = p.batch - 1;
#pragma unroll 1
    while (low < high) {
        const int mid = (low + high) / 2;
        if (prefix[mid + 1] * p.kv_heads <= at) low = mid + 1; else high = mid;
    }
    return low;
}

// Fills in where position `at` of the line lies and takes from there at most `limit` positions. Needs piece.request, .keys.
__device__ __forceinline__ int take_piece(const AttentionParams& p, const int* prefix, int tile_rows, int at, int limit, Piece& piece) {
    const int base = prefix[piece.request] * p.kv_heads;
    const unsigned local = static_cast<unsigned>(at - base), units = piece.keys.units;
    const unsigned tiles = static_cast<unsigned>(row_tiles(piece.keys.nodes, p.group, tile_rows));
    const unsigned sequence = local / units, unit = local - sequence * units;
    const unsigned head = sequence / tiles;
    piece.head = static_cast<int>(head);
    piece.tile = static_cast<int>(sequence - head * tiles);
    piece.start = base + static_cast<int>(sequence * units);
    piece.stop = piece.start + static_cast<int>(units);
    const int take = min(static_cast<int>(units - unit), limit);
    piece.begin = piece.keys.begin + static_cast<int>(unit) * kUnitTokens;
    piece.end = min(piece.keys.end, piece.begin + take * kUnitTokens);
    return take;
}

// Walks a block's pieces. Lives in shared memory with the piece: one thread moves it.
struct Worker {
    int at, stop, length;        // on the line of work; length 0: whole sequences, `item` of requests x heads
    int item, tile;

    __device__ __forceinline__ void start(const AttentionParams& p, int total) {
        length = total > 0 ? range_length(total, static_cast<int>(gridDim.x), p.least_units) : 0;
        const int64_t begin = static_cast<int64_t>(blockIdx.x) * length;
        at = static_cast<int>(begin < total ? begin : total);
        stop = min(at + length, total);
        item = static_cast<int>(blockIdx.x);
        tile = 0;
    }
    __device__ __forceinline__ bool next(const AttentionParams& p, const int* prefix, int tile_rows, Piece& piece) {
#pragma unroll 1
        for (;;) {
            if (length > 0 ? at >= stop : item >= p.batch * p.kv_heads) return false;
            piece.request = length > 0 ? request_at(p, prefix, at) : item / p.kv_heads;
            piece.keys = keys_of(p, piece.request);
            if (length > 0) {
                at += take_piece(p, prefix, tile_rows, at, stop - at, piece);
                return true;
            }
            if (tile < row_tiles(piece.keys.nodes, p.group, tile_rows)) break;
            item += static_cast<int>(gridDim.x);
            tile = 0;
        }
        piece.head = item % p.kv_heads;
        piece.tile = tile++;
        piece.begin = piece.keys.begin;
        piece.end = piece.keys.end;
        piece.start = piece.stop = 0;
        return true;
    }
};

}  // namespace fv
