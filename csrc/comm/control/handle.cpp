// SPDX-License-Identifier: Apache-2.0
#include "handle.h"

#include <stdexcept>
#include <string>

namespace fv::comm {
namespace {

void require(bool ok, const std::string& text) {
    if (!ok) throw std::invalid_argument("Communicator: " + text);
}

void require_blocks(int64_t blocks) {
    require(blocks >= 1 && blocks <= kEpochWords, "blocks must be in 1..256; got " + std::to_string(blocks) + ". Fix: leave it out.");
}

}  // namespace

Handle::Handle(const HandleConfig& c, const std::vector<RankAddresses>& ranks) : data_(std::make_unique<fv_comm>()) {
    require(c.world >= 1 && c.world <= kMaxRanks, "world must be 1.." + std::to_string(kMaxRanks) + "; got " +
            std::to_string(c.world) + ". Fix: use torch.distributed's NCCL for larger groups.");
    require(c.rank >= 0 && c.rank < c.world, "rank must be in [0, world); got " + std::to_string(c.rank) + ".");
    require(c.local_ranks == 1 || (c.local_ranks == c.world && c.rank == 0),
            "local_ranks must be 1 or, for virtual ranks, world; got " + std::to_string(c.local_ranks) + ".");
    require(c.max_bytes > 0 && (c.transport == kNccl || c.max_bytes <= (int64_t{1} << 30)), "max_bytes must be in 1..2^30; got " +
            std::to_string(c.max_bytes) + ". Fix: pass the bytes of the largest input of one rank.");
    require_blocks(c.blocks);
    require(c.transport == kGathered || c.transport == kNccl || static_cast<int>(ranks.size()) == c.local_ranks,
            "one set of addresses must be given per local rank; got " + std::to_string(ranks.size()) + ".");
    fv_comm& d = *data_;
    d = fv_comm{};
    d.magic = kCommMagic;
    d.version = kCommVersion;
    d.bytes = sizeof(fv_comm);
    d.world = c.world;
    d.rank = c.rank;
    d.local_ranks = c.local_ranks;
    d.transport = c.transport;
    d.device = c.device;
    d.max_bytes = c.max_bytes;
    d.one_shot_bytes = c.one_shot_bytes;
    d.island_bytes = d.fp8_bytes = kNever;
    d.deadline_ns = static_cast<uint64_t>(c.deadline_ns);
    d.blocks = c.blocks;
    for (size_t r = 0; r < ranks.size(); ++r) {
        require(static_cast<int>(ranks[r].slabs.size()) == c.world, "slabs must hold one address per rank; got " +
                std::to_string(ranks[r].slabs.size()) + ".");
        for (int p = 0; p < c.world; ++p) d.ranks[r].slabs[p] = reinterpret_cast<uint8_t*>(ranks[r].slabs[static_cast<size_t>(p)]);
        d.ranks[r].state = reinterpret_cast<uint32_t*>(ranks[r].state);
        d.ranks[r].status = reinterpret_cast<uint32_t*>(ranks[r].status);
        d.ranks[r].hooks = reinterpret_cast<uint32_t*>(ranks[r].hooks);
        const auto apart = [&](uint64_t RankAddresses::* of) { return ranks[r].*of - ranks[0].*of == r * (ranks[1].*of - ranks[0].*of); };
        require(r == 0 || (ranks[r].slabs == ranks[0].slabs && apart(&RankAddresses::state) && apart(&RankAddresses::status) &&
                           apart(&RankAddresses::hooks)),
                "virtual ranks must share the slabs and lie at equal distances; got others.");
    }
}

void Handle::set_blocks(int32_t blocks) {
    require_blocks(blocks);
    data_->blocks = blocks;
}

}  // namespace fv::comm
