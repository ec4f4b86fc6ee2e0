// SPDX-License-Identifier: Apache-2.0
// Instantiations of tree_attention_exact_kernel: (head_dim, tile_rows) in {(64, 16), (128, 16), (256, 32)} for bf16, the first two for f16,
// (128, 16) for e4m3: 6. Other caches are read row by row.
#include "attention/attention_kernels.h"
#include "common/launch.h"

#include "attention/tree_attention_exact.cuh"

namespace fv {
namespace {

template <int kHeadDim, class Kv>
constexpr AttentionKernel kExact = tree_attention_exact_kernel<AttentionTile<kHeadDim, kHeadDim == 256 ? 32 : 16, Kv>>;

}  // namespace

AttentionKernel exact_kernel(int head_dim, Element kv_type) {
    const bool bf16 = kv_type == Element::kBf16, f16 = kv_type == Element::kF16;
    switch (head_dim) {
        case 64: return bf16 ? kExact<64, KvBf16> : f16 ? kExact<64, KvF16> : nullptr;
        case 128: return bf16 ? kExact<128, KvBf16> : f16 ? kExact<128, KvF16> : kv_type == Element::kE4m3 ? kExact<128, KvE4m3> : nullptr;
        case 256: return bf16 ? kExact<256, KvBf16> : nullptr;
        default: return nullptr;
    }
}

}  // namespace fv
