// SPDX-License-Identifier: Apache-2.0
// What lm_head_verify_tree does with logits while they are still in registers: describes the node rows of a block,
// then turns four neighbouring logits of a row into a candidate key, or stores them for a request with filters.
#pragma once
#include "accept/verify_task.cuh"
#include "algo/head_plan.h"

namespace fv {

struct HeadArgs {
    const void* hidden;         // [R,H]
    const void* weight;         // [V,H]
    int64_t hidden_stride, weight_stride;  // elements
    int hidden_type, weight_type;          // 0 f32, 1 f16, 2 bf16
    int64_t hidden_size;
    bool all_logits;            // logprobs are asked: every row takes the way through memory
    Word* keys;                 // [R]
    int32_t* bad;               // [R]
    uint32_t* counters;
    float* partials;
    float* logits;              // [R,task.stride], what task.logits points to
    VerifyTask task;

    FV_HD bool extras() const { return task.bias || task.bitmask || task.in.penalties; }
};

enum HeadMode : int32_t { kHeadSkip, kHeadKey, kHeadLogits };

struct HeadRow {
    int32_t mode, request;
    uint32_t t, seed_lo, seed_hi;
    float temperature, inverse;  // inverse ~ 1 / temperature, for bounds only
    uint32_t above : 31;         // bit (id / 4) % 31 of every drafted ancestor
    uint32_t plain : 1;          // no extras, and bounds by `inverse` hold
};
static_assert(sizeof(HeadRow) + sizeof(Word) + sizeof(float) <= kHeadRowBytes, "shared memory of a node row");

// Shared memory of a block's node rows.
struct HeadShared {
    HeadRow* row;  // [n]
    Word* best;     // [n]
    float* bound;  // [n] what a candidate's bound must reach: hardly below the best score
    __device__ HeadShared(unsigned char* p, int n)
        : row(reinterpret_cast<HeadRow*>(p)), best(reinterpret_cast<Word*>(p + n * sizeof(HeadRow))),
          bound(reinterpret_cast<float*>(p + n * (sizeof(HeadRow) + sizeof(Word)))) {}
};

// False if any request's range is malformed: then rows may belong to several requests, and all take the way through memory.
// All threads of the block call it and get the answer.
__device__ __forceinline__ bool ranges_in_order(const HeadArgs& a) {
    bool ok = true;
    for (int64_t b = threadIdx.x; b < a.task.in.batch; b += blockDim.x) ok = ok && !node_range(a.task.in.cu_nodes, b, a.task.in.rows).bad;
    return __syncthreads_and(ok) != 0;
}

// Request b reads its rows' logits from memory (else: one key per row).
__device__ __forceinline__ bool wants_logits(const HeadArgs& a, bool in_order, const RowParams& p) {
    return a.all_logits || !in_order || p.filtered();
}

// Node rows [row0, row0 + n) of the block. Ends with a barrier.
__device__ __forceinline__ void describe_rows(const HeadArgs& a, int64_t row0, int n, const HeadShared& s) {
    const bool in_order = ranges_in_order(a);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        s.row[i].mode = kHeadSkip;
        s.row[i].request = -1;
        s.best[i] = 0;
        s.bound[i] = -kInf;
    }
    __syncthreads();
    for (int64_t b = threadIdx.x; b < a.task.in.batch; b += blockDim.x) {
        const NodeRange r = node_range(a.task.in.cu_nodes, b, a.task.in.rows);
        if (!a.task.in.active[b]) continue;
        const int64_t lo = r.begin > row0 ? r.begin : row0, hi = r.begin + r.n < row0 + n ? r.begin + r.n : row0 + n;
        for (int64_t i = lo; i < hi; ++i) atomicMax(&s.row[i - row0].request, static_cast<int32_t>(b));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        HeadRow& row = s.row[i];
        if (row.request < 0) continue;
        const int64_t b = row.request;
        const RowParams p = a.task.in.params(b);
        if (wants_logits(a, in_order, p)) {
            row.mode = kHeadLogits;
            continue;
        }
        const int64_t begin = a.task.in.cu_nodes[b];
        int64_t node = row0 + i - begin;
        uint32_t depth = 0, above = 0;
        bool reached = true;  // a row that cannot be climbed from is never visited
        while (node > 0) {
            const int64_t parent = a.task.in.parents[begin + node];
            if (parent < 0 || parent >= node) {
                reached = false;
                break;
            }
            above |= 1u << ((a.task.tokens[begin + node] >> 2 & 0xffffff) % 31);
            ++depth;
            node = parent;
        }
        if (!reached) continue;
        row.mode = kHeadKey;
        row.t = static_cast<uint32_t>(a.task.in.prefix_len[b]) + depth + 1;
        row.seed_lo = p.seed_lo;
        row.seed_hi = p.seed_hi;
        row.temperature = p.temperature;
        row.inverse = p.greedy() ? 1.0f : 1.0f / p.temperature;
        row.above = above;
        row.plain = !a.extras() && (p.greedy() || (p.temperature > 1e-30f && p.temperature < 1e30f));
    }
    __syncthreads();
}

