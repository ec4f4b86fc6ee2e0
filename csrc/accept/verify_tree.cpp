// SPDX-License-Identifier: Apache-2.0
// verify_tree on the CPU: path-lazy, so only the rows on the accepted path are ever read; one thread per request.
// Cost: (accepted + 1) * vocab logits read per request.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "accept/verify_args.h"

namespace fv {
namespace {

void verify_tree_cpu(
    const Tensor logits, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature, const Tensor top_k,
    const Tensor top_p, const Tensor min_p, const Tensor seed, const OptTensor bias, const OptTensor bitmask,
    const OptTensor penalties, OptTensor counts, Tensor out_tokens, Tensor num_tokens_out, Tensor path,
    Tensor next_root, Tensor flags, OptTensor logprobs, OptTensor workspace, int64_t vocab_size, int64_t rule) {
    const VerifyCall call = check_verify_tree(
        logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k, top_p, min_p, seed,
        bias, bitmask, penalties, counts, out_tokens, num_tokens_out, path, next_root, flags, logprobs, workspace,
        vocab_size, rule);
    const VerifyInputs& in = call.in;
    const VerifyOutputs& out = call.out;
    const int64_t rows = in.rows;
    const IdArray token_ids(tokens);
    const LogitType type = logit_type(logits);
    const float* bias_ptr = cptr<float>(bias);
    const int32_t* mask_ptr = cptr<int32_t>(bitmask);
    const int32_t* counts_ptr = cptr<int32_t>(counts);
    const int64_t words = (vocab_size + 31) / 32;

    torch::stable::parallel_for(0, in.batch, 1, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const RowParams p = in.params(b);
            const int64_t first_row = node_range(in.cu_nodes, b, rows).begin;
            walk_request(in, out, token_ids, call.stops, b,
                         [&](int32_t node, int32_t depth, const int64_t* ancestors) {
                const int64_t row = first_row + node;
                const void* x = row_pointer(logits, row);
                RowExtras extras;
                extras.counts = counts_ptr ? counts_ptr + b * vocab_size : nullptr;
                extras.bias = bias_ptr ? bias_ptr + b * vocab_size : nullptr;
                extras.bitmask = mask_ptr ? mask_ptr + row * words : nullptr;
                extras.ancestors = ancestors;
                extras.num_ancestors = depth;
                extras.penalties = in.penalties != nullptr;
                const uint32_t t = static_cast<uint32_t>(in.prefix_len[b]) + depth + 1;
                const RowResult r = choose_token(x, type, vocab_size, p, extras, t);
                Chosen c{r.key != 0, static_cast<int64_t>(key_id(r.key)), r.bad, 0.0f};
                if (c.has_token && out.logprobs) {
                    const float max = raw_max(x, type, vocab_size);
                    c.logprob = load_one(x, type, c.token) - max - log_mass(raw_mass(x, type, vocab_size, max));
                }
                return c;
            });
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("verify_tree", TORCH_BOX(&verify_tree_cpu)); }

}  // namespace fv
