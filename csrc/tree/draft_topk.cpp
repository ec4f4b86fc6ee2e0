// SPDX-License-Identifier: Apache-2.0
// draft_topk on the CPU: one row per task. Per row: one pass over the logits (convert, maximum of every block), one for
// the mass; only blocks whose maximum reaches the k-th largest block maximum, a bound of the k-th value, are searched.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "algo/convert.h"
#include "algo/numeric.h"
#include "algo/tree.h"
#include "tree/tree_args.h"

namespace fv {
namespace {

constexpr int64_t kBlock = 128;  // entries with one maximum

// Order-preserving float -> int32: integer maxima vectorise on every x86 level. Its own inverse on bits.
FV_HD int32_t signed_order(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
FV_HD float from_signed_order(int32_t order) { return bits_to_float(static_cast<uint32_t>(signed_order(order))); }

struct LoadFloat {
    using Storage = float;
    FV_HD static float load(float x) { return x; }
};
struct LoadHalf {
    using Storage = uint16_t;
    FV_HD static float load(uint16_t x) { return half_to_float(x); }
};
struct LoadBFloat16 {
    using Storage = uint16_t;
    FV_HD static float load(uint16_t x) { return bf16_to_float(x); }
};

// x[i] = logit as float32, -inf if not finite, +0 for -0; block_max[i / kBlock] = signed order of the block's maximum.
template <class Load>
FV_HD void load_blocks(const void* logits, int64_t n, float* __restrict__ x, int32_t* __restrict__ block_max) {
    const auto* __restrict__ in = static_cast<const typename Load::Storage*>(logits);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        int32_t top = INT32_MIN;
        for (int64_t i = begin; i < end; ++i) {
            const float raw = Load::load(in[i]) + 0.0f;
            const uint32_t bits = is_finite(raw) ? float_to_bits(raw) : 0xff800000u;
            x[i] = bits_to_float(bits);
            const int32_t order = signed_order(static_cast<int32_t>(bits));
            top = order > top ? order : top;
        }
        block_max[begin / kBlock] = top;
    }
}

FV_CLONES void load_float(const void* logits, int64_t n, float* x, int32_t* block_max) {
    load_blocks<LoadFloat>(logits, n, x, block_max);
}
FV_CLONES void load_half(const void* logits, int64_t n, float* x, int32_t* block_max) {
    load_blocks<LoadHalf>(logits, n, x, block_max);
}
FV_CLONES void load_bfloat16(const void* logits, int64_t n, float* x, int32_t* block_max) {
    load_blocks<LoadBFloat16>(logits, n, x, block_max);
}

FV_CLONES uint64_t row_mass(const float* x, int64_t n, float top) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += mass_of(x[i], top);
    return sum;
}

struct Scratch {
    std::vector<float> x;
    std::vector<int32_t> block_max, order;
    std::vector<uint64_t> keys;
};

using LoadRow = void (*)(const void*, int64_t, float*, int32_t*);

void topk_row(
    LoadRow load, const void* logits, int64_t n, int64_t k, const int64_t* d2t, Scratch& s, float* values,
    int32_t* tokens) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    load(logits, n, s.x.data(), s.block_max.data());
    s.order.assign(s.block_max.begin(), s.block_max.end());
    const int64_t nth = std::min(k, blocks) - 1;
    std::nth_element(s.order.begin(), s.order.begin() + nth, s.order.end(), std::greater<>());
    const int32_t bound = blocks < k ? INT32_MIN : s.order[nth];  // at least k entries reach it
    const float top = from_signed_order(*std::max_element(s.order.begin(), s.order.end()));

    s.keys.clear();
    const float least = bound == INT32_MIN ? minus_infinity() : from_signed_order(bound);
    for (int64_t block = 0; block < blocks; ++block) {
        if (s.block_max[block] < bound) continue;
        const int64_t end = std::min(n, (block + 1) * kBlock);
        for (int64_t i = block * kBlock; i < end; ++i) {
            if (s.x[i] >= least) s.keys.push_back(rank_key(s.x[i], static_cast<uint32_t>(i)));
        }
    }
    std::partial_sort(s.keys.begin(), s.keys.begin() + k, s.keys.end(), std::greater<>());

    const bool empty = top == minus_infinity();
    const float log_sum = empty ? 0.0f : log_mass(row_mass(s.x.data(), n, top));
    for (int64_t j = 0; j < k; ++j) {
        const uint32_t id = key_index(s.keys[j]);
        values[j] = empty ? minus_infinity() : (s.x[id] - top) - log_sum;
        const uint64_t target = id + (d2t ? static_cast<uint64_t>(d2t[id]) : 0);
        tokens[j] = static_cast<int32_t>(target);
    }
}

void draft_topk_cpu(
    const Tensor logits, const OptTensor d2t, const OptTensor cu_nodes, Tensor values, Tensor tokens) {
    const auto [rows, n, k] = check_draft_topk(logits, d2t, cu_nodes, values, tokens);
    const int32_t last = cu_nodes ? cptr<int32_t>(*cu_nodes)[cu_nodes->size(0) - 1] : 0;
    const int64_t valid = cu_nodes ? std::clamp<int64_t>(last, 0, rows) : rows;
    const LoadRow load = logits.scalar_type() == ScalarType::Float ? load_float
                       : logits.scalar_type() == ScalarType::Half  ? load_half
                                                                   : load_bfloat16;
    const int64_t stride = logits.stride(0) * logits.element_size();
    const char* in = cptr<char>(logits);
    const int64_t* offsets = cptr<int64_t>(d2t);
    float* value_out = mptr<float>(values);
    int32_t* token_out = mptr<int32_t>(tokens);
    torch::stable::parallel_for(0, valid, 1, [&](int64_t begin, int64_t end) {
        Scratch s{std::vector<float>(n), std::vector<int32_t>((n + kBlock - 1) / kBlock), {}, {}};
        for (int64_t r = begin; r < end; ++r) {
            topk_row(load, in + r * stride, n, k, offsets, s, value_out + r * k, token_out + r * k);
        }
    });
    std::fill(value_out + valid * k, value_out + rows * k, 0.0f);
    std::fill(token_out + valid * k, token_out + rows * k, 0);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("draft_topk", TORCH_BOX(&draft_topk_cpu)); }

}  // namespace fv
