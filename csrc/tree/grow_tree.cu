// SPDX-License-Identifier: Apache-2.0
// grow_tree on CUDA: a cluster of 1 to 8 blocks per request (algo/tree_plan.h), one launch. Bit-equal to grow_tree.cpp.
// Every block orders the k*k candidates (up to 256 by counting the better ones, more by radix selection first) and copies
// its slice of the parents' hidden rows with the widest loads that all addresses allow. The first block alone writes the
// pool and replaces the beam in place, after a barrier behind which nobody reads the old one. The cluster of an inactive
// request zeroes k of the padding rows. All shared memory is dynamic: clusters of the emulator ask for it.
// Cost: k*k + 2*k*H elements per request. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "algo/tree_plan.h"
#include "common/launch.h"
#include "tree/select.cuh"
#include "tree/tree_args.h"

namespace fv {
namespace {

constexpr int kThreads = 1024;
constexpr int kByCounting = 256;  // candidates

struct GrowTree {
    const float* values;      // [rows, k]
    const int32_t* tokens;    // [rows, k]
    const char* hidden;       // rows hidden_stride bytes apart
    int64_t hidden_stride, row_bytes;
    const int32_t *prefix_len, *active;     // [B]
    int32_t* cu_nodes;        // [B+1]
    float* scores;            // [B*k]
    int32_t* pool_index;      // [B*k]
    uint64_t* mask;           // [B*k, words]
    float* pool_scores;       // [B, pool]
    int32_t *pool_tokens, *pool_parents;    // [B, pool]
    int32_t *next_tokens, *next_positions;  // [B*k]
    char* next_hidden;        // [B*k, row_bytes]
    int64_t batch, pool, level;
    int k, words, unit, blocks;  // unit: bytes per load of a hidden row; blocks: of a cluster
};

struct GrowShared {
    uint64_t best[kMaxBeam], limits[33];
    int source[kMaxBeam];
    uint32_t have;
    SelectShared select;
    uint64_t keys[1];  // [k*k], then the old masks [k*words]
};

// This block's slice of k rows of `bytes` bytes to dst: row i from src + source[i] * stride, or zeros where src is null.
template <class Unit>
__device__ __forceinline__ void copy_rows(
    char* dst, const char* src, int64_t stride, int64_t bytes, int k, const int* source, int slice, int slices) {
    const int per_row = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit)));
    constexpr int kBatch = 4;
    const int total = k * per_row;
    const int step = slices * kThreads;
    for (int64_t first = slice * kThreads + threadIdx.x; first < total; first += kBatch * step) {
        Unit data[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int64_t place = first + u * step;
            if (place >= total) break;
            const int at = static_cast<int>(place), row = at / per_row, column = at - row * per_row;
            data[u] = src ? reinterpret_cast<const Unit*>(src + source[row] * stride)[column] : Unit{};
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int64_t at = first + u * step;
            if (at < total) reinterpret_cast<Unit*>(dst)[at] = data[u];
        }
    }
}

__device__ __forceinline__ void copy_hidden(const GrowTree& g, int64_t row, const char* src, const int* source, int slice) {
    char* const dst = g.next_hidden + row * g.row_bytes;
    if (g.unit == 16) {
        copy_rows<uint4>(dst, src, g.hidden_stride, g.row_bytes, g.k, source, slice, g.blocks);
    } else if (g.unit == 4) {
        copy_rows<uint32_t>(dst, src, g.hidden_stride, g.row_bytes, g.k, source, slice, g.blocks);
    } else {
        copy_rows<uint16_t>(dst, src, g.hidden_stride, g.row_bytes, g.k, source, slice, g.blocks);
    }
}

