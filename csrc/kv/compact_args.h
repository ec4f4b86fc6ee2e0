// SPDX-License-Identifier: Apache-2.0
// Arguments of compact_kv and compact_kv_layers, checked and brought to one form for the CPU and CUDA versions.
#pragma once
#include <limits>
#include <vector>

#include "common/paged.h"

namespace fv {

constexpr int kMaxLayers = 128;  // of compact_kv_layers: their addresses travel as kernel arguments

// K or V of all layers as bytes; a row is one slot of one layer. Either a slab (`layer` bytes apart) or a list.
struct RowCache {
    char* data = nullptr;                       // null: absent
    int64_t layer = 0, page = 0, slot = 0, row = 0;  // strides and row length in bytes
    std::vector<char*> layers;                  // list: address of each layer; empty for a slab
    char* at(int64_t l) const { return layers.empty() ? data + l * layer : layers[static_cast<size_t>(l)]; }
};

struct CompactSizes {
    int64_t layers, pages, page_size, requests, depth;
    int64_t aux_rows, aux_bytes;  // rows of aux (INT32_MAX without), bytes of one
};

// `first` counts the dimensions before [pages, page_size, ...]: 1 for a slab, 0 for one layer of a list.
inline RowCache row_cache(const char* op, const char* name, const Tensor& t, int64_t first) {
    RowCache c;
    const int64_t bytes = static_cast<int64_t>(t.element_size());
    c.row = bytes;
    for (int64_t d = t.dim() - 1; d >= first + 2; --d) {
        FV_CHECK(t.size(d) <= 1 || t.stride(d) * bytes == c.row, op, ": ", name,
                 " must be dense in the dimensions past page_size; got ", describe(t),
                 " with other strides. Fix: allocate the cache as [", first ? "L, " : "", "pages, page_size, ...].");
        c.row *= t.size(d);
    }
    check_own_memory(op, name, t);
    c.data = mptr<char>(t);
    c.layer = first ? t.stride(0) * bytes : 0;
    c.page = t.stride(first) * bytes;
    c.slot = t.stride(first + 1) * bytes;
    return c;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
    return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

inline void check_slab(const char* op, const Tensor& t, const char* name, const Tensor& k_cache) {
    FV_CHECK(t.dim() >= 3 && t.size(0) == k_cache.size(0) && t.size(1) == k_cache.size(1) &&
                 t.size(2) == k_cache.size(2) && t.size(2) >= 1, op, ": ", name,
             " must be [layers, pages, page_size, ...] like k_cache; got ", describe(t),
             ". Fix: pass the whole cache; give a single layer as cache[None].");
    FV_CHECK(same_device(t, k_cache), op, ": ", name, " must be on the device of k_cache; got ", describe(t),
             ". Fix: move it with .to(device).");
}

// A list of layers, all with the shape (past page_size: its own), dtype, strides and device of the first.
inline RowCache check_layers(const char* op, const char* name, const std::vector<Tensor>& list, const Tensor& first_k) {
    const Tensor& head = list[0];
    FV_CHECK(head.dim() >= 2 && head.size(0) == first_k.size(0) && head.size(1) == first_k.size(1) && head.size(1) >= 1,
             op, ": ", name, " must hold layers [pages, page_size, ...] like those of k_caches; got ", describe(head),
             ". Fix: pass one tensor per layer.");
    FV_CHECK(same_device(head, first_k), op, ": ", name, " must be on the device of k_caches; got ", describe(head),
             ". Fix: move it with .to(device).");
    RowCache c = row_cache(op, name, head, 0);
    for (size_t l = 0; l < list.size(); ++l) {
        const Tensor& t = list[l];
        bool same = t.dim() == head.dim() && t.scalar_type() == head.scalar_type() && same_device(t, head);
        for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == head.size(d) && t.stride(d) == head.stride(d);
        FV_CHECK(same, op, ": ", name, " must hold layers of one shape, dtype, strides and device; got ", describe(head),
                 " and at layer ", l, " ", describe(t), ". Fix: allocate all layers alike.");
        c.layers.push_back(mptr<char>(t));
    }
    return c;
}

// What both ops share: paths, page table, aux. `like`: the first K tensor.
inline CompactSizes check_compact(
    const char* op, const Tensor& like, int64_t layers, int64_t pages, int64_t page_size, const Tensor& path,
    const Tensor& num_tokens_out, const Tensor& prefix_len, const Tensor& page_table, const OptTensor& cu_nodes,
    const OptTensor& aux, const OptTensor& aux_out, const OptTensor& cu_out) {
    check_tensor(op, "path", path, {ScalarType::Int}, {kAny, kAny}, like);
    const int64_t requests = path.size(0), depth = path.size(1);
    check_tensor(op, "num_tokens_out", num_tokens_out, {ScalarType::Int}, {requests}, like);
    check_tensor(op, "prefix_len", prefix_len, {ScalarType::Int}, {requests}, like);
    check_tensor(op, "page_table", page_table, {ScalarType::Int}, {requests, kAny}, like, true);
    check_optional(op, "cu_nodes", cu_nodes, {ScalarType::Int}, {requests + 1}, like);
    check_optional(op, "cu_out", cu_out, {ScalarType::Int}, {requests + 1}, like);
    FV_CHECK(!aux == !aux_out, op, ": aux and aux_out must be given together; got only ", aux ? "aux" : "aux_out",
             ". Fix: pass both or neither.");
    FV_CHECK(!aux || cu_nodes, op, ": cu_nodes must be given with aux; got None. Fix: pass the rows of each request.");
    CompactSizes s{layers, pages, page_size, requests, depth, std::numeric_limits<int32_t>::max(), 0};
    if (aux) {
        check_tensor(op, "aux", *aux, {aux->scalar_type()}, {kAny, kAny}, like, true);
        check_tensor(op, "aux_out", *aux_out, {aux->scalar_type()}, {requests * depth, aux->size(1)}, like);
        s.aux_rows = aux->size(0);
        s.aux_bytes = aux->size(1) * static_cast<int64_t>(aux->element_size());
    }
    return s;
}

inline void check_layer_counts(const char* op, const std::vector<Tensor>& k, const std::vector<Tensor>& v) {
    FV_CHECK(!k.empty() && k.size() <= kMaxLayers, op, ": k_caches must be 1..", kMaxLayers, " layers; got ", k.size(),
             ". Fix: pass one tensor per layer, or call once per ", kMaxLayers, " layers.");
    FV_CHECK(v.empty() || v.size() == k.size(), op, ": v_caches must be as many layers as k_caches, or none; got ",
             v.size(), " beside ", k.size(), ". Fix: pass an empty list for latent caches.");
}

}  // namespace fv
