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
    unsigned char* area;     // exchange area (algo/verify_plan.h); null: blocks work alone
    VerifyShape shape;
    int64_t rows_each;  // of a request, if all have as many
};

// This block's team, and the request it works on. One thread counts the launch; its tag is known after the next barrier.
__device__ __forceinline__ Team join_team(const VerifyTask& a, int64_t* request) {
    const int block = static_cast<int>(blockIdx.x), blocks = a.shape.blocks;
    *request = block / blocks;
    const Team team{{}, blocks, block % blocks, a.area, block / blocks * blocks};
    TeamScratch* s = team.s;
    if (team.tid() == 32 && blocks > 1) {
        Word* launches = reinterpret_cast<Word*>(a.area + kAreaLaunches);
        const Word before = atomicAdd(launches, 1ull);
        // tags of this launch: one per visited row; the last block to come hands on to the next launch
        if (static_cast<uint32_t>(before) == gridDim.x - 1) atomicAdd(launches, (static_cast<Word>(a.out.max_path + 1) << 32) - gridDim.x);
        s->first_tag = static_cast<uint32_t>(before >> 32) + 1;
    }
    if (team.tid() == 0) s->select_set = 0;
    return team;
}

// Asks for lines index, index + count, ... of a row, so that they are on their way from memory while something else is done.
template <class T>
__device__ __forceinline__ void prefetch_lines(const VerifyTask& a, int64_t row, int index, int count, int thread, int threads) {
    const int vocab = static_cast<int>(a.in.vocab);
    const T* data = static_cast<const T*>(a.logits) + row * a.stride;
    constexpr int kLineIds = kLine * kChunk, kParts = kLineIds * sizeof(T) / 128;
#pragma unroll 1
    for (int i = thread; (i / kParts * count + index) * kLineIds < vocab; i += threads) {
        prefetch_l2(data + (i / kParts * count + index) * kLineIds + i % kParts * (128 / static_cast<int>(sizeof(T))));
    }
}
template <class T>
__device__ __forceinline__ void prefetch_slice(const VerifyTask& a, int64_t row, Team team) {
    prefetch_lines<T>(a, row, team.index, team.size, team.tid(), kTeamThreads);
}

// What all rows of a request have in common; one thread. After a barrier, copy_row() by all.
template <bool kExtras, class T>
__device__ __forceinline__ void init_rows(const VerifyTask& a, int64_t b, Team team) {
    static_assert(sizeof(Row<T>) <= sizeof(team.s->rows[0]));
    Row<T>& r = *reinterpret_cast<Row<T>*>(team.s->rows[0]);
    const int vocab = static_cast<int>(a.in.vocab);
    r.init(a.in.params(b), 0, vocab, kExtras && a.bias ? a.bias + b * vocab : nullptr,
           kExtras && a.out.counts ? a.out.counts + b * vocab : nullptr, kExtras && a.in.penalties, team.s->emitted, kExtras);
    const bool wide = r.p.filtered() || a.out.logprobs;
    r.set_slice(team.index, wide && team.size > kTeamWide ? kTeamWide : team.size, kTeamThreads);
    team.s->params = r.p;
    team.s->position = static_cast<uint32_t>(a.in.prefix_len[b]) + 1;
    team.s->remaining = a.out.remaining[b];
}
__device__ __forceinline__ void copy_words(void* to, const void* from, int thread, int threads) {
    for (int i = thread; i < 64; i += threads) static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
}

// The next row, at rows[turn]; one thread.
template <bool kExtras, class T>
__device__ __forceinline__ void open_row(const VerifyTask& a, Row<T>& r, int64_t row, int depth, int turn, Team team) {
    r.open(static_cast<const T*>(a.logits) + row * a.stride,
           kExtras && a.bitmask ? a.bitmask + row * ((a.in.vocab + 31) / 32) : nullptr, team.s->position + depth, depth, turn);
}

