// SPDX-License-Identifier: Apache-2.0
// Argument checks of tree_attention that need no device data: the same texts on the CPU and on CUDA.
#pragma once
#include <cmath>

#include "common/paged.h"

namespace fv {

struct AttentionSizes {
    int64_t rows, heads, head_dim, kv_heads, requests;
    HeadScale k_scale, v_scale;
};

inline AttentionSizes check_attention(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                      const OptTensor& mask, const Tensor& cu_nodes, const Tensor& prefix_len,
                                      const Tensor& page_table, const OptTensor& sinks, const OptTensor& k_scale,
                                      const OptTensor& v_scale, const Tensor& out, const OptTensor& lse, int64_t row_base,
                                      double scale, int64_t window, double softcap) {
    constexpr auto F32 = ScalarType::Float, I32 = ScalarType::Int;
    check_tensor(op, "q", q, {F32, ScalarType::BFloat16, ScalarType::Half}, {kAny, kAny, kAny}, q, true);
    const int64_t rows = q.size(0), heads = q.size(1), d = q.size(2);
    check_tensor(op, "k_cache", k_cache, {F32, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn},
                 {kAny, kAny, kAny, d}, q, true);
    const int64_t kv_heads = k_cache.size(2);
    check_tensor(op, "v_cache", v_cache, {k_cache.scalar_type()},
                 {k_cache.size(0), k_cache.size(1), kv_heads, d}, q, true);
    FV_CHECK(kv_heads >= 1 && heads % kv_heads == 0, op, ": q must have a multiple of the cache's ", kv_heads,
             " kv heads; got ", describe(q), ". Fix: pass q [R, Hq, D] and caches [pages, page_size, Hkv, D].");
    FV_CHECK(d >= 1 && d <= 1024 && k_cache.size(1) >= 1, op, ": head_dim must be in [1, 1024] and page_size >= 1; got ",
             describe(k_cache), ". Fix: pass caches [pages, page_size, Hkv, D].");
    check_tensor(op, "prefix_len", prefix_len, {I32}, {kAny}, q);
    const int64_t requests = prefix_len.size(0);
    check_tensor(op, "cu_nodes", cu_nodes, {I32}, {requests + 1}, q);
    check_tensor(op, "page_table", page_table, {I32}, {requests, kAny}, q, true);
    check_optional(op, "mask", mask, {ScalarType::Long}, {rows, kAny}, q, true);
    check_optional(op, "sinks", sinks, {F32}, {heads}, q);
    check_output(op, "out", out, {q.scalar_type()}, {rows, heads, d}, q);
    check_output(op, "lse", lse, {F32}, {rows, heads}, q);
    check_row_base(op, row_base, rows);
    FV_CHECK(window >= 0 && window <= INT32_MAX, op, ": window must be in [0, 2^31); got ", window,
             ". Fix: pass 0 for full attention.");
    FV_CHECK(softcap >= 0 && std::isfinite(softcap), op, ": softcap must be finite and >= 0; got ", softcap,
             ". Fix: pass 0 for none.");
    FV_CHECK(softcap == 0 || (softcap >= kLeastSoftcap && softcap <= kMostScale), op, ": softcap must be 0 or in [", kLeastSoftcap, ", ",
             kMostScale, "] (float32); got ", softcap, ". Fix: pass 0 for none.");
    check_scale(op, scale, "pass head_dim ** -0.5.");
    return {rows, heads, d, kv_heads, requests, HeadScale(op, "k_scale", k_scale, kv_heads, q),
            HeadScale(op, "v_scale", v_scale, kv_heads, q)};
}

}  // namespace fv
