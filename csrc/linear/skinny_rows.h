// SPDX-License-Identifier: Apache-2.0
// The CPU side of skinny_linear and skinny_qkv: one row of x against all of the weight, fp32 sums.
#pragma once
#include <cmath>
#include <vector>

#include "common/convert.h"
#include "linear/skinny_args.h"

namespace fv {

// x [K] as the product sees it: normed and rounded to its type where there is a norm.
inline void skinny_input(const Tensor& x, int64_t row, const OptTensor& norm, const SkinnySizes& s, double eps, std::vector<float>& to) {
    const int k = static_cast<int>(s.inner);
    to.resize(static_cast<size_t>(k));
    load_row(static_cast<const char*>(x.const_data_ptr()) + row * x.stride(0) * element_bytes(s.type), s.type, to.data(), k);
    if (!norm) return;
    std::vector<float> w(static_cast<size_t>(k));
    std::vector<char> narrow(static_cast<size_t>(k) * 4);
    load_row(norm->const_data_ptr(), s.type, w.data(), k);
    double squares = 0.0;
    for (float v : to) squares += static_cast<double>(v) * v;
    const float r = 1.0f / std::sqrt(static_cast<float>(squares / k) + static_cast<float>(eps));
    for (int i = 0; i < k; ++i) to[static_cast<size_t>(i)] = to[static_cast<size_t>(i)] * r * w[static_cast<size_t>(i)];
    store_row(to.data(), s.type, narrow.data(), k);
    load_row(narrow.data(), s.type, to.data(), k);
}

// y [N] = weight @ x + bias
inline void skinny_product(const std::vector<float>& x, const Tensor& weight, const OptTensor& bias, const SkinnySizes& s, std::vector<float>& y) {
    const int k = static_cast<int>(s.inner);
    y.assign(static_cast<size_t>(s.outer), 0.0f);
    if (bias) load_row(bias->const_data_ptr(), s.type, y.data(), static_cast<int>(s.outer));
    std::vector<float> w(static_cast<size_t>(k));
    for (int64_t n = 0; n < s.outer; ++n) {
        load_row(static_cast<const char*>(weight.const_data_ptr()) + n * s.inner * element_bytes(s.type), s.type, w.data(), k);
        float part[8] = {};
        for (int i = 0; i < k; ++i) part[i % 8] += w[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
        y[static_cast<size_t>(n)] += ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
}

}  // namespace fv
