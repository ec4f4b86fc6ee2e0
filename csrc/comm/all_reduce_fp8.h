// SPDX-License-Identifier: Apache-2.0
// The lossy form of all_reduce: values travel as fp8 e4m3 with a scale per 128.
#pragma once
#include "comm/comm_args.h"
#include "common/launch.h"

namespace fv {

// x and out like all_reduce; n > 0 elements per rank.
void all_reduce_fp8(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, int64_t n);

}  // namespace fv
