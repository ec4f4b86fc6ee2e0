// SPDX-License-Identifier: Apache-2.0
// When tree_attention takes the kernel of short sequences (attention/tree_attention_short.cuh): a pure function of the shape and
// the device.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kShortCluster = 8;         // blocks that share the keys of one (request, kv head)
constexpr int64_t kShortCapacity = 2048;  // cache positions that a page table may hold

// capacity: of a request's page table. 16-bit cache and queries of one kind, bf16; head_dim 64.
FV_HD bool short_attention(int64_t batch, int64_t kv_heads, int64_t head_dim, int64_t capacity, int major, int sms) {
    return major >= 9 && head_dim == 64 && capacity <= kShortCapacity && batch * kv_heads * kShortCluster <= 4 * static_cast<int64_t>(sms);
}

// Of those with a settled prefix: when one block per (request, kv head) takes it, whose shared memory holds what is known early
// (attention/tree_attention_block.cuh). More rows would read the keys more often.
FV_HD bool block_attention(int64_t rows, int64_t batch, int64_t group) { return batch > 0 && (rows + batch - 1) / batch * group <= 32; }

}  // namespace fv
