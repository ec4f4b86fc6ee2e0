// SPDX-License-Identifier: Apache-2.0
// lm_head_verify_tree on the CPU: the LM-head product inside the acceptance.
// Without filters and logprobs: tiles of the vocabulary; each tile's logits live in a thread's scratch and leave it as
// one 64-bit key per row. Otherwise: path-lazy, one visited row at a time in scratch, then as verify_tree.
// Cost: weight read once (tiles), or once per visited row (lazy).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "accept/head_args.h"
#include "accept/head_tile.h"

namespace fv {
namespace {

constexpr int64_t kTile = 256;  // vocabulary rows of a tile: 256 * H floats stay in L2

// weight rows [v, v + n) as f32 (converted into scratch unless they already are)
const float* weight_rows(const Tensor& weight, LogitType type, int64_t v, int64_t n, int64_t h, std::vector<float>& scratch) {
    if (type == LogitType::kFloat && weight.stride(0) == h) return static_cast<const float*>(row_pointer(weight, v));
    scratch.resize(n * h);
    for (int64_t i = 0; i < n; ++i) load_row(row_pointer(weight, v + i), type, h, scratch.data() + i * h);
    return scratch.data();
}

void lm_head_verify_tree_cpu(
    const Tensor hidden, const Tensor weight, const Tensor tokens, const Tensor parents, const Tensor cu_nodes,
    const Tensor prefix_len, const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature,
    const Tensor top_k, const Tensor top_p, const Tensor min_p, const Tensor seed, const OptTensor bias,
    const OptTensor bitmask, const OptTensor penalties, OptTensor counts, Tensor out_tokens, Tensor num_tokens_out,
    Tensor path, Tensor next_root, Tensor flags, OptTensor logprobs, OptTensor, int64_t vocab_size, int64_t rule) {
    const char* op = "lm_head_verify_tree";
    const auto [in, out] = check_head(op, hidden, weight, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids,
                                      temperature, top_k, top_p, min_p, seed, bias, bitmask, penalties, counts, out_tokens,
                                      num_tokens_out, path, next_root, flags, logprobs, vocab_size, rule);
    const int64_t rows = hidden.size(0), h = hidden.size(1);
    const IdArray token_ids(tokens);
    const LogitType weight_type = logit_type(weight), hidden_type = logit_type(hidden);
    const float* bias_ptr = cptr<float>(bias);
    const int32_t *mask_ptr = cptr<int32_t>(bitmask), *counts_ptr = cptr<int32_t>(counts);
    const int64_t words = (vocab_size + 31) / 32;

    bool lazy = logprobs.has_value();
    for (int64_t b = 0; b < in.batch; ++b) lazy = lazy || (in.active[b] && in.params(b).filtered());

    // rows a walk can visit, compacted, in fp32
    struct Item {
        int64_t b, row;
        std::vector<int64_t> above;
    };
    std::vector<Item> items;
    std::vector<int64_t> first_item(in.batch);
    for (int64_t b = 0; b < in.batch; ++b) {
        first_item[b] = static_cast<int64_t>(items.size());
        if (!in.active[b]) continue;
        const NodeRange r = node_range(in.cu_nodes, b, rows);
        const int32_t visitable = tree_is_valid(in.parents + r.begin, r.n) ? r.n : std::min(r.n, 1);
        for (int32_t i = 0; i < visitable; ++i) {
            Item it{b, r.begin + i, {}};
            for (int32_t a = i; a > 0; a = in.parents[r.begin + a]) it.above.push_back(token_ids[r.begin + a]);
            items.push_back(std::move(it));
        }
    }
    const int64_t count = static_cast<int64_t>(items.size());
    std::vector<float> x(count * h);
    for (int64_t i = 0; i < count; ++i) load_row(row_pointer(hidden, items[i].row), hidden_type, h, x.data() + i * h);

    const auto extras_of = [&](int64_t b, int64_t row, int64_t v, const int64_t* above, int64_t num_above) {
        RowExtras e;
        e.counts = counts_ptr ? counts_ptr + b * vocab_size + v : nullptr;
        e.bias = bias_ptr ? bias_ptr + b * vocab_size + v : nullptr;
        e.bitmask = mask_ptr ? mask_ptr + row * words : nullptr;
        e.ancestors = above;
        e.num_ancestors = static_cast<int32_t>(num_above);
        e.penalties = in.penalties != nullptr;
        return e;
    };
    const int64_t tiles = (vocab_size + kTile - 1) / kTile;
    std::vector<uint64_t> keys;
    if (!lazy) {
        keys.assign(tiles * count, 0);
        torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
            std::vector<float> converted, logits(count * kTile);
            for (int64_t tile = begin; tile < end; ++tile) {
                const int64_t v = tile * kTile, n = std::min(kTile, vocab_size - v);
                head_tile(x.data(), count, h, weight_rows(weight, weight_type, v, n, h, converted), n, logits.data(), kTile);
                for (int64_t i = 0; i < count; ++i) {
                    const Item& it = items[i];
                    const RowParams p = in.params(it.b);
                    RowScratch& s = row_scratch();
                    const int64_t num_above = static_cast<int64_t>(it.above.size());
                    const bool bad = process_row(logits.data() + i * kTile, LogitType::kFloat, n, v, p,
                                                 extras_of(it.b, it.row, v, it.above.data(), num_above), s);
                    const float zmax = row_max(s);
                    const uint32_t t = static_cast<uint32_t>(in.prefix_len[it.b]) + num_above + 1;
                    const uint64_t key = zmax > -kInf ? best_key(s, n, v, p, zmax, -kInf, t) : 0;
                    keys[tile * count + i] = key | (bad ? kKeyBad : 0);
                }
            }
        });
    }
    std::vector<float> row_logits(lazy ? vocab_size : 0);
    for (int64_t b = 0; b < in.batch; ++b) {
        const RowParams p = in.params(b);
        const int64_t first_row = node_range(in.cu_nodes, b, rows).begin;
        walk_request(in, out, token_ids, stop_view(stop_ids), b,
                     [&](int32_t node, int32_t depth, const int64_t* ancestors) {
            const int64_t row = first_row + node, i = first_item[b] + node;
            if (!lazy) {
                uint64_t best = 0;
                bool bad = false;
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    const uint64_t key = keys[tile * count + i];
                    bad = bad || (key & kKeyBad);
                    best = std::max(best, key & ~kKeyBad);
                }
                return Chosen{key_has_token(best), static_cast<int64_t>(key_id(best)), bad, 0.0f};
            }
            torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
                std::vector<float> converted;
                for (int64_t tile = begin; tile < end; ++tile) {
                    const int64_t v = tile * kTile, n = std::min(kTile, vocab_size - v);
                    head_tile(x.data() + i * h, 1, h, weight_rows(weight, weight_type, v, n, h, converted), n,
                              row_logits.data() + v, kTile);
                }
            });
            const uint32_t t = static_cast<uint32_t>(in.prefix_len[b]) + depth + 1;
            const RowResult r = choose_token(row_logits.data(), LogitType::kFloat, vocab_size, p,
                                             extras_of(b, row, 0, ancestors, depth), t);
            Chosen c{r.key != 0, static_cast<int64_t>(key_id(r.key)), r.bad, 0.0f};
            if (c.has_token && out.logprobs) {
                const float max = raw_max(row_logits.data(), LogitType::kFloat, vocab_size);
                c.logprob = row_logits[c.token] - max -
                            log_mass(raw_mass(row_logits.data(), LogitType::kFloat, vocab_size, max));
            }
            return c;
        });
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("lm_head_verify_tree", TORCH_BOX(&lm_head_verify_tree_cpu)); }

}  // namespace fv
