// SPDX-License-Identifier: Apache-2.0
// Decisions of CUDA attention, free of floating point: which keys a row sees, how work is cut into equal ranges, and
// what a launch looks like on a device. Same lines on host and device.
//
// Work of a request = units of 64 tokens x row tiles x kv heads, laid on one line: request, kv head, row tile, unit.
// Block i of the grid takes positions [i L, (i + 1) L) of that line, so every block streams the same number of tokens.
// A sequence (request, kv head, row tile) that crosses the end of a range is split there and merged afterwards.
// Where blocks form clusters and sequences are about as long as each other, every sequence gets the same number of whole
// clusters instead, its units dealt evenly, so that most of the merge passes through shared memory.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace fv {

constexpr int kUnitTokens = 64;
constexpr int kMaxSplitBatch = 1024;  // more requests: whole sequences, no split

// n / d for a d >= 1 known beforehand, in four instructions: m = floor(2^32 / d) gives the quotient or one less.
struct Divider {
    uint32_t d, m;
    FV_HD uint32_t quotient(uint32_t n) const {
#ifdef __CUDA_ARCH__
        const uint32_t q = __umulhi(n, m);
#else
        const uint32_t q = static_cast<uint32_t>(static_cast<uint64_t>(n) * m >> 32);
#endif
        return q + (n - q * d >= d ? 1 : 0);
    }
};
inline Divider divider(uint32_t d) { return {d, d == 1 ? ~0u : static_cast<uint32_t>((uint64_t{1} << 32) / d)}; }

// ---- which keys a row sees -----------------------------------------------------------------------------------
FV_HD uint64_t low_bits(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; }

FV_HD int count_bits(uint64_t x) {
#ifdef __CUDA_ARCH__
    return __popcll(x);
#else
    return __builtin_popcountll(x);
#endif
}

struct RowSight {
    const int64_t* mask;   // the row's words; null: every forest column below `columns`
    int64_t words;
    int64_t columns;       // forest columns that exist for the row
    int64_t first_prefix;  // window: cache positions of the prefix from here on
    int64_t drop;          // window: that many of the lowest visible columns are too far away
};

// Bits 64 k .. 64 k + 63 of the row's visible forest columns, the window aside.
FV_HD uint64_t forest_word(const RowSight& s, int64_t k) {
    if (k < 0 || (s.mask && k >= s.words)) return 0;
    const uint64_t word = s.mask ? static_cast<uint64_t>(s.mask[k]) : ~0ull;
    return word & low_bits(s.columns - 64 * k);
}

// `column`: the row's own forest column; `columns`: those of the request. mask null: a chain.
FV_HD RowSight row_sight(const int64_t* mask, int64_t words, int64_t column, int64_t columns, int64_t prefix, int64_t window) {
    RowSight s{mask, words, mask || columns < column + 1 ? columns : column + 1, 0, 0};
    if (window <= 0) return s;
    int64_t seen = s.columns;  // visible columns: the row's depth + 1
    if (mask) {
        seen = 0;
        for (int64_t k = 0; k < words && 64 * k < columns; ++k) seen += count_bits(forest_word(s, k));
    }
    s.first_prefix = prefix + seen - window;
    s.drop = seen - window;
    return s;
}

FV_HD uint64_t window_word(const RowSight& s, int64_t k) {
    uint64_t word = forest_word(s, k);
    if (s.drop <= 0 || k < 0) return word;
    int64_t drop = s.drop;
    for (int64_t j = 0; j < k && drop > 0; ++j) drop -= count_bits(forest_word(s, j));
    for (; drop > 0 && word; --drop) word &= word - 1;
    return word;
}

// Bit j: the row sees cache position start + j.
FV_HD uint64_t visible_positions(const RowSight& s, int64_t prefix, int64_t start) {
    const int64_t column = start - prefix;  // forest column of bit 0
    uint64_t seen = 0;
    if (column > -64) {
        const int64_t k = column >> 6;
        const int shift = static_cast<int>(column & 63);
        for (int i = 0; i < (shift ? 2 : 1); ++i) {
            const uint64_t word = window_word(s, k + i);
            seen |= i == 0 ? word >> shift : word << (64 - shift);
        }
    }
    if (column < 0) seen |= low_bits(-column) & ~low_bits(s.first_prefix - start);
    return seen;
}

