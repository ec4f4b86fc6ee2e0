// SPDX-License-Identifier: Apache-2.0
// draft_topk on CUDA: a cluster of 1 to 8 blocks per row (algo/tree_plan.h), one launch. Bit-equal to draft_topk.cpp.
// Pass 1 takes the maximum of every group of 8 threads; the k-th largest of all these maxima bounds the k-th value from
// below. Pass 2 (the slice is in L1 by now) sums the fixed-point masses and collects the entries that reach the bound, little
// more than k of them; the first block ranks them and writes. More than kCandidates of them (ties): it selects exactly.
// All shared memory is dynamic: blocks of a cluster write into each other's.
// Coupled rows: pass 1 takes scores (coupling.h) instead of logits and keeps them in shared memory for pass 2; where a slice does
// not fit, pass 2 computes them again. Scores are exact, so that every block and back end sees the same ones.
// Cost: reads R * Vd logits from memory once; coupled: about 120 instructions an entry. Graph-safe.
// Instantiations: float, half, bfloat16, each plain and coupled.
#include <torch/csrc/stable/library.h>

#include "algo/convert.h"
#include "algo/coupling.h"
#include "algo/numeric.h"
#include "algo/tree_plan.h"
#include "common/launch.h"
#include "tree/select.cuh"
#include "tree/tree_args.h"

namespace fv {
namespace {

constexpr int kThreads = kTopkThreads;
constexpr int kGroups = kThreads / 8;
constexpr int kCandidates = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kGroups >= kMaxBeam, "the bound needs k group maxima");
static_assert(kThreads / kGroups >= kTreeCluster, "a thread of a group for every block of a cluster");

struct Float {
    using Storage = float;
    static constexpr int kPer = 4;  // entries of 16 bytes
    static __device__ __forceinline__ float decode(const uint4& v, int j) {
        return bits_to_float(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w);
    }
    static __device__ __forceinline__ float decode(float x) { return x; }
};
__device__ __forceinline__ uint16_t half_of(const uint4& v, int j) {
    const uint32_t w = j < 2 ? v.x : j < 4 ? v.y : j < 6 ? v.z : v.w;
    return static_cast<uint16_t>(j & 1 ? w >> 16 : w);
}
struct Half {
    using Storage = uint16_t;
    static constexpr int kPer = 8;
    static __device__ __forceinline__ float decode(const uint4& v, int j) { return half_to_float(half_of(v, j)); }
    static __device__ __forceinline__ float decode(uint16_t x) { return half_to_float(x); }
};
struct BFloat16 {
    using Storage = uint16_t;
    static constexpr int kPer = 8;
    static __device__ __forceinline__ float decode(const uint4& v, int j) { return bf16_to_float(half_of(v, j)); }
    static __device__ __forceinline__ float decode(uint16_t x) { return bf16_to_float(x); }
};

// A row as `head` single entries, `vectors` of 16 aligned bytes, and single entries from `tail` on.
template <class Type>
struct Span {
    int head, vectors, tail;
    __device__ __forceinline__ Span(const typename Type::Storage* row, int n) {
        const int unaligned = static_cast<int>((16 - (reinterpret_cast<uintptr_t>(row) & 15)) & 15) /
                              static_cast<int>(sizeof(typename Type::Storage));
        head = unaligned < n ? unaligned : n;
        vectors = (n - head) / Type::kPer;
        tail = head + vectors * Type::kPer;
    }
};

// f(values, count, first id) for runs of entries of the row that this thread owns, block `slice` of `slices`: 16-byte loads,
// kBatch in flight; the ends one by one. Unused values are -inf.
template <class Type, int kBatch, class F>
__device__ __forceinline__ void each_run(const typename Type::Storage* __restrict__ row, int n, int slice, int slices, const F& f) {
    constexpr int kPer = Type::kPer;
    const auto [head, vectors, tail] = Span<Type>(row, n);
    const uint4* __restrict__ body = reinterpret_cast<const uint4*>(row + head);
    const int step = slices * kThreads;
    float x[kPer];
#pragma unroll 1
    for (int first = slice * kThreads + static_cast<int>(threadIdx.x); first < vectors; first += kBatch * step) {
        uint4 raw[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int v = first + u * step;
            if (v < vectors) raw[u] = body[v];
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int v = first + u * step;
            if (v >= vectors) break;
#pragma unroll
            for (int j = 0; j < kPer; ++j) x[j] = Type::decode(raw[u], j);
            f(x, kPer, head + v * kPer);
        }
    }
#pragma unroll
    for (int j = 1; j < kPer; ++j) x[j] = minus_infinity();
#pragma unroll 1
    for (int end = 0; end < 2 && slice == 0; ++end) {  // the fewer than kPer entries before and after
        const int id = end ? tail + static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x);
        if (id >= (end ? n : head)) continue;
        x[0] = Type::decode(row[id]);
        f(x, 1, id);
    }
}

