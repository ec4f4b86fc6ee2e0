// SPDX-License-Identifier: Apache-2.0
// The arguments that verify_tree, lm_head_verify_tree, verify_tree_partials and verify_tree_combine share:
// checked once, then read as plain pointers.
#pragma once
#include "accept/rows.h"
#include "accept/verify_walk.h"

namespace fv {

StopIds stop_view(const OptTensor& stop_ids);

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

// All of verify_tree's arguments.
struct VerifyCall {
    VerifyInputs in;
    VerifyOutputs out;
    StopIds stops;
};
VerifyCall check_verify_tree(
    const Tensor& logits, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& remaining, const OptTensor& stop_ids, const Tensor& temperature, const Tensor& top_k,
    const Tensor& top_p, const Tensor& min_p, const Tensor& seed, const OptTensor& bias, const OptTensor& bitmask,
    const OptTensor& penalties, const OptTensor& counts, const Tensor& out_tokens, const Tensor& num_tokens_out,
    const Tensor& path, const Tensor& next_root, const Tensor& flags, const OptTensor& logprobs, const OptTensor& workspace,
    int64_t vocab_size, int64_t rule);

// All of verify_tree_partials' arguments, and of verify_tree_combine's.
struct PartialsCall {
    VerifyInputs in;
    int64_t shard, words;  // ids of this rank; words of a row
};
PartialsCall check_partials(
    const Tensor& logits, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& seed, const OptTensor& bias, const OptTensor& bitmask, const OptTensor& penalties, const OptTensor& counts,
    const Tensor& state, const Tensor& partials, int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds,
    int64_t rule);

struct CombineCall {
    VerifyInputs in;
    VerifyOutputs out;
};
CombineCall check_combine(
    const Tensor& partials, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& remaining, const OptTensor& stop_ids, const Tensor& temperature, const Tensor& top_k,
    const Tensor& top_p, const Tensor& min_p, const OptTensor& counts, const Tensor& state, const Tensor& out_tokens,
    const Tensor& num_tokens_out, const Tensor& path, const Tensor& next_root, const Tensor& flags, const OptTensor& logprobs,
    int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds, int64_t rule);

// Walks request b on the host; choose(node, depth, drafted tokens above the node) gives the token of a visited row.
template <class Choose>
void walk_request(
    const VerifyInputs& in, const VerifyOutputs& out, const IdArray& tokens, const StopIds& stops, int64_t b,
    const Choose& choose) {
    HostWalker w;
    if (!in.active[b]) return write_inactive(w, out, b);
    const WalkTree tree = open_tree(w, in, tokens, b);
    walk_tree(w, tree, in.params(b).flags, out, stops, b, choose);
}

}  // namespace fv
