// SPDX-License-Identifier: Apache-2.0
// GPUs, the PCIe tree between them, NUMA nodes and what stands in the way of peer traffic.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "driver.h"
#include "sysfs.h"

namespace fv::comm {

struct Gpu {
    PciDevice pci;
    DriverGpu driver;  // driver.name empty: the driver does not list it
};

struct Topology {
    DriverReport driver;
    std::vector<Gpu> gpus;                      // by bus id
    std::vector<std::vector<std::string>> links;  // [gpu][gpu], the words of path_class
    std::map<std::string, PciDevice> bridges;   // every bridge above a GPU
    std::vector<NumaNode> numa_nodes;
    std::vector<std::string> iommu_units;
    std::string iommu;                          // "absent", "passthrough", "translated" or "unknown"
    std::vector<std::string> reasons;           // what is missing here, and why; one sentence each
};

// The way between two devices, in the words of `nvidia-smi topo`: X itself, PIX at most one switch, PXB several
// switches, PHB through the host bridge, NODE between host bridges of a NUMA node, SYS between NUMA nodes, ? unknown.
std::string path_class(const PciDevice& a, const PciDevice& b, size_t numa_nodes);

// `ask_driver` false: only the files below `sysfs_root`. Throws std::runtime_error if the root is no directory.
Topology read_topology(const std::string& sysfs_root, bool ask_driver);

}  // namespace fv::comm
