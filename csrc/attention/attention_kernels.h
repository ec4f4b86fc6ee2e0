// SPDX-License-Identifier: Apache-2.0
// The compiled tensor-core kernels, one table per element kind of the cache (tree_attention_<kind>.cu).
#pragma once
#include "attention/attention_params.h"

namespace fv {

using AttentionKernel = void (*)(AttentionParams);

// The tile_rows that attention_launch chooses up to most_tile_rows. Null otherwise.
AttentionKernel attention_kernel_bf16(int head_dim, int tile_rows);
AttentionKernel attention_kernel_f16(int head_dim, int tile_rows);
AttentionKernel attention_kernel_e4m3(int head_dim, int tile_rows);  // q and out bf16 or f16

// sm_90a, head_dim 128, tile_rows 64 or 128. Null otherwise, and in a build without sm_90.
AttentionKernel attention_kernel_sm90(int head_dim, int tile_rows, Element kv_type);
// Exact mode: the smallest tile of head_dim 64, 128 or 256; not for every kind of cache. Null otherwise.
AttentionKernel exact_kernel(int head_dim, Element kv_type);

// mla_tree_attention on sm_90a. Null for other types, and in a build without sm_90.
AttentionKernel mla_kernel_sm90(Element kv_type);

}  // namespace fv
