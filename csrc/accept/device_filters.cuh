// SPDX-License-Identifier: Apache-2.0
// Top-k, top-p and min-p of one row, by the blocks of a team; the same cuts as accept/rows.cpp.
//
// Up to kFastTopK: every block publishes the largest entries of its slice, a few more than its share of k; the k-th largest of
// all of them is the cut if no block may hold back a larger one (else once more, with k entries per block). One exchange.
// Otherwise, or when ties overflow the lists: select_cut, a search by sums of counts or fixed-point masses over 1024 buckets.
#pragma once
#include "accept/device_rows.cuh"

namespace fv {

constexpr int kFastTopK = 256;

// How many entries a block first publishes: its share of k and four deviations, for slices as alike as interleaving makes them.
__device__ __forceinline__ int first_share(int top_k, int blocks) {
    const float mean = static_cast<float>(top_k) / static_cast<float>(blocks);
    const int share = static_cast<int>(mean + 4.0f * sqrtf(mean) + 4.0f);
    return share < top_k ? share : top_k;
}

// A value v of ordered_bits such that at least j threads hold m >= v, and not many more; 1 if fewer than j hold any.
__device__ inline uint32_t block_bound(uint32_t m, uint32_t top, int j) {
    uint32_t low = top, high = top + 1;
    int count = 0;
    for (uint32_t step = 1u << 17;; step = step > 1u << 29 ? ~0u : step << 2) {
        low = top > step ? top - step : 1;
        count = __syncthreads_count(m >= low && m > 0);
        if (count >= j || low == 1) break;
        high = low;
    }
    if (count < j) return 1;
    while (count > j + j / 2 + 2 && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int c = __syncthreads_count(m >= middle);
        if (c >= j) {
            low = middle;
            count = c;
        } else {
            high = middle;
        }
    }
    return low;
}

// The same from the maxima of 8 threads each: at least j entries of the block reach it. j <= kTopGroups.
__device__ inline uint32_t group_bound(Team team, uint32_t m, int j) {
    TeamScratch* s = team.s;
#pragma unroll
    for (int d = 1; d < kTopGroup; d <<= 1) {
        const uint32_t other = __shfl_xor_sync(kFullWarp, m, d);
        m = other > m ? other : m;
    }
    if (team.tid() % kTopGroup == 0) s->group_max[team.tid() / kTopGroup] = m;
    __syncthreads();
    if (team.tid() < kTopGroups) {
        const uint32_t mine = s->group_max[team.tid()];
        int larger = 0;
        for (int i = 0; i < kTopGroups; ++i) {
            const uint32_t o = s->group_max[i];
            larger += o > mine || (o == mine && i < team.tid());
        }
        if (larger == j - 1) s->bound = mine > 1 ? mine : 1;
    }
    __syncthreads();
    return s->bound;
}

// Places in a list that is `*count` long for the lanes that take one; every lane of the warp calls it.
__device__ __forceinline__ uint32_t places(Team team, uint32_t* count, bool takes) {
    const unsigned lanes = __ballot_sync(kFullWarp, takes);
    const int first = __ffs(static_cast<int>(lanes)) - 1;
    uint32_t base = 0;
    if (team.lane() == first) base = atomicAdd(count, static_cast<uint32_t>(__popc(lanes)));
    return __shfl_sync(kFullWarp, base, first & 31) + __popc(lanes & ((1u << team.lane()) - 1));
}

// Ranks n candidates that hold all entries of top-k (ties included). Key of the best that all filters keep; every thread.
template <class T>
__device__ __attribute__((noinline)) Word best_candidate(const Row<T>& given, Team team, int n, float zmax) {
    const Row<T>& row = *known_shared(&given);
    Candidates& c = team.s->candidates;
    const int part = team.tid() & 3;  // four threads per candidate
    for (int i0 = 0; i0 < n; i0 += kTeamThreads / 4) {
        const int i = i0 + (team.tid() >> 2);
        const float z = i < n ? c.all[i].z : kInf;
        int larger = 0;
        for (int j = part; j < n; j += 4) larger += c.all[j].z > z;
        larger += __shfl_xor_sync(kFullWarp, larger, 1);
        larger += __shfl_xor_sync(kFullWarp, larger, 2);
        const bool keeps = part == 0 && i < n && larger < row.p.top_k;
        const uint32_t at = places(team, &team.s->kept_count, keeps);
        if (keeps) {
            c.kept[at] = c.all[i];
            if (row.p.top_p < 1.0f) c.mass[at] = mass_of(z, zmax);
        }
    }
    __syncthreads();
    const int kept = static_cast<int>(team.s->kept_count);
    Word need = 0;
    if (row.p.top_p < 1.0f) {
        need = top_p_need(team.block_sum(kSlotSum, team.tid() < kept ? c.mass[team.tid()] : 0), row.p.top_p);
    }
    Word best = 0;
    for (int i0 = 0; i0 < kept; i0 += kTeamThreads / 4) {
        const int i = i0 + (team.tid() >> 2);
        const Candidate mine = i < kept ? c.kept[i] : Candidate{kInf, 0};
        Word above = 0;
        if (row.p.top_p < 1.0f) {
            for (int j = part; j < kept; j += 4) above += c.kept[j].z > mine.z ? c.mass[j] : 0;
            above += __shfl_xor_sync(kFullWarp, above, 1);
            above += __shfl_xor_sync(kFullWarp, above, 2);
        }
        if (part == 0 && i < kept && (above < need || !(row.p.top_p < 1.0f)) &&
            (!(row.p.min_p > 0.0f) || min_p_keeps(mine.z, zmax, row.p.min_p))) {
            const uint32_t id = static_cast<uint32_t>(mine.id);
            const Word key = make_key(mine.z + gumbel_noise(id, row.t, row.p.seed_lo, row.p.seed_hi), id);
            best = key > best ? key : best;
        }
    }
    return team.block_key(kSlotBest, warp_max_word(best));
}

// ordered_bits of this thread's largest z (0: none).
template <bool kExtras, class T>
__device__ __forceinline__ uint32_t thread_max(const Row<T>& row, Team team, bool* bad) {
    *bad = false;
    if (!kExtras && row.simple()) {  // the temperature keeps the order: one division
        const float x = scan_simple<true, false>(row, row.start(team.tid()), 0.0f).best;
        if (ordered_bits(x + 0.0f) < ordered_bits(kInf)) return x > -kInf ? ordered_bits(row.scaled(x)) : 0;
    }
    uint32_t best = 0;
    *bad = visit<kExtras>(row, team, [&](int, const float (&z)[kChunk]) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const uint32_t o = z[j] > -kInf ? ordered_bits(z[j]) : 0;
            best = o > best ? o : best;
        }
    });
    return best;
}

