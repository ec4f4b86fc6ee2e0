// SPDX-License-Identifier: Apache-2.0
// One row of logits on the GPU, shared by the blocks of a team: loading, processing, and the best key of a block's slice.
//
// Noise costs most, so logarithms are taken for few entries: a scan computes z + noise_bound(r) for all of them, where r is
// the Philox word; entries whose bound is below the best exact score found cannot win (plain_best, settle).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "accept/team.cuh"

namespace fv {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

constexpr int kChunk = 8;  // ids that a thread takes at a time: two Philox calls

// 8 logits as loaded.
template <class T>
struct RawChunk {
    static constexpr int kVectors = kChunk * sizeof(T) / 16;
    uint32_t words[4 * kVectors];
    __device__ __forceinline__ float get(int j) const {
        if constexpr (sizeof(T) == 4) {
            return bits_to_float(words[j]);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            const uint32_t w = words[j >> 1];
            return bits_to_float(j & 1 ? w & 0xffff0000u : w << 16);
        } else {
            return __half2float(__ushort_as_half(static_cast<uint16_t>(words[j >> 1] >> (16 * (j & 1)))));
        }
    }
};

// A row of a request, in shared memory. Everything is indexed by global id.
template <class T>
struct Row {
    // of the request and the block: init()
    RowParams p;
    float inverse;             // 1 / temperature
    bool plain;                // no extras, no extreme temperature
    bool penalties;
    int begin, end;            // ids [begin, end)
    int first, last;           // chunks [first, last) of this block
    const float* bias;         // or null
    const int32_t* counts;     // read with penalties only
    const int64_t* ancestors;  // drafted tokens above the row, shared memory
    // of the row: open()
    const T* base;             // logit of id 0
    const int32_t* bitmask;    // or null
    uint32_t t;                // absolute position of the token
    int num_ancestors;
    int whole_first, whole_last;  // chunks that 16-byte loads may take: aligned, and inside the row
    int turn;                  // parity in the order in which the team takes rows

    __device__ void init(const RowParams& params, int first_id, int ids, const float* request_bias, const int32_t* request_counts,
                         bool with_penalties, const int64_t* above, bool extras) {
        p = params;
        inverse = p.greedy() ? 1.0f : 1.0f / p.temperature;
        plain = !extras && (p.greedy() || (p.temperature > 1e-30f && p.temperature < 1e30f));
        penalties = with_penalties;
        begin = first_id;
        end = first_id + ids;
        bias = request_bias ? request_bias - first_id : nullptr;
        counts = request_counts ? request_counts - first_id : nullptr;
        ancestors = above;
    }
    __device__ void set_slice(int lane, int lanes) {
        const int from = begin / kChunk, to = (end + kChunk - 1) / kChunk, per = (to - from + lanes - 1) / lanes;
        const int lo = from + per * lane;
        first = lo < to ? lo : to;
        last = lo + per < to ? lo + per : to;
    }
    __device__ __forceinline__ void open(const T* data, const int32_t* row_bitmask, uint32_t position, int depth, int parity) {
        base = data - begin;
        bitmask = row_bitmask;
        t = position;
        num_ancestors = depth;
        turn = parity;
        whole_first = (begin + kChunk - 1) / kChunk;
        whole_last = reinterpret_cast<uintptr_t>(base) % 16 == 0 ? end / kChunk : 0;
    }
    __device__ __forceinline__ bool all_whole() const { return first >= whole_first && last <= whole_last; }

    __device__ __forceinline__ float raw_one(int id) const { return to_float(base[id]); }
    __device__ __forceinline__ int occurrences(int id) const {
        int c = 0;
        for (int a = 0; a < num_ancestors; ++a) c += ancestors[a] == id;
        return c;
    }
    // Processors before the temperature.
    __device__ __forceinline__ float processed(float x, int id, bool maybe_ancestor) const {
        if (penalties) {
            const int count = counts[id] + (maybe_ancestor ? occurrences(id) : 0);
            x = apply_penalties(x, count, p.repetition, p.frequency, p.presence);
        }
        if (bias) x += bias[id];
        if (bitmask && !(static_cast<uint32_t>(bitmask[id >> 5]) >> (id & 31) & 1u)) x = -kInf;
        return x;
    }
    // NaN, +inf: excluded.
    __device__ __forceinline__ float scaled(float x) const {
        const float v = is_bad(x) ? -kInf : x;
        return p.temperature == 0.0f || p.temperature == 1.0f ? v + 0.0f : scale_logit(v, p.temperature);
    }

