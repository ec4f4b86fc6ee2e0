// SPDX-License-Identifier: Apache-2.0
// skinny_linear on CUDA: RMSNorm, product, and what follows it in one launch (linear/skinny_kernel.cuh). For models so small
// that a launch costs more than the weights it reads. Cost: N * K * 2 bytes, one launch. Graph-safe.
// Instantiations: 8 (short and long K), 16, 24, 32 rows x {plain, add}; silu-mul: skinny_linear_silu.cu.
#include <torch/csrc/stable/library.h>

#include "linear/skinny_args.h"
#include "linear/skinny_kernel.cuh"

namespace fv {
namespace skinny {

void run_silu_mul(const Launch& launch, const Params& p, uint16_t* out, int64_t row_stride);  // skinny_linear_silu.cu

namespace {

struct Plain {
    uint16_t *out, *copy;  // copy: null, or where the values go a second time
    int64_t row_stride, copy_row;
    struct Early {};
    __device__ bool early_before_wait() const { return false; }
    __device__ void rows(int tile, int& low, int& high) const { low = tile * kTile, high = low + 8; }
    __device__ Early early(int, int, int) const { return {}; }
    __device__ void store(Early, int row, int, int low, int high, float a, float b) const {
        const uint16_t x = float_to_bf16(a), y = float_to_bf16(b);
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
    __device__ void store(Early old, int row, int tile, int low, int high, float a, float b) const {
        Plain::store({}, row, tile, low, high, a + bf16_to_float(old.low), b + bf16_to_float(old.high));
    }
};

void skinny_linear_cuda(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, Tensor out, double eps,
                        int64_t kind, const OptTensor copy) {
    const SkinnySizes s = check_skinny_linear(x, weight, bias, norm, out, eps, kind, copy);
    if (s.rows == 0 || s.outer == 0) return;
    const Params p = params("skinny_linear", s, x, weight, bias, norm, eps);
    const Launch launch("skinny_linear", x);
    uint16_t* to = mptr<uint16_t>(out);
    const Plain plain{to, copy ? mptr<uint16_t>(*copy) : nullptr, out.stride(0), copy ? copy->stride(0) : 0};
    if (kind == kSkinnyPlain) run_skinny(launch, p, plain);
    else if (kind == kSkinnyAdd) run_skinny(launch, p, Add{plain});
    else run_silu_mul(launch, p, to, out.stride(0));
}

}  // namespace
}  // namespace skinny

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("skinny_linear", TORCH_BOX(&skinny::skinny_linear_cuda)); }

}  // namespace fv
