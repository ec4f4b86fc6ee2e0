// SPDX-License-Identifier: Apache-2.0
// How the KV of a batch is split into units of attention work. A unit is one (request, chunk of its KV, tree columns
// included). Pure integer functions of (batch, lengths): equal on every back end.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int64_t kMinChunk = 256;               // tokens
constexpr int64_t kChunkStep = 64;
constexpr int64_t kTargetUnits = 264;            // two per multiprocessor of the largest GPU considered (132)
constexpr int64_t kMaxKv = (1ll << 31) - 64;     // so that a rounded-up chunk stays an int32

FV_HD int64_t schedule_kv(int64_t prefix_len, int64_t row_base, int64_t nodes) {
    if (nodes <= 0) return 0;
    const int64_t kv = (prefix_len > 0 ? prefix_len : 0) + row_base + nodes;
    return kv < kMaxKv ? kv : kMaxKv;
}

FV_HD int64_t chunks_of(int64_t kv, int64_t chunk) { return (kv + chunk - 1) / chunk; }

// An upper bound of total units that the host knows: sizes workspaces.
FV_HD int64_t max_units(int64_t batch) { return batch > kTargetUnits ? batch : kTargetUnits; }

// The smallest multiple of kChunkStep, at least kMinChunk, that gives at most `target` units, or one unit per request
// where more requests than that have rows. kv_of(b): KV length of request b.
template <class KvOf>
FV_HD int64_t choose_chunk(const KvOf& kv_of, int64_t batch, int64_t target) {
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t kv = kv_of(b);
        longest = kv > longest ? kv : longest;
    }
    // in steps: the answer lies in [low, high]; high gives one unit per request, the fewest possible
    int64_t low = kMinChunk / kChunkStep, high = (longest + kChunkStep - 1) / kChunkStep;
    high = high > low ? high : low;
    while (low < high) {
        const int64_t mid = (low + high) / 2;
        int64_t units = 0;
        for (int64_t b = 0; b < batch; ++b) units += chunks_of(kv_of(b), mid * kChunkStep);
        if (units <= target) high = mid; else low = mid + 1;
    }
    return low * kChunkStep;
}

// schedule[2 + batch + 1] = chunk tokens, total units, unit prefix sums.
template <class KvOf>
FV_HD void write_schedule(const KvOf& kv_of, int64_t batch, int64_t target, int32_t* schedule) {
    const int64_t chunk = choose_chunk(kv_of, batch, target);
    int64_t units = 0;
    schedule[0] = static_cast<int32_t>(chunk);
    for (int64_t b = 0; b < batch; ++b) {
        schedule[2 + b] = static_cast<int32_t>(units);
        units += chunks_of(kv_of(b), chunk);
    }
    schedule[1] = schedule[2 + batch] = static_cast<int32_t>(units);
}

// The request of unit u: the b with prefix[b] <= u < prefix[b+1], prefix = schedule + 2, 0 <= u < schedule[1].
FV_HD int64_t request_of_unit(const int32_t* prefix, int64_t batch, int64_t unit) {
    int64_t low = 0, high = batch;
    while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (prefix[mid + 1] <= unit) low = mid + 1; else high = mid;
    }
    return low;
}

}  // namespace fv
