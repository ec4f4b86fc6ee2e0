// SPDX-License-Identifier: Apache-2.0
// The arguments that sgl_verify_tree_greedy and sgl_tree_speculative_sampling_target_only share, on CPU and CUDA.
#pragma once
#include "algo/sglang.h"
#include "common/check.h"

namespace fv {

struct SglTreeArgs {
    int64_t batch, levels, slots;  // slots: flat ids below it are valid
    int32_t nodes;
    int32_t* predicts;          // [slots or more]
    int32_t* accept_index;      // [B,S]
    int32_t* accept_token_num;  // [B]
    SglIds candidates, index, next, sibling;  // [B,N] each
};

inline SglIds sgl_ids(const Tensor& t) { return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long}; }

inline SglTreeArgs sgl_check_tree(
    const char* op, const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
    const Tensor& candidates, const Tensor& retrive_index, const Tensor& retrive_next_token,
    const Tensor& retrive_next_sibling) {
    const Tensor& like = candidates;
    check_tensor(op, "candidates", candidates, {ScalarType::Long, ScalarType::Int}, {kAny, kAny}, like);
    const int64_t batch = candidates.size(0), nodes = candidates.size(1);
    FV_CHECK(nodes >= 1 && nodes <= kMaxNodes, op, ": candidates must have 1..", kMaxNodes, " columns; got ", nodes,
             ". Fix: pass [B, draft_token_num] with at most that many nodes per request.");
    const auto ids = {ScalarType::Long, ScalarType::Int};
    check_tensor(op, "retrive_index", retrive_index, ids, {batch, nodes}, like);
    check_tensor(op, "retrive_next_token", retrive_next_token, ids, {batch, nodes}, like);
    check_tensor(op, "retrive_next_sibling", retrive_next_sibling, ids, {batch, nodes}, like);
    check_tensor(op, "predicts", predicts, {ScalarType::Int}, {kAny}, like);
    check_tensor(op, "accept_index", accept_index, {ScalarType::Int}, {batch, kAny}, like);
    check_tensor(op, "accept_token_num", accept_token_num, {ScalarType::Int}, {batch}, like);
    FV_CHECK(accept_index.size(1) >= 1, op, ": accept_index must have at least 1 column; got 0. ",
             "Fix: allocate [B, spec_steps + 1].");
    FV_CHECK(predicts.size(0) >= batch * nodes, op, ": predicts must have at least B*N = ", batch * nodes,
             " entries; got ", predicts.size(0), ". Fix: allocate one slot per node.");
    return {batch, accept_index.size(1), batch * nodes, static_cast<int32_t>(nodes), mptr<int32_t>(predicts),
            mptr<int32_t>(accept_index), mptr<int32_t>(accept_token_num), sgl_ids(candidates), sgl_ids(retrive_index),
            sgl_ids(retrive_next_token), sgl_ids(retrive_next_sibling)};
}

// The tree of request b as the walks see it, straight from the tensors.
struct SglTree {
    const SglTreeArgs& a;
    int64_t base;         // b * N
    int32_t* index_row;   // [S]
    SglTree(const SglTreeArgs& args, int64_t b) : a(args), base(b * args.nodes), index_row(args.accept_index + b * args.levels) {}
    int32_t first_child(int32_t i) const { return sgl_link(a.next[base + i], a.nodes); }
    int32_t sibling(int32_t i) const { return sgl_link(a.sibling[base + i], a.nodes); }
    int32_t token(int32_t i) const { return sgl_token(a.candidates[base + i]); }
    int32_t flat(int32_t i) const { return sgl_flat(a.index[base + i], a.slots); }
    void accept(int32_t k, int32_t flat) { index_row[k] = flat; }
    void predict(int32_t flat, int64_t token) { a.predicts[flat] = static_cast<int32_t>(token); }
};

}  // namespace fv
