// SPDX-License-Identifier: Apache-2.0
// Kernels with known answers for the emulator itself (tests/emulator/test_emulator.py). Not part of the library.
#include <torch/csrc/stable/library.h>

#include "common/launch.h"
#include "common/warp.cuh"

namespace fv {
namespace {

// One block per row: sum of the row; the last block adds the sums up. counter must be 0.
__global__ void sums_kernel(const float* x, float* sums, float* total, uint32_t* counter, int n) {
    __shared__ float scratch[33];
    __shared__ int flag;
    float v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[static_cast<int64_t>(blockIdx.x) * n + i];
    v = block_reduce(v, [](float a, float b) { return a + b; }, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = v;
    if (!last_block(counter, gridDim.x, &flag)) return;
    float t = threadIdx.x < gridDim.x ? sums[threadIdx.x] : 0.0f;
    __syncthreads();
    t = block_reduce(t, [](float a, float b) { return a + b; }, scratch);
    if (threadIdx.x == 0) *total = t;
}

// c [16, 8] = a [16, 16] b [16, 8] in bf16, through shared memory, ldmatrix and mma. One warp.
__global__ void mma_kernel(const uint16_t* a, const uint16_t* b, float* c) {
    uint16_t* sa = reinterpret_cast<uint16_t*>(dynamic_shared());
    uint16_t* sb = sa + 256;
    cp_async_16(sa + threadIdx.x * 8, a + threadIdx.x * 8);
    cp_async_16(sb + (threadIdx.x & 15) * 8, b + (threadIdx.x & 15) * 8, threadIdx.x < 16 || true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int lane = threadIdx.x;
    uint32_t fa[4], fb[2];
    ldmatrix_x4(fa, sa + (lane % 16) * 16 + (lane / 16) * 8);
    ldmatrix_x2_trans(fb, sb + (lane % 16) * 8);
    float d[4] = {};
    mma_16816_bf16(d, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) c[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = d[i];
}

__global__ void warp_kernel(int* out) {
    const int i = threadIdx.x;
    const unsigned odd = __ballot_sync(kFullWarp, i & 1);
    int v = __shfl_sync(kFullWarp, i * 10, (i + 1) & 31);
    v += __shfl_up_sync(kFullWarp, i, 1) + __shfl_down_sync(kFullWarp, i, 2, 16);
    if (i < 16) v += __reduce_add_sync(0xffffu, i);  // a divergent part of the warp
    v += __syncthreads_count(i < 7);
    out[i] = v + static_cast<int>(__popc(odd)) * 1000;
}

void selftest(const Tensor x, Tensor sums, Tensor total, Tensor counter, const Tensor a, const Tensor b, Tensor c, Tensor lanes) {
    const Launch launch("selftest", x);
    launch.run(sums_kernel, dim3(static_cast<unsigned>(x.size(0))), dim3(96), 0, cptr<float>(x), mptr<float>(sums),
               mptr<float>(total), mptr<uint32_t>(counter), static_cast<int>(x.size(1)));
    launch.run(mma_kernel, dim3(1), dim3(32), 1024, cptr<uint16_t>(a), cptr<uint16_t>(b), mptr<float>(c));
    launch.run(warp_kernel, dim3(1), dim3(32), 0, mptr<int>(lanes));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastverify, m) {
    m.def("selftest(Tensor x, Tensor(a!) sums, Tensor(b!) total, Tensor(c!) counter, Tensor a, Tensor b, Tensor(d!) c, "
          "Tensor(e!) lanes) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("selftest", TORCH_BOX(&selftest)); }

}  // namespace fv
