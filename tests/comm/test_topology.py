"""The topology query against fake sysfs trees and fake driver libraries: no GPU is needed, or asked."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fastverify import _ops
from fastverify.comm import topology as topo

pytestmark = pytest.mark.skipif(not _ops.build_info().get("comm"), reason="this build has no _comm (no pybind11)")
compiler = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C compiler to make a fake library with")


class Sysfs:
    """Writes a sysfs tree: devices below pciDDDD:BB, linked from bus/pci/devices as the kernel does."""

    def __init__(self, root: Path):
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def write(self, path: str, text) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else str(text).encode() + b"\n")

    def device(self, *path: str, gpu: bool = False, group: "tuple | None" = None, **attributes) -> str:
        """`path`: host bridge, bridges, the device itself."""
        place = "devices/" + "/".join(path)
        base = {"vendor": "0x10de" if gpu else "0x1022", "device": "0x2bb1", "class": "0x030200" if gpu else "0x060400"}
        for name, value in (base | attributes).items():
            self.write(f"{place}/{name}", value)
        link = self.root / "bus/pci/devices" / path[-1]
        link.symlink_to(os.path.relpath(self.root / place, link.parent))
        if group:
            self.write(f"kernel/iommu_groups/{group[0]}/type", group[1])
            (self.root / place / "iommu_group").symlink_to(self.root / f"kernel/iommu_groups/{group[0]}")
        return path[-1]

    def node(self, number: int, cpus: str, distances: str, kib: int = 1024) -> None:
        base = f"devices/system/node/node{number}"
        self.write(f"{base}/cpulist", cpus)
        self.write(f"{base}/distance", distances)
        self.write(f"{base}/meminfo", f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:  1 kB")


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def query(sysfs, driver=False) -> dict:
    return topo.topology(sysfs.root, driver=driver)


def acs_config(control: int, chain: bool = True) -> bytes:
    """PCIe configuration space whose second extended capability is ACS (id 0x0d) with this control word."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | (0x140 << 20 if chain else 0))  # AER -> 0x140
    struct.pack_into("<IHH", config, 0x140, 0x000D | 1 << 16, 0x5F, control)
    return bytes(config)


GEN5 = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": 16,
        "max_link_speed": "32.0 GT/s PCIe", "max_link_width": 16}


def test_every_distance_class(sysfs):
    """Two GPUs on one switch, a third behind a second switch of it, a fourth on its own root port, a fifth on another
    host bridge of the same node, a sixth on the other node."""
    root, up, down = "0000:40:01.1", "0000:41:00.0", "0000:42:0{}.0"
    for port in (root, up):
        sysfs.device("pci0000:40", *((root,) if port == up else ()), port)
    a = sysfs.device("pci0000:40", root, up, down.format(0), "0000:43:00.0", gpu=True, numa_node=0)
    b = sysfs.device("pci0000:40", root, up, down.format(1), "0000:44:00.0", gpu=True, numa_node=0)
    c = sysfs.device("pci0000:40", root, up, down.format(2), "0000:45:00.0", "0000:46:00.0", "0000:47:00.0",
                     gpu=True, numa_node=0)
    d = sysfs.device("pci0000:40", "0000:40:03.1", "0000:51:00.0", gpu=True, numa_node=0)
    e = sysfs.device("pci0000:60", "0000:60:01.1", "0000:61:00.0", gpu=True, numa_node=0)
    f = sysfs.device("pci0000:c0", "0000:c0:01.1", "0000:c1:00.0", gpu=True, numa_node=1)
    sysfs.node(0, "0-3", "10 32")
    sysfs.node(1, "4-7", "32 10")
    out = query(sysfs)
    assert [g["bus_id"] for g in out["gpus"]] == [a, b, c, d, e, f]
    assert out["links"] == [
        ["X", "PIX", "PXB", "PHB", "NODE", "SYS"],
        ["PIX", "X", "PXB", "PHB", "NODE", "SYS"],
        ["PXB", "PXB", "X", "PHB", "NODE", "SYS"],
        ["PHB", "PHB", "PHB", "X", "NODE", "SYS"],
        ["NODE", "NODE", "NODE", "NODE", "X", "SYS"],
        ["SYS", "SYS", "SYS", "SYS", "SYS", "X"]]
    assert out["gpus"][0]["host_bridge"] == "pci0000:40"
    assert out["gpus"][0]["bridges"] == [root, up, down.format(0)]
    assert set(out["bridges"]) == {x for g in out["gpus"] for x in g["bridges"]}


