// SPDX-License-Identifier: Apache-2.0
// How ranks exchange 16-byte vectors without flags, fences or remote atomics.
//
// A vector carries its own readiness: every 32-bit word of a slot that waits is kEmpty (a NaN code that arithmetic never
// makes; a sender rewrites that one value to the canonical NaN), compared as raw bits, so a torn or half-arrived vector is
// simply not there yet. Nothing but the data travels, in GPU memory as in a host mailbox; the reader puts kEmpty back. Slots
// exist three times, used in turn by epoch. A rank starts call e + 1 only after all others have sent for call e, so when a
// slot is used again its reader has long finished with it; kernels of one rank run in stream order. Small gathers carry any
// bit pattern, so they travel as {data, epoch} pairs of words.
//
// The epoch is device memory, one word per block, moved on by that block once all its threads have read it (a call with
// few blocks moves the words of the others too): graph replays are never frozen, and nobody waits for an atomic.
#pragma once
#include "comm/comm_hooks.cuh"
#include "comm/fv_comm.h"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace fv {

constexpr uint32_t kEmpty = 0xffffffffu;
constexpr int kSpinsPerLook = 64;      // polls between two looks at the clock and the poison word
constexpr int kSpinsBeforeNap = 8192;  // then __nanosleep between polls
// Tags of small gathers older than this many calls are wiped, so that an epoch that comes round again (2^32 calls) meets none.
constexpr uint32_t kWipeEvery = 1u << 20;

// Everything a kernel needs, by value. Virtual ranks share the slabs; their words lie *_step apart.
struct CommArgs {
    CommRank first;
    uint32_t stride;       // vectors of a slot
    uint32_t region;       // and of a region: world slots. With 3 x 2 x 8 slots of 2^26 vectors, 32 bits are enough
    uint64_t patience_ns;  // the deadline in two: a wait for data, then for what peers say who gave up too
    uint32_t grace_ns;
    int32_t world, first_rank, form;
    int32_t state_step, status_step, hooks_step;
};

__device__ __forceinline__ uint4 empty_vector() { return make_uint4(kEmpty, kEmpty, kEmpty, kEmpty); }
__device__ __forceinline__ bool has_arrived(uint4 v) { return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty; }
// A payload as it may travel: `nan` instead of the one word that means "not there yet".
__device__ __forceinline__ uint4 escape(uint4 v, uint32_t nan) {
    v.x = v.x == kEmpty ? nan : v.x;
    v.y = v.y == kEmpty ? nan : v.y;
    v.z = v.z == kEmpty ? nan : v.z;
    v.w = v.w == kEmpty ? nan : v.w;
    return v;
}

__device__ __forceinline__ uint32_t* words_of(uint8_t* slab) { return reinterpret_cast<uint32_t*>(slab); }  // word 0: poison
__device__ __forceinline__ uint32_t short_timer() { return static_cast<uint32_t>(global_timer()); }

