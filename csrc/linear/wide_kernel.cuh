// SPDX-License-Identifier: Apache-2.0
// skinny_kernel.cuh for long K and many weight rows, bf16: a block of eight warps takes 64 weight rows, so that x (which each block
// reads whole) is a small part of what goes over the L2. Where there are few weight rows, the blocks of a cluster share their K and
// fold the sums through shared memory. Each warp has two of its chunks of K in flight, the first two from before the wait for the
// launch before. The order of every sum depends on K and N alone. Epilogues are those of skinny_kernel.cuh; what is long enough needs no pass before the wait.
#pragma once
#include "algo/linear_plan.h"
#include "linear/skinny_kernel.cuh"

namespace fv::skinny {

constexpr int kSub = kWideRows / kTile;            // tiles of a block
constexpr int kWideX = 16;                         // rows of x, at most, of a block
constexpr int kWideStages = 3;                     // chunks of a warp in flight

struct WideSums {
    float warps[kWarps][kWideX][kWideRows + 1];
    float own[kWideX][kWideRows];  // of all warps of this block
    float part[kWarps][kWideX], squares[kWideX];
};
union WideShared {
    uint4 ring[kWideStages][kWarps][2 * kSub][32];  // what a lane has asked for it reads itself
    WideSums sums;                                  // once all is read
};

template <int kTiles, class Epilogue>
__global__ void __launch_bounds__(kThreads, 2) wide_kernel(const __grid_constant__ Params p, const __grid_constant__ Epilogue epilogue, int split) {
    WideShared& shared = *reinterpret_cast<WideShared*>(dynamic_shared());
    allow_next_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int rank = blockIdx.x % split, tile0 = blockIdx.x / split * kSub, first = blockIdx.y * kWideX;
    const int chunks = p.inner / kChunk, slices = kWarps * split, slice = rank * kWarps + warp;
    const int count = chunks > slice ? (chunks - slice + slices - 1) / slices : 0;  // of this warp
    const uint16_t* at[2 * kSub];  // this lane's weights
#pragma unroll
    for (int s = 0; s < kSub; ++s) {
        int low, high;
        epilogue.rows(tile0 + s, low, high);
        at[2 * s] = p.weight + static_cast<int64_t>(low + g) * p.inner + slice * kChunk + c * 8;
        at[2 * s + 1] = p.weight + static_cast<int64_t>(high + g) * p.inner + slice * kChunk + c * 8;
    }
    auto load = [&](int j, int stage) {  // a group of copies, empty or not
        if (j < count) {
#pragma unroll
            for (int i = 0; i < 2 * kSub; ++i) cp_async_16_stream(&shared.ring[stage][warp][i][lane], at[i] + j * slices * kChunk);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int j = 0; j < kWideStages; ++j) load(j, j);
    wait_for_previous_launch();

    const uint16_t* x_of = p.x + (first + g) * p.x_row + slice * kChunk + c * 8;
    float acc[kSub][kTiles][4] = {}, square[kTiles] = {};
    uint4 x[kTiles], n = {};
    auto load_x = [&](int j, uint4 (&to)[kTiles], uint4& norm) {  // the L1 keeps x for the blocks that follow
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            to[t] = first + 8 * t + g < p.rows && j < count ? *reinterpret_cast<const uint4*>(x_of + 8 * t * p.x_row + j * slices * kChunk) : uint4{0, 0, 0, 0};
        }
        if (p.norm && j < count) norm = *reinterpret_cast<const uint4*>(p.norm + (slice + slices * j) * kChunk + c * 8);
    };
    load_x(0, x, n);
    int stage = 0;
#pragma unroll 2
    for (int j = 0; j < count; ++j) {
        uint4 next[kTiles], next_n = {};
        load_x(j + 1, next, next_n);
        cp_async_wait<kWideStages - 1>();
#pragma unroll
        for (int s = 0; s < kSub; ++s) {
            uint4 lo = shared.ring[stage][warp][2 * s][lane], hi = shared.ring[stage][warp][2 * s + 1][lane];
            if (p.norm) lo = times(lo, n), hi = times(hi, n);
            const uint32_t step0[4] = {lo.x, hi.x, lo.y, hi.y}, step1[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                mma_16816_bf16(acc[s][t], step0, x[t].x, x[t].y);
                mma_16816_bf16(acc[s][t], step1, x[t].z, x[t].w);
            }
        }
        load(j + kWideStages, stage);
        stage = stage + 1 == kWideStages ? 0 : stage + 1;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if (p.norm) square[t] += (squares(x[t].x) + squares(x[t].y)) + (squares(x[t].z) + squares(x[t].w));
            x[t] = next[t];
        }
        n = next_n;
    }
    const int tid = static_cast<int>(threadIdx.x), live = min(8 * kTiles, p.rows - first), pairs = live * 8 * kSub;
    constexpr int kEach = kTiles * kSub * 64 / kThreads;  // pairs of a thread, at most
    typename Epilogue::Early early[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int item = tid + kThreads * (rank + split * i), row = item / (8 * kSub), s = item / 8 % kSub;
        if (item >= pairs) continue;
        int low, high;
        epilogue.rows(tile0 + s, low, high);
        early[i] = epilogue.early(first + row, tile0 + s, low + item % 8);
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring is not in use any more
    WideSums& sums = shared.sums;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int s = 0; s < kSub; ++s) {
            float* to = &sums.warps[warp][8 * t + 2 * c][16 * s + g];
            to[0] = acc[s][t][0];
            to[kWideRows + 1] = acc[s][t][1];
            to[8] = acc[s][t][2];
            to[kWideRows + 1 + 8] = acc[s][t][3];
        }
        square[t] += __shfl_xor_sync(0xffffffffu, square[t], 1);
        square[t] += __shfl_xor_sync(0xffffffffu, square[t], 2);
        if (c == 0) sums.part[warp][8 * t + g] = square[t];
    }
    __syncthreads();
    for (int i = tid; i < live * kWideRows; i += kThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums.warps[w][i / kWideRows][i % kWideRows];
        sums.own[i / kWideRows][i % kWideRows] = sum;
    }
    if (tid < live) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += sums.part[w][tid];
        sums.squares[tid] = sum;
    }
    if (split > 1) cluster_barrier();
    else __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int item = tid + kThreads * (rank + split * i), row = item / (8 * kSub), s = item / 8 % kSub, pair = item % 8;
        if (item >= pairs) continue;
        float low_sum = 0.0f, high_sum = 0.0f, sum = 0.0f;
        for (int r = 0; r < split; ++r) {
            low_sum += *cluster_map(&sums.own[row][16 * s + pair], static_cast<uint32_t>(r));
            high_sum += *cluster_map(&sums.own[row][16 * s + pair + 8], static_cast<uint32_t>(r));
            sum += *cluster_map(&sums.squares[row], static_cast<uint32_t>(r));
        }
        if (p.norm) {
            const float factor = 1.0f / sqrtf(sum / static_cast<float>(p.inner) + p.eps);
            low_sum *= factor;
            high_sum *= factor;
        }
        int low, high;
        epilogue.rows(tile0 + s, low, high);
        low += pair, high += pair;
        if (p.bias) low_sum += bf16_to_float(p.bias[low]), high_sum += bf16_to_float(p.bias[high]);
        epilogue.store(early[i], first + row, tile0 + s, low, high, low_sum, high_sum, true);
    }
    if (split > 1) cluster_barrier();  // nobody leaves while others read
}

