"""Thin driver: version, checks in words, one CMake call. Sources, flags and architectures: CMakeLists.txt.

The wheel is tagged for one Python version: _C is abi3, but _comm (pybind11) is not.
torch is looked up, never imported, and not a build requirement: an isolated build (plain `pip install .`) finds the
torch of the environment it installs into instead of downloading another one.
"""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "fastverify" / "_version.py").read_text()).group(1)
INSTALL = "pip install cmake ninja pybind11 'torch>=2.10' && pip install --no-build-isolation ."


def fail(must: str, got: str, fix: str = INSTALL) -> None:
    sys.exit(f"fastverify: {must}; got {got}. Fix: {fix}")


def find_torch() -> "tuple[Path, str]":
    """(directory, version) of the torch in this environment, also from inside pip's isolated build."""
    spec = importlib.util.find_spec("torch")
    places = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    places += [Path(p) / "torch" for p in site.getsitepackages()]
    places += [Path(site.getusersitepackages()) / "torch"] if site.ENABLE_USER_SITE else []
    for place in places:
        if (place / "version.py").exists():
            version = re.search(r"__version__ = ['\"](.+?)['\"]", (place / "version.py").read_text()).group(1)
            if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < (2, 10):
                fail("torch must be >= 2.10", f"{version} in {place.parent}")
            return place, version
    fail("torch must be installed before the build", f"none in {sys.prefix}")


def switch(name: str) -> str:
    return "OFF" if os.environ.get(name, "0") in ("", "0") else "ON"


def jobs() -> int:
    """min(cores, free GiB / 2): a CUDA translation unit may take 2 GiB."""
    asked = os.environ.get("FASTVERIFY_JOBS") or os.environ.get("MAX_JOBS")
    if asked:
        return max(1, int(asked))
    cores = len(os.sched_getaffinity(0))
    free = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    free_gib = int(free.group(1)) / 2**20 if free else 4.0
    n = max(1, min(cores, int(free_gib / 2)))
    print(f"fastverify: {n} jobs ({cores} cores, {free_gib:.1f} GiB free); set FASTVERIFY_JOBS to change")
    return n


def local_archs() -> str:
    """Architectures of the GPUs present, e.g. "90;120" ('' = none seen: build all)."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return ""
    asked = subprocess.run([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    return ";".join(sorted({c.replace(".", "") for c in re.findall(r"^\d+\.\d$", asked.stdout, re.M)}, key=int))


class CMakeBuild(build_ext):
    def run(self) -> None:
        if not sys.platform.startswith("linux"):
            fail("the platform must be Linux", sys.platform, "build in a Linux environment (WSL 2 works).")
        torch_dir, torch_version = find_torch()
        # cmake and ninja of this environment, whether or not it is activated
        os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", os.defpath)
        if not shutil.which("cmake"):
            fail("cmake must be on PATH for the build", "none")
        if not (shutil.which("ninja") or shutil.which("make")):
            fail("ninja (or make) must be on PATH for the build", "neither")
        inplace = self.inplace or self.editable_mode
        out = ROOT / "fastverify" if inplace else Path(self.build_lib).resolve() / "fastverify"
        build = Path(self.build_temp).resolve()
        out.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("FASTVERIFY_CUDA_ARCHS") or local_archs()
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}",
                     f"-DTORCH_DIR={torch_dir}", f"-DFASTVERIFY_OUTPUT_DIR={out}", f"-DFASTVERIFY_VERSION={VERSION}",
                     f"-DFASTVERIFY_CUDA_ARCHS={'' if archs == 'all' else archs.replace(',', ';')}",
                     f"-DFASTVERIFY_NO_CUDA={switch('FASTVERIFY_NO_CUDA')}",
                     f"-DFASTVERIFY_SANITIZE={switch('FASTVERIFY_SANITIZE')}"]
        if shutil.which("ninja"):  # named each time: pip's isolated copy of an earlier build is gone
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"]
        print(f"fastverify: building against torch {torch_version} in {torch_dir}", flush=True)
        for step, command in (("configure", configure), ("build", ["cmake", "--build", str(build), "-j", str(jobs())])):
            code = subprocess.run(command).returncode
            if code != 0:
                fail(f"the CMake {step} step must succeed", f"exit status {code} (the messages above say why)",
                     "mend that; FASTVERIFY_NO_CUDA=1 builds without nvcc, FASTVERIFY_JOBS=1 needs less memory.")

    def get_outputs(self) -> list:
        out = Path(self.build_lib) / "fastverify"
        return [str(p) for pattern in ("_C*.so", "_comm*.so", "build_info.json") for p in out.glob(pattern)]

    def get_output_mapping(self) -> dict:
        return {}


if int(setuptools.__version__.split(".")[0]) < 77:
    fail("setuptools must be >= 77", setuptools.__version__, "pip install 'setuptools>=77', then the same command.")
setup(
    version=VERSION,
    ext_modules=[Extension("fastverify._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
