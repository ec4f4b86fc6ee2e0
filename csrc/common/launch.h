// SPDX-License-Identifier: Apache-2.0
// Around every CUDA launch: the device guard, the stream, device properties, and launch errors in words.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

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

// What launch choices may depend on, besides shapes.
struct DeviceProps {
    int major = 0, minor = 0;
    int sms = 0;
    int max_smem = 0;  // bytes one block may opt in to
    int64_t l2 = 0;    // bytes
};

constexpr int kSm120Smem = 99 * 1024;

// FASTVERIFY_PROFILE=sm_120: another GPU takes the choices of sm_120 (its compute capability and shared memory).
inline DeviceProps apply_profile(DeviceProps p, const char* profile) {
    if (profile && std::strcmp(profile, "sm_120") == 0) {
        p.major = 12;
        p.minor = 0;
        p.max_smem = p.max_smem < kSm120Smem ? p.max_smem : kSm120Smem;
    }
    return p;
}

constexpr int kMaxDevices = 64;

// Read once per device; later calls read memory only.
inline const DeviceProps& device_props(int device) {
    struct Table {
        DeviceProps of[kMaxDevices];
        Table() {
            int count = 0;
            if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
            for (int d = 0; d < count && d < kMaxDevices; ++d) {
                DeviceProps p;
                int l2 = 0;
                cudaDeviceGetAttribute(&p.major, cudaDevAttrComputeCapabilityMajor, d);
                cudaDeviceGetAttribute(&p.minor, cudaDevAttrComputeCapabilityMinor, d);
                cudaDeviceGetAttribute(&p.sms, cudaDevAttrMultiProcessorCount, d);
                cudaDeviceGetAttribute(&p.max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, d);
                cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, d);
                p.l2 = l2;
                of[d] = apply_profile(p, std::getenv("FASTVERIFY_PROFILE"));
            }
        }
    };
    static const Table table;
    return table.of[device >= 0 && device < kMaxDevices ? device : 0];
}

#ifndef FV_EMULATE

// One op call: sets the device of `like` for its lifetime, knows the stream and the device.
class Launch {
public:
    const char* op;
    const DeviceProps& props;
    cudaStream_t stream;

    Launch(const char* op_name, const Tensor& like)
        : op(op_name), props(device_props(like.get_device_index())), stream(current_stream(like.get_device_index())),
          guard_(like.get_device_index()) {}

    template <class... P, class... A>
    void run(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        run_cluster(kernel, 1, grid, block, smem, args...);
    }

    // Every block of the grid runs at the same time (kernels that wait for other blocks); too large a grid is an error.
    template <class... P, class... A>
    void run_resident(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(kernel, 1, kResident, grid, block, smem, args...);
    }
    // The same in clusters (see run_cluster), and how many blocks fit then, at most `blocks`: whole clusters.
    template <class... P, class... A>
    void run_resident_cluster(void (*kernel)(P...), int cluster, dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(kernel, cluster, kResident, grid, block, smem, args...);
    }
    template <class... P>
    int resident_blocks(void (*kernel)(P...), int cluster, int blocks, dim3 block, size_t smem) const {
        blocks = blocks / cluster * cluster;
        if (cluster == 1) return blocks;
        cudaLaunchAttribute attribute[1];
        attribute[0].id = cudaLaunchAttributeClusterDimension;
        attribute[0].val.clusterDim.x = static_cast<unsigned>(cluster);
        attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(static_cast<unsigned>(blocks));
        config.blockDim = block;
        config.dynamicSmemBytes = smem;
        config.attrs = attribute;
        config.numAttrs = 1;
        int clusters = 0;
        allow_smem(kernel, smem);
        FV_CUDA_CHECK(op, cudaOccupancyMaxActiveClusters(&clusters, reinterpret_cast<const void*>(kernel), &config));
        return clusters * cluster < blocks ? clusters * cluster : blocks;
    }

    // May start while the launch before it in the stream still runs (sm_90 and newer; elsewhere as `run`): the kernel calls
    // wait_for_previous_launch() (ptx.cuh) before it reads what that one writes.
    template <class... P, class... A>
    void run_overlapped(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(kernel, 1, props.major >= 9 ? kOverlapped : kPlain, grid, block, smem, args...);
    }

    // cluster > 1: blocks in x form clusters of that size (sm_90 and newer only).
    template <class... P, class... A>
    void run_cluster(void (*kernel)(P...), int cluster, dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(kernel, cluster, kPlain, grid, block, smem, args...);
    }

    void fill(void* ptr, int byte, size_t bytes) const {
        if (bytes) FV_CUDA_CHECK(op, cudaMemsetAsync(ptr, byte, bytes, stream));
    }

private:
    torch::stable::accelerator::DeviceGuard guard_;
    enum Kind { kPlain, kResident, kOverlapped };

    template <class K>
    void allow_smem(K* kernel, size_t smem) const {
        if (smem <= 16 * 1024) return;  // with the static part it may exceed the 48 KiB that need no asking
        FV_CUDA_CHECK(op, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(smem)));
    }

    template <class... P, class... A>
    void launch(void (*kernel)(P...), int cluster, Kind kind, dim3 grid, dim3 block, size_t smem, A... args) const {
        allow_smem(kernel, smem);
        if (cluster > 8) {
            FV_CUDA_CHECK(op, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        }
        cudaLaunchAttribute attribute[2];
        unsigned count = 0;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid;
        config.blockDim = block;
        config.dynamicSmemBytes = smem;
        config.stream = stream;
        if (cluster > 1) {
            attribute[count].id = cudaLaunchAttributeClusterDimension;
            attribute[count].val.clusterDim.x = static_cast<unsigned>(cluster);
            attribute[count].val.clusterDim.y = attribute[count].val.clusterDim.z = 1;
            ++count;
        }
        if (kind == kResident) {
            attribute[count].id = cudaLaunchAttributeCooperative;
            attribute[count++].val.cooperative = 1;
        }
        if (kind == kOverlapped) {
            attribute[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute[count++].val.programmaticStreamSerializationAllowed = 1;
        }
        config.attrs = attribute;
        config.numAttrs = count;
        std::tuple<std::decay_t<P>...> values(static_cast<std::decay_t<P>>(args)...);
        void* pointers[sizeof...(P) ? sizeof...(P) : 1];
        fill_pointers(pointers, values, std::index_sequence_for<P...>{});
        FV_CUDA_CHECK(op, cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers));
    }

    template <class T, size_t... I>
    static void fill_pointers(void** pointers, T& values, std::index_sequence<I...>) {
        ((pointers[I] = &std::get<I>(values)), ...);
    }
};

#endif  // FV_EMULATE

#ifdef __CUDACC__
// The dynamic shared memory of this block.
__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char fv_dynamic_shared[];
    return fv_dynamic_shared;
}
// The same for kernels without static shared memory that place tiles in the 128-byte swizzle (wgmma.cuh).
__device__ __forceinline__ unsigned char* dynamic_shared_aligned() {
    extern __shared__ __align__(1024) unsigned char fv_aligned_shared[];
    return fv_aligned_shared;
}
#endif

}  // namespace fv
