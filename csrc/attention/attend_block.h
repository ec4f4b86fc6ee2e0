// SPDX-License-Identifier: Apache-2.0
// CPU attention of one block: the rows of a few nodes x the query heads of one kv head, against keys in the order of
// their positions. Row of depth d: prefix 0..P-1, then its ancestors at P..P+d ("ranks"), whatever columns they sit in.
//
// Keys are taken in tiles of 64 positions and chunks of 512, both from position 0, and chunks are folded in order.
// So a row's arithmetic depends on its own keys alone, and a tree row gets the bits of a plain decoding row.
#pragma once
#include <algorithm>
#include <vector>

#include "attention/tile_math.h"
#include "common/paged.h"

namespace fv {

constexpr int kChunkKeys = 512;

struct CacheView {
    const char* data;
    int64_t page, slot, head;  // strides in bytes
};

struct AttentionArgs {
    const char* q;
    int64_t q_row, q_head;  // strides in bytes
    ScalarType q_type, cache_type;
    CacheView k, v;
    PageTable pages;
    const int64_t* mask;  // null: chain
    int64_t mask_row, words;
    int head_dim, group, window;
    float softcap;
};

// Nodes [node0, node0 + nodes) of request b under kv head `head`; `columns` forest columns exist, `prefix` before them.
struct Block {
    int64_t b, row0;  // row0: flat row of node0
    int head, nodes, column0;  // column0: forest column of node0
    int64_t prefix, columns;
    float scale;  // softmax scale times k_scale
    int64_t first_chunk, end_chunk;
};

// Running softmax state of a block: o [rows, ld] unnormalised, maximum and sum per row.
struct Partial {
    float *o, *maximum, *sum;
    static int64_t floats(int rows, int ld) { return static_cast<int64_t>(rows) * (ld + 2); }
    Partial(float* p, int rows, int ld) : o(p), maximum(p + static_cast<int64_t>(rows) * ld), sum(maximum + rows) {}
    void clear(int rows, int ld) {
        std::fill(o, o + static_cast<int64_t>(rows) * ld, 0.0f);
        std::fill(maximum, maximum + rows, -__builtin_inff());
        std::fill(sum, sum + rows, 0.0f);
    }
};

// Adds the later chunk `next` to `total`. A row without keys in `next` is left alone.
FV_CLONES static void fold(Partial* total, const Partial* next, int rows, int ld) {
    for (int r = 0; r < rows; ++r) {
        if (next->sum[r] == 0.0f) continue;
        const float a = total->maximum[r], b = next->maximum[r], top = greater(a, b);
        const float wa = exp_nonpositive(a - top), wb = exp_nonpositive(b - top);
        total->maximum[r] = top;
        total->sum[r] = total->sum[r] * wa + next->sum[r] * wb;
        float* x = total->o + static_cast<int64_t>(r) * ld;
        const float* y = next->o + static_cast<int64_t>(r) * ld;
        for (int j = 0; j < ld; ++j) x[j] = x[j] * wa + y[j] * wb;
    }
}

// Works through blocks; owns its scratch, one per thread.
class BlockAttention {
public:
    explicit BlockAttention(const AttentionArgs& args)
        : a_(args), ld_((args.head_dim + kLanes - 1) / kLanes * kLanes) {
        staging_.resize(static_cast<size_t>(kTileKeys) * ld_);
        keys_t_.resize(static_cast<size_t>(kTileKeys) * ld_);
        values_.resize(static_cast<size_t>(kTileKeys) * ld_);
    }
    int ld() const { return ld_; }

