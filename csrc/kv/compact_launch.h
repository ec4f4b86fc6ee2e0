// SPDX-License-Identifier: Apache-2.0
// Launch of the compaction kernel, shared by compact_kv.cu and compact_kv_layers.cu.
#pragma once
#include "common/launch.h"
#include "kv/compact_kernel.cuh"
#include "kv/compact_rows.h"

namespace fv {

// The widest of 16, 4 and 1 bytes that divides every one of `bits` (addresses, strides and lengths or-ed together).
inline int copy_unit(int64_t bits) { return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1; }

inline int64_t cache_bits(const RowCache& c) {
    int64_t bits = reinterpret_cast<int64_t>(c.data) | c.layer | c.page | c.slot | c.row;
    for (const char* layer : c.layers) bits |= reinterpret_cast<int64_t>(layer);
    return bits;
}

template <class Layers>
void compact_rows_cuda(const char* op, const Tensor& like, const RowCache& k, const RowCache& v, const Layers& layers,
                       const CompactInputs& in, const CompactSizes& s) {
    const Launch launch(op, like);
    if (s.requests == 0) {
        if (in.cu_out) launch.fill(in.cu_out->mutable_data_ptr(), 0, sizeof(int32_t));
        return;
    }
    CompactArgs a{};
    a.path = cptr<int32_t>(in.path);
    a.num_tokens_out = cptr<int32_t>(in.num_tokens_out);
    a.prefix_len = cptr<int32_t>(in.prefix_len);
    a.page_table = cptr<int32_t>(in.page_table);
    a.cu_nodes = cptr<int32_t>(in.cu_nodes);
    a.cu_out = mptr<int32_t>(in.cu_out);
    a.table_stride = in.page_table.stride(0);
    a.table_columns = in.page_table.size(1);
    a.page_size = static_cast<uint32_t>(s.page_size < UINT32_MAX ? s.page_size : UINT32_MAX);
    a.pages = s.pages;
    a.requests = s.requests;
    a.depth = static_cast<int32_t>(s.depth);
    a.layers = static_cast<int32_t>(s.layers);

    a.unit = copy_unit(cache_bits(k) | (v.data ? cache_bits(v) : 0));
    int64_t columns = 0, index = 0;
    for (const RowCache* c : {&k, &v}) {
        const int64_t own = c->data ? c->row / a.unit : 0;
        a.cache[index++] = CacheLayout{c->page, c->slot, static_cast<uint32_t>(own)};
        columns += own * s.layers;
    }
    FV_CHECK(columns <= INT32_MAX, op, ": the cache must hold less than 2 GiB per token; got ", columns, " units of ",
             a.unit, " bytes. Fix: pass fewer layers per call.");
    a.move_blocks = s.depth > 0 ? static_cast<uint32_t>(ceil_div(columns, kCompactThreads)) : 0;
    a.aux_blocks = in.cu_out ? 1 : 0;
    if (in.aux) {
        const int64_t item = static_cast<int64_t>(in.aux->element_size());
        a.aux = cptr<char>(in.aux);
        a.aux_out = mptr<char>(in.aux_out);
        a.aux_rows = s.aux_rows;
        a.aux_stride = in.aux->stride(0) * item;
        a.aux_bytes = s.aux_bytes;
        a.aux_unit = copy_unit(reinterpret_cast<int64_t>(a.aux) | reinterpret_cast<int64_t>(a.aux_out) | a.aux_stride | a.aux_bytes);
        const int blocks = ceil_div(a.aux_bytes / a.aux_unit, kCompactThreads);
        a.aux_blocks = static_cast<uint32_t>(blocks < 1 ? 1 : blocks > 64 ? 64 : blocks);
    }
    const int64_t blocks = s.requests * (static_cast<int64_t>(a.move_blocks) + a.aux_blocks);
    if (blocks == 0) return;
    FV_CHECK(blocks <= INT32_MAX, op, ": the batch must fit one grid; got ", blocks, " blocks. Fix: pass fewer requests.");
    launch.run(compact_kernel<Layers>, dim3(static_cast<unsigned>(blocks)), dim3(kCompactThreads), 0, a, layers);
}

}  // namespace fv
