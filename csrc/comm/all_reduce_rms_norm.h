// SPDX-License-Identifier: Apache-2.0
// The kernel of all_reduce_rms_norm for rows that fit a team's registers.
#pragma once
#include "comm/comm_choice.h"
#include "comm/protocol.cuh"
#include "comm/row_norm.cuh"
#include "common/launch.h"

namespace fv {

// One-shot, no hooks; choice.registers.
template <class T>
void all_reduce_rms_norm_row(const Launch& launch, const fv_comm& c, const CommChoice& choice, const CommArgs& args, const RowNorm<T>& call);

}  // namespace fv
