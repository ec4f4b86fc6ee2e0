// SPDX-License-Identifier: Apache-2.0
// probe on the CPU: out[i] = x[i] + 1. See probe.cu.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "check.h"

namespace fv {
namespace {

void probe_cpu(const Tensor x, Tensor out) {
    check_tensor("probe", "x", x, {ScalarType::Float}, {kAny}, x);
    check_tensor("probe", "out", out, {ScalarType::Float}, {x.size(0)}, x);
    const float* in = cptr<float>(x);
    float* o = mptr<float>(out);
    torch::stable::parallel_for(0, x.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) o[i] = in[i] + 1.0f;
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("probe", TORCH_BOX(&probe_cpu)); }

}  // namespace fv
