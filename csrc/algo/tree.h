// SPDX-License-Identifier: Apache-2.0
// Decisions about trees: the order of candidates, pool layout, effective scores, selection, links, masks.
// Serial over one request and bounded; parents always have a lower index than their children.
#pragma once
#include <cstdint>

#include "algo/numeric.h"
#include "common/types.h"

namespace fv {

constexpr uint32_t kOrderedMinusInf = 0x007fffffu;  // ordered_bits(-inf)

FV_HD float minus_infinity() { return bits_to_float(0xff800000u); }
FV_HD float not_nan(float score) { return score == score ? score : minus_infinity(); }

// ---- the order of candidates: score descending, then index ascending; a larger key is better ----------------
FV_HD uint64_t rank_key(float score, uint32_t index) {  // score must not be NaN; -0 equals +0
    return (static_cast<uint64_t>(ordered_bits(score + 0.0f)) << 32) | (0xffffffffu - index);
}
FV_HD float key_score(uint64_t key) { return from_ordered_bits(static_cast<uint32_t>(key >> 32)); }
FV_HD uint32_t key_index(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }
FV_HD bool key_alive(uint64_t key) { return (key >> 32) > kOrderedMinusInf; }

// The n-th largest (1-based, 1 <= n <= count) of distinct keys: radix select, 8 passes over the keys.
FV_HD uint64_t nth_largest(const uint64_t* keys, int64_t count, int64_t n) {
    uint64_t prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        int32_t histogram[256];
        for (int i = 0; i < 256; ++i) histogram[i] = 0;
        const uint64_t high = shift == 56 ? 0 : ~0ull << (shift + 8);
        for (int64_t i = 0; i < count; ++i) {
            if ((keys[i] & high) == prefix) ++histogram[(keys[i] >> shift) & 255];
        }
        int digit = 255;
        while (digit > 0 && histogram[digit] < n) n -= histogram[digit--];
        prefix |= static_cast<uint64_t>(digit) << shift;
    }
    return prefix;
}

// The n best of `count` distinct keys into best[n], descending. n <= count.
FV_HD void best_keys(const uint64_t* keys, int64_t count, int64_t n, uint64_t* best) {
    if (n <= 0) return;
    const uint64_t cut = nth_largest(keys, count, n);
    int64_t have = 0;
    for (int64_t i = 0; i < count && have < n; ++i) {
        if (keys[i] < cut) continue;
        int64_t at = have++;
        for (; at > 0 && best[at - 1] < keys[i]; --at) best[at] = best[at - 1];
        best[at] = keys[i];
    }
}

// ---- the pool of drafted candidates ----------------------------------------------------------------------
// Level 0: k candidates; level l >= 1: k*k, candidate j of beam row i at pool_offset(l, k) + i*k + j.
FV_HD int64_t pool_offset(int64_t level, int64_t k) { return level == 0 ? 0 : k + (level - 1) * k * k; }
FV_HD int64_t pool_end(int64_t level, int64_t k) { return k + level * k * k; }

// keys[i] = order of pool entry i by effective score min(score, 0, parent's effective score); NaN or a bad
// parent: -inf. Equal scores rank the lower index higher, so an entry never ranks above its parent: the n best
// are closed under ancestors. alive = entries above -inf. Returns flags.
FV_HD int32_t effective_keys(
    const float* scores, const int32_t* parents, int64_t count, uint64_t* keys, int64_t* alive) {
    int32_t flags = 0;
    *alive = 0;
    for (int64_t i = 0; i < count; ++i) {
        float s = not_nan(scores[i]);
        const int32_t p = parents[i];
        if (p < -1 || p >= i) {
            flags |= kFlagBadTree;
            s = minus_infinity();
        } else if (p >= 0) {
            const float up = key_score(keys[p]);
            s = up < s ? up : s;
        }
        keys[i] = rank_key(s < 0.0f ? s : 0.0f, static_cast<uint32_t>(i));
        *alive += key_alive(keys[i]);
    }
    return flags;
}

// ---- nodes ------------------------------------------------------------------------------------------------
FV_HD bool valid_parent(int32_t parent, int64_t node) { return parent >= -1 && parent < node; }

FV_HD int64_t clamp_token(int64_t token, int64_t vocab_size, int32_t* flags) {
    if (token >= 0 && token < vocab_size) return token;
    *flags |= kFlagBadToken;
    return token < 0 ? 0 : vocab_size - 1;
}

// Mask row = parent's words (nullptr: none) with bit `column`. False if the column lies past the words.
FV_HD bool write_mask_row(uint64_t* row, const uint64_t* parent, int64_t words, int64_t column) {
    for (int64_t w = 0; w < words; ++w) row[w] = parent ? parent[w] : 0;
    if (column >= 64 * words) return false;
    row[column / 64] |= 1ull << (column % 64);
    return true;
}

// Mask row of a chain: bits 0..column.
FV_HD bool write_chain_row(uint64_t* row, int64_t words, int64_t column) {
    for (int64_t w = 0; w < words; ++w) {
        const int64_t bits = column + 1 - 64 * w;
        row[w] = bits >= 64 ? ~0ull : bits > 0 ? (1ull << bits) - 1 : 0;
    }
    return column < 64 * words;
}

// Child links of one request; parents[i] outside [-1, i) counts as -1. Children ascend; nodes without a parent
// are not linked to each other.
FV_HD void link_children(const int32_t* parents, int64_t nodes, int32_t* first_child, int32_t* next_sibling) {
    for (int64_t i = 0; i < nodes; ++i) first_child[i] = next_sibling[i] = -1;
    for (int64_t i = nodes - 1; i > 0; --i) {
        const int32_t p = parents[i];
        if (p < 0 || p >= i) continue;
        next_sibling[i] = first_child[p];
        first_child[p] = static_cast<int32_t>(i);
    }
}

}  // namespace fv
