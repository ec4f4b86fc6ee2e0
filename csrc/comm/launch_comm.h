// SPDX-License-Identifier: Apache-2.0
// From a handle to kernel arguments; how many blocks a call takes.
#pragma once
#include "comm/comm_args.h"
#include "comm/comm_choice.h"
#include "comm/protocol.cuh"
#include "common/launch.h"

namespace fv {

inline CommArgs comm_kernel_args(const fv_comm& c, CommForm form) {
    CommArgs a = {};
    a.first = c.ranks[0];
    a.stride = static_cast<uint32_t>(slot_stride(c.max_bytes) / 16);
    a.region = a.stride * static_cast<uint32_t>(c.world);
    const uint64_t grace = comm_grace_ns(c.deadline_ns);
    a.grace_ns = static_cast<uint32_t>(grace);
    a.patience_ns = c.deadline_ns > 2 * grace ? c.deadline_ns - grace : c.deadline_ns / 2;
    a.world = c.world;
    a.first_rank = c.rank;
    a.form = form;
    if (c.local_ranks > 1) {
        a.state_step = static_cast<int32_t>(c.ranks[1].state - c.ranks[0].state);
        a.status_step = static_cast<int32_t>(c.ranks[1].status - c.ranks[0].status);
        a.hooks_step = static_cast<int32_t>(c.ranks[1].hooks - c.ranks[0].hooks);
    }
    return a;
}

#ifndef FV_EMULATE
// A launch of clusters whose blocks are all resident, or that may begin while the launch before it ends (sm_90 and newer).
template <class... P, class... A>
void run_clusters(const Launch& launch, void (*kernel)(P...), int cluster, bool resident, bool overlap, dim3 grid, dim3 block, size_t smem,
                  A... args) {
    if (smem > 16 * 1024) {  // as in Launch::launch, which may have set this kernel's limit to less than 48 KiB
        FV_CUDA_CHECK(launch.op, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      static_cast<int>(smem)));
    }
    if (resident) {  // under capture without the driver's promise: comm_choice.h asks for no more clusters than fit
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        FV_CUDA_CHECK(launch.op, cudaStreamIsCapturing(launch.stream, &capture));
        resident = capture == cudaStreamCaptureStatusNone;
        overlap = false;
    }
    cudaLaunchAttribute attributes[2];
    attributes[0].id = resident ? cudaLaunchAttributeCooperative : cudaLaunchAttributeProgrammaticStreamSerialization;
    if (resident) attributes[0].val.cooperative = 1;
    else attributes[0].val.programmaticStreamSerializationAllowed = overlap;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem;
    config.stream = launch.stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    FV_CUDA_CHECK(launch.op, cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}
#else
template <class... P, class... A>
void run_clusters(const Launch& launch, void (*kernel)(P...), int cluster, bool resident, bool, dim3 grid, dim3 block, size_t smem, A... args) {
    launch.launch(resident, cluster, kernel, grid, block, smem, args...);
}
#endif

// Virtual ranks wait for other blocks of their own launch, so all blocks must be resident, which a cooperative launch
// promises. A real rank's few blocks wait for other GPUs only; its launch may overlap the one before.
template <class... P, class... A>
void launch_comm(const Launch& launch, const fv_comm& c, void (*kernel)(P...), const CommChoice& choice, int extra_blocks, size_t smem,
                 A... args) {
    const dim3 grid(static_cast<unsigned>(choice.blocks + extra_blocks), static_cast<unsigned>(c.local_ranks));
    const dim3 block(static_cast<unsigned>(choice.threads));
    const bool overlap = !(c.forced & kForcedNoOverlap);
    if (choice.cluster > 1) run_clusters(launch, kernel, choice.cluster, c.local_ranks > 1, overlap, grid, block, smem, args...);
    else if (c.local_ranks > 1) launch.run_resident(kernel, grid, block, smem, args...);
    else if (!overlap) launch.run(kernel, grid, block, smem, args...);
    else launch.run_overlapped(kernel, grid, block, smem, args...);
}

inline bool comm_has_hooks(const fv_comm& c) { return c.ranks[0].hooks != nullptr; }

}  // namespace fv
