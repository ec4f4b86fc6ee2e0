// SPDX-License-Identifier: Apache-2.0
// A team: blocks that work on a row together. Reductions over a block and over the team, and the team as the walker of
// verify_walk.h.
//
// Blocks of a team that walks agree through the exchange area of the workspace (algo/verify_plan.h): a block writes its words
// with a tag beside each, the others read until the tag is the one they wait for. The tag is counted on over levels and
// launches, so nothing is ever reset. All blocks of such a launch run at the same time. Teams of verify_tree_partials are
// clusters and exchange through each other's shared memory.
#pragma once
#include "accept/verify_walk.h"
#include "algo/partials.h"
#include "algo/verify_plan.h"
#include "common/warp.cuh"

namespace fv {

constexpr int kTeamThreads = 512;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kListEntries = 512;    // candidates of a block's slice, and of the merged slices
constexpr int kDigitCopies = 4;      // a histogram is kept in copies, so that equal digits of a warp collide less
constexpr int kAncestorBits = 8192;  // hashed set of the 8-id chunks that hold an ancestor
constexpr int kTopGroup = 8;         // threads whose largest entries count as one when candidates are chosen
constexpr int kTopGroups = kTeamThreads / kTopGroup;

using Word = unsigned long long;  // what 64-bit atomics take

struct Candidate {
    float z;
    int32_t id;
};
struct Candidates {
    Candidate slice[kListEntries], all[kListEntries], kept[kListEntries];  // of this block's slice; of the row; in top-k
    Word mass[kListEntries];  // of kept
};
// Sums of counts or masses; a sum lies in two halves, since shared memory adds 32 bits at a time.
struct Select {
    uint32_t low[kSelectBuckets], high[kSelectBuckets];
    Word sums[kSelectBuckets];
};

// Shared memory of a reduction, by the call that uses it: written again only after a barrier that follows its last reading.
enum BlockSlot {
    kSlotFast, kSlotExact, kSlotSettle, kSlotSettleAgain, kSlotSum, kSlotFilter, kSlotBest, kSlotRaw, kSlotLow, kSlotScan, kBlockSlots
};
// Exchanges of one row, in places of their own.
enum TeamSlot { kTeamKey, kTeamBounds, kTeamRawMax, kTeamRawMass, kTeamGather, kTeamGatherAgain, kTeamSelect };
constexpr int kClusterSlots = kTeamGather;
constexpr int kSelectExchanges = 10;  // of one select_cut
static_assert(kTeamSelect + 2 * kSelectExchanges <= kExchanges);

struct TeamScratch {
    Word block_words[kBlockSlots][kTeamWarps];
    uint32_t block_bits[kBlockSlots][kTeamWarps];
    Word team_words[2][kClusterSlots];    // clusters: [turn of the row]
    uint32_t team_bits[2][kClusterSlots][4];
    uint4 exchanged[kTeamWide];
    uint32_t group_max[kTopGroups];
    Word select_left;
    uint32_t list_count, all_count, kept_count, bound, select_bucket, select_set;
    uint32_t tag[2];                  // of the row with that turn
    uint32_t first_tag;
    int32_t remaining;                // of the request
    int32_t work_node, work_child;    // what the walking warp asks the block to do; -1: nothing more
    uint32_t ancestor_bits[kAncestorBits / 32];
    RowParams params;
    uint32_t position;  // of the root's token
    int32_t parent[kMaxNodes], token[kMaxNodes], path[kMaxNodes];
    int64_t emitted[kMaxNodes];
    float logprob[kMaxNodes];
    alignas(16) unsigned char rows[2][256];  // Row<T> [turn]
    union {
        Candidates candidates;
        Select select;
        struct {
            uint32_t digit_low[kDigitCopies][kDigits], digit_high[kDigitCopies][kDigits];
            Word digits[2][kDigits], digit_sums[kDigits];
        };
        struct {
            Word node_keys[kMaxNodes];
            float node_logprobs[kMaxNodes];
            int32_t hit[kMaxNodes];  // the node's child that carries its token; kMaxNodes: none
            alignas(16) unsigned char warp_rows[kTeamWarps][256];  // Row<T>
        };
    };
};
constexpr size_t kTeamSmem = sizeof(TeamScratch);

__device__ __forceinline__ uint32_t warp_max_u32(uint32_t v) { return __reduce_max_sync(kFullWarp, v); }
__device__ __forceinline__ Word warp_max_word(Word v) {
    const uint32_t high = static_cast<uint32_t>(v >> 32), top = warp_max_u32(high);
    const uint32_t low = warp_max_u32(high == top ? static_cast<uint32_t>(v) : 0);
    return static_cast<Word>(top) << 32 | low;
}
// Largest key without its status bits, with those of all.
__device__ __forceinline__ Word warp_max_key(Word v) {
    const uint32_t status = static_cast<uint32_t>(v) & static_cast<uint32_t>(kKeyStatus);
    return warp_max_word(v & ~static_cast<Word>(kKeyStatus)) | __reduce_or_sync(kFullWarp, status);
}

// Words that carry their tag.
__device__ __forceinline__ void put_tagged(uint4* place, uint32_t a, uint32_t b, uint32_t tag) {
    st_relaxed_gpu_16(place, make_uint4(a, tag, b, tag));
}
__device__ __forceinline__ uint2 get_tagged(const uint4* place, uint32_t tag) {
    uint4 v = ld_relaxed_gpu_16(place);
    while (v.y != tag || v.w != tag) {
        spin_pause();
        v = ld_relaxed_gpu_16(place);
    }
    return make_uint2(v.x, v.z);
}

#ifndef FV_EMULATE
__device__ __forceinline__ unsigned char* dynamic_shared();  // common/launch.h
#endif
// Where every kernel with teams has its scratch: not a pointer that is passed on, so that the compiler knows what memory it is.
struct ScratchPlace {
    __device__ __forceinline__ operator TeamScratch*() const { return reinterpret_cast<TeamScratch*>(dynamic_shared()); }
    __device__ __forceinline__ TeamScratch* operator->() const { return *this; }
};

// Small and without state: passed by value. `turn` = parity of the row in the order that the team takes rows.
struct Team {
    ScratchPlace s;
    int size, index;      // blocks, and which of them
    unsigned char* area;  // the exchange area, or null: a cluster
    int block0;           // the team's first block in the launch

