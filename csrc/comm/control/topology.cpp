// SPDX-License-Identifier: Apache-2.0
#include "topology.h"

#include <algorithm>
#include <stdexcept>

namespace fv::comm {
namespace {

std::vector<std::vector<std::string>> reorder(const StatusMatrix& m, const std::vector<int>& from) {
    StatusMatrix out(from.size(), std::vector<std::string>(from.size(), "unknown"));
    for (size_t a = 0; a < from.size(); ++a) {
        for (size_t b = 0; b < from.size(); ++b) {
            if (from[a] >= 0 && from[b] >= 0) out[a][b] = m[from[a]][from[b]];
        }
    }
    return out;
}

// One list of GPUs out of what the kernel and the driver each know; peer matrices follow its order.
void merge_gpus(Topology& t, const std::string& root, bool ask_driver) {
    for (const PciDevice& pci : read_nvidia_gpus(root)) t.gpus.push_back({pci, {}});
    for (const DriverGpu& known : t.driver.gpus) {
        auto it = std::find_if(t.gpus.begin(), t.gpus.end(), [&](const Gpu& g) { return g.pci.bus_id == known.bus_id; });
        if (it == t.gpus.end()) {
            PciDevice pci;
            pci.bus_id = known.bus_id;
            it = t.gpus.insert(it, {pci, {}});
            t.reasons.push_back("GPU " + known.bus_id + ": not among the PCI devices this system shows");
        }
        it->driver = known;
    }
    std::sort(t.gpus.begin(), t.gpus.end(), [](const Gpu& a, const Gpu& b) { return a.pci.bus_id < b.pci.bus_id; });
    std::vector<int> from;
    for (const Gpu& g : t.gpus) {
        const auto same = [&](const DriverGpu& d) { return d.bus_id == g.pci.bus_id; };
        const auto it = std::find_if(t.driver.gpus.begin(), t.driver.gpus.end(), same);
        from.push_back(it == t.driver.gpus.end() ? -1 : static_cast<int>(it - t.driver.gpus.begin()));
        if (from.back() < 0 && ask_driver) t.reasons.push_back("GPU " + g.pci.bus_id + ": the driver does not list it");
    }
    for (StatusMatrix* m : {&t.driver.read, &t.driver.write, &t.driver.nvlink}) {
        if (!m->empty()) *m = reorder(*m, from);
    }
}

std::string iommu_state(const Topology& t) {
    bool translated = false, stated = false;
    for (const Gpu& g : t.gpus) {
        stated = stated || !g.pci.iommu_type.empty();
        translated = translated || (!g.pci.iommu_type.empty() && g.pci.iommu_type != "identity");
    }
    if (stated) return translated ? "translated" : "passthrough";
    return t.iommu_units.empty() ? "absent" : "unknown";
}

}  // namespace

std::string path_class(const PciDevice& a, const PciDevice& b, size_t numa_nodes) {
    if (a.bus_id == b.bus_id) return "X";
    if (a.host_bridge.empty() || b.host_bridge.empty()) return "?";
    if (a.host_bridge != b.host_bridge) {
        if (a.numa_node >= 0 && b.numa_node >= 0) return a.numa_node == b.numa_node ? "NODE" : "SYS";
        return numa_nodes == 1 ? "NODE" : "?";
    }
    size_t common = 0;
    while (common < std::min(a.bridges.size(), b.bridges.size()) && a.bridges[common] == b.bridges[common]) ++common;
    if (common == 0) return "PHB";
    // Below the last common bridge (a switch's upstream port) each side has one downstream port per switch left.
    const size_t left = std::max(a.bridges.size(), b.bridges.size()) - common;
    return left <= 1 ? "PIX" : "PXB";
}

Topology read_topology(const std::string& sysfs_root, bool ask_driver) {
    if (!is_directory(sysfs_root)) {
        throw std::runtime_error("topology: sysfs_root must be a directory; got '" + sysfs_root +
                                 "'. Fix: leave it out, or name a mounted sysfs.");
    }
    Topology t;
    if (ask_driver) t.driver = query_driver();
    if (!t.driver.reason.empty()) t.reasons.push_back(t.driver.reason);
    merge_gpus(t, sysfs_root, ask_driver);
    if (t.gpus.empty()) t.reasons.push_back("no NVIDIA GPU among the PCI devices below " + sysfs_root);
    for (const Gpu& g : t.gpus) {
        for (const std::string& id : g.pci.bridges) t.bridges.emplace(id, read_pci_device(sysfs_root, id));
    }
    t.numa_nodes = read_numa_nodes(sysfs_root);
    if (t.numa_nodes.empty()) t.reasons.push_back("no NUMA nodes or CPUs below " + sysfs_root);
    t.links.assign(t.gpus.size(), std::vector<std::string>(t.gpus.size()));
    for (size_t a = 0; a < t.gpus.size(); ++a) {
        for (size_t b = 0; b < t.gpus.size(); ++b) {
            t.links[a][b] = path_class(t.gpus[a].pci, t.gpus[b].pci, t.numa_nodes.size());
        }
    }
    t.iommu_units = read_iommu_units(sysfs_root);
    t.iommu = iommu_state(t);
    return t;
}

}  // namespace fv::comm
