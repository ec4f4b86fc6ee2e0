// SPDX-License-Identifier: Apache-2.0
// What follows a product of skinny_linear: see skinny_kernel.cuh for what an epilogue is.
#pragma once
#include "linear/wide_kernel.cuh"

namespace fv::skinny {

struct Plain {
    uint16_t *out, *copy;  // copy: null, or where the values go a second time
    int64_t row_stride, copy_row;
    struct Early {};
    __device__ bool early_before_wait() const { return false; }
    __device__ void rows(int tile, int& low, int& high) const { low = tile * kTile, high = low + 8; }
    __device__ Early early(int, int, int) const { return {}; }
    __device__ void store(Early, int row, int, int low, int high, float a, float b, bool real) const {
        const uint16_t x = float_to_bf16(a), y = float_to_bf16(b);
        if (!real) return;
        out[row * row_stride + low] = x;
        out[row * row_stride + high] = y;
        if (copy) copy[row * copy_row + low] = x, copy[row * copy_row + high] = y;
    }
};

struct Add : Plain {
    struct Early {
        uint16_t low, high;  // of out as it was
    };
    __device__ Early early(int row, int, int low) const { return {__ldcg(out + row * row_stride + low), __ldcg(out + row * row_stride + low + 8)}; }
    __device__ void store(Early old, int row, int tile, int low, int high, float a, float b, bool real) const {
        Plain::store({}, row, tile, low, high, a + bf16_to_float(old.low), b + bf16_to_float(old.high), real);
    }
};

}  // namespace fv::skinny
