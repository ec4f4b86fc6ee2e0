// SPDX-License-Identifier: Apache-2.0
// prepare_tree on the CPU: one request per task. Cost O(R*W + B*log(KV)).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "algo/schedule.h"
#include "algo/tree.h"
#include "tree/tree_args.h"

namespace fv {
namespace {

// Outputs that were not asked for are null.
struct Outputs {
    uint64_t* mask;  // [R, W]
    int64_t words;
    int32_t *depth, *positions;  // [R]
    int64_t* slots;              // [R]
    int32_t *first_child, *next_sibling;  // [R]
};

bool cu_nodes_ok(const int32_t* cu, int64_t batch, int64_t rows) {
    bool ok = cu[0] == 0;
    for (int64_t b = 0; b < batch; ++b) ok = ok && cu[b] <= cu[b + 1];
    return ok && (rows < 0 || cu[batch] <= rows);
}

// Bits and depths of one request's rows [base, base + n); parent == nullptr: a chain. Returns flags.
int32_t write_nodes(
    const int32_t* parent, int64_t base, int64_t n, int64_t prefix, int64_t row_base, const Outputs& out) {
    int32_t flags = 0;
    std::vector<int32_t> depths(parent && (out.depth || out.positions) ? n : 0);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t row = base + i, column = row_base + i;
        int32_t up = parent ? parent[i] : static_cast<int32_t>(i - 1);
        if (!valid_parent(up, i)) {
            flags |= kFlagBadTree;
            up = -1;
        }
        if (!depths.empty()) depths[i] = up < 0 ? 0 : depths[up] + 1;
        const int64_t depth = parent ? (depths.empty() ? 0 : depths[i]) : column;
        if (out.depth) out.depth[row] = static_cast<int32_t>(depth);
        if (out.positions) {
            out.positions[row] = static_cast<int32_t>(prefix + depth);
            if (prefix + depth > INT32_MAX) flags |= kFlagBadTree;
        }
        if (!out.mask) continue;
        uint64_t* words = out.mask + row * out.words;
        const uint64_t* parent_words = up < 0 ? nullptr : out.mask + (base + up) * out.words;
        const bool fits = parent ? write_mask_row(words, parent_words, out.words, column)
                                 : write_chain_row(words, out.words, column);
        if (!fits) flags |= kFlagBadTree;
    }
    return flags;
}

// KV slots of the cache positions [first, first + n) through one row of the page table. Returns flags.
int32_t write_slots(
    const int32_t* pages, int64_t num_pages, int64_t page_size, int64_t first, int64_t n, int64_t* slots) {
    int32_t flags = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = first + i;
        const int64_t page = at >= 0 && at / page_size < num_pages ? pages[at / page_size] : -1;
        slots[i] = page < 0 ? -1 : page * page_size + at % page_size;
        if (page < 0) flags |= kFlagBadTree;
    }
    return flags;
}

// Child links; a chain's are known. `scratch` stands in for the one that was not asked for.
void write_links(const int32_t* parent, int64_t base, int64_t n, const Outputs& out, std::vector<int32_t>& scratch) {
    if (!parent) {
        for (int64_t i = 0; i < n; ++i) {
            if (out.first_child) out.first_child[base + i] = i + 1 < n ? static_cast<int32_t>(i + 1) : -1;
            if (out.next_sibling) out.next_sibling[base + i] = -1;
        }
        return;
    }
    scratch.resize(n);
    link_children(parent, n, out.first_child ? out.first_child + base : scratch.data(),
                  out.next_sibling ? out.next_sibling + base : scratch.data());
}

void fill_padding(const Outputs& out, int64_t from, int64_t rows) {
    if (out.mask) std::fill(out.mask + from * out.words, out.mask + rows * out.words, 0);
    if (out.depth) std::fill(out.depth + from, out.depth + rows, 0);
    if (out.positions) std::fill(out.positions + from, out.positions + rows, 0);
    if (out.slots) std::fill(out.slots + from, out.slots + rows, -1);
    if (out.first_child) std::fill(out.first_child + from, out.first_child + rows, -1);
    if (out.next_sibling) std::fill(out.next_sibling + from, out.next_sibling + rows, -1);
}

void prepare_tree_cpu(
    const OptTensor parents, const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
    const OptTensor mask, const OptTensor depth, const OptTensor positions, const OptTensor slots,
    const OptTensor first_child, const OptTensor next_sibling, const OptTensor schedule, const OptTensor flags,
    int64_t page_size, int64_t row_base) {
    const auto [batch, rows] = check_prepare_tree(
        parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling, schedule,
        flags, page_size, row_base);
    const int32_t *cu = cptr<int32_t>(cu_nodes), *prefix = cptr<int32_t>(prefix_len);
    const int32_t *pages = cptr<int32_t>(page_table), *parent = cptr<int32_t>(parents);
    const int64_t num_pages = page_table.size(1);
    const Outputs out{mptr<uint64_t>(mask), mask ? mask->size(1) : 0, mptr<int32_t>(depth), mptr<int32_t>(positions),
                      mptr<int64_t>(slots), mptr<int32_t>(first_child), mptr<int32_t>(next_sibling)};
    int32_t* flag_out = mptr<int32_t>(flags);
    const bool ok = cu_nodes_ok(cu, batch, rows);

    torch::stable::parallel_for(0, batch, 4, [&](int64_t begin, int64_t end) {
        std::vector<int32_t> scratch;
        for (int64_t b = begin; b < end; ++b) {
            int32_t flag = ok ? 0 : kFlagBadTree;
            if (ok && rows != kAny) {
                const int64_t base = cu[b], n = cu[b + 1] - base;
                const int32_t* p = parent ? parent + base : nullptr;
                flag |= write_nodes(p, base, n, prefix[b], row_base, out);
                if (out.slots) {
                    flag |= write_slots(pages + b * num_pages, num_pages, page_size, prefix[b] + row_base, n,
                                        out.slots + base);
                }
                if (out.first_child || out.next_sibling) write_links(p, base, n, out, scratch);
            }
            if (flag_out) flag_out[b] = flag;
        }
    });
    if (rows != kAny) fill_padding(out, ok ? cu[batch] : 0, rows);
    if (schedule) {
        const auto kv_of = [&](int64_t b) { return ok ? schedule_kv(prefix[b], row_base, cu[b + 1] - cu[b]) : 0; };
        write_schedule(kv_of, batch, kTargetUnits, mptr<int32_t>(*schedule));
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("prepare_tree", TORCH_BOX(&prepare_tree_cpu)); }

}  // namespace fv
