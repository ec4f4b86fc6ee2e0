// SPDX-License-Identifier: Apache-2.0
// What skinny_linear does with a product: stores it, adds it to what is there, or multiplies silu of one half with the other.
#pragma once
#include "linear/skinny_kernel.cuh"

namespace fv::skinny {

struct Plain {
    uint16_t* out;
    int64_t row_stride;
    __device__ void rows(int tile, int& low, int& high) const { low = tile * kTile, high = low + 8; }
    __device__ void store(int row, int, int low, int high, float a, float b) const {
        out[row * row_stride + low] = float_to_bf16(a);
        out[row * row_stride + high] = float_to_bf16(b);
    }
};

struct Add : Plain {
    __device__ void store(int row, int tile, int low, int high, float a, float b) const {
        Plain::store(row, tile, low, high, a + bf16_to_float(out[row * row_stride + low]), b + bf16_to_float(out[row * row_stride + high]));
    }
};

struct SiluMul {
    uint16_t* out;
    int64_t row_stride;
    int32_t half;
    __device__ void rows(int tile, int& low, int& high) const { low = tile * 8, high = half + low; }
    __device__ void store(int row, int, int low, int, float a, float b) const {
        out[row * row_stride + low] = float_to_bf16(a / (1.0f + expf(-a)) * b);
    }
};

// Products after a norm, K <= 768 (skinny_linear_norm.cu).
void run_normed(const Launch& launch, const Params& p, const Plain& epilogue);
void run_normed(const Launch& launch, const Params& p, const SiluMul& epilogue);

}  // namespace fv::skinny
