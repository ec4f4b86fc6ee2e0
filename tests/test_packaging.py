"""What was built and what is shipped: the libraries' promises, the architectures, the wheel, the import."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import torch

import fastverify
from fastverify import _ops

PACKAGE = Path(fastverify.__file__).parent
INFO = _ops.build_info()
SIZE_CAP = 40 * 2**20
BASE = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
        "ld-linux-x86-64.so.2"}


def tool(name: str, *places: Path) -> str:
    found = shutil.which(name) or next((str(p) for p in places if p.exists()), None)
    if found is None:
        pytest.skip(f"no {name} on PATH or in a wheel of this environment")
    return found


def output(*command: str, env: dict | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def library(stem: str) -> Path:
    (path,) = PACKAGE.glob(f"{stem}.*so")
    return path


def dynamic(path: Path, tag: str) -> list:
    return re.findall(rf"\({tag}\).*\[(.*)\]", output(tool("readelf"), "-dW", str(path)))


def undefined(path: Path) -> list:
    return [line.split()[-1].split("@")[0] for line in output(tool("nm"), "-D", "--undefined-only", str(path)).splitlines()]


# ---- the libraries ------------------------------------------------------------------------------------------------

def test_build_info_is_this_version():
    assert INFO["version"] == fastverify.__version__
    assert set(INFO) == {"version", "git", "torch_target", "torch_headers", "cuda", "cuda_archs", "cuda_ptx", "comm",
                         "sanitized", "cxx", "build_type"}
    assert (INFO["cuda"] is None) == (INFO["cuda_archs"] == []) == (INFO["cuda_ptx"] is None)
    assert not INFO["sanitized"] and INFO["build_type"] == "Release"


def test_c_needs_libtorch_cpu_and_no_cuda_and_no_python():
    assert set(dynamic(library("_C"), "NEEDED")) - BASE == {"libtorch_cpu.so"}


def test_c_finds_torch_beside_itself_and_nowhere_else():
    path = library("_C")
    assert dynamic(path, "RUNPATH") + dynamic(path, "RPATH") == ["$ORIGIN/../torch/lib"]


def test_c_uses_only_the_stable_abi_of_torch():
    names = undefined(library("_C"))
    assert [n for n in names if re.match(r"_Z.*(3c10|N2at|NK2at|5torch|6caffe2)", n)] == []
    assert any(n.startswith(("aoti_torch_", "torch_")) for n in names), "not the library this test is about"


def test_c_uses_only_the_limited_api_of_python():
    assert library("_C").name == "_C.abi3.so"
    assert {n for n in undefined(library("_C")) if n.startswith(("Py", "_Py"))} <= {"PyModule_Create2"}


def test_c_links_no_driver_function():
    assert [n for n in undefined(library("_C")) if re.match(r"(cu|cuda|nccl|nvml)[A-Z]", n)] == []


def test_comm_is_plain_cxx():
    if not INFO["comm"]:
        pytest.skip("this build has no _comm (no pybind11)")
    path = library("_comm")
    assert re.fullmatch(rf"_comm\.cpython-{sys.version_info.major}{sys.version_info.minor}\w*-.*\.so", path.name)
    assert set(dynamic(path, "NEEDED")) <= BASE
    assert dynamic(path, "RUNPATH") + dynamic(path, "RPATH") == []
    assert [n for n in undefined(path) if re.match(r"(cu|cuda|nccl|nvml)[A-Z]|_ZNK?(3c10|2at|5torch)", n)] == []


def test_architectures_in_the_binary_are_those_declared():
    if INFO["cuda"] is None:
        pytest.skip("this build has no CUDA kernels (no nvcc, or FASTVERIFY_NO_CUDA)")
    wheel = [Path(f.locate()) for f in _files("nvidia-cuda-cuobjdump") if f.name == "cuobjdump"]
    triton = [Path(f.locate()) for f in _files("triton") if f.name == "cuobjdump"]
    cuobjdump = tool("cuobjdump", *wheel, *triton)
    release = re.search(r"release (\d+)", output(cuobjdump, "--version"))[1]
    if int(release) < int(INFO["cuda"].split(".")[0]):
        pytest.skip(f"cuobjdump {release} is older than the nvcc {INFO['cuda']} of this build, and shows sm_90a as sm_90")
    units = {}
    for kind in ("elf", "ptx"):
        listing = output(cuobjdump, f"--list-{kind}", str(library("_C")))
        for arch in re.findall(rf"^{kind.upper()} file.*\.sm_(\w+)\.", listing, re.M):
            units.setdefault(kind, []).append(arch)
    only = {"90a"} if "90" in INFO["cuda_archs"] else set()  # files of wgmma kernels are compiled for 90a alone
    assert set(units["elf"]) == set(INFO["cuda_archs"]) | only and set(units["ptx"]) == {INFO["cuda_ptx"]}
    counts = {arch: units["elf"].count(arch) for arch in INFO["cuda_archs"]}
    assert len(set(counts.values())) == 1, f"every source has code for every architecture: {counts}"
    assert _ops.has_kernel("probe", "cuda")


# ---- the import ---------------------------------------------------------------------------------------------------

IMPORT = """
import json, os, sys, torch
before = open("/proc/self/maps").read()
spawned = []
sys.addaudithook(lambda event, args: spawned.append(event) if event in
                 ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork") else None)
import fastverify, fastverify._ops, fastverify.reference, fastverify.comm.topology
import fastverify.tree, fastverify.attention, fastverify.accept, fastverify.kv
after = open("/proc/self/maps").read()
found = {"initialized": torch.cuda.is_initialized(), "spawned": list(spawned),
         "driver": "libcuda.so" in after and "libcuda.so" not in before,
         "comm": "fastverify._comm" in sys.modules}
child = os.fork()
if child == 0:
    device = "cuda" if torch.cuda.device_count() else "cpu"
    x, out = torch.zeros(4, device=device), torch.empty(4, device=device)
    fastverify._ops.get("probe")(x, out)
    os._exit(0 if out.tolist() == [1.0] * 4 else 3)
found["child"] = os.waitpid(child, 0)[1]
print(json.dumps(found))
"""


def test_import_touches_no_cuda_and_a_fork_after_it_works():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"initialized": False, "spawned": [], "driver": False, "comm": False, "child": 0}


# ---- the wheel ----------------------------------------------------------------------------------------------------

def _files(name: str) -> list:
    try:
        return metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return []


@pytest.fixture
def installed() -> metadata.Distribution:
    """The wheel this package was installed from, seen through its metadata."""
    if not any(f.name.startswith("_C.") for f in _files("fastverify")):
        pytest.skip("fastverify is used from a source tree; `make test` installs the wheel")
    return metadata.distribution("fastverify")


def test_wheel_tag_is_of_this_python(installed):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tag,) = re.findall(r"^Tag: (.*)$", installed.read_text("WHEEL"), re.M)
    assert re.fullmatch(rf"{python}-{python}t?-(linux|manylinux_\d+_\d+)_\w+", tag)
    assert installed.version == fastverify.__version__


def test_wheel_holds_the_package_and_nothing_else(installed):
    files = [f for f in installed.files if "__pycache__" not in f.parts]
    tops = {f.parts[0] for f in files} - {".."}
    assert tops == {"fastverify", f"fastverify-{fastverify.__version__}.dist-info"}
    names = [f.name for f in files]
    assert [n for n in names if n.startswith("_C.")] == ["_C.abi3.so"]
    assert len([n for n in names if n.startswith("_comm.")]) == INFO["comm"]
    assert {"build_info.json", "py.typed", "LICENSE", "entry_points.txt"} <= set(names)
    benchmarks = [f for f in files if f.name.startswith("bench_") and f.parts[:2] != ("fastverify", "cli")]  # cli: `fastverify bench`
    assert [str(f) for f in files if f.suffix in (".cpp", ".cu", ".cuh", ".h", ".o") or f.name.startswith("test_")
            or "tests" in f.parts] + benchmarks == []


def test_wheel_promises_the_right_requirements(installed):
    requires = [r for r in installed.requires if "extra ==" not in r]
    assert "torch>=2.10" in requires
    assert not any(re.match(r"(nvidia|triton|transformers)", r) for r in requires)
    assert not any("==" in r or "<" in r for r in requires), "no upper or exact pin: pip would replace the user's torch"
    scripts = {e.name: e.value for e in installed.entry_points if e.group == "console_scripts"}
    assert scripts == {"fastverify": "fastverify.cli.main:main"}


def test_wheel_is_small(installed):
    """The wheel itself where pip says which file it was, else what it unpacks to (more than the wheel)."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}").get("url", "")
    wheel = Path(unquote(urlparse(origin).path))
    if wheel.suffix == ".whl" and wheel.exists():
        size = wheel.stat().st_size
    else:
        size = sum(Path(f.locate()).stat().st_size for f in installed.files if "__pycache__" not in f.parts)
    assert 0 < size <= SIZE_CAP


def test_torch_is_what_the_build_promises():
    assert tuple(map(int, INFO["torch_target"].split("."))) <= tuple(
        int(x) for x in re.findall(r"\d+", torch.__version__)[:2])