// ---- a request's keys ----------------------------------------------------------------------------------------
struct RequestKeys {
    int32_t row0, nodes;      // flat row of its first node, number of nodes
    int32_t prefix, columns;  // cache positions [0, prefix) are committed, [prefix, prefix + columns) is the forest
    int32_t first, end;       // cache positions that any row may see
    int32_t begin;            // first, rounded down to a unit
    int32_t units;            // of kUnitTokens; at least 1 where there are nodes
};

constexpr int64_t kMaxCapacity = INT32_MAX - 2 * kUnitTokens;

// Malformed lengths are clamped: cu_nodes to [0, rows], prefix to what the page table holds. rows < 2^31,
// capacity <= kMaxCapacity.
FV_HD RequestKeys request_keys(int32_t cu0, int32_t cu1, int32_t prefix_len, int64_t rows, int64_t row_base, int64_t capacity,
                               int64_t window, bool chain) {
    RequestKeys r{};
    if (cu0 < 0 || cu1 <= cu0 || cu1 > rows) return r;
    r.row0 = cu0;
    r.nodes = cu1 - cu0;
    const int64_t prefix = prefix_len < 0 ? 0 : prefix_len > capacity ? capacity : prefix_len;
    const int64_t end = prefix + row_base + r.nodes < capacity ? prefix + row_base + r.nodes : capacity;
    r.prefix = static_cast<int32_t>(prefix);
    r.end = static_cast<int32_t>(end);
    r.columns = static_cast<int32_t>(end - prefix);
    if (window > 0) {
        // the deepest look back is that of the shallowest row: depth >= row_base in a chain, >= -1 under a mask
        int64_t first = prefix + (chain ? row_base + 1 : 0) - window;
        first = first < end ? first : end;
        r.first = first > 0 ? static_cast<int32_t>(first) : 0;
    }
    r.begin = r.first / kUnitTokens * kUnitTokens;
    const int32_t units = (r.end - r.begin + kUnitTokens - 1) / kUnitTokens;
    r.units = units > 1 ? units : 1;
    return r;
}

// ---- exact mode: a row as a decoding row of its own ------------------------------------------------------------
// Its keys are the prefix, then the forest columns that it sees, in order: key position prefix + r is column
// nth_column(sight, r). They are taken in chunks of kExactChunk positions from 0, folded in order, so that neither the
// batch nor the tree decides about a bit of the row.
constexpr int kExactChunk = 1024;

// The r-th visible forest column (r from 0); -1: fewer are visible.
FV_HD int64_t nth_column(const RowSight& s, int64_t r) {
    if (!s.mask) return r < s.columns ? r : -1;
    for (int64_t k = 0; k < s.words && 64 * k < s.columns; ++k) {
        uint64_t word = forest_word(s, k);
        const int count = count_bits(word);
        if (r < count) {
            for (; r > 0; --r) word &= word - 1;
            return 64 * k + count_bits((word & (0 - word)) - 1);
        }
        r -= count;
    }
    return -1;
}

// `request`: of the row's request; `sight`: of the row, without a window; `row`: flat.
FV_HD RequestKeys row_keys(const RequestKeys& request, const RowSight& sight, int32_t row, int64_t window) {
    RequestKeys r{};
    int64_t seen = sight.columns;
    if (sight.mask) {
        seen = 0;
        for (int64_t k = 0; k < sight.words && 64 * k < sight.columns; ++k) seen += count_bits(forest_word(sight, k));
    }
    const int64_t end = request.prefix + seen, first = window > 0 && end > window ? end - window : 0;
    r.row0 = row;
    r.nodes = 1;
    r.prefix = request.prefix;
    r.columns = static_cast<int32_t>(seen);
    r.end = static_cast<int32_t>(end);
    r.first = static_cast<int32_t>(first);
    r.begin = r.first / kUnitTokens * kUnitTokens;
    r.units = 1;
    return r;
}
FV_HD int64_t exact_chunks(int64_t positions) { return positions > 0 ? (positions + kExactChunk - 1) / kExactChunk : 1; }

// tile_rows a power of two; nodes x group < 2^31.
FV_HD int32_t row_tiles(int64_t nodes, int64_t group, int32_t tile_rows) {
    return static_cast<int32_t>(static_cast<uint32_t>(nodes * group + tile_rows - 1) / static_cast<uint32_t>(tile_rows));
}

// Positions per block: all of `total` in at most `blocks` equal ranges, none shorter than `least`.
FV_HD int32_t range_length(int32_t total, int32_t blocks, int32_t least) {
    const int32_t length = static_cast<int32_t>((static_cast<uint32_t>(total) + blocks - 1) / static_cast<uint32_t>(blocks));
    return length > least ? length : least;
}

