// SPDX-License-Identifier: Apache-2.0
// The arguments of sgl_tree_speculative_sampling_target_only beyond the tree, on CPU and CUDA.
#pragma once
#include "accept/sgl_verify_args.h"

namespace fv {

constexpr const char* kSglSamplingOp = "sgl_tree_speculative_sampling_target_only";

struct SglSampling {
    int64_t vocab;
    const float* coins;       // [B,N]
    const float* last_coins;  // [B]
    const float* target;      // [B,N,V]
    float* draft;             // [B,N,V] or null
    float inverse_acc, single;
};

inline SglSampling sgl_check_sampling(
    const SglTreeArgs& a, const Tensor& like, const Tensor& uniform_samples, const Tensor& uniform_samples_for_final_sampling,
    const Tensor& target_probs, const OptTensor& draft_probs, double threshold_single, double threshold_acc) {
    constexpr const char* kOp = kSglSamplingOp;
    check_tensor(kOp, "uniform_samples", uniform_samples, {ScalarType::Float}, {a.batch, a.nodes}, like);
    check_tensor(kOp, "uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, {ScalarType::Float},
                 {a.batch}, like);
    check_tensor(kOp, "target_probs", target_probs, {ScalarType::Float}, {a.batch, a.nodes, kAny}, like);
    const int64_t vocab = target_probs.size(2);
    FV_CHECK(vocab >= 1 && vocab <= kMaxVocab, kOp, ": target_probs must have 1..", kMaxVocab, " columns; got ", vocab,
             ". Fix: pass [B, N, vocabulary].");
    FV_CHECK(vocab % 2 != 0 || reinterpret_cast<uintptr_t>(target_probs.const_data_ptr()) % 16 == 0, kOp,
             ": target_probs must start at a multiple of 16 bytes; got another offset into its storage. Fix: call .clone().");
    FV_CHECK(vocab % 2 != 0 || !draft_probs || reinterpret_cast<uintptr_t>(draft_probs->const_data_ptr()) % 16 == 0, kOp,
             ": draft_probs must start at a multiple of 16 bytes; got another offset into its storage. Fix: call .clone().");
    check_optional(kOp, "draft_probs", draft_probs, {ScalarType::Float}, {a.batch, a.nodes, vocab}, like);
    const auto in_range = [](double x) { return x >= 0.0 && x <= 1.0; };
    FV_CHECK(in_range(threshold_single), kOp, ": threshold_single must be in [0, 1]; got ", threshold_single,
             ". Fix: 1.0 is the exact rule.");
    FV_CHECK(in_range(threshold_acc), kOp, ": threshold_acc must be in [0, 1]; got ", threshold_acc,
             ". Fix: 1.0 is the exact rule.");
    const float acc = static_cast<float>(threshold_acc);
    return {vocab, cptr<float>(uniform_samples), cptr<float>(uniform_samples_for_final_sampling), cptr<float>(target_probs),
            mptr<float>(draft_probs), 1.0f / (acc > 1e-9f ? acc : 1e-9f), static_cast<float>(threshold_single)};
}

}  // namespace fv
