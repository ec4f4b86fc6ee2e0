// SPDX-License-Identifier: Apache-2.0
// The arguments of SGLang's two tree ops, on CPU and CUDA.
#pragma once
#include "algo/sglang.h"
#include "common/check.h"

namespace fv {

// Position of a node `depth` below the root; a length at the end of int64 wraps, as it does in SGLang's.
FV_HD int64_t sgl_position(int64_t length, int64_t depth) {
    return static_cast<int64_t>(static_cast<uint64_t>(length) + static_cast<uint64_t>(depth));
}

// What both write, int64 [B,N].
struct SglLinks {
    int64_t* positions;
    int64_t* index;
    int64_t* next;
    int64_t* sibling;

    // Node i of request b.
    FV_HD void write(int64_t b, int32_t nodes, int32_t i, int64_t first_child, int64_t next_sibling) const {
        const int64_t at = b * nodes + i;
        index[at] = at;
        next[at] = first_child;
        sibling[at] = next_sibling;
    }
};

inline SglLinks sgl_check_links(
    const char* op, const Tensor& positions, const Tensor& retrive_index, const Tensor& retrive_next_token,
    const Tensor& retrive_next_sibling, int64_t batch, int64_t nodes, const Tensor& like) {
    FV_CHECK(nodes >= 1 && nodes <= kMaxNodes, op, ": draft_token_num must be in 1..", kMaxNodes, "; got ", nodes,
             ". Fix: draft at most that many nodes per request.");
    check_tensor(op, "positions", positions, {ScalarType::Long}, {batch * nodes}, like);
    check_tensor(op, "retrive_index", retrive_index, {ScalarType::Long}, {batch, nodes}, like);
    check_tensor(op, "retrive_next_token", retrive_next_token, {ScalarType::Long}, {batch, nodes}, like);
    check_tensor(op, "retrive_next_sibling", retrive_next_sibling, {ScalarType::Long}, {batch, nodes}, like);
    return {mptr<int64_t>(positions), mptr<int64_t>(retrive_index), mptr<int64_t>(retrive_next_token),
            mptr<int64_t>(retrive_next_sibling)};
}

// Threads of a block for trees of n nodes: a warp for every other row.
inline unsigned sgl_tree_threads(int32_t n) { return n <= 8 ? 128 : n >= 64 ? 1024 : static_cast<unsigned>((16 * n + 31) & ~31); }

struct SglBuild {
    int64_t batch, listed, topk, mask_size;  // mask_size: bytes
    int32_t nodes;
    int mode;
    const int64_t* parent_list;  // [B,listed]
    const int64_t* selected;     // [B,N-1]
    const int64_t* seq_len;      // [B]
    uint8_t* mask;
    SglLinks links;

    // Sequence length of request b, and the sum of two: a length that no row of this mask can have counts as one that just does not
    // fit, so that nothing wraps.
    FV_HD int64_t length(int64_t b) const { return seq_len[b] < 0 || seq_len[b] > mask_size ? mask_size + 1 : seq_len[b]; }
    FV_HD int64_t add_lengths(int64_t x, int64_t y) const { return x + y > mask_size ? mask_size + 1 : x + y; }

