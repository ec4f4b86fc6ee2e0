// SPDX-License-Identifier: Apache-2.0
// mla_tree_attention on CUDA: arguments, choice of the kernel, launch. Tensor-core tiles for latent rows of 512 + 64 dims in
// bf16 or fp16, aligned to 16 bytes; everything else row by row (tree_attention_rows.cuh).
// Instantiations: (tile_rows, tile_tokens) in {(64, 32), (64, 32) with Q in registers, (32, 16)} x {bf16, f16}: 6.
#include <torch/csrc/stable/library.h>

#include "attention/attention_launch.h"
#include "attention/mla_args.h"

#include "attention/mla_tree_attention_kernel.cuh"

namespace fv {
namespace {

constexpr const char* kOp = "mla_tree_attention";

template <class Kv>
AttentionKernel mla_kernel(const MlaLaunch& choice) {
    if (choice.q_in_registers) return mla_tree_attention_kernel<MlaTile<64, 32, Kv, true>>;
    return choice.base.tile_rows == 64 ? mla_tree_attention_kernel<MlaTile<64, 32, Kv>> : mla_tree_attention_kernel<MlaTile<32, 16, Kv>>;
}

bool tiles_can_read(const AttentionParams& p) {
    return p.head_dim == kLatentDims && p.v_dim == kLatentOut && p.q_type != Element::kF32 && p.kv_type == p.q_type &&
           aligned(p.k, {p.k_page, p.k_slot}, 16) && aligned(p.q, {2 * p.q_row, 2 * p.q_head}, 16) &&
           aligned(p.out, {2 * p.out_row, 2 * p.out_head}, 8);
}

void mla_tree_attention_cuda(const Tensor q, const Tensor kv_cache, const std::optional<Tensor> mask, const Tensor cu_nodes,
                             const Tensor prefix_len, const Tensor page_table, Tensor out, const std::optional<Tensor> lse,
                             const std::optional<Tensor> workspace, int64_t row_base, double scale) {
    const MlaSizes n = check_mla(kOp, q, kv_cache, mask, cu_nodes, prefix_len, page_table, out, lse, row_base, scale);
    check_optional(kOp, "workspace", workspace, {ScalarType::Byte}, {kAny}, q);
    if (n.rows == 0 || n.heads == 0) return;
    const Launch launch(kOp, q);
    AttentionParams p = attention_params(q, mask, cu_nodes, prefix_len, page_table, out, lse, kv_cache.size(1), kv_cache.size(0), 1,
                                         row_base, scale);
    const int64_t bytes = kv_cache.scalar_type() == ScalarType::Float ? 4 : 2;
    p.k = p.v = cptr<unsigned char>(kv_cache);
    p.k_page = p.v_page = kv_cache.stride(0) * bytes, p.k_slot = p.v_slot = kv_cache.stride(1) * bytes;
    p.kv_type = element(kv_cache.scalar_type());
    if (!tiles_can_read(p)) {
        run_rows(launch, p, n.heads);
        return;
    }
    const AttentionKernel sm90 = launch.props.major == 9 ? mla_kernel_sm90(p.kv_type) : nullptr;
    const MlaLaunch choice = mla_launch(n.rows, n.requests, n.heads, p.capacity, launch.props.sms, launch.props.max_smem, sm90 != nullptr,
                                        mla_clusters_pay(n.requests, p.capacity, launch.props.major));
    const AttentionKernel kernel = choice.base.wgmma ? sm90 : p.q_type == Element::kBf16 ? mla_kernel<KvBf16>(choice) : mla_kernel<KvF16>(choice);
    run_tiles(launch, p, choice.base, kernel, workspace);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("mla_tree_attention", TORCH_BOX(&mla_tree_attention_cuda)); }

}  // namespace fv