// The same runs in the same order, without their values: f(count, first id).
template <class Type, class F>
__device__ __forceinline__ void each_place(const typename Type::Storage* __restrict__ row, int n, int slice, int slices, const F& f) {
    const Span<Type> span(row, n);
    for (int v = slice * kThreads + static_cast<int>(threadIdx.x); v < span.vectors; v += slices * kThreads) {
        f(Type::kPer, span.head + v * Type::kPer);
    }
#pragma unroll 1
    for (int end = 0; end < 2 && slice == 0; ++end) {
        const int id = end ? span.tail + static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x);
        if (id < (end ? n : span.head)) f(1, id);
    }
}

__device__ __forceinline__ float finite_or_lowest(float x) { return x <= kFloatMax ? x : minus_infinity(); }

struct TopkShared {
    uint64_t keys[kCandidates], masses[kTreeCluster * kWarps];  // of the first block: what all blocks have found
    float group_max[kGroups], maxima[kTopkMaxima], top, bound;  // maxima: the k largest group maxima of every block
    uint32_t found;
    SelectShared select;
};

// The rank of x[i] among `count` values, larger first, then lower index, by kShare neighbouring threads: all get it.
template <int kShare>
__device__ __forceinline__ int rank_of(const float* x, int count, int i) {
    const float own = i < count ? x[i] : 0.0f;
    int rank = 0;
#pragma unroll 4
    for (int g = static_cast<int>(threadIdx.x) % kShare; g < count; g += kShare) rank += x[g] > own || (x[g] == own && g < i);
#pragma unroll
    for (int d = kShare / 2; d > 0; d >>= 1) rank += __shfl_xor_sync(kFullWarp, rank, d);
    return rank;
}

// Requests of coupled rows; `each` rows belong to one.
struct CouplingInputs {
    const float* __restrict__ temperature;   // [batch]
    const int64_t* __restrict__ seed;        // [batch]
    const int32_t* __restrict__ prefix_len;  // [batch]
    const int32_t* __restrict__ active;      // [batch]
    int batch, each, level;
    float sharpness;
};

// The coupling of row r; false where no active request has that row. Whole warps.
__device__ __forceinline__ bool coupling_of_row(const CouplingInputs& in, int64_t r, Coupling* out) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    int64_t rank = r / in.each;
#pragma unroll 1
    for (int first = 0; first < in.batch; first += 32) {
        const bool active = first + lane < in.batch && in.active[first + lane] != 0;
        const uint32_t mask = __ballot_sync(kFullWarp, active);
        const int count = __popc(mask);
        if (rank < count) {
            const bool own = active && __popc(mask & ((1u << lane) - 1)) == rank;
            const int b = first + __ffs(static_cast<int>(__ballot_sync(kFullWarp, own))) - 1;
            *out = resolve_coupling(in.temperature[b], in.seed[b], in.prefix_len[b], in.level, in.sharpness);
            return true;
        }
        rank -= count;
    }
    return false;
}