// The cut, raised to what min-p excludes for sure; key_of decides exactly.
__device__ __forceinline__ float raised_by_min_p(float cut, float min_p, float zmax) {
    if (!(min_p > 1e-30f)) return cut;
    const float sure = zmax + log_exact(min_p) - 0.01f;
    return sure > cut ? sure : cut;
}

// Lists the slice's entries >= bound in candidates.slice, or .all; how many there are.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) uint32_t list_entries(const Row<T>& given, Team team, uint32_t mine, uint32_t bound, bool of_slice) {
    const Row<T>& row = *known_shared(&given);
    TeamScratch* s = team.s;
    Candidate* list = of_slice ? s->candidates.slice : s->candidates.all;
    __syncthreads();  // what was read of the lists and of the counts
    if (team.tid() == 0) s->list_count = s->all_count = s->kept_count = 0;
    __syncthreads();
    if (mine >= bound && mine > 0) {
        const uint32_t lowest = ordered_bits(-kFloatMax);
        visit_from<kExtras>(row, team, from_ordered_bits(bound > lowest ? bound : lowest), [&](int id, float z) {
            const uint32_t at = atomicAdd(&s->list_count, 1u);
            if (at < kListEntries) list[at] = Candidate{z, id};
        });
    }
    __syncthreads();
    return s->list_count;
}

