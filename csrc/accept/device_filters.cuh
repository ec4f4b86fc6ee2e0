// SPDX-License-Identifier: Apache-2.0
// Top-k, top-p and min-p of one row, by the blocks of a team; the same cuts as accept/rows.cpp.
//
// Up to kFastTopK the candidates of all slices are gathered and ranked in shared memory: two barriers of the team. Otherwise,
// or when ties overflow the lists, a radix select on ordered_bits: four digits by counts, four by fixed-point masses.
#pragma once
#include "accept/device_rows.cuh"

namespace fv {

constexpr int kFastTopK = 256;

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

// Counts (or masses) of the block's entries o >= floor inside the prefix, by the digit at `shift`, into s->digits[set].
template <bool kExtras, class T>
__device__ __attribute__((noinline)) void slice_digits(
    const Row<T>& row, Team team, bool by_mass, uint32_t prefix, uint32_t floor, int shift, float zmax, int set) {
    TeamScratch* s = team.s;
    for (int i = team.tid(); i < kDigitCopies * kDigits; i += kTeamThreads) (&s->digit_copies[0][0])[i] = 0;
    __syncthreads();
    Word* mine = s->digit_copies[team.lane() % kDigitCopies];
    const uint32_t lowest = ordered_bits(-kFloatMax), known = shift < 24 && prefix > floor ? prefix : floor;
    visit_from<kExtras>(row, team, from_ordered_bits(known > lowest ? known : lowest), [&](int, float z) {
        const uint32_t o = ordered_bits(z);
        if (!in_prefix(o, prefix, shift)) return;
        atomicAdd(mine + (o >> shift & (kDigits - 1)), by_mass ? static_cast<Word>(mass_of(z, zmax)) : 1);
    });
    __syncthreads();
    for (int d = team.tid(); d < kDigits; d += kTeamThreads) {
        Word total = 0;
        for (int c = 0; c < kDigitCopies; ++c) total += s->digit_copies[c][d];
        s->digits[set][d] = total;
    }
}

// ordered_bits of the smallest entry that top-k and top-p keep; 0: everything.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) uint32_t radix_cut(const Row<T>& row, Team team, float zmax) {
    uint32_t cut = 0;
    for (int by_mass = 0; by_mass < 2; ++by_mass) {
        if (by_mass ? !(row.p.top_p < 1.0f) : row.p.top_k == 0) continue;
        Word left = static_cast<Word>(row.p.top_k);
        uint32_t prefix = 0;
        bool all = false;
        for (int shift = 24; shift >= 0 && !all; shift -= 8) {
            const int set = 2 * by_mass + (shift >> 3 & 1);
            slice_digits<kExtras>(row, team, by_mass != 0, prefix, by_mass ? cut : 0, shift, zmax, set);
            team.team_digits(set);
            if (shift == 24) {
                Word total = 0;
                for (int d = team.lane(); d < kDigits; d += 32) total += team.s->sums[d];
                total = warp_sum(total);
                if (by_mass) left = top_p_need(total, row.p.top_p);
                else all = total <= left;
            }
            if (!all) prefix |= static_cast<uint32_t>(warp_select_digit(team.s->sums, &left, team.lane())) << shift;
        }
        if (!all) cut = prefix;
    }
    return cut;
}

