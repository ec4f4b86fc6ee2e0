// SPDX-License-Identifier: Apache-2.0
// build_tree on the CPU: one request per task. Cost O(M + N*W) per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "algo/tree.h"
#include "tree/tree_args.h"

namespace fv {
namespace {

struct Pool {
    const float* scores;      // [M]
    const int32_t* parents;   // [M]
    int64_t size;
};

// Chooses the pool entries of one request: chosen[0..n) ascending, node_of[index] = node. Returns n; sets flags.
int64_t choose(
    const Pool& pool, int64_t max_drafts, uint64_t* keys, int32_t* node_of, int32_t* chosen, int32_t* flags) {
    int64_t alive = 0;
    *flags = effective_keys(pool.scores, pool.parents, pool.size, keys, &alive);
    const int64_t n = std::min(max_drafts, alive);
    if (n == 0) return 0;
    const uint64_t cut = nth_largest(keys, pool.size, n);
    int64_t have = 0;
    for (int64_t i = 0; i < pool.size && have < n; ++i) {
        if (keys[i] < cut) continue;
        chosen[have] = static_cast<int32_t>(i);
        node_of[i] = static_cast<int32_t>(++have);
    }
    return have;
}

void build_tree_cpu(
    const Tensor pool_scores, const Tensor pool_tokens, const Tensor pool_parents, const Tensor root_tokens,
    const Tensor prefix_len, const Tensor active, Tensor tokens, Tensor parents, Tensor mask, Tensor depth,
    Tensor positions, Tensor cu_nodes, Tensor flags, int64_t num_nodes, int64_t vocab_size) {
    const auto [batch, pool, rows, words] = check_build_tree(
        pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, tokens, parents, mask, depth,
        positions, cu_nodes, flags, num_nodes, vocab_size);
    const float* scores = cptr<float>(pool_scores);
    const int32_t* pool_parent = cptr<int32_t>(pool_parents);
    const int32_t *prefix = cptr<int32_t>(prefix_len), *live = cptr<int32_t>(active);
    const IdArray pool_token(pool_tokens), root_token(root_tokens);
    const IdArrayOut token_out(tokens);
    int32_t* parent_out = mptr<int32_t>(parents);
    int32_t *depth_out = mptr<int32_t>(depth), *position_out = mptr<int32_t>(positions);
    int32_t *cu = mptr<int32_t>(cu_nodes), *flag_out = mptr<int32_t>(flags);
    uint64_t* mask_out = mptr<uint64_t>(mask);

    // 1. choose per request; 2. prefix sums; 3. write rows
    std::vector<int32_t> chosen(batch * num_nodes), nodes_of(batch, 0), node_of(batch * pool);
    torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
        std::vector<uint64_t> keys(pool);
        for (int64_t b = begin; b < end; ++b) {
            flag_out[b] = 0;
            if (live[b] == 0) continue;
            const Pool p{scores + b * pool, pool_parent + b * pool, pool};
            nodes_of[b] = 1 + static_cast<int32_t>(choose(
                p, num_nodes - 1, keys.data(), node_of.data() + b * pool, chosen.data() + b * num_nodes, flag_out + b));
        }
    });
    cu[0] = 0;
    for (int64_t b = 0; b < batch; ++b) cu[b + 1] = cu[b] + nodes_of[b];
    torch::stable::parallel_for(0, batch, 4, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const int64_t base = cu[b];
            for (int64_t i = 0; i < nodes_of[b]; ++i) {
                const int64_t row = base + i;
                const int64_t at = b * pool + (i ? chosen[b * num_nodes + i - 1] : 0);
                const int32_t up = i == 0 ? -1 : pool_parent[at] < 0 ? 0 : node_of[b * pool + pool_parent[at]];
                token_out.set(row, clamp_token(i ? pool_token[at] : root_token[b], vocab_size, flag_out + b));
                parent_out[row] = up;
                depth_out[row] = up < 0 ? 0 : depth_out[base + up] + 1;
                position_out[row] = static_cast<int32_t>(static_cast<int64_t>(prefix[b]) + depth_out[row]);
                write_mask_row(mask_out + row * words, up < 0 ? nullptr : mask_out + (base + up) * words, words, i);
            }
        }
    });
    for (int64_t row = cu[batch]; row < rows; ++row) {
        token_out.set(row, 0);
        parent_out[row] = -1;
        depth_out[row] = position_out[row] = 0;
        std::fill_n(mask_out + row * words, words, 0);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("build_tree", TORCH_BOX(&build_tree_cpu)); }

}  // namespace fv
