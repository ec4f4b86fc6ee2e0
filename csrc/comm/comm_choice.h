// SPDX-License-Identifier: Apache-2.0
// How a collective is cut into blocks: pure functions of shapes and device properties.
#pragma once
#include <cstdint>

#include "comm/fv_comm.h"

namespace fv {

struct CommChoice {
    int blocks;   // per rank; a multiple of cluster
    int threads;
    int cluster;  // blocks that share a row (all_reduce_rms_norm), else 1
    int prefetch_blocks = 0;  // more blocks, that only pull weights into L2
    bool registers = false;   // all_reduce_rms_norm: one vector per thread and one row per team
};
constexpr int kPrefetchBlocks = 32;  // of a real rank; a multiple of every cluster size

// The most blocks of one rank: virtual ranks must all be resident, at one block per multiprocessor.
inline int most_comm_blocks(const fv_comm& c, int sms) {
    int most = c.blocks < kEpochWords ? c.blocks : kEpochWords;
    if (c.local_ranks > 1 && most > sms / c.local_ranks) most = sms / c.local_ranks;
    return most < 1 ? 1 : most;
}

// One vector per thread while there are blocks for it, in blocks of at least 128 (little) or 256 threads (on an H200 within
// 10 % of the best of 1..128 blocks of 64..1024 threads at every size from 14 KiB to 896 KiB).
inline CommChoice choose_all_reduce(int64_t vectors, int most_blocks) {
    int threads = vectors <= 1024 ? 128 : 256;
    while (threads < 512 && vectors > static_cast<int64_t>(most_blocks) * threads) threads *= 2;
    const int64_t blocks = (vectors + threads - 1) / threads;
    return CommChoice{static_cast<int>(blocks < most_blocks ? blocks : most_blocks), threads, 1};
}

// all_reduce_columns stays resident beside products: few multiprocessors, half of their warps to send and half to receive; kColumnBlocks
// keep some 260 KiB of reads on their way, a PCIe Gen5 link's 50 GB/s at 2 us asks for 100.
constexpr int kColumnBlocks = 16;
inline CommChoice choose_columns(int64_t vectors, int most_blocks) {
    int64_t blocks = (vectors + 255) / 256;
    if (blocks > kColumnBlocks) blocks = kColumnBlocks;
    return CommChoice{static_cast<int>(blocks < most_blocks ? blocks : most_blocks), 512, 1};
}

// Of the deadline: how long a rank that has given up hears who else has. Ranks that share a GPU take turns of milliseconds.
constexpr uint64_t kLeastGraceNs = 100'000'000, kMostGraceNs = 1'000'000'000;
constexpr uint64_t comm_grace_ns(uint64_t deadline_ns) {
    const uint64_t eighth = deadline_ns / 8;
    return eighth < kLeastGraceNs ? kLeastGraceNs : eighth > kMostGraceNs ? kMostGraceNs : eighth;
}

constexpr int log2_of(int power_of_two) { return power_of_two > 1 ? 1 + log2_of(power_of_two / 2) : 0; }

// Of a block of all_reduce_rms_norm: what the sums of many ranks hold leaves registers for fewer threads.
constexpr int most_row_threads(int ranks) { return ranks > 4 ? 256 : 512; }
constexpr int most_register_threads(int ranks) { return ranks > 2 ? 512 : 1024; }

// Blocks that share a row: they send and read it faster than one does (docs/performance.md).
constexpr int most_row_cluster(int major) { return major == 9 || major == 10 ? 8 : 1; }

// A row is a cluster's or a block's. Bits do not depend on the choice.
inline CommChoice choose_rms_norm(int64_t rows, int64_t row_vectors, const fv_comm& c, int major, int sms, CommForm form, bool prefetch) {
    const bool hooks = c.ranks[0].hooks != nullptr;
    int64_t most = most_comm_blocks(c, sms), most_cluster = most_row_cluster(major);
    if (c.forced & kForcedRowCluster && major >= 9) most_cluster = c.forced & kForcedRowCluster;
    if (c.local_ranks == 1 && form == kOneShot && most <= kEpochWords / 2) most *= 2;  // each waits for the same block of its peers only
    if (c.local_ranks > 1) {  // all at once: half of the blocks may prefetch; small clusters always find room
        most = prefetch && most > 1 ? most / 2 : most;
        while (most_cluster > 4 || most_cluster > most) most_cluster /= 2;
        if (most_cluster > 1) most -= most / 8;  // an H200 runs 30 clusters of 4 at a time, not 33
        if (most_cluster > most) most_cluster = most < 2 ? 1 : 2;
    }
    // the least number of threads, and then of blocks, that hold a row at one vector each
    const int most_threads = most_row_threads(hooks ? kMaxRanks : c.world);
    const bool may = form == kOneShot && !hooks && !(c.forced & kForcedNoRegisters);
    const int most_held = may ? most_register_threads(c.world) : most_threads;
    int64_t threads = 128, cluster = 1;
    while (threads < most_held && row_vectors > most_cluster * threads) threads *= 2;
    while (cluster < most_cluster && cluster * threads < row_vectors) cluster *= 2;
    while (cluster > 1 && rows * cluster > most) {
        cluster /= 2;
        if (threads < most_held) threads *= 2;
    }
    CommChoice choice;
    choice.registers = may && rows * cluster <= most && row_vectors <= cluster * threads;
    if (!choice.registers && threads > most_threads) threads = most_threads;
    int64_t teams = most / cluster;
    teams = teams < 1 ? 1 : teams < rows ? teams : rows;
    choice.blocks = static_cast<int>(teams * cluster);
    choice.threads = static_cast<int>(threads);
    choice.cluster = static_cast<int>(cluster);
    choice.prefetch_blocks = !prefetch ? 0 : c.local_ranks > 1 ? static_cast<int>(cluster) : kPrefetchBlocks;
    return choice;
}

}  // namespace fv
