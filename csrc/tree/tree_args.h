// SPDX-License-Identifier: Apache-2.0
// Argument checks of the tree ops, shared by the CPU and the CUDA versions: one text for both.
#pragma once
#include <algorithm>

#include "common/check.h"
#include "common/types.h"
#include "algo/coupling.h"
#include "algo/tree.h"

namespace fv {

struct DraftTopkSizes {
    int64_t rows, n, k;
    int64_t batch, each;  // coupled: requests, and rows of each; batch -1: not coupled
};

inline DraftTopkSizes check_draft_topk(
    const Tensor& logits, const OptTensor& d2t, const OptTensor& cu_nodes, const OptTensor& temperature,
    const OptTensor& seed, const OptTensor& prefix_len, const OptTensor& active, const Tensor& values, const Tensor& tokens,
    int64_t level, double sharpness) {
    constexpr const char* kOp = "draft_topk";
    check_tensor(kOp, "logits", logits, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {kAny, kAny},
                 logits, true);
    const int64_t rows = logits.size(0), n = logits.size(1);
    FV_CHECK(n <= kMaxVocab, kOp, ": logits must be at most ", kMaxVocab, " entries wide; got ", describe(logits),
             ". Fix: pass one vocabulary row per node.");
    check_tensor(kOp, "values", values, {ScalarType::Float}, {rows, kAny}, logits);
    const int64_t k = values.size(1), limit = std::min<int64_t>(n, kMaxBeam);
    FV_CHECK(k >= 1 && k <= limit, kOp, ": values must be 1..", limit,
             " candidates wide (at most the draft vocabulary and ", kMaxBeam, "); got ", describe(values), ". Fix: choose k in that range.");
    check_tensor(kOp, "tokens", tokens, {ScalarType::Int}, {rows, k}, logits);
    check_optional(kOp, "d2t", d2t, {ScalarType::Long}, {n}, logits);
    check_optional(kOp, "cu_nodes", cu_nodes, {ScalarType::Int}, {kAny}, logits);
    FV_CHECK(!cu_nodes || cu_nodes->size(0) >= 1, kOp, ": cu_nodes must be int32 [B+1]; got ", describe(*cu_nodes),
             ". Fix: pass prefix sums that start with 0, or None.");
    if (!temperature) {
        FV_CHECK(!seed && !prefix_len && !active, kOp,
                 ": seed, prefix_len and active must be given with temperature, or not at all; got no temperature. "
                 "Fix: pass all four for coupled rows, none otherwise.");
        return {rows, n, k, -1, 0};
    }
    FV_CHECK(seed && prefix_len && active, kOp,
             ": temperature must come with seed, prefix_len and active; got it without. "
             "Fix: pass all four for coupled rows, none otherwise.");
    check_tensor(kOp, "temperature", *temperature, {ScalarType::Float}, {kAny}, logits);
    const int64_t batch = temperature->size(0);
    check_optional(kOp, "seed", seed, {ScalarType::Long}, {batch}, logits);
    check_optional(kOp, "prefix_len", prefix_len, {ScalarType::Int}, {batch}, logits);
    check_optional(kOp, "active", active, {ScalarType::Int}, {batch}, logits);
    FV_CHECK(batch == 0 ? rows == 0 : rows % batch == 0, kOp, ": logits must be a multiple of the batch of ", batch,
             " rows; got ", rows, ". Fix: pass one row per request at level 0 and k rows later.");
    FV_CHECK(level >= 0 && level < kMaxNodes, kOp, ": level must be in 0..", kMaxNodes - 1, "; got ", level,
             ". Fix: count draft levels from 0.");
    FV_CHECK(sharpness > 0 && sharpness <= kMaxSharpness, kOp, ": sharpness must be above 0 and at most ", kMaxSharpness,
             "; got ", sharpness, ". Fix: leave it out.");
    return {rows, n, k, batch, batch == 0 ? 0 : rows / batch};
}

struct GrowTreeSizes {
    int64_t batch, k, words, pool;
};

inline GrowTreeSizes check_grow_tree(
    const Tensor& values, const Tensor& tokens, const Tensor& hidden, const Tensor& prefix_len, const Tensor& active,
    const Tensor& cu_nodes, const Tensor& scores, const Tensor& pool_index, const Tensor& mask,
    const Tensor& pool_scores, const Tensor& pool_tokens, const Tensor& pool_parents, const Tensor& next_tokens,
    const Tensor& next_positions, const Tensor& next_hidden, int64_t level) {
    constexpr const char* kOp = "grow_tree";
    const Tensor& like = values;
    check_tensor(kOp, "values", values, {ScalarType::Float}, {kAny, kAny}, like);
    check_tensor(kOp, "prefix_len", prefix_len, {ScalarType::Int}, {kAny}, like);
    const int64_t batch = prefix_len.size(0), k = values.size(1);
    FV_CHECK(k >= 1 && k <= kMaxBeam, kOp, ": values must be 1..", kMaxBeam, " candidates wide; got ", describe(values),
             ". Fix: draft with k in that range.");
    FV_CHECK(level >= 0 && level < kMaxNodes, kOp, ": level must be in 0..", kMaxNodes - 1, "; got ", level,
             ". Fix: count draft levels from 0.");
    const int64_t beam = batch * k, rows = level == 0 ? batch : beam;
    check_tensor(kOp, "values", values, {ScalarType::Float}, {rows, k}, like);
    check_tensor(kOp, "tokens", tokens, {ScalarType::Int}, {rows, k}, like);
    check_tensor(kOp, "hidden", hidden, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double},
                 {rows, kAny}, like, true);
    check_tensor(kOp, "active", active, {ScalarType::Int}, {batch}, like);
    check_tensor(kOp, "cu_nodes", cu_nodes, {ScalarType::Int}, {batch + 1}, like);
    check_tensor(kOp, "scores", scores, {ScalarType::Float}, {beam}, like);
    check_tensor(kOp, "pool_index", pool_index, {ScalarType::Int}, {beam}, like);
    check_tensor(kOp, "mask", mask, {ScalarType::Long}, {beam, kAny}, like);
    check_tensor(kOp, "pool_scores", pool_scores, {ScalarType::Float}, {batch, kAny}, like);
    const int64_t pool = pool_scores.size(1), words = mask.size(1), columns = (level + 1) * k;
    check_tensor(kOp, "pool_tokens", pool_tokens, {ScalarType::Int}, {batch, pool}, like);
    check_tensor(kOp, "pool_parents", pool_parents, {ScalarType::Int}, {batch, pool}, like);
    check_tensor(kOp, "next_tokens", next_tokens, {ScalarType::Int}, {beam}, like);
    check_tensor(kOp, "next_positions", next_positions, {ScalarType::Int}, {beam}, like);
    check_tensor(kOp, "next_hidden", next_hidden, {hidden.scalar_type()}, {beam, hidden.size(1)}, like);
    FV_CHECK(pool >= pool_end(level, k), kOp, ": pool_scores must be at least ", pool_end(level, k),
             " entries wide at level ", level, " with k ", k, "; got ", pool,
             ". Fix: allocate k + (levels-1)*k*k entries per request.");
    FV_CHECK(words <= kMaxMaskWords && 64 * words >= columns, kOp, ": mask must be ", (columns + 63) / 64, "..",
             kMaxMaskWords, " words wide at level ", level, " with k ", k, "; got ", words,
             ". Fix: allocate ceil(levels*k/64) words per row.");
    FV_CHECK(beam == 0 || hidden.size(1) == 0 || hidden.const_data_ptr() != next_hidden.const_data_ptr(), kOp,
             ": next_hidden must be another buffer than hidden; got the same one. Fix: use two buffers in turn.");
    return {batch, k, words, pool};
}

