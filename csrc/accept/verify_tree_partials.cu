// SPDX-License-Identifier: Apache-2.0
// verify_tree_partials on the GPU: one rank's words of one round, a team of blocks per row. Protocol: algo/partials.h.
// Cost: the shard's rows read once, R * words written; one launch.
#include <torch/csrc/stable/library.h>

#include "accept/device_filters.cuh"
#include "accept/verify_args.h"
#include "algo/verify_plan.h"
#include "common/launch.h"

namespace fv {
namespace {

struct PartialsTask {
    const void* logits;  // [R, stride]
    int64_t stride, shard, offset;
    VerifyInputs in;
    IdView tokens;            // [R]
    const float* bias;        // [B,shard] or null
    const int32_t* bitmask;   // [R,ceil(V/32)] or null
    const int32_t* counts;    // [B,shard] or null
    const int64_t* state;     // [R,kStateWords]
    int64_t* words;           // [R,num_words]
    int64_t num_words;
    int round, num_rounds, cluster;
};

// Counts (or masses) of the block's entries o >= floor inside the prefix, by the digit at `shift`, into s->digits[0].
template <bool kExtras, class T>
__device__ __attribute__((noinline)) void slice_digits(
    const Row<T>& row, Team team, bool by_mass, uint32_t prefix, uint32_t floor, int shift, float zmax) {
    TeamScratch* s = team.s;
    __syncthreads();
    for (int i = team.tid(); i < kDigitCopies * kDigits; i += kTeamThreads) (&s->digit_low[0][0])[i] = (&s->digit_high[0][0])[i] = 0;
    __syncthreads();
    uint32_t* lows = s->digit_low[team.lane() % kDigitCopies];
    uint32_t* highs = s->digit_high[team.lane() % kDigitCopies];
    const uint32_t lowest = ordered_bits(-kFloatMax), known = shift < 24 && prefix > floor ? prefix : floor;
    visit_from<kExtras>(row, team, from_ordered_bits(known > lowest ? known : lowest), [&](int, float z) {
        const uint32_t o = ordered_bits(z), d = o >> shift & (kDigits - 1);
        if (!in_prefix(o, prefix, shift)) return;
        const uint64_t weight = by_mass ? mass_of(z, zmax) : 1;
        const uint32_t low = static_cast<uint32_t>(weight), before = atomicAdd(lows + d, low);
        const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < low);
        if (high) atomicAdd(highs + d, high);
    });
    __syncthreads();
    for (int d = team.tid(); d < kDigits; d += kTeamThreads) {
        Word total = 0;
        for (int c = 0; c < kDigitCopies; ++c) total += static_cast<Word>(s->digit_high[c][d]) << 32 | s->digit_low[c][d];
        s->digits[0][d] = total;
    }
}

// Words of a row that a walk can visit; out was zeroed.
template <bool kExtras, class T>
__device__ void write_words(const PartialsTask& a, const Row<T>& row, Team team, const int64_t* state, int64_t* out) {
    const RoundKind kind = round_kind(a.round, a.num_rounds);
    const bool writer = team.leader() && team.writes();
    const RowParams& p = row.p;
    const auto state_bits = [&](int word) { return static_cast<uint32_t>(state[word]); };
    if (kind.kind == Round::kMax) {
        bool bad;
        const uint32_t mine = thread_max<kExtras>(row, team, &bad);
        const uint32_t top = team.block_top(kSlotFilter, mine, 0).top;
        const uint32_t raw = team.block_top(kSlotFast, raw_max_of_slice(row, team), 0).top;
        const uint32_t team_top = team.team_bounds(0, kTeamBounds, top, 0, 0).top;
        const uint32_t team_raw = team.team_bounds(0, kTeamRawMax, raw, 0, 0).top;
        if (writer) {
            out[0] = team_top;
            out[1] = team_raw;
        }
    } else if (kind.kind == Round::kFinal) {
        float zmax = 0.0f, cut = -kInf;
        bool empty = false;
        if (a.num_rounds == kFilterRounds && p.filtered()) {
            empty = state[kStateMax] == 0;
            zmax = from_ordered_bits(state_bits(kStateMax));
            const uint32_t top_k = state_bits(kStateTopKCut), top_p = state_bits(kStateTopPCut), bits = top_k > top_p ? top_k : top_p;
            cut = raised_by_min_p(bits ? from_ordered_bits(bits) : -kInf, p.min_p, zmax);
        }
        Word key = best_of_slice<kExtras>(row, team, cut, zmax);
        key = team.team_key(0, empty ? key & kKeyBad : key);
        const Word status = (key & kKeyBad) | (p.flags ? kKeyBadParam : 0);
        key &= ~static_cast<Word>(kKeyStatus);
        if (writer) out[0] = static_cast<int64_t>(key | status);
        if (a.num_rounds > 1) {
            Word mass = 0;
            if (state[kStateRawMax]) mass = raw_mass_of_slice(row, team, from_ordered_bits(state_bits(kStateRawMax)));
            mass = team.team_sum(0, kTeamRawMass, team.block_sum(kSlotSum, mass));
            if (writer) {
                out[1] = static_cast<int64_t>(mass);
                out[2] = key ? float_to_bits(row.raw_one(static_cast<int>(key_id(key)))) : 0;
            }
        }
    } else {
        const bool top_k = kind.kind == Round::kTopK;
        if (!p.filtered() || !state[kStateMax] || (top_k ? !state[kStateTopKLeft] : !state[kStateTopPLeft])) return;
        slice_digits<kExtras>(row, team, !top_k, state_bits(top_k ? kStateTopKCut : kStateTopPCut),
                              top_k ? 0 : state_bits(kStateTopKCut), kind.shift, from_ordered_bits(state_bits(kStateMax)));
        team.team_digits(0);
        if (!team.writes()) return;
        for (int d = team.tid(); d < kDigits; d += kTeamThreads) out[d] = static_cast<int64_t>(team.s->digit_sums[d]);
    }
}

// Grid (R * cluster).
template <class T, bool kExtras>
__global__ void __launch_bounds__(kTeamThreads, kBlocksPerSm) partials_kernel(const __grid_constant__ PartialsTask a) {
    const Team team{{}, a.cluster, static_cast<int>(blockIdx.x) % a.cluster, nullptr, 0};
    const int64_t at = blockIdx.x / a.cluster;
    int64_t* out = a.words + at * a.num_words;
    if (team.writes()) {
        for (int64_t i = team.tid(); i < a.num_words; i += kTeamThreads) out[i] = 0;
    }
    const int64_t b = request_of_row(a.in, at, team);
    if (b < 0) return;
    const WalkTree tree = open_tree(team, a.in, a.tokens, b);
    const int64_t node = at - tree.begin;
    if (node >= tree.n) return;
    const int depth = node_depth<kExtras>(team, static_cast<int32_t>(node));
    Row<T>& row = *reinterpret_cast<Row<T>*>(team.s->rows[0]);
    if (team.leader()) {
        RowParams p = a.in.params(b);
        if (a.num_rounds != kFilterRounds) p.min_p = 0.0f;
        row.init(p, static_cast<int>(a.offset), static_cast<int>(a.shard), kExtras && a.bias ? a.bias + b * a.shard : nullptr,
                 kExtras && a.counts ? a.counts + b * a.shard : nullptr, kExtras && a.in.penalties, team.s->emitted, kExtras);
        row.set_slice(team.rank(), team.size, kTeamThreads);
        row.open(static_cast<const T*>(a.logits) + at * a.stride,
                 kExtras && a.bitmask ? a.bitmask + at * ((a.in.vocab + 31) / 32) : nullptr,
                 static_cast<uint32_t>(a.in.prefix_len[b]) + depth + 1, depth, 0);
    }
    __syncthreads();
    if constexpr (kExtras) mark_ancestors(row, team);
    write_words<kExtras>(a, row, team, a.state + at * kStateWords, out);
    if (team.size > 1) cluster_barrier();  // no block leaves while another may read its shared memory
}

template <class T>
void launch_partials(const Launch& launch, const PartialsTask& a, bool extras) {
    launch.run_cluster(extras ? partials_kernel<T, true> : partials_kernel<T, false>, a.cluster,
                       dim3(static_cast<unsigned>(a.cluster * a.in.rows)), dim3(kTeamThreads), kTeamSmem, a);
}

void verify_tree_partials_cuda(
    const Tensor logits, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
    const Tensor seed, const OptTensor bias, const OptTensor bitmask, const OptTensor penalties, const OptTensor counts,
    const Tensor state, Tensor partials, int64_t vocab_offset, int64_t vocab_size, int64_t round, int64_t num_rounds,
    int64_t rule) {
    const PartialsCall call = check_partials(logits, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p,
                                             min_p, seed, bias, bitmask, penalties, counts, state, partials, vocab_offset,
                                             vocab_size, round, num_rounds, rule);
    if (call.in.rows == 0) return;
    const Launch launch("verify_tree_partials", logits);
    PartialsTask a{};
    a.logits = logits.const_data_ptr();
    a.stride = logits.stride(0);
    a.shard = call.shard;
    a.offset = vocab_offset;
    a.in = call.in;
    a.tokens = IdArray(tokens);
    a.bias = cptr<float>(bias);
    a.bitmask = cptr<int32_t>(bitmask);
    a.counts = cptr<int32_t>(counts);
    a.state = cptr<int64_t>(state);
    a.words = mptr<int64_t>(partials);
    a.num_words = call.words;
    a.round = static_cast<int>(round);
    a.num_rounds = static_cast<int>(num_rounds);
    a.cluster = partials_cluster(call.in.rows, call.shard, launch.props.major, launch.props.sms);
    const bool extras = bias || bitmask || penalties;
    switch (logits.scalar_type()) {
        case ScalarType::Half: return launch_partials<__half>(launch, a, extras);
        case ScalarType::BFloat16: return launch_partials<__nv_bfloat16>(launch, a, extras);
        default: return launch_partials<float>(launch, a, extras);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("verify_tree_partials", TORCH_BOX(&verify_tree_partials_cuda)); }

}  // namespace fv
