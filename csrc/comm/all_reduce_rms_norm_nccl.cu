// SPDX-License-Identifier: Apache-2.0
// Residual add and RMSNorm of rows whose sum over ranks NCCL has put into `out`. One block per row; the sum of squares is
// taken in an order that depends on H alone.
#include "comm/add_rms_norm.h"
#include "comm/row_norm.cuh"
#include "common/warp.cuh"

namespace fv {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) add_rms_norm_kernel(
    const T* __restrict__ weight,  // [H]
    T* residual,                   // [rows, H]
    T* out,                        // [rows, H]
    int64_t hidden, float eps) {
    constexpr int kN = Wire<T>::kElements;
    float* sums = reinterpret_cast<float*>(dynamic_shared());  // 33
    residual += static_cast<int64_t>(blockIdx.x) * hidden;
    out += static_cast<int64_t>(blockIdx.x) * hidden;
    const int64_t vectors = (hidden + kN - 1) / kN;
    float squares = 0.0f;
    for (int64_t j = threadIdx.x; j < vectors; j += kThreads) {
        const uint4 rounded = add_residual<T>(load_vector(out, j, hidden), load_vector(residual, j, hidden), squares);
        store_vector(residual, j, hidden, rounded);  // behind the end of a row: zeros
    }
    squares = block_reduce(squares, [](float a, float b) { return a + b; }, sums);
    const float scale = 1.0f / __fsqrt_rn(squares / static_cast<float>(hidden) + eps);
    for (int64_t j = threadIdx.x; j < vectors; j += kThreads) {  // each thread reads back what it wrote
        store_vector(out, j, hidden, normalized<T>(load_vector(residual, j, hidden), load_vector(weight, j, hidden), scale));
    }
}

template <class T>
void run(const Launch& launch, const void* weight, void* residual, void* out, int64_t rows, int64_t hidden, float eps) {
    launch.run(&add_rms_norm_kernel<T>, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 160, static_cast<const T*>(weight),
               static_cast<T*>(residual), static_cast<T*>(out), hidden, eps);
}

}  // namespace

void launch_add_rms_norm(const Launch& launch, ScalarType type, const void* weight, void* residual, void* out, int64_t rows,
                         int64_t hidden, float eps) {
    if (type == ScalarType::Float) run<float>(launch, weight, residual, out, rows, hidden, eps);
    else if (type == ScalarType::Half) run<__half>(launch, weight, residual, out, rows, hidden, eps);
    else run<__nv_bfloat16>(launch, weight, residual, out, rows, hidden, eps);
}

}  // namespace fv
