// SPDX-License-Identifier: Apache-2.0
// The CUDA stream torch is on, for a library that links neither libtorch_cuda nor libcudart dynamically.
#pragma once
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <stdexcept>

namespace fv {

// Resolved once: torch 2.10..2.12 export it only from libtorch_cuda, which torch loads with local symbols,
// so the lookup must go through the copy that is already mapped (RTLD_NOLOAD never loads another one).
inline cudaStream_t current_stream(int device) {
    using Getter = int32_t (*)(int32_t, void**);
    static const Getter getter = [] {
        void* lib = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        void* f = lib ? dlsym(lib, "aoti_torch_get_current_cuda_stream") : nullptr;
        return reinterpret_cast<Getter>(f);
    }();
    void* stream = nullptr;
    if (!getter || getter(device, &stream) != 0) {
        throw std::runtime_error(
            "fastverify: the current CUDA stream must be readable from torch; got no libtorch_cuda.so in this "
            "process. Fix: install a CUDA build of torch >= 2.10, or keep the tensors on the CPU.");
    }
    return static_cast<cudaStream_t>(stream);
}

}  // namespace fv
