// SPDX-License-Identifier: Apache-2.0
// fastverify._comm: the control plane of the communicators. Plain C++, no tensors, no torch, no CUDA headers.
// Everything it returns is a plain dict; None stands for "not known here".
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "handle.h"
#include "memory.h"
#include "nccl.h"
#include "topology.h"

namespace py = pybind11;

namespace fv::comm {
namespace {

py::object text_or_none(const std::string& s) { return s.empty() ? py::object(py::none()) : py::object(py::str(s)); }
template <class T>
py::object positive_or_none(T v) { return v > 0 ? py::object(py::int_(v)) : py::object(py::none()); }
py::object index_or_none(int v) { return v >= 0 ? py::object(py::int_(v)) : py::object(py::none()); }

py::object cuda_version_text(int code) {  // 13000 -> "13.0"
    if (code <= 0) return py::none();
    return py::str(std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10));
}

py::dict link_dict(const Link& link) {
    py::dict d;
    d["gen"] = positive_or_none(link.gen);
    d["width"] = positive_or_none(link.width);
    d["max_gen"] = positive_or_none(link.max_gen);
    d["max_width"] = positive_or_none(link.max_width);
    return d;
}

py::dict gpu_dict(const Gpu& gpu) {
    py::dict d;
    d["bus_id"] = gpu.pci.bus_id;
    d["name"] = text_or_none(gpu.driver.name);
    d["uuid"] = text_or_none(gpu.driver.uuid);
    d["compute_capability"] =
        gpu.driver.major > 0 ? py::object(py::make_tuple(gpu.driver.major, gpu.driver.minor)) : py::object(py::none());
    d["memory_bytes"] = positive_or_none(gpu.driver.memory_bytes);
    d["link"] = link_dict(gpu.pci.link);
    d["numa_node"] = index_or_none(gpu.pci.numa_node);
    d["cpus"] = gpu.pci.cpus;
    d["host_bridge"] = text_or_none(gpu.pci.host_bridge);
    d["bridges"] = gpu.pci.bridges;
    d["iommu_group"] = index_or_none(gpu.pci.iommu_group);
    d["iommu_type"] = text_or_none(gpu.pci.iommu_type);
    return d;
}

py::dict driver_dict(const DriverReport& report) {
    py::dict d;
    d["source"] = text_or_none(report.source);
    d["version"] = text_or_none(report.version);
    d["cuda"] = cuda_version_text(report.cuda_version);
    return d;
}

py::dict topology(const std::string& sysfs_root, bool driver) {
    Topology t;
    {
        const py::gil_scoped_release release;
        t = read_topology(sysfs_root, driver);
    }
    py::list gpus, nodes;
    for (const Gpu& g : t.gpus) gpus.append(gpu_dict(g));
    for (const NumaNode& n : t.numa_nodes) {
        py::dict d;
        d["node"] = n.node;
        d["cpus"] = n.cpus;
        d["memory_bytes"] = positive_or_none(n.memory_bytes);
        d["distances"] = n.distances;
        nodes.append(d);
    }
    py::dict bridges, iommu, out;
    for (const auto& [id, pci] : t.bridges) {
        py::dict d;
        d["link"] = link_dict(pci.link);
        d["acs"] = text_or_none(pci.acs);
        d["vendor"] = pci.vendor;
        d["device"] = pci.device;
        bridges[py::str(id)] = d;
    }
    iommu["state"] = t.iommu;
    iommu["units"] = t.iommu_units;
    out["driver"] = driver_dict(t.driver);
    out["gpus"] = gpus;
    out["links"] = t.links;
    if (t.driver.read.empty()) {
        out["peer_access"] = py::none();
    } else {
        py::dict peer;
        peer["read"] = t.driver.read;
        peer["write"] = t.driver.write;
        peer["nvlink"] = t.driver.nvlink;
        out["peer_access"] = peer;
    }
    out["bridges"] = bridges;
    out["numa_nodes"] = nodes;
    out["iommu"] = iommu;
    out["reasons"] = t.reasons;
    return out;
}

py::dict nccl_library(const std::string& env_path, const std::string& wheel_path) {
    const NcclReport report = find_nccl(env_path, wheel_path);
    py::dict d;
    d["path"] = text_or_none(report.path);
    d["source"] = text_or_none(report.source);
    d["version"] = report.version_code > 0 && !report.path.empty()
                       ? py::object(py::str(nccl_version_text(report.version_code)))
                       : py::object(py::none());
    d["tried"] = report.tried;
    return d;
}

std::unique_ptr<Handle> make_handle(int world, int rank, int local_ranks, const std::string& transport, int device, int blocks,
                                    int64_t max_bytes, int64_t one_shot_bytes, int64_t deadline_ns,
                                    const std::vector<std::tuple<std::vector<uint64_t>, uint64_t, uint64_t, uint64_t>>& ranks,
                                    const NcclComm* nccl) {
    HandleConfig c{world, rank, local_ranks, kGathered, device, blocks, max_bytes, one_shot_bytes, deadline_ns};
    if (transport == "peer") c.transport = kPeerMemory;
    else if (transport == "host") c.transport = kHostMailbox;
    else if (transport == "nccl") c.transport = kNccl;
    else if (transport != "gathered") throw std::invalid_argument("Communicator: transport must be gathered|peer|host|nccl; got " + transport + ".");
    std::vector<RankAddresses> addresses;
    for (const auto& [slabs, state, status, hooks] : ranks) addresses.push_back(RankAddresses{slabs, state, status, hooks});
    auto handle = std::make_unique<Handle>(c, addresses);
    if (nccl) handle->set_nccl(nccl->calls());
    return handle;
}

int64_t slab_size(int world, int64_t max_bytes) {
    return slab_bytes(world, max_bytes);
}

py::dict nccl_config_layout() {
    py::dict d;
    const NcclConfig c;
    const auto field = [&](const char* name, const auto& member) {
        d[name] = py::make_tuple(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&c), sizeof member);
    };
    field("size", c.size), field("magic", c.magic), field("version", c.version), field("blocking", c.blocking);
    field("cgaClusterSize", c.cga_cluster_size), field("minCTAs", c.min_ctas), field("maxCTAs", c.max_ctas);
    field("netName", c.net_name), field("splitShare", c.split_share), field("trafficClass", c.traffic_class);
    field("commName", c.comm_name), field("collnetEnable", c.collnet_enable), field("CTAPolicy", c.cta_policy);
    field("shrinkShare", c.shrink_share), field("nvlsCTAs", c.nvls_ctas);
    d["sizeof"] = py::make_tuple(sizeof c, c.version);
    return d;
}

