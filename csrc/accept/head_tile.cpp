// SPDX-License-Identifier: Apache-2.0
// Tile of the LM-head product: 4 node rows x 2 vocabulary rows at a time, 16 partial sums each, fixed order.
// Built with -ffp-contract=fast (CMakeLists.txt): a logit may differ between x86 levels, never between runs.
#include "accept/head_tile.h"

#include "common/types.h"

namespace fv {
namespace {

typedef float Lanes __attribute__((vector_size(64)));
typedef float LanesU __attribute__((vector_size(64), aligned(4)));

inline __attribute__((always_inline)) Lanes load(const float* p) { return *reinterpret_cast<const LanesU*>(p); }

inline __attribute__((always_inline)) float sum(Lanes v) {
    float s = 0.0f;
    for (int i = 0; i < 16; ++i) s += v[i];
    return s;
}

template <int kR, int kV>
inline __attribute__((always_inline)) void micro(const float* x, const float* w, int64_t h, float* out, int64_t ld) {
    Lanes acc[kR][kV] = {};
    int64_t i = 0;
    for (; i + 16 <= h; i += 16) {
        Lanes wv[kV];
        for (int v = 0; v < kV; ++v) wv[v] = load(w + v * h + i);
        for (int r = 0; r < kR; ++r) {
            const Lanes xv = load(x + r * h + i);
            for (int v = 0; v < kV; ++v) acc[r][v] += xv * wv[v];
        }
    }
    for (int r = 0; r < kR; ++r) {
        for (int v = 0; v < kV; ++v) {
            float s = sum(acc[r][v]);
            for (int64_t j = i; j < h; ++j) s += x[r * h + j] * w[v * h + j];
            out[r * ld + v] = s;
        }
    }
}

}  // namespace

FV_CLONES void head_tile(const float* hidden, int64_t rows, int64_t h, const float* weight, int64_t n, float* out, int64_t ld) {
    int64_t v = 0;
    for (; v + 2 <= n; v += 2) {
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) micro<4, 2>(hidden + r * h, weight + v * h, h, out + r * ld + v, ld);
        for (; r < rows; ++r) micro<1, 2>(hidden + r * h, weight + v * h, h, out + r * ld + v, ld);
    }
    for (; v < n; ++v) {
        for (int64_t r = 0; r < rows; ++r) micro<1, 1>(hidden + r * h, weight + v * h, h, out + r * ld + v, ld);
    }
}

}  // namespace fv