def test_unknown_numa_node_is_not_guessed(sysfs):
    sysfs.device("pci0000:40", "0000:40:01.1", "0000:41:00.0", gpu=True, numa_node=-1)
    sysfs.device("pci0000:60", "0000:60:01.1", "0000:61:00.0", gpu=True, numa_node=-1)
    sysfs.node(0, "0-1", "10 20")
    sysfs.node(1, "2-3", "20 10")
    out = query(sysfs)
    assert out["links"][0][1] == "?" and out["gpus"][0]["numa_node"] is None
    shutil.rmtree(sysfs.root / "devices/system/node/node1")
    assert query(sysfs)["links"][0][1] == "NODE"


@pytest.mark.parametrize("speed, gen", [("2.5 GT/s PCIe", 1), ("5.0 GT/s PCIe", 2), ("8.0 GT/s PCIe", 3),
                                        ("16.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 5), ("64.0 GT/s PCIe", 6),
                                        ("Unknown", None)])
def test_link_generation(sysfs, speed, gen):
    sysfs.device("pci0000:00", "0000:01:00.0", gpu=True, current_link_speed=speed, current_link_width=8)
    assert query(sysfs)["gpus"][0]["link"] == {"gen": gen, "width": 8, "max_gen": None, "max_width": None}


def test_gpu_without_driver_is_listed_with_what_the_kernel_knows(sysfs):
    sysfs.device("pci0000:40", "0000:40:01.1", "0000:41:00.0", gpu=True, numa_node=1, local_cpulist="8-10,24", **GEN5)
    sysfs.device("pci0000:40", "0000:40:01.1", "0000:41:00.1", vendor="0x10de", **{"class": "0x040300"})  # its audio
    (gpu,) = query(sysfs)["gpus"]
    assert gpu == {"bus_id": "0000:41:00.0", "name": None, "uuid": None, "compute_capability": None,
                   "memory_bytes": None, "link": {"gen": 5, "width": 16, "max_gen": 5, "max_width": 16},
                   "numa_node": 1, "cpus": [8, 9, 10, 24], "host_bridge": "pci0000:40", "bridges": ["0000:40:01.1"],
                   "iommu_group": None, "iommu_type": None}


@pytest.mark.parametrize("config, state", [
    (acs_config(0x1D), "redirect"), (acs_config(0x04), "redirect"), (acs_config(0x08), "redirect"),
    (acs_config(0x11), "off"), (acs_config(0x1D, chain=False), "absent"), (bytes(64), "unknown"), (b"", "unknown"),
    (struct.pack("<I", 0x0001 | 0x100 << 20).rjust(0x104, b"\0") + bytes(4), "absent"),  # a capability list that loops
    (b"\xff" * 4096, "absent")])
def test_acs_of_bridges(sysfs, config, state):
    sysfs.device("pci0000:40", "0000:40:01.1", config=config)
    sysfs.device("pci0000:40", "0000:40:01.1", "0000:41:00.0", gpu=True)
    assert query(sysfs)["bridges"]["0000:40:01.1"]["acs"] == state


@pytest.mark.parametrize("kind, state", [("DMA-FQ", "translated"), ("DMA", "translated"), ("identity", "passthrough")])
def test_iommu(sysfs, kind, state):
    sysfs.device("pci0000:40", "0000:41:00.0", gpu=True, group=(17, kind))
    sysfs.write("class/iommu/ivhd0/x", "")
    out = query(sysfs)
    assert out["iommu"] == {"state": state, "units": ["ivhd0"]}
    assert (out["gpus"][0]["iommu_group"], out["gpus"][0]["iommu_type"]) == (17, kind)


def test_iommu_absent_or_unknown(sysfs):
    sysfs.device("pci0000:40", "0000:41:00.0", gpu=True)
    assert query(sysfs)["iommu"]["state"] == "absent"
    sysfs.write("class/iommu/dmar0/x", "")
    assert query(sysfs)["iommu"]["state"] == "unknown"


def test_numa_nodes(sysfs):
    sysfs.node(0, "0-1,4", "10 12", kib=2048)
    sysfs.node(10, "", "12 10")  # memory only, and sorted by number, not by name
    sysfs.node(2, "2", "12 10")
    sysfs.write("devices/system/node/has_cpu", "0,2")
    out = query(sysfs)["numa_nodes"]
    assert [n["node"] for n in out] == [0, 2, 10]
    assert out[0] == {"node": 0, "cpus": [0, 1, 4], "memory_bytes": 2048 * 1024, "distances": [10, 12]}
    assert out[2]["cpus"] == []


def test_kernel_without_numa_has_one_node(sysfs):
    sysfs.write("devices/system/cpu/online", "0-7")
    assert query(sysfs)["numa_nodes"] == [{"node": 0, "cpus": list(range(8)), "memory_bytes": None, "distances": []}]


def test_empty_tree_gives_empty_lists_and_reasons(sysfs):
    out = query(sysfs)
    assert out["gpus"] == out["links"] == out["numa_nodes"] == [] and out["bridges"] == {}
    assert out["peer_access"] is None and out["driver"] == {"source": None, "version": None, "cuda": None}
    assert out["reasons"] == [f"no NVIDIA GPU among the PCI devices below {sysfs.root}",
                              f"no NUMA nodes or CPUs below {sysfs.root}"]


def test_malformed_files_are_read_as_missing(sysfs):
    sysfs.device("pci0000:40", "0000:41:00.0", gpu=True, numa_node="?", local_cpulist="0-99999999,7", max_link_width="",
                 current_link_width="wide", current_link_speed=b"\xff" * 9000)
    sysfs.write("bus/pci/devices/not-a-bus-id/vendor", "0x10de")
    (sysfs.root / "bus/pci/devices/0000:99:00.0").symlink_to("0000:99:00.0")  # a link to itself
    (gpu,) = query(sysfs)["gpus"]
    assert gpu["numa_node"] is None and len(gpu["cpus"]) == 65536
    assert gpu["link"] == {"gen": None, "width": None, "max_gen": None, "max_width": None}


def test_root_that_is_no_directory():
    with pytest.raises(RuntimeError, match=r"^topology: sysfs_root must be a directory; got '/no/such/sys'\. Fix: "):
        topo.topology("/no/such/sys")


def test_this_machine():
    out = topo.topology()
    n = len(out["gpus"])
    assert [len(row) for row in out["links"]] == [n] * n and all(out["links"][i][i] == "X" for i in range(n))
    assert {c for node in out["numa_nodes"] for c in node["cpus"]} >= os.sched_getaffinity(0)
    assert n > 0 or any("no NVIDIA" in r for r in out["reasons"])
    json.dumps(out)  # plain data


def test_without_the_module_the_error_says_what_to_do(monkeypatch):
    import fastverify

    monkeypatch.setitem(sys.modules, "fastverify._comm", None)
    monkeypatch.delattr(fastverify, "_comm", raising=False)
    with pytest.raises(RuntimeError, match=r"^comm: fastverify\._comm must be built for this Python; got .*\. Fix: pip"):
        topo.topology()


def test_version_is_the_packages():
    import fastverify
    from fastverify import _comm

    assert _comm.version() == topo.build_info()["version"] == fastverify.__version__
    assert topo.build_info()["python"] == ".".join(map(str, sys.version_info[:3]))


# ---- the driver and NCCL, played by libraries compiled here -------------------------------------------------------

FAKE_NVML = r"""
#include <stdio.h>
#include <string.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } Pci;
static const char* ids[2] = {"00000000:61:00.0", "00000000:41:00.0"};
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char* s, unsigned n) { snprintf(s, n, "580.82.07"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* v) { *v = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) { *h = (void*)(unsigned long)(i + 1); return i < 2 ? 0 : 4; }
int nvmlDeviceGetName(void* h, char* s, unsigned n) { snprintf(s, n, "Card %d", (int)(unsigned long)h); return 0; }
int nvmlDeviceGetUUID(void* h, char* s, unsigned n) { snprintf(s, n, "GPU-%d", (int)(unsigned long)h); return 0; }
int nvmlDeviceGetPciInfo_v3(void* h, Pci* p) { strcpy(p->bus_id, ids[(unsigned long)h - 1]); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* h, int* a, int* b) { *a = 12; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void* h, unsigned long long* m) { m[0] = 96ull << 30; m[1] = m[2] = 0; return 0; }
int nvmlDeviceGetP2PStatus(void* a, void* b, int index, int* status) {
    *status = index == 2 ? 5 : a == (void*)1 ? 0 : 1;  /* not symmetric: rows and columns must not be mixed up */
    return 0;
}
"""
FAKE_CUDA = r"""
#include <stdio.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int* v) { *v = 12080; return 0; }
int cuDeviceGetCount(int* n) { *n = 1; return 0; }
int cuDeviceGetName(char* s, int n, int d) { snprintf(s, n, "Card"); return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 1 : -1; return 0; }
int cuDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:41:00.0"); return 0; }
int cuDeviceTotalMem_v2(unsigned long* b, int d) { *b = 1ul << 30; return 0; }
"""
FAKE_NCCL = "int ncclGetVersion(int* v) { *v = VERSION; return 0; }"


def compile_library(path: Path, source: str, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags], input=source.encode(),
                   check=True, capture_output=True)
    return path


