// SPDX-License-Identifier: Apache-2.0
// compact_kv on the CPU: parallel over (layer, request); ascending in-place copies (algo/compact.h).
#include "algo/compact.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <limits>
#include <vector>

#include "common/paged.h"

namespace fv {
namespace {

constexpr const char* kOp = "compact_kv";

// [L, pages, page_size, ...] as bytes: one row is one slot of one layer.
struct ByteCache {
    char* data = nullptr;
    int64_t layer = 0, page = 0, slot = 0, row = 0;  // strides and row length in bytes

    ByteCache() = default;
    explicit ByteCache(const Tensor& t, const char* name) {
        const int64_t bytes = static_cast<int64_t>(t.element_size());
        row = bytes;
        for (int64_t d = t.dim() - 1; d >= 3; --d) {
            FV_CHECK(t.size(d) <= 1 || t.stride(d) * bytes == row, kOp, ": ", name,
                     " must be dense in the dimensions past page_size; got ", describe(t),
                     " with other strides. Fix: allocate the cache as [L, pages, page_size, ...].");
            row *= t.size(d);
        }
        data = mptr<char>(t);
        layer = t.stride(0) * bytes;
        page = t.stride(1) * bytes;
        slot = t.stride(2) * bytes;
    }
    char* at(int64_t l, int64_t page_id, int64_t offset) const {
        return data + l * layer + page_id * page + offset * slot;
    }
};

void check_cache(const Tensor& t, const char* name, const Tensor& k_cache) {
    FV_CHECK(t.dim() >= 3 && t.size(0) == k_cache.size(0) && t.size(1) == k_cache.size(1) &&
                 t.size(2) == k_cache.size(2) && t.size(2) >= 1, kOp, ": ", name,
             " must be [layers, pages, page_size, ...] like k_cache; got ", describe(t),
             ". Fix: pass the whole cache; give a single layer as cache[None].");
    FV_CHECK(t.is_cpu() == k_cache.is_cpu(), kOp, ": ", name, " must be on the device of k_cache; got ", describe(t),
             ". Fix: move it with .to(device).");
}

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
    std::memset(dst + next * row, 0, (aux_out.size(0) - next) * row);
}

void compact_kv_cpu(Tensor k_cache, const std::optional<Tensor> v_cache, const Tensor path, const Tensor num_tokens_out,
                    const Tensor prefix_len, const Tensor page_table, const std::optional<Tensor> cu_nodes,
                    const std::optional<Tensor> aux, const std::optional<Tensor> aux_out,
                    const std::optional<Tensor> cu_out) {
    check_cache(k_cache, "k_cache", k_cache);
    if (v_cache) check_cache(*v_cache, "v_cache", k_cache);
    check_tensor(kOp, "path", path, {ScalarType::Int}, {kAny, kAny}, k_cache);
    const int64_t requests = path.size(0), depth = path.size(1);
    check_tensor(kOp, "num_tokens_out", num_tokens_out, {ScalarType::Int}, {requests}, k_cache);
    check_tensor(kOp, "prefix_len", prefix_len, {ScalarType::Int}, {requests}, k_cache);
    check_tensor(kOp, "page_table", page_table, {ScalarType::Int}, {requests, kAny}, k_cache, true);
    check_optional(kOp, "cu_nodes", cu_nodes, {ScalarType::Int}, {requests + 1}, k_cache);
    check_optional(kOp, "cu_out", cu_out, {ScalarType::Int}, {requests + 1}, k_cache);
    FV_CHECK(!aux == !aux_out, kOp, ": aux and aux_out must be given together; got only ", aux ? "aux" : "aux_out",
             ". Fix: pass both or neither.");
    FV_CHECK(!aux || cu_nodes, kOp, ": cu_nodes must be given with aux; got None. Fix: pass the rows of each request.");
    int64_t rows = std::numeric_limits<int32_t>::max();
    if (aux) {
        check_tensor(kOp, "aux", *aux, {aux->scalar_type()}, {kAny, kAny}, k_cache, true);
        check_tensor(kOp, "aux_out", *aux_out, {aux->scalar_type()}, {requests * depth, aux->size(1)}, k_cache);
        rows = aux->size(0);
    }
    const int32_t* cu = cptr<int32_t>(cu_nodes);
    const int32_t *paths = cptr<int32_t>(path), *count = cptr<int32_t>(num_tokens_out);
    const int32_t* prefix = cptr<int32_t>(prefix_len);
    const PageTable pages(page_table, k_cache.size(2), k_cache.size(1));
    if (cu) check_cu_nodes(kOp, cu, requests, rows);
    check_prefix_len(kOp, prefix, requests);

    std::vector<int32_t> length(requests), first(requests);
    for (int64_t b = 0; b < requests; ++b) {
        const int64_t nodes = cu ? cu[b + 1] - cu[b] : std::numeric_limits<int32_t>::max();
        const int32_t* p = paths + b * depth;
        length[b] = compact_length(p, count[b], static_cast<int32_t>(depth), nodes);
        first[b] = compact_first_move(p, length[b]);
        if (first[b] < length[b]) {
            pages.check(kOp, b, prefix[b] + first[b], static_cast<int64_t>(prefix[b]) + p[length[b] - 1] + 1);
        }
    }

    const ByteCache caches[2] = {ByteCache(k_cache, "k_cache"),
                                 v_cache ? ByteCache(*v_cache, "v_cache") : ByteCache()};
    const int64_t page_size = pages.page_size;
    torch::stable::parallel_for(0, k_cache.size(0) * requests, 16, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) {
            const int64_t layer = u / requests, b = u % requests;
            for (const ByteCache& cache : caches) {
                if (!cache.data) continue;
                for (int32_t i = first[b]; i < length[b]; ++i) {
                    const int64_t src = prefix[b] + paths[b * depth + i], dst = prefix[b] + i;
                    std::memcpy(cache.at(layer, pages.id(b, dst / page_size), dst % page_size),
                                cache.at(layer, pages.id(b, src / page_size), src % page_size), cache.row);
                }
            }
        }
    });

    if (aux) gather_aux(*aux, *aux_out, paths, depth, cu, length);
    if (cu_out) {
        int32_t* out = mptr<int32_t>(cu_out);
        out[0] = 0;
        for (int64_t b = 0; b < requests; ++b) out[b + 1] = out[b] + length[b];
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("compact_kv", TORCH_BOX(&compact_kv_cpu)); }

}  // namespace fv
