// SPDX-License-Identifier: Apache-2.0
// One row of logits on the GPU, shared by the blocks of a team: loading, processing, and the best key of a block's slice.
//
// Noise costs most, so logarithms are taken for few entries: a scan computes z + noise_bound(r) for all of them, where r is
// the Philox word; entries whose bound is below the best exact score found cannot win (scan_simple, settle).
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
// Chunks that lie together in a slice: 128 bytes of 16-bit logits, or what a warp loads at a time.
constexpr int kLineShift = 3, kLine = 1 << kLineShift, kWarpLineShift = 5;

// 8 logits as loaded.
template <class T>
struct RawChunk {
    static constexpr int kVectors = kChunk * sizeof(T) / 16;
    uint32_t words[4 * kVectors];
    template <class F>
    __device__ __forceinline__ void fill(const F& vector) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const uint4 four = vector(v);
            words[4 * v] = four.x;
            words[4 * v + 1] = four.y;
            words[4 * v + 2] = four.z;
            words[4 * v + 3] = four.w;
        }
    }
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
    int first, last;           // chunks [first, last) of the row
    int lane, lanes, line;     // which lines of 2^line chunks are this block's (or warp's): every lanes-th, so that neighbours spread
    int step;                  // from a thread's chunk to its next
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
    __device__ __forceinline__ void set_slice(int index, int count, int threads, int line_shift = kLineShift) {
        first = begin / kChunk;
        last = (end + kChunk - 1) / kChunk;
        lane = index;
        lanes = count;
        line = line_shift;
        step = threads * count;
    }
    // First chunk of a thread of the block, or of a lane of the warp.
    __device__ __forceinline__ int start(int thread) const {
        return first + (((thread >> line) * lanes + lane) << line) + (thread & ((1 << line) - 1));
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
    // Plain, and all chunks but possibly the last are loaded whole.
    __device__ __forceinline__ bool simple() const { return plain && first >= whole_first && last <= whole_last + 1 && whole_last > 0; }

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
    raw.fill([&](int v) { return __ldg(reinterpret_cast<const uint4*>(from) + v); });
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
    raw.fill([&](int v) { return load_partial(row.base, chunk * kChunk + v * static_cast<int>(16 / sizeof(T)), row.begin, row.end); });
    return raw;
}

