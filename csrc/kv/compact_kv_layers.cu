// SPDX-License-Identifier: Apache-2.0
// compact_kv_layers on CUDA: compact_kv over lists of per-layer caches, one launch (kv/compact_kernel.cuh). The addresses
// of the layers are kernel arguments. Cost: as compact_kv. Graph-safe. Instantiations: list.
#include <torch/csrc/stable/library.h>

#include "kv/compact_launch.h"

namespace fv {
namespace {

void compact_kv_layers_cuda(
    const std::vector<Tensor> k_caches, const std::vector<Tensor> v_caches, const Tensor path,
    const Tensor num_tokens_out, const Tensor prefix_len, const Tensor page_table, const OptTensor cu_nodes,
    const OptTensor aux, const OptTensor aux_out, const OptTensor cu_out) {
    constexpr const char* kOp = "compact_kv_layers";
    const CompactInputs in{path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out};
    const CompactCall c = check_lists(kOp, k_caches, v_caches, in);
    ListedLayers<kMaxLayers> layers{};
    for (size_t l = 0; l < c.k.layers.size(); ++l) {
        layers.data[0][l] = c.k.layers[l];
        layers.data[1][l] = c.v.layers.empty() ? nullptr : c.v.layers[l];
    }
    compact_rows_cuda(kOp, k_caches[0], c.k, c.v, layers, in, c.sizes);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("compact_kv_layers", TORCH_BOX(&compact_kv_layers_cuda)); }

}  // namespace fv
