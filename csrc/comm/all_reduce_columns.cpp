// SPDX-License-Identifier: Apache-2.0
// all_reduce_columns on the CPU: x holds the gathered pieces of all ranks; out is, or grows by, their sum in rank order. By then every
// piece is there, so `ready` is not looked at.
#include "comm/all_reduce_columns.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "comm/fold.h"

namespace fv {
namespace {

void all_reduce_columns_cpu(const Tensor x, Tensor out, const OptTensor ready, bool add, int64_t comm) {
    const char* op = "all_reduce_columns";
    const fv_comm& c = comm_of(op, comm);
    check_gathered(op, c);
    const ColumnsShape s = check_columns_arguments(op, c, x, out, ready);
    const ScalarType type = x.scalar_type();
    const int64_t size = element_bytes(type), stride = s.pieces * s.rows * s.width;
    auto* to = mptr<uint8_t>(out);
    torch::stable::parallel_for(0, s.pieces * s.rows, 16, [&](int64_t first, int64_t last) {
        float sum[kFoldBlock], there[kFoldBlock];
        for (int64_t r = first; r < last; ++r) {  // row r % rows of piece r / rows
            const int64_t at = (r % s.rows * s.pieces + r / s.rows) * s.width;
            for (int64_t b = 0; b < s.width; b += kFoldBlock) {
                const int count = static_cast<int>(s.width - b < kFoldBlock ? s.width - b : kFoldBlock);
                uint8_t* place = to + (at + b) * size;
                fold_ranks(x.const_data_ptr(), type, stride, c.world, r * s.width + b, count, sum);
                if (add) {  // the sum is rounded as it travels
                    uint8_t rounded[4 * kFoldBlock];
                    store_row(sum, type, rounded, count);
                    load_row(rounded, type, sum, count);
                    load_row(place, type, there, count);
                    for (int i = 0; i < count; ++i) sum[i] += there[i];
                }
                store_row(sum, type, place, count);
            }
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("all_reduce_columns", TORCH_BOX(&all_reduce_columns_cpu)); }

}  // namespace fv
