// SPDX-License-Identifier: Apache-2.0
// What compact_kv and compact_kv_layers have in common on each device, once their arguments are checked.
#pragma once
#include "kv/compact_args.h"

namespace fv {

struct CompactInputs {
    const Tensor &path, &num_tokens_out, &prefix_len, &page_table;
    const OptTensor &cu_nodes, &aux, &aux_out, &cu_out;
};

void compact_rows_cpu(const char* op, const RowCache& k, const RowCache& v, const CompactInputs& in, const CompactSizes& s);

}  // namespace fv
