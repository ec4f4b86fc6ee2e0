// SPDX-License-Identifier: Apache-2.0
// Sum over ranks of one block of elements on the CPU: fp32, rank order, rounded once.
#pragma once
#include "common/convert.h"

namespace fv {

constexpr int kFoldBlock = 1024;

// x: [world][stride elements] of `type`; elements [begin, begin + n), n <= kFoldBlock, of the sum -> out, in fp32.
inline void fold_ranks(const void* x, ScalarType type, int64_t stride, int world, int64_t begin, int n, float* out) {
    const int64_t size = element_bytes(type);
    float part[kFoldBlock];
    const auto* bytes = static_cast<const uint8_t*>(x);
    load_row(bytes + begin * size, type, out, n);
    for (int r = 1; r < world; ++r) {
        load_row(bytes + (r * stride + begin) * size, type, part, n);
        for (int i = 0; i < n; ++i) out[i] += part[i];
    }
}

}  // namespace fv
