// SPDX-License-Identifier: Apache-2.0
// How lm_head_verify_tree is cut into blocks on a GPU, and what its workspace holds: pure functions of shapes and of
// the device. Host+device, no torch, no CUDA runtime. head_workspace is mirrored
// in fastverify/accept/lm_head_verify_tree.py.
//
// Tensor cores: the product is seen as weight [V,H] x hidden^T [H,R]. A tile is 128 or 192 vocabulary rows x `rows_tile`
// node rows; the K loop of all tiles of one chunk of node rows is one line of tiles * k_steps steps, cut into equal pieces
// ("stream-K": Osama et al. 2023), one per block. A tile that two or more blocks share is finished by whichever of them
// arrives last, which adds the parts in block order.
#pragma once
#include <cstdint>

#include "algo/verify_plan.h"

namespace fv {

constexpr int kHeadStep = 64;     // columns of a K step: 128 bytes of a weight row
constexpr int kHeadSimtThreads = 128;
constexpr int kHeadSimtRows = 8;  // node rows of the path without tensor cores
constexpr int kHeadRowBytes = 44;  // shared memory per node row: description, best key, bound

FV_HD int head_rows_tile(int64_t rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }
// Vocabulary rows of a tile, and threads of its block: a warp takes 32. More node rows, wider tiles: the hidden states are
// read again for every tile.
constexpr int kHeadTileLeast = 128;
FV_HD constexpr int head_tile(int rows_tile) { return rows_tile <= 32 ? 128 : 192; }
FV_HD constexpr int head_stages(int rows_tile) { return rows_tile <= 16 ? 5 : rows_tile == 32 ? 4 : 3; }
FV_HD constexpr int head_stage_bytes(int rows_tile) { return (head_tile(rows_tile) + rows_tile) * kHeadStep * 2; }
FV_HD constexpr int head_smem(int rows_tile) {
    return head_stages(rows_tile) * head_stage_bytes(rows_tile) + kHeadRowBytes * rows_tile;
}

struct HeadPlan {
    bool tensor_cores;
    int rows_tile, chunks;  // node rows of a tile; ceil(rows / rows_tile)
    int tiles, k_steps;     // per chunk
    int steps;              // K steps of one block (of one chunk)
    int slots;              // blocks per chunk; slots * steps >= tiles * k_steps
    int blocks;             // chunks * slots
    int smem;
};

// tensor_cores: both operands bf16 or both fp16, rows of 16-byte multiples (the op checks pointers and strides).
FV_HD HeadPlan head_plan(int64_t rows, int64_t vocab, int64_t hidden, bool tensor_cores, int sms, int max_smem) {
    HeadPlan p;
    p.tensor_cores = tensor_cores;
    p.rows_tile = tensor_cores ? head_rows_tile(rows) : kHeadSimtRows;
    p.chunks = static_cast<int>((rows + p.rows_tile - 1) / p.rows_tile);
    p.k_steps = static_cast<int>((hidden + kHeadStep - 1) / kHeadStep);
    if (p.chunks < 1) p.chunks = 1;  // no rows: not launched
    if (p.k_steps < 1) p.k_steps = 1;  // no columns: logits are 0
    p.smem = tensor_cores ? head_smem(p.rows_tile) : kHeadRowBytes * p.rows_tile;
    if (!tensor_cores) {  // a warp takes four ids at a time
        const int64_t groups = (vocab + 15) / 16, most = 8 * static_cast<int64_t>(sms);
        p.tiles = p.steps = 0;
        p.slots = static_cast<int>(groups < most ? groups : most);
        p.blocks = p.slots * p.chunks;
        return p;
    }
    p.tiles = static_cast<int>((vocab + head_tile(p.rows_tile) - 1) / head_tile(p.rows_tile));
    const int per_sm = (max_smem + 1024) / (p.smem + 1024) >= 2 ? 2 : 1;
    const int most = sms * per_sm / p.chunks > 1 ? sms * per_sm / p.chunks : 1;
    const int total = p.tiles * p.k_steps;
    p.steps = (total + most - 1) / most;
    const int least = p.k_steps < 8 ? p.k_steps : 8;  // small products: no crumbs
    if (p.steps < least) p.steps = least;
    p.slots = (total + p.steps - 1) / p.steps;
    p.blocks = p.slots * p.chunks;
    return p;
}

// Blocks of a chunk that work on `tile`.
FV_HD int head_first_slot(const HeadPlan& p, int tile) { return tile * p.k_steps / p.steps; }
FV_HD int head_last_slot(const HeadPlan& p, int tile) { return ((tile + 1) * p.k_steps - 1) / p.steps; }

// Byte offsets. [0, zeroed) must be zero before the first call; every call leaves it zero again, but for the exchange area,
// which counts on.
struct HeadWorkspace {
    int64_t area;      // what blocks that walk together share (verify_plan.h)
    int64_t keys;      // u64 [R]: best key of a row so far
    int64_t bad;       // i32 [R]: a NaN or +inf was met
    int64_t counters;  // u32 [chunks, tiles]: blocks that have delivered their part of a tile
    int64_t zeroed;
    int64_t partials;  // f32 [blocks, 2, rows_tile * head_tile]: parts of a block's first and last tile
    int64_t logits;    // f32 [R, logits_stride]: rows of requests with filters, all rows with logprobs
    int64_t logits_stride;
    int64_t bytes;
};

FV_HD int64_t head_align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Enough for every plan of these sizes: at most two blocks per SM, or one per chunk of node rows.
FV_HD HeadWorkspace head_workspace(int64_t rows, int64_t vocab, int sms) {
    const int64_t rows_tile = head_rows_tile(rows), chunks = (rows + rows_tile - 1) / rows_tile;
    const int64_t blocks = 2 * sms > chunks ? 2 * sms : chunks;
    HeadWorkspace w;
    w.area = 0;
    w.keys = head_align(kAreaBytes);
    w.bad = head_align(w.keys + 8 * rows);
    w.counters = head_align(w.bad + 4 * rows);
    w.zeroed = w.partials = head_align(w.counters + 4 * chunks * ((vocab + kHeadTileLeast - 1) / kHeadTileLeast));
    w.logits = head_align(w.partials + 2 * 4 * rows_tile * head_tile(static_cast<int>(rows_tile)) * blocks);
    w.logits_stride = (vocab + 3) / 4 * 4;
    w.bytes = head_align(w.logits + 4 * rows * w.logits_stride);
    return w;
}

}  // namespace fv