    // Keys of chunks [begin, end) of `block` into `out`; `spare` is a Partial of the same size.
    void run(const Block& block, int64_t begin, int64_t end, Partial out, Partial spare) {
        prepare(block, begin * kChunkKeys, end * kChunkKeys);
        out.clear(rows_, ld_);
        for (int64_t c = begin; c < end; ++c) {
            Partial& into = c == begin ? out : spare;
            if (c != begin) spare.clear(rows_, ld_);
            for (int64_t t = c * kChunkKeys; t < (c + 1) * kChunkKeys; t += kTileKeys) {
                if (t + kTileKeys > first_key_ && t < end_key_) tile(block, t, into);
            }
            if (c != begin) fold(&out, &spare, rows_, ld_);
        }
    }

private:
    // Query rows, per-node key ranges and, where the block's chunks reach it, the scores of all tree columns.
    void prepare(const Block& block, int64_t key_begin, int64_t key_end) {
        const int g = a_.group;
        rows_ = block.nodes * g;
        q_.resize(static_cast<size_t>(rows_) * ld_);
        scores_.resize(static_cast<size_t>(rows_) * kTileKeys);
        low_.resize(rows_), high_.resize(rows_), dense_high_.resize(rows_);
        first_.resize(block.nodes), length_.resize(block.nodes);
        for (int i = 0; i < block.nodes; ++i) {
            for (int h = 0; h < g; ++h) {
                float* row = q_.data() + static_cast<int64_t>(i * g + h) * ld_;
                const void* src = a_.q + (block.row0 + i) * a_.q_row + (block.head * g + h) * a_.q_head;
                load_rows(&src, a_.q_type, 1, a_.head_dim, row, ld_);
                for (int j = 0; j < a_.head_dim; ++j) row[j] *= block.scale;
            }
        }
        columns_.clear();
        rank_begin_.assign(1, 0);
        first_key_ = INT64_MAX, end_key_ = 0;
        for (int i = 0; i < block.nodes; ++i) {
            int64_t seen = block.column0 + i + 1;
            if (a_.mask) {
                list_columns(block, i);
                seen = static_cast<int64_t>(columns_.size()) - rank_begin_.back();
                rank_begin_.push_back(static_cast<int64_t>(columns_.size()));
            }
            length_[i] = block.prefix + seen;
            first_[i] = a_.window > 0 ? std::max<int64_t>(0, length_[i] - a_.window) : 0;
            first_key_ = std::min(first_key_, first_[i]);
            end_key_ = std::max(end_key_, length_[i]);
        }
        dense_end_ = a_.mask ? block.prefix : end_key_;
        if (a_.mask && key_end > block.prefix && key_begin < end_key_) score_tree(block);
    }

    void list_columns(const Block& block, int node) {
        const int64_t* words = a_.mask + (block.row0 + node) * a_.mask_row;
        for (int64_t w = 0; w < a_.words && w * 64 < block.columns; ++w) {
            uint64_t bits = static_cast<uint64_t>(words[w]);
            if (block.columns - w * 64 < 64) bits &= (uint64_t{1} << (block.columns - w * 64)) - 1;
            for (; bits; bits &= bits - 1) columns_.push_back(static_cast<int32_t>(w * 64 + __builtin_ctzll(bits)));
        }
    }

    // Cache positions [begin, begin + count) of the block's request: K transposed to keys_t_, V to `values`, both after
    // `lead` columns nobody sees (they repeat the first key).
    void load_tile(const Block& block, int64_t begin, int count, float* values, int lead = 0) {
        const void *k[kTileKeys], *v[kTileKeys];
        int64_t page = begin / a_.pages.page_size, slot = begin % a_.pages.page_size;
        for (int i = lead; i < lead + count; ++i) {
            const int64_t id = a_.pages.id(block.b, page);
            k[i] = a_.k.data + id * a_.k.page + slot * a_.k.slot + block.head * a_.k.head;
            v[i] = a_.v.data + id * a_.v.page + slot * a_.v.slot + block.head * a_.v.head;
            if (++slot == a_.pages.page_size) slot = 0, ++page;
        }
        for (int i = 0; i < lead; ++i) k[i] = k[lead], v[i] = v[lead];
        load_rows(k, a_.cache_type, lead + count, a_.head_dim, staging_.data(), ld_);
        transpose_tile(staging_.data(), lead + count, ld_, keys_t_.data());
        load_rows(v, a_.cache_type, lead + count, a_.head_dim, values, ld_);
    }

    // scores [rows, ld] (first `width` columns) = q k^T of the tile in keys_t_.
    void score(float* scores, int ld, int width) {
        for (int r = 0; r < rows_; ++r) std::fill_n(scores + static_cast<int64_t>(r) * ld, width, 0.0f);
        multiply(q_.data(), ld_, keys_t_.data(), kTileKeys, scores, ld, rows_, width, 0, a_.head_dim);
    }

    void score_tree(const Block& block) {
        tree_ld_ = static_cast<int>((block.columns + kTileKeys - 1) / kTileKeys * kTileKeys);
        tree_scores_.resize(static_cast<size_t>(rows_) * tree_ld_);
        tree_values_.resize(static_cast<size_t>(tree_ld_) * ld_);
        for (int64_t c = 0; c < block.columns; c += kTileKeys) {
            const int count = static_cast<int>(std::min<int64_t>(kTileKeys, block.columns - c));
            load_tile(block, block.prefix + c, count, tree_values_.data() + c * ld_);
            score(tree_scores_.data() + c, tree_ld_, (count + kLanes - 1) / kLanes * kLanes);
        }
    }