// Publishes the block's entries >= bound and collects those of all blocks that can be in top-k into candidates.all. How many;
// -1: not all of top-k was published. Also the row's largest z and whether NaN or +inf was met.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) int gather_candidates(
    const Row<T>& given, Team team, uint32_t mine, Team::TopBits block, uint32_t bound, int again, Team::TopBits* of_row) {
    const Row<T>& row = *known_shared(&given);
    TeamScratch* s = team.s;
    Candidates& c = s->candidates;
    const int turn = row.turn;
    const uint32_t n = list_entries<kExtras>(row, team, mine, bound, team.size > 1);
    if (team.size == 1) {
        *of_row = block;
        return n <= kListEntries && (n >= static_cast<uint32_t>(row.p.top_k) || bound <= 1) ? static_cast<int>(n) : -1;
    }
    const uint32_t tag = s->tag[turn];
    const bool fits = n <= kPublished;
    if (fits && team.tid() < static_cast<int>(n)) {
        put_tagged(team.list_place(again, turn, team.index, team.tid()), float_to_bits(c.slice[team.tid()].z),
                   static_cast<uint32_t>(c.slice[team.tid()].id), tag);
    }
    const uint4 other = team.exchange(turn, again ? kTeamGatherAgain : kTeamGather,
                                      make_uint4(fits ? n : ~0u, bound, block.top, block.bits));
    of_row->top = warp_max_u32(other.z);
    of_row->bits = __reduce_or_sync(kFullWarp, other.w);
    const uint32_t floor = warp_max_u32(other.y);  // what is below may not have been published, what reaches it has
    if (warp_max_u32(other.x) == ~0u) return -1;
    for (int r = team.warp(); r < team.size; r += kTeamWarps) {
        const int count = static_cast<int>(__shfl_sync(kFullWarp, other.x, r));
        for (int i0 = 0; i0 < count; i0 += 32) {
            const int i = i0 + team.lane();
            uint2 w = make_uint2(0, 0);
            if (i < count) w = get_tagged(team.list_place(again, turn, r, i), tag);
            const float z = bits_to_float(w.x);
            const bool keeps = i < count && ordered_bits(z) >= floor;
            const uint32_t at = places(team, &s->all_count, keeps);
            if (keeps && at < kListEntries) c.all[at] = Candidate{z, static_cast<int32_t>(w.y)};
        }
    }
    __syncthreads();
    const uint32_t total = s->all_count;
    return total <= kListEntries && (total >= static_cast<uint32_t>(row.p.top_k) || floor <= 1) ? static_cast<int>(total) : -1;
}

// ---- the search by sums -----------------------------------------------------------------------------------------

// Which of the 1024 buckets an entry of the interval [lo, hi] of ordered_bits falls into, the largest entries into bucket 0:
// first by distance from the row's maximum in steps of 1/32, then by bits.
struct Buckets {
    uint32_t lo, hi;
    int shift;  // < 0: by distance
    float zmax;
    __device__ __forceinline__ int of(float z, uint32_t o) const {
        if (shift >= 0) return static_cast<int>((hi - o) >> shift);
        const float steps = (zmax - z) * 32.0f;
        return steps < static_cast<float>(kSelectBuckets - 1) ? static_cast<int>(steps) : kSelectBuckets - 1;
    }
};