py::dict build_info() {
    py::dict d;
    d["version"] = FV_VERSION;
    d["cxx"] = FV_CXX;
    d["cxx_standard"] = static_cast<long>(__cplusplus);
    d["pybind11"] = PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_MINOR);
    d["python"] = PY_VERSION;
    return d;
}

}  // namespace
}  // namespace fv::comm

PYBIND11_MODULE(_comm, m) {
    using namespace fv;
    using namespace fv::comm;
    m.doc() = "Control plane of fastverify's communicators; use fastverify.comm.topology.";
    m.def("version", [] { return FV_VERSION; }, "Version of the package this module was built from.");
    m.def("build_info", &fv::comm::build_info, "Compiler, C++ standard, pybind11 and Python of this build.");
    py::class_<Handle>(m, "Handle", "Owner of the fv_comm that ops take by address.")
        .def(py::init(&make_handle), py::kw_only(), py::arg("world"), py::arg("rank"), py::arg("local_ranks"),
             py::arg("transport"), py::arg("device"), py::arg("blocks"), py::arg("max_bytes"), py::arg("one_shot_bytes"),
             py::arg("deadline_ns"), py::arg("ranks"), py::arg("nccl") = nullptr, py::keep_alive<1, 12>())
        .def_property_readonly("address", &Handle::address)
        .def("set_one_shot_bytes", &Handle::set_one_shot_bytes)
        .def("set_island_bytes", &Handle::set_island_bytes)
        .def("set_fp8_bytes", &Handle::set_fp8_bytes)
        .def("set_blocks", &Handle::set_blocks)
        .def("set_forced", &Handle::set_forced)
        .def("set_deadline_ns", &Handle::set_deadline_ns)
        .def("close", &Handle::close);
    const auto released = py::call_guard<py::gil_scoped_release>();
    py::class_<DeviceSlab>(m, "DeviceSlab", "GPU memory of this process that others may map.")
        .def(py::init<int64_t>(), py::arg("bytes"))
        .def_property_readonly("address", &DeviceSlab::address)
        .def("ipc_handle", [](const DeviceSlab& s) { return py::bytes(s.ipc_handle()); })
        .def("fill", &DeviceSlab::fill, py::arg("offset"), py::arg("bytes"), py::arg("value"), released);
    py::class_<PeerSlab>(m, "PeerSlab", "A DeviceSlab of another process.")
        .def(py::init([](const py::bytes& handle) { return std::make_unique<PeerSlab>(std::string(handle)); }), py::arg("ipc_handle"))
        .def_property_readonly("address", &PeerSlab::address);
    py::class_<HostRegion>(m, "HostRegion", "A region of /dev/shm that several processes and their GPUs see.")
        .def(py::init<const std::string&, int64_t, bool>(), py::arg("name"), py::arg("bytes"), py::arg("create"))
        .def_property_readonly("address", &HostRegion::address)
        .def_property_readonly("name", &HostRegion::name)
        .def_property_readonly("device_address", &HostRegion::device_address)
        .def("bind", &HostRegion::bind, py::arg("numa_node"))
        .def("fill", &HostRegion::fill, py::arg("offset"), py::arg("bytes"), py::arg("value"), released)
        .def("register_cuda", &HostRegion::register_cuda, released)
        .def("unlink", &HostRegion::unlink);
    py::class_<NcclComm>(m, "NcclComm", "A NCCL communicator of our own; every wait in it ends.")
        .def(py::init([](const std::string& library, int world, int rank, const py::bytes& unique_id, int blocking,
                         int cga_cluster_size, int min_ctas, int max_ctas, int cta_policy, double seconds) {
                 const std::string id(unique_id);
                 const NcclOptions options{blocking, cga_cluster_size, min_ctas, max_ctas, cta_policy};
                 const py::gil_scoped_release release;
                 return std::make_unique<NcclComm>(library, world, rank, id, options, seconds);
             }),
             py::arg("library"), py::arg("world"), py::arg("rank"), py::arg("unique_id"), py::kw_only(), py::arg("blocking") = 1,
             py::arg("cga_cluster_size") = kNcclUndefined, py::arg("min_ctas") = kNcclUndefined,
             py::arg("max_ctas") = kNcclUndefined, py::arg("cta_policy") = kNcclUndefined, py::arg("seconds") = 60.0)
        .def_property_readonly("version", [](const NcclComm& c) { return nccl_version_text(c.version_code()); })
        .def("async_error", &NcclComm::async_error)
        .def("start_connect", &NcclComm::start_connect, py::arg("buffer"), py::arg("bytes"), py::arg("stream"), released)
        .def("connect_state", &NcclComm::connect_state, released)
        .def("abort", &NcclComm::abort, py::arg("seconds"), released)
        .def("close", &NcclComm::close, py::arg("seconds"), released)
        .def("register_window", &NcclComm::register_window, py::arg("address"), py::arg("bytes"), released);
    py::class_<NcclBuffer>(m, "NcclBuffer", "Memory of ncclMemAlloc, which windows take.")
        .def(py::init<const std::string&, int64_t>(), py::arg("library"), py::arg("bytes"))
        .def_property_readonly("address", &NcclBuffer::address);
    m.def("nccl_unique_id", [](const std::string& library) { return py::bytes(nccl_unique_id(library)); }, py::arg("library"));
    m.def("nccl_config_layout", &nccl_config_layout, "Field -> (offset, bytes) of the ncclConfig_t passed to NCCL.");
    m.def("slab_bytes", &slab_size, py::arg("world"), py::arg("max_bytes"));
    m.attr("SLAB_HEADER") = kSlabHeader;
    m.attr("MAX_RANKS") = kMaxRanks;
    m.attr("EPOCH_WORDS") = kEpochWords;
    m.attr("STATE_WORDS") = static_cast<int>(kCommStateWords);
    m.attr("STATUS_WORDS") = static_cast<int>(kCommStatusWords);
    m.attr("NEVER") = kNever;
    m.attr("GATHER_BYTES") = kGatherBytes;
    m.def("gather_offset", [](int world, int64_t max_bytes) { return gather_offset(world, slot_stride(max_bytes)); });
    m.def("topology", &fv::comm::topology, py::arg("sysfs_root"), py::arg("driver"));
    m.def("nccl_library", &fv::comm::nccl_library, py::arg("env_path"), py::arg("wheel_path"));
}
