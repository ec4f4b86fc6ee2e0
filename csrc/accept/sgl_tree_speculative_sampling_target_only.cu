// SPDX-License-Identifier: Apache-2.0
// sgl_tree_speculative_sampling_target_only: SGLang's sibling test over a tree, then a draw from the residual of the last row.
// One block per request. The probabilities of all children are fetched in one round and one thread walks; then the last row is
// read once (twice with draft_probs): sums of its chunks in the order of algo/sglang.h, and a scan of the chunk drawn from.
// Cost: V * 4 bytes per request (8 with draft_probs), one launch. Graph-safe. Instantiations: kVec 1, 2, 4.
#include <torch/csrc/stable/library.h>

#include "accept/sgl_sampling_args.h"
#include "accept/sgl_shared_tree.cuh"
#include "common/launch.h"
#include "common/warp.cuh"

namespace fv {
namespace {

constexpr int kWarps = kSglLanes / 32;
constexpr int kGroup = 32;   // chunks whose warp sums are kept at once
template <int kVec>
constexpr int kAhead = kVec == 2 ? 2 : 4;  // chunks in flight per thread; none spills

struct SamplingTree : SglSharedTree {
    float coins[kMaxNodes];
    int32_t owner[kMaxNodes];   // the node whose row probs[child] was read from; -1: not read
    float probs[kMaxNodes];
    int32_t refused[kMaxNodes];
    int32_t num_refused;
    SglSampling s;
    int64_t base;  // b * N

    __device__ float read(int32_t node, int32_t child) const {
        const int32_t v = tokens[child];
        return v >= 0 && v < s.vocab ? s.target[(base + node) * s.vocab + v] : 0.0f;
    }
    __device__ float coin(int32_t i) const { return coins[i]; }
    __device__ float prob(int32_t node, int32_t child) const {
        return owner[child] == node ? probs[child] : read(node, child);
    }
    __device__ void refuse(int32_t node, int32_t child, float p) {
        const int32_t v = tokens[child];
        if (v < 0 || v >= s.vocab) return;
        refused[num_refused++] = v;
        if (s.draft) s.draft[(base + node) * s.vocab + v] = p;
    }
    __device__ void enter() { num_refused = 0; }

