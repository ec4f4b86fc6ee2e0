// SPDX-License-Identifier: Apache-2.0
// The walk from the root down the drafted tree, and what is emitted. Bounded by the node count; no pointer is followed
// that was not checked. Host+device; Ids is any type with `int64_t operator[](int64_t) const`.
#pragma once
#include "common/types.h"

namespace fv {

// Rows [begin, begin + n) of request b. Bad cu_nodes give n = 0.
struct NodeRange {
    int64_t begin;
    int32_t n;
    bool bad;
};
FV_HD NodeRange node_range(const int32_t* cu_nodes, int64_t b, int64_t rows) {
    const int64_t lo = cu_nodes[b], hi = cu_nodes[b + 1];
    const bool bad = lo < 0 || hi < lo || hi > rows || hi - lo > kMaxNodes;
    return NodeRange{bad ? 0 : lo, bad ? 0 : static_cast<int32_t>(hi - lo), bad};
}

// A verify tree has one root at node 0 and parents before children.
FV_HD bool tree_is_valid(const int32_t* parents, int32_t n) {
    if (n > 0 && parents[0] != -1) return false;
    for (int32_t i = 1; i < n; ++i) {
        if (parents[i] < 0 || parents[i] >= i) return false;
    }
    return true;
}

// First child of `node` that carries `token` (lowest index wins among duplicates), or -1.
template <class Ids>
FV_HD int32_t find_child(const int32_t* parents, const Ids& tokens, int64_t begin, int32_t n, int32_t node, int64_t token) {
    for (int32_t j = node + 1; j < n; ++j) {
        if (parents[j] == node && tokens[begin + j] == token) return j;
    }
    return -1;
}

// Tokens that are really emitted out of `count`: up to and including the first stop id, within the budget.
// The earlier of the two ends wins; *flags gets kFlagStop / kFlagBudget.
template <class Tokens, class Ids>
FV_HD int32_t clip_tokens(
    const Tokens& emitted, int32_t count, int64_t remaining, const Ids* stop_ids, int64_t num_stops, int32_t* flags) {
    int32_t n = count;
    if (remaining < n) n = remaining < 0 ? 0 : static_cast<int32_t>(remaining);
    for (int32_t i = 0; i < n; ++i) {
        for (int64_t s = 0; s < num_stops; ++s) {
            if (emitted[i] == (*stop_ids)[s]) {
                *flags |= kFlagStop;
                n = i + 1;
            }
        }
    }
    if (remaining - n <= 0) *flags |= kFlagBudget;
    return n;
}

}  // namespace fv