struct BuildTreeSizes {
    int64_t batch, pool, rows, words;
};

inline BuildTreeSizes check_build_tree(
    const Tensor& pool_scores, const Tensor& pool_tokens, const Tensor& pool_parents, const Tensor& root_tokens,
    const Tensor& prefix_len, const Tensor& active, const Tensor& tokens, const Tensor& parents, const Tensor& mask,
    const Tensor& depth, const Tensor& positions, const Tensor& cu_nodes, const Tensor& flags, int64_t num_nodes,
    int64_t vocab_size) {
    constexpr const char* kOp = "build_tree";
    const Tensor& like = pool_scores;
    check_tensor(kOp, "pool_scores", pool_scores, {ScalarType::Float}, {kAny, kAny}, like);
    const int64_t batch = pool_scores.size(0), pool = pool_scores.size(1);
    check_tensor(kOp, "pool_tokens", pool_tokens, {ScalarType::Int, ScalarType::Long}, {batch, pool}, like);
    check_tensor(kOp, "pool_parents", pool_parents, {ScalarType::Int}, {batch, pool}, like);
    check_tensor(kOp, "root_tokens", root_tokens, {ScalarType::Int, ScalarType::Long}, {batch}, like);
    check_tensor(kOp, "prefix_len", prefix_len, {ScalarType::Int}, {batch}, like);
    check_tensor(kOp, "active", active, {ScalarType::Int}, {batch}, like);
    check_tensor(kOp, "tokens", tokens, {ScalarType::Int, ScalarType::Long}, {kAny}, like);
    const int64_t rows = tokens.size(0);
    check_tensor(kOp, "parents", parents, {ScalarType::Int}, {rows}, like);
    check_tensor(kOp, "mask", mask, {ScalarType::Long}, {rows, kAny}, like);
    check_tensor(kOp, "depth", depth, {ScalarType::Int}, {rows}, like);
    check_tensor(kOp, "positions", positions, {ScalarType::Int}, {rows}, like);
    check_tensor(kOp, "cu_nodes", cu_nodes, {ScalarType::Int}, {batch + 1}, like);
    check_tensor(kOp, "flags", flags, {ScalarType::Int}, {batch}, like);
    FV_CHECK(num_nodes >= 1 && num_nodes <= kMaxNodes, kOp, ": num_nodes must be in 1..", kMaxNodes, "; got ",
             num_nodes, ". Fix: pass the number of verify nodes per request, the root included.");
    FV_CHECK(vocab_size >= 1 && vocab_size <= kMaxVocab, kOp, ": vocab_size must be in 1..", kMaxVocab, "; got ",
             vocab_size, ". Fix: pass the target's vocabulary size.");
    FV_CHECK(rows >= batch * num_nodes, kOp, ": tokens must be at least B*num_nodes = ", batch * num_nodes,
             " rows; got ", rows, ". Fix: allocate the outputs with B*num_nodes rows.");
    const int64_t words = mask.size(1);
    FV_CHECK(words <= kMaxMaskWords && 64 * words >= num_nodes, kOp, ": mask must be ", (num_nodes + 63) / 64, "..",
             kMaxMaskWords, " words wide for ", num_nodes, " nodes; got ", words,
             ". Fix: allocate ceil(num_nodes/64) words per row.");
    return {batch, pool, rows, words};
}

