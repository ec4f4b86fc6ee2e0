// SPDX-License-Identifier: Apache-2.0
// How the acceptance is spread over a GPU, and what blocks that work together share in memory: pure functions of shapes
// and device.
//
// verify_tree: a team of `blocks` blocks per request shares every visited row by slices of the vocabulary and agrees on the
// token through the workspace (accept/team.cuh). With `all_rows` a request's rows are all taken at once, a warp per slice of a
// row, and one block of the team walks: more reading, no dependence on depth; it pays while few ids fall to a block.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kBlocksPerSm = 1;        // of a team's blocks
constexpr int kLeastIds = 512;         // a block is not given fewer ids of a row than this
constexpr int kAllRowsIds = 64 * 1024; // up to so many ids of a request per block, all rows are taken at once

struct VerifyShape {
    int blocks;
    bool all_rows;
};

// The exchange area at the start of a workspace. Its places do not depend on shapes, so calls of any shape may share it.
constexpr int kTeamBlocks = 256;       // blocks of a launch that work in teams of more than one
constexpr int kTeamWide = 32;          // blocks of a team whose rows need filters or log-probabilities
constexpr int kExchanges = 28;         // exchanges of one visited row
constexpr int kPublished = 128;        // candidates of a block
constexpr int kSelectBuckets = 1024;
constexpr int kSelectSets = 3;
constexpr int kTeamWarpItems = 16 * kTeamBlocks;  // slices of rows that are taken at once
constexpr int64_t kAreaLaunches = 0;   // u64: high half the last tag of the launches before, low half the teams of this one that need no tag any more
constexpr int64_t kAreaSlots = 128;    // [kExchanges][2][kTeamBlocks] of 32 bytes
constexpr int64_t kAreaItems = kAreaSlots + 32LL * kExchanges * 2 * kTeamBlocks;       // [kTeamWarpItems] of 16 bytes
constexpr int64_t kAreaLists = kAreaItems + 16LL * kTeamWarpItems;                     // [2][2][kTeamBlocks][kPublished] of 16
constexpr int64_t kAreaSums = kAreaLists + 16LL * 2 * 2 * kTeamBlocks * kPublished;    // [teams][kSelectSets][kSelectBuckets]
constexpr int64_t kAreaBytes = kAreaSums + 8LL * kTeamBlocks / 2 * kSelectSets * kSelectBuckets;

inline VerifyShape verify_shape(int64_t batch, int64_t rows, int64_t vocab, int sms, bool workspace) {
    VerifyShape s{1, false};
    if (batch < 1 || !workspace) return s;
    const int64_t slots = kBlocksPerSm * (sms < kTeamBlocks ? sms : kTeamBlocks), useful = (vocab + kLeastIds - 1) / kLeastIds;
    const int64_t share = slots / batch < useful ? slots / batch : useful;
    if (share < 2) return s;
    s.blocks = static_cast<int>(share);
    s.all_rows = (rows + batch - 1) / batch * vocab <= kAllRowsIds * share;
    return s;
}

// verify_tree_partials: blocks of the cluster that takes a row.
constexpr int kMaxCluster = 8;
constexpr int kClusterIds = 2048;  // a block is not given fewer ids than this
inline int partials_cluster(int64_t rows, int64_t shard, int major, int sms) {
    int cluster = 1;
    if (major < 9) return cluster;
    while (2 * cluster <= kMaxCluster && cluster * kClusterIds < shard && 2 * cluster * rows <= sms) cluster *= 2;
    return cluster;
}

}  // namespace fv
