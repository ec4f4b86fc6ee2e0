// SPDX-License-Identifier: Apache-2.0
// Argument checks of mla_tree_attention that need no device data: the same texts on the CPU and on CUDA.
#pragma once
#include <cmath>

#include "common/paged.h"

namespace fv {

struct MlaSizes {
    int64_t rows, heads, dim, out_dim, requests;
};

inline MlaSizes check_mla(const char* op, const Tensor& q, const Tensor& kv_cache, const OptTensor& mask, const Tensor& cu_nodes,
                          const Tensor& prefix_len, const Tensor& page_table, const Tensor& out, const OptTensor& lse,
                          int64_t row_base, double scale) {
    constexpr auto F32 = ScalarType::Float, I32 = ScalarType::Int;
    check_tensor(op, "q", q, {F32, ScalarType::BFloat16, ScalarType::Half}, {kAny, kAny, kAny}, q, true);
    const int64_t rows = q.size(0), heads = q.size(1), d = q.size(2);
    check_tensor(op, "kv_cache", kv_cache, {F32, ScalarType::BFloat16, ScalarType::Half}, {kAny, kAny, d}, q, true);
    FV_CHECK(d >= 1 && d <= 1024 && kv_cache.size(1) >= 1, op, ": the latent row must have 1 to 1024 dims and page_size >= 1; got ",
             describe(kv_cache), ". Fix: pass kv_cache [pages, page_size, D].");
    check_tensor(op, "prefix_len", prefix_len, {I32}, {kAny}, q);
    const int64_t requests = prefix_len.size(0);
    check_tensor(op, "cu_nodes", cu_nodes, {I32}, {requests + 1}, q);
    check_tensor(op, "page_table", page_table, {I32}, {requests, kAny}, q, true);
    check_optional(op, "mask", mask, {ScalarType::Long}, {rows, kAny}, q, true);
    check_output(op, "out", out, {q.scalar_type()}, {rows, heads, kAny}, q);
    FV_CHECK(out.size(2) >= 1 && out.size(2) <= d, op, ": out must have 1 to ", d, " dims, the first of a latent row; got ",
             describe(out), ". Fix: pass out [R, H, kv_lora_rank].");
    check_output(op, "lse", lse, {F32}, {rows, heads}, q);
    check_row_base(op, row_base, rows);
    check_scale(op, scale, "pass the softmax scale of the model (of its full head, not of the latent row).");
    return {rows, heads, d, out.size(2), requests};
}

}  // namespace fv
