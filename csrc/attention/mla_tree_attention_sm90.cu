// SPDX-License-Identifier: Apache-2.0
// Instantiations of mla_tree_attention_sm90_kernel: bf16 and f16: 2. Compiled for sm_90a alone; a build without it has none.
#include "attention/attention_kernels.h"
#include "common/launch.h"

#ifdef FV_SM90A
#include "attention/mla_tree_attention_sm90.cuh"
#endif

namespace fv {

#ifdef FV_SM90A
AttentionKernel mla_kernel_sm90(Element kv_type) {
    return kv_type == Element::kBf16 ? mla_tree_attention_sm90_kernel<KvBf16> : kv_type == Element::kF16 ? mla_tree_attention_sm90_kernel<KvF16>
                                                                                                        : nullptr;
}
#else
AttentionKernel mla_kernel_sm90(Element) { return nullptr; }
#endif

}  // namespace fv
