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

struct Line {
    int total;   // positions (cut.per > 0: blocks with work); 0: sequences are not to be split
    Cut cut;
};

// What a request takes of the line, per kv head.
__device__ __forceinline__ int line_share(const Cut& cut, int units, int rows) { return cut.per > 0 ? rows : padded_units(units, cut.pad) * rows; }

// prefix[b] = what the requests before b take of the line per kv head (padded units x row tiles, or row tiles), prefix[batch] of all. All
// threads call it (128 or more; the first 128 work); `scratch`: 16 ints of shared memory.
__device__ __forceinline__ Line lay_out_work(const AttentionParams& p, int tile_rows, int* prefix, int* scratch) {
    if (p.partials == nullptr || p.batch > kMaxSplitBatch) return {0, {0, 1, 0}};
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int each = (p.batch + 127) / 128, begin = min(static_cast<int>(threadIdx.x) * each, p.batch), end = min(begin + each, p.batch);
    float size = 0.0f;  // of the line, to see whether it fits an int
    int work = 0, tiles = 0, longest = 0, units = 0, rows = 0;
#pragma unroll 1
    for (int b = begin; b < end; ++b) {
        const RequestKeys r = keys_of(p, b);
        units = r.units, rows = row_tiles(r.nodes, p.group, tile_rows);
        work += units * rows, tiles += rows, longest = max(longest, units);
        size += static_cast<float>(units) * static_cast<float>(rows);
    }
    size = warp_sum(size), work = warp_sum(work), tiles = warp_sum(tiles), longest = warp_max(longest);
    if (lane == 0 && warp < 4) scratch[warp] = work, scratch[4 + warp] = tiles, scratch[8 + warp] = longest, scratch[12 + warp] = __float_as_int(size);
    __syncthreads();
    work = (scratch[0] + scratch[1]) + (scratch[2] + scratch[3]);
    tiles = (scratch[4] + scratch[5]) + (scratch[6] + scratch[7]);
    longest = max(max(scratch[8], scratch[9]), max(scratch[10], scratch[11]));
    size = (__int_as_float(scratch[12]) + __int_as_float(scratch[13])) + (__int_as_float(scratch[14]) + __int_as_float(scratch[15]));
    if (size * static_cast<float>(p.kv_heads) > 1e9f) return {0, {0, 1, 0}};
    const Cut cut = cut_line(work * p.kv_heads, tiles * p.kv_heads, longest, p.blocks, p.least_units, p.cluster);
    int sum = 0;
#pragma unroll 1
    for (int b = begin; b < end; ++b) {
        if (each > 1) {
            const RequestKeys r = keys_of(p, b);
            units = r.units, rows = row_tiles(r.nodes, p.group, tile_rows);
        }
        prefix[b] = sum;  // of this thread's requests, for now
        sum += line_share(cut, units, rows);
    }
    int before = sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(kFullWarp, before, d);
        if (lane >= d) before += other;
    }
    __syncthreads();  // scratch has been read
    if (lane == 31 && warp < 4) scratch[warp] = before;
    __syncthreads();
    before -= sum;
    for (int w = 0; w < min(warp, 4); ++w) before += scratch[w];
#pragma unroll 1
    for (int b = begin; b < end; ++b) prefix[b] += before;
    const int total = (scratch[0] + scratch[1]) + (scratch[2] + scratch[3]);
    if (threadIdx.x == 0) prefix[p.batch] = total;
    __syncthreads();
    return {total * p.kv_heads * max(cut.per, 1), cut};
}

constexpr int kWarpBatch = 32;  // requests that one warp lays out

// f over the first `count` lanes of the warp; the others hold f's identity.
template <class T, class F>
__device__ __forceinline__ T few_reduce(T v, int count, F f) {
#pragma unroll 1
    for (int d = 1; d < count; d <<= 1) v = f(v, __shfl_xor_sync(kFullWarp, v, d));
    return v;
}

// lay_out_work for at most kWarpBatch requests, by one warp alone: no barrier of the block.
__device__ __forceinline__ Line lay_out_few(const AttentionParams& p, int tile_rows, int* prefix) {
    if (p.partials == nullptr) return {0, {0, 1, 0}};
    const int lane = threadIdx.x & 31, count = p.batch;
    int units = 0, rows = 0;
    if (lane < count) {
        const RequestKeys r = keys_of(p, lane);
        units = r.units, rows = row_tiles(r.nodes, p.group, tile_rows);
    }
    const auto add = [](auto a, auto b) { return a + b; };
    const float size = few_reduce(static_cast<float>(units) * static_cast<float>(rows), count, add);
    const int work = few_reduce(units * rows, count, add), tiles = few_reduce(rows, count, add);
    const int longest = few_reduce(units, count, [](int a, int b) { return max(a, b); });
    const auto first = [](auto v) { return __shfl_sync(kFullWarp, v, 0); };
    if (first(size) * static_cast<float>(p.kv_heads) > 1e9f) return {0, {0, 1, 0}};
    const Cut cut = cut_line(first(work) * p.kv_heads, first(tiles) * p.kv_heads, first(longest), p.blocks, p.least_units, p.cluster);
    const int own = lane < count ? line_share(cut, units, rows) : 0;
    int sum = own;
#pragma unroll 1
    for (int d = 1; d < count; d <<= 1) {
        const int other = __shfl_up_sync(kFullWarp, sum, d);
        if (lane >= d) sum += other;
    }
    const int total = __shfl_sync(kFullWarp, sum, count > 0 ? count - 1 : 0);
    if (lane < count) prefix[lane] = sum - own;
    if (lane == 0) prefix[count] = total;
    __syncwarp();
    return {total * p.kv_heads * max(cut.per, 1), cut};
}

