// SPDX-License-Identifier: Apache-2.0
// The arguments that verify_tree, lm_head_verify_tree, verify_tree_partials and verify_tree_combine share:
// checked once, then read as plain pointers.
#pragma once
#include "accept/rows.h"
#include "algo/walk.h"

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

    RowParams params(int64_t b) const {
        return resolve_params(temperature[b], top_k[b], top_p[b], min_p[b], seed ? seed[b] : 0,
                              penalties ? penalties + 3 * b : nullptr, rule, vocab);
    }
};

// What the walk writes.
struct VerifyOutputs {
    int64_t max_path;
    int32_t* remaining;      // [B]
    IdArrayOut out_tokens;   // [B,D]
    int32_t* num_tokens_out; // [B]
    int32_t* path;           // [B,D]
    IdArrayOut next_root;    // [B]
    int32_t* flags;          // [B]
    float* logprobs;         // [B,D] or null
    int32_t* counts;         // [B,counts_width] or null
    int64_t counts_width, counts_offset;  // a shard owns ids [offset, offset + width)
};

VerifyInputs check_inputs(
    const char* op, const Tensor& like, int64_t rows, const Tensor& tokens, const Tensor& parents,
    const Tensor& cu_nodes, const Tensor& prefix_len, const Tensor& active, const Tensor& temperature,
    const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor* seed, const OptTensor& penalties,
    int64_t vocab_size, int64_t rule);

VerifyOutputs check_outputs(
    const char* op, const Tensor& like, int64_t batch, const Tensor& remaining, const OptTensor& stop_ids,
    const OptTensor& counts, int64_t counts_width, int64_t counts_offset, const Tensor& out_tokens,
    const Tensor& num_tokens_out, const Tensor& path, const Tensor& next_root, const Tensor& flags,
    const OptTensor& logprobs);

void check_row_extras(
    const char* op, const Tensor& like, int64_t rows, int64_t batch, int64_t width, int64_t vocab_size,
    const OptTensor& bias, const OptTensor& bitmask, const OptTensor& penalties, const OptTensor& counts);

// The token of one visited row, supplied by the op (from logits, from tiles, from combined shards).
struct Chosen {
    bool has_token;
    int64_t token;
    bool bad;        // NaN or +inf in the row: emit, then stop
    float logprob;
};

// Walks request b; choose(node, depth, drafted tokens above the node) gives the token of a visited row.
template <class Choose>
void walk_request(
    const VerifyInputs& in, const VerifyOutputs& out, const IdArray& tokens, const IdArray* stop_ids, int64_t num_stops,
    int64_t b, const Choose& choose) {
    const int64_t d = out.max_path;
    int32_t* path = out.path + b * d;
    for (int64_t i = 0; i < d; ++i) {
        path[i] = -1;
        out.out_tokens.set(b * d + i, -1);
        if (out.logprobs) out.logprobs[b * d + i] = 0.0f;
    }
    out.num_tokens_out[b] = 0;
    out.flags[b] = 0;
    if (!in.active[b]) return;  // remaining and next_root stay as they are

    int32_t flags = in.params(b).flags;
    const NodeRange r = node_range(in.cu_nodes, b, in.rows);
    const int32_t* parents = in.parents + r.begin;
    int32_t n = r.n;
    if (r.bad || n == 0) {
        flags |= kFlagBadTree;
        n = 0;
    } else if (!tree_is_valid(parents, n)) {
        flags |= kFlagBadTree;  // the root's row is still right: plain decoding for this step
        n = 1;
    }
    for (int32_t i = 1; i < n; ++i) {
        const int64_t t = tokens[r.begin + i];
        if (t < 0 || t >= in.vocab) flags |= kFlagBadToken;
    }

    int64_t emitted[kMaxNodes + 1];
    float logprob[kMaxNodes + 1];
    int32_t count = 0, visited = 0;
    for (int32_t node = n > 0 ? 0 : -1; node >= 0 && visited < d;) {
        path[visited] = node;
        // emitted[0 .. visited) are exactly the drafted tokens on the path above this node
        const Chosen c = choose(node, visited, emitted);
        ++visited;
        if (c.bad) flags |= kFlagBadRow;
        if (!c.has_token) {
            flags |= kFlagEmptyRow;
            break;
        }
        logprob[count] = c.logprob;
        emitted[count++] = c.token;
        if (c.bad) break;
        node = find_child(parents, tokens, r.begin, n, node, c.token);
        if (node >= 0 && visited == d) flags |= kFlagPathFull;
    }

    const int32_t kept = clip_tokens(emitted, count, out.remaining[b], stop_ids, num_stops, &flags);
    for (int32_t i = 0; i < kept; ++i) {
        out.out_tokens.set(b * d + i, emitted[i]);
        if (out.logprobs) out.logprobs[b * d + i] = logprob[i];
        const int64_t local = emitted[i] - out.counts_offset;
        if (out.counts && local >= 0 && local < out.counts_width) out.counts[b * out.counts_width + local] += 1;
    }
    if (kept > 0) out.next_root.set(b, emitted[kept - 1]);
    out.remaining[b] -= kept;
    out.num_tokens_out[b] = kept;
    out.flags[b] = flags;
}

}  // namespace fv