    // Exact key of one id with z >= cut that min-p keeps, or 0.
    template <bool kExtras>
    __device__ __forceinline__ Word key_of(int id, float cut, float zmax) const {
        if (id < begin || id >= end) return 0;
        float x = raw_one(id);
        if constexpr (kExtras) x = processed(x, id, true);
        const float z = scaled(x);
        if (!(z > -kInf) || z < cut) return 0;
        if (p.greedy()) return make_key(z, static_cast<uint32_t>(id));
        if (p.min_p > 0.0f && !min_p_keeps(z, zmax, p.min_p)) return 0;
        return make_key(z + gumbel_noise(static_cast<uint32_t>(id), t, p.seed_lo, p.seed_hi), static_cast<uint32_t>(id));
    }
};

template <class T>
__device__ __forceinline__ RawChunk<T> load_whole(const T* from) {
    RawChunk<T> raw;
#pragma unroll
    for (int v = 0; v < RawChunk<T>::kVectors; ++v) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + v);
        raw.words[4 * v] = four.x;
        raw.words[4 * v + 1] = four.y;
        raw.words[4 * v + 2] = four.z;
        raw.words[4 * v + 3] = four.w;
    }
    return raw;
}

// 16 bytes of a row that is not aligned, or at its ends; ids outside the row read as -inf. Rare, so not inlined.
template <class T>
__device__ __attribute__((noinline)) uint4 load_partial(const T* base, int id, int begin, int end) {
    constexpr uint32_t kMinusInf = sizeof(T) == 4 ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00u : 0xff80u;
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        constexpr int kPer = 4 / sizeof(T);
        words[w] = 0;
#pragma unroll
        for (int h = 0; h < kPer; ++h) {
            const int i = id + w * kPer + h;
            const uint32_t bits = i >= begin && i < end ? __ldg(reinterpret_cast<const Bits*>(base + i)) : kMinusInf;
            words[w] |= bits << (16 * h);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T>
__device__ __forceinline__ RawChunk<T> load_chunk(const Row<T>& row, int chunk) {
    if (chunk >= row.whole_first && chunk < row.whole_last) return load_whole(row.base + chunk * kChunk);
    RawChunk<T> raw;
#pragma unroll
    for (int v = 0; v < RawChunk<T>::kVectors; ++v) {
        const uint4 four = load_partial(row.base, chunk * kChunk + v * static_cast<int>(16 / sizeof(T)), row.begin, row.end);
        raw.words[4 * v] = four.x;
        raw.words[4 * v + 1] = four.y;
        raw.words[4 * v + 2] = four.z;
        raw.words[4 * v + 3] = four.w;
    }
    return raw;
}

// f(id of the first, z[8]) for every chunk of this thread; excluded entries are -inf. True if a NaN or +inf was met.
template <bool kExtras, class T, class F>
__device__ __forceinline__ bool visit(const Row<T>& row, Team team, const F& f) {
    bool bad = false;
    for (int c = row.first + team.tid(), last = row.last; c < last; c += kTeamThreads) {
        const RawChunk<T> raw = load_chunk(row, c);
        const int id = c * kChunk;
        bool ancestor = false;
        if constexpr (kExtras) {
            if (row.penalties) ancestor = team.s->ancestor_bits[c % kAncestorBits / 32] >> (c % 32) & 1;
        }
        float z[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            float x = raw.get(j);
            if constexpr (kExtras) {
                if (id + j >= row.begin && id + j < row.end) x = row.processed(x, id + j, ancestor);
            }
            bad = bad || is_bad(x);
            z[j] = row.scaled(x);
        }
        f(id, z);
    }
    return bad;
}

// f(id, z) for every entry of this thread with z >= low, low a finite z. Plain rows divide only what comes near.
template <bool kExtras, class T, class F>
__device__ __forceinline__ void visit_from(const Row<T>& row, Team team, float low, const F& f) {
    if (!kExtras && row.plain) {
        const float near = below(low), inverse = row.inverse;
        for (int c = row.first + team.tid(), last = row.last; c < last; c += kTeamThreads) {
            const RawChunk<T> raw = load_chunk(row, c);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                const float x = raw.get(j);
                if (!(x * inverse >= near)) continue;
                const float z = row.scaled(x);
                if (z >= low) f(c * kChunk + j, z);
            }
        }
        return;
    }
    visit<kExtras>(row, team, [&](int id, const float (&z)[kChunk]) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            if (z[j] >= low) f(id + j, z[j]);
        }
    });
}

