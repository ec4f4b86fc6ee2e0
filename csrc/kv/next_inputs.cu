// SPDX-License-Identifier: Apache-2.0
// next_inputs on CUDA: one block, a thread per request (algo/next_inputs.h). The record goes straight to pinned host memory:
// its words, a fence over the system, then its sequence number. Cost: one launch, a few hundred bytes. Graph-safe: slot and
// number come from the device's own counter, so that every replay writes the next record.
#include <torch/csrc/stable/library.h>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "kv/next_inputs_args.h"

namespace fv {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) next_inputs_kernel(
    const __grid_constant__ NextInputs p,
    int64_t* sequence,  // [1] or null
    int32_t* ring,      // pinned host memory, [slots, words]
    int64_t slots, int64_t words, int32_t first) {
    __shared__ int32_t count[kMaxAdvanced + 1];  // tokens of the requests before each
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) count[b + 1] = emitted(p, b);
    const int64_t number = sequence ? *sequence : 0;
    int32_t* record = sequence ? ring + static_cast<int64_t>(static_cast<uint64_t>(number) % static_cast<uint64_t>(slots)) * words : nullptr;
    for (int64_t r = threadIdx.x; p.pair_slots && r < p.rows; r += kThreads) p.pair_slots[r] = p.batch * p.pairs;
    __syncthreads();
    if (threadIdx.x == 0) {
        count[0] = 0;
        for (int64_t b = 0; b < p.batch; ++b) count[b + 1] += count[b];
    }
    __syncthreads();
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
        advance_request(p, b, count[b], record ? record + kRingHeader + b * (kRingFields + p.width) : nullptr);
    }
    for (int64_t i = count[p.batch] + threadIdx.x; i < p.tokens; i += kThreads) p.next_tokens[i] = 0;
    if (!record) return;
    if (threadIdx.x == 0) {
        record[1] = static_cast<int32_t>(p.batch);
        record[2] = static_cast<int32_t>(p.width);
        record[3] = first;
        *sequence = number + 1;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) st_relaxed_sys(reinterpret_cast<uint32_t*>(record), static_cast<uint32_t>(number + 1));
}

void next_inputs_cuda(const Tensor out_tokens, const Tensor num_tokens_out, const Tensor path, const Tensor next_root,
                      const Tensor flags, const Tensor cu_nodes, const Tensor depth, Tensor active, Tensor prefix_len, Tensor root,
                      const OptTensor next_tokens, const OptTensor pair_slots, const OptTensor pair_tokens,
                      const OptTensor pair_count, const OptTensor sequence, const OptTensor ring, int64_t first) {
    const NextInputs p = check_next_inputs(out_tokens, num_tokens_out, path, next_root, flags, cu_nodes, depth, active, prefix_len,
                                           root, next_tokens, pair_slots, pair_tokens, pair_count, sequence, ring);
    if (p.batch == 0) return;
    const Launch launch("next_inputs", out_tokens);
    launch.run(next_inputs_kernel, dim3(1), dim3(kThreads), 0, p, mptr<int64_t>(sequence), mptr<int32_t>(ring),
               ring ? ring->size(0) : 1, ring ? ring->size(1) : 0, static_cast<int32_t>(first));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("next_inputs", TORCH_BOX(&next_inputs_cuda)); }

}  // namespace fv
