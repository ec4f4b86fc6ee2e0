// SPDX-License-Identifier: Apache-2.0
// Tiles of tensor-core attention over a latent cache: sizes, swizzled shared memory.
#pragma once
#include "algo/mla_plan.h"
#include "attention/attention_tile.cuh"

namespace fv {

template <int kRows_, int kTokens_, class Kv_, bool kQInRegisters_ = false>
struct MlaTile {
    using Kv = Kv_;
    static constexpr int kRows = kRows_, kTokens = kTokens_, kThreads = kMlaThreads, kWarps = kThreads / 32;
    static constexpr bool kQInRegisters = kQInRegisters_;
    static constexpr int kGroupRows = mla_group_rows(kQInRegisters), kSplit = mla_split(kRows, kQInRegisters);  // warps that share the dims of a row group's scores
    static constexpr int kSteps = kLatentDims / 16;              // of 16 dims
    static constexpr int kMt = kRows / 16, kNt = kTokens / 8;    // of values: all rows, 64 dims per warp
    static constexpr int kQm = kGroupRows / 16;                  // of scores
    static constexpr int kOt = kLatentOut / kWarps / 8;
    static constexpr int kStage = kTokens * kLatentRowBytes, kQBytes = kQInRegisters ? 0 : kRows * kLatentRowBytes;
    static_assert(!kQInRegisters || kSteps % kSplit == 0);
    static constexpr int kScoreRow = kTokens + 4;                // floats: rows of 8 lanes in different banks
    static constexpr int kScoreBytes = static_cast<int>(mla_scores_bytes(kRows, kTokens, kQInRegisters)), kWeightBytes = kRows * kTokens * 2;
    static constexpr int kLoadTokens = kTokens / kWarps;         // tokens of a tile that a warp loads: 4 or 2
    static_assert(kRows % 32 == 0 && (kTokens == 16 || kTokens == 32));
};

// Byte offset of 16-byte chunk `chunk` of a latent row.
__device__ __forceinline__ int latent_offset(int row, int chunk) { return row * kLatentRowBytes + ((chunk ^ (row & 7)) << 4); }

// Of weights [kRows, kTokens] in 16 bits.
template <int kTokens>
__device__ __forceinline__ int weight_offset(int row, int chunk) {
    if (kTokens == 32) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
    return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4);
}

}  // namespace fv