// f(id of the first, z[8]) for every chunk of this thread; excluded entries are -inf. True if a NaN or +inf was met.
template <bool kExtras, class T, class F>
__device__ __forceinline__ bool visit(const Row<T>& row, Team team, const F& f) {
    bool bad = false;
    for (int c = row.start(team.tid()), last = row.last, step = row.step; c < last; c += step) {
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
        for (int c = row.start(team.tid()), last = row.last, step = row.step; c < last; c += step) {
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

// The keys of all rounds, kept in registers: a loop over many counters would else add them up again each time.
struct PhiloxKeys {
    uint32_t lo[kPhiloxRounds], hi[kPhiloxRounds];
    __device__ __forceinline__ PhiloxKeys(uint32_t k0, uint32_t k1) {
#pragma unroll
        for (int r = 0; r < kPhiloxRounds; ++r, k0 += kPhiloxStepLo, k1 += kPhiloxStepHi) {
            lo[r] = opaque(k0);
            hi[r] = opaque(k1);
        }
    }
    // philox4x32(c0, c1, c2, 0, ...)
    __device__ __forceinline__ Philox4 words(uint32_t c0, uint32_t c1, uint32_t c2) const {
        uint32_t c3 = 0;
#pragma unroll
        for (int r = 0; r < kPhiloxRounds; ++r) philox_round(&c0, &c1, &c2, &c3, lo[r], hi[r]);
        return Philox4{{c0, c1, c2, c3}};
    }
};

// The largest bound of a thread's chunks, the chunk that holds it, and the largest of the other chunks (or one above it).
struct Bound {
    float best, second;
    int at;
};

// The bounds of chunks of a simple row: raw logits when greedy, else logit / T + noise_bound, with kCut only of entries
// whose logit / T reaches `near`. NaN or +inf: one of the chunks holds one of those, or a bound overflowed.
template <bool kGreedy, bool kCut, class T>
struct Scan {
    static constexpr bool kPairs = kGreedy && sizeof(T) == 2;
    struct None {
        __device__ __forceinline__ None(uint32_t, uint32_t) {}
    };
    std::conditional_t<kGreedy, None, PhiloxKeys> keys;
    float inverse, near, best = -kInf, second = -kInf;
    int at = 0;
    uint32_t t, pair = std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;  // -inf

    __device__ __forceinline__ Scan(const Row<T>& row, float from)
        : keys(row.p.seed_lo, row.p.seed_hi), inverse(row.inverse), near(from), t(row.t) {}

    __device__ __forceinline__ float bound_of(float x, uint32_t noise) const {
        const float bound = kGreedy ? x : fma_exact(x, inverse, noise_bound(noise));
        return kCut && !(x * inverse >= near) ? -kInf : bound;
    }
    __device__ __forceinline__ void take_bound(float bound, int c) {
        const bool larger = bound > best;
        second = max_nan(second, larger ? best : bound);
        best = larger ? bound : best;
        at = larger ? c : at;
    }
    __device__ __forceinline__ void take(const RawChunk<T>& raw, int c) {
        if constexpr (kPairs) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pair = std::is_same_v<T, __half> ? max_nan_f16x2(pair, raw.words[j]) : max_nan_bf16x2(pair, raw.words[j]);
            }
        } else if constexpr (kGreedy) {
#pragma unroll
            for (int j = 0; j < kChunk; ++j) best = max_nan(best, raw.get(j));
        } else {
            const uint32_t group = 2 * static_cast<uint32_t>(c);
            const Philox4 r[2] = {keys.words(group, t, kStreamTarget), keys.words(group + 1, t, kStreamTarget)};
            float bound = bound_of(raw.get(0), r[0].v[0]);
#pragma unroll
            for (int j = 1; j < kChunk; ++j) bound = max_nan(bound, bound_of(raw.get(j), r[j >> 2].v[j & 3]));
            take_bound(bound, c);
        }
    }
    // c: the chunk after the thread's last. The row may end inside that one.
    __device__ __forceinline__ Bound finish(const Row<T>& row, int c) {
        if constexpr (kPairs) {
            RawChunk<T> both;
            both.words[0] = pair;
            best = max_nan(both.get(0), both.get(1));
        }
        if (c == row.whole_last && c < row.last) {
            float bound = -kInf;
#pragma unroll 1
            for (int id = c * kChunk; id < row.end; ++id) {
                uint32_t noise = 0;
                if constexpr (!kGreedy) {
                    const Philox4 r = philox4x32(static_cast<uint32_t>(id) / 4, t, kStreamTarget, 0, row.p.seed_lo, row.p.seed_hi);
                    const int j = id & 3;
                    noise = j == 0 ? r.v[0] : j == 1 ? r.v[1] : j == 2 ? r.v[2] : r.v[3];
                }
                bound = max_nan(bound, bound_of(row.raw_one(id), noise));
            }
            if constexpr (kGreedy) best = max_nan(best, bound);
            else take_bound(bound, c);
        }
        if constexpr (kGreedy) second = best;
        return Bound{max_nan(best, second), second, at};
    }
};

// The largest bound of what a thread takes of a simple row, from chunk c on.
template <bool kGreedy, bool kCut, class T>
__device__ __attribute__((noinline)) Bound scan_simple(const Row<T>& given, int c, float near) {
    const Row<T>& row = *known_shared(&given);
    Scan<kGreedy, kCut, T> scan(row, near);
    const T* base = row.base;
    const int step = row.step, last = row.whole_last < row.last ? row.whole_last : row.last;
    if constexpr (kGreedy) {
        constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;  // chunks in flight
        while (c < last) {
            RawChunk<T> raw[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) raw[k] = load_whole(base + (c + k * step < last ? c + k * step : c) * kChunk);
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                scan.take(raw[k], c);
                if (c < last) c += step;
            }
        }
    } else {
        RawChunk<T> next;
        if (c < last) next = load_whole(base + c * kChunk);
        while (c < last) {
            const RawChunk<T> raw = next;
            const int at = c;
            c += step;
            if (c < last) next = load_whole(base + c * kChunk);
            scan.take(raw, at);
        }
    }
    return scan.finish(row, c);
}

