// SPDX-License-Identifier: Apache-2.0
// Bits of float16, bfloat16 and fp8 e4m3 to and from float32, whatever the denormal mode of the thread. To float32 is exact;
// the way back rounds to nearest even, fp8 saturates at 448. NaN stays NaN; its sign and payload are not kept.
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

FV_HD uint16_t float_to_bf16(float x) {
    const uint32_t u = float_to_bits(x);
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

FV_HD uint16_t float_to_half(float x) {
    const uint32_t u = float_to_bits(x), a = u & 0x7fffffffu, sign = u >> 16 & 0x8000u;
    // below 2^-14 the spacing is 2^-24, that of floats in [0.5, 1): an addition rounds
    const uint32_t subnormal = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;  // exponent bias 127 -> 15
    const uint32_t large = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return static_cast<uint16_t>(sign | (a < 0x38800000u ? subnormal : a < 0x47800000u ? normal : large));
}

FV_HD uint8_t float_to_e4m3(float x) {
    const uint32_t u = float_to_bits(x), a = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
    // below 2^-6 the spacing is 2^-9, that of floats in [2^14, 2^15)
    const uint32_t subnormal = float_to_bits(bits_to_float(a) + 16384.0f) - 0x46800000u;
    const uint32_t normal = (a - (120u << 23) + 0x7ffffu + (a >> 20 & 1u)) >> 20;  // exponent bias 127 -> 7
    const uint32_t large = a > 0x7f800000u ? 0x7fu : 0x7eu;
    return static_cast<uint8_t>(sign | (a < 0x3c800000u ? subnormal : a < 0x43e00000u ? normal : large));
}

FV_HD bool is_finite(float x) { return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace fv
