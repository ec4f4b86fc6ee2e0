// SPDX-License-Identifier: Apache-2.0
// sgl_verify_tree_greedy on the CPU: SGLang's greedy tree verification. Cost O(N) per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "accept/sgl_verify_args.h"

namespace fv {
namespace {

constexpr const char* kOp = "sgl_verify_tree_greedy";

struct GreedyTree : SglTree {
    SglIds targets;  // [B*N]
    GreedyTree(const SglTreeArgs& args, int64_t b, SglIds t) : SglTree(args, b), targets(t) {}
    int64_t target(int32_t flat) const { return targets[flat]; }
};

void sgl_verify_tree_greedy_cpu(
    Tensor predicts, Tensor accept_index, Tensor accept_token_num, const Tensor candidates, const Tensor retrive_index,
    const Tensor retrive_next_token, const Tensor retrive_next_sibling, const Tensor target_predict) {
    const SglTreeArgs a = sgl_check_tree(kOp, predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling);
    check_tensor(kOp, "target_predict", target_predict, {ScalarType::Long, ScalarType::Int}, {a.batch, a.nodes}, candidates);
    const SglIds targets = sgl_ids(target_predict);
    torch::stable::parallel_for(0, a.batch, 64, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            GreedyTree tree(a, b, targets);
            a.accept_token_num[b] = sgl_greedy_walk(tree, a.nodes, a.levels);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) {
    m.impl("sgl_verify_tree_greedy", TORCH_BOX(&sgl_verify_tree_greedy_cpu));
}

}  // namespace fv
