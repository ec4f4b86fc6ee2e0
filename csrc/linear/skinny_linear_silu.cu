// SPDX-License-Identifier: Apache-2.0
// skinny_linear with kind SILU_MUL on CUDA: gate and up rows of one block belong together.
// Instantiations: 8 (short and long K), 16, 24, 32 rows.
#include <torch/csrc/stable/library.h>

#include "linear/skinny_args.h"
#include "linear/skinny_kernel.cuh"

namespace fv {
namespace skinny {
namespace {

struct SiluMul {
    uint16_t* out;
    int64_t row_stride;
    int32_t half;
    struct Early {};
    __device__ bool early_before_wait() const { return false; }
    __device__ void rows(int tile, int& low, int& high) const { low = tile * 8, high = half + low; }
    __device__ Early early(int, int, int) const { return {}; }
    __device__ void store(Early, int row, int, int low, int, float a, float b) const {
        out[row * row_stride + low] = float_to_bf16(a / (1.0f + expf(-a)) * b);
    }
};

}  // namespace

void run_silu_mul(const Launch& launch, const Params& p, uint16_t* out, int64_t row_stride) {
    run_skinny(launch, p, SiluMul{out, row_stride, static_cast<int32_t>(p.outer / 2)});
}

}  // namespace skinny
}  // namespace fv
