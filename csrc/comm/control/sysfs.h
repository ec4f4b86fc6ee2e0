// SPDX-License-Identifier: Apache-2.0
// What the kernel says about PCIe, NUMA and the IOMMU: plain reads below a root ("/sys", or a test's tree).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fv::comm {

struct Link {  // 0: not stated. An idle GPU lowers `gen`; `max_gen` and `max_width` are what the slot and card can do
    int gen = 0, width = 0, max_gen = 0, max_width = 0;
};

struct PciDevice {
    std::string bus_id;                // "0000:41:00.0"
    uint32_t vendor = 0, device = 0;
    uint32_t device_class = 0;         // 0xCCSSPP
    std::string host_bridge;           // "pci0000:40"; empty: the tree is not visible
    std::vector<std::string> bridges;  // bus ids from the root port down, the device itself excluded
    Link link;
    int numa_node = -1;                // -1: the kernel does not say
    std::vector<int> cpus;             // CPUs next to it
    int iommu_group = -1;
    std::string iommu_type;            // "identity", "DMA", "DMA-FQ", ...; empty: not stated
    std::string acs;                   // see acs_state
};

struct NumaNode {
    int node = 0;
    std::vector<int> cpus;
    int64_t memory_bytes = 0;
    std::vector<int> distances;  // to every node, in the kernel's order; 10 = itself
};

// "0-3,8" -> {0,1,2,3,8}; stops at the first thing it cannot read, and at 65536 entries.
std::vector<int> parse_cpu_list(const std::string& text);

// "32.0 GT/s PCIe" -> 5; 0 if unknown.
int link_generation(const std::string& speed);

// Lower-case "dddd:bb:dd.f" of any spelling ("00000000:41:00.0" too); empty if it is not a bus id.
std::string normal_bus_id(const std::string& text);

// ACS of a bridge from its PCI configuration space: "redirect" (peer traffic is sent up to the root complex),
// "off", "absent" (no such capability) or "unknown" (only root may read that far).
std::string acs_state(const std::vector<uint8_t>& config);

PciDevice read_pci_device(const std::string& root, const std::string& bus_id);
std::vector<PciDevice> read_nvidia_gpus(const std::string& root);  // by bus id; vendor 10de, display class
std::vector<NumaNode> read_numa_nodes(const std::string& root);
std::vector<std::string> read_iommu_units(const std::string& root);  // "dmar0", "ivhd1", ...
bool is_directory(const std::string& path);

}  // namespace fv::comm