// Chunks that a thread has on their way from memory before it knows what row they are of: a load takes as long as the
// arithmetic of several.
template <class T>
struct ChunksAhead {
    static constexpr int kCount = sizeof(T) == 4 ? 2 : 4;
    RawChunk<T> raw[kCount];
    // Chunks c, c + step, ... below `last`. The compiler leaves these loads where they stand.
    __device__ __forceinline__ void ask(const T* base, int c, int step, int last) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            if (c + k * step < last) ask_one(k, base + (c + k * step) * kChunk);
        }
    }
    __device__ __forceinline__ void ask_one(int k, const T* from) {
        raw[k].fill([&](int v) { return load_readonly_16(from + v * (16 / sizeof(T))); });
    }
};
// The same as scan_simple() where the thread's first chunks are on their way.
template <class T>
__device__ __forceinline__ Bound scan_chunks(const Row<T>& row, int c, ChunksAhead<T>& ahead) {
    constexpr int kAhead = ChunksAhead<T>::kCount;
    Scan<false, false, T> scan(row, 0.0f);
    const T* base = row.base;
    const int step = row.step, last = row.whole_last < row.last ? row.whole_last : row.last;
    while (c < last) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c >= last) break;
            const RawChunk<T> raw = ahead.raw[k];
            if (c + kAhead * step < last) ahead.ask_one(k, base + (c + kAhead * step) * kChunk);
            scan.take(raw, c);
            c += step;
        }
    }
    return scan.finish(row, c);
}
// The first largest logit of what a warp takes of a simple greedy row, its chunks on their way: kept in registers until its place
// is asked for.
template <class T>
struct GreedyScan {
    float best = -kInf, seen = -kInf;  // seen: NaN if one was met
    int at = 0;
    RawChunk<T> kept;
    __device__ __forceinline__ void take(const RawChunk<T>& raw, int c) {
        float x;
        if constexpr (sizeof(T) == 2) {
            RawChunk<T> both;
            both.words[0] = raw.words[0];
#pragma unroll
            for (int j = 1; j < 4; ++j) {
                both.words[0] = std::is_same_v<T, __half> ? max_nan_f16x2(both.words[0], raw.words[j])
                                                          : max_nan_bf16x2(both.words[0], raw.words[j]);
            }
            x = max_nan(both.get(0), both.get(1));
        } else {
            x = raw.get(0);
#pragma unroll
            for (int j = 1; j < kChunk; ++j) x = max_nan(x, raw.get(j));
        }
        seen = max_nan(seen, x);
        if (x > best) {
            best = x;
            at = c;
            kept = raw;
        }
    }
    // Key of the warp; `bad`: it must be found entry by entry.
    __device__ __forceinline__ Word warp_key(bool* bad) const {
        const uint32_t own = ordered_bits(seen + 0.0f), top = warp_max_u32(own);
        *bad = top >= ordered_bits(kInf);
        if (*bad || !(from_ordered_bits(top) > -kInf)) return 0;
        int j0 = 0;
#pragma unroll
        for (int j = kChunk - 1; j >= 0; --j) j0 = kept.get(j) == best ? j : j0;
        const uint32_t id = __reduce_min_sync(kFullWarp, own == top ? static_cast<uint32_t>(at * kChunk + j0) : ~0u);
        return make_key(from_ordered_bits(top), id);
    }
};
template <class T>
__device__ __forceinline__ Word greedy_key(const Row<T>& row, int c, ChunksAhead<T>& ahead, bool* bad) {
    constexpr int kAhead = ChunksAhead<T>::kCount;
    GreedyScan<T> scan;
    const T* base = row.base;
    const int step = row.step, last = row.whole_last < row.last ? row.whole_last : row.last;
    while (c < last) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c >= last) break;
            const RawChunk<T> raw = ahead.raw[k];
            if (c + kAhead * step < last) ahead.ask_one(k, base + (c + kAhead * step) * kChunk);
            scan.take(raw, c);
            c += step;
        }
    }
    if (c == row.whole_last && c < row.last) scan.take(load_chunk(row, c), c);
    __syncwarp();
    return scan.warp_key(bad);
}
// Is a largest bound of scan_simple one to go on with? Not if the row holds NaN or +inf, nor where bounds may have overflowed.
__device__ __forceinline__ bool usable(uint32_t top) {
    return top < ordered_bits(kInf) && from_ordered_bits(top) > -1e37f;
}