// Page ids of a few short requests on their way to the L2, by all warps but the first.
__device__ __forceinline__ void prefetch_pages(const AttentionParams& p) {
    constexpr int kEntries = 32, kMost = 64;  // entries of a line, lines
    const int64_t lines = (p.table_columns + kEntries - 1) / kEntries;
    if (threadIdx.x < 32 || lines * p.batch > kMost) return;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) - 32; i < static_cast<int>(lines) * p.batch; i += static_cast<int>(blockDim.x) - 32) {
        const int b = i / static_cast<int>(lines);
        prefetch_l2(p.table + b * p.table_row + (i - b * static_cast<int>(lines)) * kEntries);
    }
}

struct Piece {
    RequestKeys keys;
    int request, head, tile;   // tile: of tile_rows rows
    int begin, end;            // cache positions, begin a multiple of kUnitTokens
    int start, stop;           // the whole sequence on the line of work; stop 0: not split
    int forest_columns;        // exact mode: of the row, seen or not
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
__device__ __forceinline__ int take_piece(const AttentionParams& p, const int* prefix, int tile_rows, int pad, int at, int limit,
                                          Piece& piece) {
    const int base = prefix[piece.request] * p.kv_heads;
    const unsigned local = static_cast<unsigned>(at - base), units = padded_units(piece.keys.units, pad);
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

// The piece of block `at` of a line whose sequences have `per` blocks each.
__device__ __forceinline__ void deal_piece(const AttentionParams& p, const int* prefix, int tile_rows, int per, int sequence, int at,
                                           Piece& piece) {
    const unsigned local = static_cast<unsigned>(sequence - prefix[piece.request] * p.kv_heads);
    const unsigned tiles = static_cast<unsigned>(row_tiles(piece.keys.nodes, p.group, tile_rows)), head = local / tiles;
    piece.head = static_cast<int>(head);
    piece.tile = static_cast<int>(local - head * tiles);
    piece.start = sequence * per;
    piece.stop = piece.start + per;
    const UnitRange units = dealt_units(piece.keys.units, per, at - piece.start);
    piece.begin = piece.keys.begin + units.begin * kUnitTokens;
    piece.end = min(piece.keys.end, piece.keys.begin + units.end * kUnitTokens);
}

// Walks a block's pieces. Lives in shared memory with the piece: one thread moves it.
struct Worker {
    int at, stop, length, pad;   // on the line of work; length 0: whole sequences, `item` of requests x heads
    int per;                     // > 0: blocks of every sequence; positions of the line are blocks then
    int item, tile;

    __device__ __forceinline__ void start(const Line& line) {
        length = line.total > 0 ? line.cut.length : 0;
        pad = line.cut.pad;
        per = line.total > 0 ? line.cut.per : 0;
        const int64_t begin = static_cast<int64_t>(blockIdx.x) * length;
        at = static_cast<int>(begin < line.total ? begin : line.total);
        stop = min(at + length, line.total);
        item = static_cast<int>(blockIdx.x);
        tile = 0;
    }
    __device__ __forceinline__ bool next(const AttentionParams& p, const int* prefix, int tile_rows, Piece& piece) {
#pragma unroll 1
        for (;;) {
            if (length > 0 ? at >= stop : item >= p.batch * p.kv_heads) return false;
            const int sequence = per > 0 ? at / per : at;
            piece.request = length > 0 ? request_at(p, prefix, sequence) : item / p.kv_heads;
            piece.keys = keys_of(p, piece.request);
            if (per > 0) {
                deal_piece(p, prefix, tile_rows, per, sequence, at++, piece);
                return true;
            }
            if (length > 0) {
                at += take_piece(p, prefix, tile_rows, pad, at, stop - at, piece);
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

// Reads a word of every line of the kernel's parameters, so that their constant-cache misses overlap.
__device__ __forceinline__ void touch(const AttentionParams& p) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&p);
    static_assert(sizeof(AttentionParams) > 320 && sizeof(AttentionParams) <= 448);
    asm volatile("" ::"r"(words[0]), "r"(words[16]), "r"(words[32]), "r"(words[48]), "r"(words[64]), "r"(words[80]),
                 "r"(words[sizeof(AttentionParams) / 4 - 1]));
}

// Lays out the work and starts the worker, which thread 0 alone uses from here on. All threads call it.
__device__ __forceinline__ void start_work(const AttentionParams& p, int tile_rows, int* prefix, int* scratch, Worker& worker) {
    touch(p);
    if (p.batch <= kWarpBatch) {
        if (threadIdx.x < 32) {
            const Line line = lay_out_few(p, tile_rows, prefix);
            if (threadIdx.x == 0) worker.start(line);
        } else {
            prefetch_pages(p);
        }
        return;
    }
    const Line line = lay_out_work(p, tile_rows, prefix, scratch);
    if (threadIdx.x == 0) worker.start(line);
}

}  // namespace fv