template <class Type, bool kCoupled>
__global__ void __launch_bounds__(kThreads) draft_topk_kernel(
    const typename Type::Storage* __restrict__ logits,  // [R, n], rows `stride` entries apart
    int64_t stride,
    const int64_t* __restrict__ d2t,       // [n] or null
    const int32_t* __restrict__ cu_nodes,  // [last + 1] or null
    int64_t last,
    float* __restrict__ values,            // [R, k]
    int32_t* __restrict__ tokens,          // [R, k]
    int n, int k, int blocks,              // blocks: of a cluster
    CouplingInputs inputs, bool cached) {  // of coupled rows; scores are kept behind TopkShared
    constexpr int kPer = Type::kPer;
    TopkShared& s = *reinterpret_cast<TopkShared*>(dynamic_shared());
    const int own_rank = static_cast<int>(cluster_rank()), t = threadIdx.x;
    const int64_t r = blockIdx.x / static_cast<unsigned>(blocks);
    values += r * k;
    tokens += r * k;
    bool padding = cu_nodes && r >= cu_nodes[last];
    Coupling coupling;
    if constexpr (kCoupled) padding = !coupling_of_row(inputs, r, &coupling) || padding;
    if (padding) {  // all blocks of the cluster
        if (own_rank == 0 && t < k) values[t] = 0.0f, tokens[t] = 0;
        return;
    }
    const typename Type::Storage* const row = logits + r * stride;
    float* const scores = reinterpret_cast<float*>(dynamic_shared() + sizeof(TopkShared)) + t;  // [slots, kThreads]
    const auto score = [&](float logit, int id) {
        const float x = finite_or_lowest(logit);
        if constexpr (kCoupled) {
            // of a map, the low words are enough
            const int32_t offset = coupling.noisy() && d2t ? reinterpret_cast<const int32_t*>(d2t)[2 * static_cast<int64_t>(id)] : 0;
            if (coupling.noisy()) return coupled_score(x, static_cast<uint32_t>(id) + static_cast<uint32_t>(offset), coupling);
        }
        return x;
    };

    float best = minus_infinity();
    if constexpr (kCoupled) {
        int slot = 0;
        each_run<Type, 1>(row, n, own_rank, blocks, [&](const float (&raw)[kPer], int count, int first) {
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
                if (j >= count) break;
                const float x = score(raw[j], first + j);
                best = fmaxf(best, x);
                if (cached) scores[slot++ * kThreads] = x;
            }
        });
    } else {
        each_run<Type, 4>(row, n, own_rank, blocks, [&](const float (&x)[kPer], int, int) {
#pragma unroll
            for (int j = 0; j < kPer; ++j) best = fmaxf(best, x[j]);  // drops NaN
        });
        if (best > kFloatMax) {  // +inf is left out too
            best = minus_infinity();
            each_run<Type, 1>(row, n, own_rank, blocks, [&](const float (&x)[kPer], int, int) {
#pragma unroll
                for (int j = 0; j < kPer; ++j) best = fmaxf(best, finite_or_lowest(x[j]));
            });
        }
    }
    best += 0.0f;
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, d));
    if (t % 8 == 0) s.group_max[t / 8] = best;
    if (t == 0) s.found = 0;
    cluster_barrier();  // all blocks have started: their memory may be written
    {
        constexpr int kShare = kThreads / kGroups;
        const int group = t / kShare, rank = rank_of<kShare>(s.group_max, kGroups, group);
        if (rank < k && t % kShare < blocks) {  // one thread for each block that is told (at most 8)
            cluster_map(s.maxima, static_cast<uint32_t>(t % kShare))[own_rank * k + rank] = s.group_max[group];
        }
    }
    cluster_barrier();
    {
        constexpr int kShare = kThreads / kTopkMaxima;
        const int i = t / kShare, rank = rank_of<kShare>(s.maxima, blocks * k, i);
        if (i < blocks * k && rank == 0) s.top = s.maxima[i];
        if (i < blocks * k && rank == k - 1) s.bound = s.maxima[i];
    }
    __syncthreads();

    TopkShared& leader = *cluster_map(&s, 0);  // the first block's
    const float top = s.top, bound = s.bound;
    const bool empty = top == minus_infinity();
    const float finite_top = empty ? 0.0f : top;
    uint64_t mass = 0;
    bool full = false;
    const float sharpness = coupling.sharpness;  // 1 unless coupled
    const auto take = [&](const float (&x)[kPer], int count, int first) {
        float largest = minus_infinity();
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            mass += kCoupled ? mass_of((x[j] - finite_top) * sharpness, 0.0f) : mass_of(x[j], finite_top);  // 0 for -inf
            largest = fmaxf(largest, x[j]);
        }
        if (largest >= bound && !full) {
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
                if (j >= count || x[j] < bound) continue;
                const uint32_t at = atomicAdd(&leader.found, 1u);
                full = at >= kCandidates;
                if (full) break;
                leader.keys[at] = short_key(ordered_bits(x[j] + 0.0f), static_cast<uint32_t>(first + j));
            }
        }
    };
    const auto take_scores = [&](const float (&raw)[kPer], int count, int first) {
        float x[kPer];
#pragma unroll
        for (int j = 0; j < kPer; ++j) x[j] = !kCoupled || j < count ? score(raw[j], first + j) : minus_infinity();
        take(x, count, first);
    };
    if constexpr (!kCoupled) {
        each_run<Type, 4>(row, n, own_rank, blocks, take_scores);
    } else if (!cached) {
        each_run<Type, 1>(row, n, own_rank, blocks, take_scores);
    } else {
        int slot = 0;
        each_place<Type>(row, n, own_rank, blocks, [&](int count, int first) {
            float x[kPer];
#pragma unroll
            for (int j = 0; j < kPer; ++j) x[j] = j < count ? scores[(slot + j) * kThreads] : minus_infinity();
            slot += count;
            take(x, count, first);
        });
    }
    mass = warp_sum(mass);
    if (t % 32 == 0) leader.masses[own_rank * kWarps + t / 32] = mass;
    cluster_barrier();
    if (own_rank != 0) return;
    uint32_t count = s.found;
    if (count > kCandidates) {
        const auto each_key = [&](const auto& f) {
            each_run<Type, 1>(row, n, 0, 1, [&](const float (&x)[kPer], int run, int first) {
#pragma unroll
                for (int j = 0; j < kPer; ++j) {
                    if (j < run) f(short_key(ordered_bits(score(x[j], first + j) + 0.0f), static_cast<uint32_t>(first + j)));
                }
            });
        };
        const uint64_t cut = block_select(each_key, static_cast<uint64_t>(ordered_bits(bound)) << kIdBits,
                                          short_key(ordered_bits(top), 0), static_cast<uint32_t>(k), s.select);
        if (t == 0) s.found = 0;
        __syncthreads();
        each_key([&](uint64_t key) {
            if (key >= cut) s.keys[atomicAdd(&s.found, 1u)] = key;
        });
        __syncthreads();
        count = static_cast<uint32_t>(k);
    }
    if (t - t % 32 >= count) return;  // whole warps, for the sum
    mass = 0;
    for (int w = t % 32; w < blocks * kWarps; w += 32) mass += s.masses[w];
    mass = warp_sum(mass);
    if (t >= count) return;
    const uint64_t key = s.keys[t];
    int rank = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) rank += s.keys[i] > key;
    if (rank >= k) return;
    const uint32_t id = short_key_index(key);
    const float log_sum = empty ? 0.0f : log_mass(mass);
    values[rank] = empty ? minus_infinity() : (from_ordered_bits(short_key_order(key)) - top) * sharpness - log_sum;
    tokens[rank] = static_cast<int32_t>(id + (d2t ? static_cast<uint64_t>(d2t[id]) : 0));
}