def in_process(code: str, libraries: "Path | None" = None, **env) -> dict:
    """Runs `code` in a fresh Python whose loader looks into `libraries` first; it prints one JSON value."""
    own = ("FASTVERIFY_NCCL_LIB", "CUDA_VISIBLE_DEVICES")  # hidden GPUs are a reason of their own
    run_env = {k: v for k, v in os.environ.items() if k not in own} | env
    run_env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if libraries:
        run_env["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run([sys.executable, "-c", "import json, ctypes\nfrom fastverify.comm import topology as t\n" + code],
                          env=run_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_compiler
def test_driver_facts_meet_the_kernels_by_bus_id(sysfs, tmp_path):
    compile_library(tmp_path / "lib/libnvidia-ml.so.1", FAKE_NVML, "-DINIT=0")
    sysfs.device("pci0000:40", "0000:40:01.1", "0000:41:00.0", gpu=True, numa_node=0, **GEN5)
    sysfs.device("pci0000:80", "0000:80:01.1", "0000:81:00.0", gpu=True, numa_node=0)  # the driver does not list it
    sysfs.node(0, "0", "10")
    out = in_process(f"print(json.dumps(t.topology({str(sysfs.root)!r})))", tmp_path / "lib")
    assert out["driver"] == {"source": "nvml", "version": "580.82.07", "cuda": "13.0"}
    assert [(g["bus_id"], g["name"], g["compute_capability"], g["uuid"]) for g in out["gpus"]] == [
        ("0000:41:00.0", "Card 2", [12, 0], "GPU-2"), ("0000:61:00.0", "Card 1", [12, 0], "GPU-1"),
        ("0000:81:00.0", None, None, None)]
    assert out["gpus"][0]["link"]["gen"] == 5 and out["gpus"][0]["memory_bytes"] == 96 << 30
    assert out["peer_access"]["write"] == [["self", "chipset not supported", "unknown"], ["ok", "self", "unknown"],
                                           ["unknown", "unknown", "unknown"]]
    assert out["peer_access"]["nvlink"][0][1] == "not supported"
    assert out["links"][0] == ["X", "?", "NODE"]
    assert out["reasons"] == ["GPU 2 does not answer the driver",
                              "GPU 0000:61:00.0: not among the PCI devices this system shows",
                              "GPU 0000:81:00.0: the driver does not list it"]


@needs_compiler
def test_driver_that_does_not_answer(sysfs, tmp_path):
    compile_library(tmp_path / "lib/libnvidia-ml.so.1", FAKE_NVML, "-DINIT=9")
    out = in_process(f"print(json.dumps(t.topology({str(sysfs.root)!r})))", tmp_path / "lib")
    assert "the NVIDIA driver does not answer (nvmlInit_v2 returned 9)" in out["reasons"]
    assert out["gpus"] == [] and out["driver"]["source"] is None


@needs_compiler
def test_library_that_is_not_nvml(sysfs, tmp_path):
    compile_library(tmp_path / "lib/libnvidia-ml.so.1", "int nvmlInit(void) { return 0; }")
    out = in_process(f"print(json.dumps(t.topology({str(sysfs.root)!r})))", tmp_path / "lib")
    assert out["reasons"][0] == "libnvidia-ml.so.1 lacks a function of NVML 11 or newer; update the NVIDIA driver"


@needs_compiler
def test_libcuda_serves_where_nvml_is_missing(sysfs, tmp_path):
    compile_library(tmp_path / "lib/libnvidia-ml.so.1", "int nothing;")  # stands before a real one on a GPU machine
    compile_library(tmp_path / "lib/libcuda.so.1", FAKE_CUDA)
    sysfs.device("pci0000:40", "0000:41:00.0", gpu=True)
    out = in_process(f"print(json.dumps(t.topology({str(sysfs.root)!r})))", tmp_path / "lib")
    assert out["driver"] == {"source": "libcuda", "version": None, "cuda": "12.8"} and out["peer_access"] is None
    assert out["gpus"][0]["compute_capability"] == [9, 1] and out["gpus"][0]["memory_bytes"] == 1 << 30


@needs_compiler
def test_nccl_order_env_then_mapped_then_wheel(tmp_path):
    soname = "-Wl,-soname,libnccl.so.2"
    env = compile_library(tmp_path / "env/libother.so", FAKE_NCCL, "-DVERSION=22707")
    mapped = compile_library(tmp_path / "mapped/libnccl.so.2", FAKE_NCCL, "-DVERSION=23203", soname)
    wheel = compile_library(tmp_path / "site/nvidia/nccl/lib/libnccl.so.2", FAKE_NCCL, "-DVERSION=2804")
    (tmp_path / "site/nvidia/__init__.py").touch()  # before a real nvidia package of this environment
    site = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    ask = "print(json.dumps(t.nccl_library()))"
    load = f"ctypes.CDLL({str(mapped)!r})\n"
    out = in_process(site + load + ask, FASTVERIFY_NCCL_LIB=str(env))
    assert (out["source"], out["version"], out["path"]) == ("FASTVERIFY_NCCL_LIB", "2.27.7", str(env))
    out = in_process(site + load + ask)
    assert (out["source"], out["version"], out["path"]) == ("mapped", "2.32.3", str(mapped))
    out = in_process(site + ask)
    assert (out["source"], out["version"], out["path"]) == ("wheel", "2.8.4", str(wheel))
    assert len(out["tried"]) == 1 and out["tried"][0].startswith("mapped: ")


@needs_compiler
def test_a_named_nccl_that_is_wrong_is_not_passed_over(tmp_path):
    wrong = compile_library(tmp_path / "libwrong.so", "int nothing;")
    compile_library(tmp_path / "site/nvidia/nccl/lib/libnccl.so.2", FAKE_NCCL, "-DVERSION=2804")
    site = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    for path, why in ((wrong, f"{wrong} is not NCCL (no working ncclGetVersion)"), (tmp_path / "none.so", "cannot open")):
        out = in_process(site + "print(json.dumps(t.nccl_library()))", FASTVERIFY_NCCL_LIB=str(path))
        assert out["path"] is out["version"] is out["source"] is None
        assert len(out["tried"]) == 1 and why in out["tried"][0]