// This rank is lost. Its first thread that gives up says so to every rank, for the others too, hears for a grace what they say, and
// writes it to the host page: who was waited for and says nothing is missing; who says that it waits is not (fastverify/comm/missing.py).
// It speaks in the first half of the grace only, so that nobody writes into a slab that is given back. Seldom called, so kept out of the
// way of what is.
inline __device__ __noinline__ void give_up(const CommArgs& args, uint32_t why, uint32_t epoch, uint32_t waits) {
    uint32_t* const state = args.first.state + static_cast<int>(blockIdx.y) * args.state_step;
    atomicOr(&state[kSaid + kSaidWaits], waits);
    if (atomicExch(&state[kPoison], 1u) != 0) return;
    st_relaxed_sys(&state[kSaid + kSaidEpoch], epoch);
    st_relaxed_sys(&state[kSaid + kSaidWhy], why);
    const uint32_t end = short_timer() + args.grace_ns;
    uint32_t i = 0;  // word kSaidWhy (last) .. kSaidWaits of the record, then the next rank
#pragma unroll 1
    do {
        if (static_cast<int32_t>(short_timer() - end) < -static_cast<int32_t>(args.grace_ns / 2)) {
            uint32_t* const to = words_of(args.first.slabs[i / 4]);
            st_relaxed_sys(to + record_word(args.first_rank + blockIdx.y) + (3 - i % 4), ld_relaxed_sys(state + kSaid + (3 - i % 4)));
            if (i % 4 == 3) st_relaxed_sys(to, 1);
        }
        if (++i == 4 * args.world) i = 0;
        __nanosleep(1'000);
        spin_pause();
    } while (static_cast<int32_t>(short_timer() - end) < 0);
#pragma unroll 1
    for (i = 0; i < 4 * args.world; ++i) {
        st_relaxed_sys(args.first.status + static_cast<int>(blockIdx.y) * args.status_step + kRecords + i,
                       ld_relaxed_sys(words_of(args.first.slabs[args.first_rank + blockIdx.y]) + record_word(0) + i));
    }
    uint32_t* const status = args.first.status + static_cast<int>(blockIdx.y) * args.status_step;
    st_relaxed_sys(&status[kFailedRank], args.first_rank + blockIdx.y);
    __threadfence_system();
    st_relaxed_sys(&status[kFailure], ld_relaxed_sys(&state[kSaid + kSaidWhy]));
}

template <bool kHooks>
struct Exchange {
    const CommArgs& args;
    uint32_t* state;
    int rank;
    int blocks;                // of this rank that exchange
    uint32_t epoch, buffer;
    uint32_t inbox;            // of this call, region 0: slot of source 0, in vectors from the begin of a slab
    uint32_t outbox;           // and that of this rank
    bool failed;               // of this thread; what it takes from then on is NaN
    uint32_t poison;           // as loaded

    // All threads of a block make one, begin() and finish() it. Loads that do not need it go before begin().
    __device__ __forceinline__ Exchange(const CommArgs& a, int local, int blocks_of_rank)
        : args(a), state(a.first.state + local * a.state_step), rank(a.first_rank + local), blocks(blocks_of_rank) {
        epoch = ld_relaxed_sys(&state[kEpoch + blockIdx.x]);
        poison = ld_relaxed_sys(&state[kPoison]);
    }
    __device__ __forceinline__ uint32_t* hooks() const { return args.first.hooks + (rank - args.first_rank) * args.hooks_step; }  // kHooks only
    __device__ __forceinline__ void begin() {
        buffer = epoch % kCommBuffers;
        inbox = static_cast<uint32_t>(kSlabHeader / 16) + buffer * 2 * args.region;
        outbox = inbox + rank * args.stride;
        failed = poison != 0;
    }

    __device__ __forceinline__ uint32_t previous_buffer() const { return buffer == 0 ? kCommBuffers - 1 : buffer - 1; }
    __device__ __forceinline__ uint32_t next_epoch() const { return epoch + 1 == 0 ? 1 : epoch + 1; }

    // After the sends: moves the epoch on.
    __device__ __forceinline__ void finish() const {
        __syncthreads();
        advance();
    }
    // The same after another barrier of the block.
    __device__ __forceinline__ void advance() const {
        const int step = blocks * static_cast<int>(blockDim.x);
#pragma unroll 1
        for (int w = blockIdx.x + blocks * static_cast<int>(threadIdx.x); w < kEpochWords; w += step) state[kEpoch + w] = next_epoch();
    }

    __device__ __forceinline__ uint8_t* vector_at(int reader, uint32_t i) const { return args.first.slabs[reader] + uint64_t{i} * 16; }
    // Where `reader` finds what `source` sends in a small gather.
    __device__ __forceinline__ uint8_t* gather_slot(int reader, uint32_t buf, int source) const {
        const int64_t index = static_cast<int64_t>(buf * args.world + source);
        return args.first.slabs[reader] + gather_offset(args.world, int64_t{args.stride} * 16) + index * kGatherStride;
    }

    // Vector number i of a slot; v is escaped already.
    __device__ __forceinline__ void send(int peer, int region, uint32_t i, uint4 v) const {
        uint8_t* to = vector_at(peer, outbox + (region ? args.region : 0) + i);
        if constexpr (kHooks) {
            auto half = [&](uint4 w, bool second) {
                uint32_t* p = reinterpret_cast<uint32_t*>(to + 8 * second);
                st_relaxed_sys(p, second ? w.z : w.x);
                st_relaxed_sys(p + 1, second ? w.w : w.y);
            };
            return hooked_send(hooks(), peer, region, v, [&](uint4 w) { st_relaxed_sys_16(to, w); }, half);
        }
        st_relaxed_sys_16(to, v);
    }
    // The same for small gathers: {word, epoch} pairs, two in each half of the slot, so that a warp's accesses are whole lines.
    __device__ __forceinline__ void send_tagged(int peer, uint32_t i, uint4 v) const {
        uint8_t* to = gather_slot(peer, buffer, rank) + i * int64_t{16};
        auto half = [&](uint4 w, bool second) {
            st_relaxed_sys_16(to + (second ? kGatherStride / 2 : 0),
                              second ? make_uint4(w.z, epoch, w.w, epoch) : make_uint4(w.x, epoch, w.y, epoch));
        };
        auto whole = [&](uint4 w) { half(w, false), half(w, true); };
        if constexpr (kHooks) return hooked_send(hooks(), peer, 0, v, whole, half);
        whole(v);
    }

    // Waits for vector i of each rank in `sources` (bits), takes them and leaves the slots empty. After a failure all words
    // are NaN. The loads of one round are all on their way before the first is looked at. kRanks >= the number of ranks.
    template <int kRanks>
    __device__ __forceinline__ void take(uint32_t sources, int region, uint32_t i, uint4 (&got)[kRanks]) {
        uint8_t* from = vector_at(rank, inbox + (region ? args.region : 0) + i);
        uint32_t pending = failed ? 0 : sources;
        Patience patience;
        while (pending != 0) {
#pragma unroll
            for (int r = 0; r < kRanks; ++r) {
                if (pending >> r & 1) got[r] = ld_relaxed_sys_16(from + uint64_t{args.stride} * 16 * r);
            }
#pragma unroll
            for (int r = 0; r < kRanks; ++r) {
                if ((pending >> r & 1) && has_arrived(got[r])) pending &= ~(1u << r);
            }
            if (pending != 0 && !wait_on(patience, pending, region ? kResults : kInputs)) break;
        }
        if (failed) {
#pragma unroll
            for (int r = 0; r < kRanks; ++r) got[r] = empty_vector();
            return;
        }
#pragma unroll 1
        for (; sources != 0; sources >>= 1, from += uint64_t{args.stride} * 16) {
            if (sources & 1) st_relaxed_sys_16(from, empty_vector());
        }
    }
    __device__ __forceinline__ uint4 take_one(int source, int region, uint32_t i) {
        return take_one(source, region, i, region ? kResults : kInputs);
    }
    __device__ __forceinline__ uint4 take_one(int source, int region, uint32_t i, CommStage stage) {
        uint8_t* from = vector_at(rank, inbox + (region ? args.region : 0) + source * args.stride + i);
        Patience patience;
        while (!failed) {
            const uint4 got = ld_relaxed_sys_16(from);
            if (has_arrived(got)) {
                st_relaxed_sys_16(from, empty_vector());
                return got;
            }
            wait_on(patience, 1u << source, stage);
        }
        return empty_vector();
    }
    __device__ __forceinline__ uint4 take_tagged(int source, uint32_t i) {
        const uint8_t* from = gather_slot(rank, buffer, source) + i * int64_t{16};
        Patience patience;
        while (!failed) {
            const uint4 a = ld_relaxed_sys_16(from), b = ld_relaxed_sys_16(from + kGatherStride / 2);
            if (a.y == epoch && a.w == epoch && b.y == epoch && b.w == epoch) return make_uint4(a.x, a.z, b.x, b.z);
            wait_on(patience, 1u << source, kInputs);
        }
        return empty_vector();
    }

    __device__ __forceinline__ uint32_t more_patience() const {
        if constexpr (kHooks) return hooks()[kHookPatience];
        return 0;
    }
    struct Patience {
        uint32_t spins = 0;
        uint64_t start = 0;
    };
    // Between two polls: now and then a look at the clock and the poison words. False: this rank has given up.
    __device__ __forceinline__ bool wait_on(Patience& p, uint32_t pending, CommStage stage) {
        if (++p.spins % kSpinsPerLook == 0) {
            if constexpr (kHooks) hook_wait(hooks()[kHookAway]);
            const uint64_t now = global_timer();
            if (p.start == 0) p.start = now;
            const bool poisoned = ld_relaxed_sys(&state[kPoison]) != 0 || ld_relaxed_sys(words_of(args.first.slabs[rank])) != 0;
            if (poisoned || now - p.start > args.patience_ns + more_patience()) {
                failed = true;
                if constexpr (kHooks) {
                    if (is_dead(hooks())) return false;
                }
                give_up(args, poisoned ? kPoisonedByPeer : kTimeout, epoch, pending << 8 * stage);
            } else if (p.spins > kSpinsBeforeNap) __nanosleep(200);
        }
        spin_pause();
        return !failed;
    }

    // Rarely: forget the tags of the buffer that call e - 1 used; peers write it next in call e + 2.
    __device__ __forceinline__ void wipe_old_tags() const {
        if (epoch % kWipeEvery >= kCommBuffers) return;
        uint8_t* begin = gather_slot(rank, previous_buffer(), 0);
        const int64_t vectors = args.world * kGatherStride / 16, threads = static_cast<int64_t>(blocks) * blockDim.x;
#pragma unroll 1
        for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += threads) {
            st_relaxed_sys_16(begin + i * 16, make_uint4(0, 0, 0, 0));
        }
    }
};

}  // namespace fv
