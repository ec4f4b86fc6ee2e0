// SPDX-License-Identifier: Apache-2.0
// What the kernels of all_reduce_rms_norm share: the sum of squares of a row over the blocks that hold it, the arithmetic of
// the norm, and blocks that pull weights into L2.
#pragma once
#include "comm/comm_choice.h"
#include "comm/protocol.cuh"
#include "comm/wire.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace fv {

constexpr int64_t kPiece = 1024;  // bytes of one prefetch; on an H200 what larger pieces bring is gone sooner

// table: [ranges][2] = address, bytes. Ends with the exchange (`done` changes): a prefetch that goes on is only in the way.
static __device__ void prefetch_ranges(const int64_t* table, int64_t ranges, int64_t thread, int64_t threads, const uint32_t* done) {
    const uint32_t before = ld_relaxed_sys(done);
    for (int64_t r = 0; r < ranges; ++r) {
        const char* begin = reinterpret_cast<const char*>(table[2 * r]);
        const int64_t bytes = table[2 * r + 1];
        for (int64_t i = thread * kPiece; i < bytes; i += threads * kPiece) {
            if (ld_relaxed_sys(done) != before) return;
            pull_into_l2(begin + i, bytes - i < kPiece ? bytes - i : kPiece);
        }
    }
}

// Sums of squares: of a run of 32 vectors by the warp that holds it, then of the runs of a row by every warp that needs it, so
// that the order depends on H alone. A row of one block meets at a barrier. In a cluster every warp stores its sum into
// each block and counts it there (st.async on an mbarrier): a barrier of the cluster would order all that was written before
// it, and so wait until the vectors on their way to other GPUs have arrived. Two rows may be under way.
struct RowSums {
    static FV_HD uint32_t bytes(uint32_t runs) { return (runs * 8 + 15) / 16 * 16 + 16; }

    float* sums;      // [2][runs]
    uint64_t* full;   // [2]
    uint32_t runs;    // of the row
    int cluster;      // blocks
    int readers;      // those of them that hold vectors
    bool reads;       // this warp holds vectors

    // first: this thread's first vector of the row.
    __device__ __forceinline__ RowSums(unsigned char* shared, uint32_t vectors, int blocks, uint32_t first)
        : sums(reinterpret_cast<float*>(shared)), runs((vectors + 31) / 32), cluster(blocks) {
        full = reinterpret_cast<uint64_t*>(shared + bytes(runs) - 16);
        const int holding = static_cast<int>((vectors + blockDim.x - 1) / blockDim.x);
        readers = holding < cluster ? holding : cluster;
        reads = first - (threadIdx.x & 31) < vectors;
    }

#if defined(FV_EMULATE) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void all_have_begun() const {}
    __device__ __forceinline__ void post(float squares, uint32_t j, int odd) const {
        squares = warp_sum(squares);
        const int lane = threadIdx.x & 31;
        if (lane < cluster && reads) cluster_map(sums, lane)[odd * runs + j / 32] = squares;
    }
    __device__ __forceinline__ void wait(int, uint32_t) const {
        if (cluster > 1) cluster_barrier();
        else __syncthreads();
    }
#else
    // By all threads, early: a block's shared memory may be written by the others of its cluster once it has started and made
    // its mbarriers. all_have_begun() before the first post().
    __device__ __forceinline__ void begin() const {
        if (cluster == 1) return;
        if (threadIdx.x == 0) {
            for (int odd = 0; odd < 2; ++odd) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + odd)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int odd = 0; odd < 2; ++odd) expect(odd);
        }
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    }
    __device__ __forceinline__ void all_have_begun() const {
        if (cluster > 1) asm volatile("barrier.cluster.wait;" ::: "memory");
    }
    // Of row number n of this block: odd = n & 1. Whole warps, vectors of one run; warps that hold none of the row do nothing.
    __device__ __forceinline__ void post(float squares, uint32_t j, int odd) const {
        squares = warp_sum(squares);
        if (!reads) return;
        const int lane = threadIdx.x & 31;
        float* const to = sums + odd * runs + j / 32;
        if (cluster == 1) {
            if (lane == 0) *to = squares;
        } else if (lane < readers) {
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(of_block(shared_address(to), lane)),
                         "r"(__float_as_uint(squares)), "r"(of_block(shared_address(full + odd), lane)) : "memory");
        }
    }
    // Until all sums of row number n are here: odd = n & 1, phase = n >> 1 & 1. By all threads. A block of the cluster posts row
    // n + 2 only when it has the sums of row n + 1 of every warp here, and they are posted after this wait.
    __device__ __forceinline__ void wait(int odd, uint32_t phase) const {
        if (cluster == 1) return __syncthreads();
        if (!reads) return;
        uint32_t done = 0;
        while (done == 0) {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(shared_address(full + odd)), "r"(phase) : "memory");
        }
        if (threadIdx.x == 0) expect(odd);
    }

