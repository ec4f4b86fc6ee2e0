// SPDX-License-Identifier: Apache-2.0
// A team: the blocks of one cluster (one block on devices without clusters) that work on a row together. Reductions over
// a block and over the team, and the team as the walker of verify_walk.h.
#pragma once
#include "accept/verify_walk.h"
#include "algo/partials.h"
#include "common/warp.cuh"

namespace fv {

constexpr int kTeamThreads = 512;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kListEntries = 512;    // candidates of a block's slice, and of the merged slices
constexpr int kDigitCopies = 8;      // a histogram is kept in copies, so that equal digits of a warp collide less
constexpr int kAncestorBits = 8192;  // hashed set of the 8-id chunks that hold an ancestor

using Word = unsigned long long;  // what 64-bit atomics take

struct Candidate {
    float z;
    int32_t id;
};
struct Candidates {
    Candidate slice[kListEntries], all[kListEntries], kept[kListEntries];  // of this block's slice; of the row; in top-k
    Word mass[kListEntries];  // of kept
};

// Exchange slots, by the call that uses them: a slot is written again only after a barrier that follows its last reading.
enum BlockSlot { kSlotFast, kSlotExact, kSlotSettle, kSlotSettleAgain, kSlotSum, kSlotFilter, kSlotBest, kSlotRaw, kBlockSlots };
enum TeamSlot { kTeamKey, kTeamBounds, kTeamRawMax, kTeamRawMass, kTeamSlots };

struct TeamScratch {
    Word block_words[kBlockSlots][kTeamWarps];
    uint32_t block_bits[kBlockSlots][kTeamWarps];
    Word team_words[2][kTeamSlots];    // [turn of the row]
    uint32_t team_bits[2][kTeamSlots][4];
    Word digits[4][kDigits], sums[kDigits];
    uint32_t list_count[2], kept_count, last_team;
    uint32_t ancestor_bits[kAncestorBits / 32];
    RowParams params;
    uint32_t position;  // of the root's token
    int32_t parent[kMaxNodes], token[kMaxNodes], path[kMaxNodes];
    int64_t emitted[kMaxNodes];
    float logprob[kMaxNodes];
    alignas(16) unsigned char rows[2][256];  // Row<T> [turn]
    union {
        Candidates candidates;
        Word digit_copies[kDigitCopies][kDigits];
        Word node_keys[kMaxNodes];
    };
};
constexpr size_t kTeamSmem = sizeof(TeamScratch);

__device__ __forceinline__ uint32_t warp_max_u32(uint32_t v) { return __reduce_max_sync(kFullWarp, v); }
__device__ __forceinline__ Word warp_max_word(Word v) {
    const uint32_t high = static_cast<uint32_t>(v >> 32), top = warp_max_u32(high);
    const uint32_t low = warp_max_u32(high == top ? static_cast<uint32_t>(v) : 0);
    return static_cast<Word>(top) << 32 | low;
}

// Small and without state: passed by value. `turn` = parity of the row in the order that the team takes rows.
struct Team {
    TeamScratch* s;
    int size;  // blocks

