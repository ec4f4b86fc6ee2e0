// SPDX-License-Identifier: Apache-2.0
// skinny_linear on CUDA: RMSNorm, product, and what follows it in one launch (linear/skinny_kernel.cuh). For models so small
// that a launch costs more than the weights it reads. Cost: N * K * 2 bytes, one launch. Graph-safe.
// Instantiations: 8 (short and long K), 16, 24, 32 rows x {plain, add}; silu-mul: skinny_linear_silu.cu.
#include <torch/csrc/stable/library.h>

#include "linear/skinny_args.h"
#include "linear/skinny_epilogues.cuh"

namespace fv {
namespace skinny {

void run_wide_plain(const Launch& launch, const Params& p, const Plain& to);  // skinny_linear_wide.cu
void run_wide_add(const Launch& launch, const Params& p, const Plain& to);
void run_silu_mul(const Launch& launch, const Params& p, uint16_t* out, int64_t row_stride);  // skinny_linear_silu.cu

namespace {

void skinny_linear_cuda(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, Tensor out, double eps,
                        int64_t kind, const OptTensor copy) {
    const SkinnySizes s = check_skinny_linear(x, weight, bias, norm, out, eps, kind, copy);
    if (s.rows == 0 || s.outer == 0) return;
    const Params p = params("skinny_linear", s, x, weight, bias, norm, eps);
    const Launch launch("skinny_linear", x);
    uint16_t* to = mptr<uint16_t>(out);
    const Plain plain{to, copy ? mptr<uint16_t>(*copy) : nullptr, out.stride(0), copy ? copy->stride(0) : 0};
    if (kind == kSkinnySiluMul) run_silu_mul(launch, p, to, out.stride(0));
    else if (wide_fits(s.outer, s.inner)) (kind == kSkinnyPlain ? run_wide_plain : run_wide_add)(launch, p, plain);
    else if (kind == kSkinnyPlain) run_skinny(launch, p, plain);
    else run_skinny(launch, p, Add{plain});
}

}  // namespace
}  // namespace skinny

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("skinny_linear", TORCH_BOX(&skinny::skinny_linear_cuda)); }

}  // namespace fv
