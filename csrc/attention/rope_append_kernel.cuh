// SPDX-License-Identifier: Apache-2.0
// Device code of rope_append. Two kernels with one arithmetic, that of the CPU op: the norm's sum runs as 16 partial sums
// (element e in sum e % 16) that are then added in turn, and every operation is a single IEEE one.
//   teams: 8 elements per lane in registers, a head per team of head_dim / 8 lanes (rounded up to a power of two). Loads
//          that depend on nothing are issued before the row's slot and position arrive; partners come by shuffles.
//   any:   a head per warp, staged in shared memory; any head_dim, alignment and rotary width.
#pragma once
#include "algo/convert.h"

namespace fv::rope {

enum Format : int32_t { kF32, kBf16, kF16, kE4m3 };

struct RopeRows {  // [rows, heads, D], dense in D; strides in elements
    void* data;
    int64_t row, head;
};
struct RopeCache {  // [pages, page_size, heads, D], dense in D
    void* data;
    int64_t page, slot, head;
    const float* scale;  // null: 1
    int64_t scale_stride;
};
struct RopeNorm {  // [D]; null: none
    const void* weight;
    Format format;
};
struct RopeParams {
    RopeRows q, k, v;
    RopeCache k_cache, v_cache;
    RopeNorm q_norm, k_norm;
    const int32_t* positions;  // [rows]
    const int64_t* slots;      // [rows]
    const float* cos_sin;      // [max_positions, rot]: cosines | sines
    int64_t max_positions, capacity;
    int32_t q_heads, kv_heads, head_dim, rot, page_size, style;
    int32_t team;  // lanes of a head
    Format format, cache_format;
    float eps;
};

constexpr int kRopeThreads = 128;
constexpr int kRopeEach = 8;         // elements of a lane
constexpr int kRopePartials = 16;    // partial sums of the norm
constexpr unsigned kRopeWarp = 0xffffffffu;

struct alignas(16) Float4 {
    float v[4];
};
template <class T, int kBytes, int kCount>
struct alignas(kBytes) Pack {
    T v[kCount];
};
struct Eight {
    float v[kRopeEach];
};

__device__ __forceinline__ Eight load_eight(const void* p, Format f, int64_t i) {
    Eight x;
    if (f == kF32) {
        const Float4* at = reinterpret_cast<const Float4*>(static_cast<const float*>(p) + i);
        const Float4 a = at[0], b = at[1];
        for (int j = 0; j < 4; ++j) x.v[j] = a.v[j], x.v[4 + j] = b.v[j];
    } else {
        const auto h = *reinterpret_cast<const Pack<uint16_t, 16, 8>*>(static_cast<const uint16_t*>(p) + i);
        for (int j = 0; j < kRopeEach; ++j) x.v[j] = f == kBf16 ? bf16_to_float(h.v[j]) : half_to_float(h.v[j]);
    }
    return x;
}

__device__ __forceinline__ void store_eight(void* p, Format f, int64_t i, const Eight& x) {
    if (f == kF32) {
        Float4* at = reinterpret_cast<Float4*>(static_cast<float*>(p) + i);
        at[0] = Float4{{x.v[0], x.v[1], x.v[2], x.v[3]}};
        at[1] = Float4{{x.v[4], x.v[5], x.v[6], x.v[7]}};
    } else if (f == kE4m3) {
        Pack<uint8_t, 8, 8> b;
        for (int j = 0; j < kRopeEach; ++j) b.v[j] = float_to_e4m3(x.v[j]);
        *reinterpret_cast<Pack<uint8_t, 8, 8>*>(static_cast<uint8_t*>(p) + i) = b;
    } else {
        Pack<uint16_t, 16, 8> h;
        for (int j = 0; j < kRopeEach; ++j) h.v[j] = f == kBf16 ? float_to_bf16(x.v[j]) : float_to_half(x.v[j]);
        *reinterpret_cast<Pack<uint16_t, 16, 8>*>(static_cast<uint16_t*>(p) + i) = h;
    }
}

__device__ __forceinline__ float load_one(const void* p, Format f, int64_t i) {
    if (f == kF32) return static_cast<const float*>(p)[i];
    const uint16_t h = static_cast<const uint16_t*>(p)[i];
    return f == kBf16 ? bf16_to_float(h) : half_to_float(h);
}

__device__ __forceinline__ void store_one(void* p, Format f, int64_t i, float x) {
    if (f == kF32) static_cast<float*>(p)[i] = x;
    else if (f == kE4m3) static_cast<uint8_t*>(p)[i] = float_to_e4m3(x);
    else static_cast<uint16_t*>(p)[i] = f == kBf16 ? float_to_bf16(x) : float_to_half(x);
}

// Which head a warp or team works on, and where its result goes.
struct RopeHead {
    bool is_q, is_v, exists;
    const void* in;
    int64_t at;
    const void* weight;  // null: no norm
    Format weight_format;

