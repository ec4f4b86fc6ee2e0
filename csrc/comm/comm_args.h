// SPDX-License-Identifier: Apache-2.0
// What every communication op checks about its handle and its tensors. Shared by the CPU and the CUDA ops.
#pragma once
#include "comm/fv_comm.h"
#include "common/check.h"

namespace fv {

inline const fv_comm& comm_of(const char* op, int64_t handle) {
    FV_CHECK(handle != 0, op, ": comm must be the handle of a living Communicator; got 0. Fix: pass communicator.handle ",
             "before it is closed.");
    const fv_comm& c = *reinterpret_cast<const fv_comm*>(handle);
    FV_CHECK(c.magic != 0, op, ": comm must be the handle of a Communicator that is open; got one that was closed. Fix: make a new one.");
    FV_CHECK(c.magic == kCommMagic, op, ": comm must be the handle of a Communicator; got another pointer. Fix: pass ",
             "communicator.handle.");
    FV_CHECK(c.version == kCommVersion && c.bytes == sizeof(fv_comm), op, ": comm must have version ", kCommVersion, " (",
             sizeof(fv_comm), " bytes); got version ", c.version, " (", c.bytes,
             " bytes). Fix: build fastverify._C and fastverify._comm from the same source.");
    return c;
}

inline void check_gathered(const char* op, const fv_comm& c) {
    FV_CHECK(c.transport == kGathered, op, ": comm must be a CPU communicator for CPU tensors; got one of a GPU transport. ",
             "Fix: make the Communicator for the device of x.");
}

// x, contiguous, of a float dtype. Virtual and gathered communicators take [world, ...]: returns the elements of a rank.
inline int64_t check_reduce_input(const char* op, const fv_comm& c, const Tensor& x) {
    const ScalarType t = x.scalar_type();
    FV_CHECK(t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16, op,
             ": x must be float32|float16|bfloat16; got ", describe(x), ". Fix: cast with .to(dtype).");
    FV_CHECK(x.is_contiguous(), op, ": x must be contiguous; got ", describe(x),
             " with other strides. Fix: call .contiguous() once, outside the loop.");
    const bool stacked = c.transport == kGathered || c.local_ranks > 1;
    FV_CHECK(!stacked || (x.dim() >= 1 && x.size(0) == c.world), op, ": x must be [world = ", c.world,
             ", ...] for a virtual communicator; got ", describe(x), ". Fix: stack the inputs of the ranks.");
    FV_CHECK(x.is_cpu() == (c.device < 0) && (c.device < 0 || x.get_device_index() == c.device), op, ": x must be on ",
             c.device < 0 ? "cpu" : "cuda:" + std::to_string(c.device), ", the device of the communicator; got ", describe(x),
             ". Fix: make the Communicator for the device of x.");
    const int64_t n = stacked ? x.numel() / c.world : x.numel();
    const int64_t bytes = n * (t == ScalarType::Float ? 4 : 2);
    FV_CHECK(bytes <= c.max_bytes, op, ": x must have at most ", c.max_bytes, " bytes per rank; got ", bytes,
             ". Fix: make the Communicator with max_bytes >= ", bytes, ".");
    return n;
}

// Two contiguous arguments of which one is written while the other is still read.
inline void check_apart(const char* op, const char* name, const Tensor& t, const char* other, const Tensor& u) {
    FV_CHECK(!share_memory(t, u), op, ": ", name, " must not share memory with ", other, "; got tensors that overlap, ", describe(t),
             " and ", describe(u), ". Fix: give ", name, " memory of its own.");
}

// `t` may also be x itself: a thread reads an element of x before it writes that place. Gathered x is a copy.
inline void check_apart_or_same(const char* op, const fv_comm& c, const char* name, const Tensor& t, const Tensor& x) {
    if (c.transport != kGathered && t.const_data_ptr() != x.const_data_ptr()) check_apart(op, name, t, "x", x);
}

inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& x) {
    bool same = t.dim() == x.dim() && t.scalar_type() == x.scalar_type();
    for (int64_t i = 0; same && i < x.dim(); ++i) same = t.size(i) == x.size(i);
    FV_CHECK(same && t.is_cuda() == x.is_cuda() && t.get_device_index() == x.get_device_index() && t.is_contiguous(), op,
             ": ", name, " must be contiguous and like x, ", describe(x), "; got ", describe(t),
             ". Fix: torch.empty_like(x).");
}

struct NormShape {
    int64_t rows, hidden;
};
inline bool stacked(const fv_comm& c) { return c.transport == kGathered || c.local_ranks > 1; }