// Sums of counts or masses by bucket, over the team, into s->select.sums; pass: of this row.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) void sum_buckets(
    const Row<T>& given, Team team, bool by_mass, const Buckets& buckets, int slot) {
    const Row<T>& row = *known_shared(&given);
    TeamScratch* s = team.s;
    Select& sel = s->select;
    __syncthreads();
    for (int i = team.tid(); i < kSelectBuckets; i += kTeamThreads) sel.low[i] = sel.high[i] = 0;
    __syncthreads();
    visit_from<kExtras>(row, team, from_ordered_bits(buckets.lo), [&](int, float z) {
        const uint32_t o = ordered_bits(z);
        if (o > buckets.hi) return;
        const uint64_t weight = by_mass ? mass_of(z, buckets.zmax) : 1;
        if (weight == 0) return;
        const int d = buckets.of(z, o);
        const uint32_t low = static_cast<uint32_t>(weight), before = atomicAdd(&sel.low[d], low);
        const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < low);
        if (high) atomicAdd(&sel.high[d], high);
    });
    __syncthreads();
    const auto mine = [&](int i) { return static_cast<Word>(sel.high[i]) << 32 | sel.low[i]; };
    if (team.size == 1) {
        for (int i = team.tid(); i < kSelectBuckets; i += kTeamThreads) sel.sums[i] = mine(i);
        __syncthreads();
        return;
    }
    const int set = static_cast<int>(s->select_set);
    Word* shared = team.sum_place(set);
    for (int i = team.tid(); i < kSelectBuckets; i += kTeamThreads) {
        if (mine(i)) atomicAdd(shared + i, mine(i));
    }
    __syncthreads();
    if (team.tid() == 0) fence_gpu();
    team.exchange(row.turn, slot, make_uint4(0, 0, 0, 0));
    fence_gpu();
    __syncthreads();
    // all have read the sums of the pass before: their place is zeroed for the pass after the next
    Word* old = team.sum_place((set + kSelectSets - 1) % kSelectSets);
    for (int i = team.tid(); i < kSelectBuckets; i += kTeamThreads) {
        sel.sums[i] = __ldcg(shared + i);
        if (team.index == 0) old[i] = 0;
    }
    if (team.index == 0) fence_gpu();
    if (team.tid() == 0) s->select_set = (set + 1) % kSelectSets;
    __syncthreads();
}

// The bucket in which the sums from bucket 0 on reach `need(total)`; *left: what of it falls to that bucket. Whole block.
template <class F>
__device__ __forceinline__ int find_bucket(Team team, const F& need, Word* left) {
    TeamScratch* s = team.s;
    static_assert(kSelectBuckets == 2 * kTeamThreads);
    const Word a = s->select.sums[2 * team.tid()], b = s->select.sums[2 * team.tid() + 1];
    Word through = a + b;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const Word before = __shfl_up_sync(kFullWarp, through, d);
        if (team.lane() >= d) through += before;
    }
    if (team.lane() == 31) s->block_words[kSlotScan][team.warp()] = through;
    __syncthreads();
    Word above = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) {
        if (w == team.warp()) above = total;
        total += s->block_words[kSlotScan][w];
    }
    through += above;
    const Word wanted = need(total), before = through - a - b;
    if (before < wanted && wanted <= through) {
        const bool second = before + a < wanted;
        s->select_bucket = static_cast<uint32_t>(2 * team.tid() + second);
        s->select_left = wanted - before - (second ? a : 0);
    }
    __syncthreads();
    *left = s->select_left;
    return static_cast<int>(s->select_bucket);
}

// ordered_bits of the smallest entry that top-k (counts) or top-p (masses) keeps among those >= floor; 0: everything.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) uint32_t select_cut(
    const Row<T>& given, Team team, bool by_mass, uint32_t floor, float zmax) {
    const Row<T>& row = *known_shared(&given);
    const uint32_t lowest = ordered_bits(-kFloatMax);
    Buckets buckets{floor > lowest ? floor : lowest, ordered_bits(zmax), -1, zmax};
    int slot = kTeamSelect + (by_mass ? kSelectExchanges : 0);
    Word left = 0;
    for (int pass = 0; pass < kSelectExchanges / 2; ++pass) {
        sum_buckets<kExtras>(row, team, by_mass, buckets, slot++);
        bool all = false;
        const int d = find_bucket(team, [&](Word total) -> Word {
            if (pass > 0) return left;
            if (by_mass) return top_p_need(total, row.p.top_p);
            all = total <= static_cast<Word>(row.p.top_k);
            return all ? 1 : static_cast<Word>(row.p.top_k);
        }, &left);
        if (all) return 0;
        if (buckets.shift == 0) return buckets.hi - static_cast<uint32_t>(d);
        // smallest and largest entry of that bucket
        float from = from_ordered_bits(buckets.lo);
        if (buckets.shift < 0 && d < kSelectBuckets - 1) from = fmaxf(from, zmax - static_cast<float>(d + 2) * (1.0f / 32.0f));
        uint32_t high = 0, low = ~0u;
        visit_from<kExtras>(row, team, from, [&](int, float z) {
            const uint32_t o = ordered_bits(z);
            if (o > buckets.hi || buckets.of(z, o) != d) return;
            high = o > high ? o : high;
            low = o < low ? o : low;
        });
        high = team.block_max(kSlotFilter, high);
        low = ~team.block_max(kSlotLow, ~low);
        const Team::Bounds bounds = team.team_bounds(row.turn, slot++, high, low, 0);
        if (bounds.top == bounds.low) return bounds.top;
        const int bits = 32 - __clz(static_cast<int>(bounds.top - bounds.low));
        buckets = Buckets{bounds.low, bounds.top, bits > 10 ? bits - 10 : 0, zmax};
    }
    return buckets.lo;
}

