// SPDX-License-Identifier: Apache-2.0
// Arguments of skinny_linear and skinny_qkv, checked, for the CPU and CUDA versions.
#pragma once
#include "common/check.h"

namespace fv {

enum SkinnyKind : int64_t { kSkinnyPlain = 0, kSkinnyAdd = 1, kSkinnySiluMul = 2 };

struct SkinnySizes {
    int64_t rows, inner, outer;  // R, K, N
    ScalarType type;
};

inline SkinnySizes check_skinny(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& norm,
                                double eps) {
    check_tensor(op, "x", x, {ScalarType::BFloat16, ScalarType::Float, ScalarType::Half}, {kAny, kAny}, x, true);
    const ScalarType type = x.scalar_type();
    const int64_t inner = x.size(1);
    check_tensor(op, "weight", weight, {type}, {kAny, inner}, x);
    const int64_t outer = weight.size(0);
    FV_CHECK(inner > 0 && inner % 32 == 0 && outer % 16 == 0, op, ": weight must be [N, K] with N a multiple of 16 and K of 32; got ",
             describe(weight), ". Fix: use a plain linear.");
    check_optional(op, "bias", bias, {type}, {outer}, x);
    check_optional(op, "norm", norm, {type}, {inner}, x);
    FV_CHECK(eps >= 0, op, ": eps must be >= 0; got ", eps, ". Fix: pass the model's rms_norm_eps.");
    return {x.size(0), inner, outer, type};
}

inline SkinnySizes check_skinny_linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& norm,
                                       const Tensor& out, double eps, int64_t kind, const OptTensor& copy) {
    constexpr const char* op = "skinny_linear";
    const SkinnySizes s = check_skinny(op, x, weight, bias, norm, eps);
    FV_CHECK(kind >= kSkinnyPlain && kind <= kSkinnySiluMul, op, ": kind must be 0 (plain), 1 (add to out) or 2 (silu of the first half times the second); got ",
             kind, ". Fix: pass one of them.");
    check_output(op, "out", out, {s.type}, {s.rows, kind == kSkinnySiluMul ? s.outer / 2 : s.outer}, x);
    FV_CHECK(!copy || kind != kSkinnySiluMul, op, ": copy must be None for kind 2; got a tensor. Fix: copy the result.");
    check_output(op, "copy", copy, {s.type}, {s.rows, s.outer}, x);
    return s;
}

struct QkvSizes {
    SkinnySizes s;
    int64_t heads, kv_heads, head_dim, max_positions, page_size, capacity;
};

inline QkvSizes check_skinny_qkv(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& norm,
                                 const Tensor& positions, const Tensor& slots, const Tensor& cos_sin, const Tensor& q,
                                 const Tensor& k_cache, const Tensor& v_cache, double eps) {
    constexpr const char* op = "skinny_qkv";
    const SkinnySizes s = check_skinny(op, x, weight, bias, norm, eps);
    check_output(op, "q", q, {s.type}, {s.rows, kAny, kAny}, x);
    const int64_t heads = q.size(1), head_dim = q.size(2);
    FV_CHECK(head_dim > 0 && head_dim % 16 == 0, op, ": q must have a head_dim that is a multiple of 16; got ", describe(q),
             ". Fix: use skinny_linear and rope_append.");
    check_tensor(op, "positions", positions, {ScalarType::Int}, {s.rows}, x);
    check_tensor(op, "slots", slots, {ScalarType::Long}, {s.rows}, x);
    check_tensor(op, "cos_sin", cos_sin, {ScalarType::Float}, {kAny, head_dim}, x);
    check_output(op, "k_cache", k_cache, {s.type}, {kAny, kAny, kAny, head_dim}, x);
    const int64_t pages = k_cache.size(0), page_size = k_cache.size(1), kv_heads = k_cache.size(2);
    check_output(op, "v_cache", v_cache, {s.type}, {pages, page_size, kv_heads, head_dim}, x);
    FV_CHECK(s.outer == (heads + 2 * kv_heads) * head_dim, op, ": weight must have ", (heads + 2 * kv_heads) * head_dim,
             " rows (q, k and v heads); got ", s.outer, ". Fix: merge the three projections.");
    return {s, heads, kv_heads, head_dim, cos_sin.size(0), page_size, pages * page_size};
}

}  // namespace fv