__global__ void __launch_bounds__(kThreads) grow_tree_kernel(const GrowTree g) {
    GrowShared& s = *reinterpret_cast<GrowShared*>(dynamic_shared());
    uint64_t* const best = s.best;
    int* const source = s.source;
    const int slice = static_cast<int>(cluster_rank());
    const bool first_block = slice == 0;
    const int64_t b = blockIdx.x / static_cast<unsigned>(g.blocks);
    const int t = threadIdx.x, k = g.k, words = g.words;
    const int64_t level = g.level;

    // the place of this request among the active ones
    int64_t before = 0;
    for (int64_t first = 0; first < b; first += kThreads) {
        const int64_t i = first + t;
        before += __syncthreads_count(i < b && g.active[i] != 0);
    }
    if (b >= g.batch) {  // an empty batch
        if (level == 0 && t == 0 && first_block) g.cu_nodes[0] = 0;
        return;
    }
    const bool live = g.active[b] != 0;
    if (level == 0 && t == 0 && first_block) {
        if (b == 0) g.cu_nodes[0] = 0;
        g.cu_nodes[b + 1] = static_cast<int32_t>(k * (before + live));
    }
    if (!live) {  // the (b - before)-th inactive request
        int64_t total = before;
        for (int64_t first = b; first < g.batch; first += kThreads) {
            const int64_t i = first + t;
            total += __syncthreads_count(i < g.batch && g.active[i] != 0);
        }
        const int64_t row = k * (total + b - before);
        copy_hidden(g, row, nullptr, nullptr, slice);
        if (!first_block) return;
        if (t < k) {
            g.scores[row + t] = 0.0f;
            g.pool_index[row + t] = g.next_tokens[row + t] = g.next_positions[row + t] = 0;
        }
        for (int i = t; i < k * words; i += kThreads) g.mask[row * words + i] = 0;
        return;
    }

    const int64_t row = k * before, from = level == 0 ? before : row;  // of the beam; of the inputs
    const float* const values = g.values + from * k;
    const int32_t* const tokens = g.tokens + from * k;
    const char* const hidden = g.hidden + from * g.hidden_stride;
    float* const pool_scores = g.pool_scores + b * g.pool;
    int32_t* const pool_tokens = g.pool_tokens + b * g.pool;
    int32_t* const pool_parents = g.pool_parents + b * g.pool;
    const int32_t position = static_cast<int32_t>(g.prefix_len[b] + level);

    if (level == 0) {  // the candidates are the beam, in the order given
        if (t < k) source[t] = 0;
        __syncthreads();
        copy_hidden(g, row, hidden, source, slice);
        if (!first_block) return;
        for (int64_t i = t; i < g.pool; i += kThreads) {
            pool_scores[i] = i < k ? not_nan(values[i]) : minus_infinity();
            pool_tokens[i] = i < k ? tokens[i] : 0;
            pool_parents[i] = -1;
        }
        if (t < k) {
            g.scores[row + t] = not_nan(values[t]);
            g.next_tokens[row + t] = tokens[t];
            g.pool_index[row + t] = t;
            g.next_positions[row + t] = position;
            write_mask_row(g.mask + (row + t) * words, nullptr, words, t);
        }
        return;
    }

    // the parents' rows will be read: fetch them while the candidates are ordered
    const int lines = static_cast<int>((g.row_bytes + 127) / 128);
    for (int i = slice * kThreads + t; i < k * lines; i += g.blocks * kThreads) {
        prefetch_l2(hidden + (i / lines) * g.hidden_stride + (i % lines) * 128ll);
    }

    uint64_t *const keys = s.keys, *const old_mask = keys + k * k;
    const int count = k * k;
    const int64_t offset = pool_offset(level, k);
    uint64_t low = ~0ull, high = 0;
    for (int c = t; c < count; c += kThreads) {
        const float score = not_nan(g.scores[row + c / k] + values[c]);
        if (first_block) {
            pool_scores[offset + c] = score;
            pool_tokens[offset + c] = tokens[c];
            pool_parents[offset + c] = g.pool_index[row + c / k];
        }
        const uint64_t key = short_key(ordered_bits(score + 0.0f), static_cast<uint32_t>(c));
        keys[c] = key;
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    for (int i = t; i < k * words; i += kThreads) old_mask[i] = g.mask[row * words + i];
    cluster_barrier();  // the old beam is read
    if (count <= kByCounting) {
        const int share = kThreads / kByCounting, c = t / share;  // threads of a candidate
        const uint64_t own = c < count ? keys[c] : 0;
        int rank = 0;
#pragma unroll 4
        for (int i = t % share; i < count; i += share) rank += keys[i] > own;
#pragma unroll
        for (int d = share / 2; d > 0; d >>= 1) rank += __shfl_xor_sync(kFullWarp, rank, d);
        if (c < count && t % share == 0 && rank < k) best[rank] = own;
    } else {
        low = block_reduce(low, [](uint64_t a, uint64_t b) { return a < b ? a : b; }, s.limits);
        __syncthreads();
        high = block_reduce(high, [](uint64_t a, uint64_t b) { return a > b ? a : b; }, s.limits);
        const auto each = [&](const auto& f) {
            for (int c = t; c < count; c += kThreads) f(keys[c]);
        };
        const uint64_t cut = block_select(each, low, high, static_cast<uint32_t>(k), s.select);
        if (t == 0) s.have = 0;
        __syncthreads();
        each([&](uint64_t key) {
            if (key >= cut) best[atomicAdd(&s.have, 1u)] = key;
        });
        __syncthreads();
        uint64_t own = 0;
        int rank = 0;
        if (t < k) {
            own = best[t];
            for (int i = 0; i < k; ++i) rank += best[i] > own;
        }
        __syncthreads();
        if (t < k) best[rank] = own;
    }
    __syncthreads();
    if (t < k) {
        const int c = static_cast<int>(short_key_index(best[t])), parent = c / k;
        source[t] = parent;
        if (first_block) {
            g.scores[row + t] = pool_scores[offset + c];
            g.next_tokens[row + t] = tokens[c];
            g.pool_index[row + t] = static_cast<int32_t>(offset + c);
            g.next_positions[row + t] = position;
            write_mask_row(g.mask + (row + t) * words, old_mask + parent * words, words, level * k + t);
        }
    }
    __syncthreads();
    copy_hidden(g, row, hidden, source, slice);
}

// The widest of 16, 4 and 2 bytes that divides all of them.
int copy_unit(int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t all = a | b | c | d;
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

void grow_tree_cuda(
    const Tensor values, const Tensor tokens, const Tensor hidden, const Tensor prefix_len, const Tensor active,
    Tensor cu_nodes, Tensor scores, Tensor pool_index, Tensor mask, Tensor pool_scores, Tensor pool_tokens,
    Tensor pool_parents, Tensor next_tokens, Tensor next_positions, Tensor next_hidden, int64_t level) {
    const GrowTreeSizes s = check_grow_tree(
        values, tokens, hidden, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
        pool_parents, next_tokens, next_positions, next_hidden, level);
    const int64_t item = static_cast<int64_t>(hidden.element_size());
    GrowTree g{cptr<float>(values), cptr<int32_t>(tokens), cptr<char>(hidden), hidden.stride(0) * item,
               hidden.size(1) * item, cptr<int32_t>(prefix_len), cptr<int32_t>(active), mptr<int32_t>(cu_nodes),
               mptr<float>(scores), mptr<int32_t>(pool_index), mptr<uint64_t>(mask), mptr<float>(pool_scores),
               mptr<int32_t>(pool_tokens), mptr<int32_t>(pool_parents), mptr<int32_t>(next_tokens),
               mptr<int32_t>(next_positions), mptr<char>(next_hidden), s.batch, s.pool, level,
               static_cast<int>(s.k), static_cast<int>(s.words), 0, 1};
    g.unit = copy_unit(reinterpret_cast<int64_t>(g.hidden), g.hidden_stride, g.row_bytes,
                       reinterpret_cast<int64_t>(g.next_hidden));
    FV_CHECK(s.k * g.row_bytes <= INT32_MAX, "grow_tree: hidden must be at most 2 GiB per beam on CUDA; got ",
             describe(hidden), ". Fix: pass the hidden states of one layer.");
    const Launch launch("grow_tree", values);
    g.blocks = grow_cluster(s.batch, s.k, g.row_bytes, launch.props.major, launch.props.sms);
    const size_t smem = sizeof(GrowShared) + (level == 0 ? 0 : sizeof(uint64_t) * static_cast<size_t>(s.k * s.k + s.k * s.words));
    launch.run_cluster(grow_tree_kernel, g.blocks, dim3(static_cast<unsigned>(s.batch > 0 ? s.batch * g.blocks : 1)),
                       dim3(kThreads), smem, g);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("grow_tree", TORCH_BOX(&grow_tree_cuda)); }

}  // namespace fv
