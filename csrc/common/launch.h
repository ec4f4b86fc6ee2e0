// SPDX-License-Identifier: Apache-2.0
// Around every CUDA launch: the device guard, the stream, and launch errors in words.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "check.h"
#include "stream.h"

#define FV_CUDA_CHECK(op, expr) fv::check_cuda((expr), op, #expr)

namespace fv {

inline void check_cuda(cudaError_t e, const char* op, const char* what) {
    if (e == cudaSuccess) [[likely]] return;
    int device = 0, major = 0, minor = 0, driver = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDriverGetVersion(&driver);
    FV_CHECK(e != cudaErrorNoKernelImageForDevice && e != cudaErrorInvalidDeviceFunction, op,
             ": the build must hold code for sm_", major, minor, "; got a library built for ", FV_CUDA_ARCHS,
             ". Fix: rebuild with FASTVERIFY_CUDA_ARCHS=", major, minor, ".");
    FV_CHECK(e != cudaErrorInsufficientDriver, op, ": the driver must support the CUDA ", CUDART_VERSION / 1000,
             " runtime this build uses; got a driver for CUDA ", driver / 1000, ".", driver % 1000 / 10,
             ". Fix: update the NVIDIA driver (CUDA 13 needs >= 580) or rebuild with nvcc 12.8.");
    FV_CHECK(false, op, ": ", what, " must succeed; got ", cudaGetErrorName(e), " (", cudaGetErrorString(e),
             "). Fix: run `fastverify doctor`; an earlier kernel in the stream may be at fault.");
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace fv
