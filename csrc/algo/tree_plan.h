// SPDX-License-Identifier: Apache-2.0
// How the tree ops are spread over a GPU: pure functions of shapes and device. A cluster (sm_90 and newer) of up to 8
// blocks shares one row of logits or one request's hidden rows; elsewhere one block does it alone.
#pragma once
#include <cstdint>

namespace fv {

constexpr int kTreeCluster = 8;         // blocks, the portable limit
constexpr int64_t kTopkSlice = 2048;    // a block is not given fewer logits than this
constexpr int kTopkMaxima = 256;        // k * blocks of a row: what the bound is chosen from
constexpr int64_t kGrowSlice = 16384;   // nor fewer bytes of hidden rows than this

// The largest power of two of blocks per item that keeps `items` clusters on the device at once and every slice useful.
inline int cluster_of(int64_t items, int64_t size, int64_t slice, int64_t limit, int major, int sms) {
    int64_t blocks = 1;
    if (items < 1) return 1;
    while (major >= 9 && 2 * blocks <= limit && 2 * blocks * items <= sms && 2 * blocks * slice <= size) blocks *= 2;
    return static_cast<int>(blocks);
}

inline int topk_cluster(int64_t rows, int64_t vocab, int64_t k, int major, int sms) {
    const int64_t limit = kTopkMaxima / (k > 0 ? k : 1);
    return cluster_of(rows, vocab, kTopkSlice, limit < kTreeCluster ? limit : kTreeCluster, major, sms);
}

constexpr int kTopkThreads = 1024;

// Bytes in which each block of `blocks` keeps the scores of its slice (vectors of `per` entries dealt to its threads in turn,
// and at most one entry of each end), 0 if that exceeds `room`.
inline int64_t topk_kept_bytes(int64_t vocab, int64_t per, int64_t blocks, int64_t room) {
    const int64_t turn = per * blocks * kTopkThreads;
    const int64_t bytes = ((vocab + turn - 1) / turn * per + 2) * kTopkThreads * 4;
    return bytes <= room ? bytes : 0;
}

inline int grow_cluster(int64_t batch, int64_t k, int64_t row_bytes, int major, int sms) {
    return cluster_of(batch, k * row_bytes, kGrowSlice, kTreeCluster, major, sms);
}

// build_tree: one block per request. Effective scores (4 bytes an entry) stay in shared memory if they fit; the same bytes
// first hold one bit per entry for each warp that counts the entries of an earlier request.
constexpr int64_t kBuildStatic = 24 * 1024;          // an upper bound of the kernel's own arrays
constexpr int64_t kMaxPool = int64_t{1} << 19;

struct BuildTreeShape {
    int threads, count_warps;
    int64_t smem;  // dynamic bytes
    bool stored;
};

inline BuildTreeShape build_tree_shape(int64_t pool, int64_t max_smem) {
    const int64_t words = (pool + 31) / 32, bitset = 4 * words, room = max_smem - kBuildStatic;
    const bool stored = 32 * bitset <= room;  // 32 bitsets are exactly the bytes of the scores
    int64_t warps = words < 8 ? 8 : words > 32 ? 32 : words;
    const int64_t threads = 32 * warps;
    if (!stored && bitset * warps > room) warps = room / bitset;
    return {static_cast<int>(threads), static_cast<int>(warps), stored ? 32 * bitset : warps * bitset, stored};
}

// prepare_tree: threads of the block of one request.
inline int prepare_tree_threads(int64_t rows, int64_t batch) { return rows > 256 * batch ? 1024 : 256; }

}  // namespace fv
