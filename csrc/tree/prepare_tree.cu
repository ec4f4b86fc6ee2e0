// SPDX-License-Identifier: Apache-2.0
// prepare_tree on CUDA: one block per request and one for the schedule, one launch. Bit-equal to prepare_tree.cpp.
// Every thread walks from its node to the root for depth and mask words. Child links come from the lowest and the highest
// child of every node (atomics in shared memory); only a node that has a next sibling looks for it.
// Cost: O(R * (words + depth)). Graph-safe.
#include <torch/csrc/stable/library.h>

#include "algo/schedule.h"
#include "algo/tree_plan.h"
#include "common/launch.h"
#include "common/warp.cuh"
#include "tree/tree_args.h"

namespace fv {
namespace {

constexpr int kCached = 2048;  // nodes of a request whose links fit shared memory; more are read from memory

struct PrepareTree {
    const int32_t* parents;                // [R] or null: a chain
    const int32_t *cu_nodes, *prefix_len;  // [B+1], [B]
    const int32_t* pages;                  // [B, num_pages]
    uint64_t* mask;                        // [R, words]; outputs that were not asked for are null
    int32_t *depth, *positions;            // [R]
    int64_t* slots;                        // [R]
    int32_t *first_child, *next_sibling;   // [R]
    int32_t *schedule, *flags;             // [B+3], [B]
    int64_t batch, rows, num_pages, page_size, row_base;
    int words;
};

// The parent of node i, -1 if it is malformed.
__device__ __forceinline__ int32_t parent_of(const int32_t* parents, int64_t i) {
    const int32_t p = parents[i];
    return valid_parent(p, i) ? p : -1;
}

// Depth of node i and, if asked for, its mask row: ancestors descend, so the words fill from the last to the first.
template <class Up>
__device__ __forceinline__ int64_t walk_up(const Up& up, int64_t i, int64_t row_base, uint64_t* words, int num_words) {
    int64_t depth = 0, w = num_words - 1;
    uint64_t bits = 0;
    for (int64_t node = i;; ++depth) {
        const int64_t column = row_base + node;
        if (words && column < 64ll * num_words) {
            for (; w > column / 64; --w) {
                words[w] = bits;
                bits = 0;
            }
            bits |= 1ull << (column % 64);
        }
        const int32_t next = up(node);
        if (next < 0) break;
        node = next;
    }
    for (; words && w >= 0; --w) {
        words[w] = bits;
        bits = 0;
    }
    return depth;
}

// The next node with the parent of node i, -1 if there is none.
template <class Up>
__device__ __forceinline__ int32_t find_sibling(const Up& up, int64_t i, int64_t n) {
    const int32_t own = up(i);
    if (own < 0) return -1;
    for (int64_t c = i + 1; c < n; ++c) {
        if (up(c) == own) return static_cast<int32_t>(c);
    }
    return -1;
}

// All of one request's rows but the links. Returns flags of this thread.
template <class Up>
__device__ __forceinline__ int32_t write_nodes(const PrepareTree& a, const Up& up, int64_t b, int64_t base, int64_t n) {
    int32_t flags = 0;
    const int64_t prefix = a.prefix_len[b];
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const int64_t row = base + i, column = a.row_base + i;
        uint64_t* const words = a.mask ? a.mask + row * a.words : nullptr;
        int64_t depth = column;
        if (a.parents) {
            if (!valid_parent(a.parents[row], i)) flags |= kFlagBadTree;
            if (a.mask || a.depth || a.positions) depth = walk_up(up, i, a.row_base, words, a.words);
        } else if (words) {
            write_chain_row(words, a.words, column);
        }
        if (words && column >= 64ll * a.words) flags |= kFlagBadTree;
        if (a.depth) a.depth[row] = static_cast<int32_t>(depth);
        if (a.positions) a.positions[row] = static_cast<int32_t>(prefix + depth);
        if (a.slots) {
            const int64_t at = prefix + column;
            const bool inside = at >= 0 && at / a.page_size < a.num_pages;
            const int64_t page = inside ? a.pages[b * a.num_pages + at / a.page_size] : -1;
            a.slots[row] = page < 0 ? -1 : page * a.page_size + at % a.page_size;
            if (page < 0) flags |= kFlagBadTree;
        }
    }
    return flags;
}

__device__ __forceinline__ void write_chain_links(const PrepareTree& a, int64_t base, int64_t n) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        if (a.first_child) a.first_child[base + i] = i + 1 < n ? static_cast<int32_t>(i + 1) : -1;
        if (a.next_sibling) a.next_sibling[base + i] = -1;
    }
}

