// SPDX-License-Identifier: Apache-2.0
// How verify_tree is spread over a GPU: a pure function of shapes and device.
//
// A team of `cluster` blocks works on one row at a time, each on its slice of the vocabulary. With `teams` = 1 the team of a
// request walks the tree and reads visited rows only. With more, the teams of a request first take all of its rows, and
// the team that finishes last walks: more reading, no dependence on depth; it pays while every team has few rows.
// `slices` > 1 (devices without clusters): single blocks share a row in that first part.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kMaxLanes = 16;         // blocks that share a row
constexpr int kLaneIds = 2048;        // a block is not given fewer ids than this
constexpr int kRowsPerTeam = 5;       // up to so many rows per team, reading all rows beats following the path
constexpr int kBlocksPerSm = 2;       // that registers and shared memory leave room for
constexpr int kPreferredCluster = 8;  // 16 were measured slower on an H200: not every group of SMs has room for one

struct VerifyShape {
    int cluster, teams, slices;
    FV_HD int lanes() const { return cluster * slices; }
};

inline int max_cluster(int major) { return major >= 9 ? kPreferredCluster : 1; }

inline VerifyShape verify_shape(int64_t batch, int64_t rows, int64_t vocab, int major, int sms, bool workspace) {
    // clusters fill a GPU badly beyond one block per SM: with two, the last ones wait for a second wave
    const int64_t slots = max_cluster(major) > 1 ? sms : static_cast<int64_t>(kBlocksPerSm) * sms;
    const int64_t useful = (vocab + kLaneIds - 1) / kLaneIds;
    VerifyShape s{1, 1, 1};
    if (batch < 1) return s;
    while (2 * s.cluster <= max_cluster(major) && s.cluster < useful && 2 * s.cluster * batch <= slots) s.cluster *= 2;
    const int64_t nodes = (rows + batch - 1) / batch;
    if (!workspace || nodes < 2) return s;
    const int64_t room = slots / (batch * s.cluster);  // teams of a request that run at the same time
    if (s.cluster == 1) {
        while (2 * s.slices <= kMaxLanes && s.slices < useful && 2 * s.slices * nodes <= room) s.slices *= 2;
    }
    const int64_t items = nodes * s.slices;
    const int64_t teams = items < room ? items : room;
    if (teams < 2 || nodes > kRowsPerTeam * teams) s.slices = 1;
    else s.teams = static_cast<int>(teams);
    return s;
}

// Workspace of verify_tree: arrival counters (zero before the first call, zero again after every call), keys and
// log-probabilities of rows. Mirrored in fastverify/accept/verify_tree.py.
constexpr int64_t kWorkspaceAlign = 128;
FV_HD int64_t arrivals_bytes(int64_t batch) { return (4 * batch + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign; }
FV_HD int64_t verify_tree_workspace_bytes(int64_t batch, int64_t rows) {
    return arrivals_bytes(batch) + rows * (8 * kMaxLanes + 4);
}

}  // namespace fv
