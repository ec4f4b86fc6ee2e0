// SPDX-License-Identifier: Apache-2.0
// Rows of bf16, fp16, fp8 e4m3 and fp32 to and from fp32 on the CPU. The loops are branch-free, so they vectorise
// inside FV_CLONES functions; conversions to a narrow type round to nearest even, fp8 saturates at 448.
#pragma once
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>

#include "algo/convert.h"
#include "algo/numeric.h"

namespace fv {

using ScalarType = torch::headeronly::ScalarType;

FV_HD float e4m3_to_float(uint8_t u) {
    const uint32_t magnitude = u & 0x7fu;
    const float scaled = bits_to_float(magnitude << 20) * 0x1p120f;  // exponent bias 7 -> 127
    const uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : float_to_bits(scaled);
    return bits_to_float(bits | static_cast<uint32_t>(u & 0x80u) << 24);
}

// n elements at src (any alignment of its type) -> fp32.
FV_HD void load_row(const void* src, ScalarType type, float* __restrict dst, int n) {
    if (type == ScalarType::Float) {
        std::memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
    } else if (type == ScalarType::BFloat16) {
        const auto* s = static_cast<const uint16_t*>(src);
        for (int i = 0; i < n; ++i) dst[i] = bf16_to_float(s[i]);
    } else if (type == ScalarType::Half) {
        const auto* s = static_cast<const uint16_t*>(src);
        for (int i = 0; i < n; ++i) dst[i] = half_to_float(s[i]);
    } else {
        const auto* s = static_cast<const uint8_t*>(src);
        for (int i = 0; i < n; ++i) dst[i] = e4m3_to_float(s[i]);
    }
}

FV_HD void store_row(const float* src, ScalarType type, void* dst, int n) {
    if (type == ScalarType::Float) {
        std::memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
    } else if (type == ScalarType::BFloat16) {
        auto* d = static_cast<torch::headeronly::BFloat16*>(dst);
        for (int i = 0; i < n; ++i) d[i] = torch::headeronly::BFloat16(src[i]);
    } else if (type == ScalarType::Half) {
        auto* d = static_cast<torch::headeronly::Half*>(dst);
        for (int i = 0; i < n; ++i) d[i] = torch::headeronly::Half(src[i]);
    } else {
        auto* d = static_cast<torch::headeronly::Float8_e4m3fn*>(dst);
        for (int i = 0; i < n; ++i) {
            const float x = src[i];
            d[i] = torch::headeronly::Float8_e4m3fn(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
        }
    }
}

inline int64_t element_bytes(ScalarType type) {
    return type == ScalarType::Float ? 4 : type == ScalarType::Float8_e4m3fn ? 1 : 2;
}

}  // namespace fv