    __device__ RopeHead(const RopeParams& p, int64_t row, int index) {
        is_q = index < p.q_heads, is_v = index >= p.q_heads + p.kv_heads;
        exists = index < p.q_heads + 2 * p.kv_heads;
        const RopeRows& rows = is_q ? p.q : is_v ? p.v : p.k;
        in = rows.data;
        at = row * rows.row + head(p, index) * rows.head;
        weight = is_v ? nullptr : is_q ? p.q_norm.weight : p.k_norm.weight;
        weight_format = is_q ? p.q_norm.format : p.k_norm.format;
    }
    __device__ int head(const RopeParams& p, int index) const {
        return index - (is_q ? 0 : is_v ? p.q_heads + p.kv_heads : p.q_heads);
    }
};

struct RopeTarget {
    void* data;
    Format format;
    int64_t at;
    float scale;

    __device__ RopeTarget(const RopeParams& p, const RopeHead& h, int index, int64_t slot)
        : data(p.q.data), format(p.format), at(h.at), scale(1.0f) {
        if (h.is_q) return;
        const RopeCache& cache = h.is_v ? p.v_cache : p.k_cache;
        const int head = h.head(p, index);
        const int64_t page = p.capacity <= INT32_MAX
            ? static_cast<int64_t>(static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.page_size))
            : slot / p.page_size;
        data = cache.data;
        format = p.cache_format;
        at = page * cache.page + (slot - page * p.page_size) * cache.slot + head * cache.head;
        if (cache.scale && h.exists) scale = cache.scale[head * cache.scale_stride];
    }
};

__device__ __forceinline__ bool in_range(const RopeParams& p, int64_t slot, int32_t position) {
    return slot >= 0 && slot < p.capacity && position >= 0 && position < p.max_positions;
}

// x [D] of this team -> 1 / rms. y: shared memory of the team, head_dim + kRopePartials floats. Whole warps call it.
__device__ __forceinline__ float team_inverse_rms(const Eight& x, float* y, int lane, bool mine, const RopeParams& p) {
    const int d = p.head_dim;
    float* sums = y + d;
    if (mine) {
        Float4* at = reinterpret_cast<Float4*>(y + lane * kRopeEach);
        at[0] = Float4{{x.v[0], x.v[1], x.v[2], x.v[3]}};
        at[1] = Float4{{x.v[4], x.v[5], x.v[6], x.v[7]}};
    }
    __syncwarp();
    for (int j = lane; j < kRopePartials; j += p.team) {
        float sum = 0.0f;
        for (int i = j; i < d / kRopePartials * kRopePartials; i += kRopePartials) sum += y[i] * y[i];
        sums[j] = sum;
    }
    __syncwarp();
    float total = 0.0f;
    for (int j = 0; j < kRopePartials; j += 4) {
        const Float4 s = *reinterpret_cast<const Float4*>(sums + j);
        for (int i = 0; i < 4; ++i) total += s.v[i];
    }
    for (int i = d / kRopePartials * kRopePartials; i < d; ++i) total += y[i] * y[i];
    return 1.0f / sqrtf(total / static_cast<float>(d) + p.eps);
}

// The lane's elements [i, i + 8) rotated by the table row cs; neox: rot % 16 == 0, gptj: rot % 8 == 0. Whole warps call it.
__device__ __forceinline__ Eight team_rotate(const Eight& x, const Eight& c, const Eight& s, int lane, bool low, bool turns,
                                             const RopeParams& p) {
    Eight out;
    if (p.style == 0) {
        const int team0 = threadIdx.x % 32 - lane, step = p.rot / (2 * kRopeEach);
        const int other = turns ? team0 + (low ? lane + step : lane - step) : threadIdx.x % 32;
        for (int j = 0; j < kRopeEach; ++j) {
            const float b = __shfl_sync(kRopeWarp, x.v[j], other) * s.v[j], a = x.v[j] * c.v[j];
            out.v[j] = !turns ? x.v[j] : low ? a - b : a + b;
        }
    } else {
        for (int j = 0; j < kRopeEach; j += 2) {
            const float cos = c.v[j / 2], sin = s.v[j / 2];
            const float a = x.v[j], b = x.v[j + 1];
            out.v[j] = turns ? a * cos - b * sin : a;
            out.v[j + 1] = turns ? b * cos + a * sin : b;
        }
    }
    return out;
}

