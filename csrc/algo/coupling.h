// SPDX-License-Identifier: Apache-2.0
// Coupled drafts: a draft row is ranked by logit / T + the noise that verify_tree will add to the target's row at the same
// position of the same request, so that both tend to choose the same token (docs/algorithm.md). Host and device.
#pragma once
#include "algo/sampling.h"

namespace fv {

constexpr float kMaxSharpness = 64.0f;

// How one draft row is coupled. temperature 0: it is not, and is ranked by its logits (requests that decode greedily).
struct Coupling {
    float temperature = 0.0f, sharpness = 1.0f;
    uint32_t position = 0, seed_lo = 0, seed_hi = 0;
    FV_HD bool noisy() const { return temperature > 0.0f; }
};

// The children of a row of draft level l carry the noise of position prefix_len + l + 1. A temperature out of range counts as
// 0, as it does for verify_tree.
FV_HD Coupling resolve_coupling(float temperature, int64_t seed, int32_t prefix_len, int32_t level, float sharpness) {
    Coupling c;
    c.temperature = temperature > 0.0f && temperature <= kFloatMax ? temperature : 0.0f;
    c.sharpness = c.noisy() ? sharpness : 1.0f;
    c.position = static_cast<uint32_t>(prefix_len) + static_cast<uint32_t>(level) + 1u;
    c.seed_lo = static_cast<uint32_t>(static_cast<uint64_t>(seed));
    c.seed_hi = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    return c;
}

// Random bits of a token: word token % 4 of its group, without an indexed array.
FV_HD uint32_t noise_bits(uint32_t token, const Coupling& c) {
    const Philox4 r = philox4x32(token >> 2, c.position, kStreamTarget, 0, c.seed_lo, c.seed_hi);
    const uint32_t low = token & 1 ? r.v[1] : r.v[0], high = token & 1 ? r.v[3] : r.v[2];
    return token & 2 ? high : low;
}

// x: finite or -inf; token: its id in the target's vocabulary. -inf stays.
FV_HD float coupled_score(float x, uint32_t token, const Coupling& c) {
    return scale_logit(x, c.temperature) + gumbel_from_bits(noise_bits(token, c));
}

}  // namespace fv
