// SPDX-License-Identifier: Apache-2.0
// Which cache rows move where after acceptance. Shared by the CPU op and the CUDA kernel.
#pragma once
#include "common/types.h"

namespace fv {

// Number of usable entries of one accepted path: the first `count` of at most `capacity`, ended early by an entry that
// does not increase or is not a node of the request (0 <= node < nodes). Node path[i] moves to row i. Because entries
// increase strictly from >= 0, path[i] >= i: a copy in ascending order never reads a row that it has overwritten.
FV_HD int32_t compact_length(const int32_t* path, int32_t count, int32_t capacity, int64_t nodes) {
    const int32_t limit = count < capacity ? count : capacity;
    int32_t last = -1;
    for (int32_t i = 0; i < limit; ++i) {
        if (path[i] <= last || path[i] >= nodes) return i;
        last = path[i];
    }
    return limit < 0 ? 0 : limit;
}

// The leading rows with path[i] == i stay where they are; returns the first row that moves (length if none does).
FV_HD int32_t compact_first_move(const int32_t* path, int32_t length) {
    int32_t i = 0;
    while (i < length && path[i] == i) ++i;
    return i;
}

}  // namespace fv
