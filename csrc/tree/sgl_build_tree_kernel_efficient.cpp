// SPDX-License-Identifier: Apache-2.0
// sgl_build_tree_kernel_efficient on the CPU. Cost O(N * (log N + N)) per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "tree/sgl_tree_args.h"

namespace fv {
namespace {

void sgl_build_tree_kernel_efficient_cpu(
    const Tensor parent_list, const Tensor selected_index, const Tensor verified_seq_len, Tensor tree_mask, Tensor positions,
    Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, int64_t topk, int64_t depth,
    int64_t draft_token_num, int64_t tree_mask_mode) {
    const SglBuild t = sgl_check_build("sgl_build_tree_kernel_efficient", parent_list, selected_index, verified_seq_len, tree_mask,
                                       positions, retrive_index, retrive_next_token, retrive_next_sibling, topk, depth,
                                       draft_token_num, tree_mask_mode);
    const int32_t n = t.nodes;
    std::vector<int64_t> prefix(t.batch + 1, 0);
    for (int64_t b = 0; b < t.batch; ++b) prefix[b + 1] = t.add_lengths(prefix[b], t.length(b));
    torch::stable::parallel_for(0, t.batch, 4, [&](int64_t begin, int64_t end) {
        std::vector<int32_t> parent(n), first(n), sibling(n);
        std::vector<uint8_t> row(n);
        for (int64_t b = begin; b < end; ++b) {
            const int64_t* selected = t.selected + b * (n - 1);
            const bool ascending = std::is_sorted(selected, selected + n - 1);
            parent[0] = -1;
            for (int32_t i = 1; i < n; ++i) {
                parent[i] = sgl_parent(selected, n, i, t.topk, t.parent_list + b * t.listed, t.listed, ascending);
            }
            sgl_link_nodes(parent.data(), n, first.data(), sibling.data());
            for (int32_t i = 0; i < n; ++i) {
                std::fill(row.begin(), row.end(), 0);
                row[0] = 1;
                sgl_ancestors(parent.data(), n, i, [&](int32_t a) { row[a] = 1; });
                t.links.write(b, n, i, first[i], sibling[i]);
                t.links.positions[b * n + i] = sgl_position(t.seq_len[b], std::count(row.begin() + 1, row.end(), 1));
                const int64_t start = t.row_start(b, i, prefix[b]);
                const bool packed = t.mode >= kSglMaskBits;
                const int64_t size = packed ? sgl_row_bytes(n, t.mode) : n;
                if (start < 0 || start + size > t.mask_size) continue;  // lengths that the mask was not made for
                for (int64_t k = 0; k < size; ++k) {
                    uint8_t value = 0;
                    for (int bit = 0; packed && bit < 8 && k * 8 + bit < n; ++bit) value |= row[k * 8 + bit] << bit;
                    t.mask[start + k] = packed ? value : row[k];
                }
            }
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) {
    m.impl("sgl_build_tree_kernel_efficient", TORCH_BOX(&sgl_build_tree_kernel_efficient_cpu));
}

}  // namespace fv