struct PrepareTreeSizes {
    int64_t batch, rows;  // rows = kAny: no per-row tensor was given
};

inline PrepareTreeSizes check_prepare_tree(
    const OptTensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len, const Tensor& page_table,
    const OptTensor& mask, const OptTensor& depth, const OptTensor& positions, const OptTensor& slots,
    const OptTensor& first_child, const OptTensor& next_sibling, const OptTensor& schedule, const OptTensor& flags,
    int64_t page_size, int64_t row_base) {
    constexpr const char* kOp = "prepare_tree";
    const Tensor& like = cu_nodes;
    check_tensor(kOp, "cu_nodes", cu_nodes, {ScalarType::Int}, {kAny}, like);
    FV_CHECK(cu_nodes.size(0) >= 1, kOp, ": cu_nodes must be int32 [B+1]; got ", describe(cu_nodes),
             ". Fix: pass prefix sums that start with 0.");
    const int64_t batch = cu_nodes.size(0) - 1;
    int64_t rows = kAny;  // of the first per-row tensor given; the others must agree
    const OptTensor* const per_row[] = {&parents, &mask, &depth, &positions, &slots, &first_child, &next_sibling};
    for (const OptTensor* t : per_row) {
        if (*t && rows == kAny && (*t)->dim() > 0) rows = (*t)->size(0);
    }
    check_tensor(kOp, "prefix_len", prefix_len, {ScalarType::Int}, {batch}, like);
    check_tensor(kOp, "page_table", page_table, {ScalarType::Int}, {batch, kAny}, like);
    check_optional(kOp, "parents", parents, {ScalarType::Int}, {rows}, like);
    check_optional(kOp, "mask", mask, {ScalarType::Long}, {rows, kAny}, like);
    check_optional(kOp, "depth", depth, {ScalarType::Int}, {rows}, like);
    check_optional(kOp, "positions", positions, {ScalarType::Int}, {rows}, like);
    check_optional(kOp, "slots", slots, {ScalarType::Long}, {rows}, like);
    check_optional(kOp, "first_child", first_child, {ScalarType::Int}, {rows}, like);
    check_optional(kOp, "next_sibling", next_sibling, {ScalarType::Int}, {rows}, like);
    check_optional(kOp, "schedule", schedule, {ScalarType::Int}, {batch + 3}, like);
    check_optional(kOp, "flags", flags, {ScalarType::Int}, {batch}, like);
    FV_CHECK(!mask || (mask->size(1) >= 1 && mask->size(1) <= kMaxMaskWords), kOp, ": mask must be 1..", kMaxMaskWords,
             " words wide; got ", describe(*mask), ". Fix: allocate ceil(columns/64) words per row.");
    FV_CHECK(page_size >= 1, kOp, ": page_size must be at least 1; got ", page_size,
             ". Fix: pass the cache's page size.");
    FV_CHECK(page_size <= INT32_MAX, kOp, ": page_size must be at most ", INT32_MAX, "; got ", page_size,
             ". Fix: pass the cache's page size.");
    FV_CHECK(row_base >= 0 && row_base <= INT32_MAX, kOp, ": row_base must be in 0..", INT32_MAX, "; got ", row_base,
             ". Fix: pass the forest column of the first row (0 for a verify tree).");
    return {batch, rows};
}

}  // namespace fv