private:
    __device__ __forceinline__ void expect(int odd) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full + odd)), "r"(runs * 4) : "memory");
    }
    static __device__ __forceinline__ uint32_t of_block(uint32_t address, int rank) {
        uint32_t there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
        return there;
    }

public:
#endif
    // 1 / the root of the mean square. Whole warps, after wait().
    __device__ __forceinline__ float scale(int odd, float inverse_hidden, float eps) const {
        float squares = 0.0f;
#pragma unroll 1
        for (uint32_t run = threadIdx.x & 31; run < runs; run += 32) squares += sums[odd * runs + run];
        return rsqrt_rn(warp_sum(squares) * inverse_hidden + eps);
    }
};

// residual + sum, rounded; adds the squares of it.
template <class T>
__device__ __forceinline__ uint4 add_residual(uint4 total, uint4 residual, float& squares) {
    constexpr int kN = Wire<T>::kElements;
    const uint4 rounded = add_vectors<T>(residual, total);
    float r[kN];
    Wire<T>::unpack(rounded, r);
#pragma unroll
    for (int k = 0; k < kN; ++k) squares += r[k] * r[k];
    return rounded;
}
template <class T>
__device__ __forceinline__ uint4 normalized(uint4 v, uint4 weight, float scale) {
    constexpr int kN = Wire<T>::kElements;
    float r[kN], w[kN];
    Wire<T>::unpack(v, r);
    Wire<T>::unpack(weight, w);
#pragma unroll
    for (int k = 0; k < kN; ++k) r[k] = r[k] * scale * w[k];
    return Wire<T>::pack(r);
}

// A call of all_reduce_rms_norm as its kernels take it.
template <class T>
struct RowNorm {
    const T* x;         // [local_ranks, rows, H]
    T* residual;        // [local_ranks, rows, H]
    const T* weight;    // [H]
    T* out;             // [local_ranks, rows, H]
    const int64_t* prefetch;  // [ranges, 2]
    int64_t ranges;
    int rows, hidden;
    float inverse_hidden, eps;
    int work_blocks, cluster_log2;  // blocks [work_blocks, gridDim.x) prefetch

    // Blocks that only prefetch do it here, and are then done.
    __device__ __forceinline__ bool only_pulls_weights(const CommArgs& args) const {
        if (static_cast<int>(blockIdx.x) < work_blocks) return false;
        wait_for_previous_launch();  // `done` of the call before is written
        allow_next_launch();
        const int64_t threads = static_cast<int64_t>(gridDim.x - work_blocks) * blockDim.x;
        prefetch_ranges(prefetch, ranges, static_cast<int64_t>(blockIdx.x - work_blocks) * blockDim.x + threadIdx.x, threads,
                        args.first.state + static_cast<int>(blockIdx.y) * args.state_step + kDone);
        return true;
    }
    // By all that worked: tells them to stop.
    template <class Exchange>
    __device__ __forceinline__ void stop_prefetch(const Exchange& exchange) const {
        if (ranges > 0 && blockIdx.x == 0 && threadIdx.x == 0) exchange.state[kDone] = exchange.epoch;
    }
    // Of a block that works: its place among those that share a row, and the first row that they have.
    __device__ __forceinline__ int cluster() const { return 1 << cluster_log2; }
    __device__ __forceinline__ int team() const { return blockIdx.x >> cluster_log2; }
    __device__ __forceinline__ uint32_t first_vector() const { return (blockIdx.x & (cluster() - 1)) * blockDim.x + threadIdx.x; }
};

}  // namespace fv