// Penalties, bias and bitmask of ids v..v+3 of node row `r`, in the pinned order.
__device__ __forceinline__ void apply_extras(const HeadArgs& a, const HeadRow& row, int64_t r, int64_t v, float (&x)[4]) {
    const int64_t b = row.request;
    if (a.task.in.penalties) {
        const RowParams p = a.task.in.params(b);
        int32_t count[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) count[j] = a.task.out.counts && v + j < a.task.in.vocab ? a.task.out.counts[b * a.task.in.vocab + v + j] : 0;
        if (row.above >> ((v >> 2) % 31) & 1) {
            const int64_t begin = a.task.in.cu_nodes[b];
            for (int64_t node = r - begin; node > 0; node = a.task.in.parents[begin + node]) {  // climbed once before
                const int64_t j = a.task.tokens[begin + node] - v;
    #pragma unroll
            for (int i = 0; i < 4; ++i) count[i] += j == i;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = apply_penalties(x[j], count[j], p.repetition, p.frequency, p.presence);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (a.task.bias && v + j < a.task.in.vocab) x[j] += a.task.bias[b * a.task.in.vocab + v + j];
        if (a.task.bitmask && v + j < a.task.in.vocab) {
            const int64_t words = (a.task.in.vocab + 31) / 32;
            const uint32_t word = static_cast<uint32_t>(a.task.bitmask[r * words + (v >> 5)]);
            if (!(word >> ((v + j) & 31) & 1)) x[j] = -kInf;
        }
    }
}

// Best exact key among ids v..v+3 whose score reaches `bound` (0: none). reach[j] bounds entry j's score from above, -inf: out.
// The most promising entry is evaluated first, so that the others are hardly ever.
__device__ __forceinline__ Word best_candidate(
    const HeadRow& row, int64_t v, const float (&x)[4], const Philox4& noise, float (&reach)[4], float bound) {
    Word best = 0;
#pragma unroll 1
    for (int round = 0; round < 4; ++round) {
        float most = reach[0], logit = x[0];
        uint32_t bits = noise.v[0], at = 0;
#pragma unroll
        for (int j = 1; j < 4; ++j) {
            const bool more = reach[j] > most;
            most = more ? reach[j] : most;
            logit = more ? x[j] : logit;
            bits = more ? noise.v[j] : bits;
            at = more ? j : at;
        }
        if (!(most > -kInf) || most < bound) break;
        const bool unscaled = row.temperature == 0.0f || row.temperature == 1.0f;
        const float z = unscaled ? logit + 0.0f : scale_logit(logit, row.temperature);
        const float score = row.temperature == 0.0f ? z : z + gumbel_from_bits(bits);
        const Word key = make_key(score, static_cast<uint32_t>(v) + at);
        best = key > best ? key : best;
        const float low = below(score);
        bound = low > bound ? low : bound;
#pragma unroll
        for (int j = 0; j < 4; ++j) reach[j] = at == j ? -kInf : reach[j];
    }
    return best;
}

// Logits x of ids v..v+3 (v % 4 == 0) of node row `r`, row i of the block; returns the best key that may still win, or 0.
// Noise costs most: log-free bounds are computed for all four, and logarithms only where one of them can still win.
__device__ __forceinline__ Word take_logits(const HeadArgs& a, const HeadShared& s, int i, int64_t r, int64_t v, float (&x)[4]) {
    const HeadRow row = s.row[i];
    if (row.mode == kHeadSkip) return 0;
    if (row.mode == kHeadLogits) {
        if (v < a.task.in.vocab) *reinterpret_cast<float4*>(a.logits + r * a.task.stride + v) = make_float4(x[0], x[1], x[2], x[3]);
        return 0;
    }
    const bool greedy = row.temperature == 0.0f;
    Philox4 noise{{0, 0, 0, 0}};
    if (!greedy) noise = philox4x32(static_cast<uint32_t>(v >> 2), row.t, kStreamTarget, 0, row.seed_lo, row.seed_hi);
    float reach[4];
    // 0 if all four are finite, else NaN
    const float odd = __fmaf_rn(x[0], 0.0f, __fmaf_rn(x[1], 0.0f, __fmaf_rn(x[2], 0.0f, x[3] * 0.0f)));
    if (row.plain && odd == 0.0f && v + 3 < a.task.in.vocab) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            reach[j] = greedy ? x[j] : fmaxf(__fmaf_rn(x[j], row.inverse, noise_bound(noise.v[j])), -kFloatMax);
        }
    } else {
        if (a.extras()) apply_extras(a, row, r, v, x);
        bool bad = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (v + j >= a.task.in.vocab) x[j] = -kInf;
            bad = bad || is_bad(x[j]);
            const float z = scale_logit(is_bad(x[j]) ? -kInf : x[j], greedy ? 1.0f : row.temperature);
            reach[j] = greedy || z == -kInf ? z : z + noise_bound(noise.v[j]);
        }
        if (bad) atomicOr(a.bad + r, 1);
    }
    return best_candidate(row, v, x, noise, reach, s.bound[i]);
}

}  // namespace fv
