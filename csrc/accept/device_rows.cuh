// SPDX-License-Identifier: Apache-2.0
// One row of logits on the GPU, shared by the blocks of a team: loading, processing, and the best key of a block's slice.
//
// Noise costs most, so logarithms are taken for few entries: a scan computes z + noise_bound(r) for all of them, where r is
// the Philox word; entries whose bound is below the best exact score found cannot win. A thread keeps only the largest bound
// of its entries; afterwards whole warps evaluate the entries of the few threads whose bound is high enough.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
    union {
        uint4 vectors[kVectors];
        uint32_t words[4 * kVectors];
    };
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

// Row of a request. Ids are global; local entry = id - offset.
template <class T>
struct Row {
    const T* data;         // [n]
    int64_t n, offset;     // ids [offset, offset + n)
    const float* bias;     // [n] or null
    const int32_t* bitmask;  // bits of global ids, or null
    const int32_t* counts;   // [n], read with penalties only
    const int64_t* ancestors;  // drafted tokens above the row, shared memory
    int num_ancestors;
    bool penalties;
    RowParams p;
    uint32_t t;            // absolute position of the token
    float inverse;         // 1 / temperature
    int align;             // bytes that loads of whole chunks may assume: 16, 4 or 2
    int first, last;       // chunks [first, last) of this block
    int turn;              // parity in the order in which the team takes rows

    __device__ void set_slice(int lane, int lanes) {
        const int64_t begin = offset / kChunk, end = (offset + n + kChunk - 1) / kChunk;
        const int64_t per = (end - begin + lanes - 1) / lanes;
        const int64_t lo = begin + per * lane;
        first = static_cast<int>(lo < end ? lo : end);
        last = static_cast<int>(lo + per < end ? lo + per : end);
        const uintptr_t address = reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(offset) * sizeof(T);
        align = address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : 2;
        inverse = p.greedy() ? 1.0f : 1.0f / p.temperature;
    }

    // Ids outside the row read as -inf.
    __device__ __forceinline__ RawChunk<T> load(int chunk) const {
        RawChunk<T> raw;
        const int64_t i = static_cast<int64_t>(chunk) * kChunk - offset;
        if (i >= 0 && i + kChunk <= n && align == 16) {
            const uint4* p16 = reinterpret_cast<const uint4*>(data + i);
#pragma unroll
            for (int v = 0; v < RawChunk<T>::kVectors; ++v) raw.vectors[v] = __ldg(p16 + v);
            return raw;
        }
        return load_slowly(i);
    }
    __device__ RawChunk<T> load_slowly(int64_t i) const {
        RawChunk<T> raw;
        constexpr uint32_t kMinusInf = sizeof(T) == 4 ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00u : 0xff80u;
        if (i >= 0 && i + kChunk <= n && align == 4) {
#pragma unroll
            for (int w = 0; w < 4 * RawChunk<T>::kVectors; ++w) raw.words[w] = __ldg(reinterpret_cast<const uint32_t*>(data + i) + w);
            return raw;
        }
#pragma unroll
        for (int w = 0; w < 4 * RawChunk<T>::kVectors; ++w) raw.words[w] = 0;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const bool inside = i + j >= 0 && i + j < n;
            if constexpr (sizeof(T) == 4) {
                raw.words[j] = inside ? __ldg(reinterpret_cast<const uint32_t*>(data + i + j)) : kMinusInf;
            } else {
                const uint32_t bits = inside ? __ldg(reinterpret_cast<const uint16_t*>(data + i + j)) : kMinusInf;
                raw.words[j >> 1] |= bits << (16 * (j & 1));
            }
        }
        return raw;
    }
    __device__ __forceinline__ float raw_one(int64_t id) const { return to_float(data[id - offset]); }

    __device__ __forceinline__ float penalised(float x, int64_t i, int extra) const {
        return apply_penalties(x, counts[i] + extra, p.repetition, p.frequency, p.presence);
    }
    __device__ __forceinline__ int occurrences(int64_t id) const {
        int c = 0;
        for (int a = 0; a < num_ancestors; ++a) c += ancestors[a] == id;
        return c;
    }
    // Processors before the temperature; i = id - offset is inside the row.
    __device__ __forceinline__ float processed(float x, int64_t id, bool maybe_ancestor) const {
        const int64_t i = id - offset;
        if (penalties) x = penalised(x, i, maybe_ancestor ? occurrences(id) : 0);
        if (bias) x += bias[i];
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
    __device__ Word key_of(int64_t id, float cut, float zmax) const {
        if (id < offset || id >= offset + n) return 0;
        float x = raw_one(id);
        if constexpr (kExtras) x = processed(x, id, true);
        const float z = scaled(x);
        if (!(z > -kInf) || z < cut) return 0;
        if (p.min_p > 0.0f && !p.greedy() && !min_p_keeps(z, zmax, p.min_p)) return 0;
        return make_key(p.greedy() ? z : z + gumbel_noise(static_cast<uint32_t>(id), t, p.seed_lo, p.seed_hi),
                        static_cast<uint32_t>(id));
    }
};

