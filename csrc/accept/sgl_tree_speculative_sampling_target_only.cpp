// SPDX-License-Identifier: Apache-2.0
// sgl_tree_speculative_sampling_target_only on the CPU. Cost: one row of V per request (two with draft_probs).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "accept/sgl_sampling_args.h"

namespace fv {
namespace {

// Tree over a batch of one request's nodes; refused tokens of the row the walk stands on are kept in a list.
struct SamplingTree : SglTree {
    const SglSampling& s;
    std::vector<int32_t> refused;
    SamplingTree(const SglTreeArgs& args, int64_t b, const SglSampling& sampling) : SglTree(args, b), s(sampling) {}
    float coin(int32_t i) const { return s.coins[base + i]; }
    float prob(int32_t node, int32_t child) const {
        const int32_t v = token(child);
        return v >= 0 && v < s.vocab ? s.target[(base + node) * s.vocab + v] : 0.0f;
    }
    void refuse(int32_t node, int32_t child, float p) {
        const int32_t v = token(child);
        if (v < 0 || v >= s.vocab) return;
        refused.push_back(v);
        if (s.draft) s.draft[(base + node) * s.vocab + v] = p;
    }
    void enter() { refused.clear(); }
};

// Balanced tree of neighbours over 32 lanes, in place: the sum is in x[31], inner sums stay for the way down.
void up_sweep(float* x) {
    for (int d = 1; d < 32; d *= 2) {
        for (int i = 2 * d - 1; i < 32; i += 2 * d) x[i] = x[i - d] + x[i];
    }
}
// Exclusive prefix sums of 32 lanes, in place; returns the sum.
float tree_scan(float* x) {
    up_sweep(x);
    const float sum = x[31];
    x[31] = 0.0f;
    for (int d = 16; d >= 1; d /= 2) {
        for (int i = 2 * d - 1; i < 32; i += 2 * d) {
            const float left = x[i - d];
            x[i - d] = x[i];
            x[i] = left + x[i];
        }
    }
    return sum;
}

template <int kVec>
float chunk_sum(const float* x) {  // [1024*kVec]
    float sum = 0.0f;
    for (int w = 0; w < 32; ++w) {
        float lanes[32];
        for (int l = 0; l < 32; ++l) lanes[l] = sgl_items<kVec>(x + (w * 32 + l) * kVec);
        up_sweep(lanes);
        sum = w == 0 ? lanes[31] : sum + lanes[31];
    }
    return sum;
}

// First entry of the chunk with mass and a cumulative sum above u, else the last one with mass.
template <int kVec>
int find_in_chunk(const float* x, float before, float u) {
    float lanes[32][32], warps[32];
    for (int w = 0; w < 32; ++w) {
        for (int l = 0; l < 32; ++l) {
            float sum = 0.0f;
            for (int k = 0; k < kVec; ++k) sum = sum + x[(w * 32 + l) * kVec + k];
            lanes[w][l] = sum;
        }
        warps[w] = tree_scan(lanes[w]);
    }
    tree_scan(warps);
    int last = 0;
    for (int i = 0; i < kSglLanes; ++i) {
        const float base = warps[i / 32] + lanes[i / 32][i % 32];
        float sum = 0.0f;
        for (int k = 0; k < kVec; ++k) {
            const float v = x[i * kVec + k];
            sum = sum + v;
            if (v > 0.0f) {
                last = i * kVec + k;
                if ((base + sum) + before > u) return last;
            }
        }
    }
    return last;
}

// residual: [chunks*1024*kVec], zero behind the vocabulary
template <int kVec>
int64_t sample(const std::vector<float>& residual, int chunks, float coin, int64_t otherwise) {
    constexpr int kSize = kSglLanes * kVec;
    std::vector<float> sums(chunks);
    for (int c = 0; c < chunks; ++c) sums[c] = chunk_sum<kVec>(residual.data() + static_cast<int64_t>(c) * kSize);
    const SglDraw draw = sgl_draw(sums.data(), chunks, coin);
    if (draw.chunk < 0) return otherwise;
    const int64_t first = static_cast<int64_t>(draw.chunk) * kSize;
    return first + find_in_chunk<kVec>(residual.data() + first, draw.before, draw.u);
}

void sgl_tree_speculative_sampling_target_only_cpu(
    Tensor predicts, Tensor accept_index, Tensor accept_token_num, const Tensor candidates, const Tensor retrive_index,
    const Tensor retrive_next_token, const Tensor retrive_next_sibling, const Tensor uniform_samples,
    const Tensor uniform_samples_for_final_sampling, const Tensor target_probs, const std::optional<Tensor> draft_probs,
    double threshold_single, double threshold_acc) {
    const SglTreeArgs a = sgl_check_tree(kSglSamplingOp, predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling);
    const SglSampling s = sgl_check_sampling(a, candidates, uniform_samples, uniform_samples_for_final_sampling, target_probs,
                                             draft_probs, threshold_single, threshold_acc);
    const int vec = sgl_vec(s.vocab), chunks = sgl_chunks(s.vocab);
    torch::stable::parallel_for(0, a.batch, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> residual;
        for (int64_t b = begin; b < end; ++b) {
            SamplingTree tree(a, b, s);
            const SglWalk w = sgl_sampling_walk(tree, a.nodes, a.levels, s.inverse_acc, s.single);
            a.accept_token_num[b] = w.accepted;
            if (tree.flat(w.node) < 0) continue;
            const float* q = s.target + (tree.base + w.node) * s.vocab;
            const bool whole = w.accepted == a.levels - 1;
            const float* p = s.draft && !whole ? s.draft + (tree.base + w.node) * s.vocab : nullptr;
            residual.assign(static_cast<int64_t>(chunks) * kSglLanes * vec, 0.0f);
            for (int64_t i = 0; i < s.vocab; ++i) residual[i] = sgl_residual(q[i], p ? p[i] : 0.0f);
            if (!whole) {
                for (int32_t v : tree.refused) residual[v] = 0.0f;
            }
            const int64_t otherwise = w.refused ? tree.token(w.refused) : s.vocab - 1;
            const int64_t token = vec == 4 ? sample<4>(residual, chunks, s.last_coins[b], otherwise)
                                : vec == 2 ? sample<2>(residual, chunks, s.last_coins[b], otherwise)
                                           : sample<1>(residual, chunks, s.last_coins[b], otherwise);
            tree.predict(tree.flat(w.node), token);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) {
    m.impl("sgl_tree_speculative_sampling_target_only", TORCH_BOX(&sgl_tree_speculative_sampling_target_only_cpu));
}

}  // namespace fv
