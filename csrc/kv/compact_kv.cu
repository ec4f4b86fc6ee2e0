// SPDX-License-Identifier: Apache-2.0
// compact_kv on CUDA: one launch for all layers, K and V, and the aux rows (kv/compact_kernel.cuh). Bit-equal to
// compact_kv.cpp; values that the CPU refuses (page ids, prefix_len, cu_nodes) leave their rows where they are.
// Cost: every moved row read and written once. Graph-safe. Instantiations: slab.
#include <torch/csrc/stable/library.h>

#include "kv/compact_launch.h"

namespace fv {
namespace {

void compact_kv_cuda(Tensor k_cache, const OptTensor v_cache, const Tensor path, const Tensor num_tokens_out,
                     const Tensor prefix_len, const Tensor page_table, const OptTensor cu_nodes, const OptTensor aux,
                     const OptTensor aux_out, const OptTensor cu_out) {
    constexpr const char* kOp = "compact_kv";
    const CompactInputs in{path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out};
    const CompactCall c = check_slabs(kOp, k_cache, v_cache, in);
    compact_rows_cuda(kOp, k_cache, c.k, c.v, SlabLayers{c.k.data, c.v.data, c.k.layer, c.v.layer}, in, c.sizes);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("compact_kv", TORCH_BOX(&compact_kv_cuda)); }

}  // namespace fv