// grid: (rows, ceil(heads / teams of a block)); shared: teams * (head_dim + kRopePartials) floats.
template <Format kFormat>
__global__ void __launch_bounds__(kRopeThreads) rope_append_teams_kernel(const RopeParams p) {
    const int64_t row = blockIdx.x;
    const int team = threadIdx.x / p.team, lane = threadIdx.x % p.team, i = lane * kRopeEach;
    const int index = blockIdx.y * (kRopeThreads / p.team) + team;
    const RopeHead h(p, row, index);
    const bool mine = h.exists && i < p.head_dim;
    const int64_t slot = p.slots[row];
    const int32_t position = p.positions[row];
    Eight x = {}, w = {}, c = {}, s = {};
    if (mine) x = load_eight(h.in, kFormat, h.at + i);
    if (mine && h.weight) w = load_eight(h.weight, h.weight_format, i);
    if (!in_range(p, slot, position)) return;

    const int half = p.rot / 2;
    const bool low = i < half, turns = mine && !h.is_v && i < p.rot;
    if (turns) {
        const float* cs = p.cos_sin + position * static_cast<int64_t>(p.rot);
        if (p.style == 0) {
            const int pair = low ? i : i - half;
            c = load_eight(cs, kF32, pair), s = load_eight(cs, kF32, half + pair);
        } else {
            for (int j = 0; j < 4; ++j) c.v[j] = cs[i / 2 + j], s.v[j] = cs[half + i / 2 + j];
        }
    }
    const RopeTarget target(p, h, index, slot);
    if (p.q_norm.weight || p.k_norm.weight) {
        float* y = reinterpret_cast<float*>(dynamic_shared()) + team * (p.head_dim + kRopePartials);
        const float r = team_inverse_rms(x, y, lane, mine, p);
        if (h.weight) {
            for (int j = 0; j < kRopeEach; ++j) x.v[j] = x.v[j] * r * w.v[j];
        }
    }
    x = team_rotate(x, c, s, lane, low, turns, p);
    if (!mine) return;
    if (target.scale != 1.0f) {
        for (int j = 0; j < kRopeEach; ++j) x.v[j] = x.v[j] / target.scale;
    }
    store_eight(target.data, target.format, target.at + i, x);
}

// grid: (rows, ceil(heads / warps of a block)); shared: warps * head_dim floats.
__global__ void __launch_bounds__(kRopeThreads) rope_append_any_kernel(const RopeParams p) {
    const int64_t row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = p.head_dim, half = p.rot / 2;
    const int index = blockIdx.y * (kRopeThreads / 32) + warp;
    const RopeHead h(p, row, index);
    const int64_t slot = p.slots[row];
    const int32_t position = p.positions[row];
    if (!h.exists || !in_range(p, slot, position)) return;
    float* y = reinterpret_cast<float*>(dynamic_shared()) + warp * d;
    for (int i = lane; i < d; i += 32) y[i] = load_one(h.in, p.format, h.at + i);
    __syncwarp();
    if (h.weight) {
        const int whole = d / kRopePartials * kRopePartials;
        float partial = 0.0f, total = 0.0f;
        for (int i = lane % kRopePartials; i < whole; i += kRopePartials) partial += y[i] * y[i];
        for (int j = 0; j < kRopePartials; ++j) total += __shfl_sync(kRopeWarp, partial, j);
        for (int i = whole; i < d; ++i) total += y[i] * y[i];
        const float r = 1.0f / sqrtf(total / static_cast<float>(d) + p.eps);
        __syncwarp();
        for (int i = lane; i < d; i += 32) y[i] = y[i] * r * load_one(h.weight, h.weight_format, i);
        __syncwarp();
    }
    const float* cs = p.cos_sin + position * static_cast<int64_t>(p.rot);
    const RopeTarget target(p, h, index, slot);
    for (int i = lane; i < d; i += 32) {
        float x = y[i];
        if (!h.is_v && i < p.rot) {
            const bool low = p.style == 0 ? i < half : i % 2 == 0;
            const int pair = p.style == 0 ? (low ? i : i - half) : i / 2;
            const int partner = p.style == 0 ? (low ? i + half : i - half) : i ^ 1;
            const float a = x * cs[pair], b = y[partner] * cs[half + pair];
            x = low ? a - b : a + b;
        }
        if (target.scale != 1.0f) x = x / target.scale;
        store_one(target.data, target.format, target.at + i, x);
    }
}

}  // namespace fv::rope
