// SPDX-License-Identifier: Apache-2.0
// tree_attention on CUDA: arguments, choice of the kernel, launch.
// Tensor-core tiles (tree_attention_kernel.cuh) for head_dim 64, 128 and 256 with a bf16, fp16 or fp8 cache and rows
// aligned to 16 bytes, each node by itself in exact mode (tree_attention_exact.cuh); everything else row by row (tree_attention_rows.cuh). Neither needs the schedule: a block finds
// its share of the work from cu_nodes and prefix_len.
#include <torch/csrc/stable/library.h>

#include "attention/attention_args.h"
#include "attention/attention_launch.h"
#include "attention/attention_short.h"
#include "attention/tree_attention_exact.cuh"

namespace fv {
namespace {

constexpr const char* kOp = "tree_attention";

AttentionKernel tile_kernel(const AttentionParams& p, int tile_rows) {
    if (p.q_type == Element::kF32) return nullptr;
    if (p.kv_type == Element::kE4m3) return attention_kernel_e4m3(p.head_dim, tile_rows);
    if (p.kv_type != p.q_type) return nullptr;
    return p.q_type == Element::kBf16 ? attention_kernel_bf16(p.head_dim, tile_rows) : attention_kernel_f16(p.head_dim, tile_rows);
}

bool tiles_can_read(const AttentionParams& p) {
    return aligned(p.k, {p.k_page, p.k_slot, p.k_head}, 16) && aligned(p.v, {p.v_page, p.v_slot, p.v_head}, 16) &&
           aligned(p.q, {2 * p.q_row, 2 * p.q_head}, 16) && aligned(p.out, {2 * p.out_row, 2 * p.out_head}, 8);
}

void run_exact(const Launch& launch, AttentionParams& p, const ExactLaunch& e, const OptTensor& workspace) {
    const int64_t need = exact_workspace(e, p.rows, p.kv_heads, p.head_dim), have = workspace ? workspace->numel() : 0;
    FV_CHECK(have >= need && reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % 16 == 0, kOp,
             ": workspace of exact mode must be at least ", need, " bytes, 16-byte aligned; got ", have,
             ". Fix: allocate it with exact_workspace_for for these shapes and this page_table.");
    p.partials = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace->mutable_data_ptr()) + kCounterBytes);
    p.stages = e.base.stages;
    p.exact_heads = e.tile_heads;
    p.exact_chunks = e.chunks;
    const auto blocks = static_cast<unsigned>(p.rows * p.kv_heads * e.tiles);
    launch.run(exact_kernel(p.head_dim, p.kv_type), dim3(blocks, static_cast<unsigned>(e.groups)), dim3(128), e.base.smem, p);
    launch.run_overlapped(exact_fold_kernel, dim3(static_cast<unsigned>(p.rows), static_cast<unsigned>(p.kv_heads * p.group)), dim3(128), 0, p,
                          e.base.tile_rows);
}

void tree_attention_cuda(const Tensor q, const Tensor k_cache, const Tensor v_cache, const std::optional<Tensor> mask,
                         const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
                         const std::optional<Tensor> /*schedule*/, const std::optional<Tensor> sinks,
                         const std::optional<Tensor> k_scale, const std::optional<Tensor> v_scale, Tensor out,
                         const std::optional<Tensor> lse, const std::optional<Tensor> workspace, int64_t row_base,
                         double scale, int64_t window, double softcap, bool exact, bool settled) {
    const AttentionSizes n = check_attention(kOp, q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, k_scale,
                                             v_scale, out, lse, row_base, scale, window, softcap);
    check_optional(kOp, "workspace", workspace, {ScalarType::Byte}, {kAny}, q);
    if (n.rows == 0 || n.heads == 0) return;
    const Launch launch(kOp, q);
    const int64_t kv_bytes = k_cache.scalar_type() == ScalarType::Float ? 4 : k_cache.scalar_type() == ScalarType::Float8_e4m3fn ? 1 : 2;
    AttentionParams p = attention_params(q, mask, cu_nodes, prefix_len, page_table, out, lse, k_cache.size(1), k_cache.size(0),
                                         n.kv_heads, row_base, scale);
    p.k = cptr<unsigned char>(k_cache);
    p.v = cptr<unsigned char>(v_cache);
    p.sinks = cptr<float>(sinks);
    p.k_scale = n.k_scale.data, p.k_scale_stride = n.k_scale.stride;
    p.v_scale = n.v_scale.data, p.v_scale_stride = n.v_scale.stride;
    p.k_page = k_cache.stride(0) * kv_bytes, p.k_slot = k_cache.stride(1) * kv_bytes, p.k_head = k_cache.stride(2) * kv_bytes;
    p.v_page = v_cache.stride(0) * kv_bytes, p.v_slot = v_cache.stride(1) * kv_bytes, p.v_head = v_cache.stride(2) * kv_bytes;
    p.window = static_cast<int32_t>(window);
    p.kv_type = element(k_cache.scalar_type());
    p.softcap = static_cast<float>(softcap);
    p.exact = exact;

    if (exact && tile_kernel(p, n.head_dim > 128 ? 32 : 16) && exact_kernel(p.head_dim, p.kv_type) && tiles_can_read(p)) {
        run_exact(launch, p, exact_launch(n.rows, n.kv_heads, p.group, n.head_dim, static_cast<int>(kv_bytes), p.capacity, launch.props.sms,
                                          launch.props.max_smem), workspace);
        return;
    }
    if (!exact && takes_short(p, launch.props.major, launch.props.sms) && tiles_can_read(p)) {
        if (settled && block_attention(n.rows, n.requests, p.group)) run_block(launch, p);
        else run_short(launch, p);
        return;
    }
    const bool sm90 = launch.props.major == 9 && (p.kv_type == p.q_type || p.kv_type == Element::kE4m3) &&
                      attention_kernel_sm90(p.head_dim, 64, p.kv_type) != nullptr;
    const AttentionLaunch choice = attention_launch(n.rows, n.requests, n.kv_heads, p.group, n.head_dim, static_cast<int>(kv_bytes),
                                                    launch.props.sms, launch.props.max_smem, sm90 && p.q_type != Element::kF32,
                                                    clusters_pay(n.requests, p.capacity, launch.props.major),
                                                    most_tile_rows(n.head_dim, p.kv_type == Element::kBf16));
    const AttentionKernel kernel = choice.wgmma ? attention_kernel_sm90(p.head_dim, choice.tile_rows, p.kv_type) : tile_kernel(p, choice.tile_rows);
    if (kernel && !exact && tiles_can_read(p)) {
        run_tiles(launch, p, choice, kernel, workspace);
        return;
    }
    run_rows(launch, p, n.heads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("tree_attention", TORCH_BOX(&tree_attention_cuda)); }

}  // namespace fv
