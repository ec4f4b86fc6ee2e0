// SPDX-License-Identifier: Apache-2.0
// The walk of one request, host and device: the tree is checked, the accepted path is followed, what is emitted is
// clipped and written. No torch, no CUDA runtime.
//
// A walker W says how the work is spread over threads; every thread that walks calls the same functions:
//   open(parents, tokens, begin, n)    makes parent(i) and token(i) of the request's nodes readable
//   all(begin, end, f), first(begin, end, f)   over i in [begin, end): f(i) everywhere; lowest i with f(i), or -1
//   child(node, n, token)              the lowest child of a node that carries the token, or -1
//   each(n, f)                         f(i) for i in [0, n), in any order
//   remaining(p)                       *p, perhaps read before
//   leader(), writes(), sync()         one thread; may this thread write outputs; barrier of those that may
//   add_one(p)                         ++*p, also where several threads hit the same p
//   path(), emitted(), logprob()       arrays of kMaxNodes that the leader fills; others may read them after sync()
#pragma once
#include "algo/sampling.h"
#include "algo/walk.h"
#include "common/ids.h"

namespace fv {

// Inputs of the tree and the sampling parameters.
struct VerifyInputs {
    int64_t rows, batch, vocab;
    const int32_t* parents;      // [R]
    const int32_t* cu_nodes;     // [B+1]
    const int32_t* prefix_len;   // [B]
    const int32_t* active;       // [B]
    const float* temperature;    // [B]
    const int32_t* top_k;        // [B]
    const float* top_p;          // [B]
    const float* min_p;          // [B]
    const int64_t* seed;         // [B]
    const float* penalties;      // [B,3] or null
    int rule;

