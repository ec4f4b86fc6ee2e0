// SPDX-License-Identifier: Apache-2.0
// sgl_reconstruct_indices_from_tree_mask: boolean ancestor masks -> positions and links.
// One block per request: a warp per row counts its ones and keeps the highest; then one warp links the nodes.
// Cost: N*N mask bytes and 32 bytes per node, one launch. Graph-safe. No template.
#include <torch/csrc/stable/library.h>

#include "common/launch.h"
#include "tree/sgl_links.cuh"

namespace fv {
namespace {

constexpr const char* kOp = "sgl_reconstruct_indices_from_tree_mask";

__global__ void __launch_bounds__(1024) sgl_reconstruct_kernel(const SglMasks t) {
    __shared__ int32_t parent[kMaxNodes];
    __shared__ SglLinkTable links;
    const int64_t b = blockIdx.x;
    const int32_t n = t.nodes;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int32_t i = warp; i < n; i += warps) {
        const uint8_t* row = t.mask + (b * n + i) * n;
        int32_t highest = -1, count = 0;
        for (int32_t j = lane; j < i; j += 32) {
            if (row[j]) highest = j, ++count;
        }
        highest = warp_max(highest);
        count = warp_sum(count);
        if (lane == 0) {
            parent[i] = highest;
            t.links.positions[b * n + i] = t.seq_len[b] + count;
        }
    }
    links.clear(n);
    __syncthreads();
    if (warp == 0) links.fill(parent, n);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) t.links.write(b, n, i, links.first[i], links.sibling[i]);
}

void sgl_reconstruct_indices_from_tree_mask_cuda(
    const Tensor tree_mask, const Tensor verified_seq_len, Tensor positions, Tensor retrive_index, Tensor retrive_next_token,
    Tensor retrive_next_sibling, int64_t batch_size, int64_t draft_token_num) {
    const SglMasks t = sgl_check_masks(kOp, tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token,
                                       retrive_next_sibling, batch_size, draft_token_num);
    if (t.batch == 0) return;
    const Launch launch(kOp, verified_seq_len);
    launch.run(sgl_reconstruct_kernel, dim3(static_cast<unsigned>(t.batch)), dim3(sgl_tree_threads(t.nodes)), 0, t);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) {
    m.impl("sgl_reconstruct_indices_from_tree_mask", TORCH_BOX(&sgl_reconstruct_indices_from_tree_mask_cuda));
}

}  // namespace fv
