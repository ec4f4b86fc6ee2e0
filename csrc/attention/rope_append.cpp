// SPDX-License-Identifier: Apache-2.0
// rope_append on the CPU: per-head RMSNorm, RoPE and append, fp32 throughout, parallel over rows.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "attention/rope_append_args.h"
#include "common/convert.h"

namespace fv {
namespace {

constexpr const char* kOp = "rope_append";

// Eight neighbours in turn, then the groups in pairs, pairs of pairs, ...: the order of a GPU's lanes that hold eight each.
FV_HD float sum_of_squares(const float* __restrict x, int d) {
    float group[kMaxHeadDim / 8];
    const int groups = (d + 7) / 8;
    for (int t = 0; t < groups; ++t) {
        float sum = 0.0f;
        for (int i = 8 * t; i < 8 * t + 8 && i < d; ++i) sum += x[i] * x[i];
        group[t] = sum;
    }
    for (int step = 1; step < groups; step *= 2) {
        for (int t = 0; t + step < groups; t += 2 * step) group[t] += group[t + step];
    }
    return group[0];
}

// One head: x [d] -> y [d] = rope(norm(x)) / scale. weight null: no norm; cos_sin null: no rotation.
FV_CLONES void transform_head(const float* __restrict x, float* __restrict y, int d, const float* __restrict weight,
                              float eps, const float* __restrict cos_sin, int rot, int style, float scale) {
    if (weight) {
        const float r = 1.0f / std::sqrt(sum_of_squares(x, d) / static_cast<float>(d) + eps);
        for (int i = 0; i < d; ++i) y[i] = x[i] * r * weight[i];
    } else {
        for (int i = 0; i < d; ++i) y[i] = x[i];
    }
    if (cos_sin) {
        const int half = rot / 2;
        const float *c = cos_sin, *s = cos_sin + half;
        if (style == 0) {
            for (int i = 0; i < half; ++i) {
                const float a = y[i], b = y[i + half];
                y[i] = a * c[i] - b * s[i];
                y[i + half] = b * c[i] + a * s[i];
            }
        } else {
            for (int i = 0; i < half; ++i) {
                const float a = y[2 * i], b = y[2 * i + 1];
                y[2 * i] = a * c[i] - b * s[i];
                y[2 * i + 1] = b * c[i] + a * s[i];
            }
        }
    }
    if (scale != 1.0f) {
        for (int i = 0; i < d; ++i) y[i] = y[i] / scale;
    }
}

FV_CLONES void load_head(const void* src, ScalarType type, float* dst, int d) { load_row(src, type, dst, d); }

std::vector<float> norm_weight(const OptTensor& t, int64_t d) {
    if (!t) return {};
    std::vector<float> w(d);
    load_head(t->const_data_ptr(), t->scalar_type(), w.data(), static_cast<int>(d));
    return w;
}

void rope_append_cpu(Tensor q, const Tensor k, const Tensor v, const Tensor positions, const Tensor slots,
                     const Tensor cos_sin, const std::optional<Tensor> q_norm, const std::optional<Tensor> k_norm,
                     const std::optional<Tensor> k_scale, const std::optional<Tensor> v_scale, Tensor k_cache,
                     Tensor v_cache, double eps, int64_t rotary_style) {
    const RopeAppendArgs args(kOp, q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache,
                              eps, rotary_style);
    const auto [rows, q_heads, kv_heads, d, rot, max_positions, page_size, capacity, type, cache_type, ks, vs] = args;
    const std::vector<float> qw = norm_weight(q_norm, d), kw = norm_weight(k_norm, d);
    const int64_t* slot = cptr<int64_t>(slots);
    const int32_t* position = cptr<int32_t>(positions);
    for (int64_t r = 0; r < rows; ++r) {
        if (slot[r] < 0) continue;
        FV_CHECK(slot[r] < capacity, kOp, ": slots must be below ", capacity, " (pages * page_size); got ", slot[r],
                 " in row ", r, ". Fix: reserve pages for prompt + new tokens + the tree at admission.");
        FV_CHECK(position[r] >= 0 && position[r] < max_positions, kOp, ": positions must be in [0, ", max_positions,
                 ") (rows of cos_sin); got ", position[r], " in row ", r, ". Fix: build cos_sin for the longest sequence.");
    }

    const int64_t elem = element_bytes(type), cache_elem = element_bytes(k_cache.scalar_type());
    const float* table = cptr<float>(cos_sin);
    const int dim = static_cast<int>(d), style = static_cast<int>(rotary_style), width = static_cast<int>(rot);
    const float epsilon = static_cast<float>(eps);
    const int64_t grain = 1 + (1 << 16) / (1 + (q.size(1) + 2 * kv_heads) * d);
    char* const q_data = mptr<char>(q);
    const char *const k_data = cptr<char>(k), *const v_data = cptr<char>(v);
    char *const k_rows = mptr<char>(k_cache), *const v_rows = mptr<char>(v_cache);
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
        std::vector<float> x(d), y(d);
        for (int64_t r = begin; r < end; ++r) {
            if (slot[r] < 0) continue;
            const float* cs = table + position[r] * rot;
            for (int64_t h = 0; h < q.size(1); ++h) {
                char* p = q_data + (r * q.stride(0) + h * q.stride(1)) * elem;
                load_head(p, type, x.data(), dim);
                transform_head(x.data(), y.data(), dim, qw.empty() ? nullptr : qw.data(), epsilon, cs, width, style, 1.0f);
                store_row(y.data(), type, p, dim);
            }
            const int64_t page = slot[r] / page_size, offset = slot[r] % page_size;
            for (int64_t h = 0; h < kv_heads; ++h) {
                load_head(k_data + (r * k.stride(0) + h * k.stride(1)) * elem, type, x.data(), dim);
                transform_head(x.data(), y.data(), dim, kw.empty() ? nullptr : kw.data(), epsilon, cs, width, style, ks[h]);
                store_row(y.data(), k_cache.scalar_type(),
                          k_rows + (page * k_cache.stride(0) + offset * k_cache.stride(1) + h * k_cache.stride(2)) * cache_elem,
                          dim);
                load_head(v_data + (r * v.stride(0) + h * v.stride(1)) * elem, type, x.data(), dim);
                transform_head(x.data(), y.data(), dim, nullptr, epsilon, nullptr, 0, style, vs[h]);
                store_row(y.data(), v_cache.scalar_type(),
                          v_rows + (page * v_cache.stride(0) + offset * v_cache.stride(1) + h * v_cache.stride(2)) * cache_elem,
                          dim);
            }
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("rope_append", TORCH_BOX(&rope_append_cpu)); }

}  // namespace fv
