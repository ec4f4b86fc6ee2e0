// SPDX-License-Identifier: Apache-2.0
// Calls of the NCCL that the control plane loaded. One communicator may serve captured and eager calls in turn.
#pragma once
#include <chrono>

#include "comm/comm_args.h"

namespace fv {

inline int nccl_type(ScalarType t) {  // ncclDataType_t
    constexpr int kHalf = 6, kFloat = 7, kBFloat16 = 9;
    return t == ScalarType::Float ? kFloat : t == ScalarType::Half ? kHalf : kBFloat16;
}

// A communicator opened with blocking=0 may answer "in progress": the call is over when that changes.
inline void check_nccl(const char* op, const fv_comm& c, int result) {
    constexpr int kInProgress = 7;
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(c.deadline_ns);
    while (result == kInProgress && std::chrono::steady_clock::now() < end) {
        if (c.nccl.get_async_error(c.nccl.comm, &result) != 0) break;
    }
    FV_CHECK(result == 0, op, ": the NCCL call must succeed; got error ", result, " (", c.nccl.error_string(result),
             "). Fix: set NCCL_DEBUG=WARN, look at the other ranks, then make the Communicator again.");
}

inline void nccl_all_reduce(const char* op, const fv_comm& c, const void* in, void* out, int64_t n, ScalarType type, void* stream) {
    constexpr int kSum = 0;
    check_nccl(op, c, c.nccl.all_reduce(in, out, static_cast<size_t>(n), nccl_type(type), kSum, c.nccl.comm, stream));
}

inline void nccl_all_gather_bytes(const char* op, const fv_comm& c, const void* in, void* out, int64_t bytes, void* stream) {
    constexpr int kInt8 = 0;
    check_nccl(op, c, c.nccl.all_gather(in, out, static_cast<size_t>(bytes), kInt8, c.nccl.comm, stream));
}

}  // namespace fv