// How the line is cut: ranges of `length`; pad > 1: every sequence starts with a range, its units rounded up to `pad`.
// per > 0: every sequence has `per` blocks, whole clusters, instead.
struct Cut {
    int32_t length, pad, per;
};
// Up to as many units per block, one cluster takes a sequence alone: fewer where a piece of it is dear (least > 1, latent rows).
constexpr int kAloneUnits = 5, kAloneUnitsOfDear = 3;
constexpr int kClusterUnits = 2;  // fewest per block where several do

// `work`: units x row tiles x kv heads of all requests. Sequences that start with a range need no second piece in a block;
// taken where that makes the ranges at most an eighth longer.
FV_HD Cut cut_line(int32_t work, int32_t sequences, int32_t longest, int32_t blocks, int32_t least, int32_t cluster = 1) {
    const int32_t length = range_length(work, blocks, least);
    if (cluster > 1 && sequences > 0 && sequences <= blocks / cluster) {
        const int32_t most = static_cast<int32_t>(static_cast<uint32_t>(blocks) / static_cast<uint32_t>(sequences * cluster));
        const int32_t alone = least > 1 ? kAloneUnitsOfDear : kAloneUnits;
        const int32_t want = longest <= alone * cluster ? 1 : (longest + kClusterUnits * cluster - 1) / (kClusterUnits * cluster);
        const int32_t per = cluster * (want < most ? want : most);
        if (want == 1 || (longest + per - 1) / per <= length + length / 8 + 1) return {1, 1, per};
    }
    if (sequences > 0 && sequences <= blocks) {
        const int32_t aligned = range_length(longest, static_cast<int32_t>(static_cast<uint32_t>(blocks) / static_cast<uint32_t>(sequences)), least);
        if (aligned <= length + length / 8 + 1) return {aligned, aligned, 0};
    }
    return {length, 1, 0};
}
FV_HD int32_t padded_units(int32_t units, int32_t pad) {
    return pad == 1 ? units : static_cast<int32_t>((static_cast<uint32_t>(units) + pad - 1) / static_cast<uint32_t>(pad)) * pad;
}

// The units that block `i` of the `per` of a sequence takes: the first ones have one more.
struct UnitRange {
    int32_t begin, end;
};
FV_HD UnitRange dealt_units(int32_t units, int32_t per, int32_t i) {
    const int32_t each = static_cast<int32_t>(static_cast<uint32_t>(units) / static_cast<uint32_t>(per)), more = units - each * per;
    const int32_t begin = i * each + (i < more ? i : more);
    return {begin, begin + each + (i < more ? 1 : 0)};
}

// The pieces of the sequence [start, end) of the line: block `first` .. first + count - 1 hold one each.
struct Pieces {
    int32_t first, count;
};
FV_HD Pieces pieces_of(int32_t start, int32_t end, int32_t length) {
    const uint32_t first = static_cast<uint32_t>(start) / length, last = static_cast<uint32_t>(end - 1) / length;
    return {static_cast<int32_t>(first), static_cast<int32_t>(last - first) + 1};
}
// Where block `block` keeps its piece of the sequence that starts at `start`: a range holds at most two pieces of split
// sequences, one that goes on from the block before (slot 2 i) and one that goes on to the next (slot 2 i + 1).
FV_HD int32_t piece_slot(int32_t block, int32_t start, int32_t length) {
    return 2 * block + (start > static_cast<int64_t>(block) * length ? 1 : 0);
}

// ---- the launch ----------------------------------------------------------------------------------------------
struct AttentionLaunch {
    int wgmma;            // 1: tree_attention_sm90.cuh
    int threads;          // of a block
    int tile_rows;        // rows (node x query head of the group) that share one pass over the KV
    int stages;           // tiles of the cp.async ring
    int blocks;           // persistent
    int least_units;      // of kUnitTokens per block
    int cluster;          // blocks that merge through shared memory; 1: none
    int64_t smem;         // dynamic shared memory, bytes
};

constexpr int kBlockWords = 384;       // bytes of every block for its place in the work (BlockWords)
constexpr int kSystemSmem = 1024;      // what the system keeps of every block's shared memory

constexpr int kMaxStages = 6;

// Whether blocks form clusters: only where the page tables hold so few positions that the merge is most of a launch. Of longer
// sequences a grid of clusters reads more slowly: a GPU takes fewer blocks in clusters than alone. One or two requests may be longer.
constexpr int64_t kClusterPositions = 2048, kClusterPositionsOfFew = 4096;
FV_HD constexpr bool clusters_pay(int64_t batch, int64_t capacity, int major) {
    return major >= 9 && batch * capacity <= (batch <= 2 ? kClusterPositionsOfFew : kClusterPositions);
}

