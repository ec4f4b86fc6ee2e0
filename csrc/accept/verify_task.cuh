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

// Asks for a block's slice of a row, so that it is on its way from memory while something else is done.
template <class T>
__device__ __forceinline__ void prefetch_slice(const VerifyTask& a, int64_t row, int lane, int lanes) {
    const int vocab = static_cast<int>(a.in.vocab), per = ((vocab + kChunk - 1) / kChunk + lanes - 1) / lanes * kChunk;
    const T* data = static_cast<const T*>(a.logits) + row * a.stride;
    constexpr int kLine = 128 / sizeof(T);
    const int end = per * (lane + 1) < vocab ? per * (lane + 1) : vocab;
#pragma unroll 1
    for (int i = per * lane + static_cast<int>(threadIdx.x) * kLine; i < end; i += kTeamThreads * kLine) prefetch_l2(data + i);
}

// What all rows of a request have in common; one thread. After a barrier, copy_row() by all.
template <bool kExtras, class T>
__device__ __forceinline__ void init_rows(const VerifyTask& a, int64_t b, Team team) {
    static_assert(sizeof(Row<T>) <= sizeof(team.s->rows[0]));
    Row<T>& r = *reinterpret_cast<Row<T>*>(team.s->rows[0]);
    const int vocab = static_cast<int>(a.in.vocab);
    r.init(a.in.params(b), 0, vocab, kExtras && a.bias ? a.bias + b * vocab : nullptr,
           kExtras && a.out.counts ? a.out.counts + b * vocab : nullptr, kExtras && a.in.penalties, team.s->emitted, kExtras);
    r.set_slice(team.rank(), team.size);
    team.s->params = r.p;
    team.s->position = static_cast<uint32_t>(a.in.prefix_len[b]) + 1;
}
__device__ __forceinline__ void copy_row(Team team) {
    constexpr int kWords = sizeof(team.s->rows[0]) / 4;
    if (team.tid() < kWords) {
        reinterpret_cast<uint32_t*>(team.s->rows[1])[team.tid()] = reinterpret_cast<const uint32_t*>(team.s->rows[0])[team.tid()];
    }
}

// The next row; every thread of the block calls it, with turns alternating.
template <bool kExtras, class T>
__device__ __forceinline__ const Row<T>& open_row(const VerifyTask& a, int64_t row, int depth, int turn, Team team) {
    Row<T>& r = *reinterpret_cast<Row<T>*>(team.s->rows[turn]);
    if (team.leader()) {
        r.open(static_cast<const T*>(a.logits) + row * a.stride,
               kExtras && a.bitmask ? a.bitmask + row * ((a.in.vocab + 31) / 32) : nullptr, team.s->position + depth, depth, turn);
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
