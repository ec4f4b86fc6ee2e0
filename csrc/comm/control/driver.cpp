// SPDX-License-Identifier: Apache-2.0
// The few declarations below are the documented C interface of NVML and of the CUDA driver API.
#include "driver.h"

#include "dynlib.h"
#include "sysfs.h"

namespace fv::comm {
namespace {

constexpr int kMaxGpus = 64;

struct NvmlPciInfo {  // nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};
struct NvmlMemory {
    unsigned long long total, free, used;
};
using NvmlDevice = void*;

const char* p2p_status(int status) {  // nvmlGpuP2PStatus_t
    switch (status) {
        case 0: return "ok";
        case 1: return "chipset not supported";
        case 2: return "gpu not supported";
        case 3: return "topology not supported";
        case 4: return "disabled by registry key";
        case 5: return "not supported";
        default: return "unknown";
    }
}

bool query_nvml(DriverReport& report) {
    const DynLib lib("libnvidia-ml.so.1");
    if (!lib) {
        report.reason = "no NVIDIA driver library: " + lib.error();
        return false;
    }
    const auto init = lib.symbol<int()>("nvmlInit_v2");
    const auto shutdown = lib.symbol<int()>("nvmlShutdown");
    const auto driver_version = lib.symbol<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
    const auto cuda_version = lib.symbol<int(int*)>("nvmlSystemGetCudaDriverVersion_v2");
    const auto get_count = lib.symbol<int(unsigned*)>("nvmlDeviceGetCount_v2");
    const auto by_index = lib.symbol<int(unsigned, NvmlDevice*)>("nvmlDeviceGetHandleByIndex_v2");
    const auto get_name = lib.symbol<int(NvmlDevice, char*, unsigned)>("nvmlDeviceGetName");
    const auto get_uuid = lib.symbol<int(NvmlDevice, char*, unsigned)>("nvmlDeviceGetUUID");
    const auto get_pci = lib.symbol<int(NvmlDevice, NvmlPciInfo*)>("nvmlDeviceGetPciInfo_v3");
    const auto capability = lib.symbol<int(NvmlDevice, int*, int*)>("nvmlDeviceGetCudaComputeCapability");
    const auto get_memory = lib.symbol<int(NvmlDevice, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
    const auto get_p2p = lib.symbol<int(NvmlDevice, NvmlDevice, int, int*)>("nvmlDeviceGetP2PStatus");
    if (!init || !shutdown || !get_count || !by_index || !get_pci) {
        report.reason = "libnvidia-ml.so.1 lacks a function of NVML 11 or newer; update the NVIDIA driver";
        return false;
    }
    if (const int status = init(); status != 0) {
        report.reason = "the NVIDIA driver does not answer (nvmlInit_v2 returned " + std::to_string(status) + ")";
        return false;
    }
    report.source = "nvml";
    char text[96] = {};
    if (driver_version && driver_version(text, sizeof text) == 0) report.version = text;
    if (cuda_version) cuda_version(&report.cuda_version);
    unsigned count = 0;
    get_count(&count);
    std::vector<NvmlDevice> handles;
    for (unsigned i = 0; i < count && i < kMaxGpus; ++i) {
        NvmlDevice handle = nullptr;
        NvmlPciInfo pci = {};
        if (by_index(i, &handle) != 0 || get_pci(handle, &pci) != 0) {
            report.reason = "GPU " + std::to_string(i) + " does not answer the driver";
            continue;
        }
        DriverGpu gpu;
        pci.bus_id[sizeof pci.bus_id - 1] = 0;
        gpu.bus_id = normal_bus_id(pci.bus_id);
        if (get_name && get_name(handle, text, sizeof text) == 0) gpu.name = text;
        if (get_uuid && get_uuid(handle, text, sizeof text) == 0) gpu.uuid = text;
        if (capability) capability(handle, &gpu.major, &gpu.minor);
        NvmlMemory memory = {};
        if (get_memory && get_memory(handle, &memory) == 0) gpu.memory_bytes = static_cast<int64_t>(memory.total);
        report.gpus.push_back(gpu);
        handles.push_back(handle);
    }
    const size_t n = handles.size();
    StatusMatrix* const matrices[] = {&report.read, &report.write, &report.nvlink};  // nvmlGpuP2PCapsIndex_t 0, 1, 2
    for (int index = 0; get_p2p && index < 3; ++index) {
        matrices[index]->assign(n, std::vector<std::string>(n, "self"));
        for (size_t a = 0; a < n; ++a) {
            for (size_t b = 0; b < n; ++b) {
                int status = -1;
                if (a == b) continue;
                if (get_p2p(handles[a], handles[b], index, &status) != 0) status = -1;
                (*matrices[index])[a][b] = p2p_status(status);
            }
        }
    }
    shutdown();
    return true;
}

bool query_libcuda(DriverReport& report) {
    const DynLib lib("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
    if (!lib) return false;
    const auto init = lib.symbol<int(unsigned)>("cuInit");
    const auto version = lib.symbol<int(int*)>("cuDriverGetVersion");
    const auto get_count = lib.symbol<int(int*)>("cuDeviceGetCount");
    const auto get_name = lib.symbol<int(char*, int, int)>("cuDeviceGetName");
    const auto attribute = lib.symbol<int(int*, int, int)>("cuDeviceGetAttribute");
    const auto pci_bus_id = lib.symbol<int(char*, int, int)>("cuDeviceGetPCIBusId");
    const auto total_mem = lib.symbol<int(size_t*, int)>("cuDeviceTotalMem_v2");
    if (!init || !get_count || !get_name || !attribute || !pci_bus_id) return false;
    if (version) version(&report.cuda_version);
    if (const int status = init(0); status != 0) {
        report.reason = "the NVIDIA driver does not answer (cuInit returned " + std::to_string(status) + ")";
        return false;
    }
    report.source = "libcuda";
    report.reason.clear();
    int count = 0;
    get_count(&count);
    for (int i = 0; i < count && i < kMaxGpus; ++i) {  // a CUdevice is its ordinal
        DriverGpu gpu;
        char text[96] = {};
        if (pci_bus_id(text, sizeof text, i) == 0) gpu.bus_id = normal_bus_id(text);
        if (get_name(text, sizeof text, i) == 0) gpu.name = text;
        attribute(&gpu.major, 75, i);  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        attribute(&gpu.minor, 76, i);  // ..._MINOR
        size_t bytes = 0;
        if (total_mem && total_mem(&bytes, i) == 0) gpu.memory_bytes = static_cast<int64_t>(bytes);
        report.gpus.push_back(gpu);
    }
    return true;
}

}  // namespace

DriverReport query_driver() {
    DriverReport report;
    if (!query_nvml(report)) query_libcuda(report);
    return report;
}

}  // namespace fv::comm
