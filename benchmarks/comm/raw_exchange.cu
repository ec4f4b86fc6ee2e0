// SPDX-License-Identifier: Apache-2.0
// The yardstick of the mailbox: two groups of blocks in one launch swap `bytes` per round through pinned host memory (or
// device memory), words of {data, round}, nothing else. nvcc -O3 -arch=sm_90 raw_exchange.cu -o raw_exchange && ./raw_exchange
// `./raw_exchange 2` puts the groups on two GPUs, one launch each: device memory is then the peer's, over NVLink or PCIe.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(x)                                                                                  \
    do {                                                                                          \
        cudaError_t e = (x);                                                                      \
        if (e != cudaSuccess) { std::printf("%s: %s\n", #x, cudaGetErrorString(e)); std::exit(1); } \
    } while (0)

__device__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ void store(uint4* p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// box[reader][round % 2][words / 2 vectors of two tagged words]
__global__ void exchange(uint4* box0, uint4* box1, int64_t vectors, int rounds, int first_rank, unsigned* sink) {
    const int rank = first_rank + blockIdx.y;
    const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = static_cast<int64_t>(gridDim.x) * blockDim.x;
    uint4* mine = rank ? box1 : box0;
    uint4* theirs = rank ? box0 : box1;
    unsigned sum = 0;
    for (int r = 1; r <= rounds; ++r) {
        const int64_t at = (r & 1) * vectors;
        for (int64_t i = t; i < vectors; i += n) store(theirs + at + i, make_uint4(i + sum, r, i, r));
        for (int64_t i = t; i < vectors; i += n) {
            uint4 v = load(mine + at + i);
            while (v.y != static_cast<unsigned>(r) || v.w != static_cast<unsigned>(r)) v = load(mine + at + i);
            sum += v.x & 1;
        }
    }
    if (t == 0) sink[rank] = sum;
}

int main(int argc, char** argv) {
    const int gpus = argc > 1 ? std::atoi(argv[1]) : 1;
    unsigned* sink[2];
    cudaEvent_t begin[2], end[2];
    for (int g = 0; g < gpus; ++g) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaMalloc(&sink[g], 8));
        CHECK(cudaEventCreate(&begin[g]));
        CHECK(cudaEventCreate(&end[g]));
        if (gpus == 2) CHECK(cudaDeviceEnablePeerAccess(1 - g, 0));
    }
    for (int host = 1; host >= 0; --host) {
        for (int64_t bytes : {2048, 14336, 28672, 57344, 114688, 229376, 917504}) {
            const int64_t vectors = bytes / 8;  // 8 bytes of data in 16
            uint4* box[2];
            for (int r = 0; r < 2; ++r) {
                CHECK(cudaSetDevice(gpus == 2 ? r : 0));
                if (host) CHECK(cudaHostAlloc(&box[r], vectors * 32, cudaHostAllocMapped | cudaHostAllocPortable));
                else CHECK(cudaMalloc(&box[r], vectors * 32));
            }
            float best = 1e30f;
            int best_blocks = 0;
            for (int blocks : {1, 2, 4, 8, 16, 32}) {
                constexpr int kRounds = 400;
                for (int repeat = 0; repeat < 3; ++repeat) {
                    for (auto& b : box) CHECK(cudaMemset(b, 0, vectors * 32));
                    for (int g = 0; g < gpus; ++g) {
                        CHECK(cudaSetDevice(g));
                        CHECK(cudaDeviceSynchronize());
                    }
                    for (int g = 0; g < gpus; ++g) {
                        CHECK(cudaSetDevice(g));
                        CHECK(cudaEventRecord(begin[g]));
                        exchange<<<dim3(blocks, 3 - gpus), 256>>>(box[0], box[1], vectors, kRounds, g, sink[g]);
                        CHECK(cudaEventRecord(end[g]));
                    }
                    float least = 1e30f;
                    for (int g = 0; g < gpus; ++g) {
                        CHECK(cudaSetDevice(g));
                        CHECK(cudaDeviceSynchronize());
                        float ms;
                        CHECK(cudaEventElapsedTime(&ms, begin[g], end[g]));
                        least = ms < least ? ms : least;
                    }
                    if (least * 1e3f / kRounds < best) best = least * 1e3f / kRounds, best_blocks = blocks;
                }
            }
            std::printf("%s %ld bytes: %.2f us (%d blocks per rank)\n", host ? "host" : "device", static_cast<long>(bytes), best, best_blocks);
            for (auto b : box) { if (host) cudaFreeHost(b); else cudaFree(b); }
        }
    }
    return 0;
}
