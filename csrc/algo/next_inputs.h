// SPDX-License-Identifier: Apache-2.0
// What one verify leaves for the next cycle, request by request; the same lines on CPU and GPU. And the layout of a ring
// record: header {sequence, B, D, first row}, then B times {tokens out, flags, accepted drafts, nodes, depth, tokens [D]}.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int32_t kFlagsDone = kFlagStop | kFlagBudget | kFlagEmptyRow | kFlagBadRow;
constexpr int kRingHeader = 4, kRingFields = 5;
FV_HD int64_t ring_words(int64_t batch, int64_t path) { return kRingHeader + batch * (kRingFields + path); }

struct NextInputs {
    const int64_t* out_tokens;     // [B, D]
    const int32_t* num_out;        // [B]
    const int32_t* path;           // [B, D]
    const int64_t* next_root;      // [B]
    const int32_t* flags;          // [B]
    const int32_t* cu_nodes;       // [B+1]
    const int32_t* depth;          // [R]
    int32_t *active, *prefix_len, *root;  // [B]
    int32_t* next_tokens;          // [T >= B*D] or null
    int64_t* pair_slots;           // [R] or null: place of every row in the pair table, B*P for those without
    int32_t *pair_tokens, *pair_count;  // [B*P + 1], [B]
    int64_t batch, width, rows, tokens, pairs;  // B, D, R, T, P
};

FV_HD int32_t emitted(const NextInputs& p, int64_t b) {
    const int32_t n = p.num_out[b];
    return p.active[b] == 0 || n < 0 ? 0 : n > p.width ? static_cast<int32_t>(p.width) : n;
}

// Rows of request b, clamped to what exists.
FV_HD int32_t first_row(const NextInputs& p, int64_t b) {
    const int32_t r = p.cu_nodes[b];
    return r < 0 ? 0 : r > p.rows ? static_cast<int32_t>(p.rows) : r;
}

// Advances request b; `offset`: tokens emitted by the requests before it; `record`: its part of the ring record or null.
FV_HD void advance_request(const NextInputs& p, int64_t b, int64_t offset, int32_t* record) {
    const int32_t n = emitted(p, b), active = p.active[b], flags = active ? p.flags[b] : 0;
    const int32_t row = first_row(p, b), end = first_row(p, b + 1);
    const int64_t* tokens = p.out_tokens + b * p.width;
    if (record) {
        int32_t accepted = -1, depth = 0;
        for (int64_t i = 0; active && i < p.width; ++i) accepted += p.path[b * p.width + i] >= 0;
        for (int32_t r = row; r < end; ++r) depth = p.depth[r] > depth ? p.depth[r] : depth;
        record[0] = n;
        record[1] = flags;
        record[2] = accepted;
        record[3] = end > row ? end - row : 0;
        record[4] = depth;
        for (int64_t i = 0; i < p.width; ++i) record[kRingFields + i] = i < n ? static_cast<int32_t>(tokens[i]) : -1;
    }
    if (p.next_tokens) {
        for (int32_t i = 0; i < n; ++i) p.next_tokens[offset + i] = static_cast<int32_t>(tokens[i]);
    }
    if (p.pair_slots) {
        for (int32_t r = row; r < end; ++r) p.pair_slots[r] = p.batch * p.pairs;
        const int32_t count = p.pair_count[b];
        if (n > 0 && end > row && count >= 0 && count < p.pairs) {
            p.pair_slots[row] = b * p.pairs + count;
            p.pair_tokens[b * p.pairs + count] = static_cast<int32_t>(tokens[0]);
            p.pair_count[b] = count + 1;
        }
    }
    p.prefix_len[b] = static_cast<int32_t>(static_cast<uint32_t>(p.prefix_len[b]) + static_cast<uint32_t>(n));
    if (n > 0) p.root[b] = static_cast<int32_t>(p.next_root[b]);
    if (flags & kFlagsDone) p.active[b] = 0;
}

}  // namespace fv