// Ranks n candidates that hold all entries of top-k (ties included). Key of the best that all filters keep; every thread.
template <class T>
__device__ __attribute__((noinline)) Word best_candidate(const Row<T>& row, Team team, int n, float zmax) {
    Candidates& c = team.s->candidates;
    const int part = team.tid() & 3;  // four threads per candidate
    for (int i0 = 0; i0 < n; i0 += kTeamThreads / 4) {
        const int i = i0 + (team.tid() >> 2);
        const float z = i < n ? c.all[i].z : kInf;
        int larger = 0;
        for (int j = part; j < n; j += 4) larger += c.all[j].z > z;
        larger += __shfl_xor_sync(kFullWarp, larger, 1);
        larger += __shfl_xor_sync(kFullWarp, larger, 2);
        if (part == 0 && i < n && larger < row.p.top_k) {
            const uint32_t at = atomicAdd(&team.s->kept_count, 1u);
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

// Gathers the entries >= bound of all slices into candidates.all; how many, or -1 when a list is too short.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) int gather_candidates(const Row<T>& row, Team team, uint32_t mine, uint32_t bound) {
    TeamScratch* s = team.s;
    const int set = row.turn;
    if (team.tid() == 0) {
        s->list_count[set ^ 1] = 0;  // no block reads it any more
        s->kept_count = 0;
    }
    if (mine >= bound && mine > 0) {
        const uint32_t lowest = ordered_bits(-kFloatMax);
        const float low = from_ordered_bits(bound > lowest ? bound : lowest);
        visit_from<kExtras>(row, team, low, [&](int id, float z) {
            const uint32_t at = atomicAdd(&s->list_count[set], 1u);
            if (at < kListEntries) s->candidates.slice[at] = Candidate{z, id};
        });
    }
    team.barrier();
    const uint32_t count = team.lane() < team.size ? *cluster_map(&s->list_count[set], team.lane()) : 0;
    uint32_t through = count;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const uint32_t before = __shfl_up_sync(kFullWarp, through, d);
        if (team.lane() >= d) through += before;
    }
    const uint32_t total = __shfl_sync(kFullWarp, through, 31);
    if (warp_max_u32(count) > kListEntries || total > kListEntries) return -1;
    for (int r = team.warp(); r < team.size; r += kTeamWarps) {
        const int n = static_cast<int>(__shfl_sync(kFullWarp, count, r));
        const int at = static_cast<int>(__shfl_sync(kFullWarp, through, r)) - n;
        const Candidate* from = cluster_map(&s->candidates.slice[0], r);
        for (int i = team.lane(); i < n; i += 32) s->candidates.all[at + i] = from[i];
    }
    __syncthreads();
    return static_cast<int>(total);
}

// ordered_bits of this thread's largest z (0: none).
template <bool kExtras, class T>
__device__ __forceinline__ uint32_t thread_max(const Row<T>& row, Team team, bool* bad) {
    if (!kExtras && row.plain && row.all_whole()) {  // the temperature keeps the order: one division
        const float x = raw_scan(row, team);
        *bad = x != x;
        if (!*bad) return x > -kInf ? ordered_bits(row.scaled(x)) : 0;
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

// Key of a filtered row with its status bits, the same in every thread of the team.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word filtered_key(const Row<T>& row, Team team) {
    bool bad_here;
    const uint32_t mine = thread_max<kExtras>(row, team, &bad_here);
    const Team::TopBits block = team.block_top(kSlotFilter, mine, bad_here);
    const bool fast = row.p.top_k > 0 && row.p.top_k <= kFastTopK;
    const uint32_t low = fast ? block_bound(mine, block.top, (row.p.top_k + team.size - 1) / team.size) : 1;
    const Team::Bounds bounds = team.team_bounds(row.turn, kTeamBounds, block.top, low, block.bits);
    const Word status = bounds.bits ? kKeyBad : 0;
    if (bounds.top == 0) return status;
    const float zmax = from_ordered_bits(bounds.top);
    if (fast) {
        const int n = gather_candidates<kExtras>(row, team, mine, bounds.low);
        if (n >= 0) return best_candidate(row, team, n, zmax) | status;
    }
    const uint32_t cut_bits = radix_cut<kExtras>(row, team, zmax);
    const float cut = raised_by_min_p(cut_bits ? from_ordered_bits(cut_bits) : -kInf, row.p.min_p, zmax);
    return team.team_key(row.turn, best_of_slice<kExtras>(row, team, cut, zmax) | status);
}

// Log-probability of `token` under the raw logits, the same in every thread of the team.
template <class T>
__device__ __attribute__((noinline)) float raw_logprob(const Row<T>& row, Team team, int token) {
    const Team::TopBits block = team.block_top(kSlotRaw, raw_max_of_slice(row, team), 0);
    const uint32_t top = team.team_bounds(row.turn, kTeamRawMax, block.top, 0, 0).top;
    const float max = top ? from_ordered_bits(top) : -kInf;
    const Word mass = team.team_sum(row.turn, kTeamRawMass, team.block_sum(kSlotSum, raw_mass_of_slice(row, team, max)));
    return row.raw_one(token) - max - log_mass(mass);
}

}  // namespace fv