// Blocks of a cluster, given the sequences of a launch: up to 8, fewer where that leaves clearly fewer blocks idle.
FV_HD constexpr int cluster_blocks(int64_t sequences, int blocks) {
    int best = 1;
    int64_t most = 0;
    for (int cluster = 8; cluster > 1 && sequences > 0; --cluster) {
        const int64_t used = blocks / (sequences * cluster) * cluster * sequences;
        if (16 * used > 17 * most) best = cluster, most = used;
    }
    return best;
}

// Prefix sums of the requests' work, one int each and the total.
FV_HD constexpr int64_t prefix_bytes(int64_t batch) {
    return batch > kMaxSplitBatch ? 0 : ((batch + 1) * 4 + 127) / 128 * 128;
}

FV_HD constexpr int tile_tokens(int64_t head_dim) { return head_dim > 128 ? 32 : 64; }
// Rows per warp; the 4 warps form tile_rows / warp_rows row groups, and those of one group share a tile's tokens.
FV_HD constexpr int warp_rows(int64_t head_dim, int64_t tile_rows) { return head_dim > 128 || tile_rows == 16 ? 16 : 32; }

// The largest tile that is compiled; bf16 has more than the other kinds of cache.
FV_HD constexpr int most_tile_rows(int64_t head_dim, bool bf16) { return head_dim > 128 ? (bf16 ? 64 : 32) : head_dim > 64 || bf16 ? 128 : 64; }

constexpr int kMaxBlocks = 1020;       // a counter each (kCounterBytes)

// Blocks of 128 threads per multiprocessor that a kernel's registers allow: narrow tiles of fp8 are bound by latency.
FV_HD constexpr int most_blocks(int64_t head_dim, int64_t tile_rows, int kv_bytes) {
    return kv_bytes == 1 && tile_rows == 16 && head_dim <= 128 ? 3 : 2;
}
// Fewest stages: two, and room for the 4 warps' results when a block merges them.
FV_HD int least_stages(int64_t head_dim, int64_t tile_rows, int64_t stage_bytes) {
    const int64_t staging = 4 * warp_rows(head_dim, tile_rows) * head_dim * 4;
    const int64_t stages = (staging + stage_bytes - 1) / stage_bytes;
    return static_cast<int>(stages > 2 ? stages : 2);
}

// Tokens of a step of the sm_90a kernel.
FV_HD constexpr int wgmma_tokens(int tile_rows) { return tile_rows == 128 ? 128 : 64; }
// Its shared memory: the f16 copy of an fp8 tile's K, then V, and all of it.
FV_HD constexpr int wgmma_wide_bytes(int tile_rows, int head_dim, int kv_bytes) {
    return kv_bytes == 1 ? wgmma_tokens(tile_rows) * head_dim * 2 : 0;
}
// Blocks per multiprocessor: with fp8 a third one hides the conversion.
FV_HD constexpr int wgmma_blocks(int tile_rows, int kv_bytes) { return tile_rows == 128 ? 1 : kv_bytes == 1 ? 3 : 2; }
FV_HD constexpr int64_t wgmma_smem(int64_t batch, int tile_rows, int head_dim, int kv_bytes, int stages) {
    return tile_rows * (2 * head_dim + wgmma_tokens(tile_rows) / 8) + wgmma_wide_bytes(tile_rows, head_dim, kv_bytes) +
           2 * stages * wgmma_tokens(tile_rows) * head_dim * kv_bytes + prefix_bytes(batch) + kBlockWords;
}
constexpr int kWgmmaFromRows = 33;     // packed rows of a request from which its products pay

