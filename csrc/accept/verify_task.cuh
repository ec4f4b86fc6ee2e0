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

// This block's team, and the request it works on.
__device__ __forceinline__ Team join_team(const VerifyTask& a, int64_t* request) {
    const int block = static_cast<int>(blockIdx.x), blocks = a.shape.blocks;
    *request = block / blocks;
    const Team team{{}, blocks, block % blocks, a.area, block / blocks * blocks};
    if (team.tid() == 0) team.s->select_set = 0;
    return team;
}
// The first tag of this launch, one per visited row. Blocks of a team read it before they hand anything on, and the team's first
// block, which waits for them, counts the team afterwards: the last team of a launch goes on to the next launch's tags.
__device__ __forceinline__ uint32_t first_tag_of_launch(const VerifyTask& a) {
    return a.shape.blocks > 1 ? ld_relaxed_gpu_16(a.area + kAreaLaunches).y + 1 : 0;
}
__device__ __forceinline__ void count_team(const VerifyTask& a) {
    if (a.shape.blocks < 2) return;
    Word* launches = reinterpret_cast<Word*>(a.area + kAreaLaunches);
    const uint32_t teams = gridDim.x / static_cast<uint32_t>(a.shape.blocks);
    const Word before = atomicAdd(launches, 1ull);
    if (static_cast<uint32_t>(before) == teams - 1) atomicAdd(launches, (static_cast<Word>(a.out.max_path + 1) << 32) - teams);
}
constexpr int kTagThread = kTeamThreads - 1;  // reads and counts, while the first warp walks

// A request's single values, asked for before anything else; of one thread.
struct RequestValues {
    uint32_t first_tag, temperature, top_k, top_p, min_p, prefix_len, remaining;
    int64_t seed;
    __device__ __forceinline__ void ask(const VerifyTask& a, int64_t b) {
        first_tag = first_tag_of_launch(a);
        prefix_len = load_here_4(a.in.prefix_len + b);
        temperature = load_here_4(a.in.temperature + b);
        seed = a.in.seed ? static_cast<int64_t>(load_here_8(a.in.seed + b)) : 0;
        top_k = load_here_4(a.in.top_k + b);
        top_p = load_here_4(a.in.top_p + b);
        min_p = load_here_4(a.in.min_p + b);
        remaining = load_here_4(a.out.remaining + b);
    }
};

// The arguments that the walk reads, brought near by a thread while others wait for memory.
__device__ __forceinline__ void touch_outputs(const VerifyTask& a, TeamScratch* s) {
    const auto bits = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    const uintptr_t x = bits(a.out.flags) ^ bits(a.out.path) ^ bits(a.out.num_tokens_out) ^ bits(a.out.remaining) ^ bits(a.out.logprobs) ^
                        bits(a.out.counts) ^ static_cast<uintptr_t>(a.stops.n) ^ static_cast<uintptr_t>(a.out.max_path) ^ bits(a.bias);
    if (x == 0x9e3779b97f4a7c15ull) s->select_left = 1;  // keeps the reads; written again before it is read
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

// What all rows of a request have in common; one thread. A barrier must follow.
template <bool kExtras, class T>
__device__ __forceinline__ void init_rows(const VerifyTask& a, int64_t b, Team team, const RequestValues& v) {
    static_assert(sizeof(Row<T>) <= sizeof(team.s->rows[0]));
    Row<T>& r = *reinterpret_cast<Row<T>*>(team.s->rows[0]);
    const int vocab = static_cast<int>(a.in.vocab);
    const RowParams params = a.in.params(b, bits_to_float(v.temperature), static_cast<int32_t>(v.top_k), bits_to_float(v.top_p),
                                         bits_to_float(v.min_p), v.seed);
    r.init(params, 0, vocab, kExtras && a.bias ? a.bias + b * vocab : nullptr,
           kExtras && a.out.counts ? a.out.counts + b * vocab : nullptr, kExtras && a.in.penalties, team.s->emitted, kExtras);
    const bool wide = r.p.filtered() || a.out.logprobs;
    r.set_slice(team.index, wide && team.size > kTeamWide ? kTeamWide : team.size, kTeamThreads);
    team.s->params = r.p;
    team.s->first_tag = v.first_tag;
    team.s->position = v.prefix_len + 1;
    team.s->remaining = static_cast<int32_t>(v.remaining);
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

// Before node_keys are filled; the barrier after that is enough.
__device__ __forceinline__ void clear_hits(Team team, int n) {
    for (int i = team.tid(); i < n; i += kTeamThreads) team.s->hit[i] = kMaxNodes;
}

// The walk over keys and log-probabilities that are known; the whole block calls it, after clear_hits() and a barrier.
__device__ __forceinline__ void walk_keys(const VerifyTask& a, const WalkTree& tree, Team team, int64_t b) {
    TeamScratch* s = team.s;
    for (int i = team.tid() + 1; i < tree.n; i += kTeamThreads) {
        const Word key = s->node_keys[team.parent(i)];
        if (key_has_token(key) && static_cast<int64_t>(key_id(key)) == team.token(i)) atomicMin(&s->hit[team.parent(i)], i);
    }
    __syncthreads();
    if (team.tid() == kTagThread) count_team(a);
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
    if (team.index == 0 && team.tid() == kTagThread) count_team(a);
    if (walks) finish_walk(walker, at, a.out, a.stops, b);
    clear_sums(team);
}

}  // namespace fv
