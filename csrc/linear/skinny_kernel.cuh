// SPDX-License-Identifier: Apache-2.0
// Product of a few rows with a weight, bf16, one block per 16 weight rows: eight warps share K in chunks of 32, each lane
// loads 16 bytes of two weight rows per chunk and uses them as the left operand of two mma.m16n8k16 (K is permuted alike on
// both sides), so that eight rows of x cost one instruction. Weights do not depend on the launch before: the first loads are
// issued before the wait for it, and the norm's weight is multiplied into them there; what remains of RMSNorm is one factor per
// row of x, whose squares are summed beside the products and which is applied to their sums. After the wait everything that
// depends on it is on its way at once. The order of every sum depends on K alone: the result of a row has the same bits
// whatever the number of rows beside it.
#pragma once
#include "algo/convert.h"
#include "common/launch.h"
#include "common/ptx.cuh"

namespace fv::skinny {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 16;        // weight rows of a block
constexpr int kChunk = 32;       // of K, per warp and step
constexpr int kAhead = 6;        // chunks of weights a warp has in flight,
constexpr int kAheadShort = 3;   // and where K has no more: fewer registers, so that the blocks of more launches fit beside each other
constexpr int kMaxTiles = 4;     // of eight rows of x
constexpr int kStride = kTile + 1;

struct Params {
    const uint16_t* x;       // [R, K], rows x_row apart
    const uint16_t* weight;  // [N, K]
    const uint16_t* bias;    // [N] or null
    const uint16_t* norm;    // [K] or null: of an RMSNorm of x
    int64_t x_row;
    int32_t rows, inner, outer;
    float eps;
};

__device__ __forceinline__ void unpack(uint32_t two, float& a, float& b) {
    a = bits_to_float(two << 16);
    b = bits_to_float(two & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack(float a, float b) {
    return static_cast<uint32_t>(float_to_bf16(a)) | static_cast<uint32_t>(float_to_bf16(b)) << 16;
}

// Both halves of w times those of n, rounded to bf16.
__device__ __forceinline__ uint32_t times(uint32_t w, uint32_t n) {
    float a, b, u, v;
    unpack(w, a, b);
    unpack(n, u, v);
    return pack(a * u, b * v);
}
__device__ __forceinline__ uint4 times(uint4 w, uint4 n) { return {times(w.x, n.x), times(w.y, n.y), times(w.z, n.z), times(w.w, n.w)}; }

__device__ __forceinline__ float squares(uint32_t x) {
    float a, b;
    unpack(x, a, b);
    return a * a + b * b;
}

// kTiles groups of eight rows. Epilogue: rows(tile, low, high) names the weight rows low..low+7 and high..high+7 of a block;
// early(row, tile, low) loads what store needs besides the products (before them; before the wait too where early_before_wait());
// store(early, row, tile, low, high, a, b) takes the products of weight rows low and high.
template <int kTiles, int kAhead, class Epilogue>
__global__ void __launch_bounds__(kThreads, kAhead == kAheadShort ? 3 : 2) skinny_kernel(const __grid_constant__ Params p, const __grid_constant__ Epilogue epilogue) {
    constexpr int kStep = kTiles == 1 ? kAhead : kTiles == 2 ? 2 : 1;  // chunks whose x is in flight; registers bound it
    static_assert(8 * kMaxTiles * 8 <= kThreads, "a thread stores one pair at most");
    __shared__ float sums[kWarps][8 * kTiles * kStride];
    __shared__ float part[kWarps][8 * kTiles];
    allow_next_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int tile = blockIdx.x, first = blockIdx.y * 8 * kMaxTiles, chunks = p.inner / kChunk;
    int low, high;
    epilogue.rows(tile, low, high);
    const uint16_t* w_low = p.weight + static_cast<int64_t>(low + g) * p.inner + c * 8;
    const uint16_t* w_high = p.weight + static_cast<int64_t>(high + g) * p.inner + c * 8;
    uint4 a_low[kAhead], a_high[kAhead];
    auto load = [&](int begin) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int chunk = begin + kWarps * j;
            if (chunk < chunks) {
                a_low[j] = load_streaming_16(w_low + chunk * kChunk);
                a_high[j] = load_streaming_16(w_high + chunk * kChunk);
            }
        }
        if (!p.norm) return;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int chunk = begin + kWarps * j;
            if (chunk < chunks) {
                const uint4 n = *reinterpret_cast<const uint4*>(p.norm + chunk * kChunk + c * 8);
                a_low[j] = times(a_low[j], n);
                a_high[j] = times(a_high[j], n);
            }
        }
    };
    load(warp);
    const int row = static_cast<int>(threadIdx.x) / 8, pair = static_cast<int>(threadIdx.x) % 8;  // what this thread stores
    const bool stores = row < 8 * kTiles && first + row < p.rows;
    float bias_low = 0.0f, bias_high = 0.0f;
    if (p.bias) bias_low = bf16_to_float(p.bias[low + pair]), bias_high = bf16_to_float(p.bias[high + pair]);
    typename Epilogue::Early early = {};
    bool missing = stores;  // early
    if (missing && epilogue.early_before_wait()) early = epilogue.early(first + row, tile, low + pair), missing = false;
    wait_for_previous_launch();

