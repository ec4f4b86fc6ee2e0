// SPDX-License-Identifier: Apache-2.0
// grow_tree on the CPU: one request per task. Cost O(k*k + k*(W + H)) per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "algo/tree.h"
#include "tree/tree_args.h"

namespace fv {
namespace {

struct Level {
    int64_t level, k, words, row_bytes;
    // of one request: k candidates per source row (1 row at level 0, the k beam rows later)
    const float* values;       // [1 or k, k]
    const int32_t* tokens;     // [1 or k, k]
    const char* hidden;        // [1 or k] rows, hidden_stride bytes apart
    int64_t hidden_stride;
    int32_t position;
    // beam, read (level >= 1) and replaced
    float* scores;             // [k]
    int32_t* pool_index;       // [k]
    uint64_t* mask;            // [k, W]
    int32_t *next_tokens, *next_positions;  // [k]
    char* next_hidden;         // [k, row_bytes]
    // this request's pool row
    float* pool_scores;
    int32_t *pool_tokens, *pool_parents;    // [M]
};

// First level: the candidates are the beam, in the order given.
void first_level(const Level& s) {
    for (int64_t j = 0; j < s.k; ++j) {
        s.scores[j] = s.pool_scores[j] = not_nan(s.values[j]);
        s.next_tokens[j] = s.pool_tokens[j] = s.tokens[j];
        s.pool_parents[j] = -1;
        s.pool_index[j] = static_cast<int32_t>(j);
        s.next_positions[j] = s.position;
        write_mask_row(s.mask + j * s.words, nullptr, s.words, j);
        std::copy_n(s.hidden, s.row_bytes, s.next_hidden + j * s.row_bytes);
    }
}

// keys [k*k], old_mask [k*W]: scratch.
void next_level(const Level& s, uint64_t* keys, uint64_t* old_mask) {
    const int64_t k = s.k, offset = pool_offset(s.level, k);
    for (int64_t c = 0; c < k * k; ++c) {
        const float score = not_nan(s.scores[c / k] + s.values[c]);
        s.pool_scores[offset + c] = score;
        s.pool_tokens[offset + c] = s.tokens[c];
        s.pool_parents[offset + c] = s.pool_index[c / k];
        keys[c] = rank_key(score, static_cast<uint32_t>(c));
    }
    uint64_t best[kMaxBeam];
    best_keys(keys, k * k, k, best);
    std::copy_n(s.mask, k * s.words, old_mask);
    for (int64_t i = 0; i < k; ++i) {
        const int64_t c = key_index(best[i]), parent = c / k;
        s.scores[i] = s.pool_scores[offset + c];
        s.next_tokens[i] = s.tokens[c];
        s.pool_index[i] = static_cast<int32_t>(offset + c);
        s.next_positions[i] = s.position;
        write_mask_row(s.mask + i * s.words, old_mask + parent * s.words, s.words, s.level * k + i);
        std::copy_n(s.hidden + parent * s.hidden_stride, s.row_bytes, s.next_hidden + i * s.row_bytes);
    }
}

void grow_tree_cpu(
    const Tensor values, const Tensor tokens, const Tensor hidden, const Tensor prefix_len, const Tensor active,
    Tensor cu_nodes, Tensor scores, Tensor pool_index, Tensor mask, Tensor pool_scores, Tensor pool_tokens,
    Tensor pool_parents, Tensor next_tokens, Tensor next_positions, Tensor next_hidden, int64_t level) {
    const auto [batch, k, words, pool] = check_grow_tree(
        values, tokens, hidden, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
        pool_parents, next_tokens, next_positions, next_hidden, level);
    const int64_t beam = batch * k;

    const int32_t *prefix = cptr<int32_t>(prefix_len), *live = cptr<int32_t>(active);
    std::vector<int32_t> rank(batch + 1, 0);
    for (int64_t b = 0; b < batch; ++b) rank[b + 1] = rank[b] + (live[b] != 0);
    if (level == 0) {
        int32_t* cu = mptr<int32_t>(cu_nodes);
        for (int64_t b = 0; b <= batch; ++b) cu[b] = static_cast<int32_t>(k * rank[b]);
    }

    const int64_t item = static_cast<int64_t>(hidden.element_size());
    Level all{level, k, words, hidden.size(1) * item, cptr<float>(values), cptr<int32_t>(tokens),
              cptr<char>(hidden), hidden.stride(0) * item, 0, mptr<float>(scores), mptr<int32_t>(pool_index),
              mptr<uint64_t>(mask), mptr<int32_t>(next_tokens), mptr<int32_t>(next_positions), mptr<char>(next_hidden),
              mptr<float>(pool_scores), mptr<int32_t>(pool_tokens), mptr<int32_t>(pool_parents)};
    torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
        std::vector<uint64_t> scratch(k * k + k * words);
        for (int64_t b = begin; b < end; ++b) {
            if (live[b] == 0) continue;
            const int64_t source = level == 0 ? rank[b] : k * rank[b], row = k * rank[b];
            Level s = all;
            s.values += source * k, s.tokens += source * k, s.hidden += source * s.hidden_stride;
            s.position = static_cast<int32_t>(prefix[b] + level);
            s.scores += row, s.pool_index += row, s.mask += row * words;
            s.next_tokens += row, s.next_positions += row, s.next_hidden += row * s.row_bytes;
            s.pool_scores += b * pool, s.pool_tokens += b * pool, s.pool_parents += b * pool;
            if (level > 0) {
                next_level(s, scratch.data(), scratch.data() + k * k);
                continue;
            }
            std::fill_n(s.pool_scores, pool, minus_infinity());
            std::fill_n(s.pool_tokens, pool, 0);
            std::fill_n(s.pool_parents, pool, -1);
            first_level(s);
        }
    });

    const int64_t used = k * rank[batch];  // the rest is padding
    std::fill(all.scores + used, all.scores + beam, 0.0f);
    std::fill(all.pool_index + used, all.pool_index + beam, 0);
    std::fill(all.mask + used * words, all.mask + beam * words, 0);
    std::fill(all.next_tokens + used, all.next_tokens + beam, 0);
    std::fill(all.next_positions + used, all.next_positions + beam, 0);
    std::fill(all.next_hidden + used * all.row_bytes, all.next_hidden + beam * all.row_bytes, 0);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("grow_tree", TORCH_BOX(&grow_tree_cpu)); }

}  // namespace fv