    // Key positions [t, t + 64): scores, softmax step, weighted values.
    void tile(const Block& block, int64_t t, Partial& into) {
        const int g = a_.group;
        const int from = static_cast<int>(std::clamp<int64_t>(first_key_ - t, 0, kTileKeys));
        const int dense = static_cast<int>(std::clamp<int64_t>(dense_end_ - t, 0, kTileKeys));
        if (from < dense) {  // keys [from, dense) lie at consecutive cache positions
            const int skip = from / kLanes * kLanes;  // vectors of the tile that no row sees
            load_tile(block, t + from, dense - from, values_.data() + static_cast<int64_t>(skip) * ld_, from - skip);
            score(scores_.data() + skip, kTileKeys, (dense - skip + kLanes - 1) / kLanes * kLanes);
        }
        for (int i = 0; i < block.nodes; ++i) {
            const int low = static_cast<int>(std::clamp<int64_t>(first_[i] - t, 0, kTileKeys));
            const int high = static_cast<int>(std::clamp<int64_t>(length_[i] - t, 0, kTileKeys));
            for (int h = 0; h < g; ++h) {
                const int r = i * g + h;
                low_[r] = low, high_[r] = high, dense_high_[r] = std::min(high, dense);
                float* s = scores_.data() + static_cast<int64_t>(r) * kTileKeys;
                for (int c = std::max(low, dense); c < high; ++c) {
                    s[c] = tree_scores_[static_cast<int64_t>(r) * tree_ld_ + column_of(block, i, t + c)];
                }
            }
        }
        softmax_tile(scores_.data(), rows_, low_.data(), high_.data(), a_.softcap, into.maximum, into.sum, into.o, ld_);
        for (int r = 0; r < rows_; r += 6) add_values(r, std::min(6, rows_ - r), into.o);
        if (t + kTileKeys <= dense_end_) return;
        for (int i = 0; i < block.nodes; ++i) {
            const int low = std::max(low_[i * g], dense), count = high_[i * g] - low;
            if (count <= 0) continue;
            const int32_t* columns = columns_.data() + rank_begin_[i] + (t + low - block.prefix);
            for (int r = i * g; r < (i + 1) * g; ++r) {
                multiply_gather(scores_.data() + static_cast<int64_t>(r) * kTileKeys + low, columns, count,
                                tree_values_.data(), ld_, into.o + static_cast<int64_t>(r) * ld_, ld_);
            }
        }
    }

    int32_t column_of(const Block& block, int node, int64_t position) const {
        return columns_[rank_begin_[node] + (position - block.prefix)];
    }

    // o rows [r, r + m) += weights x values over each row's own keys, in key order: what all m rows see at once, the
    // ragged ends one row at a time, so that no row ever multiplies a key it does not see.
    void add_values(int r, int m, float* o) {
        int low = 0, high = kTileKeys;
        for (int i = r; i < r + m; ++i) low = std::max(low, low_[i]), high = std::min(high, dense_high_[i]);
        const auto one = [&](int i, int k0, int k1) {
            if (k0 < k1) multiply(scores_.data() + static_cast<int64_t>(i) * kTileKeys, kTileKeys, values_.data(), ld_,
                                  o + static_cast<int64_t>(i) * ld_, ld_, 1, ld_, k0, k1);
        };
        if (low >= high) {
            for (int i = r; i < r + m; ++i) one(i, low_[i], dense_high_[i]);
            return;
        }
        for (int i = r; i < r + m; ++i) one(i, low_[i], low);
        multiply(scores_.data() + static_cast<int64_t>(r) * kTileKeys, kTileKeys, values_.data(), ld_,
                 o + static_cast<int64_t>(r) * ld_, ld_, m, ld_, low, high);
        for (int i = r; i < r + m; ++i) one(i, high, dense_high_[i]);
    }

    const AttentionArgs& a_;
    const int ld_;
    int rows_ = 0, tree_ld_ = 0;
    int64_t first_key_ = 0, end_key_ = 0, dense_end_ = 0;  // keys any row sees; keys at consecutive cache positions
    std::vector<float> q_, scores_, tree_scores_, tree_values_, staging_, keys_t_, values_;
    std::vector<int32_t> low_, high_, dense_high_, columns_;  // columns_: seen tree columns of every node, ascending
    std::vector<int64_t> first_, length_, rank_begin_;        // per node: first key, end of keys, start in columns_
};

}  // namespace fv
