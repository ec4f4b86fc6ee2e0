"""Collects the facts of this machine and install. Whatever may crash or hang runs in a process with a deadline."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "gguf")
OPTIONAL = {"rich": "tables, colours and progress bars on a terminal", "triton": "Triton kernels", "matplotlib": "plots", "transformers": "the transformers integration"}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO",
             "NCCL_PROTO", "NCCL_GRAPH_FILE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "FASTVERIFY_NCCL_LIB", "FASTVERIFY_CACHE")

TORCH = """
import json, torch
gpus = []
out = dict(version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads(), available=torch.cuda.is_available())
if out["available"]:
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append(dict(name=p.name, capability=f"{p.major}{p.minor}", sms=p.multi_processor_count, memory=p.total_memory))
out["gpus"] = gpus
try:
    out["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if out["cuda"] else None
except Exception as exc:
    out["nccl"] = None
print("FACTS" + json.dumps(out))
"""
INSTALL = """
import json, torch
from fastverify import _ops
out = dict(error=None if _ops._load_error is None else str(_ops._load_error), ops={}, probe={})
if out["error"] is None:
    out["ops"] = {n: [k for k in ("cpu", "cuda") if _ops.has_native_kernel(n, k)] +
                  ["triton"] * (_ops.has_kernel(n, "cuda") and not _ops.has_native_kernel(n, "cuda")) for n in _ops._NAMES}
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count()) if _ops.has_kernel("probe", "cuda")]
    for d in devices:
        try:
            x = torch.arange(1000, dtype=torch.float32, device=d)
            y = torch.empty_like(x)
            _ops.get("probe")(x, y)
            out["probe"][d] = "ok" if torch.equal(y, x + 1) else "wrong result"
        except Exception as exc:
            out["probe"][d] = f"{type(exc).__name__}: {exc}".splitlines()[0]
print("FACTS" + json.dumps(out))
"""
TOPOLOGY = """
import json
from fastverify.comm.topology import topology
print("FACTS" + json.dumps(topology()))
"""


def collect(seconds: float = 90.0) -> dict:
    """All facts. seconds: deadline of each process that is started."""
    return {"python": dict(version=platform.python_version(), executable=sys.executable, system=sys.platform,
                           machine=platform.machine(), libc=" ".join(platform.libc_ver())),
            "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
            "fastverify": dict(version=_own_version(), path=str(PACKAGE), build=_build_info(), other=_other_install()),
            "torch": ask(TORCH, seconds), "install": ask(INSTALL, seconds), "topology": ask(TOPOLOGY, seconds),
            "pci": pci_gpus(), "nvcc": _tool("nvcc", "--version", r"release ([\d.]+)"),
            "nvidia_smi": _tool("nvidia-smi", "--version", r"DRIVER version\s*:\s*([\d.]+)"), "shm": _space("/dev/shm"),
            "environment": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}}


def ask(code: str, seconds: float) -> dict:
    """What `code` prints behind the word FACTS, or {"error": why not}."""
    paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE.parent), *paths]))
    try:  # from /: a source tree in the current folder must not stand in for this package
        site = ["-S"] if sys.flags.no_site else []
        done = subprocess.run([sys.executable, *site, "-c", code], capture_output=True, text=True, timeout=seconds, env=env,
                              stdin=subprocess.DEVNULL, cwd=os.sep)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:g} s"}
    except OSError as exc:
        return {"error": str(exc)}
    found = [line[5:] for line in done.stdout.splitlines() if line.startswith("FACTS")]
    if done.returncode == 0 and found:
        return json.loads(found[-1])
    if done.returncode < 0:
        return {"error": f"the process was ended by signal {-done.returncode}"}
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": lines[-1].strip() if lines else f"exit code {done.returncode}"}


def pci_gpus(root: str = "/sys") -> list:
    """NVIDIA display devices that the kernel sees: {bus_id, driver}. Needs no driver."""
    found = []
    for folder in sorted(Path(root, "bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            driver = folder / "driver"
            found.append(dict(bus_id=folder.name, driver=driver.resolve().name if driver.exists() else None))
    return found


def _version(name: str) -> "str | None":
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _own_version() -> "str | None":
    try:
        return re.search(r'__version__ = "(.+?)"', (PACKAGE / "_version.py").read_text())[1]
    except (OSError, TypeError):
        return None


def _other_install() -> "str | None":
    """Where an installed fastverify lies that this one hides."""
    for found in metadata.distributions(name="fastverify"):  # a clone has its own .egg-info, which comes first
        place = Path(str(found.locate_file("fastverify"))).resolve()
        if place != PACKAGE and (place / "build_info.json").is_file():
            return str(place)
    return None


def _build_info() -> dict:
    try:
        return json.loads((PACKAGE / "build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def _tool(name: str, flag: str, pattern: str) -> "str | None":
    """The version a tool prints; "" if it prints none; None if it is not there."""
    if not shutil.which(name):
        return None
    try:
        done = subprocess.run([name, flag], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(pattern, done.stdout)
    return found[1] if found else ""


def _space(path: str) -> "dict | None":
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return dict(total=usage.total, free=usage.free)
