// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel of one block per (request, kv head): it may start while the launch before it runs.
#include "common/launch.h"
#include "common/dev_carveout.h"

#include "attention/attention_short.h"
#include "attention/tree_attention_block.cuh"

namespace fv {

void run_block(const Launch& launch, const AttentionParams& p, bool settled) {
    const dim3 grid(static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
    dev_carveout(tree_attention_block_kernel);
    launch.run_overlapped(tree_attention_block_kernel, grid, dim3(kBlockThreads), sizeof(BlockShared), p, settled);
}

}  // namespace fv
