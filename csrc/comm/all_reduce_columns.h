// SPDX-License-Identifier: Apache-2.0
// What all_reduce_columns checks, the same on every device.
#pragma once
#include "comm/comm_args.h"

namespace fv {

struct ColumnsShape {
    int64_t pieces, rows, width;
};

// x [pieces, rows, width] ([world, ...] stacked) -> out [rows, pieces * width] (virtual ranks: [world, ...]); rows of a piece are
// whole 16-byte vectors.
inline ColumnsShape check_columns_arguments(const char* op, const fv_comm& c, const Tensor& x, const Tensor& out, const OptTensor& ready) {
    check_reduce_input(op, c, x);
    const int64_t lead = stacked(c) ? 1 : 0;
    FV_CHECK(x.dim() == 3 + lead, op, ": x must be ", lead ? "[world, pieces, rows, width]" : "[pieces, rows, width]", "; got ", describe(x),
             ". Fix: x.view(pieces, rows, width).");
    const ColumnsShape s{x.size(lead), x.size(lead + 1), x.size(lead + 2)};
    FV_CHECK(s.width * static_cast<int64_t>(x.element_size()) % 16 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0, op,
             ": x must have rows of whole 16-byte vectors, aligned to 16 bytes; got ", describe(x), ". Fix: cut the columns into multiples of 8.");
    const std::initializer_list<ScalarType> type = {x.scalar_type()};
    if (c.local_ranks > 1) check_tensor(op, "out", out, type, {c.world, s.rows, s.pieces * s.width}, x);
    else check_tensor(op, "out", out, type, {s.rows, s.pieces * s.width}, x);
    FV_CHECK(reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0, op, ": out must be aligned to 16 bytes; got ", describe(out),
             ". Fix: allocate it with torch.empty.");
    if (c.transport != kGathered) check_apart(op, "out", out, "x", x);
    check_optional(op, "ready", ready, {ScalarType::Int}, {s.pieces}, x);
    return s;
}

}  // namespace fv
