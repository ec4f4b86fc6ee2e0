// SPDX-License-Identifier: Apache-2.0
// all_reduce on the CPU: x holds the gathered inputs of all ranks, out is their sum in rank order. The exchange itself is
// the process group's (fastverify/comm/communicator.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "comm/comm_args.h"
#include "comm/fold.h"

namespace fv {
namespace {

void all_reduce_cpu(const Tensor x, Tensor out, int64_t comm) {
    const char* op = "all_reduce";
    const fv_comm& c = comm_of(op, comm);
    check_gathered(op, c);
    const int64_t n = check_reduce_input(op, c, x);
    FV_CHECK(out.is_cpu() && out.is_contiguous() && out.numel() == n && out.scalar_type() == x.scalar_type(), op,
             ": out must be contiguous with the ", n, " elements of one rank, ", dtype_name(x.scalar_type()), " on cpu; got ",
             describe(out), ". Fix: torch.empty_like(x[0]).");
    const ScalarType type = x.scalar_type();
    auto* to = mptr<uint8_t>(out);
    torch::stable::parallel_for(0, (n + kFoldBlock - 1) / kFoldBlock, 16, [&](int64_t first, int64_t last) {
        float sum[kFoldBlock];
        for (int64_t b = first; b < last; ++b) {
            const int64_t begin = b * kFoldBlock;
            const int count = static_cast<int>(n - begin < kFoldBlock ? n - begin : kFoldBlock);
            fold_ranks(x.const_data_ptr(), type, n, c.world, begin, count, sum);
            store_row(sum, type, to + begin * element_bytes(type), count);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("all_reduce", TORCH_BOX(&all_reduce_cpu)); }

}  // namespace fv