// head_dim 64, 128 or 256; kv_bytes per element of the cache: 1 or 2. rows / batch is taken as nodes of a request. sm90: the
// device and the cache can take the sm_90a kernel; clusters: clusters_pay; most_rows: most_tile_rows.
FV_HD AttentionLaunch attention_launch(int64_t rows, int64_t batch, int64_t kv_heads, int64_t group, int64_t head_dim, int kv_bytes,
                                       int sms, int64_t max_smem, bool sm90 = false, bool clusters = false, int most_rows = 128) {
    AttentionLaunch a{};
    const int64_t nodes = batch > 0 ? (rows + batch - 1) / batch : 0;
    const auto cluster = [&] { return clusters ? cluster_blocks(batch * kv_heads * row_tiles(nodes, group, a.tile_rows), a.blocks) : 1; };
    a.least_units = 1;
    if (sm90 && head_dim == 128 && nodes * group >= kWgmmaFromRows) {
        const int tile = nodes * group > 64 ? 128 : 64;
        const int blocks = wgmma_blocks(tile, kv_bytes);
        const int64_t room = (max_smem + kSystemSmem) / blocks - kSystemSmem;
        a.wgmma = 1;
        a.threads = 2 * tile;
        a.tile_rows = tile;
        a.stages = 2;
        while (a.stages < kMaxStages && wgmma_smem(batch, tile, 128, kv_bytes, a.stages + 1) <= room) ++a.stages;
        a.blocks = sms * blocks < kMaxBlocks ? sms * blocks : kMaxBlocks;
        a.cluster = cluster();
        a.smem = wgmma_smem(batch, tile, 128, kv_bytes, a.stages);
        return a;
    }
    a.threads = 128;
    const int64_t stage = 2 * tile_tokens(head_dim) * head_dim * kv_bytes;
    const auto share = [&](int blocks) { return (max_smem + kSystemSmem) / blocks - kSystemSmem; };  // of several blocks
    const auto need = [&](int tile, int stages) { return prefix_bytes(batch) + kBlockWords + tile * 8 + tile * head_dim * 2 + stages * stage; };
    const auto fits = [&](int tile, int64_t room) { return need(tile, least_stages(head_dim, tile, stage)) <= room; };
    int tile = head_dim > 128 ? 32 : 16;
    while (tile < most_rows && (head_dim <= 128 || tile < 64) && tile < nodes * group) {
        const int next = head_dim <= 64 && tile == 16 ? 64 : 2 * tile;
        if (!fits(next, share(1))) break;
        tile = next;
    }
    int blocks = most_blocks(head_dim, tile, kv_bytes);
    while (blocks > 1 && !fits(tile, share(blocks))) --blocks;
    a.tile_rows = tile;
    a.stages = least_stages(head_dim, tile, stage);
    while (a.stages < kMaxStages && need(tile, a.stages + 1) <= share(blocks)) ++a.stages;
    a.blocks = sms * blocks < kMaxBlocks ? sms * blocks : kMaxBlocks;
    a.cluster = cluster();
    a.smem = need(tile, a.stages);
    return a;
}

constexpr int64_t kCounterBytes = 4096;  // at the start of every workspace, whatever the shape; must be zero between calls

// Exact mode: a partial result per (row, kv head, tile of its query heads, chunk) of the heads that there are.
struct ExactLaunch {
    AttentionLaunch base;     // tile_rows, stages, smem
    int tiles, tile_heads;    // of a kv head's query heads
    int64_t chunks;           // that the page table can hold
    int64_t groups;           // blocks per (row, kv head, tile) that take chunks in turn
};
FV_HD ExactLaunch exact_launch(int64_t rows, int64_t kv_heads, int64_t group, int64_t head_dim, int kv_bytes, int64_t capacity, int sms,
                               int64_t max_smem) {
    ExactLaunch e{};
    e.base = attention_launch(1, 1, 1, 1, head_dim, kv_bytes, sms, max_smem);
    e.tiles = row_tiles(1, group, e.base.tile_rows);
    e.tile_heads = static_cast<int>(group < e.base.tile_rows ? group : e.base.tile_rows);
    e.chunks = exact_chunks(capacity);
    const int64_t items = rows * kv_heads * e.tiles, groups = (4 * sms + items - 1) / (items > 0 ? items : 1);
    e.groups = groups < 1 ? 1 : groups < e.chunks ? groups : e.chunks;
    return e;
}
FV_HD int64_t exact_partial_floats(int64_t tile_heads, int64_t head_dim) { return (tile_heads * (head_dim + 2) + 3) / 4 * 4; }
FV_HD int64_t exact_workspace(const ExactLaunch& e, int64_t rows, int64_t kv_heads, int64_t head_dim) {
    return 4096 + rows * kv_heads * e.tiles * e.chunks * exact_partial_floats(e.tile_heads, head_dim) * 4;
}

// Bytes of the workspace: a counter per block, then two partial results per block.
FV_HD int64_t partial_floats(int64_t tile_rows, int64_t head_dim) { return tile_rows * (head_dim + 2); }
FV_HD int64_t attention_workspace(const AttentionLaunch& a, int64_t head_dim) {
    return kCounterBytes + 2 * a.blocks * partial_floats(a.tile_rows, head_dim) * 4;
}

}  // namespace fv