// f(id of the first, z[8]) for every chunk of this thread; excluded entries are -inf. True if a NaN or +inf was met.
template <bool kExtras, class T, class F>
__device__ __forceinline__ bool visit(const Row<T>& row, Team team, const F& f) {
    bool bad = false;
    for (int c = row.first + team.tid(); c < row.last; c += kTeamThreads) {
        const RawChunk<T> raw = row.load(c);
        const int64_t id = static_cast<int64_t>(c) * kChunk;
        bool ancestor = false;
        if constexpr (kExtras) {
            if (row.penalties) ancestor = team.s->ancestor_bits[c % kAncestorBits / 32] >> (c % 32) & 1;
        }
        float z[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            float x = raw.get(j);
            if constexpr (kExtras) {
                if (id + j >= row.offset && id + j < row.offset + row.n) x = row.processed(x, id + j, ancestor);
            }
            bad = bad || is_bad(x);
            z[j] = row.scaled(x);
        }
        f(id, z);
    }
    return bad;
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

// Largest bound of this thread's entries: z (greedy) or z + noise_bound. Unfiltered rows without extras whose temperature
// is no extreme; z is inexact by 2^-22 of itself. *bad: NaN or +inf seen, the result is then void.
template <bool kGreedy, class T>
__device__ __forceinline__ float scan_fast(const Row<T>& row, Team team, bool* bad) {
    constexpr int kBatch = sizeof(T) == 4 ? 1 : 2;  // chunks in flight
    float best = -kInf;
    for (int c0 = row.first + team.tid(); c0 < row.last; c0 += kBatch * kTeamThreads) {
        RawChunk<T> raw[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            if (c0 + k * kTeamThreads < row.last) raw[k] = row.load(c0 + k * kTeamThreads);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int c = c0 + k * kTeamThreads;
            if (c >= row.last) break;
            Philox4 r[2];
            if constexpr (!kGreedy) {
                const uint32_t group = 2 * static_cast<uint32_t>(c);
                r[0] = philox4x32(group, row.t, kStreamTarget, 0, row.p.seed_lo, row.p.seed_hi);
                r[1] = philox4x32(group + 1, row.t, kStreamTarget, 0, row.p.seed_lo, row.p.seed_hi);
            }
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                const float x = raw[k].get(j);
                *bad = *bad || is_bad(x);
                const float bound = kGreedy ? x : fma_exact(x, row.inverse, noise_bound(r[j >> 2].v[j & 3]));
                best = bound > best ? bound : best;
            }
        }
    }
    return best;
}

// The same with everything exact: extras, any temperature, entries below the cut and bad ones left out.
template <bool kExtras, class T>
__device__ __forceinline__ float scan_exact(const Row<T>& row, Team team, float cut, bool* bad) {
    float best = -kInf;
    const bool greedy = row.p.greedy();
    *bad = visit<kExtras>(row, team, [&](int64_t id, const float (&z)[kChunk]) {
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
                const Word key = c < row.last ? row.template key_of<kExtras>(static_cast<int64_t>(c) * kChunk + (team.lane() & 7), cut, zmax) : 0;
                best = key > best ? key : best;
            }
        }
        best = warp_max_word(best);
    }
    return team.block_key(slot, best);
}

// Best key of the block's slice among entries z >= cut that min-p keeps, with kKeyBad if a NaN or +inf was met.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word best_of_slice(const Row<T>& row, Team team, float cut, float zmax) {
    const bool greedy = row.p.greedy();
    const bool plain = !kExtras && cut == -kInf && (greedy || (row.p.temperature > 1e-30f && row.p.temperature < 1e30f));
    float bound = -kInf;
    bool bad = false;
    Team::TopBits top{0, 1};
    if (plain) {
        if (greedy) bound = scan_fast<true>(row, team, &bad);
        else bound = scan_fast<false>(row, team, &bad);
        top = team.block_top(kSlotFast, ordered_bits(bound + 0.0f), bad);
    }
    if (top.bits) {  // not plain, or a bad entry
        bound = scan_exact<kExtras>(row, team, cut, &bad);
        top = team.block_top(kSlotExact, ordered_bits(bound + 0.0f), bad);
    }
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
        const RawChunk<T> raw = row.load(c);
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
        const RawChunk<T> raw = row.load(c);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float x = raw.get(j);
            total += mass_of(is_bad(x) ? -kInf : x, max);
        }
    }
    return total;
}

}  // namespace fv
