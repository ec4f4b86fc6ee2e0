// SPDX-License-Identifier: Apache-2.0
// The kernel of compact_kv and compact_kv_layers: all layers, K and V, all requests and the aux rows in one launch.
// A thread owns one column (16 bytes where all addresses allow) of one layer's K or V row and moves it for every accepted
// node of its request in ascending order, kBatch loads before kBatch stores: since path[i] >= i no store precedes a load of
// the same row, and no other thread touches the column. A row whose page is not in the table or the cache is skipped.
#pragma once
#include <cstdint>

#include "algo/compact.h"
#include "common/warp.cuh"

namespace fv {

constexpr int kCompactThreads = 256;
constexpr int kPathTile = 64;  // path entries whose addresses are in shared memory at a time

struct CacheLayout {
    int64_t page, slot;  // strides in bytes
    uint32_t columns;    // units of a row
};

struct CompactArgs {
    CacheLayout cache[2];       // K, V (columns 0: absent)
    const int32_t *path, *num_tokens_out, *prefix_len;  // [B, depth], [B], [B]
    const int32_t* page_table;  // [B, table_columns], rows table_stride apart
    const int32_t* cu_nodes;    // [B+1] or null
    const char* aux;            // [aux_rows] rows aux_stride bytes apart, or null
    char* aux_out;              // [B * depth] rows, dense
    int32_t* cu_out;            // [B+1] or null
    int64_t table_stride, table_columns, pages, aux_rows, aux_stride, aux_bytes, requests;
    uint32_t page_size;
    int32_t depth, layers, unit, aux_unit;   // units: 16, 4 or 1 bytes
    uint32_t move_blocks, aux_blocks;        // of each request
};

// One slab, layers a fixed distance apart.
struct SlabLayers {
    char *k, *v;
    int64_t k_stride, v_stride;
    __device__ __forceinline__ char* at(int kv, int layer) const {
        return (kv ? v : k) + layer * (kv ? v_stride : k_stride);
    }
};

// Addresses of up to `kMax` layers, passed as kernel arguments: fixed by a graph capture, never stale otherwise.
template <int kMax>
struct ListedLayers {
    char* data[2][kMax];
    __device__ __forceinline__ char* at(int kv, int layer) const { return data[kv][layer]; }
};

// Addresses of one tile of moves, as offsets from a layer's start; from < 0: skipped.
struct MoveTile {
    int64_t from[2][kPathTile], to[2][kPathTile];
};

template <class Unit, class Layers>
__device__ __forceinline__ void move_columns(const CompactArgs& a, const Layers& layers, const MoveTile& tile, int moves, uint32_t block) {
    constexpr int kBatch = 4;
    const uint32_t k_columns = a.cache[0].columns * a.layers, all = k_columns + a.cache[1].columns * a.layers;
    for (uint32_t g = block * kCompactThreads + threadIdx.x; g < all; g += a.move_blocks * kCompactThreads) {
        const int kv = g >= k_columns;
        const uint32_t in_cache = kv ? g - k_columns : g, layer = in_cache / a.cache[kv].columns;
        const uint32_t column = in_cache - layer * a.cache[kv].columns;
        char* const base = layers.at(kv, static_cast<int>(layer)) + static_cast<int64_t>(column) * sizeof(Unit);
        for (int first = 0; first < moves; first += kBatch) {
            Unit data[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                const int64_t from = first + u < moves ? tile.from[kv][first + u] : -1;
                if (from >= 0) data[u] = *reinterpret_cast<const Unit*>(base + from);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                if (first + u < moves && tile.from[kv][first + u] >= 0) {
                    *reinterpret_cast<Unit*>(base + tile.to[kv][first + u]) = data[u];
                }
            }
        }
    }
}

template <class Layers>
__device__ __forceinline__ void move_rows(
    const CompactArgs& a, const Layers& layers, int64_t b, const int32_t* path, int32_t length, int64_t prefix, uint32_t block) {
    __shared__ MoveTile tile;
    const int32_t* const table = a.page_table + b * a.table_stride;
    for (int32_t start = compact_first_move(path, length); start < length; start += kPathTile) {
        const int moves = length - start < kPathTile ? length - start : kPathTile;
        const int t = threadIdx.x;
        if (t < moves) {
            const uint32_t src = static_cast<uint32_t>(prefix + path[start + t]), dst = static_cast<uint32_t>(prefix + start + t);
            const uint32_t src_page = src / a.page_size, dst_page = dst / a.page_size;
            const bool inside = prefix >= 0 && src_page < a.table_columns && dst_page < a.table_columns;
            const int64_t from = inside ? table[src_page] : -1, to = inside ? table[dst_page] : -1;
            const bool ok = from >= 0 && from < a.pages && to >= 0 && to < a.pages;
            const int64_t src_slot = src - src_page * a.page_size, dst_slot = dst - dst_page * a.page_size;
#pragma unroll
            for (int kv = 0; kv < 2; ++kv) {
                tile.from[kv][t] = ok ? from * a.cache[kv].page + src_slot * a.cache[kv].slot : -1;
                tile.to[kv][t] = to * a.cache[kv].page + dst_slot * a.cache[kv].slot;
            }
        }
        __syncthreads();
        if (a.unit == 16) move_columns<uint4>(a, layers, tile, moves, block);
        else if (a.unit == 4) move_columns<uint32_t>(a, layers, tile, moves, block);
        else move_columns<uint8_t>(a, layers, tile, moves, block);
        __syncthreads();
    }
}

// Aux rows of one request to aux_out[base ..], zeros to the rows from `total` on (shared by all blocks).
template <class Unit>
__device__ __forceinline__ void gather_rows(
    const CompactArgs& a, int64_t b, const int32_t* path, int32_t length, int64_t base, int64_t total, uint32_t block) {
    const int64_t columns = a.aux_bytes / static_cast<int64_t>(sizeof(Unit));
    const int64_t start = a.cu_nodes[b], step = static_cast<int64_t>(a.aux_blocks) * kCompactThreads;
    Unit* const out = reinterpret_cast<Unit*>(a.aux_out);
    constexpr int kBatch = 4;
    for (int64_t c = static_cast<int64_t>(block) * kCompactThreads + threadIdx.x; c < columns; c += step) {
        for (int32_t first = 0; first < length; first += kBatch) {
            Unit data[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                data[u] = Unit{};
                if (first + u >= length) continue;
                const int64_t row = start + path[first + u];
                if (row >= 0 && row < a.aux_rows) data[u] = reinterpret_cast<const Unit*>(a.aux + row * a.aux_stride)[c];
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                if (first + u < length) out[(base + first + u) * columns + c] = data[u];
            }
        }
    }
    const int64_t end = a.requests * a.depth * columns;
    for (int64_t c = total * columns + (b * a.aux_blocks + block) * kCompactThreads + threadIdx.x; c < end; c += a.requests * step) {
        out[c] = Unit{};
    }
}

__device__ __forceinline__ int32_t request_length(const CompactArgs& a, int64_t b) {
    const int64_t nodes = a.cu_nodes ? static_cast<int64_t>(a.cu_nodes[b + 1]) - a.cu_nodes[b] : INT32_MAX;
    return compact_length(a.path + b * a.depth, a.num_tokens_out[b], a.depth, nodes);
}

// request_length by one warp, 32 entries at a time: the first that is not above its predecessor, or not a node, ends it.
// The first 32 are loaded together with the count, not after it.
__device__ __forceinline__ int32_t warp_length(const CompactArgs& a, int64_t b) {
    const int32_t* const path = a.path + b * a.depth;
    const int lane = threadIdx.x & 31;
    int32_t at = lane < a.depth ? lane : a.depth - 1;
    int32_t entry = at >= 0 ? path[at] : 0, last = at > 0 ? path[at - 1] : -1;
    const int32_t count = a.num_tokens_out[b];
    const int64_t nodes = a.cu_nodes ? static_cast<int64_t>(a.cu_nodes[b + 1]) - a.cu_nodes[b] : INT32_MAX;
    const int32_t limit = count < a.depth ? count : a.depth;
    for (int32_t first = 0; first < limit; first += 32) {
        const int32_t i = first + lane;
        if (first > 0) {
            at = i < a.depth ? i : a.depth - 1;
            entry = path[at];
            last = path[at - 1];
        }
        const uint32_t ends = __ballot_sync(kFullWarp, i < limit && (entry <= last || entry >= nodes));
        if (ends) return first + __ffs(static_cast<int>(ends)) - 1;
    }
    return limit < 0 ? 0 : limit;
}

template <class Layers>
__global__ void __launch_bounds__(kCompactThreads, 4) compact_kernel(const CompactArgs a, const Layers layers) {
    __shared__ int64_t sums[33];
    const uint32_t per_request = a.move_blocks + a.aux_blocks, block = blockIdx.x % per_request;
    const int64_t b = blockIdx.x / per_request;
    const int32_t* const path = a.path + b * a.depth;
    const int64_t prefix = a.prefix_len[b];  // asked for together with the path
    const int32_t length = warp_length(a, b);
    if (block < a.move_blocks) {
        move_rows(a, layers, b, path, length, prefix, block);
        return;
    }
    int64_t before = 0, total = 0;
    for (int64_t e = threadIdx.x; e < a.requests; e += kCompactThreads) {
        const int32_t n = request_length(a, e);
        total += n;
        before += e < b ? n : 0;
    }
    const auto add = [](int64_t x, int64_t y) { return x + y; };
    before = block_reduce(before, add, sums);
    __syncthreads();
    total = block_reduce(total, add, sums);
    const uint32_t own = block - a.move_blocks;
    if (a.cu_out && own == 0 && threadIdx.x == 0) {
        if (b == 0) a.cu_out[0] = 0;
        a.cu_out[b + 1] = static_cast<int32_t>(before + length);
    }
    if (!a.aux) return;
    if (a.aux_unit == 16) gather_rows<uint4>(a, b, path, length, before, total, own);
    else if (a.aux_unit == 4) gather_rows<uint32_t>(a, b, path, length, before, total, own);
    else gather_rows<uint8_t>(a, b, path, length, before, total, own);
}

}  // namespace fv
