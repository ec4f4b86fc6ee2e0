// SPDX-License-Identifier: Apache-2.0
// Instantiations of tree_attention_kernel for float16 caches: head_dim 64 x {16, 64}, 128 x {16, 32, 64, 128}, 256 x {32}
// rows: 7 in all.
#include "attention/attention_kernels.h"
#include "common/launch.h"

#include "attention/tree_attention_kernel.cuh"

namespace fv {

AttentionKernel attention_kernel_f16(int head_dim, int tile_rows) {
    switch (head_dim * 1000 + tile_rows) {
        case 64016: return tree_attention_kernel<AttentionTile<64, 16, KvF16>>;
        case 64064: return tree_attention_kernel<AttentionTile<64, 64, KvF16>>;
        case 128016: return tree_attention_kernel<AttentionTile<128, 16, KvF16>>;
        case 128032: return tree_attention_kernel<AttentionTile<128, 32, KvF16>>;
        case 128064: return tree_attention_kernel<AttentionTile<128, 64, KvF16>>;
        case 128128: return tree_attention_kernel<AttentionTile<128, 128, KvF16>>;
        case 256032: return tree_attention_kernel<AttentionTile<256, 32, KvF16>>;
        default: return nullptr;
    }
}

}  // namespace fv
