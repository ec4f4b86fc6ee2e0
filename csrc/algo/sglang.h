// SPDX-License-Identifier: Apache-2.0
// The rules of SGLang's tree ops, so that equal inputs give equal outputs: links, the two walks, the parents encoded in a
// candidate list, and the order in which probabilities are summed. Serial over one request; every walk is bounded.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

// int64 (SGLang's own) or int32 ids.
struct SglIds {
    const void* data;
    bool wide;
    FV_HD int64_t operator[](int64_t i) const {
        return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

// A link that may be followed; 0 = none (-1, out of range, or back to the root: node 0 is nobody's child).
FV_HD int32_t sgl_link(int64_t raw, int64_t nodes) {
    return raw > 0 && raw < nodes ? static_cast<int32_t>(raw) : 0;
}
// A flat node id (a slot of predicts), -1 when out of range.
FV_HD int32_t sgl_flat(int64_t raw, int64_t slots) { return raw >= 0 && raw < slots ? static_cast<int32_t>(raw) : -1; }
// A token that can be compared; -1 = in no vocabulary.
FV_HD int32_t sgl_token(int64_t raw) { return raw >= 0 && raw <= 0x7fffffff ? static_cast<int32_t>(raw) : -1; }

// ---- walks -------------------------------------------------------------------------------------------------------
// Tree has first_child(i), sibling(i) (0: none), token(i), flat(i) (-1: none), accept(k, flat), predict(flat, token).
// A tree visits each node once at most, so `nodes` visits end every walk, also one over links that form a circle.

// Goes to the first child that carries target(flat of the node). Returns the number of accepted drafts.
template <class Tree>
FV_HD int32_t sgl_greedy_walk(Tree& t, int32_t nodes, int64_t levels) {
    int32_t node = 0, accepted = 0, left = nodes;
    t.accept(0, t.flat(0));
    while (t.flat(node) >= 0) {
        const int64_t want = t.target(t.flat(node));
        t.predict(t.flat(node), want);
        if (accepted + 1 >= levels) break;
        int32_t child = t.first_child(node);
        while (child != 0 && left > 0 && (t.token(child) != want || want < 0)) {
            child = t.sibling(child);
            --left;
        }
        if (child == 0 || left <= 0 || t.flat(child) < 0) break;
        --left;
        t.accept(++accepted, t.flat(child));
        node = child;
    }
    return accepted;
}

struct SglWalk {
    int32_t node;      // where it ended: the row that the last token is drawn from
    int32_t accepted;  // drafts
    int32_t refused;   // the last child of `node` that was refused although it has mass; 0: none
};

// Tree also has coin(node), prob(node, child), refuse(node, child, p), and enter() when a child was accepted.
// A child is accepted when the coin is within the mass of the siblings so far (over threshold_acc), or its own
// probability reaches threshold_single; a child without mass never by a coin of zero, where SGLang would take it.
template <class Tree>
FV_HD SglWalk sgl_sampling_walk(
    Tree& t, int32_t nodes, int64_t levels, float inverse_threshold_acc, float threshold_single) {
    SglWalk w{0, 0, 0};
    int32_t left = nodes;
    t.accept(0, t.flat(0));
    while (w.accepted + 1 < levels && t.flat(w.node) >= 0) {
        const float coin = t.coin(w.node);
        float mass = 0.0f;
        int32_t child = t.first_child(w.node);
        for (; child != 0 && left > 0; child = t.sibling(child), --left) {
            const float p = t.prob(w.node, child);
            mass = mass + p;
            if ((coin <= mass * inverse_threshold_acc && mass > 0.0f) || p >= threshold_single) break;
            t.refuse(w.node, child, p);
            if (p > 0.0f) w.refused = child;
        }
        if (child == 0 || left <= 0 || t.flat(child) < 0) break;
        --left;
        t.predict(t.flat(w.node), t.token(child));
        t.accept(++w.accepted, t.flat(child));
        t.enter();
        w.node = child;
        w.refused = 0;
    }
    return w;
}

// ---- the order of sums -------------------------------------------------------------------------------------------
// sglang-kernel 0.4.4 adds in float32: an entry belongs to (chunk, warp, lane, item) with 1024 lanes of kVec items per
// chunk, kVec = gcd(4, V). Sum of a chunk: items as (0+1)+(2+3), lanes as a balanced tree of neighbours, warps one by one;
// chunks one by one. Inside the chunk of the draw: a tree scan over lanes, then over warps.
constexpr int kSglLanes = 1024;
constexpr int kSglMaxChunks = kMaxVocab / kSglLanes;

FV_HD int sgl_vec(int64_t vocab) { return vocab % 4 == 0 ? 4 : vocab % 2 == 0 ? 2 : 1; }
FV_HD int sgl_chunks(int64_t vocab) {
    const int64_t size = static_cast<int64_t>(kSglLanes) * sgl_vec(vocab);
    return static_cast<int>((vocab + size - 1) / size);
}
FV_HD float sgl_residual(float q, float p) { return q - p > 0.0f ? q - p : 0.0f; }  // NaN: 0
template <int kVec>
FV_HD float sgl_items(const float* x) {
    if constexpr (kVec == 4) return (x[0] + x[1]) + (x[2] + x[3]);
    else if constexpr (kVec == 2) return x[0] + x[1];
    else return x[0];
}

struct SglDraw {
    int32_t chunk;  // the chunk that holds the token; -1: no mass at all
    float before;   // mass of the chunks before it
    float u;        // the first entry with mass where the cumulative sum exceeds u is the token
};

// Where rounding leaves no chunk (or, later, no entry) above u, the last one with mass is meant.
FV_HD SglDraw sgl_draw(const float* chunk_sums, int32_t chunks, float coin) {
    float total = 0.0f, before = 0.0f;
    for (int32_t c = 0; c < chunks; ++c) total = total + chunk_sums[c];
    SglDraw last{-1, 0.0f, 3.4e38f};
    const float u = coin * total;
    for (int32_t c = 0; c < chunks; ++c) {
        const float after = before + chunk_sums[c];
        if (after > u) return {c, before, u};
        if (chunk_sums[c] > 0.0f) last.chunk = c, last.before = before;
        before = after;
    }
    return last;
}

// ---- trees -------------------------------------------------------------------------------------------------------
constexpr int32_t kSglOrphan = -2;  // the parent was not selected

// Position of the first entry equal to `wanted` in selected[0..count), -1 if none; `ascending`: by bisection.
template <class Selected>
FV_HD int32_t sgl_find(const Selected& selected, int32_t count, int64_t wanted, bool ascending) {
    if (!ascending) {
        for (int32_t i = 0; i < count; ++i) {
            if (selected[i] == wanted) return i;
        }
        return -1;
    }
    int32_t low = 0, high = count;
    while (low < high) {
        const int32_t mid = (low + high) >> 1;
        if (selected[mid] < wanted) low = mid + 1;
        else high = mid;
    }
    return low < count && selected[low] == wanted ? low : -1;
}

// Parent of node i >= 1 from the candidate list: selected[i-1] / topk is the row of parent_list that names the parent.
template <class Selected>
FV_HD int32_t sgl_parent(const Selected& selected, int32_t nodes, int32_t i, int64_t topk, const int64_t* parent_list,
                         int64_t listed, bool ascending) {
    const int64_t index = selected[i - 1];
    if (index < 0) return kSglOrphan;
    const int64_t row = index / topk;
    if (row == 0) return 0;
    if (row >= listed) return kSglOrphan;
    const int32_t at = sgl_find(selected, nodes - 1, parent_list[row], ascending);
    return at < 0 || at + 1 == i ? kSglOrphan : at + 1;
}

// Calls visit(ancestor) for node i and every node above it except the root, at most `nodes` times. parent[0] is not read.
template <class Visit>
FV_HD void sgl_ancestors(const int32_t* parent, int32_t nodes, int32_t i, const Visit& visit) {
    int32_t left = nodes;
    for (int32_t a = i; a > 0 && left > 0; a = parent[a], --left) visit(a);
}

// First children and next siblings, -1 none; siblings ascend. parent[i] < 0: no parent.
FV_HD void sgl_link_nodes(const int32_t* parent, int32_t nodes, int32_t* first, int32_t* sibling) {
    for (int32_t i = 0; i < nodes; ++i) first[i] = -1;
    for (int32_t i = nodes - 1; i >= 0; --i) {
        const int32_t up = i > 0 ? parent[i] : -1;
        sibling[i] = up < 0 ? -1 : first[up];
        if (up >= 0) first[up] = i;
    }
}

constexpr int kSglMaskFull = 0, kSglMaskTree = 1, kSglMaskBits = 2, kSglMaskWords = 3;

// Bytes of one row of a packed mask (modes 2 and 3).
FV_HD int sgl_row_bytes(int64_t nodes, int mode) {
    return mode == kSglMaskWords ? 8 : nodes > 16 ? 4 : nodes > 8 ? 2 : 1;
}

}  // namespace fv
