// SPDX-License-Identifier: Apache-2.0
// tree_attention on CUDA: arguments, choice of the kernel, launch.
// Tensor-core tiles (tree_attention_kernel.cuh) for head_dim 64, 128 and 256 with a bf16, fp16 or fp8 cache and rows
// aligned to 16 bytes; everything else row by row (tree_attention_rows.cuh). Neither needs the schedule: a block finds
// its share of the work from cu_nodes and prefix_len.
#include <torch/csrc/stable/library.h>

#include "attention/attention_args.h"
#include "attention/attention_kernels.h"
#include "common/launch.h"

#include "attention/tree_attention_kernel.cuh"
#include "attention/tree_attention_rows.cuh"

namespace fv {
namespace {

constexpr const char* kOp = "tree_attention";

__global__ void clear_padding_kernel(const __grid_constant__ AttentionParams p) { clear_padding(p); }

Element element(ScalarType t) {
    return t == ScalarType::Float ? Element::kF32 : t == ScalarType::BFloat16 ? Element::kBf16
         : t == ScalarType::Half ? Element::kF16 : Element::kE4m3;
}

AttentionKernel tile_kernel(const AttentionParams& p, int tile_rows) {
    if (p.q_type == Element::kF32) return nullptr;
    if (p.kv_type == Element::kE4m3) return attention_kernel_e4m3(p.head_dim, tile_rows);
    if (p.kv_type != p.q_type) return nullptr;
    return p.q_type == Element::kBf16 ? attention_kernel_bf16(p.head_dim, tile_rows) : attention_kernel_f16(p.head_dim, tile_rows);
}

bool aligned(const void* p, std::initializer_list<int64_t> strides, int64_t bytes) {
    bool ok = reinterpret_cast<uintptr_t>(p) % bytes == 0;
    for (int64_t s : strides) ok = ok && s % bytes == 0;
    return ok;
}

bool tiles_can_read(const AttentionParams& p) {
    return aligned(p.k, {p.k_page, p.k_slot, p.k_head}, 16) && aligned(p.v, {p.v_page, p.v_slot, p.v_head}, 16) &&
           aligned(p.q, {2 * p.q_row, 2 * p.q_head}, 16) && aligned(p.out, {2 * p.out_row, 2 * p.out_head}, 8);
}

void run_tiles(const Launch& launch, AttentionParams& p, const AttentionLaunch& choice, AttentionKernel kernel, const OptTensor& workspace) {
    p.blocks = choice.blocks;
    p.stages = choice.stages;
    p.least_units = choice.least_units;
    p.separate_merge = choice.separate_merge;
    if (workspace) {
        const int64_t need = attention_workspace(choice, p.head_dim), have = workspace->numel();
        FV_CHECK(have >= need && reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % 16 == 0, kOp,
                 ": workspace must be at least ", need, " bytes, 16-byte aligned, zeroed once; got ", have,
                 ". Fix: allocate it with tree_attention_workspace for these shapes.");
        p.counters = static_cast<uint32_t*>(workspace->mutable_data_ptr());
        p.partials = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace->mutable_data_ptr()) + kCounterBytes);
    }
    launch.run(kernel, dim3(choice.blocks), dim3(128), choice.smem, p);
    if (!p.partials || !p.separate_merge || p.batch > kMaxSplitBatch) return;
    const auto merge = p.head_dim == 64 ? merge_kernel<64> : p.head_dim == 128 ? merge_kernel<128> : merge_kernel<256>;
    launch.run_overlapped(merge, dim3(choice.tile_rows, choice.sequences), dim3(128), merge_smem(p.batch, choice.blocks), p, choice.tile_rows);
}

