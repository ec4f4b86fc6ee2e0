// SPDX-License-Identifier: Apache-2.0
// The end of all_reduce_rms_norm where NCCL has made the sum.
#pragma once
#include "common/launch.h"

namespace fv {

// out [rows, H] holds the sums: residual += out (fp32, rounded once), out = RMSNorm(residual) * weight. One launch.
void launch_add_rms_norm(const Launch& launch, ScalarType type, const void* weight, void* residual, void* out, int64_t rows,
                         int64_t hidden, float eps);

}  // namespace fv
