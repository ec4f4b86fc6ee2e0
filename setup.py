"""Thin driver: version, one CMake call, the abi3 tag. Sources, flags and architectures: CMakeLists.txt."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "fastverify" / "_version.py").read_text()).group(1)


def jobs() -> int:
    """min(cores, free GiB / 2): a CUDA translation unit may take 2 GiB."""
    asked = os.environ.get("FASTVERIFY_JOBS") or os.environ.get("MAX_JOBS")
    if asked:
        return max(1, int(asked))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free_gib = int(re.search(r"MemAvailable:\s+(\d+)", meminfo).group(1)) / 2**20
    except (OSError, AttributeError):
        free_gib = 4.0
    n = max(1, min(cores, int(free_gib / 2)))
    print(f"fastverify: {n} jobs ({cores} cores, {free_gib:.1f} GiB free); set FASTVERIFY_JOBS to change")
    return n


def local_archs() -> str:
    """Architectures of the GPUs present ('' = none seen: build all)."""
    try:
        import torch

        caps = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    except (ImportError, RuntimeError, AssertionError):
        caps = set()
    return ";".join(f"{a}{b}" for a, b in sorted(caps))


class CMakeBuild(build_ext):
    def run(self) -> None:
        try:
            import torch
        except ImportError:
            sys.exit("fastverify: torch must be installed before the build; it is not importable here. "
                     "Fix: pip install 'torch>=2.10' && pip install --no-build-isolation .")
        if tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2]) < (2, 10):
            sys.exit(f"fastverify: torch must be >= 2.10; got {torch.__version__}. "
                     "Fix: pip install 'torch>=2.10' && pip install --no-build-isolation .")
        out = ROOT / "fastverify" if self.inplace else Path(self.build_lib).resolve() / "fastverify"
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("FASTVERIFY_CUDA_ARCHS", local_archs())
        cmd = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}",
               f"-DFASTVERIFY_OUTPUT_DIR={out}", f"-DFASTVERIFY_VERSION={VERSION}",
               f"-DFASTVERIFY_CUDA_ARCHS={'' if archs == 'all' else archs.replace(',', ';')}",
               f"-DFASTVERIFY_NO_CUDA={'ON' if os.environ.get('FASTVERIFY_NO_CUDA') else 'OFF'}"]
        if shutil.which("ninja"):
            cmd += ["-G", "Ninja"]
        subprocess.run(cmd, check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", str(jobs())], check=True)

    def get_outputs(self) -> list:
        out = Path(self.build_lib) / "fastverify"
        return [str(p) for pattern in ("_C*.so", "_comm*.so", "build_info.json") for p in out.glob(pattern)]


setup(
    version=VERSION,
    ext_modules=[Extension("fastverify._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