// After the last row of a team: the sums that were added last, for the next launch.
__device__ __forceinline__ void clear_sums(Team team) {
    if (team.size == 1 || team.index > 0 || !team.s->params.filtered()) return;
    Word* sums = team.sum_place(static_cast<int>(team.s->select_set + kSelectSets - 1) % kSelectSets);
    for (int i = team.tid(); i < kSelectBuckets; i += kTeamThreads) sums[i] = 0;
}

// Key of a filtered row with its status bits: in the first warp of every block.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word filtered_key(const Row<T>& given, Team team) {
    const Row<T>& row = *known_shared(&given);
    bool bad_here;
    const uint32_t mine = thread_max<kExtras>(row, team, &bad_here);
    const Team::TopBits block = team.block_top(kSlotFilter, mine, bad_here);
    if (row.p.top_k > 0 && row.p.top_k <= kFastTopK) {
        const int share = first_share(row.p.top_k, team.size);
        for (int again = 0; again < (share < row.p.top_k ? 2 : 1); ++again) {
            const int j = again ? row.p.top_k : share;
            const uint32_t bound = 4 * j <= 3 * kTopGroups ? group_bound(team, mine, j) : block_bound(mine, block.top, j);
            Team::TopBits of_row;
            const int n = gather_candidates<kExtras>(row, team, mine, block, bound, again, &of_row);
            const Word status = of_row.bits ? kKeyBad : 0;
            if (of_row.top == 0) return status;
            if (n >= 0) return best_candidate(row, team, n, from_ordered_bits(of_row.top)) | status;
        }
    }
    __syncthreads();  // what was exchanged before has been read
    const Team::Bounds bounds = team.team_bounds(row.turn, kTeamBounds, block.top, 0, block.bits);
    const Word status = bounds.bits ? kKeyBad : 0;
    if (bounds.top == 0) return status;
    const float zmax = from_ordered_bits(bounds.top);
    uint32_t cut_bits = 0;
    if (row.p.top_k > 0) cut_bits = select_cut<kExtras>(row, team, false, 0, zmax);
    if (row.p.top_p < 1.0f) cut_bits = select_cut<kExtras>(row, team, true, cut_bits, zmax);
    const float cut = raised_by_min_p(cut_bits ? from_ordered_bits(cut_bits) : -kInf, row.p.min_p, zmax);
    return team.team_key(row.turn, best_of_slice<kExtras>(row, team, cut, zmax) | status);
}

// Log-probability of `token` under the raw logits (0: no token), in the first warp of every block; all blocks of the team call it.
template <class T>
__device__ __attribute__((noinline)) float raw_logprob(const Row<T>& given, Team team, const int64_t* token) {
    const Row<T>& row = *known_shared(&given);
    const Team::TopBits block = team.block_top(kSlotRaw, raw_max_of_slice(row, team), 0);
    const uint32_t top = team.team_bounds(row.turn, kTeamRawMax, block.top, 0, 0).top;
    const float max = top ? from_ordered_bits(top) : -kInf;
    const Word mass = team.team_sum(row.turn, kTeamRawMass, team.block_sum(kSlotSum, raw_mass_of_slice(row, team, max)));
    return token ? row.raw_one(static_cast<int>(*token)) - max - log_mass(mass) : 0.0f;
}

}  // namespace fv