void tree_attention_cuda(const Tensor q, const Tensor k_cache, const Tensor v_cache, const std::optional<Tensor> mask,
                         const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
                         const std::optional<Tensor> /*schedule*/, const std::optional<Tensor> sinks,
                         const std::optional<Tensor> k_scale, const std::optional<Tensor> v_scale, Tensor out,
                         const std::optional<Tensor> lse, const std::optional<Tensor> workspace, int64_t row_base,
                         double scale, int64_t window, double softcap) {
    const AttentionSizes n = check_attention(kOp, q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, k_scale,
                                             v_scale, out, lse, row_base, scale, window, softcap);
    check_optional(kOp, "workspace", workspace, {ScalarType::Byte}, {kAny}, q);
    if (n.rows == 0 || n.heads == 0) return;
    const Launch launch(kOp, q);
    const int64_t kv_bytes = k_cache.scalar_type() == ScalarType::Float ? 4 : k_cache.scalar_type() == ScalarType::Float8_e4m3fn ? 1 : 2;
    AttentionParams p{};
    p.q = q.const_data_ptr();
    p.out = out.mutable_data_ptr();
    p.lse = mptr<float>(lse);
    p.k = cptr<unsigned char>(k_cache);
    p.v = cptr<unsigned char>(v_cache);
    p.mask = cptr<int64_t>(mask);
    p.cu_nodes = cptr<int32_t>(cu_nodes);
    p.prefix = cptr<int32_t>(prefix_len);
    p.table = cptr<int32_t>(page_table);
    p.sinks = cptr<float>(sinks);
    p.k_scale = n.k_scale.data, p.k_scale_stride = n.k_scale.stride;
    p.v_scale = n.v_scale.data, p.v_scale_stride = n.v_scale.stride;
    p.q_row = q.stride(0), p.q_head = q.stride(1);
    p.out_row = out.stride(0), p.out_head = out.stride(1);
    p.lse_row = lse ? lse->stride(0) : 0;
    p.mask_row = mask ? mask->stride(0) : 0, p.words = mask ? mask->size(1) : 0;
    p.table_row = page_table.stride(0), p.table_columns = page_table.size(1);
    p.k_page = k_cache.stride(0) * kv_bytes, p.k_slot = k_cache.stride(1) * kv_bytes, p.k_head = k_cache.stride(2) * kv_bytes;
    p.v_page = v_cache.stride(0) * kv_bytes, p.v_slot = v_cache.stride(1) * kv_bytes, p.v_head = v_cache.stride(2) * kv_bytes;
    p.rows = n.rows, p.num_pages = k_cache.size(0), p.row_base = row_base;
    p.page_size = static_cast<int32_t>(std::min<int64_t>(k_cache.size(1), INT32_MAX));
    p.capacity = std::min<int64_t>(p.table_columns * p.page_size, kMaxCapacity);
    p.batch = static_cast<int32_t>(n.requests), p.kv_heads = static_cast<int32_t>(n.kv_heads);
    p.group = static_cast<int32_t>(n.heads / n.kv_heads), p.head_dim = static_cast<int32_t>(n.head_dim);
    p.window = static_cast<int32_t>(window);
    p.by_group = divider(static_cast<uint32_t>(p.group)), p.by_page_size = divider(static_cast<uint32_t>(p.page_size));
    p.q_type = element(q.scalar_type()), p.kv_type = element(k_cache.scalar_type());
    p.scale = static_cast<float>(scale * 1.4426950408889634), p.softcap = static_cast<float>(softcap);

    const AttentionLaunch choice = attention_launch(n.rows, n.requests, n.kv_heads, p.group, n.head_dim, static_cast<int>(kv_bytes),
                                                    launch.props.sms, launch.props.max_smem);
    if (const AttentionKernel kernel = tile_kernel(p, choice.tile_rows); kernel && tiles_can_read(p)) {
        run_tiles(launch, p, choice, kernel, workspace);
        return;
    }
    if (n.requests > 0) {
        launch.run(tree_attention_rows_kernel, dim3(static_cast<unsigned>(n.rows), static_cast<unsigned>(n.heads)), dim3(kRowsThreads),
                   2 * sizeof(float) * n.head_dim, p);
    }
    launch.run(clear_padding_kernel, dim3(launch.props.sms), dim3(256), 0, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("tree_attention", TORCH_BOX(&tree_attention_cuda)); }

}  // namespace fv