template <class Epilogue>
void run_wide(const Launch& launch, const Params& p, const Epilogue& epilogue) {
    const int split = launch.props.major >= 9 ? wide_split(p.outer) : 1;
    const dim3 grid(static_cast<unsigned>(p.outer / kWideRows * split), static_cast<unsigned>(ceil_div(p.rows, kWideX))), block(kThreads);
    const auto kernel = p.rows <= 8 ? wide_kernel<1, Epilogue> : wide_kernel<2, Epilogue>;
#ifdef FV_EMULATE
    launch.run_cluster(kernel, split, grid, block, sizeof(WideShared), p, epilogue, split);
#else
    if (launch.props.major < 9) return launch.run(kernel, grid, block, sizeof(WideShared), p, epilogue, split);
    const void* function = reinterpret_cast<const void*>(kernel);
    FV_CUDA_CHECK(launch.op, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(WideShared))));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(split);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = sizeof(WideShared);
    config.stream = launch.stream;
    config.attrs = attributes;
    config.numAttrs = split > 1 ? 2 : 1;
    void* arguments[] = {const_cast<Params*>(&p), const_cast<Epilogue*>(&epilogue), const_cast<int*>(&split)};
    FV_CUDA_CHECK(launch.op, cudaLaunchKernelExC(&config, function, arguments));
#endif
}

}  // namespace fv::skinny
