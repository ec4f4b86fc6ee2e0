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
};

// The most blocks of one rank: virtual ranks must all be resident, at one block per multiprocessor.
inline int most_comm_blocks(const fv_comm& c, int sms) {
    int most = c.blocks < kEpochWords ? c.blocks : kEpochWords;
    if (c.local_ranks > 1 && most > sms / c.local_ranks) most = sms / c.local_ranks;
    return most < 1 ? 1 : most;
}

// One vector per thread while there are blocks for it, in blocks as small as that allows.
inline CommChoice choose_all_reduce(int64_t vectors, int most_blocks) {
    int threads = 128;
    while (threads < 512 && vectors > static_cast<int64_t>(most_blocks) * threads) threads *= 2;
    const int64_t blocks = (vectors + threads - 1) / threads;
    return CommChoice{static_cast<int>(blocks < most_blocks ? blocks : most_blocks), threads, 1};
}

// A row is a cluster's (sm_90, sm_100) or a block's. Bits do not depend on the choice.
inline CommChoice choose_rms_norm(int64_t rows, int64_t row_vectors, int most_blocks, int major, bool clusters) {
    int threads = 128;
    const int64_t most_cluster = clusters && (major == 9 || major == 10) ? 8 : 1;
    int64_t cluster = 1;
    while (threads < 512 && row_vectors > most_cluster * threads) threads *= 2;
    while (cluster < most_cluster && cluster * threads < row_vectors) cluster *= 2;
    while (cluster > 1 && rows * cluster > most_blocks) {
        cluster /= 2;
        if (threads < 512) threads *= 2;
    }
    int64_t teams = most_blocks / cluster;
    teams = teams < 1 ? 1 : teams < rows ? teams : rows;
    return CommChoice{static_cast<int>(teams * cluster), threads, static_cast<int>(cluster)};
}

}  // namespace fv
