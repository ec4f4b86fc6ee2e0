// SPDX-License-Identifier: Apache-2.0
// What the NVIDIA driver says, through NVML (safe before a fork) or, where that is missing, libcuda.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fv::comm {

struct DriverGpu {
    std::string bus_id, name, uuid;
    int major = 0, minor = 0;  // compute capability; 0.0: not stated
    int64_t memory_bytes = 0;
};

using StatusMatrix = std::vector<std::vector<std::string>>;  // [gpu][gpu], in the order of DriverReport::gpus

struct DriverReport {
    std::string source;                  // "nvml", "libcuda" or empty
    std::string version;                 // of the driver, e.g. "580.82.07"; NVML only
    int cuda_version = 0;                // newest CUDA it can run: 13000 = 13.0
    std::vector<DriverGpu> gpus;
    StatusMatrix read, write, nvlink;    // peer access, "ok" or why not; NVML only
    std::string reason;                  // why nothing (or less) was found; empty when all is well
};

// Loads the driver's libraries and asks. Creates no CUDA context; cuInit only without NVML.
DriverReport query_driver();

}  // namespace fv::comm
