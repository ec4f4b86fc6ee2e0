// SPDX-License-Identifier: Apache-2.0
// What the control plane (_comm) hands to the ops: one plain, versioned struct; ops take its address as an int64.
// Filled once, before the first call; the ops only read it. No torch, no CUDA headers, no pointers to C++ objects.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kMaxRanks = 8;
constexpr int kCommBuffers = 3;  // slots are used in turn
constexpr uint32_t kCommMagic = 0x4656434du;  // "FVCM"
constexpr uint32_t kCommVersion = 3;

enum CommTransport : int32_t {
    kGathered = 0,     // CPU: the caller has gathered the inputs of all ranks, the op folds them
    kPeerMemory = 1,   // slabs in GPU memory that peers write (NVLink, PCIe, or the same GPU): 16-byte words, sentinel
    kHostMailbox = 2,  // slabs in pinned host memory, one per reader; the same protocol
    kNccl = 3,         // no slabs: NCCL moves and adds (its own order and roundings), nccl below is filled
};

// NCCL as the control plane loaded it; the types are those of nccl.h (results, data types and operators are ints).
struct NcclCalls {
    void* comm;  // nullptr: none
    int (*all_reduce)(const void* send, void* receive, size_t count, int type, int sum, void* comm, void* stream);
    int (*all_gather)(const void* send, void* receive, size_t count, int type, void* comm, void* stream);
    int (*get_async_error)(void* comm, int* result);
    const char* (*error_string)(int result);
};

// What a rank sees. Device pointers, valid in the process that launches for this rank.
struct CommRank {
    uint8_t* slabs[kMaxRanks];  // [r]: the slab rank r reads from; [own rank]: what this rank polls
    uint32_t* state;            // device memory of this rank: kStateWords words
    uint32_t* status;           // host memory the device can write (or device memory): kStatusWords words
    uint32_t* hooks;            // test hooks (comm_hooks.cuh) or nullptr
};

struct fv_comm {
    uint32_t magic, version, bytes;  // bytes = sizeof(fv_comm) of the writer
    int32_t world;                   // ranks of the group, 1..kMaxRanks
    int32_t rank;                    // of this process; 0 for virtual ranks
    int32_t local_ranks;             // ranks this process launches for: 1, or `world` virtual ranks on one GPU
    int32_t transport;
    int32_t device;                  // CUDA device of the slabs, -1 for CPU
    int64_t max_bytes;               // largest input of one rank; slots have this size
    int64_t one_shot_bytes;          // inputs up to here go one-shot, larger ones two-shot
    int64_t island_bytes;            // inputs above this take the island form; kNever: none does
    int64_t fp8_bytes;               // inputs above this travel as fp8 (lossy); kNever: none does
    uint64_t deadline_ns;            // how long a rank waits for its peers
    int32_t blocks;                  // most blocks of a call per rank
    int32_t forced;                  // CommForced, for tests and measurements; 0: as chosen
    CommRank ranks[kMaxRanks];       // [0, local_ranks)
    NcclCalls nccl;
};

// fv_comm::forced. Results do not depend on it.
enum CommForced : int32_t {
    kForcedRowCluster = 0xff,     // most blocks that share a row of all_reduce_rms_norm; 0: as chosen
    kForcedNoOverlap = 1 << 8,    // a launch begins when the one before it has ended
    kForcedNoRegisters = 1 << 9,  // all_reduce_rms_norm without the kernel that keeps a row in registers
};

// How a sum travels. Every form adds in rank order in fp32; the exact forms round once and so give the same bits.
enum CommForm : int32_t {
    kOneShot = 0,   // everything to everybody: (W - 1) S bytes out of every rank, one hop
    kTwoShot = 1,   // a slice to its owner, the sum of it to all: 2 (W - 1) / W S bytes, two hops
    kIslands = 2,   // ranks [0, W/2) and [W/2, W) each behind a switch: two-shot inside, S bytes in all between them; three
                    // hops; the sum of an island is rounded before it crosses, so the bits differ from the exact forms'
};
constexpr int64_t kNever = INT64_MAX;

FV_HD CommForm comm_form(const fv_comm& c, int64_t bytes) {
    if (bytes > c.island_bytes && c.world >= 4 && c.world % 2 == 0) return kIslands;
    return c.world > 1 && bytes > c.one_shot_bytes ? kTwoShot : kOneShot;
}

// state words, device memory
constexpr int kEpochWords = 256;  // also the most blocks of a call
enum CommState : int {
    kEpoch = 0,              // [block]: number of the next call, never 0; every call moves all of them on
    kSaid = kEpochWords,     // its CommRecord when this rank has given up; the last word != 0: it has
    kPoison = kSaid + 3,
    kDone,                   // number of the last call whose blocks prefetched weights, written when its rows are done
    kCommStateWords = kEpochWords + 8,
};

// What a thread may wait for, in the order of a call: a rank that waits has not sent what comes later.
enum CommStage : int { kOwnProduct = 0, kInputs = 1, kOtherIsland = 2, kResults = 3 };

// What a rank that gives up says to all, itself included: words in the header of every slab.
constexpr uint32_t kNoFailure = 0, kTimeout = 1, kPoisonedByPeer = 2;
enum CommRecord : int {
    kSaidWhy = 0,    // kNoFailure: nothing was said
    kSaidEpoch = 1,  // the call
    kSaidWaits = 2,  // bit r of byte s: in stage s it waited for rank r
    kRecordWords = 4,
};

// status words, written once by the first thread that gives up
enum CommStatus : int {
    kFailure = 0,     // kNoFailure, kTimeout, kPoisonedByPeer; written last
    kFailedRank = 1,
    kRecords = 4,     // [rank]: CommRecord, as far as they have come
    kCommStatusWords = kRecords + kMaxRanks * kRecordWords,
};

// Layout of a slab: a header (word 0: poison; from word 4 on a record per rank), then kCommBuffers x 2 regions x world slots
// (region 0: one-shot inputs, slices for their owner, or an island's sum for the partner; region 1: the owners' results),
// all ones before the first call; then kCommBuffers x world slots of small gathers, zeros.
constexpr int64_t kSlabHeader = 4096;
constexpr int64_t kGatherBytes = 65536;           // largest input of all_gather_small
constexpr int64_t kGatherStride = 2 * kGatherBytes;  // words of data and tag
FV_HD constexpr int32_t record_word(int32_t rank) { return kRecordWords * (1 + rank); }
FV_HD constexpr int64_t slot_stride(int64_t max_bytes) { return (max_bytes + 4095) / 4096 * 4096 + 4096; }
FV_HD constexpr int64_t gather_offset(int32_t world, int64_t stride) { return kSlabHeader + kCommBuffers * 2 * world * stride; }
FV_HD constexpr int64_t slab_bytes(int32_t world, int64_t max_bytes) {
    return gather_offset(world, slot_stride(max_bytes)) + kCommBuffers * world * kGatherStride;
}

}  // namespace fv
