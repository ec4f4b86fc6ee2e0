// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel of short sequences: clusters that may start while the launch before them ends.
#include "common/launch.h"

#include "attention/attention_short.h"
#include "attention/tree_attention_short.cuh"

namespace fv {

void run_short(const Launch& launch, const AttentionParams& p) {
    const dim3 grid(kShortCluster, static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch)), block(kShortThreads);
#ifdef FV_EMULATE
    launch.run_cluster(tree_attention_short_kernel, kShortCluster, grid, block, sizeof(ShortShared), p);
#else
    const void* kernel = reinterpret_cast<const void*>(tree_attention_short_kernel);
    FV_CUDA_CHECK(launch.op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(ShortShared))));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = kShortCluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = sizeof(ShortShared);
    config.stream = launch.stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    void* arguments[] = {const_cast<AttentionParams*>(&p)};
    FV_CUDA_CHECK(launch.op, cudaLaunchKernelExC(&config, kernel, arguments));
#endif
}

}  // namespace fv
