// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of tree_attention are given. Strides of caches in bytes, of the rest in elements.
#pragma once
#include <cstdint>

#include "algo/attention_plan.h"

namespace fv {

enum class Element : int32_t { kF32, kBf16, kF16, kE4m3 };

struct AttentionParams {
    const void* q;            // [rows, heads, head_dim] q_type
    void* out;                // [rows, heads, v_dim] q_type; v_dim = head_dim but for a latent cache
    float* lse;               // f32 [rows, heads] or null
    const unsigned char* k;   // [num_pages, page_size, kv_heads, head_dim] kv_type
    const unsigned char* v;
    const int64_t* mask;      // i64 [rows, words] or null: chain
    const int32_t* cu_nodes;  // i32 [batch + 1]
    const int32_t* prefix;    // i32 [batch]
    const int32_t* table;     // i32 [batch, table_columns]
    const float* sinks;       // f32 [heads] or null
    const float* k_scale;     // f32 [kv_heads], stride k_scale_stride, or null: 1
    const float* v_scale;
    float* partials;          // f32 [2 * blocks, tile_rows * (head_dim + 2)]; null: no sequence is split
    uint32_t* counters;       // u32 [blocks], zero between calls
    int64_t q_row, q_head, out_row, out_head, lse_row, mask_row, table_row;
    int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;
    int64_t rows, words, table_columns, num_pages, row_base, capacity;  // capacity: table_columns * page_size
    int64_t k_scale_stride, v_scale_stride;
    int32_t batch, kv_heads, group, head_dim, v_dim, page_size, window, blocks, stages, least_units, cluster;
    int32_t exact, exact_heads;   // exact mode; query heads of a partial result
    int64_t exact_chunks;         // per (row, kv head, tile)
    Divider by_group, by_page_size;
    Element q_type, kv_type;
    float scale, softcap;     // scale times log2(e)
};

}  // namespace fv
