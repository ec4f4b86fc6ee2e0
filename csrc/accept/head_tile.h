// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace fv {

// out[r, v] = sum_h hidden[r, h] * weight[v, h]; hidden f32 [rows, h], weight f32 [n, h], out f32 [rows, ld].
void head_tile(const float* hidden, int64_t rows, int64_t h, const float* weight, int64_t n, float* out, int64_t ld);

}  // namespace fv