    auto x_at = [&](int t, int chunk) -> uint4 {  // eight values of row 8 t + g
        const int at = first + 8 * t + g;
        if (at >= p.rows || chunk >= chunks) return make_uint4(0, 0, 0, 0);
        return __ldcg(reinterpret_cast<const uint4*>(p.x + at * p.x_row + chunk * kChunk + c * 8));  // not what an L1 may still hold
    };
    if (warp >= chunks && missing) early = epilogue.early(first + row, tile, low + pair);  // this warp has no share of the sums
    float acc[kTiles][4] = {}, square[kTiles] = {};
    for (int begin = warp; begin < chunks; begin += kWarps * kAhead) {
        if (begin != warp) load(begin);
#pragma unroll
        for (int j0 = 0; j0 < kAhead; j0 += kStep) {
            uint4 x[kStep][kTiles];
#pragma unroll
            for (int j = 0; j < kStep; ++j) {
#pragma unroll
                for (int t = 0; t < kTiles; ++t) x[j][t] = x_at(t, begin + kWarps * (j0 + j));
            }
            if (j0 == 0 && begin == warp && missing) early = epilogue.early(first + row, tile, low + pair);
#pragma unroll
            for (int j = 0; j < kStep; ++j) {
                if (begin + kWarps * (j0 + j) >= chunks) break;
                const uint4 lo = a_low[j0 + j], hi = a_high[j0 + j];
                const uint32_t step0[4] = {lo.x, hi.x, lo.y, hi.y}, step1[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const uint4 v = x[j][t];
                    mma_16816_bf16(acc[t], step0, v.x, v.y);
                    mma_16816_bf16(acc[t], step1, v.z, v.w);
                    if (p.norm) square[t] += (squares(v.x) + squares(v.y)) + (squares(v.z) + squares(v.w));
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        float* at = sums[warp] + (8 * t + 2 * c) * kStride + g;
        at[0] = acc[t][0];
        at[kStride] = acc[t][1];
        at[8] = acc[t][2];
        at[kStride + 8] = acc[t][3];
        if (!p.norm) continue;
        square[t] += __shfl_xor_sync(0xffffffffu, square[t], 1);
        square[t] += __shfl_xor_sync(0xffffffffu, square[t], 2);
        if (c == 0) part[warp][8 * t + g] = square[t];
    }
    __syncthreads();
    if (!stores) return;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        a += sums[w][row * kStride + pair];
        b += sums[w][row * kStride + pair + 8];
    }
    if (p.norm) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += part[w][row];
        const float factor = 1.0f / sqrtf(sum / static_cast<float>(p.inner) + p.eps);
        a *= factor;
        b *= factor;
    }
    epilogue.store(early, first + row, tile, low + pair, high + pair, a + bias_low, b + bias_high);
}

template <class Epilogue>
void run_skinny(const Launch& launch, const Params& p, const Epilogue& epilogue) {
    const bool short_k = p.inner <= kAheadShort * kWarps * kChunk;
    const dim3 grid(static_cast<unsigned>(p.outer / kTile), static_cast<unsigned>(ceil_div(p.rows, 8 * kMaxTiles)));
    const auto kernel = p.rows <= 8 && short_k ? skinny_kernel<1, kAheadShort, Epilogue> : p.rows <= 8 ? skinny_kernel<1, kAhead, Epilogue>
                      : p.rows <= 16 ? skinny_kernel<2, kAhead, Epilogue> : p.rows <= 24 ? skinny_kernel<3, kAhead, Epilogue>
                      : skinny_kernel<4, kAhead, Epilogue>;
    launch.run_overlapped(kernel, grid, dim3(kThreads), 0, p, epilogue);
}

inline Params params(const char* op, const SkinnySizes& s, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                     const OptTensor& norm, double eps) {
    FV_CHECK(s.type == ScalarType::BFloat16, op, ": x must be bfloat16 on a GPU; got ", describe(x), ". Fix: use a plain linear.");
    const auto aligned = [](const void* a) { return reinterpret_cast<uintptr_t>(a) % 16 == 0; };
    FV_CHECK(aligned(x.const_data_ptr()) && aligned(weight.const_data_ptr()) && x.stride(0) % 8 == 0 &&
                 (!norm || aligned(norm->const_data_ptr())), op,
             ": x, weight and norm must be aligned to 16 bytes; got other addresses or strides. Fix: pass whole tensors.");
    return {cptr<uint16_t>(x), cptr<uint16_t>(weight), cptr<uint16_t>(bias), cptr<uint16_t>(norm), x.stride(0),
            static_cast<int32_t>(s.rows), static_cast<int32_t>(s.inner), static_cast<int32_t>(s.outer), static_cast<float>(eps)};
}

}  // namespace fv::skinny
