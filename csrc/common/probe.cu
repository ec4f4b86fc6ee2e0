// SPDX-License-Identifier: Apache-2.0
// probe: out[i] = x[i] + 1. The smallest whole op: copy this file to start another one (docs/adding_an_op.md).
// It is also what doctor and every plan call first, so that the module is loaded before a graph capture.
// Cost: n * 8 bytes, one launch. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "launch.h"

namespace fv {
namespace {

__global__ void probe_kernel(
    const float* __restrict__ x,  // f32 [n]
    float* __restrict__ out,      // f32 [n]
    int64_t n) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i < n) out[i] = x[i] + 1.0f;
}

void probe_cuda(const Tensor x, Tensor out) {
    constexpr int kThreads = 256;
    check_tensor("probe", "x", x, {ScalarType::Float}, {kAny}, x);
    check_tensor("probe", "out", out, {ScalarType::Float}, {x.size(0)}, x);
    if (x.numel() == 0) return;
    const Launch launch("probe", x);
    launch.run(probe_kernel, dim3(ceil_div(x.numel(), kThreads)), dim3(kThreads), 0, cptr<float>(x), mptr<float>(out), x.numel());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("probe", TORCH_BOX(&probe_cuda)); }

}  // namespace fv
