// SPDX-License-Identifier: Apache-2.0
// What a launch of mla_tree_attention looks like on a device: tiles by shared memory. Host and device, no torch.
//
// All heads of all nodes of a request are rows of one pass over its latent rows (512 + 64 dims, the first 512 also V).
#pragma once
#include "algo/attention_plan.h"

namespace fv {

constexpr int kLatentDims = 576, kLatentOut = 512;
constexpr int kLatentRowBytes = 2 * kLatentDims;
constexpr int kMlaThreads = 256;

struct MlaLaunch {
    AttentionLaunch base;   // tile_rows, stages, blocks, least_units, smem
    int tile_tokens;
    int q_in_registers;     // 1: of 64 rows, where Q finds no room beside the ring: every warp keeps its share
};

// A block's 8 warps form row groups; the warps of one group share the dims of a score.
FV_HD constexpr int mla_group_rows(bool q_in_registers) { return q_in_registers ? 16 : 32; }
FV_HD constexpr int mla_split(int tile_rows, bool q_in_registers) { return 8 / (tile_rows / mla_group_rows(q_in_registers)); }

FV_HD constexpr int64_t mla_scores_bytes(int tile_rows, int tile_tokens, bool q_in_registers) {
    return static_cast<int64_t>(mla_split(tile_rows, q_in_registers)) * tile_rows * (tile_tokens + 4) * 4;
}

// Shared memory without the prefix sums and words: Q, the ring, partial scores, weights, a factor per row.
FV_HD constexpr int64_t mla_smem(int tile_rows, int tile_tokens, int stages, bool q_in_registers) {
    const int q_rows = q_in_registers ? 0 : tile_rows;
    return static_cast<int64_t>(q_rows + stages * tile_tokens) * kLatentRowBytes + mla_scores_bytes(tile_rows, tile_tokens, q_in_registers) +
           tile_rows * tile_tokens * 2 + tile_rows * 8;
}

// Rows of a partial result in shared memory, and all of it.
constexpr int kLatentStagedRow = kLatentOut + 8;
FV_HD constexpr int64_t mla_staged_bytes(int tile_rows) { return static_cast<int64_t>(tile_rows) * (kLatentStagedRow + 2) * 4; }

// The sm_90a kernel: Q, two stages, weights, a factor and two statistics per row, barriers, a few words.
constexpr int kMlaWgmmaRows = 64, kMlaWgmmaTokens = 64, kMlaWgmmaThreads = 384;
FV_HD constexpr int64_t mla_wgmma_smem() {
    return (kMlaWgmmaRows + 2 * kMlaWgmmaTokens) * kLatentRowBytes + kMlaWgmmaRows * kMlaWgmmaTokens * 2 + kMlaWgmmaRows * 12 + 128 + kBlockWords;
}

// Up to as many cache positions in all, 32 rows per tile where 64 need registers for Q: partial results half as large.
constexpr int64_t kMlaShortPositions = 16384;

// As clusters_pay; pieces of latent rows are larger, so one or two requests gain no longer.
FV_HD constexpr bool mla_clusters_pay(int64_t batch, int64_t capacity, int major) { return major >= 9 && batch * capacity <= kClusterPositions; }

// rows / batch is taken as nodes of a request; capacity: of a request's page table. sm90: the device and the cache can take the sm_90a kernel;
// clusters: mla_clusters_pay.
FV_HD MlaLaunch mla_launch(int64_t rows, int64_t batch, int64_t heads, int64_t capacity, int sms, int64_t max_smem, bool sm90 = false,
                           bool clusters = false) {
    MlaLaunch m{};
    const int64_t nodes = batch > 0 ? (rows + batch - 1) / batch : 0, room = max_smem - kBlockWords - prefix_bytes(batch);
    m.base.least_units = 2;  // a partial result is as large as 114 latent rows
    m.base.threads = kMlaThreads;
    m.base.blocks = sms < kMaxBlocks ? sms : kMaxBlocks;
    m.base.cluster = 1;
    const auto cluster = [&](int tile) { return clusters ? cluster_blocks(batch * row_tiles(nodes, heads, tile), m.base.blocks) : 1; };
    if (sm90 && mla_wgmma_smem() + prefix_bytes(batch) <= max_smem) {
        m.base.wgmma = 1;
        m.base.threads = kMlaWgmmaThreads;
        m.base.tile_rows = kMlaWgmmaRows;
        m.tile_tokens = kMlaWgmmaTokens;
        m.base.stages = 2;
        m.base.cluster = cluster(kMlaWgmmaRows);
        m.base.smem = prefix_bytes(batch) + mla_wgmma_smem();
        return m;
    }
    const bool wide = mla_smem(64, 32, 3, false) <= room, few = nodes * heads <= 64 && batch * capacity <= kMlaShortPositions;
    const int tile = nodes * heads > 32 && (wide || (mla_smem(64, 32, 2, true) <= room && !few)) ? 64 : 32;
    const int tokens = tile == 64 ? 32 : 16;
    m.q_in_registers = tile == 64 && !wide;
    int stages = 2;
    while (stages < kMaxStages && mla_smem(tile, tokens, stages + 1, m.q_in_registers) <= room) ++stages;
    m.tile_tokens = tokens;
    m.base.tile_rows = tile;
    m.base.stages = stages;
    // the rows that a cluster merges take the place of Q and the ring
    const int q_rows = m.q_in_registers ? 0 : tile;
    if (mla_staged_bytes(tile) <= (q_rows + stages * tokens) * kLatentRowBytes) m.base.cluster = cluster(tile);
    m.base.smem = prefix_bytes(batch) + kBlockWords + mla_smem(tile, tokens, stages, m.q_in_registers);
    return m;
}

}  // namespace fv
