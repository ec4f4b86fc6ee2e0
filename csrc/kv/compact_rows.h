// SPDX-License-Identifier: Apache-2.0
// What compact_kv and compact_kv_layers have in common on each device, once their arguments are checked.
#pragma once
#include <utility>

#include "kv/compact_args.h"

namespace fv {

struct CompactInputs {
    const Tensor &path, &num_tokens_out, &prefix_len, &page_table;
    const OptTensor &cu_nodes, &aux, &aux_out, &cu_out;
};

struct CompactCall {
    RowCache k, v;  // v: empty where there is none
    CompactSizes sizes;
};

inline CompactSizes check_compact(const char* op, const Tensor& like, int64_t layers, int64_t pages, int64_t page_size,
                                  const CompactInputs& in) {
    return check_compact(op, like, layers, pages, page_size, in.path, in.num_tokens_out, in.prefix_len, in.page_table,
                         in.cu_nodes, in.aux, in.aux_out, in.cu_out);
}

// compact_kv: one tensor for all layers
inline CompactCall check_slabs(const char* op, const Tensor& k_cache, const OptTensor& v_cache, const CompactInputs& in) {
    check_slab(op, k_cache, "k_cache", k_cache);
    if (v_cache) check_slab(op, *v_cache, "v_cache", k_cache);
    const CompactSizes sizes = check_compact(op, k_cache, k_cache.size(0), k_cache.size(1), k_cache.size(2), in);
    return {row_cache(op, "k_cache", k_cache, 1), v_cache ? row_cache(op, "v_cache", *v_cache, 1) : RowCache(), sizes};
}

// compact_kv_layers: a tensor per layer
inline CompactCall check_lists(const char* op, const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                               const CompactInputs& in) {
    check_layer_counts(op, k_caches, v_caches);
    const Tensor& like = k_caches[0];
    RowCache k = check_layers(op, "k_caches", k_caches, like);
    RowCache v = v_caches.empty() ? RowCache() : check_layers(op, "v_caches", v_caches, like);
    const CompactSizes sizes =
        check_compact(op, like, static_cast<int64_t>(k_caches.size()), like.size(0), like.size(1), in);
    return {std::move(k), std::move(v), sizes};
}

void compact_rows_cpu(const char* op, const RowCache& k, const RowCache& v, const CompactInputs& in, const CompactSizes& s);

}  // namespace fv