// Largest bound, z or z + noise_bound, of this thread's entries, z exact: extras, any temperature, entries below the cut and
// bad ones left out.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) float scan_exact(const Row<T>& given, Team team, float cut, bool* bad) {
    const Row<T>& row = *known_shared(&given);
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

// Best exact key among the entries of the warp's threads (the first is thread `thread0`) whose bound reaches `threshold`. Of most
// such threads that is one chunk: those are asked four at a time, eight lanes a chunk.
template <bool kExtras, class T>
__device__ __forceinline__ Word settle_warp(const Row<T>& row, int thread0, Bound bound, float threshold, float cut, float zmax) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    Word best = 0;
    const bool asked = bound.best > -kInf && !(bound.best < threshold), whole = !(bound.second < threshold);
    for (unsigned votes = __ballot_sync(kFullWarp, asked && !whole); votes;) {
        int source = -1;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (lane >> 3 == k) source = __ffs(static_cast<int>(votes)) - 1;
            votes &= votes - 1;  // 0 stays 0
        }
        const int c = __shfl_sync(kFullWarp, bound.at, source & 31);
        const Word key = source >= 0 ? row.template key_of<kExtras>(c * kChunk + (lane & 7), cut, zmax) : 0;
        best = key > best ? key : best;
    }
    for (unsigned votes = __ballot_sync(kFullWarp, asked && whole); votes; votes &= votes - 1) {
        // lanes 8k..8k+7 take the 8 entries of every fourth chunk of that thread
        const int source = __ffs(static_cast<int>(votes)) - 1;
        for (int c0 = row.start(thread0 + source), last = row.last, step = row.step; c0 < last; c0 += 4 * step) {
            const int c = c0 + (lane >> 3) * step;
            const Word key = c < last ? row.template key_of<kExtras>(c * kChunk + (lane & 7), cut, zmax) : 0;
            best = key > best ? key : best;
        }
    }
    return warp_max_word(best);
}
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word settle(const Row<T>& given, Team team, BlockSlot slot, Bound bound, float threshold, float cut, float zmax) {
    const Row<T>& row = *known_shared(&given);
    return team.block_key(slot, settle_warp<kExtras>(row, team.warp() * 32, bound, threshold, cut, zmax));
}

// The winner's score is hardly below the highest bound, so few are asked; if the best of those is lower than hoped
// (a noise word near 2^32, min-p), all that can still beat it are asked.
__device__ __forceinline__ float first_threshold(bool greedy, float highest) {
    return greedy ? highest : below((highest < kFloatMax ? highest : kFloatMax) - 0.12f);
}
__device__ __forceinline__ float score_reached(bool greedy, Word key) {
    const float score = key ? from_ordered_bits(static_cast<uint32_t>(key >> 32)) : -kInf;
    return greedy || !key ? score : below(score);
}