// Key and log-probability of one row by the whole team, in the first warp of every block.
struct TeamChoice {
    Word key;
    float logprob;
    __device__ __forceinline__ Chosen chosen() const {
        return Chosen{key_has_token(key), static_cast<int64_t>(key_id(key)), (key & kKeyBad) != 0, logprob};
    }
};
template <bool kExtras, class T>
__device__ __forceinline__ TeamChoice team_choice(const VerifyTask& a, const Row<T>& row, Team team) {
    TeamChoice c{0, 0.0f};
    c.key = row.p.filtered() ? filtered_key<kExtras>(row, team)
                             : team.team_key(row.turn, best_of_slice<kExtras>(row, team, -kInf, 0.0f));
    const int64_t token = key_id(c.key);
    if (a.out.logprobs) c.logprob = raw_logprob(row, team, team.warp() == 0 && key_has_token(c.key) ? &token : nullptr);
    return c;
}

// The walk over keys and log-probabilities that are known; the whole block calls it, after a barrier.
__device__ __forceinline__ void walk_keys(const VerifyTask& a, const WalkTree& tree, Team team, int64_t b) {
    TeamScratch* s = team.s;
    for (int i = team.tid(); i < tree.n; i += kTeamThreads) s->hit[i] = kMaxNodes;
    __syncthreads();
    for (int i = team.tid() + 1; i < tree.n; i += kTeamThreads) {
        const Word key = s->node_keys[team.parent(i)];
        if (key_has_token(key) && static_cast<int64_t>(key_id(key)) == team.token(i)) atomicMin(&s->hit[team.parent(i)], i);
    }
    __syncthreads();
    if (team.warp() > 0) return;
    HitWalker walker{WarpWalker{team}};
    walk_tree(walker, tree, s->params.flags, a.out, a.stops, b, [&](int32_t node, int32_t, const int64_t*) {
        return TeamChoice{s->node_keys[node], a.out.logprobs ? s->node_logprobs[node] : 0.0f}.chosen();
    });
}

// The walk over logits in memory: the first warp walks, and all work on the rows that it visits; every barrier is one that
// all warps come to in the same place. `tree` was opened by the whole team; init_rows() was called and a barrier passed.
template <bool kExtras, class T>
__device__ __forceinline__ void walk_rows(const VerifyTask& a, const WalkTree& tree, Team team, int64_t b) {
    TeamScratch* s = team.s;
    copy_words(s->rows[1], s->rows[0], team.tid(), kTeamThreads);
    __syncthreads();
    const bool walks = team.warp() == 0;
    WarpWalker walker{team};
    WalkState at(tree, s->params.flags);
    for (int turn = 0;; turn ^= 1) {
        if (walks) {
            const bool more = at.goes_on(a.out.max_path);
            const int32_t child = more ? walker.first(at.node + 1, tree.n, [&](int32_t j) { return walker.parent(j) == at.node; }) : -1;
            if (team.leader()) {
                if (more) {
                    open_row<kExtras>(a, *reinterpret_cast<Row<T>*>(s->rows[turn]), tree.begin + at.node, at.visited, turn, team);
                    s->tag[turn] = s->first_tag + at.visited;
                }
                s->work_child = child;  // the likeliest comes first
                s->work_node = more ? at.node : -1;
            }
        }
        __syncthreads();
        if (s->work_node < 0) break;
        const Row<T>& row = *reinterpret_cast<const Row<T>*>(s->rows[turn]);
        if (s->work_child >= 0) prefetch_slice<T>(a, tree.begin + s->work_child, team);
        if constexpr (kExtras) mark_ancestors(row, team);
        const Chosen c = team_choice<kExtras>(a, row, team).chosen();
        if (walks) walk_on(walker, tree, a.out.max_path, c, at);
    }
    if (walks) finish_walk(walker, at, a.out, a.stops, b);
    clear_sums(team);
}

}  // namespace fv