    FV_HD RowParams params(int64_t b) const {
        return params(b, temperature[b], top_k[b], top_p[b], min_p[b], seed ? seed[b] : 0);
    }
    // The same where the request's values are known.
    FV_HD RowParams params(int64_t b, float t, int32_t k, float p, float m, int64_t request_seed) const {
        return resolve_params(t, k, p, m, request_seed, penalties ? penalties + 3 * b : nullptr, rule, vocab);
    }
};

// What the walk writes.
struct VerifyOutputs {
    int64_t max_path;
    int32_t* remaining;       // [B]
    IdStore out_tokens;       // [B,D]
    int32_t* num_tokens_out;  // [B]
    int32_t* path;            // [B,D]
    IdStore next_root;        // [B]
    int32_t* flags;           // [B]
    float* logprobs;          // [B,D] or null
    int32_t* counts;          // [B,counts_width] or null
    int64_t counts_width, counts_offset;  // a shard owns ids [offset, offset + width)
};

struct StopIds {
    IdView ids;
    int64_t n;
};

// The token of one visited row, supplied by the op (from logits, from tiles, from combined shards).
struct Chosen {
    bool has_token;
    int64_t token;
    bool bad;  // NaN or +inf in the row: emit, then stop
    float logprob;
};

// Nodes of a request that may be walked: all, only the root of a malformed tree, or none.
struct WalkTree {
    int64_t begin;
    int32_t n;
    int32_t flags;
};

#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class W>
FV_HD WalkTree open_tree(W& w, const VerifyInputs& in, const IdView& tokens, int64_t b) {
    const NodeRange r = node_range(in.cu_nodes, b, in.rows);
    w.open(in.parents + r.begin, tokens, r.begin, r.n);
    WalkTree tree{r.begin, r.n, 0};
    if (r.n == 0) {
        tree.flags = kFlagBadTree;
    } else if (w.parent(0) != -1 || !w.all(1, r.n, [&](int32_t i) { return w.parent(i) >= 0 && w.parent(i) < i; })) {
        tree.flags = kFlagBadTree;  // the root's row is still right: plain decoding for this step
        tree.n = 1;
    }
    if (!w.all(1, tree.n, [&](int32_t i) { return w.token(i) >= 0 && w.token(i) < in.vocab; })) {
        tree.flags |= kFlagBadToken;
    }
    return tree;
}

// What an inactive request gets; remaining and next_root stay as they are.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class W>
FV_HD void write_inactive(W& w, const VerifyOutputs& out, int64_t b) {
    const int64_t d = out.max_path;
    w.each(d, [&](int64_t i) {
        out.path[b * d + i] = -1;
        out.out_tokens.set(b * d + i, -1);
        if (out.logprobs) out.logprobs[b * d + i] = 0.0f;
    });
    if (w.leader()) out.num_tokens_out[b] = out.flags[b] = 0;
}

// Where a walk stands: the node to visit next (-1: none), how many were visited, how many tokens they gave.
struct WalkState {
    int32_t node, visited, count, flags;
    FV_HD WalkState(const WalkTree& tree, int32_t param_flags)
        : node(tree.n > 0 ? 0 : -1), visited(0), count(0), flags(tree.flags | param_flags) {}
    FV_HD bool goes_on(int64_t max_path) const { return node >= 0 && visited < max_path; }
};

// Takes the token of the node at which the walk stands; the same to every thread that walks.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class W>
FV_HD void walk_on(W& w, const WalkTree& tree, int64_t max_path, const Chosen& c, WalkState& at) {
    if (w.leader()) w.path()[at.visited] = at.node;
    ++at.visited;
    const int32_t parent = at.node;
    at.node = -1;
    if (c.bad) at.flags |= kFlagBadRow;
    if (!c.has_token) {
        at.flags |= kFlagEmptyRow;
        return;
    }
    if (w.leader()) {
        w.logprob()[at.count] = c.logprob;
        w.emitted()[at.count] = c.token;
    }
    ++at.count;
    if (c.bad) return;
    at.node = w.child(parent, tree.n, c.token);
    if (at.node >= 0 && at.visited == max_path) at.flags |= kFlagPathFull;
}

// Clips what was found and writes it.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class W>
FV_HD void finish_walk(W& w, const WalkState& at, const VerifyOutputs& out, const StopIds& stops, int64_t b) {
    if (!w.writes()) return;
    w.sync();
    const int64_t d = out.max_path;
    int32_t flags = at.flags;

    // tokens that are really emitted: up to and including the first stop id, within the budget; the earlier end wins
    const int64_t remaining = w.remaining(out.remaining + b);
    int32_t kept = remaining < 0 ? 0 : remaining < at.count ? static_cast<int32_t>(remaining) : at.count;
    const int32_t stop = w.first(0, kept, [&](int32_t i) {
        bool hit = false;
        for (int64_t s = 0; s < stops.n; ++s) hit = hit || w.emitted()[i] == stops.ids[s];
        return hit;
    });
    if (stop >= 0) {
        flags |= kFlagStop;
        kept = stop + 1;
    }
    if (remaining - kept <= 0) flags |= kFlagBudget;
    w.sync();  // everyone has read remaining

    w.each(d, [&](int64_t i) {
        out.path[b * d + i] = i < at.visited ? w.path()[i] : -1;
        out.out_tokens.set(b * d + i, i < kept ? w.emitted()[i] : -1);
        if (out.logprobs) out.logprobs[b * d + i] = i < kept ? w.logprob()[i] : 0.0f;
        if (out.counts && i < kept) {
            const int64_t local = w.emitted()[i] - out.counts_offset;
            if (local >= 0 && local < out.counts_width) w.add_one(out.counts + b * out.counts_width + local);
        }
    });
    if (!w.leader()) return;
    if (kept > 0) out.next_root.set(b, w.emitted()[kept - 1]);
    out.remaining[b] = static_cast<int32_t>(remaining - kept);
    out.num_tokens_out[b] = kept;
    out.flags[b] = flags;
}

// choose(node, depth, drafted tokens above the node) gives the token of a visited row, the same to every thread.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class W, class Choose>
FV_HD void walk_tree(
    W& w, const WalkTree& tree, int32_t param_flags, const VerifyOutputs& out, const StopIds& stops, int64_t b,
    const Choose& choose) {
    WalkState at(tree, param_flags);
    // emitted()[0 .. visited) are exactly the drafted tokens on the path above the node
    while (at.goes_on(out.max_path)) walk_on(w, tree, out.max_path, choose(at.node, at.visited, w.emitted()), at);
    finish_walk(w, at, out, stops, b);
}

// One host thread.
class HostWalker {
public:
    void open(const int32_t* parents, const IdView& tokens, int64_t begin, int32_t) {
        parents_ = parents;
        tokens_ = tokens;
        begin_ = begin;
    }
    int32_t parent(int32_t i) const { return parents_[i]; }
    int64_t token(int32_t i) const { return tokens_[begin_ + i]; }
    template <class F>
    bool all(int32_t begin, int32_t end, const F& f) const {
        for (int32_t i = begin; i < end; ++i) {
            if (!f(i)) return false;
        }
        return true;
    }
    template <class F>
    int32_t first(int32_t begin, int32_t end, const F& f) const {
        for (int32_t i = begin; i < end; ++i) {
            if (f(i)) return i;
        }
        return -1;
    }
    int32_t child(int32_t node, int32_t n, int64_t token) const {
        return first(node + 1, n, [&](int32_t j) { return parent(j) == node && this->token(j) == token; });
    }
    template <class F>
    void each(int64_t n, const F& f) const {
        for (int64_t i = 0; i < n; ++i) f(i);
    }
    int32_t remaining(const int32_t* p) const { return *p; }
    bool leader() const { return true; }
    bool writes() const { return true; }
    void sync() const {}
    void add_one(int32_t* p) const { ++*p; }
    int32_t* path() { return path_; }
    int64_t* emitted() { return emitted_; }
    float* logprob() { return logprob_; }

private:
    const int32_t* parents_ = nullptr;
    IdView tokens_{nullptr, false};
    int64_t begin_ = 0;
    int32_t path_[kMaxNodes];
    int64_t emitted_[kMaxNodes];
    float logprob_[kMaxNodes];
};

}  // namespace fv
