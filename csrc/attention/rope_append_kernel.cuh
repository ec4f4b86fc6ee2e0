// SPDX-License-Identifier: Apache-2.0
// Device code of rope_append. Two kernels with one arithmetic, that of the CPU op: the norm's sum adds eight neighbours in
// turn, then these sums in pairs, pairs of pairs, ...; every operation is a single IEEE one.
//   teams: 8 elements per lane in registers, a head per team of head_dim / 8 lanes (rounded up to a power of two). Loads
//          that depend on nothing are issued before the row's slot and position arrive; partners come by shuffles.
//   any:   a head per warp, staged in shared memory; any head_dim, alignment and rotary width.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "algo/convert.h"
#include "algo/rope_plan.h"

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
    int32_t team, q_blocks;  // lanes of a head; blocks of a row that take q
    Format format, cache_format;
    float eps, inverse_dim;  // inverse_dim: 0 where 1 / head_dim is not exact
};

constexpr int kRopeGroups = 128;     // groups of eight in the widest head
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

// Two floats as two narrow ones, nearest even, a in the low half; fp8 saturates at 448 and takes the low 16 bits.
__device__ __forceinline__ uint32_t pack_two(Format f, float a, float b) {
    uint32_t bits = 0;
    if (f == kBf16) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        memcpy(&bits, &h, 4);
    } else if (f == kF16) {
        const __half2 h = __floats2half2_rn(a, b);
        memcpy(&bits, &h, 4);
    } else {
#if __CUDA_ARCH__ >= 890
        bits = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
#else
        bits = float_to_e4m3(a) | static_cast<uint32_t>(float_to_e4m3(b)) << 8;
#endif
    }
    return bits;
}

__device__ __forceinline__ Eight load_eight(const void* p, Format f, int64_t i) {
    Eight x;
    if (f == kF32) {
        const Float4* at = reinterpret_cast<const Float4*>(static_cast<const float*>(p) + i);
        const Float4 a = at[0], b = at[1];
        for (int j = 0; j < 4; ++j) x.v[j] = a.v[j], x.v[4 + j] = b.v[j];
    } else {
        const auto h = *reinterpret_cast<const Pack<uint32_t, 16, 4>*>(static_cast<const uint16_t*>(p) + i);
        for (int j = 0; j < 4; ++j) {
            const uint32_t low = h.v[j] & 0xffffu, high = h.v[j] >> 16;
            x.v[2 * j] = f == kBf16 ? bits_to_float(low << 16) : half_to_float(static_cast<uint16_t>(low));
            x.v[2 * j + 1] = f == kBf16 ? bits_to_float(h.v[j] & 0xffff0000u) : half_to_float(static_cast<uint16_t>(high));
        }
    }
    return x;
}

