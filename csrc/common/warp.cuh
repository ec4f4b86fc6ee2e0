// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp and a block, and "am I the last block" over a counter that resets itself.
#pragma once
#include <cstdint>

#include "common/ptx.cuh"

namespace fv {

constexpr unsigned kFullWarp = 0xffffffffu;

template <class T, class F>
__device__ __forceinline__ T warp_reduce(T v, F f) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v = f(v, __shfl_xor_sync(kFullWarp, v, d));
    return v;
}
template <class T>
__device__ __forceinline__ T warp_max(T v) {
    return warp_reduce(v, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
__device__ __forceinline__ T warp_sum(T v) {
    return warp_reduce(v, [](T a, T b) { return a + b; });
}

// All threads of the block call it (at most 1024, whole warps); all get the result. `scratch`: 33 elements of shared
// memory that no thread still reads; free again after the next barrier.
template <class T, class F>
__device__ __forceinline__ T block_reduce(T v, F f, T* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    v = warp_reduce(v, f);
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    if (warp == 0) {
        T w = scratch[lane < warps ? lane : 0];
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const T other = __shfl_down_sync(kFullWarp, w, d);
            if (lane + d < warps) w = f(w, other);
        }
        if (lane == 0) scratch[32] = w;
    }
    __syncthreads();
    return scratch[32];
}

// True in all threads of the block that arrives last of `blocks`; what the others wrote before is visible to it.
// *counter must be 0 before the first call and is 0 again afterwards. `flag`: one int of shared memory.
__device__ __forceinline__ bool last_block(uint32_t* counter, uint32_t blocks, int* flag) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const bool last = atomic_add_acq_rel(counter, 1) == blocks - 1;
        if (last) *counter = 0;
        *flag = last;
    }
    __syncthreads();
    return *flag != 0;
}

}  // namespace fv