    __device__ __forceinline__ int tid() const { return static_cast<int>(threadIdx.x); }
    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) & 31; }
    __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) >> 5; }
    __device__ __forceinline__ int rank() const { return size > 1 ? static_cast<int>(cluster_rank()) : 0; }
    __device__ __forceinline__ void barrier() const {
        if (size > 1) cluster_barrier();
        else __syncthreads();
    }

    // ---- over the block; every thread calls, every thread gets the result -----------------------------------
    struct TopBits {
        uint32_t top, bits;
    };
    // Largest of `top`, or of all `bits`.
    __device__ __forceinline__ TopBits block_top(BlockSlot slot, uint32_t top, uint32_t bits) const {
        top = warp_max_u32(top);
        bits = __reduce_or_sync(kFullWarp, bits);
        if (lane() == 0) {
            s->block_words[slot][warp()] = top;
            s->block_bits[slot][warp()] = bits;
        }
        __syncthreads();
        return TopBits{warp_max_u32(static_cast<uint32_t>(s->block_words[slot][lane() % kTeamWarps])),
                       __reduce_or_sync(kFullWarp, s->block_bits[slot][lane() % kTeamWarps])};
    }
    // Largest key; every lane of a warp gives its warp's.
    __device__ __forceinline__ Word block_key(BlockSlot slot, Word key) const {
        if (lane() == 0) s->block_words[slot][warp()] = key;
        __syncthreads();
        return warp_max_word(s->block_words[slot][lane() % kTeamWarps]);
    }
    __device__ __forceinline__ Word block_sum(BlockSlot slot, Word v) const {
        v = warp_sum(v);
        if (lane() == 0) s->block_words[slot][warp()] = v;
        __syncthreads();
        return warp_sum(lane() < kTeamWarps ? s->block_words[slot][lane()] : 0);
    }

    // ---- over the team: values are those of the block ---------------------------------------------------------
    // Largest key without its status bits, and the status bits of all.
    __device__ __forceinline__ Word team_key(int turn, Word key) const {
        if (tid() == 0) s->team_words[turn][kTeamKey] = key;
        barrier();
        const Word mine = lane() < size ? *cluster_map(&s->team_words[turn][kTeamKey], lane()) : 0;
        const uint32_t status = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine & kKeyStatus));
        return warp_max_word(mine & ~static_cast<Word>(kKeyStatus)) | status;
    }
    __device__ __forceinline__ Word team_sum(int turn, TeamSlot slot, Word v) const {
        if (tid() == 0) s->team_words[turn][slot] = v;
        barrier();
        return warp_sum(lane() < size ? *cluster_map(&s->team_words[turn][slot], lane()) : 0);
    }
    struct Bounds {
        uint32_t top, low, bits;
    };
    // Largest `top`, smallest `low`, or of all `bits`.
    __device__ __forceinline__ Bounds team_bounds(int turn, TeamSlot slot, uint32_t top, uint32_t low, uint32_t bits) const {
        uint32_t* mine = s->team_bits[turn][slot];
        if (tid() == 0) {
            mine[0] = top;
            mine[1] = low;
            mine[2] = bits;
        }
        barrier();
        const uint32_t* other = cluster_map(mine, lane() < size ? lane() : 0);
        return Bounds{warp_max_u32(other[0]), __reduce_min_sync(kFullWarp, other[1]), __reduce_or_sync(kFullWarp, other[2])};
    }
    // Sums of every block's digits[set] into s->sums; the caller has filled digits[set] and not yet passed a barrier.
    __device__ __forceinline__ void team_digits(int set) const {
        barrier();
        static_assert(kTeamThreads == 2 * kDigits);
        const int d = tid() % kDigits, half = tid() / kDigits;
        Word total = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int r = 2 * k + half;
            if (r < size) total += *cluster_map(&s->digits[set][d], r);
        }
        if (half) s->sums[d] = total;
        __syncthreads();
        if (!half) s->sums[d] += total;
        __syncthreads();
    }

    // ---- the walker of verify_walk.h --------------------------------------------------------------------------
    __device__ __forceinline__ void open(const int32_t* parents, const IdView& tokens, int64_t begin, int32_t n) const {
        for (int i = tid(); i < n; i += kTeamThreads) {
            const int64_t t = tokens[begin + i];
            s->parent[i] = parents[i];
            s->token[i] = t >= 0 && t < kMaxVocab ? static_cast<int32_t>(t) : -1;
        }
        __syncthreads();
    }
    __device__ __forceinline__ int32_t parent(int32_t i) const { return s->parent[i]; }
    __device__ __forceinline__ int64_t token(int32_t i) const { return s->token[i]; }
    // Every warp looks at all of them: no barrier.
    template <class F>
    __device__ __forceinline__ bool all(int32_t begin, int32_t end, const F& f) const {
        bool ok = true;
        for (int32_t i = begin + lane(); i < end; i += 32) ok = ok && f(i);
        return __all_sync(kFullWarp, ok);
    }
    template <class F>
    __device__ __forceinline__ int32_t first(int32_t begin, int32_t end, const F& f) const {
        for (int32_t i = begin; i < end; i += 32) {
            const unsigned hits = __ballot_sync(kFullWarp, i + lane() < end && f(i + lane()));
            if (hits) return i + __ffs(static_cast<int>(hits)) - 1;
        }
        return -1;
    }
    template <class F>
    __device__ __forceinline__ void each(int64_t n, const F& f) const {
        for (int64_t i = tid(); i < n; i += kTeamThreads) f(i);
    }
    __device__ __forceinline__ bool leader() const { return threadIdx.x == 0; }
    __device__ __forceinline__ bool writes() const { return rank() == 0; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ void add_one(int32_t* p) const { atomicAdd(p, 1); }
    __device__ __forceinline__ int32_t* path() const { return s->path; }
    __device__ __forceinline__ int64_t* emitted() const { return s->emitted; }
    __device__ __forceinline__ float* logprob() const { return s->logprob; }
};

// Depth of a node; with kTokens the drafted tokens above it go to emitted(). Whole block; a barrier must follow.
template <bool kTokens>
__device__ __forceinline__ int node_depth(Team team, int32_t node) {
    int depth = 0;
    for (int32_t i = node; i > 0; i = team.parent(i), ++depth) {
        if (kTokens && team.leader()) team.s->emitted[depth] = team.token(i);
    }
    return depth;
}

// The last active request that has the row, or -1. Whole block.
__device__ __forceinline__ int64_t request_of_row(const VerifyInputs& in, int64_t row, Team team) {
    uint32_t found = 0;
    for (int64_t b = team.tid(); b < in.batch; b += kTeamThreads) {
        if (!in.active[b]) continue;
        const NodeRange r = node_range(in.cu_nodes, b, in.rows);
        if (row >= r.begin && row < r.begin + r.n) found = static_cast<uint32_t>(b) + 1;
    }
    return static_cast<int64_t>(team.block_top(kSlotRaw, found, 0).top) - 1;
}

}  // namespace fv
