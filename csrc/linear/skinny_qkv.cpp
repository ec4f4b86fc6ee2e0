// SPDX-License-Identifier: Apache-2.0
// skinny_qkv on the CPU: skinny_linear into a row, then what rope_append does with it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "linear/skinny_rows.h"

namespace fv {
namespace {

void skinny_qkv_cpu(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, const Tensor positions,
                    const Tensor slots, const Tensor cos_sin, Tensor q, Tensor k_cache, Tensor v_cache, double eps, bool /*settled*/) {
    const QkvSizes n = check_skinny_qkv(x, weight, bias, norm, positions, slots, cos_sin, q, k_cache, v_cache, eps);
    const SkinnySizes& s = n.s;
    const int64_t item = element_bytes(s.type), d = n.head_dim, half = d / 2;
    const int64_t* slot = cptr<int64_t>(slots);
    const int32_t* position = cptr<int32_t>(positions);
    for (int64_t r = 0; r < s.rows; ++r) {
        if (slot[r] < 0) continue;
        FV_CHECK(slot[r] < n.capacity, "skinny_qkv: slots must be below ", n.capacity, " (pages * page_size); got ", slot[r], " in row ",
                 r, ". Fix: reserve pages for prompt + new tokens + the tree at admission.");
        FV_CHECK(position[r] >= 0 && position[r] < n.max_positions, "skinny_qkv: positions must be in [0, ", n.max_positions,
                 ") (rows of cos_sin); got ", position[r], " in row ", r, ". Fix: build cos_sin for the longest sequence.");
    }
    torch::stable::parallel_for(0, s.rows, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> in, y;
        std::vector<char> narrow(static_cast<size_t>(s.outer * item));
        for (int64_t r = begin; r < end; ++r) {
            if (slot[r] < 0) continue;
            skinny_input(x, r, norm, s, eps, in);
            skinny_product(in, weight, bias, s, y);
            store_row(y.data(), s.type, narrow.data(), static_cast<int>(s.outer));  // rounded once, as a matrix of its own would be
            load_row(narrow.data(), s.type, y.data(), static_cast<int>(s.outer));
            const float* c = cptr<float>(cos_sin) + position[r] * d;
            const int64_t page = slot[r] / n.page_size, offset = slot[r] % n.page_size;
            for (int64_t h = 0; h < n.heads + 2 * n.kv_heads; ++h) {
                float* a = y.data() + h * d;
                for (int64_t i = 0; h < n.heads + n.kv_heads && i < half; ++i) {
                    const float u = a[i], v = a[i + half];
                    a[i] = u * c[i] - v * c[half + i];
                    a[i + half] = v * c[i] + u * c[half + i];
                }
                const bool is_q = h < n.heads, is_k = h < n.heads + n.kv_heads;
                const Tensor& cache = is_k ? k_cache : v_cache;
                const int64_t kv = is_q ? 0 : (h - n.heads) % n.kv_heads;
                char* to = is_q ? mptr<char>(q) + (r * q.stride(0) + h * q.stride(1)) * item
                                : mptr<char>(cache) + (page * cache.stride(0) + offset * cache.stride(1) + kv * cache.stride(2)) * item;
                store_row(a, s.type, to, static_cast<int>(d));
            }
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("skinny_qkv", TORCH_BOX(&skinny_qkv_cpu)); }

}  // namespace fv
