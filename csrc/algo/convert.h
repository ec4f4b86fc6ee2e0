// SPDX-License-Identifier: Apache-2.0
// Bits of float16 and bfloat16 -> float32: exact, branch-free, whatever the denormal mode of the thread.
#pragma once
#include <cstdint>

#include "algo/numeric.h"

namespace fv {

FV_HD float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

FV_HD float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
    // exponent bias 15 -> 127; inf and NaN keep their payload
    const uint32_t normal = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);
    const uint32_t subnormal = float_to_bits(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
    return bits_to_float(sign | (rest < 0x400u ? subnormal : normal));
}

FV_HD bool is_finite(float x) { return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace fv
