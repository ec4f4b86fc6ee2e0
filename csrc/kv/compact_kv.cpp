// SPDX-License-Identifier: Apache-2.0
// compact_kv on the CPU: parallel over (layer, request); ascending in-place copies (algo/compact.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "algo/compact.h"
#include "kv/compact_rows.h"

namespace fv {
namespace {

void gather_aux(const Tensor& aux, const Tensor& aux_out, const int32_t* path, int64_t depth, const int32_t* cu,
                const std::vector<int32_t>& length) {
    const int64_t bytes = static_cast<int64_t>(aux.element_size()), row = aux.size(1) * bytes;
    const char* src = cptr<char>(aux);
    char* dst = mptr<char>(aux_out);
    int64_t next = 0;
    for (size_t b = 0; b < length.size(); ++b) {
        for (int32_t i = 0; i < length[b]; ++i, ++next) {
            const int64_t from = cu[b] + path[static_cast<int64_t>(b) * depth + i];
            std::memcpy(dst + next * row, src + from * aux.stride(0) * bytes, row);
        }
    }
    const int64_t rest = (aux_out.size(0) - next) * row;
    if (rest > 0) std::memset(dst + next * row, 0, rest);  // an empty tensor has no address
}

}  // namespace

void compact_rows_cpu(const char* op, const RowCache& k, const RowCache& v, const CompactInputs& in, const CompactSizes& s) {
    const int64_t requests = s.requests, depth = s.depth, page_size = s.page_size;
    const int32_t* cu = cptr<int32_t>(in.cu_nodes);
    const int32_t *paths = cptr<int32_t>(in.path), *count = cptr<int32_t>(in.num_tokens_out);
    const int32_t* prefix = cptr<int32_t>(in.prefix_len);
    const PageTable pages(in.page_table, page_size, s.pages);
    if (cu) check_cu_nodes(op, cu, requests, s.aux_rows);
    check_prefix_len(op, prefix, requests);

    std::vector<int32_t> length(requests), first(requests);
    for (int64_t b = 0; b < requests; ++b) {
        const int64_t nodes = cu ? cu[b + 1] - cu[b] : std::numeric_limits<int32_t>::max();
        const int32_t* p = paths + b * depth;
        length[b] = compact_length(p, count[b], static_cast<int32_t>(depth), nodes);
        first[b] = compact_first_move(p, length[b]);
        if (first[b] < length[b]) {
            pages.check(op, b, prefix[b] + first[b], static_cast<int64_t>(prefix[b]) + p[length[b] - 1] + 1);
        }
    }

    torch::stable::parallel_for(0, s.layers * requests, 16, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) {
            const int64_t layer = u / requests, b = u % requests;
            for (const RowCache* cache : {&k, &v}) {
                if (!cache->data) continue;
                char* const base = cache->at(layer);
                const auto row = [&](int64_t position) {
                    return base + pages.id(b, position / page_size) * cache->page + position % page_size * cache->slot;
                };
                for (int32_t i = first[b]; i < length[b]; ++i) {
                    std::memcpy(row(prefix[b] + static_cast<int64_t>(i)),
                                row(prefix[b] + static_cast<int64_t>(paths[b * depth + i])), cache->row);
                }
            }
        }
    });

    if (in.aux) gather_aux(*in.aux, *in.aux_out, paths, depth, cu, length);
    if (in.cu_out) {
        int32_t* out = mptr<int32_t>(in.cu_out);
        out[0] = 0;
        for (int64_t b = 0; b < requests; ++b) out[b + 1] = out[b] + length[b];
    }
}

namespace {

void compact_kv_cpu(Tensor k_cache, const OptTensor v_cache, const Tensor path, const Tensor num_tokens_out,
                    const Tensor prefix_len, const Tensor page_table, const OptTensor cu_nodes, const OptTensor aux,
                    const OptTensor aux_out, const OptTensor cu_out) {
    constexpr const char* kOp = "compact_kv";
    const CompactInputs in{path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out};
    const CompactCall c = check_slabs(kOp, k_cache, v_cache, in);
    compact_rows_cpu(kOp, c.k, c.v, in, c.sizes);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("compact_kv", TORCH_BOX(&compact_kv_cpu)); }

}  // namespace fv
