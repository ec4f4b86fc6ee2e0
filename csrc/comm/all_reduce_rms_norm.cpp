// SPDX-License-Identifier: Apache-2.0
// all_reduce_rms_norm on the CPU: gathered inputs of all ranks; see all_reduce.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "comm/comm_args.h"
#include "comm/fold.h"

namespace fv {
namespace {

void all_reduce_rms_norm_cpu(const Tensor x, Tensor residual, const Tensor weight, Tensor out, const OptTensor prefetch,
                             int64_t comm, double eps) {
    const char* op = "all_reduce_rms_norm";
    const fv_comm& c = comm_of(op, comm);
    check_gathered(op, c);
    const NormShape shape = check_norm_arguments(op, c, x, residual, weight, out, prefetch);
    const ScalarType type = x.scalar_type();
    const int64_t size = element_bytes(type), hidden = shape.hidden, n = shape.rows * hidden;
    auto* res = mptr<uint8_t>(residual);
    auto* to = mptr<uint8_t>(out);
    std::vector<float> w(static_cast<size_t>(hidden));
    load_row(weight.const_data_ptr(), type, w.data(), static_cast<int>(hidden));
    torch::stable::parallel_for(0, shape.rows, 1, [&](int64_t first, int64_t last) {
        std::vector<float> row(static_cast<size_t>(hidden));
        float part[kFoldBlock];
        for (int64_t r = first; r < last; ++r) {
            double squares = 0.0;
            for (int64_t begin = 0; begin < hidden; begin += kFoldBlock) {
                const int count = static_cast<int>(hidden - begin < kFoldBlock ? hidden - begin : kFoldBlock);
                const int64_t at = r * hidden + begin;
                float* h = row.data() + begin;
                fold_ranks(x.const_data_ptr(), type, n, c.world, at, count, h);
                store_row(h, type, to + at * size, count);  // the sum as it travels: rounded once
                load_row(to + at * size, type, h, count);
                load_row(res + at * size, type, part, count);
                for (int i = 0; i < count; ++i) h[i] += part[i];
                store_row(h, type, res + at * size, count);
                load_row(res + at * size, type, h, count);
                for (int i = 0; i < count; ++i) squares += static_cast<double>(h[i]) * h[i];
            }
            const float scale = 1.0f / std::sqrt(static_cast<float>(squares / static_cast<double>(hidden)) + static_cast<float>(eps));
            for (int64_t i = 0; i < hidden; ++i) row[static_cast<size_t>(i)] = row[static_cast<size_t>(i)] * scale * w[static_cast<size_t>(i)];
            store_row(row.data(), type, to + r * hidden * size, static_cast<int>(hidden));
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("all_reduce_rms_norm", TORCH_BOX(&all_reduce_rms_norm_cpu)); }

}  // namespace fv