    // First byte of row i of the N x N part of request b; prefix: mode 0, sum of the sequence lengths before b.
    FV_HD int64_t row_start(int64_t b, int32_t i, int64_t prefix) const {
        const int64_t n = nodes;
        if (mode == kSglMaskFull) return n * (prefix + n * b) + (length(b) + n) * i + length(b);
        return mode == kSglMaskTree ? n * (n * b + i) : (n * b + i) * sgl_row_bytes(n, mode);
    }
};

inline SglBuild sgl_check_build(
    const char* op, const Tensor& parent_list, const Tensor& selected_index, const Tensor& verified_seq_len,
    const Tensor& tree_mask, const Tensor& positions, const Tensor& retrive_index, const Tensor& retrive_next_token,
    const Tensor& retrive_next_sibling, int64_t topk, int64_t depth, int64_t nodes, int64_t mode) {
    const Tensor& like = parent_list;
    FV_CHECK(topk >= 1 && depth >= 1, op, ": topk and depth must be at least 1; got ", topk, " and ", depth,
             ". Fix: pass the shape that the tree was drafted with.");
    FV_CHECK(mode >= 0 && mode <= kSglMaskWords, op, ": tree_mask_mode must be 0 (full), 1 (tree only), 2 (bits) or 3 (64-bit ",
             "words); got ", mode, ". Fix: pass one of them.");
    check_tensor(op, "parent_list", parent_list, {ScalarType::Long}, {kAny, kAny}, like);
    const int64_t batch = parent_list.size(0);
    const SglLinks links = sgl_check_links(op, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch, nodes, like);
    check_tensor(op, "selected_index", selected_index, {ScalarType::Long}, {batch, nodes - 1}, like);
    check_tensor(op, "verified_seq_len", verified_seq_len, {ScalarType::Long}, {batch}, like);
    const bool packed = mode >= kSglMaskBits;
    FV_CHECK(!packed || nodes <= (mode == kSglMaskBits ? 32 : 64), op, ": draft_token_num must be at most ",
             mode == kSglMaskBits ? 32 : 64, " in tree_mask_mode ", mode, "; got ", nodes, ". Fix: use mode ",
             nodes <= 64 ? "3 (up to 64 nodes) or " : "", "1.");
    const auto width = tree_mask.scalar_type() == ScalarType::Bool || tree_mask.scalar_type() == ScalarType::Byte ||
                       tree_mask.scalar_type() == ScalarType::Char ? 1
                     : tree_mask.scalar_type() == ScalarType::Short || tree_mask.scalar_type() == ScalarType::UInt16 ? 2
                     : tree_mask.scalar_type() == ScalarType::Int || tree_mask.scalar_type() == ScalarType::UInt32 ? 4 : 8;
    FV_CHECK(tree_mask.is_contiguous() && tree_mask.is_cuda() == like.is_cuda() &&
             tree_mask.get_device_index() == like.get_device_index(), op,
             ": tree_mask must be contiguous on the device of parent_list; got ", describe(tree_mask),
             ". Fix: allocate it there.");
    const int64_t bytes = tree_mask.numel() * width;
    const int64_t wanted = packed ? batch * nodes * sgl_row_bytes(nodes, static_cast<int>(mode)) : batch * nodes * nodes;
    FV_CHECK(bytes >= wanted, op, ": tree_mask must hold at least ", wanted, " bytes; got ", bytes,
             ". Fix: allocate B*N*N", packed ? "/8 bytes, rows padded to whole words" : " booleans (mode 0: plus N * sum of the lengths)", ".");
    return {batch, parent_list.size(1), topk, bytes, static_cast<int32_t>(nodes), static_cast<int>(mode),
            cptr<int64_t>(parent_list), cptr<int64_t>(selected_index), cptr<int64_t>(verified_seq_len),
            static_cast<uint8_t*>(tree_mask.mutable_data_ptr()), links};
}

struct SglMasks {
    int64_t batch;
    int32_t nodes;
    const uint8_t* mask;     // [B,N,N]
    const int64_t* seq_len;  // [B]
    SglLinks links;
};

inline SglMasks sgl_check_masks(
    const char* op, const Tensor& tree_mask, const Tensor& verified_seq_len, const Tensor& positions, const Tensor& retrive_index,
    const Tensor& retrive_next_token, const Tensor& retrive_next_sibling, int64_t batch, int64_t nodes) {
    const Tensor& like = verified_seq_len;
    FV_CHECK(batch >= 0, op, ": batch_size must be at least 0; got ", batch, ". Fix: pass the number of requests.");
    check_tensor(op, "verified_seq_len", verified_seq_len, {ScalarType::Long}, {batch}, like);
    const SglLinks links = sgl_check_links(op, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch, nodes, like);
    check_tensor(op, "tree_mask", tree_mask, {ScalarType::Bool}, {batch * nodes * nodes}, like);
    return {batch, static_cast<int32_t>(nodes), static_cast<const uint8_t*>(tree_mask.const_data_ptr()),
            cptr<int64_t>(verified_seq_len), links};
}

}  // namespace fv
