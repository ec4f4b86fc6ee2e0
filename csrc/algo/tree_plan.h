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
    while (major >= 9 && 2 * blocks <= limit && 2 * blocks * items <= sms && 2 * blocks * slice <= size) blocks *= 2;
    return static_cast<int>(blocks);
}

inline int topk_cluster(int64_t rows, int64_t vocab, int64_t k, int major, int sms) {
    const int64_t limit = kTopkMaxima / (k > 0 ? k : 1);
    return cluster_of(rows, vocab, kTopkSlice, limit < kTreeCluster ? limit : kTreeCluster, major, sms);
}

inline int grow_cluster(int64_t batch, int64_t k, int64_t row_bytes, int major, int sms) {
    return cluster_of(batch, k * row_bytes, kGrowSlice, kTreeCluster, major, sms);
}

}  // namespace fv
