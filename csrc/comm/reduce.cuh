// SPDX-License-Identifier: Apache-2.0
// The sum over ranks of n elements, vector by vector. A kernel offers every vector of its input (in any order), finishes the
// exchange, reduces the vectors that are its own and only then receives the others: an owner never waits for an owner.
// fp32 sums in rank order, rounded once: one-shot and two-shot, all ranks and all runs give the same bits.
#pragma once
#include "comm/protocol.cuh"
#include "comm/wire.cuh"

namespace fv {

// kRanks: at least the number of ranks; little code and few registers where it is small. 2: one-shot only (two hops never pay).
template <class T, int kRanks, bool kHooks>
struct Sum {
    Exchange<kHooks>& exchange;
    Vectors<const T> x;
    int form;
    uint32_t vectors;     // of the input
    int base, parts;      // the ranks that own slices: [base, base + parts)
    uint32_t slice;       // vectors per owner
    uint32_t begin, end;  // this rank's own, clamped

    uint32_t at;          // first vector of every slot

    // `segment`: of equally long ones in one call, which use the slots one behind the other.
    __device__ __forceinline__ Sum(Exchange<kHooks>& e, const T* input, int64_t elements, uint32_t segment = 0)
        : exchange(e), x(input, elements), form(e.args.form), vectors(x.count()) {
        const int world = e.args.world;
        parts = !one_shot() && form == kIslands ? world / 2 : world;
        base = !one_shot() && form == kIslands && e.rank >= parts ? parts : 0;
        slice = one_shot() ? vectors : (vectors + parts - 1) / parts;
        begin = one_shot() ? 0 : least(vectors, (e.rank - base) * slice);
        end = least(vectors, begin + slice);
        at = segment * slice;
    }
    __device__ __forceinline__ bool one_shot() const { return kRanks <= 2 || form == kOneShot; }
    static __device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

    __device__ __forceinline__ bool mine(uint32_t j) const { return one_shot() || (j >= begin && j < end); }
    // The k-th vector in the order of this rank: those of the next owner first, so that ranks do not all send to one.
    __device__ __forceinline__ uint32_t turn(uint32_t k) const {
        if (one_shot()) return k;
        return k < vectors - end ? end + k : k - (vectors - end);
    }
    __device__ __forceinline__ uint4 load(uint32_t j) const { return escape(x.load(j), Wire<T>::kNan); }

    // What peers need of this rank's vector j.
    __device__ __forceinline__ void offer(uint32_t j, uint4 v) const {
        if (exchange.failed) return;
        if (one_shot()) return to_others(0, exchange.args.world, 0, at + j, v);
        if (mine(j)) return;
        const int owner = j / slice;
        exchange.send(base + owner, 0, at + j - owner * slice, v);
    }
    // The sum of vector j, mine(j); `own` is this rank's. Two-shot: also passed on.
    __device__ __forceinline__ uint4 reduce(uint32_t j, uint4 own) {
        const uint32_t i = at + j - begin, members = ((1u << parts) - 1) << base;
        uint4 total = add(members, 0, i, own);
        if (one_shot()) return total;
        if (form == kIslands) {
            const int partner = base == 0 ? exchange.rank + parts : exchange.rank - parts;
            if (!exchange.failed) exchange.send(partner, 0, i, total);
            const uint4 other = exchange.take_one(partner, 0, i, kOtherIsland);
            total = base == 0 ? two(total, other) : two(other, total);
        }
        if (!exchange.failed) to_others(base, parts, 1, i, total);
        return total;
    }
    // The sum of vector j, !mine(j), from its owner.
    __device__ __forceinline__ uint4 receive(uint32_t j) {
        const int owner = j / slice;
        return exchange.take_one(base + owner, 1, at + j - owner * slice);
    }

private:
    __device__ __forceinline__ void to_others(int first, int count, int region, uint32_t i, uint4 v) const {
#pragma unroll 1
        for (int k = 1; k < count; ++k) {  // every rank starts at another peer
            const int peer = exchange.rank + k < first + count ? exchange.rank + k : exchange.rank + k - count;
            exchange.send(peer, region, i, v);
        }
    }
    __device__ __forceinline__ uint4 add(uint32_t members, int region, uint32_t i, uint4 own) {
        uint4 got[kRanks];
        exchange.take(members & ~(1u << exchange.rank), region, i, got);
        const uint4 total = add_ranks<T, kRanks>(members, [&](int r) { return r == exchange.rank ? own : got[r]; });
        return escape(total, Wire<T>::kNan);
    }
    static __device__ __forceinline__ uint4 two(uint4 a, uint4 b) {
        return escape(add_vectors<T>(a, b), Wire<T>::kNan);
    }
};

}  // namespace fv
