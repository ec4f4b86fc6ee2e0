// SPDX-License-Identifier: Apache-2.0
// Host side shared by the CUDA attention ops: element kinds, alignment, the launch of tiles and of their merge.
#pragma once
#include "attention/attention_kernels.h"
#include "common/launch.h"

#include "attention/attention_merge.cuh"
#include "attention/tree_attention_rows.cuh"

namespace fv {
namespace {

__global__ void clear_padding_kernel(const __grid_constant__ AttentionParams p) { clear_padding(p); }

inline Element element(ScalarType t) {
    return t == ScalarType::Float ? Element::kF32 : t == ScalarType::BFloat16 ? Element::kBf16
         : t == ScalarType::Half ? Element::kF16 : Element::kE4m3;
}

inline bool aligned(const void* p, std::initializer_list<int64_t> strides, int64_t bytes) {
    bool ok = reinterpret_cast<uintptr_t>(p) % bytes == 0;
    for (int64_t s : strides) ok = ok && s % bytes == 0;
    return ok;
}

// What the strides and lengths of q, out, mask, lse and page_table say; the cache is the caller's.
inline AttentionParams attention_params(const Tensor& q, const OptTensor& mask, const Tensor& cu_nodes, const Tensor& prefix_len,
                                        const Tensor& page_table, const Tensor& out, const OptTensor& lse, int64_t page_size,
                                        int64_t num_pages, int64_t kv_heads, int64_t row_base, double scale) {
    AttentionParams p{};
    p.q = q.const_data_ptr();
    p.out = out.mutable_data_ptr();
    p.lse = mptr<float>(lse);
    p.mask = cptr<int64_t>(mask);
    p.cu_nodes = cptr<int32_t>(cu_nodes);
    p.prefix = cptr<int32_t>(prefix_len);
    p.table = cptr<int32_t>(page_table);
    p.q_row = q.stride(0), p.q_head = q.stride(1);
    p.out_row = out.stride(0), p.out_head = out.stride(1);
    p.lse_row = lse ? lse->stride(0) : 0;
    p.mask_row = mask ? mask->stride(0) : 0, p.words = mask ? mask->size(1) : 0;
    p.table_row = page_table.stride(0), p.table_columns = page_table.size(1);
    p.rows = q.size(0), p.num_pages = num_pages, p.row_base = row_base;
    p.page_size = static_cast<int32_t>(std::min<int64_t>(page_size, INT32_MAX));
    p.capacity = std::min<int64_t>(p.table_columns * p.page_size, kMaxCapacity);
    p.batch = static_cast<int32_t>(prefix_len.size(0)), p.kv_heads = static_cast<int32_t>(kv_heads);
    p.group = static_cast<int32_t>(q.size(1) / kv_heads);
    p.head_dim = static_cast<int32_t>(q.size(2)), p.v_dim = static_cast<int32_t>(out.size(2));
    p.by_group = divider(static_cast<uint32_t>(p.group)), p.by_page_size = divider(static_cast<uint32_t>(p.page_size));
    p.q_type = element(q.scalar_type());
    p.scale = static_cast<float>(scale * 1.4426950408889634);
    return p;
}

inline void run_tiles(const Launch& launch, AttentionParams& p, const AttentionLaunch& choice, AttentionKernel kernel, const OptTensor& workspace) {
    p.blocks = choice.blocks;
    p.stages = choice.stages;
    p.least_units = choice.least_units;
    if (workspace) {
        const int64_t need = attention_workspace(choice, p.v_dim), have = workspace->numel();
        FV_CHECK(have >= need && reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % 16 == 0, launch.op,
                 ": workspace must be at least ", need, " bytes, 16-byte aligned, zeroed once; got ", have,
                 ". Fix: allocate it with ", launch.op, "_workspace for these shapes.");
        p.counters = static_cast<uint32_t*>(workspace->mutable_data_ptr());
        p.partials = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace->mutable_data_ptr()) + kCounterBytes);
    }
    if (p.partials && p.batch <= kMaxSplitBatch) {  // blocks that share a sequence wait for each other's partial results
        p.cluster = choice.cluster;
        p.blocks = launch.resident_blocks(kernel, p.cluster, p.blocks, dim3(choice.threads), choice.smem);
        launch.run_resident_cluster(kernel, p.cluster, dim3(p.blocks), dim3(choice.threads), choice.smem, p);
    } else {
        launch.run(kernel, dim3(p.blocks), dim3(choice.threads), choice.smem, p);
    }
}

// Row by row: what no tile takes.
inline void run_rows(const Launch& launch, const AttentionParams& p, int64_t heads) {
    if (p.batch > 0) {
        launch.run(tree_attention_rows_kernel, dim3(static_cast<unsigned>(p.rows), static_cast<unsigned>(heads)), dim3(kRowsThreads),
                   sizeof(float) * (p.head_dim + p.v_dim), p);
    }
    launch.run(clear_padding_kernel, dim3(launch.props.sms), dim3(256), 0, p);
}

}  // namespace
}  // namespace fv