__device__ __forceinline__ void store_eight(void* p, Format f, int64_t i, const Eight& x) {
    if (f == kF32) {
        Float4* at = reinterpret_cast<Float4*>(static_cast<float*>(p) + i);
        at[0] = Float4{{x.v[0], x.v[1], x.v[2], x.v[3]}};
        at[1] = Float4{{x.v[4], x.v[5], x.v[6], x.v[7]}};
    } else if (f == kE4m3) {
        const Pack<uint32_t, 8, 2> b = {{pack_two(f, x.v[0], x.v[1]) | pack_two(f, x.v[2], x.v[3]) << 16,
                                         pack_two(f, x.v[4], x.v[5]) | pack_two(f, x.v[6], x.v[7]) << 16}};
        *reinterpret_cast<Pack<uint32_t, 8, 2>*>(static_cast<uint8_t*>(p) + i) = b;
    } else {
        const Pack<uint32_t, 16, 4> h = {{pack_two(f, x.v[0], x.v[1]), pack_two(f, x.v[2], x.v[3]),
                                          pack_two(f, x.v[4], x.v[5]), pack_two(f, x.v[6], x.v[7])}};
        *reinterpret_cast<Pack<uint32_t, 16, 4>*>(static_cast<uint16_t*>(p) + i) = h;
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

// One kind of head of one row: where its heads come from and go to.
struct RopeWork {
    const void* in;
    void* out;
    int64_t in_at, in_head, out_at, out_head;
    int32_t heads;
    Format out_format;
    RopeNorm norm;
    const float* scale;
    int64_t scale_stride;
    bool turns;

    // kind 0: q, 1: k, 2: v. The slot is not needed for q.
    __device__ __forceinline__ RopeWork(const RopeParams& p, int kind, int64_t row) {
        const RopeRows& rows = kind == 0 ? p.q : kind == 1 ? p.k : p.v;
        in = rows.data, in_at = row * rows.row, in_head = rows.head;
        heads = kind == 0 ? p.q_heads : p.kv_heads;
        norm = kind == 0 ? p.q_norm : kind == 1 ? p.k_norm : RopeNorm{nullptr, kF32};
        turns = kind != 2;
        out = p.q.data, out_at = in_at, out_head = in_head, out_format = p.format;
        scale = nullptr, scale_stride = 0;
    }
    __device__ __forceinline__ void aim(const RopeParams& p, int kind, int64_t slot) {
        if (kind == 0) return;
        const RopeCache& cache = kind == 1 ? p.k_cache : p.v_cache;
        const int64_t page = p.capacity <= INT32_MAX
            ? static_cast<int64_t>(static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.page_size))
            : slot / p.page_size;
        out = cache.data, out_format = p.cache_format, out_head = cache.head;
        out_at = page * cache.page + (slot - page * p.page_size) * cache.slot;
        scale = cache.scale, scale_stride = cache.scale_stride;
    }
};

__device__ __forceinline__ bool in_range(const RopeParams& p, int64_t slot, int32_t position) {
    return slot >= 0 && slot < p.capacity && position >= 0 && position < p.max_positions;
}

// 1 / sqrt(mean + eps), each step rounded. A mean over a power of two is a product with its exact inverse.
__device__ __forceinline__ float inverse_rms(float sum, const RopeParams& p) {
    const float mean = p.inverse_dim > 0.0f ? sum * p.inverse_dim : sum / static_cast<float>(p.head_dim);
    return 1.0f / sqrtf(mean + p.eps);
}

// The sum over the team's lanes (a power of two) of each lane's squares, in every lane. Whole warps call it.
__device__ __forceinline__ float team_sum_of_squares(const Eight& x, int team) {
    float sum = 0.0f;
    for (int j = 0; j < kRopeEach; ++j) sum += x.v[j] * x.v[j];
    for (int step = 1; step < team; step *= 2) sum += __shfl_xor_sync(kRopeWarp, sum, step);
    return sum;
}

// A lane's part of the table row: where its elements pair with others, cosines and sines. Nothing here waits for the loads.
struct RopeTurn {
    Eight c, s;
    int other;   // neox: the lane of the partners
    bool turns;  // this lane rotates

    // i: the lane's first element. neox: rot % 16 == 0, gptj: rot % 8 == 0.
    __device__ __forceinline__ RopeTurn(const RopeParams& p, int64_t position, int lane, int i, bool rotates)
        : c{}, s{}, other(threadIdx.x % 32), turns(rotates && i < p.rot) {
        if (!turns) return;
        const int half = p.rot / 2;
        const float* cs = p.cos_sin + position * p.rot;
        if (p.style == 0) {
            const bool low = i < half;
            const int step = half / kRopeEach, pair = low ? i : i - half;
            other = threadIdx.x % 32 + (low ? step : -step);
            c = load_eight(cs, kF32, pair), s = load_eight(cs, kF32, half + pair);
        } else {
            for (int j = 0; j < 4; ++j) c.v[j] = cs[i / 2 + j], s.v[j] = cs[half + i / 2 + j];
        }
    }

    // Whole warps call it.
    __device__ __forceinline__ void operator()(Eight& x, int style) const {
        if (style == 0) {
            Eight y;
            for (int j = 0; j < kRopeEach; ++j) y.v[j] = __shfl_sync(kRopeWarp, x.v[j], other);
            if (turns) {
                const bool low = other > static_cast<int>(threadIdx.x % 32);
                for (int j = 0; j < kRopeEach; ++j) {
                    const float a = x.v[j] * c.v[j], b = y.v[j] * s.v[j];
                    x.v[j] = low ? a - b : a + b;
                }
            }
        } else if (turns) {
            for (int j = 0; j < kRopeEach; j += 2) {
                const float cos = c.v[j / 2], sin = s.v[j / 2], a = x.v[j], b = x.v[j + 1];
                x.v[j] = a * cos - b * sin;
                x.v[j + 1] = b * cos + a * sin;
            }
        }
    }
};

// grid: (rows, q_blocks + k blocks + v blocks); the heads of a kind go round its blocks' teams.
template <Format kFormat, Format kCache>
__global__ void __launch_bounds__(kRopeThreads, kRopeResident) rope_append_teams_kernel(const __grid_constant__ RopeParams p) {
    const int64_t row = blockIdx.x;
    const int64_t slot = p.slots[row];
    const int32_t position = p.positions[row];
    const int teams = kRopeThreads / p.team, team = threadIdx.x / p.team, lane = threadIdx.x % p.team, i = lane * kRopeEach;
    const int y = blockIdx.y, kv_blocks = (static_cast<int>(gridDim.y) - p.q_blocks) / 2;
    const int kind = y < p.q_blocks ? 0 : y < p.q_blocks + kv_blocks ? 1 : 2;
    const int block = kind == 0 ? y : kind == 1 ? y - p.q_blocks : y - p.q_blocks - kv_blocks;
    const int step = teams * (kind == 0 ? p.q_blocks : kv_blocks);
    RopeWork work(p, kind, row);
    int head = block * teams + team;
    const bool inside = i < p.head_dim;
    Eight next = {}, w = {};
    if (inside && head < work.heads) next = load_eight(work.in, kFormat, work.in_at + head * work.in_head + i);
    if (inside && work.norm.weight) {
        w = work.norm.format == kFormat ? load_eight(work.norm.weight, kFormat, i) : load_eight(work.norm.weight, work.norm.format, i);
    }
    if (!in_range(p, slot, position)) return;

    const RopeTurn turn(p, position, lane, i, inside && work.turns);
    work.aim(p, kind, slot);
#pragma unroll 1
    for (int first = block * teams; first < work.heads; first += step, head += step) {
        Eight x = next;
        if (inside && head + step < work.heads) {
            next = load_eight(work.in, kFormat, work.in_at + (head + step) * work.in_head + i);
        }
        if (work.norm.weight) {
            const float r = inverse_rms(team_sum_of_squares(x, p.team), p);
            for (int j = 0; j < kRopeEach; ++j) x.v[j] = x.v[j] * r * w.v[j];
        }
        if (work.turns) turn(x, p.style);
        if (!inside || head >= work.heads) continue;
        if (work.scale) {
            const float scale = work.scale[head * work.scale_stride];
            for (int j = 0; j < kRopeEach; ++j) x.v[j] = x.v[j] / scale;
        }
        if (kind == 0) store_eight(work.out, kFormat, work.out_at + head * work.out_head + i, x);
        else store_eight(work.out, kCache, work.out_at + head * work.out_head + i, x);
    }
}

// grid: (rows, ceil(heads / warps of a block)); shared: warps * head_dim floats.
__global__ void __launch_bounds__(kRopeThreads) rope_append_any_kernel(const RopeParams p) {
    const int64_t row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = p.head_dim, half = p.rot / 2;
    const int index = blockIdx.y * (kRopeThreads / 32) + warp;  // a head of q, then of k, then of v
    const int kind = index < p.q_heads ? 0 : index < p.q_heads + p.kv_heads ? 1 : 2;
    const int head = index - (kind == 0 ? 0 : p.q_heads) - (kind == 2 ? p.kv_heads : 0);
    const int64_t slot = p.slots[row];
    const int32_t position = p.positions[row];
    RopeWork work(p, kind, row);
    if (head >= work.heads || !in_range(p, slot, position)) return;
    work.aim(p, kind, slot);
    float* y = reinterpret_cast<float*>(dynamic_shared()) + warp * d;
    for (int i = lane; i < d; i += 32) y[i] = load_one(work.in, p.format, work.in_at + head * work.in_head + i);
    __syncwarp();
    if (work.norm.weight) {
        float sums[kRopeGroups / 32];  // of the groups lane, lane + 32, ...
        for (int m = 0; m < kRopeGroups / 32; ++m) {
            float sum = 0.0f;
            const int first = kRopeEach * (lane + 32 * m);
            for (int i = first; i < first + kRopeEach && i < d; ++i) sum += y[i] * y[i];
            for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kRopeWarp, sum, step);
            sums[m] = sum;
        }
        const float r = inverse_rms((sums[0] + sums[1]) + (sums[2] + sums[3]), p);
        __syncwarp();
        for (int i = lane; i < d; i += 32) y[i] = y[i] * r * load_one(work.norm.weight, work.norm.format, i);
        __syncwarp();
    }
    const float* cs = p.cos_sin + position * static_cast<int64_t>(p.rot);
    const float scale = work.scale ? work.scale[head * work.scale_stride] : 1.0f;
    for (int i = lane; i < d; i += 32) {
        float x = y[i];
        if (work.turns && i < p.rot) {
            const bool low = p.style == 0 ? i < half : i % 2 == 0;
            const int pair = p.style == 0 ? (low ? i : i - half) : i / 2;
            const int partner = p.style == 0 ? (low ? i + half : i - half) : i ^ 1;
            const float a = x * cs[pair], b = y[partner] * cs[half + pair];
            x = low ? a - b : a + b;
        }
        if (scale != 1.0f) x = x / scale;
        store_one(work.out, work.out_format, work.out_at + head * work.out_head + i, x);
    }
}

}  // namespace fv::rope
