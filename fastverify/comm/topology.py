"""What hardware is here and how it is wired: GPUs, the PCIe tree between them, NUMA nodes, IOMMU, NCCL."""

import importlib.util
import os
from pathlib import Path


def _control():
    """The compiled control plane, imported at the first use."""
    package = Path(__file__).resolve().parents[1]
    try:
        if not any(package.glob("_comm*.so")):  # the finder of an editable install elsewhere would hand out that one's
            raise ImportError(f"no _comm in {package}")
        from .. import _comm
    except ImportError as exc:
        raise RuntimeError(
            f"comm: fastverify._comm must be built for this Python; got an install without it ({exc}). "
            "Fix: pip install pybind11 && pip install --no-build-isolation --force-reinstall --no-deps .") from exc
    return _comm


def nccl_library() -> dict:
    """Which NCCL a communicator of this process would load.

    Order: $FASTVERIFY_NCCL_LIB (alone, if set), the copy that is mapped already (torch's), the nvidia-nccl wheel's.

    Returns {"path", "source", "version"}, all None where there is none, and "tried": one line per place without one.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    wheels = [str(p) for r in roots for p in Path(r).glob("nccl/lib/libnccl.so.2")]
    return _control().nccl_library(os.environ.get("FASTVERIFY_NCCL_LIB", ""), wheels[0] if wheels else "")


def topology(sysfs_root: str = "/sys", driver: bool = True) -> dict:
    """GPUs and the way between them, as a plain dict. Works without a GPU, a driver or root rights.

    Args:
        sysfs_root: where sysfs is mounted.
        driver: also ask the NVIDIA driver (NVML; libcuda only without it). No CUDA context is created, and through
            NVML a later fork stays safe.

    Returns, None wherever this machine does not say:
        gpus: by bus id: bus_id, name, uuid, compute_capability (major, minor), memory_bytes, link {gen, width, max_gen,
            max_width} (an idle GPU lowers gen), numa_node, cpus (next to it), host_bridge, bridges (from the root
            port down), iommu_group, iommu_type. The order is NVML's, not that of CUDA_VISIBLE_DEVICES.
        links [gpu][gpu]: X itself, PIX at most one PCIe switch, PXB several, PHB through the host bridge, NODE within
            a NUMA node, SYS between NUMA nodes, ? unknown (the words of `nvidia-smi topo`).
        peer_access {read, write, nvlink} [gpu][gpu]: "ok" or the driver's reason.
        bridges {bus_id: link, acs, vendor, device}: acs "redirect" sends peer traffic up to the root complex; "off",
            "absent", or "unknown" (only root may read it).
        numa_nodes: node, cpus, memory_bytes, distances (10 = itself).
        iommu {state, units}: "absent", "passthrough", "translated" (peer traffic may be slow or fail) or "unknown".
        driver {source, version, cuda}; nccl: see nccl_library; reasons: one sentence per thing that is missing.

    Raises RuntimeError if sysfs_root is no directory or _comm was not built. Cost: some milliseconds; not for the
    step path.
    """
    out = _control().topology(str(sysfs_root), bool(driver))
    out["nccl"] = nccl_library()
    return out


def build_info() -> dict:
    """Version, compiler, C++ standard, pybind11 and Python of fastverify._comm."""
    return _control().build_info()
