// SPDX-License-Identifier: Apache-2.0
// Tree attention for what tensor-core tiles do not take (fp32, odd head dims, unaligned strides, mixed dtypes): one
// block per (row, query head), fp32 arithmetic, keys in steps of 128, only the keys that the row sees are touched; in exact mode
// in the order of their positions.
// Cost: every row reads its visible KV by itself.
#pragma once
#include "algo/convert.h"
#include "attention/attention_merge.cuh"

namespace fv {

constexpr int kRowsThreads = 128;

__device__ __forceinline__ float load_element(const void* base, Element type, int64_t i) {
    if (type == Element::kF32) return static_cast<const float*>(base)[i];
    if (type == Element::kBf16) return bf16_to_float(static_cast<const uint16_t*>(base)[i]);
    if (type == Element::kF16) return half_to_float(static_cast<const uint16_t*>(base)[i]);
    return half_to_float(static_cast<uint16_t>(e4m3x2_to_f16x2(static_cast<const uint8_t*>(base)[i])));
}

// grid: rows x heads; dynamic shared memory: head_dim + v_dim floats (q, then o).
static __global__ void __launch_bounds__(kRowsThreads) tree_attention_rows_kernel(const __grid_constant__ AttentionParams p) {
    __shared__ float weights[kRowsThreads], scratch[33];
    __shared__ int64_t cells[kRowsThreads];  // byte offset in V; -1: not seen
    float* q = reinterpret_cast<float*>(dynamic_shared());
    float* o = q + p.head_dim;
    const int64_t row = blockIdx.x;
    const int head = blockIdx.y, kv_head = head / p.group, tid = threadIdx.x;
    int low = 0, high = p.batch;  // the request of the row
    while (low < high) {
        const int mid = (low + high) / 2;
        if (p.cu_nodes[mid + 1] <= row) low = mid + 1; else high = mid;
    }
    if (low >= p.batch) return;  // padding: clear_padding_kernel
    RequestKeys keys = keys_of(p, low);
    if (row < keys.row0 || row >= keys.row0 + keys.nodes) return;
    const RowSight sight = row_sight(p.mask ? p.mask + row * p.mask_row : nullptr, p.words, p.row_base + row - keys.row0, keys.columns,
                                     keys.prefix, p.exact ? 0 : p.window);
    if (p.exact) keys = row_keys(keys, sight, static_cast<int32_t>(row), p.window);  // `at` below counts the row's own keys
    for (int i = tid; i < p.head_dim; i += kRowsThreads) {
        q[i] = load_element(p.q, p.q_type, row * p.q_row + head * p.q_head + i);
    }
    for (int i = tid; i < p.v_dim; i += kRowsThreads) o[i] = 0.0f;
    __syncthreads();
    const float scale = p.scale * (p.k_scale ? p.k_scale[kv_head * p.k_scale_stride] : 1.0f);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t begin = keys.begin; begin < keys.end; begin += kRowsThreads) {
        int64_t at = begin + tid;
        bool seen = at < keys.end;
        if (p.exact) {
            seen = seen && at >= keys.first;
            if (seen && at >= keys.prefix) at = keys.prefix + nth_column(sight, at - keys.prefix);
        } else {
            seen = seen && (visible_positions(sight, keys.prefix, begin + (tid & 64)) >> (tid & 63) & 1);
        }
        float s = -INFINITY;
        int64_t v_cell = -1;
        if (seen) {
            const int64_t page = p.table[low * p.table_row + at / p.page_size], slot = at % p.page_size;
            if (page >= 0 && page < p.num_pages) {
                const unsigned char* k = p.k + page * p.k_page + slot * p.k_slot + kv_head * p.k_head;
                v_cell = page * p.v_page + slot * p.v_slot + kv_head * p.v_head;
                s = 0.0f;
                for (int i = 0; i < p.head_dim; ++i) s = fmaf(q[i], load_element(k, p.kv_type, i), s);
                s *= scale;
                if (p.softcap > 0.0f) s = p.softcap * kLog2E * tanhf(s * kLn2 / p.softcap);
            }
        }
        const float high_s = block_reduce(s, [](float a, float b) { return fmaxf(a, b); }, scratch);
        const float now = fmaxf(top, high_s), shift = now == -INFINITY ? 0.0f : now;
        const float w = v_cell < 0 ? 0.0f : exp2f(s - shift), alpha = exp2f(top - shift);
        __syncthreads();
        weights[tid] = w;
        cells[tid] = v_cell;
        sum = sum * alpha + block_reduce(w, [](float a, float b) { return a + b; }, scratch);
        top = now;
        for (int i = tid; i < p.v_dim; i += kRowsThreads) {
            float acc = o[i] * alpha;
#pragma unroll 4
            for (int j = 0; j < kRowsThreads; ++j) {
                if (cells[j] >= 0) acc = fmaf(weights[j], load_element(p.v + cells[j], p.kv_type, i), acc);
            }
            o[i] = acc;
        }
        __syncthreads();
    }
    const float factor = finish_row(p, {row, head, true}, kv_head, top, sum, tid == 0);
    for (int i = tid; i < p.v_dim; i += kRowsThreads) {
        const float y = sum == 0.0f ? 0.0f : o[i] * factor;
        const int64_t at = row * p.out_row + head * p.out_head + i;
        if (p.q_type == Element::kF32) static_cast<float*>(p.out)[at] = y;
        else if (p.q_type == Element::kBf16) static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(pack_bf16(y, 0.0f));
        else static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(pack_f16(y, 0.0f));
    }
}

}  // namespace fv
