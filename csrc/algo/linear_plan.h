// SPDX-License-Identifier: Apache-2.0
// How skinny_linear cuts products over long K (linear/wide_kernel.cuh): pure functions of N and K, so that the order of every sum is.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kWideRows = 64;          // weight rows of a block
constexpr int64_t kWideFrom = 2048;    // K above it: 64 weight rows per block
constexpr int64_t kWideBlocks = 192;   // with fewer, clusters share the K of their weight rows

FV_HD constexpr bool wide_fits(int64_t outer, int64_t inner) { return inner > kWideFrom && outer > 0 && outer % kWideRows == 0; }

// Blocks that share the K of 64 weight rows: 1, 2 or 4.
FV_HD constexpr int wide_split(int64_t outer) {
    const int64_t blocks = outer / kWideRows;
    return blocks >= kWideBlocks ? 1 : 4 * blocks >= kWideBlocks ? 2 : 4;
}

}  // namespace fv
