// SPDX-License-Identifier: Apache-2.0
#include "sysfs.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace fs = std::filesystem;

namespace fv::comm {
namespace {

constexpr size_t kMaxBytes = 4096;  // a sysfs attribute is one page; so is PCIe configuration space
constexpr size_t kMaxCpus = 65536;

std::string read_bytes(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string text(kMaxBytes, '\0');
    file.read(text.data(), static_cast<std::streamsize>(kMaxBytes));
    text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
    return text;
}

std::string read_text(const fs::path& path) {
    std::string text = read_bytes(path);
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
    return text;
}

int read_int(const fs::path& path, int missing) {
    const std::string text = read_text(path);
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    return end == text.c_str() ? missing : static_cast<int>(value);
}

uint32_t read_hex(const fs::path& path) {
    return static_cast<uint32_t>(std::strtoul(read_text(path).c_str(), nullptr, 16));
}

// Names in a directory, sorted; empty if it cannot be read.
std::vector<std::string> list(const fs::path& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
        names.push_back(it->path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

int trailing_number(const std::string& text) {
    size_t i = text.size();
    while (i > 0 && std::isdigit(static_cast<unsigned char>(text[i - 1]))) --i;
    return i == text.size() ? -1 : std::atoi(text.c_str() + i);
}

}  // namespace

bool is_directory(const std::string& path) {
    std::error_code error;
    return fs::is_directory(path, error);
}

std::vector<int> parse_cpu_list(const std::string& text) {
    std::vector<int> cpus;
    const char* p = text.c_str();
    while (std::isdigit(static_cast<unsigned char>(*p))) {
        char* end = nullptr;
        const long first = std::strtol(p, &end, 10);
        long last = first;
        if (*end == '-') last = std::strtol(end + 1, &end, 10);
        for (long cpu = first; cpu <= last && cpus.size() < kMaxCpus; ++cpu) cpus.push_back(static_cast<int>(cpu));
        p = *end == ',' ? end + 1 : end;
    }
    return cpus;
}

int link_generation(const std::string& speed) {
    const double gt = std::strtod(speed.c_str(), nullptr);  // per lane: 2.5, 5, 8, 16, 32, 64 GT/s
    int gen = 0;
    for (double limit : {2.5, 5.0, 8.0, 16.0, 32.0, 64.0}) gen += gt >= limit;
    return gen;
}

std::string normal_bus_id(const std::string& text) {
    unsigned domain = 0, bus = 0, device = 0, function = 0;
    int used = 0;
    const int fields = std::sscanf(text.c_str(), "%8x:%2x:%2x.%1x%n", &domain, &bus, &device, &function, &used);
    if (fields != 4 || static_cast<size_t>(used) != text.size()) return "";
    char out[32];
    std::snprintf(out, sizeof out, "%04x:%02x:%02x.%x", domain, bus, device, function);
    return out;
}

std::string acs_state(const std::vector<uint8_t>& config) {
    constexpr size_t kExtended = 0x100;  // extended capabilities start here
    constexpr uint32_t kAcsId = 0x000d;
    constexpr uint32_t kRedirect = 1u << 2 | 1u << 3;  // peer-to-peer request and completion redirect
    if (config.size() <= kExtended) return "unknown";
    size_t at = kExtended;
    for (int hops = 0; hops < 1024 && at >= kExtended && at + 8 <= config.size(); ++hops) {
        const uint32_t header = config[at] | config[at + 1] << 8 | config[at + 2] << 16 |
                                static_cast<uint32_t>(config[at + 3]) << 24;
        if ((header & 0xffff) == kAcsId) {
            const uint32_t control = config[at + 6] | config[at + 7] << 8;
            return control & kRedirect ? "redirect" : "off";
        }
        at = header >> 20 & 0xffc;
    }
    return "absent";
}

PciDevice read_pci_device(const std::string& root, const std::string& bus_id) {
    PciDevice d;
    d.bus_id = bus_id;
    const fs::path dir = fs::path(root) / "bus/pci/devices" / bus_id;
    std::error_code error;
    const fs::path real = fs::canonical(dir, error);
    if (error) return d;
    for (const fs::path& part : real) {
        const std::string name = part.string();
        const std::string id = normal_bus_id(name);
        if (name.rfind("pci", 0) == 0 && name.find(':') != std::string::npos) {
            d.host_bridge = name;
        } else if (!id.empty() && id != bus_id) {
            d.bridges.push_back(id);
        }
    }
    d.vendor = read_hex(dir / "vendor");
    d.device = read_hex(dir / "device");
    d.device_class = read_hex(dir / "class");
    d.link = {link_generation(read_text(dir / "current_link_speed")), read_int(dir / "current_link_width", 0),
              link_generation(read_text(dir / "max_link_speed")), read_int(dir / "max_link_width", 0)};
    d.numa_node = read_int(dir / "numa_node", -1);
    d.cpus = parse_cpu_list(read_text(dir / "local_cpulist"));
    const fs::path group = fs::read_symlink(dir / "iommu_group", error);
    if (!error) {
        d.iommu_group = trailing_number(group.filename().string());
        d.iommu_type = read_text(fs::path(root) / "kernel/iommu_groups" / group.filename() / "type");
    }
    const std::string config = read_bytes(dir / "config");
    d.acs = acs_state(std::vector<uint8_t>(config.begin(), config.end()));
    return d;
}

std::vector<PciDevice> read_nvidia_gpus(const std::string& root) {
    std::vector<PciDevice> gpus;
    const fs::path dir = fs::path(root) / "bus/pci/devices";
    for (const std::string& name : list(dir)) {
        if (normal_bus_id(name) != name || read_hex(dir / name / "vendor") != 0x10de) continue;
        if (read_hex(dir / name / "class") >> 16 != 0x03) continue;  // display controllers: 0300 VGA, 0302 3D
        gpus.push_back(read_pci_device(root, name));
    }
    return gpus;
}

std::vector<NumaNode> read_numa_nodes(const std::string& root) {
    std::vector<NumaNode> nodes;
    const fs::path dir = fs::path(root) / "devices/system/node";
    for (const std::string& name : list(dir)) {
        const int number = trailing_number(name);
        if (number < 0 || name != "node" + std::to_string(number)) continue;
        NumaNode n;
        n.node = number;
        n.cpus = parse_cpu_list(read_text(dir / name / "cpulist"));
        const std::string meminfo = read_text(dir / name / "meminfo");
        const size_t at = meminfo.find("MemTotal:");
        if (at != std::string::npos) n.memory_bytes = std::atoll(meminfo.c_str() + at + 9) * 1024;
        const std::string distance = read_text(dir / name / "distance");
        for (const char* p = distance.c_str(); *p;) {
            char* end = nullptr;
            const long value = std::strtol(p, &end, 10);
            if (end == p) break;
            n.distances.push_back(static_cast<int>(value));
            p = end;
        }
        nodes.push_back(n);
    }
    std::sort(nodes.begin(), nodes.end(), [](const NumaNode& a, const NumaNode& b) { return a.node < b.node; });
    if (nodes.empty()) {  // a kernel without NUMA: one node with every CPU
        NumaNode n;
        n.cpus = parse_cpu_list(read_text(fs::path(root) / "devices/system/cpu/online"));
        if (!n.cpus.empty()) nodes.push_back(n);
    }
    return nodes;
}

std::vector<std::string> read_iommu_units(const std::string& root) { return list(fs::path(root) / "class/iommu"); }

}  // namespace fv::comm
