// SPDX-License-Identifier: Apache-2.0
// sgl_build_tree_kernel_efficient: SGLang's candidate list -> tree mask, positions and links.
// One block per request, the candidate list in shared memory: every thread finds the parent of its node (by bisection when
// the list ascends, as SGLang's does), one warp links the nodes, and every warp writes whole mask rows.
// Cost: N*N mask bytes and 40 bytes per node, one launch. Graph-safe. No template.
#include <torch/csrc/stable/library.h>

#include "common/launch.h"
#include "tree/sgl_links.cuh"

namespace fv {
namespace {

constexpr const char* kOp = "sgl_build_tree_kernel_efficient";

__global__ void __launch_bounds__(1024) sgl_build_tree_kernel(const SglBuild t) {
    __shared__ int64_t selected[kMaxNodes];
    __shared__ int32_t parent[kMaxNodes];
    __shared__ int64_t scratch[33];
    __shared__ SglLinkTable links;
    const int64_t b = blockIdx.x;
    const int32_t n = t.nodes;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = blockDim.x >> 5;

    int64_t before = 0;
    if (t.mode == kSglMaskFull) {
        for (int64_t j = tid; j < b; j += blockDim.x) before = t.add_lengths(before, t.length(j));
        before = block_reduce(before, [&](int64_t x, int64_t y) { return t.add_lengths(x, y); }, scratch);
    }
    links.clear(n);
    for (int i = tid; i < n - 1; i += blockDim.x) selected[i] = t.selected[b * (n - 1) + i];
    __syncthreads();
    int disorder = 0;
    for (int i = tid; i < n - 2; i += blockDim.x) disorder |= selected[i] > selected[i + 1];
    const bool ascending = __syncthreads_or(disorder) == 0;
    for (int i = tid; i < n; i += blockDim.x) {
        parent[i] = i == 0 ? -1 : sgl_parent(selected, n, i, t.topk, t.parent_list + b * t.listed, t.listed, ascending);
    }
    __syncthreads();
    if (warp == 0) links.fill(parent, n);
    // Rows, one per warp at a time: lane w holds bits 32w..32w+31 of the row.
    for (int32_t i = warp; i < n; i += warps) {
        uint32_t word = lane == 0 ? 1u : 0u;
        sgl_ancestors(parent, n, i, [&](int32_t a) { word |= (a >> 5) == lane ? 1u << (a & 31) : 0u; });
        const int32_t seen = warp_sum(__popc(word));
        if (lane == 0) t.links.positions[b * n + i] = t.seq_len[b] + seen - 1;
        const int64_t start = t.row_start(b, i, before);
        const bool packed = t.mode >= kSglMaskBits;
        const int size = packed ? sgl_row_bytes(n, t.mode) : n;
        const bool fits = start >= 0 && start + size <= t.mask_size;  // else: lengths that the mask was not made for
        for (int k = lane; k < ((size + 31) & ~31); k += 32) {
            const uint32_t bits = __shfl_sync(kFullWarp, word, packed ? k >> 2 & 31 : k >> 5);
            const uint32_t value = packed ? bits >> (8 * (k & 3)) & 255u : bits >> (k & 31) & 1u;
            if (k < size && fits) t.mask[start + k] = static_cast<uint8_t>(value);
        }
    }
    __syncthreads();
    for (int i = tid; i < n; i += blockDim.x) t.links.write(b, n, i, links.first[i], links.sibling[i]);
}

void sgl_build_tree_kernel_efficient_cuda(
    const Tensor parent_list, const Tensor selected_index, const Tensor verified_seq_len, Tensor tree_mask, Tensor positions,
    Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, int64_t topk, int64_t depth,
    int64_t draft_token_num, int64_t tree_mask_mode) {
    const SglBuild t = sgl_check_build(kOp, parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index,
                                       retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode);
    if (t.batch == 0) return;
    const Launch launch(kOp, parent_list);
    launch.run(sgl_build_tree_kernel, dim3(static_cast<unsigned>(t.batch)), dim3(sgl_tree_threads(t.nodes)), 0, t);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) {
    m.impl("sgl_build_tree_kernel_efficient", TORCH_BOX(&sgl_build_tree_kernel_efficient_cuda));
}

}  // namespace fv
