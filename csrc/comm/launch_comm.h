// SPDX-License-Identifier: Apache-2.0
// From a handle to kernel arguments; how many blocks a call takes.
#pragma once
#include "comm/comm_args.h"
#include "comm/protocol.cuh"
#include "common/launch.h"

namespace fv {

inline CommArgs comm_kernel_args(const fv_comm& c, int64_t bytes) {
    CommArgs a = {};
    for (int r = 0; r < c.local_ranks; ++r) a.ranks[r] = c.ranks[r];
    a.stride = slot_stride(c.max_bytes, c.transport);
    a.max_bytes = c.max_bytes;
    a.deadline_ns = c.deadline_ns;
    a.world = c.world;
    a.first_rank = c.rank;
    a.local_ranks = c.local_ranks;
    a.mailbox = c.transport == kHostMailbox;
    a.two_shot = c.world > 1 && bytes > c.one_shot_bytes;
    return a;
}

// Virtual ranks wait for other blocks of their own launch, so all blocks must be resident, which a cooperative launch
// promises. A real rank's few blocks wait for other GPUs only; there the ordinary launch saves a microsecond.
template <class... P, class... A>
void launch_comm(const Launch& launch, const fv_comm& c, void (*kernel)(P...), dim3 grid, int threads, size_t smem, A... args) {
    const dim3 block(static_cast<unsigned>(threads));
    if (c.local_ranks > 1) launch.run_resident(kernel, grid, block, smem, args...);
    else launch.run(kernel, grid, block, smem, args...);
}

inline bool comm_has_hooks(const fv_comm& c) { return c.ranks[0].hooks != nullptr; }

}  // namespace fv
