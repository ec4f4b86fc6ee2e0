// SPDX-License-Identifier: Apache-2.0
// Exact mode of tree_attention: every node a decoding row of its own, over its keys in the order of their positions.
//
// The query heads of one (row, kv head) are the rows of a tile; the keys are cut into chunks at absolute positions, each
// gives a partial result, and a second kernel folds them in order. Nothing else enters a row's arithmetic, so its bits are
// those of the plain decoding row at its position. Cost: every row reads its KV by itself (from the L2 where it fits).
#pragma once
#include "attention/tree_attention_kernel.cuh"

namespace fv {

// The keys of flat row `row`; nodes 0: a row of padding. `sight` is without the window.
__device__ __forceinline__ RequestKeys exact_keys(const AttentionParams& p, int64_t row, int* request, RowSight* sight) {
    int low = 0, high = p.batch;
#pragma unroll 1
    while (low < high) {
        const int mid = (low + high) / 2;
        if (p.cu_nodes[mid + 1] <= row) low = mid + 1; else high = mid;
    }
    *request = low;
    if (low >= p.batch) return RequestKeys{};
    const RequestKeys keys = request_keys(p.cu_nodes[low], p.cu_nodes[low + 1], p.prefix[low], p.rows, p.row_base, p.capacity, 0, p.mask == nullptr);
    if (row < keys.row0 || row >= keys.row0 + keys.nodes) return RequestKeys{};
    *sight = row_sight(p.mask ? p.mask + row * p.mask_row : nullptr, p.words, p.row_base + row - keys.row0, keys.columns, keys.prefix, 0);
    return row_keys(keys, *sight, static_cast<int32_t>(row), p.window);
}

__device__ __forceinline__ float* exact_partial(const AttentionParams& p, int64_t item, int64_t chunk) {
    return p.partials + (item * p.exact_chunks + chunk) * exact_partial_floats(p.exact_heads, p.head_dim);
}

// grid: (rows x kv heads x tiles of query heads, groups of chunks); block: 128 threads; shared memory: Q, ring.
template <class T>
__global__ void __launch_bounds__(128, 2) tree_attention_exact_kernel(const __grid_constant__ AttentionParams p) {
    __shared__ Piece piece;
    const int tiles = row_tiles(1, p.group, T::kRows);
    const int64_t row = blockIdx.x / (p.kv_heads * tiles);
    if (threadIdx.x == 0) {
        RowSight sight{};
        piece.keys = exact_keys(p, row, &piece.request, &sight);
        piece.forest_columns = static_cast<int>(sight.columns);
        piece.head = static_cast<int>(blockIdx.x / tiles % p.kv_heads);
        piece.tile = static_cast<int>(blockIdx.x % tiles);
        piece.start = piece.stop = 0;
    }
    Attend<T, true> attend(p, dynamic_shared());
    __syncthreads();
    const int64_t begin = piece.keys.begin, end = piece.keys.end;
#pragma unroll 1
    for (int64_t chunk = blockIdx.y; piece.keys.nodes > 0 && chunk < exact_chunks(end); chunk += gridDim.y) {
        __syncthreads();
        if (threadIdx.x == 0) {
            piece.begin = static_cast<int>(max(begin, chunk * kExactChunk));
            piece.end = static_cast<int>(min(end, (chunk + 1) * kExactChunk));
        }
        __syncthreads();
        if (piece.begin < piece.end) {
            attend.run(piece);
            attend.finish(piece, exact_partial(p, blockIdx.x, chunk));
        }
    }
    if (blockIdx.y == 0) clear_padding(p);
}

// grid: (rows, query heads); block: 128 threads. Folds the chunks of a row in order.
static __global__ void __launch_bounds__(128) exact_fold_kernel(const __grid_constant__ AttentionParams p, int tile_rows) {
    __shared__ RequestKeys keys;
    const int64_t row = blockIdx.x;
    const int head = blockIdx.y, kv_head = head / p.group, member = head - kv_head * p.group;
    if (threadIdx.x == 0) {
        int request;
        RowSight sight{};
        keys = exact_keys(p, row, &request, &sight);
    }
    wait_for_previous_launch();
    __syncthreads();
    if (keys.nodes == 0) return;
    const int tiles = row_tiles(1, p.group, tile_rows), slot = member % tile_rows;
    const int64_t item = (row * p.kv_heads + kv_head) * tiles + member / tile_rows;
    const int64_t first = keys.begin / kExactChunk, last = exact_chunks(keys.end);
    const int heads = p.exact_heads, quads = p.head_dim / 4;
    float top = -INFINITY, sum = 0.0f;
    float4 o = {};
    const int quad = static_cast<int>(threadIdx.x) < quads ? static_cast<int>(threadIdx.x) : 0;
#pragma unroll 2
    for (int64_t chunk = first; chunk < last && keys.end > 0; ++chunk) {
        const float* from = exact_partial(p, item, chunk);
        const float high = __ldcg(from + heads * p.head_dim + slot), part = __ldcg(from + heads * (p.head_dim + 1) + slot);
        const float4 v = __ldcg(reinterpret_cast<const float4*>(from + slot * p.head_dim) + quad);
        const float now = fmaxf(top, high), shift = now == -INFINITY ? 0.0f : now;
        const float mine = exp2_approx(top - shift), other = exp2_approx(high - shift);
        top = now;
        sum = sum * mine + part * other;
        o.x = o.x * mine + v.x * other, o.y = o.y * mine + v.y * other;
        o.z = o.z * mine + v.z * other, o.w = o.w * mine + v.w * other;
    }
    const RowTarget target{row, head, true};
    const float factor = finish_row(p, target, kv_head, top, sum, threadIdx.x == 0);
    if (static_cast<int>(threadIdx.x) < quads) store_out(p, target, 4 * quad, float4{o.x * factor, o.y * factor, o.z * factor, o.w * factor});
}

}  // namespace fv