// One warp: write_schedule (algo/schedule.h) with the sums over requests shared by the lanes. The search starts from bounds
// that hold for sum(ceil(kv / chunk)), so that few steps are left.
template <class KvOf>
__device__ __forceinline__ void write_schedule_warp(const KvOf& kv_of, int64_t batch, int64_t target, int32_t* schedule) {
    const int lane = threadIdx.x & 31;
    int64_t longest = 0, total = 0, nonempty = 0;
    for (int64_t b = lane; b < batch; b += 32) {
        const int64_t kv = kv_of(b);
        longest = kv > longest ? kv : longest;
        total += kv;
        nonempty += kv > 0;
    }
    longest = warp_max(longest);
    total = warp_sum(total);
    nonempty = warp_sum(nonempty);
    int64_t low = kMinChunk / kChunkStep, high = chunks_of(longest, kChunkStep);
    high = high > low ? high : low;
    if (nonempty > target) {
        low = high;  // one unit per request
    } else {
        const int64_t at_least = chunks_of(total, kChunkStep * target);
        low = at_least > low ? at_least : low;
        if (nonempty < target) {
            int64_t enough = chunks_of(total, kChunkStep * (target - nonempty));
            enough = enough > low ? enough : low;
            high = enough < high ? enough : high;
        }
    }
    while (low < high) {
        const int64_t mid = (low + high) / 2;
        int64_t units = 0;
        for (int64_t b = lane; b < batch; b += 32) units += chunks_of(kv_of(b), mid * kChunkStep);
        if (warp_sum(units) <= target) high = mid; else low = mid + 1;
    }
    const int64_t chunk = low * kChunkStep;
    int64_t before = 0;
    for (int64_t first = 0; first < batch; first += 32) {
        const int64_t b = first + lane, own = b < batch ? chunks_of(kv_of(b), chunk) : 0;
        int64_t inclusive = own;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int64_t other = __shfl_up_sync(kFullWarp, inclusive, d);
            inclusive += lane >= d ? other : 0;
        }
        if (b < batch) schedule[2 + b] = static_cast<int32_t>(before + inclusive - own);
        before += __shfl_sync(kFullWarp, inclusive, 31);
    }
    if (lane == 0) {
        schedule[0] = static_cast<int32_t>(chunk);
        schedule[1] = schedule[2 + batch] = static_cast<int32_t>(before);
    }
}

