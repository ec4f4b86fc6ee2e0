// SPDX-License-Identifier: Apache-2.0
// build_tree on CUDA: one block per request, one launch. Bit-equal to build_tree.cpp.
// A: the first row of a request follows from how many live entries the requests before it have, at most N - 1 each: one
//    warp per earlier request reads the head of its pool. B: effective scores, 1024 entries at a time, by pointer jumping
//    towards the root. C: radix selection of the N - 1 best. D: their indices, ascending. E: rows; each thread walks up.
// Scores stay in shared memory (4 bytes an entry); a pool too large for it walks its parent chains in every pass instead.
// Cost: about B * (M + N * words) elements. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "algo/tree_plan.h"
#include "common/ids.h"
#include "common/launch.h"
#include "tree/select.cuh"
#include "tree/tree_args.h"

namespace fv {
namespace {

constexpr int kMaxThreads = 1024;

struct BuildTree {
    const float* pool_scores;             // [B, pool]
    IdView pool_tokens;                   // [B, pool]
    const int32_t* pool_parents;          // [B, pool]
    IdView root_tokens;                   // [B]
    const int32_t *prefix_len, *active;   // [B]
    IdStore tokens;                       // [rows]
    int32_t* parents;                     // [rows]
    uint64_t* mask;                       // [rows, words]
    int32_t *depth, *positions;           // [rows]
    int32_t *cu_nodes, *flags;            // [B+1], [B]
    int64_t batch, pool, rows, num_nodes, vocab_size;
    int words, count_warps;               // warps that count earlier requests
    bool stored;
};

// One warp: live entries of a pool, counted from its start until there are `want`. bits: one bit per entry, of this warp.
__device__ __forceinline__ int count_alive(
    const float* __restrict__ scores, const int32_t* __restrict__ parents, int size, int want, uint32_t* bits) {
    constexpr int kBatch = 2;
    const int lane = threadIdx.x & 31;
    int alive = 0;
    for (int first = 0; first < size && alive < want; first += 32 * kBatch) {
        float score[kBatch];
        int32_t parent[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int i = first + 32 * u + lane;
            score[u] = i < size ? scores[i] : minus_infinity();
            parent[u] = i < size ? parents[i] : -1;
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
            const int start = first + 32 * u, i = start + lane;
            const int p = parent[u];
            bool ok = not_nan(score[u]) > minus_infinity() && valid_parent(parent[u], i);
            if (ok && p >= 0 && p < start) ok = bits[p >> 5] >> (p & 31) & 1;
            int up = ok && p >= start ? p - start : -1;  // within these 32
            while (__any_sync(kFullWarp, up >= 0)) {
                const int at = up < 0 ? lane : up;
                const bool parent_ok = __shfl_sync(kFullWarp, static_cast<int>(ok), at) != 0;
                const int next = __shfl_sync(kFullWarp, up, at);
                if (up >= 0) {
                    ok = ok && parent_ok;
                    up = next;
                }
            }
            const uint32_t word = __ballot_sync(kFullWarp, ok);
            if (lane == 0 && start < size) bits[start >> 5] = word;
            __syncwarp();
            alive += __popc(word);
        }
    }
    return alive < want ? alive : want;
}

// ordered_bits of an entry's own score, held down to 0; -0 counts as 0. On integers: a float minimum may keep -0.
__device__ __forceinline__ uint32_t own_order(float score) {
    const uint32_t zero = ordered_bits(0.0f), order = ordered_bits(not_nan(score));
    return order >= zero - 1 ? zero : order;
}

// Effective order of entry i by its parent chain.
__device__ __forceinline__ uint32_t walk_order(const float* scores, const int32_t* parents, int64_t i) {
    uint32_t order = own_order(scores[i]);
    for (int64_t p = parents[i]; p != -1; p = parents[i]) {
        if (!valid_parent(static_cast<int32_t>(p), i)) return kOrderedMinusInf;
        const uint32_t up = own_order(scores[p]);
        order = up < order ? up : order;
        i = p;
    }
    return order;
}

// Entry i of a pool, all at once: what phases B, D and E need of it.
struct Entry {
    float score;
    int32_t parent;
    int64_t token;
};

__device__ __forceinline__ Entry load_entry(const BuildTree& a, int64_t b, int i, bool with_token) {
    const int64_t at = b * a.pool + i;
    return {a.pool_scores[at], a.pool_parents[at], with_token ? a.pool_tokens[at] : 0};
}

__global__ void __launch_bounds__(kMaxThreads, 1) build_tree_kernel(const BuildTree a) {
    __shared__ int32_t chosen[kMaxNodes], up[kMaxNodes], jump[kMaxThreads], warp_counts[32], flags;
    __shared__ uint32_t warp_least[32], warp_most[32];
    __shared__ int64_t token_of[kMaxNodes], first_rows[32];
    __shared__ SelectShared select;
    uint32_t* const orders = reinterpret_cast<uint32_t*>(dynamic_shared());  // [pool], or bits of phase A
    const int64_t b = blockIdx.x;
    const int M = static_cast<int>(a.pool), want = static_cast<int>(a.num_nodes) - 1;
    const int t = threadIdx.x, threads = blockDim.x, lane = t & 31, warp = t >> 5, warps = threads >> 5;
    const bool live = b < a.batch && a.active[b] != 0;
    Entry own{minus_infinity(), -1, 0};  // of the first `threads` entries
    if (live && t < M) own = load_entry(a, b, t, true);

    // A: the first row
    int64_t before = 0;
    if (warp < a.count_warps) {
        uint32_t* const bits = orders + warp * ((M + 31) / 32);
        for (int64_t e = warp; e < b && e < a.batch; e += a.count_warps) {
            if (a.active[e] != 0) before += 1 + count_alive(a.pool_scores + e * M, a.pool_parents + e * M, M, want, bits);
        }
    }
    if (lane == 0) first_rows[warp] = before;
    if (t == 0) flags = 0;
    __syncthreads();
    const auto first_row = [&] {
        int64_t sum = 0;
        for (int w = 0; w < warps; ++w) sum += first_rows[w];
        return sum;
    };

    int nodes = 0;
    if (live) {
        // B: effective scores
        const float* const scores = a.pool_scores + b * M;
        const int32_t* const parents = a.pool_parents + b * M;
        int alive = 0;
        bool bad = false;
        Entry ahead = own;
        for (int start = 0; start < M; start += threads) {
            const int i = start + t;
            const Entry e = ahead;
            if (a.stored && i + threads < M) ahead = load_entry(a, b, i + threads, false);
            uint32_t order = kOrderedMinusInf;
            if (!a.stored) {
                if (i < M) {
                    order = walk_order(scores, parents, i);
                    bad = bad || !valid_parent(parents[i], i);
                }
                alive += __syncthreads_count(order > kOrderedMinusInf);
                continue;
            }
            int next = -1;  // an ancestor among these entries that is not taken in yet
            if (i < M) {
                const int p = e.parent;
                if (valid_parent(p, i)) {
                    order = own_order(e.score);
                    if (p >= start) {
                        next = p - start;
                    } else if (p >= 0 && orders[p] < order) {
                        order = orders[p];
                    }
                } else {
                    bad = true;
                }
                orders[i] = order;
            }
            jump[t] = next;
            while (__syncthreads_or(next >= 0)) {
                uint32_t above = order;
                int further = -1;
                if (next >= 0) {
                    above = orders[start + next];
                    further = jump[next];
                }
                __syncthreads();
                if (next >= 0) {
                    order = above < order ? above : order;
                    next = further;
                    orders[i] = order;
                    jump[t] = next;
                }
            }
            alive += __syncthreads_count(order > kOrderedMinusInf);
        }
        if (bad) atomicOr(&flags, kFlagBadTree);

        // C: a bound that exactly n entries reach
        const auto order_of = [&](int i) { return a.stored ? orders[i] : walk_order(scores, parents, i); };
        const int n = alive < want ? alive : want;
        uint64_t cut = static_cast<uint64_t>(kOrderedMinusInf + 1) << kIdBits;  // what lives
        if (n > 0 && n < alive) {
            const auto each = [&](const auto& f) {
                for (int i = t; i < M; i += threads) f(short_key(order_of(i), static_cast<uint32_t>(i)));
            };
            // the range of what lives, which spreads the first digits: fewer passes, and fewer threads at one counter
            uint32_t least = ~0u, most = 0;
            for (int i = t; i < M; i += threads) {
                const uint32_t order = order_of(i);
                least = order > kOrderedMinusInf && order < least ? order : least;
                most = order > most ? order : most;
            }
            least = __reduce_min_sync(kFullWarp, least);
            most = __reduce_max_sync(kFullWarp, most);
            if (lane == 0) {
                warp_least[warp] = least;
                warp_most[warp] = most;
            }
            __syncthreads();
            least = __reduce_min_sync(kFullWarp, lane < warps ? warp_least[lane] : ~0u);
            most = __reduce_max_sync(kFullWarp, lane < warps ? warp_most[lane] : 0);
            cut = static_cast<uint64_t>(least) << kIdBits;
            const uint64_t high = short_key(most, 0);
            cut = block_select(each, cut, high, static_cast<uint32_t>(n), select);
        }

        // D: the chosen entries, ascending
        int have = 0;
        for (int start = 0; start < M && have < n; start += threads) {
            const int i = start + t;
            const bool take = i < M && short_key(order_of(i), static_cast<uint32_t>(i)) >= cut;
            const uint32_t word = __ballot_sync(kFullWarp, take);
            if (lane == 0) warp_counts[warp] = __popc(word);
            __syncthreads();
            const int count = lane < warps ? warp_counts[lane] : 0;
            const int at = have + warp_sum(lane < warp ? count : 0) + __popc(word & ((1u << lane) - 1));
            if (take && at < n) {
                if (start > 0) own = load_entry(a, b, i, true);
                chosen[at] = i;
                up[at + 1] = own.parent;
                token_of[at + 1] = own.token;
            }
            have += warp_sum(count);
            __syncthreads();
        }
        nodes = 1 + n;

        // E: rows
        const int64_t base = first_row();
        if (t == 0) {
            up[0] = -1;
            token_of[0] = a.root_tokens[b];
        }
        for (int node = 1 + t; node < nodes; node += threads) {
            const int32_t p = up[node];
            int low = 0, high = node - 1;  // the place of p among the chosen before; it is there: they are closed
            while (low < high) {
                const int mid = (low + high) / 2;
                if (chosen[mid] < p) low = mid + 1; else high = mid;
            }
            up[node] = p < 0 ? 0 : low + 1;
        }
        __syncthreads();
        for (int node = t; node < nodes; node += threads) {
            const int64_t row = base + node;
            int32_t flag = 0, depth = 0;
            a.tokens.set(row, clamp_token(token_of[node], a.vocab_size, &flag));
            if (flag) atomicOr(&flags, flag);
            uint64_t* const words = a.mask + row * a.words;
            uint64_t bits = 0;
            int w = a.words - 1;  // ancestors descend, so the words fill from the last to the first
            for (int at = node;; at = up[at], ++depth) {
                for (; w > at >> 6; --w) {
                    words[w] = bits;
                    bits = 0;
                }
                bits |= 1ull << (at & 63);
                if (up[at] < 0) break;
            }
            for (; w >= 0; --w) {
                words[w] = bits;
                bits = 0;
            }
            a.parents[row] = up[node];
            a.depth[row] = depth;
            a.positions[row] = static_cast<int32_t>(static_cast<int64_t>(a.prefix_len[b]) + depth);
        }
        __syncthreads();
    }

    const int64_t end = first_row() + nodes;
    if (t == 0) {
        if (b == 0) a.cu_nodes[0] = 0;
        if (b < a.batch) {
            a.cu_nodes[b + 1] = static_cast<int32_t>(end);
            a.flags[b] = flags;
        }
    }
    if (b + 1 < a.batch) return;
    for (int64_t row = end + t; row < a.rows; row += threads) {  // the last block: padding
        a.tokens.set(row, 0);
        a.parents[row] = -1;
        a.depth[row] = a.positions[row] = 0;
        for (int w = 0; w < a.words; ++w) a.mask[row * a.words + w] = 0;
    }
}

void build_tree_cuda(
    const Tensor pool_scores, const Tensor pool_tokens, const Tensor pool_parents, const Tensor root_tokens,
    const Tensor prefix_len, const Tensor active, Tensor tokens, Tensor parents, Tensor mask, Tensor depth,
    Tensor positions, Tensor cu_nodes, Tensor flags, int64_t num_nodes, int64_t vocab_size) {
    const BuildTreeSizes s = check_build_tree(
        pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, tokens, parents, mask, depth,
        positions, cu_nodes, flags, num_nodes, vocab_size);
    FV_CHECK(s.pool <= kMaxPool, "build_tree: pool_scores must be at most ", kMaxPool, " entries wide on CUDA; got ",
             describe(pool_scores), ". Fix: draft fewer levels or a narrower beam.");
    const auto wide = [](const Tensor& t) { return t.scalar_type() == ScalarType::Long; };
    const Launch launch("build_tree", pool_scores);
    const BuildTreeShape shape = build_tree_shape(s.pool, launch.props.max_smem);
    const BuildTree a{cptr<float>(pool_scores), {pool_tokens.const_data_ptr(), wide(pool_tokens)},
                      cptr<int32_t>(pool_parents), {root_tokens.const_data_ptr(), wide(root_tokens)},
                      cptr<int32_t>(prefix_len), cptr<int32_t>(active), {tokens.mutable_data_ptr(), wide(tokens)},
                      mptr<int32_t>(parents), mptr<uint64_t>(mask), mptr<int32_t>(depth), mptr<int32_t>(positions),
                      mptr<int32_t>(cu_nodes), mptr<int32_t>(flags), s.batch, s.pool, s.rows, num_nodes, vocab_size,
                      static_cast<int>(s.words), shape.count_warps, shape.stored};
    launch.run(build_tree_kernel, dim3(static_cast<unsigned>(s.batch > 0 ? s.batch : 1)),
               dim3(static_cast<unsigned>(shape.threads)), static_cast<size_t>(shape.smem), a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("build_tree", TORCH_BOX(&build_tree_cuda)); }

}  // namespace fv
