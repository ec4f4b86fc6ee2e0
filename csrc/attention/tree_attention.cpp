// SPDX-License-Identifier: Apache-2.0
// tree_attention on the CPU: checks, and the blocks of rows that attend_cpu.h works through.
#include "attention/attend_cpu.h"
#include "attention/attention_args.h"

#include <torch/csrc/stable/library.h>

namespace fv {
namespace {

constexpr const char* kOp = "tree_attention";

void tree_attention_cpu(const Tensor q, const Tensor k_cache, const Tensor v_cache, const std::optional<Tensor> mask,
                        const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
                        const std::optional<Tensor> /*schedule*/, const std::optional<Tensor> sinks,
                        const std::optional<Tensor> k_scale, const std::optional<Tensor> v_scale, Tensor out,
                        const std::optional<Tensor> lse, const std::optional<Tensor> /*workspace*/, int64_t row_base,
                        double scale, int64_t window, double softcap, bool /*exact: always*/, bool /*settled*/) {
    const auto [rows, heads, d, kv_heads, requests, ks, vs] =
        check_attention(kOp, q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, k_scale, v_scale, out, lse,
                        row_base, scale, window, softcap);
    const PageTable pages(page_table, k_cache.size(1), k_cache.size(0));
    const int32_t *cu = cptr<int32_t>(cu_nodes), *prefix = cptr<int32_t>(prefix_len);
    check_cu_nodes(kOp, cu, requests, rows);
    check_prefix_len(kOp, prefix, requests);

    const int group = static_cast<int>(heads / kv_heads), block_nodes = std::max(1, kBlockRows / std::max(1, group));
    std::vector<Block> blocks;
    int64_t work = 0;
    for (int64_t b = 0; b < requests; ++b) {
        const int64_t n = cu[b + 1] - cu[b], p = prefix[b], columns = row_base + n;
        if (n == 0 || group == 0) continue;
        FV_CHECK(!mask || columns <= 64 * mask->size(1), kOp, ": mask must have a bit for each of the ", columns,
                 " forest columns of request ", b, "; got ", describe(*mask), ". Fix: pass [R, ceil(columns / 64)] words.");
        // the deepest look back is that of the shallowest row: its depth is >= 0 in a chain, >= -1 under a mask
        const int64_t first_chain = p + row_base + 1 - window;
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, mask ? p - window : first_chain);
        pages.check(kOp, b, std::min(first, p), p + columns);
        for (int64_t h = 0; h < kv_heads; ++h) {
            for (int64_t i = 0; i < n; i += block_nodes) {
                const int nodes = static_cast<int>(std::min<int64_t>(block_nodes, n - i));
                const int64_t end = p + (mask ? columns : row_base + i + nodes);
                const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, (mask ? p : p + row_base + i + 1) - window);
                blocks.push_back({b, cu[b] + i, static_cast<int>(h), nodes, static_cast<int>(row_base + i), p, columns,
                                  static_cast<float>(scale) * ks[h], begin / kChunkKeys, (end - 1) / kChunkKeys + 1});
                work += 2 * (end - begin) * nodes * group * d;
            }
        }
    }
    const int64_t bytes = element_bytes(q.scalar_type());
    const Output w{mptr<char>(out), out.stride(0) * bytes, out.stride(1) * bytes, q.scalar_type(), mptr<float>(lse),
                   lse ? lse->stride(0) : 0, cptr<float>(sinks), static_cast<int>(d)};
    const AttentionArgs args{cptr<char>(q), q.stride(0) * bytes, q.stride(1) * bytes, q.scalar_type(),
                             k_cache.scalar_type(), view(k_cache), view(v_cache), pages, cptr<int64_t>(mask),
                             mask ? mask->stride(0) : 0, mask ? mask->size(1) : 0, static_cast<int>(d), group,
                             static_cast<int>(window), static_cast<float>(softcap)};
    if (!blocks.empty()) attend(args, blocks, w, vs, work);
    clear_rows(w, requests ? cu[requests] : 0, rows, heads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("tree_attention", TORCH_BOX(&tree_attention_cpu)); }

}  // namespace fv
