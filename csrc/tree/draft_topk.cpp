// SPDX-License-Identifier: Apache-2.0
// draft_topk on the CPU: one row per task. Per row: one pass over the logits (convert, maximum of every block), one for
// the mass; only blocks whose maximum reaches the k-th largest block maximum, a bound of the k-th value, are searched.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "algo/convert.h"
#include "algo/coupling.h"
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

FV_CLONES uint64_t row_mass(const float* x, int64_t n, float top, float sharpness) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += mass_of((x[i] - top) * sharpness, 0.0f);
    return sum;
}

// x[i] becomes the coupled score of draft id i; block_max as of load_blocks. kBlock entries at a time, so that it vectorises.
FV_CLONES void couple_row(float* x, int64_t n, const int64_t* d2t, const Coupling& c, int32_t* block_max) {
    const Coupling own = c;
    alignas(64) uint32_t id[kBlock], bits[kBlock];
    alignas(64) float noise[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int count = static_cast<int>(begin + kBlock < n ? kBlock : n - begin);
        for (int i = 0; i < kBlock; ++i) id[i] = static_cast<uint32_t>(begin + i);
        if (d2t) {
            for (int i = 0; i < count; ++i) id[i] += static_cast<uint32_t>(static_cast<uint64_t>(d2t[begin + i]));
        }
        for (int i = 0; i < kBlock; ++i) bits[i] = noise_bits(id[i], own);
        for (int i = 0; i < kBlock; ++i) noise[i] = gumbel_from_bits(bits[i]);
        int32_t top = INT32_MIN;
        for (int i = 0; i < count; ++i) {
            const float score = scale_logit(x[begin + i], own.temperature) + noise[i] + 0.0f;
            x[begin + i] = score;
            const int32_t order = signed_order(static_cast<int32_t>(float_to_bits(score)));
            top = order > top ? order : top;
        }
        block_max[begin / kBlock] = top;
    }
}

struct Scratch {
    std::vector<float> x;
    std::vector<int32_t> block_max, order;
    std::vector<uint64_t> keys;
};

using LoadRow = void (*)(const void*, int64_t, float*, int32_t*);

void topk_row(
    LoadRow load, const void* logits, int64_t n, int64_t k, const int64_t* d2t, const Coupling& coupling, Scratch& s,
    float* values, int32_t* tokens) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    load(logits, n, s.x.data(), s.block_max.data());
    if (coupling.noisy()) couple_row(s.x.data(), n, d2t, coupling, s.block_max.data());
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
    const float log_sum = empty ? 0.0f : log_mass(row_mass(s.x.data(), n, top, coupling.sharpness));
    for (int64_t j = 0; j < k; ++j) {
        const uint32_t id = key_index(s.keys[j]);
        values[j] = empty ? minus_infinity() : (s.x[id] - top) * coupling.sharpness - log_sum;
        const uint64_t target = id + (d2t ? static_cast<uint64_t>(d2t[id]) : 0);
        tokens[j] = static_cast<int32_t>(target);
    }
}

void draft_topk_cpu(
    const Tensor logits, const OptTensor d2t, const OptTensor cu_nodes, const OptTensor temperature, const OptTensor seed,
    const OptTensor prefix_len, const OptTensor active, Tensor values, Tensor tokens, int64_t level, double sharpness) {
    const auto [rows, n, k, batch, each] =
        check_draft_topk(logits, d2t, cu_nodes, temperature, seed, prefix_len, active, values, tokens, level, sharpness);
    const int32_t last = cu_nodes ? cptr<int32_t>(*cu_nodes)[cu_nodes->size(0) - 1] : 0;
    int64_t valid = cu_nodes ? std::clamp<int64_t>(last, 0, rows) : rows;
    std::vector<Coupling> requests(batch < 0 ? 1 : 0);  // of the active ones
    for (int64_t b = 0; b < batch; ++b) {
        if (cptr<int32_t>(active)[b] == 0) continue;
        requests.push_back(resolve_coupling(cptr<float>(temperature)[b], cptr<int64_t>(seed)[b], cptr<int32_t>(prefix_len)[b],
                                            static_cast<int32_t>(level), static_cast<float>(sharpness)));
    }
    const int64_t of_each = batch < 0 ? rows : each;
    valid = std::min(valid, static_cast<int64_t>(requests.size()) * of_each);
    const LoadRow load = logits.scalar_type() == ScalarType::Float ? load_float
                       : logits.scalar_type() == ScalarType::Half  ? load_half
                                                                   : load_bfloat16;
    const int64_t stride = logits.stride(0) * logits.element_size();
    const char* in = cptr<char>(logits);
    const int64_t* offsets = cptr<int64_t>(d2t);
    float* value_out = mptr<float>(values);
    int32_t* token_out = mptr<int32_t>(tokens);
    const int64_t wide = n, candidates = k;
    torch::stable::parallel_for(0, valid, 1, [&](int64_t begin, int64_t end) {
        Scratch s{std::vector<float>(wide), std::vector<int32_t>((wide + kBlock - 1) / kBlock), {}, {}};
        for (int64_t r = begin; r < end; ++r) {
            topk_row(load, in + r * stride, wide, candidates, offsets, requests[r / of_each], s, value_out + r * candidates,
                     token_out + r * candidates);
        }
    });
    std::fill(value_out + valid * k, value_out + rows * k, 0.0f);
    std::fill(token_out + valid * k, token_out + rows * k, 0);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("draft_topk", TORCH_BOX(&draft_topk_cpu)); }

}  // namespace fv
