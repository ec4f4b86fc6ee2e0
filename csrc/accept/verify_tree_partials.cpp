// SPDX-License-Identifier: Apache-2.0
// verify_tree_partials on the CPU: one rank's words of one round, for every row of every tree (the path is not known
// before the shards are combined). Protocol: algo/partials.h. Cost: the shard's rows read once a round.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "accept/verify_args.h"
#include "algo/partials.h"

namespace fv {
namespace {

// Words of one processed row. state is the row's words (null in single-round use), out the row's partial words.
void write_words(
    RowScratch& s, const void* row, LogitType type, int64_t n, int64_t offset, const RowParams& p, bool bad, uint32_t t,
    RoundKind kind, int num_rounds, const int64_t* state, int64_t* out) {
    const auto ordered = [](float f) { return static_cast<int64_t>(ordered_bits(f)); };
    if (kind.kind == Round::kMax) {
        const float z = row_max(s), raw = raw_max(row, type, n);
        out[0] = z > -kInf ? ordered(z) : 0;
        out[1] = raw > -kInf ? ordered(raw) : 0;
        return;
    }
    const auto state_float = [&](int word) { return from_ordered_bits(static_cast<uint32_t>(state[word])); };
    if (kind.kind == Round::kFinal) {
        float zmax = row_max(s), cut = -kInf;
        if (num_rounds == kFilterRounds && p.filtered() && state[kStateMax]) {
            zmax = state_float(kStateMax);
            const int64_t word = std::max(state[kStateTopKCut], state[kStateTopPCut]);
            if (word) cut = from_ordered_bits(static_cast<uint32_t>(word));
        }
        RowParams q = p;
        if (num_rounds != kFilterRounds) q.min_p = 0.0f;
        const uint64_t key = row_max(s) > -kInf ? best_key(s, n, offset, q, zmax, cut, t) : 0;
        out[0] = static_cast<int64_t>(key | (bad ? kKeyBad : 0) | (p.flags ? kKeyBadParam : 0));
        if (num_rounds > 1) {
            out[1] = state[kStateRawMax] ? static_cast<int64_t>(raw_mass(row, type, n, state_float(kStateRawMax))) : 0;
            out[2] = key ? float_to_bits(load_one(row, type, key_id(key) - offset)) : 0;
        }
        return;
    }
    std::fill_n(out, kDigits, 0);
    const bool top_k = kind.kind == Round::kTopK;
    if (!p.filtered() || !state[kStateMax] || (top_k ? !state[kStateTopKLeft] : !state[kStateTopPLeft])) return;
    const uint32_t prefix = static_cast<uint32_t>(state[top_k ? kStateTopKCut : kStateTopPCut]);
    const uint32_t floor = top_k ? 0 : static_cast<uint32_t>(state[kStateTopKCut]);
    const float zmax = state_float(kStateMax);
    for (int64_t i = 0; i < n; ++i) {
        if (!(s.z[i] > -kInf)) continue;
        const uint32_t o = ordered_bits(s.z[i]);
        if (o < floor || !in_prefix(o, prefix, kind.shift)) continue;
        out[(o >> kind.shift) & (kDigits - 1)] += top_k ? 1 : static_cast<int64_t>(mass_of(s.z[i], zmax));
    }
}

void verify_tree_partials_cpu(
    const Tensor logits, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
    const Tensor seed, const OptTensor bias, const OptTensor bitmask, const OptTensor penalties, const OptTensor counts,
    const Tensor state, Tensor partials, int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds,
    int64_t rule) {
    const PartialsCall call = check_partials(logits, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p,
                                             min_p, seed, bias, bitmask, penalties, counts, state, partials, vocab_offset,
                                             vocab_size, round, num_rounds, rule);
    const VerifyInputs& in = call.in;
    const int64_t rows = in.rows, n = call.shard, words = call.words;
    const IdArray token_ids(tokens);
    const LogitType type = logit_type(logits);
    const RoundKind kind = round_kind(static_cast<int>(round), static_cast<int>(num_rounds));
    const float* bias_ptr = cptr<float>(bias);
    const int32_t *mask_ptr = cptr<int32_t>(bitmask), *counts_ptr = cptr<int32_t>(counts);
    const int64_t* state_ptr = cptr<int64_t>(state);
    int64_t* out = mptr<int64_t>(partials);
    std::fill_n(out, rows * words, 0);
    const int64_t mask_words = (vocab_size + 31) / 32;

    // flat list of the rows that a walk can visit
    struct Item {
        int64_t b, begin;
        int32_t node;
    };
    std::vector<Item> items;
    for (int64_t b = 0; b < in.batch; ++b) {
        if (!in.active[b]) continue;
        const NodeRange r = node_range(in.cu_nodes, b, rows);
        const int32_t visitable = tree_is_valid(in.parents + r.begin, r.n) ? r.n : std::min(r.n, 1);
        for (int32_t i = 0; i < visitable; ++i) items.push_back({b, r.begin, i});
    }
    torch::stable::parallel_for(0, static_cast<int64_t>(items.size()), 1, [&](int64_t lo, int64_t hi) {
        std::vector<int64_t> above;
        for (int64_t k = lo; k < hi; ++k) {
            const Item it = items[k];
            const int64_t row = it.begin + it.node;
            const RowParams p = in.params(it.b);
            above.clear();
            for (int32_t i = it.node; i > 0; i = in.parents[it.begin + i]) above.push_back(token_ids[it.begin + i]);
            RowExtras x;
            x.counts = counts_ptr ? counts_ptr + it.b * n : nullptr;
            x.bias = bias_ptr ? bias_ptr + it.b * n : nullptr;
            x.bitmask = mask_ptr ? mask_ptr + row * mask_words : nullptr;
            x.ancestors = above.data();
            x.num_ancestors = static_cast<int32_t>(above.size());
            x.penalties = in.penalties != nullptr;
            RowScratch& s = row_scratch();
            const void* data = row_pointer(logits, row);
            const bool bad = process_row(data, type, n, vocab_offset, p, x, s);
            const uint32_t t = static_cast<uint32_t>(in.prefix_len[it.b]) + x.num_ancestors + 1;
            write_words(s, data, type, n, vocab_offset, p, bad, t, kind, static_cast<int>(num_rounds),
                        state_ptr + row * kStateWords, out + row * words);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("verify_tree_partials", TORCH_BOX(&verify_tree_partials_cpu)); }

}  // namespace fv
