// SPDX-License-Identifier: Apache-2.0
// all_gather_small on the CPU: x is gathered already; the copy keeps one contract on every device.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "comm/comm_args.h"

namespace fv {
namespace {

void all_gather_small_cpu(const Tensor x, Tensor out, int64_t comm) {
    const char* op = "all_gather_small";
    const fv_comm& c = comm_of(op, comm);
    check_gathered(op, c);
    const int64_t n = check_gather_arguments(op, c, x, out);
    if (n > 0) std::memcpy(out.mutable_data_ptr(), x.const_data_ptr(), static_cast<size_t>(n * c.world));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("all_gather_small", TORCH_BOX(&all_gather_small_cpu)); }

}  // namespace fv