__global__ void __launch_bounds__(1024, 1) prepare_tree_kernel(const PrepareTree a) {
    __shared__ int32_t up[kCached], lowest[kCached], highest[kCached];
    const int64_t b = blockIdx.x, batch = a.batch;
    const int32_t* const cu = a.cu_nodes;

    bool ok = cu[0] == 0 && (a.rows < 0 || cu[batch] <= a.rows);
    for (int64_t i = threadIdx.x; i < batch; i += blockDim.x) ok = ok && cu[i] <= cu[i + 1];
    ok = __syncthreads_and(ok) != 0;

    if (b == batch) {
        if (a.schedule && threadIdx.x < 32) {
            const auto kv_of = [&](int64_t r) {
                return ok ? schedule_kv(a.prefix_len[r], a.row_base, cu[r + 1] - cu[r]) : 0;
            };
            write_schedule_warp(kv_of, batch, kTargetUnits, a.schedule);
        }
    } else {
        int32_t flags = ok ? 0 : kFlagBadTree;
        if (ok && a.rows >= 0) {
            const int64_t base = cu[b], n = cu[b + 1] - base;
            const bool links = a.first_child || a.next_sibling;
            if (!a.parents) {
                flags |= write_nodes(a, [](int64_t i) { return static_cast<int32_t>(i - 1); }, b, base, n);
                if (links) write_chain_links(a, base, n);
            } else if (n <= kCached) {
                for (int i = threadIdx.x; i < n; i += blockDim.x) {
                    up[i] = parent_of(a.parents + base, i);
                    lowest[i] = kCached;
                    highest[i] = -1;
                }
                __syncthreads();
                const auto cached = [&](int64_t i) { return up[i]; };
                flags |= write_nodes(a, cached, b, base, n);
                if (links) {
                    for (int i = threadIdx.x; i < n; i += blockDim.x) {
                        if (up[i] >= 0) {
                            atomicMin(lowest + up[i], i);
                            atomicMax(highest + up[i], i);
                        }
                    }
                    __syncthreads();
                    for (int i = threadIdx.x; i < n; i += blockDim.x) {
                        if (a.first_child) a.first_child[base + i] = lowest[i] < kCached ? lowest[i] : -1;
                        const bool more = up[i] >= 0 && highest[up[i]] != i;
                        if (a.next_sibling) a.next_sibling[base + i] = more ? find_sibling(cached, i, n) : -1;
                    }
                }
            } else {
                const auto direct = [&](int64_t i) { return parent_of(a.parents + base, i); };
                flags |= write_nodes(a, direct, b, base, n);
                for (int64_t i = threadIdx.x; links && i < n; i += blockDim.x) {
                    if (a.next_sibling) a.next_sibling[base + i] = find_sibling(direct, i, n);
                    int64_t child = i + 1;
                    while (a.first_child && child < n && direct(child) != i) ++child;
                    if (a.first_child) a.first_child[base + i] = child < n ? static_cast<int32_t>(child) : -1;
                }
            }
        }
        flags = __syncthreads_or(flags) ? kFlagBadTree : 0;
        if (a.flags && b < batch && threadIdx.x == 0) a.flags[b] = flags;
    }

    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t row = (ok ? cu[batch] : 0) + b * blockDim.x + threadIdx.x; row < a.rows; row += step) {
        if (a.depth) a.depth[row] = 0;
        if (a.positions) a.positions[row] = 0;
        if (a.slots) a.slots[row] = -1;
        if (a.first_child) a.first_child[row] = -1;
        if (a.next_sibling) a.next_sibling[row] = -1;
        for (int w = 0; a.mask && w < a.words; ++w) a.mask[row * a.words + w] = 0;
    }
}

void prepare_tree_cuda(
    const OptTensor parents, const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
    const OptTensor mask, const OptTensor depth, const OptTensor positions, const OptTensor slots,
    const OptTensor first_child, const OptTensor next_sibling, const OptTensor schedule, const OptTensor flags,
    int64_t page_size, int64_t row_base) {
    const PrepareTreeSizes s = check_prepare_tree(
        parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, schedule,
        flags, page_size, row_base);
    const PrepareTree a{cptr<int32_t>(parents), cptr<int32_t>(cu_nodes), cptr<int32_t>(prefix_len),
                        cptr<int32_t>(page_table), mptr<uint64_t>(mask), mptr<int32_t>(depth), mptr<int32_t>(positions),
                        mptr<int64_t>(slots), mptr<int32_t>(first_child), mptr<int32_t>(next_sibling),
                        mptr<int32_t>(schedule), mptr<int32_t>(flags), s.batch, s.rows, page_table.size(1), page_size,
                        row_base, mask ? static_cast<int>(mask->size(1)) : 0};
    const int threads = prepare_tree_threads(s.rows, s.batch);
    const Launch launch("prepare_tree", cu_nodes);
    launch.run(prepare_tree_kernel, dim3(static_cast<unsigned>(s.batch + 1)), dim3(threads), 0, a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("prepare_tree", TORCH_BOX(&prepare_tree_cuda)); }

}  // namespace fv
