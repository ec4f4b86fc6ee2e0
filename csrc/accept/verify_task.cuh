// SPDX-License-Identifier: Apache-2.0
// One call of the acceptance over logits in memory, and the token of one visited row by a team of blocks: shared by
// verify_tree and by lm_head_verify_tree's requests with filters.
#pragma once
#include "accept/device_filters.cuh"
#include "algo/verify_plan.h"

namespace fv {

struct VerifyTask {
    const void* logits;  // [R, stride]
    int64_t stride;
    VerifyInputs in;
    VerifyOutputs out;
    IdView tokens;  // [R]
    StopIds stops;
    const float* bias;       // [B,V] or null
    const int32_t* bitmask;  // [R,ceil(V/32)] or null
    uint32_t* arrivals;      // [B], zero
    Word* row_keys;          // [R,lanes]
    float* row_logprobs;     // [R]
    VerifyShape shape;
};

// The row in shared memory, its slice `lane` of `lanes` chosen; every thread of the block calls it, with turns alternating.
template <bool kExtras, class T>
__device__ const Row<T>& open_row(
    const VerifyTask& a, int64_t b, int64_t row, int depth, int turn, int lane, int lanes, Team team) {
    static_assert(sizeof(Row<T>) <= sizeof(team.s->rows[0]));
    Row<T>& r = *reinterpret_cast<Row<T>*>(team.s->rows[turn]);
    if (team.tid() == 0) {
        r.data = static_cast<const T*>(a.logits) + row * a.stride;
        r.n = a.in.vocab;
        r.offset = 0;
        r.bias = kExtras && a.bias ? a.bias + b * a.in.vocab : nullptr;
        r.bitmask = kExtras && a.bitmask ? a.bitmask + row * ((a.in.vocab + 31) / 32) : nullptr;
        r.counts = kExtras && a.out.counts ? a.out.counts + b * a.in.vocab : nullptr;
        r.ancestors = team.s->emitted;
        r.num_ancestors = depth;
        r.penalties = kExtras && a.in.penalties != nullptr;
        r.p = team.s->params;
        r.t = static_cast<uint32_t>(a.in.prefix_len[b]) + depth + 1;
        r.turn = turn;
        r.set_slice(lane, lanes);
    }
    __syncthreads();
    if constexpr (kExtras) mark_ancestors(r, team);
    return r;
}

// Key of one row by the whole team, with its status.
template <bool kExtras, class T>
__device__ __forceinline__ Word team_choice(const Row<T>& row, Team team) {
    if (row.p.filtered()) return filtered_key<kExtras>(row, team);
    return team.team_key(row.turn, best_of_slice<kExtras>(row, team, -kInf, 0.0f));
}

__device__ __forceinline__ Chosen chosen_of(Word key) {
    return Chosen{key_has_token(key), static_cast<int64_t>(key_id(key)), (key & kKeyBad) != 0, 0.0f};
}

}  // namespace fv
