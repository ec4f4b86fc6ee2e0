// SPDX-License-Identifier: Apache-2.0
// next_inputs on the CPU: request after request (algo/next_inputs.h), then the record's sequence number.
#include <torch/csrc/stable/library.h>

#include <atomic>

#include "kv/next_inputs_args.h"

namespace fv {
namespace {

void next_inputs_cpu(const Tensor out_tokens, const Tensor num_tokens_out, const Tensor path, const Tensor next_root,
                     const Tensor flags, const Tensor cu_nodes, const Tensor depth, Tensor active, Tensor prefix_len, Tensor root,
                     const OptTensor next_tokens, const OptTensor pair_slots, const OptTensor pair_tokens,
                     const OptTensor pair_count, const OptTensor sequence, const OptTensor ring, int64_t first) {
    const NextInputs p = check_next_inputs(out_tokens, num_tokens_out, path, next_root, flags, cu_nodes, depth, active, prefix_len,
                                           root, next_tokens, pair_slots, pair_tokens, pair_count, sequence, ring);
    int32_t* record = nullptr;
    int64_t* count = mptr<int64_t>(sequence);
    if (ring) {
        const uint64_t slot = static_cast<uint64_t>(*count) % static_cast<uint64_t>(ring->size(0));
        record = mptr<int32_t>(ring) + static_cast<int64_t>(slot) * ring->size(1);
        record[1] = static_cast<int32_t>(p.batch);
        record[2] = static_cast<int32_t>(p.width);
        record[3] = static_cast<int32_t>(first);
    }
    for (int64_t r = 0; p.pair_slots && r < p.rows; ++r) p.pair_slots[r] = p.batch * p.pairs;
    int64_t offset = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        const int32_t n = emitted(p, b);
        advance_request(p, b, offset, record ? record + kRingHeader + b * (kRingFields + p.width) : nullptr);
        offset += n;
    }
    for (int64_t i = offset; i < p.tokens; ++i) p.next_tokens[i] = 0;
    if (record) {
        *count = static_cast<int64_t>(static_cast<uint64_t>(*count) + 1);  // may come round
        reinterpret_cast<std::atomic<int32_t>*>(record)->store(static_cast<int32_t>(*count), std::memory_order_release);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("next_inputs", TORCH_BOX(&next_inputs_cpu)); }

}  // namespace fv
