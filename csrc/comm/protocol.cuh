// SPDX-License-Identifier: Apache-2.0
// How ranks exchange 16-byte vectors without flags, fences or remote atomics.
//
// A vector carries its own readiness. Peer memory: every 32-bit word of a slot that waits is kEmpty (a NaN code that
// arithmetic never makes; a sender rewrites that one value to the canonical NaN), compared as raw bits; the reader puts
// kEmpty back after reading. Host mailbox: a vector travels as four 8-byte words {data, epoch}, two in each half of the
// slot, so that a warp's accesses are whole lines (PCIe reads of half lines run at a third of the speed); nothing is put back.
// Slots exist three times, used in turn by epoch. A rank starts call e + 1 only after all others have started call e,
// so when a slot is used again its reader has long finished with it; kernels of one rank run in stream order.
// The epoch is device memory, advanced by the last block of a call: graph replays are never frozen.
#pragma once
#include "comm/comm_hooks.cuh"
#include "comm/fv_comm.h"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace fv {

constexpr uint32_t kEmpty = 0xffffffffu;
constexpr int kSpinsPerLook = 64;      // polls between two looks at the clock and the poison word
constexpr int kSpinsBeforeNap = 8192;  // then __nanosleep between polls
// Mailbox tags older than this many calls are wiped, so that an epoch that comes round again (2^32 calls) meets none.
constexpr uint32_t kWipeEvery = 1u << 20;
constexpr int kGatherRegion = 2;

// Everything a kernel needs, by value: addresses differ per rank, the rest is the same for all.
struct CommArgs {
    CommRank ranks[kMaxRanks];
    int64_t stride;        // bytes of a slot
    int64_t max_bytes;
    uint64_t deadline_ns;
    int32_t world, first_rank, local_ranks;
    bool mailbox, two_shot;
};

template <bool kHooks>
struct Exchange {
    const CommArgs& args;
    const CommRank& me;
    int rank;
    uint32_t epoch;
    uint32_t buffer;
    bool failed;  // of this thread; what it reads from then on is NaN

    // All threads of a block call it, and finish() at the end. `scratch`: 2 words of shared memory.
    __device__ __forceinline__ Exchange(const CommArgs& a, int local, uint32_t* scratch)
        : args(a), me(a.ranks[local]), rank(a.first_rank + local) {
        if (threadIdx.x == 0) {
            const uint32_t e = ld_acquire(&me.state[kEpoch]);
            scratch[0] = e;
            scratch[1] = ld_relaxed_sys(&me.state[kPoison]);
        }
        __syncthreads();
        epoch = scratch[0];
        failed = scratch[1] != 0;
        buffer = epoch % kCommBuffers;
        if (failed && threadIdx.x == 0) report(kPoisonedByPeer, 0, 9);
    }

    // The last of the rank's `blocks` to come here advances the epoch: by then all of them have read it.
    __device__ __forceinline__ void finish(uint32_t blocks) const {
        if (threadIdx.x == 0 && atomic_add_acq_rel(&me.state[kArrived], 1) == blocks - 1) {
            me.state[kArrived] = 0;
            st_release(&me.state[kEpoch], epoch + 1 == 0 ? 1 : epoch + 1);
        }
    }

    static __device__ __forceinline__ uint32_t* poison_of(uint8_t* slab) { return reinterpret_cast<uint32_t*>(slab); }

    // Where `reader` finds what `source` sends. kGatherRegion: small gathers, always tagged.
    struct Slot {
        uint8_t* data;
        bool tagged;
        int64_t half;  // tagged: bytes from the first two words of a vector to the other two
    };
    __device__ __forceinline__ Slot slot(int reader, int region, int source) const {
        uint8_t* slab = me.slabs[reader];
        if (region == kGatherRegion) {
            const int64_t index = static_cast<int64_t>(buffer) * args.world + source;
            return Slot{slab + gather_offset(args.world, args.stride) + index * kGatherStride, true, kGatherStride / 2};
        }
        const int64_t index = (static_cast<int64_t>(buffer) * 2 + region) * args.world + source;
        return Slot{slab + kSlabHeader + index * args.stride, args.mailbox, args.stride / 2};
    }

    static __device__ __forceinline__ uint4 escape(uint4 v, uint32_t nan) {
        v.x = v.x == kEmpty ? nan : v.x;
        v.y = v.y == kEmpty ? nan : v.y;
        v.z = v.z == kEmpty ? nan : v.z;
        v.w = v.w == kEmpty ? nan : v.w;
        return v;
    }

