// SPDX-License-Identifier: Apache-2.0
// The argument checks of lm_head_verify_tree, CPU and CUDA.
#pragma once
#include "accept/verify_args.h"

namespace fv {

struct HeadChecked {
    VerifyInputs in;
    VerifyOutputs out;
};

inline HeadChecked check_head(
    const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& tokens, const Tensor& parents,
    const Tensor& cu_nodes, const Tensor& prefix_len, const Tensor& active, const Tensor& remaining,
    const OptTensor& stop_ids, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& seed, const OptTensor& bias, const OptTensor& bitmask, const OptTensor& penalties,
    const OptTensor& counts, const Tensor& out_tokens, const Tensor& num_tokens_out, const Tensor& path,
    const Tensor& next_root, const Tensor& flags, const OptTensor& logprobs, int64_t vocab_size, int64_t rule) {
    check_tensor(op, "hidden", hidden, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {kAny, kAny}, hidden, true);
    check_tensor(op, "weight", weight, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {kAny, hidden.size(1)},
                 hidden, true);
    FV_CHECK(vocab_size <= weight.size(0), op, ": vocab_size must be at most the weight's ", weight.size(0), " rows; got ",
             vocab_size, ". Fix: pass the unpadded vocabulary size.");
    const int64_t rows = hidden.size(0);
    const VerifyInputs in = check_inputs(op, hidden, rows, tokens, parents, cu_nodes, prefix_len, active, temperature,
                                         top_k, top_p, min_p, &seed, penalties, vocab_size, rule);
    check_row_extras(op, hidden, rows, in.batch, vocab_size, vocab_size, bias, bitmask, penalties, counts);
    return HeadChecked{in, check_outputs(op, hidden, in.batch, remaining, stop_ids, counts, vocab_size, 0, out_tokens,
                                         num_tokens_out, path, next_root, flags, logprobs)};
}

}  // namespace fv