    // Every thread fetches the children of its node; of a child with two parents one is kept, the other is read by the walk.
    __device__ void fetch(int32_t nodes) {
        for (int32_t node = threadIdx.x; node < nodes; node += blockDim.x) {
            int32_t left = nodes;
            for (int32_t c = next[node]; c != 0 && left > 0; c = sibling_of[c], --left) {
                if (atomicCAS(&owner[c], -1, node) == -1) probs[c] = read(node, c);
            }
        }
    }
};

// The row that is drawn from: relu(q - p), zero for tokens that were refused.
struct Row {
    const float* q;          // [V], 16-byte aligned where kVec = 4
    const float* p;          // [V] or null: then the refused tokens are in the list
    const int32_t* refused;  // [count]
    int32_t count, vocab;
};

template <int kVec>
__device__ __forceinline__ void load_items(const float* row, int32_t at, int32_t vocab, float (&x)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] = 0.0f;
    if (at >= vocab) return;
    if constexpr (kVec == 4) {
        const float4 v = *reinterpret_cast<const float4*>(row + at);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if constexpr (kVec == 2) {
        const float2 v = *reinterpret_cast<const float2*>(row + at);
        x[0] = v.x, x[1] = v.y;
    } else {
        x[0] = row[at];
    }
}

// Items of this thread in `count` chunks; all loads are issued before the first is used.
template <int kVec, int kCount>
__device__ __forceinline__ void residual_items(const Row& r, int chunk, const uint32_t* marks, float (&x)[kCount][kVec]) {
    const int warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_items<kVec>(r.q, ((chunk + i) * kSglLanes + static_cast<int>(threadIdx.x)) * kVec, r.vocab, x[i]);
    if (r.p) {
        float p[kCount][kVec];
#pragma unroll
        for (int i = 0; i < kCount; ++i) load_items<kVec>(r.p, ((chunk + i) * kSglLanes + static_cast<int>(threadIdx.x)) * kVec, r.vocab, p[i]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (int k = 0; k < kVec; ++k) x[i][k] = sgl_residual(x[i][k], p[i][k]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[i][k] = sgl_residual(x[i][k], 0.0f);
        if (chunk + i < kSglMaxChunks && (marks[chunk + i] >> warp & 1u)) {  // a refused token is in this warp's part
            const int32_t at = ((chunk + i) * kSglLanes + static_cast<int>(threadIdx.x)) * kVec;
            for (int32_t t = 0; t < r.count; ++t) {
#pragma unroll
                for (int k = 0; k < kVec; ++k) x[i][k] = r.refused[t] == at + k ? 0.0f : x[i][k];
            }
        }
    }
}

// Sums of kCount values per lane over the warp, each as the balanced tree of neighbours; lane l < kCount returns that of value
// reversed_bits(l). Half of the values go to each neighbour until one is left: kCount + 3 shuffles.
template <int kCount>
__device__ __forceinline__ float tree_sums(float (&v)[kCount]) {
    const int lane = threadIdx.x & 31;
    int width = kCount;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        if (width > 1) {
            width /= 2;
            const bool upper = lane & d;
#pragma unroll
            for (int i = 0; i < width; ++i) {
                const float give = upper ? v[i] : v[i + width], keep = upper ? v[i + width] : v[i];
                v[i] = keep + __shfl_xor_sync(kFullWarp, give, d);
            }
        } else {
            v[0] = v[0] + __shfl_xor_sync(kFullWarp, v[0], d);
        }
    }
    return v[0];
}
template <int kCount>
__device__ __forceinline__ int value_of_lane(int lane) {
    return kCount == 4 ? (lane & 1) * 2 + (lane >> 1 & 1) : kCount == 2 ? lane & 1 : 0;
}

// The same tree of one value with its inner sums: lane 31 has the sum.
__device__ __forceinline__ float up_sweep(float x) {
    const int place = (threadIdx.x & 31) + 1;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const float left = __shfl_up_sync(kFullWarp, x, d);
        if (place % (2 * d) == 0) x = left + x;
    }
    return x;
}
// Exclusive prefix sum of the lane; the sum of the warp in *sum.
__device__ __forceinline__ float tree_scan(float x, float* sum) {
    const int lane = threadIdx.x & 31;
    x = up_sweep(x);
    *sum = __shfl_sync(kFullWarp, x, 31);
    if (lane == 31) x = 0.0f;
#pragma unroll
    for (int d = 16; d >= 1; d /= 2) {
        const float other = __shfl_xor_sync(kFullWarp, x, d);
        const int place = (lane + 1) % (2 * d);
        x = place == 0 ? other + x : place == d ? other : x;
    }
    return x;
}

template <int kVec>
__global__ void __launch_bounds__(kSglLanes, 1) sgl_sampling_kernel(
    const SglTreeArgs a,
    const SglSampling s) {
    __shared__ SamplingTree tree;
    __shared__ float warp_sums[kGroup][kWarps + 1];
    __shared__ float chunk_sums[kSglMaxChunks];
    __shared__ uint32_t marks[kSglMaxChunks];  // bit w: a refused token in warp w's part of the chunk
    __shared__ SglWalk walk;
    __shared__ SglDraw draw;
    __shared__ int first, last;
    const int64_t b = blockIdx.x;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    tree.load(a, b);
    for (int i = threadIdx.x; i < a.nodes; i += blockDim.x) {
        tree.coins[i] = s.coins[b * a.nodes + i];
        tree.owner[i] = -1;
    }
    if (threadIdx.x == 0) {
        tree.s = s;
        tree.base = b * a.nodes;
        tree.num_refused = 0;
        first = 0x7fffffff;
        last = 0;
    }
    __syncthreads();
    tree.fetch(a.nodes);
    __syncthreads();
    if (threadIdx.x == 0) {
        walk = sgl_sampling_walk(tree, a.nodes, a.levels, s.inverse_acc, s.single);
        a.accept_token_num[b] = walk.accepted;
    }
    __syncthreads();
    const int32_t slot = tree.flats[walk.node];
    if (slot < 0) return;

    const bool whole = walk.accepted == a.levels - 1;
    const int64_t offset = (tree.base + walk.node) * s.vocab;
    const Row row{s.target + offset, s.draft && !whole ? s.draft + offset : nullptr, tree.refused, whole ? 0 : tree.num_refused,
                  static_cast<int32_t>(s.vocab)};
    const int chunks = sgl_chunks(s.vocab);
    for (int i = threadIdx.x; i < chunks; i += kSglLanes) marks[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.count; i += kSglLanes) {
        const int lane_of = row.refused[i] / kVec;
        atomicOr(&marks[lane_of / kSglLanes], 1u << (lane_of % kSglLanes / 32));
    }
    __syncthreads();
    constexpr int kCount = kAhead<kVec>;
    for (int group = 0; group < chunks; group += kGroup) {
        const int end = min(chunks - group, kGroup);
        for (int c = 0; c < end; c += kCount) {
            float x[kCount][kVec], item[kCount];
            residual_items<kVec, kCount>(row, group + c, marks, x);
#pragma unroll
            for (int i = 0; i < kCount; ++i) item[i] = sgl_items<kVec>(x[i]);
            const float sum = tree_sums<kCount>(item);
            if (lane < kCount) warp_sums[c + value_of_lane<kCount>(lane)][warp] = sum;  // behind the last chunk: zeros, unread
        }
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < end) {
            float sum = warp_sums[threadIdx.x][0];
            for (int w = 1; w < kWarps; ++w) sum = sum + warp_sums[threadIdx.x][w];
            chunk_sums[group + threadIdx.x] = sum;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) draw = sgl_draw(chunk_sums, chunks, s.last_coins[b]);
    __syncthreads();
    if (draw.chunk < 0) {  // no mass is left
        if (threadIdx.x == 0) tree.predict(slot, walk.refused ? tree.tokens[walk.refused] : s.vocab - 1);
        return;
    }

    float items[1][kVec], item = 0.0f, warp_total, total;
    float(&x)[kVec] = items[0];
    residual_items<kVec, 1>(row, draw.chunk, marks, items);
#pragma unroll
    for (int k = 0; k < kVec; ++k) item = item + x[k];
    const float before_lane = tree_scan(item, &warp_total);
    if (lane == 31) warp_sums[0][warp] = warp_total;
    __syncthreads();
    if (warp == 0) {
        const float before_warp = tree_scan(warp_sums[0][lane], &total);
        __syncwarp();
        warp_sums[0][lane] = before_warp;
    }
    __syncthreads();
    const float base = warp_sums[0][warp] + before_lane;
    float sum = 0.0f;
    int mine_first = 0x7fffffff, mine_last = -1;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
        sum = sum + x[k];
        if (x[k] > 0.0f) {
            mine_last = threadIdx.x * kVec + k;
            if (mine_first == 0x7fffffff && (base + sum) + draw.before > draw.u) mine_first = mine_last;
        }
    }
    if (mine_first != 0x7fffffff) atomicMin(&first, mine_first);
    if (mine_last >= 0) atomicMax(&last, mine_last);
    __syncthreads();
    if (threadIdx.x == 0) {
        tree.predict(slot, static_cast<int64_t>(draw.chunk) * kSglLanes * kVec + (first != 0x7fffffff ? first : last));
    }
}

void sgl_tree_speculative_sampling_target_only_cuda(
    Tensor predicts, Tensor accept_index, Tensor accept_token_num, const Tensor candidates, const Tensor retrive_index,
    const Tensor retrive_next_token, const Tensor retrive_next_sibling, const Tensor uniform_samples,
    const Tensor uniform_samples_for_final_sampling, const Tensor target_probs, const std::optional<Tensor> draft_probs,
    double threshold_single, double threshold_acc) {
    const SglTreeArgs a = sgl_check_tree(kSglSamplingOp, predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling);
    const SglSampling s = sgl_check_sampling(a, candidates, uniform_samples, uniform_samples_for_final_sampling, target_probs,
                                             draft_probs, threshold_single, threshold_acc);
    if (a.batch == 0) return;
    const Launch launch(kSglSamplingOp, candidates);
    const dim3 grid(static_cast<unsigned>(a.batch)), block(kSglLanes);
    const int vec = sgl_vec(s.vocab);
    if (vec == 4) launch.run(sgl_sampling_kernel<4>, grid, block, 0, a, s);
    else if (vec == 2) launch.run(sgl_sampling_kernel<2>, grid, block, 0, a, s);
    else launch.run(sgl_sampling_kernel<1>, grid, block, 0, a, s);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) {
    m.impl("sgl_tree_speculative_sampling_target_only", TORCH_BOX(&sgl_tree_speculative_sampling_target_only_cuda));
}

}  // namespace fv