// Key of a thread's warp's part of a simple row, no filters, with kKeyBad. Entry by entry, if the row holds what bounds cannot tell.
template <class T>
__device__ __attribute__((noinline)) Word warp_best_exact(const Row<T>& given, int thread) {
    const Row<T>& row = *known_shared(&given);
    Word best = 0;
    bool bad = false;
    for (int c = row.start(thread); c < row.last; c += row.step) {
        for (int id = c * kChunk; id < c * kChunk + kChunk; ++id) {
            if (id < row.begin || id >= row.end) continue;
            bad = bad || is_bad(row.raw_one(id));
            const Word key = row.template key_of<false>(id, -kInf, 0.0f);
            best = key > best ? key : best;
        }
    }
    return warp_max_word(best) | (__any_sync(kFullWarp, bad) ? kKeyBad : 0);
}

// Key of the block's slice of a simple greedy row, with kKeyBad.
template <class T>
__device__ __attribute__((noinline)) Word greedy_slice(const Row<T>& given, Team team) {
    const Row<T>& row = *known_shared(&given);
    constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;  // chunks in flight
    GreedyScan<T> scan;
    const T* base = row.base;
    const int step = row.step, last = row.whole_last < row.last ? row.whole_last : row.last;
    int c = row.start(team.tid());
    while (c < last) {
        RawChunk<T> raw[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) raw[k] = load_whole(base + (c + k * step < last ? c + k * step : c) * kChunk);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c < last) {
                scan.take(raw[k], c);
                c += step;
            }
        }
    }
    if (c == row.whole_last && c < row.last) scan.take(load_chunk(row, c), c);
    __syncwarp();
    bool bad;
    Word key = scan.warp_key(&bad);
    if (bad) key = warp_best_exact(row, team.tid());
    return team.block_key_status(kSlotSettle, key);
}

// Best key of the block's slice among entries z >= cut that min-p keeps, with kKeyBad if a NaN or +inf was met.
template <bool kExtras, class T>
__device__ __attribute__((noinline)) Word best_of_slice(const Row<T>& given, Team team, float cut, float zmax) {
    const Row<T>& row = *known_shared(&given);
    const bool greedy = row.p.greedy();
    Bound bound{-kInf, -kInf, 0};
    uint32_t top = 0;
    Word status = 0;
    bool scanned = false;
    if constexpr (!kExtras) {
        if (row.simple()) {
            if (greedy) return greedy_slice(row, team);
            const int c = row.start(team.tid());
            bound = cut > -kInf ? scan_simple<false, true>(row, c, below(cut)) : scan_simple<false, false>(row, c, 0.0f);
            top = team.block_max(kSlotFast, ordered_bits(bound.best + 0.0f));
            scanned = usable(top);
        }
    }
    if (!scanned) {
        bool bad = false;
        bound.best = bound.second = scan_exact<kExtras>(row, team, cut, &bad);
        const Team::TopBits exact = team.block_top(kSlotExact, ordered_bits(bound.best + 0.0f), bad);
        top = exact.top;
        status = exact.bits ? kKeyBad : 0;
    }
    const float highest = from_ordered_bits(top);
    if (!(highest > -kInf)) {
        __syncthreads();  // before the slot is written again
        return status;
    }
    const float threshold = first_threshold(greedy, highest);
    Word key = settle<kExtras>(row, team, kSlotSettle, bound, threshold, cut, zmax);
    const float low = score_reached(greedy, key);
    if (low < threshold) key = settle<kExtras>(row, team, kSlotSettleAgain, bound, low, cut, zmax);
    return key | status;
}

// Finite maximum of the raw slice as ordered_bits (0: none), and its masses relative to `max`.
template <class T>
__device__ __forceinline__ uint32_t raw_max_of_slice(const Row<T>& row, Team team) {
    uint32_t best = 0;
    for (int c = row.start(team.tid()); c < row.last; c += row.step) {
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
    for (int c = row.start(team.tid()); c < row.last; c += row.step) {
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
