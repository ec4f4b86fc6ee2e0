// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel of one block per (request, kv head): it may start while the launch before it runs.
// Instantiations: three steps of a warp in flight, one where shared memory is 99 KB.
#include "common/launch.h"

#include "attention/attention_short.h"
#include "attention/tree_attention_block.cuh"

namespace fv {

void run_block(const Launch& launch, const AttentionParams& p) {
    const dim3 grid(static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
    const bool large = static_cast<size_t>(launch.props.max_smem) >= sizeof(BlockShared<3>);
    launch.run_overlapped(large ? tree_attention_block_kernel<3> : tree_attention_block_kernel<1>, grid, dim3(kBlockThreads),
                          large ? sizeof(BlockShared<3>) : sizeof(BlockShared<1>), p);
}

}  // namespace fv
