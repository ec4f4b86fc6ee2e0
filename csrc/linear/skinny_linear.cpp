// SPDX-License-Identifier: Apache-2.0
// skinny_linear on the CPU: row by row (linear/skinny_rows.h). The CUDA kernel is what the op is for; this one is its meaning.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "linear/skinny_rows.h"

namespace fv {
namespace {

void skinny_linear_cpu(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, Tensor out, double eps,
                       int64_t kind, const OptTensor copy) {
    const SkinnySizes s = check_skinny_linear(x, weight, bias, norm, out, eps, kind, copy);
    const int64_t width = out.size(1), item = element_bytes(s.type);
    torch::stable::parallel_for(0, s.rows, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> in, y, old(static_cast<size_t>(width));
        for (int64_t r = begin; r < end; ++r) {
            char* to = mptr<char>(out) + r * out.stride(0) * item;
            skinny_input(x, r, norm, s, eps, in);
            skinny_product(in, weight, bias, s, y);
            if (kind == kSkinnyAdd) load_row(to, s.type, old.data(), static_cast<int>(width));
            for (int64_t i = 0; i < width; ++i) {
                float& v = y[static_cast<size_t>(i)];
                if (kind == kSkinnyAdd) v += old[static_cast<size_t>(i)];
                if (kind == kSkinnySiluMul) v = v / (1.0f + std::exp(-v)) * y[static_cast<size_t>(i + width)];
            }
            store_row(y.data(), s.type, to, static_cast<int>(width));
            if (copy) store_row(y.data(), s.type, mptr<char>(*copy) + r * copy->stride(0) * item, static_cast<int>(width));
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("skinny_linear", TORCH_BOX(&skinny_linear_cpu)); }

}  // namespace fv
