// SPDX-License-Identifier: Apache-2.0
// Instantiations of tree_attention_sm90_kernel: head_dim 128, tile_rows 64 and 128, {bf16, f16, e4m3}: 6. Compiled for sm_90a
// alone; a build without it has none of them.
#include "attention/attention_kernels.h"
#include "common/launch.h"

#ifdef FV_SM90A
#include "attention/tree_attention_sm90.cuh"
#endif

namespace fv {

#ifdef FV_SM90A
namespace {
template <class Kv>
AttentionKernel of_rows(int tile_rows) {
    return tile_rows == 64 ? tree_attention_sm90_kernel<WgmmaTile<128, 64, Kv>> : tree_attention_sm90_kernel<WgmmaTile<128, 128, Kv>>;
}
}  // namespace

AttentionKernel attention_kernel_sm90(int head_dim, int tile_rows, Element kv_type) {
    if (head_dim != 128 || (tile_rows != 64 && tile_rows != 128)) return nullptr;
    if (kv_type == Element::kE4m3) return of_rows<KvE4m3>(tile_rows);
    return kv_type == Element::kBf16 ? of_rows<KvBf16>(tile_rows) : of_rows<KvF16>(tile_rows);
}
#else
AttentionKernel attention_kernel_sm90(int, int, Element) { return nullptr; }
#endif

}  // namespace fv
