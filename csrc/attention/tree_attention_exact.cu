// SPDX-License-Identifier: Apache-2.0
// Instantiations of tree_attention_exact_kernel: (head_dim, tile_rows) in {(64, 16), (128, 16), (256, 32)} x {bf16, f16, e4m3}: 9.
#include "attention/attention_kernels.h"
#include "common/launch.h"

#include "attention/tree_attention_exact.cuh"

namespace fv {
namespace {

template <class Kv>
AttentionKernel of_dim(int head_dim) {
    switch (head_dim) {
        case 64: return tree_attention_exact_kernel<AttentionTile<64, 16, Kv>>;
        case 128: return tree_attention_exact_kernel<AttentionTile<128, 16, Kv>>;
        case 256: return tree_attention_exact_kernel<AttentionTile<256, 32, Kv>>;
        default: return nullptr;
    }
}

}  // namespace

AttentionKernel exact_kernel(int head_dim, Element kv_type) {
    if (kv_type == Element::kE4m3) return of_dim<KvE4m3>(head_dim);
    return kv_type == Element::kBf16 ? of_dim<KvBf16>(head_dim) : of_dim<KvF16>(head_dim);
}

}  // namespace fv
