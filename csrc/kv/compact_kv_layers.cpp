// SPDX-License-Identifier: Apache-2.0
// compact_kv_layers on the CPU: compact_kv over lists of per-layer caches.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "kv/compact_rows.h"

namespace fv {
namespace {

void compact_kv_layers_cpu(
    const std::vector<Tensor> k_caches, const std::vector<Tensor> v_caches, const Tensor path,
    const Tensor num_tokens_out, const Tensor prefix_len, const Tensor page_table, const OptTensor cu_nodes,
    const OptTensor aux, const OptTensor aux_out, const OptTensor cu_out) {
    constexpr const char* kOp = "compact_kv_layers";
    const CompactInputs in{path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out};
    const CompactCall c = check_lists(kOp, k_caches, v_caches, in);
    compact_rows_cpu(kOp, c.k, c.v, in, c.sizes);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("compact_kv_layers", TORCH_BOX(&compact_kv_layers_cpu)); }

}  // namespace fv
