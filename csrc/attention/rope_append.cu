// SPDX-License-Identifier: Apache-2.0
// rope_append on CUDA: per-head RMSNorm of q and k, RoPE, and the append of K and V to the paged cache, one launch.
// Results that are not NaN have the bits of the CPU op (rope_append_kernel.cuh says how). A row is left alone when its slot
// is negative, or when its slot or position is out of range.
// Cost: one read of q, k, v and of the rows' table entries, one write of q, K and V. Graph-safe.
// Instantiations: (dtype of q, cache) in {f32 f32, bf16 bf16, bf16 e4m3, f16 f16, f16 e4m3} ; one kernel more, for shapes
// that do not vectorise and other caches: 6.
#include <torch/csrc/stable/library.h>

#include "algo/rope_plan.h"
#include "attention/rope_append_args.h"
#include "common/launch.h"

#include "attention/rope_append_kernel.cuh"

namespace fv {
namespace {

using namespace rope;
static_assert(kRopeGroups * kRopeEach == kMaxHeadDim && kRopeGroups == 4 * 32);

Format format_of(ScalarType t) {
    return t == ScalarType::Float ? kF32 : t == ScalarType::BFloat16 ? kBf16 : t == ScalarType::Half ? kF16 : kE4m3;
}

bool aligned(const void* p, Format f) { return reinterpret_cast<uintptr_t>(p) % (f == kE4m3 ? 8 : 16) == 0; }
bool aligned(const RopeRows& r, Format f) {
    return aligned(r.data, f) && r.row % kRopeEach == 0 && r.head % kRopeEach == 0;
}
bool aligned(const RopeCache& c, Format f) {
    return aligned(c.data, f) && c.page % kRopeEach == 0 && c.slot % kRopeEach == 0 && c.head % kRopeEach == 0;
}

RopeRows rows_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1)}; }
RopeCache cache_of(const Tensor& t, const HeadScale& s) {
    return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), s.data, s.stride};
}
RopeNorm norm_of(const OptTensor& t) {
    return t ? RopeNorm{t->const_data_ptr(), format_of(t->scalar_type())} : RopeNorm{nullptr, kF32};
}

using RopeKernel = void (*)(RopeParams);
RopeKernel teams_kernel(const RopeParams& p) {
    const bool narrow = p.cache_format == kE4m3;
    if (p.format == kF32) return p.cache_format == kF32 ? rope_append_teams_kernel<kF32, kF32> : nullptr;
    if (!narrow && p.cache_format != p.format) return nullptr;
    if (p.format == kBf16) return narrow ? rope_append_teams_kernel<kBf16, kE4m3> : rope_append_teams_kernel<kBf16, kBf16>;
    return narrow ? rope_append_teams_kernel<kF16, kE4m3> : rope_append_teams_kernel<kF16, kF16>;
}

// Whether 8 elements at a time work everywhere: alignment, and no lane on both sides of a boundary of the rotation.
bool vectorises(const RopeParams& p) {
    return p.head_dim % kRopeEach == 0 && p.head_dim <= 32 * kRopeEach && p.rot % (p.style == 0 ? 2 * kRopeEach : kRopeEach) == 0 &&
           aligned(p.q, p.format) && aligned(p.k, p.format) && aligned(p.v, p.format) &&
           aligned(p.k_cache, p.cache_format) && aligned(p.v_cache, p.cache_format) && aligned(p.q_norm.weight, kF32) &&
           aligned(p.k_norm.weight, kF32) && aligned(p.cos_sin, kF32);
}

void rope_append_cuda(Tensor q, const Tensor k, const Tensor v, const Tensor positions, const Tensor slots,
                      const Tensor cos_sin, const OptTensor q_norm, const OptTensor k_norm, const OptTensor k_scale,
                      const OptTensor v_scale, Tensor k_cache, Tensor v_cache, double eps, int64_t rotary_style) {
    const RopeAppendArgs a("rope_append", q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache,
                           v_cache, eps, rotary_style);
    const int64_t heads = a.q_heads + 2 * a.kv_heads;
    if (a.rows * heads == 0) return;
    RopeParams p = {};
    p.q = rows_of(q), p.k = rows_of(k), p.v = rows_of(v);
    p.k_cache = cache_of(k_cache, a.k_scale), p.v_cache = cache_of(v_cache, a.v_scale);
    p.q_norm = norm_of(q_norm), p.k_norm = norm_of(k_norm);
    p.positions = cptr<int32_t>(positions), p.slots = cptr<int64_t>(slots), p.cos_sin = cptr<float>(cos_sin);
    p.max_positions = a.max_positions, p.capacity = a.capacity;
    p.q_heads = static_cast<int32_t>(a.q_heads), p.kv_heads = static_cast<int32_t>(a.kv_heads);
    p.head_dim = static_cast<int32_t>(a.head_dim), p.rot = static_cast<int32_t>(a.rot);
    p.page_size = static_cast<int32_t>(a.page_size), p.style = static_cast<int32_t>(rotary_style);
    p.format = format_of(a.type), p.cache_format = format_of(a.cache_type);
    p.eps = static_cast<float>(eps);

    const Launch launch("rope_append", q);
    const dim3 block(kRopeThreads);
    const bool power_of_two = (p.head_dim & (p.head_dim - 1)) == 0;
    p.inverse_dim = power_of_two ? 1.0f / static_cast<float>(p.head_dim) : 0.0f;
    const RopeKernel kernel = teams_kernel(p);
    if (!kernel || !vectorises(p)) {
        constexpr int kWarps = kRopeThreads / 32;
        const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(ceil_div(heads, kWarps)));
        launch.run(rope_append_any_kernel, grid, block, kWarps * static_cast<size_t>(p.head_dim) * sizeof(float), p);
        return;
    }
    p.team = rope_team(p.head_dim);
    const int teams = kRopeThreads / p.team;
    p.q_blocks = rope_q_blocks(a.rows, ceil_div(p.q_heads, teams), ceil_div(p.kv_heads, teams), launch.props.sms);
    const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(p.q_blocks + 2 * ceil_div(p.kv_heads, teams)));
    launch.run(kernel, grid, block, 0, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("rope_append", TORCH_BOX(&rope_append_cuda)); }

}  // namespace fv