    // Vector number i of a slot; v is escaped already.
    __device__ __forceinline__ void send(int peer, int region, int64_t i, uint4 v) const {
        const Slot to = slot(peer, region, rank);
        auto half = [&](uint4 w, bool second) {
            if (to.tagged) {
                const uint4 h = second ? make_uint4(w.z, epoch, w.w, epoch) : make_uint4(w.x, epoch, w.y, epoch);
                st_relaxed_sys_16(to.data + i * 16 + (second ? to.half : 0), h);
            } else {
                uint32_t* p = reinterpret_cast<uint32_t*>(to.data + i * 16 + 8 * second);
                st_relaxed_sys(p, second ? w.z : w.x);
                st_relaxed_sys(p + 1, second ? w.w : w.y);
            }
        };
        auto whole = [&](uint4 w) {
            if (to.tagged) {
                half(w, false);
                half(w, true);
            } else {
                st_relaxed_sys_16(to.data + i * 16, w);
            }
        };
        if constexpr (kHooks) {
            if (me.hooks) return hooked_send(me.hooks, peer, v, whole, half);
        }
        whole(v);
    }

    // Waits for vector i from every rank in `sources` (bits), takes them and leaves the slots empty. After a failure all
    // words are NaN. One loop for all sources: their latencies overlap.
    __device__ __forceinline__ void take(uint32_t sources, int region, int64_t i, uint4 (&got)[kMaxRanks]) {
#pragma unroll
        for (int r = 0; r < kMaxRanks; ++r) got[r] = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
        const bool tagged = args.mailbox || region == kGatherRegion;
        uint32_t pending = failed ? 0 : sources;
        uint64_t start = 0;
        for (uint32_t spins = 1;; ++spins) {
#pragma unroll
            for (int r = 0; r < kMaxRanks; ++r) {
                if (!(pending >> r & 1)) continue;
                const Slot waiting = slot(rank, region, r);
                const uint8_t* from = waiting.data;
                if (tagged) {
                    const uint4 a = ld_relaxed_sys_16(from + i * 16), b = ld_relaxed_sys_16(from + i * 16 + waiting.half);
                    got[r] = make_uint4(a.x, a.z, b.x, b.z);
                    if (a.y == epoch && a.w == epoch && b.y == epoch && b.w == epoch) pending &= ~(1u << r);
                } else {
                    got[r] = ld_relaxed_sys_16(from + i * 16);
                    if (got[r].x != kEmpty && got[r].y != kEmpty && got[r].z != kEmpty && got[r].w != kEmpty) pending &= ~(1u << r);
                }
            }
            if (pending == 0) break;
            if (spins % kSpinsPerLook == 0) {
                const uint64_t now = global_timer();
                if (start == 0) start = now;
                const bool poisoned =
                    ld_relaxed_sys(&me.state[kPoison]) != 0 || ld_relaxed_sys(poison_of(me.slabs[rank])) != 0;
                if (poisoned || now - start > args.deadline_ns) {
                    give_up(poisoned ? kPoisonedByPeer : kTimeout, pending, region);
                    break;
                }
                if (spins > kSpinsBeforeNap) __nanosleep(200);
            }
            spin_pause();
        }
#pragma unroll
        for (int r = 0; r < kMaxRanks; ++r) {
            if (!(sources >> r & 1)) continue;
            if (failed) got[r] = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
            else if (!tagged) st_relaxed_sys_16(slot(rank, region, r).data + i * 16, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
        }
    }

    // This rank is lost: say so on the host page and to every peer, and stop waiting.
    __device__ __forceinline__ void give_up(uint32_t why, uint32_t missing, int stage) {
        failed = true;
        report(why, missing, stage);
        st_relaxed_sys(&me.state[kPoison], 1);
        for (int r = 0; r < args.world; ++r) st_relaxed_sys(poison_of(me.slabs[r]), 1u + rank);
    }
    __device__ __forceinline__ void report(uint32_t why, uint32_t missing, int stage) {
        atomicOr(&me.state[kMissingMask], missing);
        st_relaxed_sys(&me.status[kMissingMask], ld_relaxed_sys(&me.state[kMissingMask]));
        if (ld_relaxed_sys(&me.status[kFailure]) != kNoFailure) return;
        st_relaxed_sys(&me.status[kFailedRank], rank);
        st_relaxed_sys(&me.status[kFailedEpoch], epoch);
        st_relaxed_sys(&me.status[kFailedStage], stage);
        st_relaxed_sys(&me.status[kFailure], why);
    }

    // Rarely: forget the tags of the buffer that call e - 1 used; peers write it next in call e + 2.
    __device__ __forceinline__ void wipe_old_tags(int64_t thread, int64_t threads) const {
        if (epoch % kWipeEvery >= kCommBuffers) return;
        const uint32_t old = (epoch + kCommBuffers - 1) % kCommBuffers;
        uint8_t* slab = me.slabs[rank];
        auto wipe = [&](uint8_t* begin, int64_t bytes) {
            for (int64_t i = thread; i < bytes / 16; i += threads) st_relaxed_sys_16(begin + i * 16, make_uint4(0, 0, 0, 0));
        };
        if (args.mailbox) wipe(slab + kSlabHeader + static_cast<int64_t>(old) * 2 * args.world * args.stride, 2 * args.world * args.stride);
        wipe(slab + gather_offset(args.world, args.stride) + static_cast<int64_t>(old) * args.world * kGatherStride,
             args.world * kGatherStride);
    }
};

}  // namespace fv