template <class Type, bool kCoupled>
void launch_draft_topk(const Tensor& logits, const OptTensor& d2t, const OptTensor& cu_nodes, const Tensor& values,
                       const Tensor& tokens, const DraftTopkSizes& s, const CouplingInputs& inputs) {
    const Launch launch("draft_topk", logits);
    const int blocks = topk_cluster(s.rows, s.n, s.k, launch.props.major, launch.props.sms);
    FV_CHECK(s.rows * blocks <= INT32_MAX, "draft_topk: logits must be at most ", INT32_MAX, " rows on CUDA; got ",
             describe(logits), ". Fix: pass the rows of one step.");
    const int64_t kept = kCoupled ? topk_kept_bytes(s.n, Type::kPer, blocks, launch.props.max_smem - sizeof(TopkShared)) : 0;
    launch.run_cluster(draft_topk_kernel<Type, kCoupled>, blocks, dim3(static_cast<unsigned>(s.rows * blocks)), dim3(kThreads),
                       sizeof(TopkShared) + kept, cptr<typename Type::Storage>(logits), logits.stride(0), cptr<int64_t>(d2t),
                       cptr<int32_t>(cu_nodes), cu_nodes ? cu_nodes->size(0) - 1 : 0, mptr<float>(values),
                       mptr<int32_t>(tokens), static_cast<int>(s.n), static_cast<int>(s.k), blocks, inputs, kept > 0);
}

template <bool kCoupled, class... A>
void launch_type(const Tensor& logits, const A&... args) {
    if (logits.scalar_type() == ScalarType::Float) {
        launch_draft_topk<Float, kCoupled>(logits, args...);
    } else if (logits.scalar_type() == ScalarType::Half) {
        launch_draft_topk<Half, kCoupled>(logits, args...);
    } else {
        launch_draft_topk<BFloat16, kCoupled>(logits, args...);
    }
}

void draft_topk_cuda(
    const Tensor logits, const OptTensor d2t, const OptTensor cu_nodes, const OptTensor temperature, const OptTensor seed,
    const OptTensor prefix_len, const OptTensor active, Tensor values, Tensor tokens, int64_t level, double sharpness) {
    const DraftTopkSizes s =
        check_draft_topk(logits, d2t, cu_nodes, temperature, seed, prefix_len, active, values, tokens, level, sharpness);
    if (s.rows == 0) return;
    if (s.batch < 0) {
        launch_type<false>(logits, d2t, cu_nodes, values, tokens, s, CouplingInputs{});
        return;
    }
    const CouplingInputs inputs{cptr<float>(temperature), cptr<int64_t>(seed), cptr<int32_t>(prefix_len), cptr<int32_t>(active),
                                static_cast<int>(s.batch), static_cast<int>(s.each), static_cast<int>(level),
                                static_cast<float>(sharpness)};
    launch_type<true>(logits, d2t, cu_nodes, values, tokens, s, inputs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("draft_topk", TORCH_BOX(&draft_topk_cuda)); }

}  // namespace fv
