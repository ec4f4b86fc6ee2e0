// SPDX-License-Identifier: Apache-2.0
// Launch choices of rope_append: pure functions of the shape and the device.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kRopeThreads = 128;
constexpr int kRopeEach = 8;     // elements of a lane
constexpr int kRopeResident = 8;  // blocks a multiprocessor holds at once

// Lanes of a head: a power of two that covers head_dim <= 256 with kRopeEach elements each.
FV_HD int rope_team(int head_dim) {
    int team = 1;
    while (team * kRopeEach < head_dim) team *= 2;
    return team;
}

// Blocks of one row that share its q heads, 1..full: as many as fit on the device at once beside K's and V's, so that few
// rows spread over it and many rows load a table row once for several heads.
FV_HD int rope_q_blocks(int64_t rows, int full, int kv_blocks, int sms) {
    const int64_t fit = static_cast<int64_t>(sms) * kRopeResident / (rows > 0 ? rows : 1) - 2 * kv_blocks;
    return fit >= full ? full : fit > 1 ? static_cast<int>(fit) : full > 0 ? 1 : 0;
}

}  // namespace fv
