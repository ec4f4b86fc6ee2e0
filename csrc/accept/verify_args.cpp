// SPDX-License-Identifier: Apache-2.0
#include "accept/verify_args.h"

#include <algorithm>

#include "algo/partials.h"
#include "algo/verify_plan.h"

namespace fv {

namespace {
constexpr ScalarType kI32 = ScalarType::Int, kI64 = ScalarType::Long, kF32 = ScalarType::Float;
}

StopIds stop_view(const OptTensor& stop_ids) {
    return stop_ids ? StopIds{IdArray(*stop_ids), stop_ids->size(0)} : StopIds{IdView{nullptr, false}, 0};
}

VerifyInputs check_inputs(
    const char* op, const Tensor& like, int64_t rows, const Tensor& tokens, const Tensor& parents,
    const Tensor& cu_nodes, const Tensor& prefix_len, const Tensor& active, const Tensor& temperature,
    const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor* seed, const OptTensor& penalties,
    int64_t vocab_size, int64_t rule) {
    FV_CHECK(cu_nodes.dim() == 1 && cu_nodes.size(0) >= 1, op, ": cu_nodes must be int32 [batch + 1]; got ",
             describe(cu_nodes), ". Fix: pass the row offsets of every request, beginning with 0.");
    const int64_t batch = cu_nodes.size(0) - 1;
    check_tensor(op, "cu_nodes", cu_nodes, {kI32}, {batch + 1}, like);
    check_tensor(op, "tokens", tokens, {kI32, kI64}, {rows}, like);
    check_tensor(op, "parents", parents, {kI32}, {rows}, like);
    check_tensor(op, "prefix_len", prefix_len, {kI32}, {batch}, like);
    check_tensor(op, "active", active, {kI32}, {batch}, like);
    check_tensor(op, "temperature", temperature, {kF32}, {batch}, like);
    check_tensor(op, "top_k", top_k, {kI32}, {batch}, like);
    check_tensor(op, "top_p", top_p, {kF32}, {batch}, like);
    check_tensor(op, "min_p", min_p, {kF32}, {batch}, like);
    if (seed) check_tensor(op, "seed", *seed, {kI64}, {batch}, like);
    check_optional(op, "penalties", penalties, {kF32}, {batch, 3}, like);
    FV_CHECK(vocab_size >= 1 && vocab_size <= kMaxVocab, op, ": vocab_size must be in [1, ", kMaxVocab, "]; got ",
             vocab_size, ". Fix: pass the number of ids of the target's vocabulary.");
    FV_CHECK(rule == kRuleGreedy || rule == kRuleSampleMatch, op, ": rule must be 0 (greedy) or 1 (sample_match); got ",
             rule, ". Fix: use fastverify.Rule.");
    return VerifyInputs{rows, batch, vocab_size, cptr<int32_t>(parents), cptr<int32_t>(cu_nodes),
                        cptr<int32_t>(prefix_len), cptr<int32_t>(active), cptr<float>(temperature),
                        cptr<int32_t>(top_k), cptr<float>(top_p), cptr<float>(min_p),
                        seed ? cptr<int64_t>(*seed) : nullptr, cptr<float>(penalties), static_cast<int>(rule)};
}

VerifyOutputs check_outputs(
    const char* op, const Tensor& like, int64_t batch, const Tensor& remaining, const OptTensor& stop_ids,
    const OptTensor& counts, int64_t counts_width, int64_t counts_offset, const Tensor& out_tokens,
    const Tensor& num_tokens_out, const Tensor& path, const Tensor& next_root, const Tensor& flags,
    const OptTensor& logprobs) {
    check_tensor(op, "remaining", remaining, {kI32}, {batch}, like);
    check_optional(op, "stop_ids", stop_ids, {kI32, kI64}, {kAny}, like);
    check_tensor(op, "out_tokens", out_tokens, {kI32, kI64}, {batch, kAny}, like);
    const int64_t d = out_tokens.size(1);
    FV_CHECK(d >= 1 && d <= kMaxNodes, op, ": out_tokens must have 1 to ", kMaxNodes, " columns; got ", d,
             ". Fix: allocate [batch, greatest depth + 1].");
    check_tensor(op, "num_tokens_out", num_tokens_out, {kI32}, {batch}, like);
    check_tensor(op, "path", path, {kI32}, {batch, d}, like);
    check_tensor(op, "next_root", next_root, {kI32, kI64}, {batch}, like);
    check_tensor(op, "flags", flags, {kI32}, {batch}, like);
    check_optional(op, "logprobs", logprobs, {kF32}, {batch, d}, like);
    check_optional(op, "counts", counts, {kI32}, {batch, counts_width}, like);
    return VerifyOutputs{d, mptr<int32_t>(remaining), IdArrayOut(out_tokens), mptr<int32_t>(num_tokens_out),
                         mptr<int32_t>(path), IdArrayOut(next_root), mptr<int32_t>(flags), mptr<float>(logprobs),
                         mptr<int32_t>(counts), counts_width, counts_offset};
}

void check_row_extras(
    const char* op, const Tensor& like, int64_t rows, int64_t batch, int64_t width, int64_t vocab_size,
    const OptTensor& bias, const OptTensor& bitmask, const OptTensor& penalties, const OptTensor& counts) {
    check_optional(op, "bias", bias, {kF32}, {batch, width}, like);
    check_optional(op, "bitmask", bitmask, {kI32}, {rows, (vocab_size + 31) / 32}, like);
    check_optional(op, "counts", counts, {kI32}, {batch, width}, like);
    FV_CHECK(!penalties || counts, op, ": counts must be given with penalties; got None. ",
             "Fix: pass int32 [batch, vocab] counts of the tokens emitted so far (root included).");
}

VerifyCall check_verify_tree(
    const Tensor& logits, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& remaining, const OptTensor& stop_ids, const Tensor& temperature, const Tensor& top_k,
    const Tensor& top_p, const Tensor& min_p, const Tensor& seed, const OptTensor& bias, const OptTensor& bitmask,
    const OptTensor& penalties, const OptTensor& counts, const Tensor& out_tokens, const Tensor& num_tokens_out,
    const Tensor& path, const Tensor& next_root, const Tensor& flags, const OptTensor& logprobs, const OptTensor& workspace,
    int64_t vocab_size, int64_t rule) {
    const char* op = "verify_tree";
    check_tensor(op, "logits", logits, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {kAny, kAny}, logits,
                 /*rows_free=*/true);
    FV_CHECK(vocab_size <= logits.size(1), op, ": vocab_size must be at most the row width ", logits.size(1), "; got ",
             vocab_size, ". Fix: pass the unpadded vocabulary size.");
    const int64_t rows = logits.size(0);
    const VerifyInputs in = check_inputs(op, logits, rows, tokens, parents, cu_nodes, prefix_len, active, temperature,
                                         top_k, top_p, min_p, &seed, penalties, vocab_size, rule);
    check_row_extras(op, logits, rows, in.batch, vocab_size, vocab_size, bias, bitmask, penalties, counts);
    const VerifyOutputs out = check_outputs(op, logits, in.batch, remaining, stop_ids, counts, vocab_size, 0, out_tokens,
                                            num_tokens_out, path, next_root, flags, logprobs);
    if (workspace) {
        check_tensor(op, "workspace", *workspace, {ScalarType::Byte}, {kAny}, logits);
        FV_CHECK(workspace->size(0) >= kAreaBytes, op, ": workspace must have at least ", kAreaBytes, " bytes; got ",
                 workspace->size(0), ". Fix: pass fastverify.verify_tree_workspace(device).");
    }
    return VerifyCall{in, out, stop_view(stop_ids)};
}

PartialsCall check_partials(
    const Tensor& logits, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& seed, const OptTensor& bias, const OptTensor& bitmask, const OptTensor& penalties, const OptTensor& counts,
    const Tensor& state, const Tensor& partials, int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds,
    int64_t rule) {
    const char* op = "verify_tree_partials";
    check_tensor(op, "logits", logits, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {kAny, kAny}, logits, true);
    const int64_t rows = logits.size(0);
    const VerifyInputs in = check_inputs(op, logits, rows, tokens, parents, cu_nodes, prefix_len, active, temperature,
                                         top_k, top_p, min_p, &seed, penalties, vocab_size, rule);
    FV_CHECK(vocab_offset >= 0 && vocab_offset < vocab_size, op, ": vocab_offset must be in [0, ", vocab_size, "); got ",
             vocab_offset, ". Fix: pass the first id of this rank's shard.");
    const int64_t n = std::min(logits.size(1), vocab_size - vocab_offset);
    check_row_extras(op, logits, rows, in.batch, n, vocab_size, bias, bitmask, penalties, counts);
    FV_CHECK(num_rounds == 1 || num_rounds == 2 || num_rounds == kFilterRounds, op, ": num_rounds must be 1, 2 or ",
             kFilterRounds, "; got ", num_rounds, ". Fix: 1 without filters, 2 for logprobs, ", kFilterRounds, " with filters.");
    FV_CHECK(round >= 0 && round < num_rounds, op, ": round must be in [0, ", num_rounds, "); got ", round,
             ". Fix: call the rounds in order.");
    check_tensor(op, "state", state, {ScalarType::Long}, {rows, kStateWords}, logits);
    check_tensor(op, "partials", partials, {ScalarType::Long}, {rows, kAny}, logits);
    const int64_t words = partials.size(1);
    FV_CHECK(words >= words_needed(static_cast<int>(num_rounds)), op, ": partials must have at least ",
             words_needed(static_cast<int>(num_rounds)), " columns for ", num_rounds, " rounds; got ", words,
             ". Fix: allocate it with fastverify.partial_words(num_rounds).");
    return PartialsCall{in, n, words};
}

CombineCall check_combine(
    const Tensor& partials, const Tensor& tokens, const Tensor& parents, const Tensor& cu_nodes, const Tensor& prefix_len,
    const Tensor& active, const Tensor& remaining, const OptTensor& stop_ids, const Tensor& temperature, const Tensor& top_k,
    const Tensor& top_p, const Tensor& min_p, const OptTensor& counts, const Tensor& state, const Tensor& out_tokens,
    const Tensor& num_tokens_out, const Tensor& path, const Tensor& next_root, const Tensor& flags, const OptTensor& logprobs,
    int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds, int64_t rule) {
    const char* op = "verify_tree_combine";
    check_tensor(op, "partials", partials, {ScalarType::Long}, {kAny, kAny, kAny}, partials);
    const int64_t rows = partials.size(1), words = partials.size(2);
    const VerifyInputs in = check_inputs(op, partials, rows, tokens, parents, cu_nodes, prefix_len, active, temperature,
                                         top_k, top_p, min_p, nullptr, std::nullopt, vocab_size, rule);
    const int64_t width = counts && counts->dim() == 2 ? counts->size(1) : 0;
    const VerifyOutputs out = check_outputs(op, partials, in.batch, remaining, stop_ids, counts, width, vocab_offset,
                                            out_tokens, num_tokens_out, path, next_root, flags, logprobs);
    check_tensor(op, "state", state, {ScalarType::Long}, {rows, kStateWords}, partials);
    FV_CHECK(num_rounds == 1 || num_rounds == 2 || num_rounds == kFilterRounds, op, ": num_rounds must be 1, 2 or ",
             kFilterRounds, "; got ", num_rounds, ". Fix: pass the same number as to verify_tree_partials.");
    FV_CHECK(round >= 0 && round < num_rounds, op, ": round must be in [0, ", num_rounds, "); got ", round,
             ". Fix: call the rounds in order.");
    FV_CHECK(words >= words_needed(static_cast<int>(num_rounds)), op, ": partials must have at least ",
             words_needed(static_cast<int>(num_rounds)), " columns for ", num_rounds, " rounds; got ", words,
             ". Fix: allocate it with fastverify.partial_words(num_rounds).");
    FV_CHECK(!logprobs || num_rounds > 1, op, ": num_rounds must be 2 or ", kFilterRounds,
             " when logprobs are asked; got 1. Fix: use 2 rounds.");
    return CombineCall{in, out};
}

}  // namespace fv
