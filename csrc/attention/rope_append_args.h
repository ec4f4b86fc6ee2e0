// SPDX-License-Identifier: Apache-2.0
// Arguments of rope_append: the checks that the CPU and the CUDA op share, and the sizes they compute from them.
#pragma once
#include "common/paged.h"

namespace fv {

constexpr int64_t kMaxHeadDim = 1024;

struct RopeAppendArgs {
    int64_t rows, q_heads, kv_heads, head_dim, rot, max_positions, page_size, capacity;
    ScalarType type, cache_type;
    HeadScale k_scale, v_scale;

    RopeAppendArgs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
                   const Tensor& slots, const Tensor& cos_sin, const OptTensor& q_norm, const OptTensor& k_norm,
                   const OptTensor& k_scale_, const OptTensor& v_scale_, const Tensor& k_cache, const Tensor& v_cache,
                   double eps, int64_t rotary_style) {
        constexpr auto F32 = ScalarType::Float, F16 = ScalarType::Half, BF16 = ScalarType::BFloat16;
        check_output(op, "q", q, {F32, BF16, F16}, {kAny, kAny, kAny}, q);
        rows = q.size(0), q_heads = q.size(1), head_dim = q.size(2);
        type = q.scalar_type();
        FV_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim, op, ": head_dim must be in [1, ", kMaxHeadDim, "]; got ", describe(q),
                 ". Fix: pass q [R, Hq, D].");
        check_tensor(op, "k", k, {type}, {rows, kAny, head_dim}, q, true);
        kv_heads = k.size(1);
        check_tensor(op, "v", v, {type}, {rows, kv_heads, head_dim}, q, true);
        check_tensor(op, "positions", positions, {ScalarType::Int}, {rows}, q);
        check_tensor(op, "slots", slots, {ScalarType::Long}, {rows}, q);
        check_tensor(op, "cos_sin", cos_sin, {F32}, {kAny, kAny}, q);
        rot = cos_sin.size(1), max_positions = cos_sin.size(0);
        FV_CHECK(rot % 2 == 0 && rot <= head_dim, op, ": cos_sin must have an even width of at most ", head_dim,
                 "; got ", describe(cos_sin), ". Fix: pass rot/2 cosines then rot/2 sines, rot <= head_dim.");
        check_output(op, "k_cache", k_cache, {F32, BF16, F16, ScalarType::Float8_e4m3fn},
                     {kAny, kAny, kv_heads, head_dim}, q);
        cache_type = k_cache.scalar_type();
        page_size = k_cache.size(1), capacity = k_cache.size(0) * page_size;
        check_output(op, "v_cache", v_cache, {cache_type}, {k_cache.size(0), page_size, kv_heads, head_dim}, q);
        FV_CHECK(rotary_style == 0 || rotary_style == 1, op, ": rotary_style must be 0 (neox) or 1 (gptj); got ",
                 rotary_style, ". Fix: pass one of the two.");
        FV_CHECK(eps >= 0, op, ": eps must be >= 0; got ", eps, ". Fix: pass the model's rms_norm_eps.");
        check_optional(op, "q_norm", q_norm, {F32, BF16, F16}, {head_dim}, q);
        check_optional(op, "k_norm", k_norm, {F32, BF16, F16}, {head_dim}, q);
        k_scale = HeadScale(op, "k_scale", k_scale_, kv_heads, q);
        v_scale = HeadScale(op, "v_scale", v_scale_, kv_heads, q);
    }
};

}  // namespace fv
