// SPDX-License-Identifier: Apache-2.0
// Owns the fv_comm that the ops read. Its address is the int64 they take.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/fv_comm.h"

namespace fv::comm {

struct HandleConfig {
    int world = 1, rank = 0, local_ranks = 1, transport = 0, device = -1, blocks = 1;
    int64_t max_bytes = 0, one_shot_bytes = 0, deadline_ns = 0;
};

// One rank's addresses as integers: slabs[world], state, status, hooks (0: none).
struct RankAddresses {
    std::vector<uint64_t> slabs;
    uint64_t state = 0, status = 0, hooks = 0;
};

class Handle {
public:
    // Throws std::invalid_argument in words.
    Handle(const HandleConfig& config, const std::vector<RankAddresses>& ranks);
    void set_nccl(const NcclCalls& calls) { data_->nccl = calls; }
    uint64_t address() const { return reinterpret_cast<uint64_t>(data_.get()); }
    void set_one_shot_bytes(int64_t bytes) { data_->one_shot_bytes = bytes; }
    void set_island_bytes(int64_t bytes) { data_->island_bytes = bytes; }
    void set_fp8_bytes(int64_t bytes) { data_->fp8_bytes = bytes; }
    void set_blocks(int32_t blocks);
    void set_deadline_ns(int64_t ns) { data_->deadline_ns = static_cast<uint64_t>(ns); }
    void set_forced(int32_t forced) { data_->forced = forced; }
    void close() { data_->magic = 0; }  // later calls are refused in words; the memory stays valid

private:
    std::unique_ptr<fv_comm> data_;
};

}  // namespace fv::comm
