// SPDX-License-Identifier: Apache-2.0
// First children and next siblings of all nodes by one warp, 32 nodes at a time from the last to the first.
#pragma once
#include "common/warp.cuh"
#include "tree/sgl_tree_args.h"

namespace fv {

struct SglLinkTable {
    int32_t first[kMaxNodes], sibling[kMaxNodes];  // -1: none

    // All threads of the block, with a barrier before and after. parent[i] < 0: no parent.
    __device__ void clear(int32_t n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) first[i] = -1;
    }
    // The first warp.
    __device__ void fill(const int32_t* parent, int32_t n) {
        const int lane = threadIdx.x & 31;
        for (int32_t base = (n - 1) & ~31; base >= 0; base -= 32) {
            const int32_t i = base + lane, up = i > 0 && i < n ? parent[i] : -1;
            const unsigned same = __match_any_sync(kFullWarp, up);
            const unsigned after = lane == 31 ? 0u : same >> (lane + 1);
            const int32_t next = up < 0 ? -1 : after ? i + __ffs(static_cast<int>(after)) : first[up];
            __syncwarp();
            if (i < n) sibling[i] = next;
            if (up >= 0 && (same & ((1u << lane) - 1u)) == 0) first[up] = i;
            __syncwarp();
        }
    }
};

}  // namespace fv
