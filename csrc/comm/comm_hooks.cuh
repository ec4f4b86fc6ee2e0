// SPDX-License-Identifier: Apache-2.0
// Faults on purpose and traffic counters, for tests. Compiled into kernels of their own; the others know nothing of it.
#pragma once
#include <cstdint>

#include "comm/fv_comm.h"
#include "common/ptx.cuh"

namespace fv {

// Words of CommRank::hooks, one array per sending rank.
enum CommHook : int {
    kHookMode = 0,      // CommFault
    kHookPeer = 1,      // destination it applies to (kDead: -1)
    kHookNth = 2,       // of the 16-byte vectors sent to that peer, counted from 0 (kStall: from here on)
    kHookNanos = 3,     // how long a stall or the gap of a torn word lasts
    kHookCounter = 4,   // vectors sent to the peer so far (written)
    kHookPatience = 5,  // ns that this rank's deadline is longer
    kHookAway = 6,      // ns that it is away before each look at the clock and the poison, as in time slices
    kHookBytes = 8,     // [peer] payload bytes sent so far (written); from bit 30 on: what never comes to this peer
    kHookWords = kHookBytes + kMaxRanks,
};
enum CommFault : uint32_t {
    kNoFault = 0, kStall = 1, kDrop = 2, kDuplicate = 3, kTorn = 4,
    kDead = 5,  // this rank never says that it gave up
};

__device__ __forceinline__ void hook_wait(uint32_t nanos) {
    const uint64_t start = global_timer();
    while (global_timer() - start < nanos) spin_pause();
}

constexpr uint32_t kNoInputs = 1u << 31, kNoResults = 1u << 30;  // of kHookBytes
__device__ __forceinline__ bool is_dead(const uint32_t* hooks) { return hooks[kHookMode] == kDead; }

// Sends one vector as the hooks say; `send(v)` stores it, `send_half(v, second)` stores one 8-byte half.
template <class Send, class SendHalf>
__device__ __forceinline__ void hooked_send(uint32_t* hooks, int peer, int region, uint4 v, Send send, SendHalf send_half) {
    if (atomicAdd(&hooks[kHookBytes + peer], 16u) & (region ? kNoResults : kNoInputs)) return;
    const uint32_t mode = hooks[kHookMode];
    if (mode == kNoFault || hooks[kHookPeer] != static_cast<uint32_t>(peer)) return send(v);
    const uint32_t n = atomicAdd(&hooks[kHookCounter], 1u);
    const uint32_t nth = hooks[kHookNth];
    if (mode == kStall && n >= nth) hook_wait(hooks[kHookNanos]);
    if (mode == kDrop && n == nth) return;
    if (mode == kTorn && n % 7 == nth % 7) {  // the halves arrive in the wrong order and far apart
        send_half(v, true);
        hook_wait(hooks[kHookNanos]);
        return send_half(v, false);
    }
    send(v);
    if (mode == kDuplicate && n == nth) send(v);
}

}  // namespace fv