// Marks the chunks of the row's ancestors. Every thread of the block calls it before the row is visited.
template <class T>
__device__ __forceinline__ void mark_ancestors(const Row<T>& row, Team team) {
    __syncthreads();  // what the row before has read
    if (!row.penalties) return;
    for (int i = team.tid(); i < kAncestorBits / 32; i += kTeamThreads) team.s->ancestor_bits[i] = 0;
    __syncthreads();
    for (int a = team.tid(); a < row.num_ancestors; a += kTeamThreads) {
        const uint32_t c = static_cast<uint32_t>(row.ancestors[a] / kChunk) % kAncestorBits;
        atomicOr(&team.s->ancestor_bits[c / 32], 1u << (c % 32));
    }
    __syncthreads();
}

// This thread's largest raw logit of a plain slice; NaN: a NaN or +inf was met.
template <class T>
__device__ __attribute__((noinline)) float raw_scan(const Row<T>& row, Team team) {
    float best = -kInf;
    bool any_bad = false;
    for (int c = row.first + team.tid(), last = row.last; c < last; c += kTeamThreads) {
        const RawChunk<T> raw = load_whole(row.base + c * kChunk);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            any_bad = any_bad || is_bad(raw.get(j));
            best = fmaxf(best, raw.get(j));
        }
    }
    return any_bad ? bits_to_float(0x7fc00000u) : best;
}

// Largest bound, z or z + noise_bound, of this thread's entries, z exact: extras, any temperature, entries below the cut and
// bad ones left out.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) float scan_exact(const Row<T>& row, Team team, float cut, bool* bad) {
    float best = -kInf;
    const bool greedy = row.p.greedy();
    *bad = visit<kExtras>(row, team, [&](int id, const float (&z)[kChunk]) {
        float high = z[0];
#pragma unroll
        for (int j = 1; j < kChunk; ++j) high = z[j] > high ? z[j] : high;
        if (!(high > -kInf) || high < cut) return;
        if (greedy) {
            best = high > best ? high : best;
            return;
        }
        const uint32_t group = static_cast<uint32_t>(id / 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Philox4 r = philox4x32(group + h, row.t, kStreamTarget, 0, row.p.seed_lo, row.p.seed_hi);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float v = z[4 * h + j];
                const float bound = v >= cut && v > -kInf ? v + noise_bound(r.v[j]) : -kInf;
                best = bound > best ? bound : best;
            }
        }
    });
    return best;
}

// Best exact key among the entries of all threads whose bound reaches `threshold`; whole block.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word settle(const Row<T>& row, Team team, BlockSlot slot, float bound, float threshold, float cut, float zmax) {
    Word best = 0;
    unsigned votes = __ballot_sync(kFullWarp, bound > -kInf && !(bound < threshold));
    if (votes) {
        for (; votes; votes &= votes - 1) {
            const int source = __ffs(static_cast<int>(votes)) - 1;
            // lanes 8k..8k+7 take the 8 entries of every fourth chunk of that thread
            for (int c0 = row.first + team.warp() * 32 + source; c0 < row.last; c0 += 4 * kTeamThreads) {
                const int c = c0 + (team.lane() >> 3) * kTeamThreads;
                const Word key = c < row.last ? row.template key_of<kExtras>(c * kChunk + (team.lane() & 7), cut, zmax) : 0;
                best = key > best ? key : best;
            }
        }
        best = warp_max_word(best);
    }
    return team.block_key(slot, best);
}

