// SPDX-License-Identifier: Apache-2.0
// Philox-4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11:
// 7 rounds already pass BigCrush; why not 10: docs/decisions.md), and the Gumbel noise made from it.
// Noise of vocabulary id v at absolute position t for a request seed: key = seed, counter = (v / 4, t, stream, 0),
// word v % 4. The same on host and device, for any tree, batch, sharding and launch shape.
#pragma once
#include "algo/numeric.h"

namespace fv {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kStreamTarget = 0;  // verify_tree and coupled drafts
constexpr uint32_t kStreamUser = 1;    // free for callers

struct Philox4 {
    uint32_t v[4];
};

constexpr uint32_t kPhiloxStepLo = 0x9E3779B9u, kPhiloxStepHi = 0xBB67AE85u;  // of the keys, from round to round

FV_HD void philox_round(uint32_t* c0, uint32_t* c1, uint32_t* c2, uint32_t* c3, uint32_t k0, uint32_t k1) {
    const uint64_t p0 = static_cast<uint64_t>(*c0) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(*c2) * 0xCD9E8D57u;
    *c0 = static_cast<uint32_t>(p1 >> 32) ^ *c1 ^ k0;
    *c2 = static_cast<uint32_t>(p0 >> 32) ^ *c3 ^ k1;
    *c1 = static_cast<uint32_t>(p1);
    *c3 = static_cast<uint32_t>(p0);
}

template <int kRounds = kPhiloxRounds>
FV_HD Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int r = 0; r < kRounds; ++r, k0 += kPhiloxStepLo, k1 += kPhiloxStepHi) philox_round(&c0, &c1, &c2, &c3, k0, k1);
    return Philox4{{c0, c1, c2, c3}};
}

// -log E with E = -log1p(-x), x = (r + 1/2) 2^-32: a standard Gumbel variate, resolved at both ends
// (large noise comes from x -> 0, where E ~ x keeps full relative precision).
FV_HD float gumbel_from_bits(uint32_t r) {
    // x < ~0.29: log1p(-x) by the polynomial around 1; otherwise log(1 - x) with 1 - x = (~r + 1/2) 2^-32.
    const bool small = r < 0x4a000000u;
    const float x = (static_cast<float>(r) + 0.5f) * 2.3283064365386963e-10f;
    const float u = (static_cast<float>(~r) + 0.5f) * 2.3283064365386963e-10f;
    const uint32_t ub = float_to_bits(u);
    const int32_t e = static_cast<int32_t>(ub - 0x3f3504f3u) >> 23;
    const float m = bits_to_float(ub - (static_cast<uint32_t>(e) << 23)) - 1.0f;
    const float exponential = -log_poly(small ? -x : m, small ? 0.0f : static_cast<float>(e));
    return -log_exact(exponential);
}

}  // namespace fv
