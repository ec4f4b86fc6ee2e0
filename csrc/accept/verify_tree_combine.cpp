// SPDX-License-Identifier: Apache-2.0
// verify_tree_combine on the CPU: folds the words of all ranks into the state of each row; in the last round walks the
// trees. Every rank runs it on the same words and gets the same tokens. Protocol: algo/partials.h.
// A request that asks for filters in a run of fewer rounds is sampled without them and flagged kFlagBadParam.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "accept/verify_args.h"
#include "algo/partials.h"

namespace fv {
namespace {

void fold_row(const int64_t* words, int64_t world, int64_t stride, RoundKind kind, const RowParams& p, int64_t* state) {
    if (kind.kind == Round::kMax) {
        for (int i = 0; i < kStateWords; ++i) state[i] = 0;
        for (int64_t w = 0; w < world; ++w) {
            state[kStateMax] = std::max(state[kStateMax], words[w * stride]);
            state[kStateRawMax] = std::max(state[kStateRawMax], words[w * stride + 1]);
        }
        if (p.filtered() && p.top_k > 0) state[kStateTopKLeft] = p.top_k;
        if (p.filtered() && p.top_p < 1.0f) state[kStateTopPLeft] = 1;  // the real need is known with the total mass
        return;
    }
    const bool top_k = kind.kind == Round::kTopK;
    int64_t& left = state[top_k ? kStateTopKLeft : kStateTopPLeft];
    if (left == 0) return;
    int64_t sums[kDigits] = {};
    int64_t total = 0;
    for (int64_t w = 0; w < world; ++w) {
        for (int d = 0; d < kDigits; ++d) sums[d] += words[w * stride + d];
    }
    for (int d = 0; d < kDigits; ++d) total += sums[d];
    if (kind.shift == 24) {
        if (top_k && total <= left) {  // nothing to cut
            left = 0;
            return;
        }
        if (!top_k) left = static_cast<int64_t>(top_p_need(static_cast<uint64_t>(total), p.top_p));
    }
    const int digit = select_digit(sums, &left);
    state[top_k ? kStateTopKCut : kStateTopPCut] |= static_cast<int64_t>(digit) << kind.shift;
}

void verify_tree_combine_cpu(
    const Tensor partials, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature, const Tensor top_k,
    const Tensor top_p, const Tensor min_p, OptTensor counts, Tensor state, Tensor out_tokens, Tensor num_tokens_out,
    Tensor path, Tensor next_root, Tensor flags, OptTensor logprobs, int64_t vocab_offset, int64_t vocab_size,
    int64_t round, int64_t num_rounds, int64_t rule) {
    const CombineCall call = check_combine(partials, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids,
                                           temperature, top_k, top_p, min_p, counts, state, out_tokens, num_tokens_out, path,
                                           next_root, flags, logprobs, vocab_offset, vocab_size, round, num_rounds, rule);
    const int64_t world = partials.size(0), rows = partials.size(1), words = partials.size(2);
    const VerifyInputs& in = call.in;
    const VerifyOutputs& out = call.out;
    const RoundKind kind = round_kind(static_cast<int>(round), static_cast<int>(num_rounds));
    const int64_t* in_words = cptr<int64_t>(partials);
    int64_t* state_ptr = mptr<int64_t>(state);

    if (kind.kind != Round::kFinal) {
        for (int64_t b = 0; b < in.batch; ++b) {
            if (!in.active[b]) continue;
            const NodeRange r = node_range(in.cu_nodes, b, rows);
            const RowParams p = in.params(b);
            for (int64_t row = r.begin; row < r.begin + r.n; ++row) {
                fold_row(in_words + row * words, world, rows * words, kind, p, state_ptr + row * kStateWords);
            }
        }
        return;
    }
    const IdArray token_ids(tokens);
    for (int64_t b = 0; b < in.batch; ++b) {
        const NodeRange range = node_range(in.cu_nodes, b, rows);
        const int64_t first_row = range.begin;
        walk_request(in, out, token_ids, stop_view(stop_ids), b,
                     [&](int32_t node, int32_t, const int64_t*) {
            const int64_t row = first_row + node;
            uint64_t best = 0, mass = 0;
            uint32_t raw_bits = 0;
            bool bad = false;
            for (int64_t w = 0; w < world; ++w) {
                const int64_t* p = in_words + (w * rows + row) * words;
                const uint64_t key = static_cast<uint64_t>(p[0]);
                bad = bad || (key & kKeyBad);
                if (num_rounds > 1) mass += static_cast<uint64_t>(p[1]);
                if ((key & ~kKeyStatus) > best) {
                    best = key & ~kKeyStatus;
                    raw_bits = num_rounds > 1 ? static_cast<uint32_t>(p[2]) : 0;
                }
            }
            Chosen c{key_has_token(best), static_cast<int64_t>(key_id(best)), bad, 0.0f};
            if (c.has_token && out.logprobs) {
                const float max = from_ordered_bits(static_cast<uint32_t>(state_ptr[row * kStateWords + kStateRawMax]));
                c.logprob = bits_to_float(raw_bits) - max - log_mass(mass);
            }
            return c;
        });
        if (!in.active[b]) continue;
        const bool unfiltered = num_rounds != kFilterRounds && in.params(b).filtered();
        const bool replaced = range.n > 0 && (in_words[first_row * words] & static_cast<int64_t>(kKeyBadParam));  // any rank's
        if (unfiltered || replaced) out.flags[b] |= kFlagBadParam;
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("verify_tree_combine", TORCH_BOX(&verify_tree_combine_cpu)); }

}  // namespace fv