    __device__ __forceinline__ int tid() const { return static_cast<int>(threadIdx.x); }
    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) & 31; }
    __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) >> 5; }
    __device__ __forceinline__ int rank() const { return index; }

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
    __device__ __forceinline__ uint32_t block_max(BlockSlot slot, uint32_t top) const {
        top = warp_max_u32(top);
        if (lane() == 0) s->block_bits[slot][warp()] = top;
        __syncthreads();
        return warp_max_u32(s->block_bits[slot][lane() % kTeamWarps]);
    }
    // Largest key; every lane of a warp gives its warp's.
    __device__ __forceinline__ Word block_key(BlockSlot slot, Word key) const {
        if (lane() == 0) s->block_words[slot][warp()] = key;
        __syncthreads();
        return warp_max_word(s->block_words[slot][lane() % kTeamWarps]);
    }
    // Largest key without its status bits, with those of all.
    __device__ __forceinline__ Word block_key_status(BlockSlot slot, Word key) const {
        if (lane() == 0) s->block_words[slot][warp()] = key;
        __syncthreads();
        return warp_max_key(s->block_words[slot][lane() % kTeamWarps]);
    }
    __device__ __forceinline__ Word block_sum(BlockSlot slot, Word v) const {
        v = warp_sum(v);
        if (lane() == 0) s->block_words[slot][warp()] = v;
        __syncthreads();
        return warp_sum(lane() < kTeamWarps ? s->block_words[slot][lane()] : 0);
    }

    // ---- over the team: values are those of the block, the same in all of its threads --------------------------
    __device__ __forceinline__ uint4* place(int slot, int turn, int r) const {
        return reinterpret_cast<uint4*>(area + kAreaSlots) + ((slot * 2 + turn) * kTeamBlocks + block0 + r) * 2;
    }
    // Candidate i of block r, of the first or second attempt.
    __device__ __forceinline__ uint4* list_place(int again, int turn, int r, int i) const {
        return reinterpret_cast<uint4*>(area + kAreaLists) + ((again * 2 + turn) * kTeamBlocks + block0 + r) * kPublished + i;
    }
    __device__ __forceinline__ Word* sum_place(int set) const {  // teams that use it have two blocks or more
        return reinterpret_cast<Word*>(area + kAreaSums) + (static_cast<int64_t>(block0 / 2) * kSelectSets + set) * kSelectBuckets;
    }
    // What one thread hands to the team's first block: `count` places for every block.
    __device__ __forceinline__ uint4* item_place(int i) const {
        return reinterpret_cast<uint4*>(area + kAreaItems) + static_cast<int64_t>(block0) * kTeamWarps + i;
    }
    __device__ __forceinline__ void cluster_write(int turn, TeamSlot slot, Word v) const {
        if (tid() == 0) s->team_words[turn][slot] = v;
        cluster_barrier();
    }

    // Largest key without its status bits, and the status bits of all: in the block's first warp only.
    __device__ __forceinline__ Word team_key(int turn, Word key) const {
        if (size == 1) return key;
        Word best = 0;
        uint32_t status = 0;
        const auto take = [&](Word k) {
            status |= static_cast<uint32_t>(k & kKeyStatus);
            k &= ~static_cast<Word>(kKeyStatus);
            best = k > best ? k : best;
        };
        if (!area) {
            cluster_write(turn, kTeamKey, key);
            if (lane() < size) take(*cluster_map(&s->team_words[turn][kTeamKey], lane()));
        } else {
            if (warp() > 0) return 0;
            const uint32_t tag = s->tag[turn];
            if (lane() == 0) put_tagged(place(kTeamKey, turn, index), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key), tag);
            for (int r = lane(); r < size; r += 32) {
                const uint2 w = get_tagged(place(kTeamKey, turn, r), tag);
                take(static_cast<Word>(w.x) << 32 | w.y);
            }
        }
        return warp_max_word(best) | __reduce_or_sync(kFullWarp, status);
    }
    // In the block's first warp only.
    __device__ __forceinline__ Word team_sum(int turn, TeamSlot slot, Word v) const {
        if (size == 1) return v;
        if (!area) {
            cluster_write(turn, slot, v);
            return warp_sum(lane() < size ? *cluster_map(&s->team_words[turn][slot], lane()) : 0);
        }
        if (warp() > 0) return 0;
        const uint32_t tag = s->tag[turn];
        if (lane() == 0) put_tagged(place(slot, turn, index), static_cast<uint32_t>(v >> 32), static_cast<uint32_t>(v), tag);
        Word total = 0;
        for (int r = lane(); r < size; r += 32) {
            const uint2 w = get_tagged(place(slot, turn, r), tag);
            total += static_cast<Word>(w.x) << 32 | w.y;
        }
        return warp_sum(total);
    }
    struct Bounds {
        uint32_t top, low, bits;
    };
    // Largest `top`, smallest `low`, or of all `bits`; at most kTeamWide blocks.
    __device__ __forceinline__ Bounds team_bounds(int turn, int slot, uint32_t top, uint32_t low, uint32_t bits) const {
        if (size == 1) return Bounds{top, low, bits};
        if (!area) {
            uint32_t* mine = s->team_bits[turn][slot];
            if (tid() == 0) {
                mine[0] = top;
                mine[1] = low;
                mine[2] = bits;
            }
            cluster_barrier();
            const uint32_t* other = cluster_map(mine, lane() < size ? lane() : 0);
            return Bounds{warp_max_u32(other[0]), __reduce_min_sync(kFullWarp, other[1]), __reduce_or_sync(kFullWarp, other[2])};
        }
        const uint4 w = exchange(turn, slot, make_uint4(top, low, bits, 0));
        return Bounds{warp_max_u32(w.x), __reduce_min_sync(kFullWarp, lane() < size ? w.y : ~0u), __reduce_or_sync(kFullWarp, w.z)};
    }
    // Four words of every block: lane r of each warp gets those of block r (zeros from `size` on). At most kTeamWide blocks.
    // One warp waits for them: with more, reading in vain is what they wait for.
    __device__ __forceinline__ uint4 exchange(int turn, int slot, uint4 mine) const {
        if (warp() == 0) {
            const uint32_t tag = s->tag[turn];
            if (lane() == 0) {
                put_tagged(place(slot, turn, index), mine.x, mine.y, tag);
                put_tagged(place(slot, turn, index) + 1, mine.z, mine.w, tag);
            }
            uint2 a = make_uint2(0, 0), b = a;
            if (lane() < size) {
                a = get_tagged(place(slot, turn, lane()), tag);
                b = get_tagged(place(slot, turn, lane()) + 1, tag);
            }
            s->exchanged[lane()] = make_uint4(a.x, a.y, b.x, b.y);
        }
        __syncthreads();
        return s->exchanged[lane()];
    }
    // Clusters: sums of every block's digits[set] into s->digit_sums; the caller has filled digits[set] and not yet passed a barrier.
    __device__ __forceinline__ void team_digits(int set) const {
        if (size > 1) cluster_barrier();
        else __syncthreads();
        static_assert(kTeamThreads == 2 * kDigits && kMaxCluster <= 8);
        const int d = tid() % kDigits, half = tid() / kDigits;
        Word total = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int r = 2 * k + half;
            if (r < size) total += *cluster_map(&s->digits[set][d], r);
        }
        if (half) s->digit_sums[d] = total;
        __syncthreads();
        if (!half) s->digit_sums[d] += total;
        __syncthreads();
    }

    // ---- the walker of verify_walk.h --------------------------------------------------------------------------
    template <class P, class K>
    __device__ __forceinline__ void open_nodes(int32_t n, const P& parent_of, const K& token_of) const {
        for (int i = tid(); i < n; i += kTeamThreads) {
            const int64_t t = token_of(i);
            s->parent[i] = parent_of(i);
            s->token[i] = t >= 0 && t < kMaxVocab ? static_cast<int32_t>(t) : -1;
        }
        __syncthreads();
    }
    __device__ __forceinline__ void open(const int32_t* parents, const IdView& tokens, int64_t begin, int32_t n) const {
        open_nodes(n, [&](int i) { return parents[i]; }, [&](int i) { return tokens[begin + i]; });
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
    __device__ __forceinline__ int32_t child(int32_t node, int32_t n, int64_t wanted) const {
        return first(node + 1, n, [&](int32_t j) { return parent(j) == node && token(j) == wanted; });
    }
    template <class F>
    __device__ __forceinline__ void each(int64_t n, const F& f) const {
        for (int64_t i = tid(); i < n; i += kTeamThreads) f(i);
    }
    __device__ __forceinline__ int32_t remaining(const int32_t* p) const { return *p; }
    __device__ __forceinline__ bool leader() const { return threadIdx.x == 0; }
    __device__ __forceinline__ bool writes() const { return rank() == 0; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ void add_one(int32_t* p) const { atomicAdd(p, 1); }
    __device__ __forceinline__ int32_t* path() const { return s->path; }
    __device__ __forceinline__ int64_t* emitted() const { return s->emitted; }
    __device__ __forceinline__ float* logprob() const { return s->logprob; }
};

// The walk by one warp; init_rows() has read what remains.
struct WarpWalker : Team {
    template <class F>
    __device__ __forceinline__ void each(int64_t n, const F& f) const {
        for (int64_t i = lane(); i < n; i += 32) f(i);
    }
    __device__ __forceinline__ void sync() const { __syncwarp(); }
    __device__ __forceinline__ int32_t remaining(const int32_t*) const { return s->remaining; }
};

// The same where every node's token is known: each node has said whether its parent leads to it.
struct HitWalker : WarpWalker {
    __device__ __forceinline__ int32_t child(int32_t node, int32_t, int64_t) const {
        return s->hit[node] < kMaxNodes ? s->hit[node] : -1;
    }
};

// A team that asks for its request's nodes before it knows where they are: from row `guess` on, if that is not negative.
struct AheadTeam : Team {
    int64_t begin_ahead;
    int32_t parent_ahead;
    int64_t token_ahead;
    __device__ __forceinline__ AheadTeam(Team team, const VerifyInputs& in, const IdView& tokens, int64_t guess)
        : Team(team), begin_ahead(guess), parent_ahead(0), token_ahead(0) {
        const int64_t i = begin_ahead + tid();
        if (guess >= 0 && i < in.rows) {
            parent_ahead = static_cast<int32_t>(load_here_4(in.parents + i));
            token_ahead = tokens.wide ? static_cast<int64_t>(load_here_8(static_cast<const int64_t*>(tokens.data) + i))
                                      : static_cast<int32_t>(load_here_4(static_cast<const int32_t*>(tokens.data) + i));
        }
    }
    __device__ __forceinline__ void open(const int32_t* parents, const IdView& tokens, int64_t begin, int32_t n) const {
        open_nodes(n, [&](int i) { return begin == begin_ahead && i == tid() ? parent_ahead : parents[i]; },
                   [&](int i) { return begin == begin_ahead && i == tid() ? token_ahead : tokens[begin + i]; });
    }
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
