// SPDX-License-Identifier: Apache-2.0
// verify_tree_combine on the GPU: a block per row folds the words of all ranks into the row's state; in the last round a
// block per request walks. Protocol: algo/partials.h. Cost: W * R * words read, one launch.
#include <torch/csrc/stable/library.h>

#include "accept/device_filters.cuh"
#include "accept/verify_args.h"
#include "common/launch.h"

namespace fv {
namespace {

struct CombineTask {
    const int64_t* words;  // [W,R,num_words]
    int64_t world, num_words;
    VerifyInputs in;
    VerifyOutputs out;
    IdView tokens;   // [R]
    StopIds stops;
    int64_t* state;  // [R,kStateWords]
    int round, num_rounds;
};

// algo/partials.h select_digit by a warp: from the highest digit down until *left is covered.
__device__ inline int warp_select_digit(const Word* sums, Word* left, int lane) {
    Word mine = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) mine += sums[kDigits - 1 - 8 * lane - i];
    Word through = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const Word below = __shfl_up_sync(kFullWarp, through, d);
        if (lane >= d) through += below;
    }
    const unsigned reached = __ballot_sync(kFullWarp, through >= *left);
    const int owner = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
    Word above = __shfl_sync(kFullWarp, through - mine, owner);
    int digit = kDigits - 1 - 8 * owner;
    for (int i = 0; i < 7 && digit > 0 && above + sums[digit] < *left; ++i) above += sums[digit--];
    *left -= above;
    return digit;
}

// Grid (R).
__global__ void __launch_bounds__(kTeamThreads) fold_kernel(const __grid_constant__ CombineTask a) {
    const Team team{{}, 1, 0, nullptr, 0};
    const int64_t row = blockIdx.x, stride = a.in.rows * a.num_words;
    const int64_t b = request_of_row(a.in, row, team);
    if (b < 0) return;
    const RoundKind kind = round_kind(a.round, a.num_rounds);
    const RowParams p = a.in.params(b);
    const int64_t* words = a.words + row * a.num_words;
    int64_t* state = a.state + row * kStateWords;
    if (kind.kind == Round::kMax) {
        if (!team.leader()) return;
        int64_t max = 0, raw = 0;
        for (int64_t w = 0; w < a.world; ++w) {
            max = words[w * stride] > max ? words[w * stride] : max;
            raw = words[w * stride + 1] > raw ? words[w * stride + 1] : raw;
        }
        for (int i = 0; i < kStateWords; ++i) state[i] = 0;
        state[kStateMax] = max;
        state[kStateRawMax] = raw;
        if (p.filtered() && p.top_k > 0) state[kStateTopKLeft] = p.top_k;
        if (p.filtered() && p.top_p < 1.0f) state[kStateTopPLeft] = 1;  // the real need is known with the total mass
        return;
    }
    const bool top_k = kind.kind == Round::kTopK;
    Word left = static_cast<Word>(state[top_k ? kStateTopKLeft : kStateTopPLeft]);
    if (left == 0) return;
    Word mine = 0;
    if (team.tid() < kDigits) {
        for (int64_t w = 0; w < a.world; ++w) mine += static_cast<Word>(words[w * stride + team.tid()]);
        team.s->digit_sums[team.tid()] = mine;
    }
    const Word total = team.block_sum(kSlotSum, mine);  // every thread has read the state
    if (kind.shift == 24) {
        if (top_k && total <= left) {  // nothing to cut
            if (team.leader()) state[kStateTopKLeft] = 0;
            return;
        }
        if (!top_k) left = top_p_need(total, p.top_p);
    }
    const int digit = warp_select_digit(team.s->digit_sums, &left, team.lane());
    if (!team.leader()) return;
    state[top_k ? kStateTopKLeft : kStateTopPLeft] = static_cast<int64_t>(left);
    state[top_k ? kStateTopKCut : kStateTopPCut] |= static_cast<int64_t>(digit) << kind.shift;
}

// Grid (B).
__global__ void __launch_bounds__(kTeamThreads) combine_walk_kernel(const __grid_constant__ CombineTask a) {
    const Team team{{}, 1, 0, nullptr, 0};
    const int64_t b = blockIdx.x;
    if (!a.in.active[b]) return write_inactive(team, a.out, b);
    const RowParams p = a.in.params(b);
    const WalkTree tree = open_tree(team, a.in, a.tokens, b);
    walk_tree(team, tree, p.flags, a.out, a.stops, b, [&](int32_t node, int32_t, const int64_t*) {
        const int64_t row = tree.begin + node;
        Word best = 0, mass = 0;
        uint32_t raw_bits = 0;
        bool bad = false;
        for (int64_t w = 0; w < a.world; ++w) {
            const int64_t* words = a.words + (w * a.in.rows + row) * a.num_words;
            const Word key = static_cast<Word>(words[0]);
            bad = bad || (key & kKeyBad);
            if (a.num_rounds > 1) mass += static_cast<Word>(words[1]);
            if ((key & ~static_cast<Word>(kKeyStatus)) > best) {
                best = key & ~static_cast<Word>(kKeyStatus);
                raw_bits = a.num_rounds > 1 ? static_cast<uint32_t>(words[2]) : 0;
            }
        }
        Chosen c{key_has_token(best), static_cast<int64_t>(key_id(best)), bad, 0.0f};
        if (c.has_token && a.out.logprobs) {
            const float max = from_ordered_bits(static_cast<uint32_t>(a.state[row * kStateWords + kStateRawMax]));
            c.logprob = bits_to_float(raw_bits) - max - log_mass(mass);
        }
        return c;
    });
    if (!team.leader()) return;
    const bool unfiltered = a.num_rounds != kFilterRounds && p.filtered();
    const NodeRange range = node_range(a.in.cu_nodes, b, a.in.rows);
    const bool replaced = range.n > 0 && (a.words[range.begin * a.num_words] & static_cast<int64_t>(kKeyBadParam));  // any rank's
    if (unfiltered || replaced) a.out.flags[b] |= kFlagBadParam;
}

void verify_tree_combine_cuda(
    const Tensor partials, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature, const Tensor top_k,
    const Tensor top_p, const Tensor min_p, OptTensor counts, Tensor state, Tensor out_tokens, Tensor num_tokens_out,
    Tensor path, Tensor next_root, Tensor flags, OptTensor logprobs, int64_t vocab_offset, int64_t vocab_size,
    int64_t round, int64_t num_rounds, int64_t rule) {
    const CombineCall call = check_combine(partials, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids,
                                           temperature, top_k, top_p, min_p, counts, state, out_tokens, num_tokens_out, path,
                                           next_root, flags, logprobs, vocab_offset, vocab_size, round, num_rounds, rule);
    const Launch launch("verify_tree_combine", partials);
    CombineTask a{};
    a.words = cptr<int64_t>(partials);
    a.world = partials.size(0);
    a.num_words = partials.size(2);
    a.in = call.in;
    a.out = call.out;
    a.tokens = IdArray(tokens);
    a.stops = stop_view(stop_ids);
    a.state = mptr<int64_t>(state);
    a.round = static_cast<int>(round);
    a.num_rounds = static_cast<int>(num_rounds);
    const bool last = round == num_rounds - 1;
    const int64_t blocks = last ? call.in.batch : call.in.rows;
    if (blocks == 0) return;
    launch.run(last ? combine_walk_kernel : fold_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kTeamThreads), kTeamSmem, a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("verify_tree_combine", TORCH_BOX(&verify_tree_combine_cuda)); }

}  // namespace fv
