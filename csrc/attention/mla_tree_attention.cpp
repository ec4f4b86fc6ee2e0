// SPDX-License-Identifier: Apache-2.0
// mla_tree_attention on the CPU: tree_attention's blocks with one kv head whose K row is also its V row.
#include "attention/attend_cpu.h"
#include "attention/mla_args.h"

#include <torch/csrc/stable/library.h>

namespace fv {
namespace {

constexpr const char* kOp = "mla_tree_attention";

void mla_tree_attention_cpu(const Tensor q, const Tensor kv_cache, const std::optional<Tensor> mask, const Tensor cu_nodes,
                            const Tensor prefix_len, const Tensor page_table, Tensor out, const std::optional<Tensor> lse,
                            const std::optional<Tensor> /*workspace*/, int64_t row_base, double scale) {
    const MlaSizes n = check_mla(kOp, q, kv_cache, mask, cu_nodes, prefix_len, page_table, out, lse, row_base, scale);
    const PageTable pages(page_table, kv_cache.size(1), kv_cache.size(0));
    const int32_t *cu = cptr<int32_t>(cu_nodes), *prefix = cptr<int32_t>(prefix_len);
    check_cu_nodes(kOp, cu, n.requests, n.rows);
    check_prefix_len(kOp, prefix, n.requests);

    const int group = static_cast<int>(n.heads), block_nodes = std::max(1, kBlockRows / std::max(1, group));
    std::vector<Block> blocks;
    int64_t work = 0;
    for (int64_t b = 0; b < n.requests; ++b) {
        const int64_t nodes = cu[b + 1] - cu[b], p = prefix[b], columns = row_base + nodes;
        if (nodes == 0 || group == 0) continue;
        FV_CHECK(!mask || columns <= 64 * mask->size(1), kOp, ": mask must have a bit for each of the ", columns,
                 " forest columns of request ", b, "; got ", describe(*mask), ". Fix: pass [R, ceil(columns / 64)] words.");
        pages.check(kOp, b, 0, p + columns);
        for (int64_t i = 0; i < nodes; i += block_nodes) {
            const int take = static_cast<int>(std::min<int64_t>(block_nodes, nodes - i));
            const int64_t end = p + (mask ? columns : row_base + i + take);
            blocks.push_back({b, cu[b] + i, 0, take, static_cast<int>(row_base + i), p, columns, static_cast<float>(scale), 0,
                              (end - 1) / kChunkKeys + 1});
            work += 2 * end * take * group * n.dim;
        }
    }
    const int64_t bytes = element_bytes(q.scalar_type()), kv_bytes = element_bytes(kv_cache.scalar_type());
    const Output w{mptr<char>(out), out.stride(0) * bytes, out.stride(1) * bytes, q.scalar_type(), mptr<float>(lse),
                   lse ? lse->stride(0) : 0, nullptr, static_cast<int>(n.out_dim)};
    const CacheView rows{cptr<char>(kv_cache), kv_cache.stride(0) * kv_bytes, kv_cache.stride(1) * kv_bytes, 0};
    const AttentionArgs args{cptr<char>(q), q.stride(0) * bytes, q.stride(1) * bytes, q.scalar_type(), kv_cache.scalar_type(),
                             rows, rows, pages, cptr<int64_t>(mask), mask ? mask->stride(0) : 0, mask ? mask->size(1) : 0,
                             static_cast<int>(n.dim), group, 0, 0.0f};
    if (!blocks.empty()) attend(args, blocks, w, HeadScale(), work);
    clear_rows(w, n.requests ? cu[n.requests] : 0, n.rows, n.heads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("mla_tree_attention", TORCH_BOX(&mla_tree_attention_cpu)); }

}  // namespace fv
