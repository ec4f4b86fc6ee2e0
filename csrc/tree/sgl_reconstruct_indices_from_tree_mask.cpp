// SPDX-License-Identifier: Apache-2.0
// sgl_reconstruct_indices_from_tree_mask on the CPU. Cost O(N*N) per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "tree/sgl_tree_args.h"

namespace fv {
namespace {

void sgl_reconstruct_indices_from_tree_mask_cpu(
    const Tensor tree_mask, const Tensor verified_seq_len, Tensor positions, Tensor retrive_index, Tensor retrive_next_token,
    Tensor retrive_next_sibling, int64_t batch_size, int64_t draft_token_num) {
    const SglMasks t = sgl_check_masks("sgl_reconstruct_indices_from_tree_mask", tree_mask, verified_seq_len, positions,
                                       retrive_index, retrive_next_token, retrive_next_sibling, batch_size, draft_token_num);
    const int32_t n = t.nodes;
    torch::stable::parallel_for(0, t.batch, 4, [&](int64_t begin, int64_t end) {
        std::vector<int32_t> parent(n), first(n), sibling(n);
        for (int64_t b = begin; b < end; ++b) {
            for (int32_t i = 0; i < n; ++i) {
                const uint8_t* row = t.mask + (b * n + i) * n;
                int64_t above = 0;
                parent[i] = -1;
                for (int32_t j = 0; j < i; ++j) {
                    if (row[j]) parent[i] = j, ++above;
                }
                t.links.positions[b * n + i] = sgl_position(t.seq_len[b], above);
            }
            sgl_link_nodes(parent.data(), n, first.data(), sibling.data());
            for (int32_t i = 0; i < n; ++i) t.links.write(b, n, i, first[i], sibling[i]);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) {
    m.impl("sgl_reconstruct_indices_from_tree_mask", TORCH_BOX(&sgl_reconstruct_indices_from_tree_mask_cpu));
}

}  // namespace fv