// Best key of a plain slice, no cut, whole block; ~0 if a NaN or +inf was met. Every thread takes the exact score of its entry
// with the highest bound; what it did not look at is bounded by its second highest, which hardly ever reaches the best score.
template <bool kGreedy, class T>
__device__ __attribute__((noinline)) Word plain_best(const Row<T>& row, Team team, float zmax) {
    constexpr int kBatch = sizeof(T) == 4 ? 1 : 2;  // chunks in flight
    float best = -kInf, second = -kInf;
    int id = 0;
    bool any_bad = false;
    const T* base = row.base;
    const float inverse = row.inverse;
    const uint32_t t = row.t, seed_lo = row.p.seed_lo, seed_hi = row.p.seed_hi;
    const int last = row.last;
    for (int c0 = row.first + team.tid(); c0 < last; c0 += kBatch * kTeamThreads) {
        RawChunk<T> raw[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            if (c0 + k * kTeamThreads < last) raw[k] = load_whole(base + (c0 + k * kTeamThreads) * kChunk);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int c = c0 + k * kTeamThreads;
            if (c >= last) break;
            Philox4 r[2];
            if constexpr (!kGreedy) {
                const uint32_t group = 2 * static_cast<uint32_t>(c), lo = opaque(seed_lo), hi = opaque(seed_hi);
                r[0] = philox4x32(group, t, kStreamTarget, 0, lo, hi);
                r[1] = philox4x32(group + 1, t, kStreamTarget, 0, lo, hi);
            }
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                const float x = raw[k].get(j);
                any_bad = any_bad || is_bad(x);
                const float bound = kGreedy ? x : fma_exact(x, inverse, noise_bound(r[j >> 2].v[j & 3]));
                if constexpr (!kGreedy) second = fmaxf(second, fminf(best, bound));
                id = bound > best ? c * kChunk + j : id;
                best = fmaxf(best, bound);  // a NaN is dropped
            }
        }
    }
    Word key = 0;
    if (best > -kInf) {
        if constexpr (kGreedy) key = make_key(best, static_cast<uint32_t>(id));
        else key = row.template key_of<false>(id, -kInf, zmax);
    }
    key = warp_max_word(key);
    const uint32_t rest = warp_max_u32(any_bad ? ~0u : ordered_bits(second + 0.0f));
    if (team.lane() == 0) {
        team.s->block_words[kSlotFast][team.warp()] = key;
        team.s->block_bits[kSlotFast][team.warp()] = rest;
    }
    __syncthreads();
    key = warp_max_word(team.s->block_words[kSlotFast][team.lane() % kTeamWarps]);
    const uint32_t highest = warp_max_u32(team.s->block_bits[kSlotFast][team.lane() % kTeamWarps]);
    if (highest == ~0u) return ~static_cast<Word>(0);
    if constexpr (!kGreedy) {
        const float low = key ? below(from_ordered_bits(static_cast<uint32_t>(key >> 32))) : -kInf;
        if (from_ordered_bits(highest) > -kInf && from_ordered_bits(highest) >= low) {
            const Word other = settle<false>(row, team, kSlotSettle, second, low, -kInf, zmax);
            key = other > key ? other : key;
        }
    }
    return key;
}

// Best key of the block's slice among entries z >= cut that min-p keeps, with kKeyBad if a NaN or +inf was met.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word best_of_slice(const Row<T>& row, Team team, float cut, float zmax) {
    const bool greedy = row.p.greedy();
    if constexpr (!kExtras) {
        if (row.plain && cut == -kInf && row.all_whole()) {
            const Word key = greedy ? plain_best<true>(row, team, zmax) : plain_best<false>(row, team, zmax);
            if (~key != 0) return key;
        }
    }
    bool bad = false;
    const float bound = scan_exact<kExtras>(row, team, cut, &bad);
    const Team::TopBits top = team.block_top(kSlotExact, ordered_bits(bound + 0.0f), bad);
    const Word status = top.bits ? kKeyBad : 0;
    const float highest = from_ordered_bits(top.top);
    if (!(highest > -kInf)) {
        __syncthreads();  // before the slot is written again
        return status;
    }
    // The winner's score is hardly below its bound, so few threads are asked; if the best of those is lower than hoped
    // (a noise word near 2^32, min-p), all that can still beat it are asked.
    const float threshold = greedy ? highest : below((highest < kFloatMax ? highest : kFloatMax) - 0.2f);
    Word key = settle<kExtras>(row, team, kSlotSettle, bound, threshold, cut, zmax);
    const float score = key ? from_ordered_bits(static_cast<uint32_t>(key >> 32)) : -kInf;
    const float low = greedy || !key ? score : below(score);
    if (low < threshold) key = settle<kExtras>(row, team, kSlotSettleAgain, bound, low, cut, zmax);
    return key | status;
}

// Finite maximum of the raw slice as ordered_bits (0: none), and its masses relative to `max`.
template <class T>
__device__ __forceinline__ uint32_t raw_max_of_slice(const Row<T>& row, Team team) {
    uint32_t best = 0;
    for (int c = row.first + team.tid(); c < row.last; c += kTeamThreads) {
        const RawChunk<T> raw = load_chunk(row, c);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float x = raw.get(j);
            const uint32_t o = !is_bad(x) && x > -kInf ? ordered_bits(x) : 0;
            best = o > best ? o : best;
        }
    }
    return best;
}
template <class T>
__device__ __forceinline__ Word raw_mass_of_slice(const Row<T>& row, Team team, float max) {
    Word total = 0;
    for (int c = row.first + team.tid(); c < row.last; c += kTeamThreads) {
        const RawChunk<T> raw = load_chunk(row, c);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float x = raw.get(j);
            total += mass_of(is_bad(x) ? -kInf : x, max);
        }
    }
    return total;
}

}  // namespace fv
