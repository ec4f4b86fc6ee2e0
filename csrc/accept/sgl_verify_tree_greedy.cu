// SPDX-License-Identifier: Apache-2.0
// sgl_verify_tree_greedy: SGLang's greedy tree verification, given the argmax of every row.
// One block per request loads links, tokens and argmaxes to shared memory in one round; one thread walks there.
// Cost: 40 bytes per node, one launch. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "accept/sgl_shared_tree.cuh"
#include "common/launch.h"

namespace fv {
namespace {

constexpr const char* kOp = "sgl_verify_tree_greedy";
constexpr int kThreads = 128;

struct GreedyTree : SglSharedTree {
    int64_t own[kMaxNodes];  // argmaxes of this request's rows
    int64_t base;
    int32_t nodes;
    SglIds targets;  // [B*N], for a flat id of another request
    __device__ int64_t target(int32_t flat) const {
        const int64_t i = flat - base;
        return i >= 0 && i < nodes ? own[i] : targets[flat];
    }
};

__global__ void __launch_bounds__(kThreads) sgl_verify_tree_greedy_kernel(
    const SglTreeArgs a,
    const SglIds targets) {  // [B,N]
    __shared__ GreedyTree tree;
    const int64_t b = blockIdx.x;
    tree.load(a, b);
    for (int i = threadIdx.x; i < a.nodes; i += blockDim.x) tree.own[i] = targets[b * a.nodes + i];
    if (threadIdx.x == 0) {
        tree.base = b * a.nodes;
        tree.nodes = a.nodes;
        tree.targets = targets;
    }
    __syncthreads();
    if (threadIdx.x == 0) a.accept_token_num[b] = sgl_greedy_walk(tree, a.nodes, a.levels);
}

void sgl_verify_tree_greedy_cuda(
    Tensor predicts, Tensor accept_index, Tensor accept_token_num, const Tensor candidates, const Tensor retrive_index,
    const Tensor retrive_next_token, const Tensor retrive_next_sibling, const Tensor target_predict) {
    const SglTreeArgs a = sgl_check_tree(kOp, predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling);
    check_tensor(kOp, "target_predict", target_predict, {ScalarType::Long, ScalarType::Int}, {a.batch, a.nodes}, candidates);
    if (a.batch == 0) return;
    const Launch launch(kOp, candidates);
    launch.run(sgl_verify_tree_greedy_kernel, dim3(static_cast<unsigned>(a.batch)), dim3(a.nodes > 64 ? kThreads : 64), 0, a,
               sgl_ids(target_predict));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) {
    m.impl("sgl_verify_tree_greedy", TORCH_BOX(&sgl_verify_tree_greedy_cuda));
}

}  // namespace fv