// x [rows, H] ([world, rows, H] stacked); residual and out like x, except for gathered x, where they are one rank's.
inline NormShape check_norm_arguments(const char* op, const fv_comm& c, const Tensor& x, const Tensor& residual,
                                      const Tensor& weight, const Tensor& out, const OptTensor& prefetch) {
    check_reduce_input(op, c, x);
    const int64_t lead = stacked(c) ? 1 : 0;
    FV_CHECK(x.dim() == 2 + lead, op, ": x must be ", lead ? "[world, rows, H]" : "[rows, H]", "; got ", describe(x),
             ". Fix: x.view(rows, H).");
    const int64_t rows = x.size(lead), hidden = x.size(lead + 1);
    FV_CHECK(hidden > 0, op, ": x must have rows of at least one element; got ", describe(x), ". Fix: pass hidden states.");
    // every row of a slot begins at a vector of its own
    const int64_t padded = rows * ((hidden * static_cast<int64_t>(x.element_size()) + 15) / 16 * 16), most = slot_stride(c.max_bytes);
    FV_CHECK((c.transport != kPeerMemory && c.transport != kHostMailbox) || padded <= most, op, ": x must have at most ", most,
             " bytes per rank with its rows padded to 16 bytes; got ", padded, ". Fix: make the Communicator with max_bytes >= ", padded, ".");
    const std::initializer_list<ScalarType> type = {x.scalar_type()};
    if (c.local_ranks > 1) {
        check_tensor(op, "residual", residual, type, {c.world, rows, hidden}, x);
        check_tensor(op, "out", out, type, {c.world, rows, hidden}, x);
    } else {
        check_tensor(op, "residual", residual, type, {rows, hidden}, x);
        check_tensor(op, "out", out, type, {rows, hidden}, x);
    }
    check_tensor(op, "weight", weight, type, {hidden}, x);
    check_optional(op, "prefetch", prefetch, {ScalarType::Long}, {kAny, 2}, x);
    check_apart(op, "out", out, "residual", residual);
    check_apart(op, "out", out, "weight", weight);
    check_apart(op, "residual", residual, "weight", weight);
    check_apart_or_same(op, c, "residual", residual, x);
    check_apart_or_same(op, c, "out", out, x);
    return NormShape{rows, hidden};
}

// Any dtype; bytes of one rank's input. out: [world, ...] ([world, world, ...] for virtual ranks).
inline int64_t check_gather_arguments(const char* op, const fv_comm& c, const Tensor& x, const Tensor& out) {
    FV_CHECK(x.is_contiguous() && out.is_contiguous(), op, ": x and out must be contiguous; got ", describe(x), " and ",
             describe(out), ". Fix: call .contiguous() once, outside the loop.");
    FV_CHECK(x.is_cpu() == (c.device < 0) && (c.device < 0 || x.get_device_index() == c.device), op, ": x must be on ",
             c.device < 0 ? "cpu" : "cuda:" + std::to_string(c.device), ", the device of the communicator; got ", describe(x),
             ". Fix: make the Communicator for the device of x.");
    FV_CHECK(!stacked(c) || (x.dim() >= 1 && x.size(0) == c.world), op, ": x must be [world = ", c.world, ", ...] for a virtual ",
             "communicator; got ", describe(x), ". Fix: stack the inputs of the ranks.");
    const int64_t bytes = x.numel() * static_cast<int64_t>(x.element_size());
    const int64_t n = stacked(c) ? bytes / c.world : bytes;
    const int64_t want = c.transport == kGathered ? bytes : bytes * c.world;
    FV_CHECK(n <= kGatherBytes, op, ": x must have at most ", kGatherBytes, " bytes per rank; got ", n,
             ". Fix: use torch.distributed.all_gather for large tensors.");
    FV_CHECK(out.scalar_type() == x.scalar_type() && out.numel() * static_cast<int64_t>(out.element_size()) == want &&
                 out.is_cuda() == x.is_cuda() && out.get_device_index() == x.get_device_index(),
             op, ": out must be ", dtype_name(x.scalar_type()), " of ", want, " bytes like x; got ", describe(out),
             ". Fix: torch.empty(world, *x.shape).");
    const bool in_place = !stacked(c) && static_cast<const char*>(out.const_data_ptr()) + c.rank * n == x.const_data_ptr();
    if (c.transport != kGathered && !in_place) check_apart(op, "out", out, "x", x);
    return n;
}

}  // namespace fv
