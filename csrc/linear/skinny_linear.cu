// SPDX-License-Identifier: Apache-2.0
// skinny_linear on CUDA: RMSNorm, product, and what follows it in one launch (linear/skinny_kernel.cuh). For models so small
// that a launch costs more than the weights it reads. Cost: N * K * 2 bytes, one launch. Graph-safe.
// Instantiations: 8, 16, 24, 32 rows x {plain, add, silu-mul}.
#include <torch/csrc/stable/library.h>

#include "linear/skinny_args.h"
#include "linear/skinny_epilogues.cuh"

namespace fv {
namespace skinny {
namespace {

void skinny_linear_cuda(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, Tensor out, double eps,
                        int64_t kind) {
    const SkinnySizes s = check_skinny_linear(x, weight, bias, norm, out, eps, kind);
    if (s.rows == 0 || s.outer == 0) return;
    const Params p = params("skinny_linear", s, x, weight, bias, norm, eps);
    const Launch launch("skinny_linear", x);
    uint16_t* to = mptr<uint16_t>(out);
    const Plain plain{to, out.stride(0)};
    const SiluMul silu{to, out.stride(0), static_cast<int32_t>(s.outer / 2)};
    if (kind == kSkinnyAdd) run_skinny<false>(launch, p, Add{plain});
    else if (kind == kSkinnyPlain) keeps_norm(p) ? run_normed(launch, p, plain) : run_skinny<false>(launch, p, plain);
    else keeps_norm(p) ? run_normed(launch, p, silu) : run_skinny<false>(launch, p, silu);
}

}  // namespace
}  // namespace skinny

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("skinny_linear", TORCH_BOX(&skinny::skinny_linear_cuda)); }

}  // namespace fv
