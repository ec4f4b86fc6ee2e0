"""Is everything here that a build needs? Standard library only; prints one line, or what is missing and what to type."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

GIB = 2**30
PROGRAM = """
#include <Python.h>
#include <concepts>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
int probe(int n) { if (n > 9) [[unlikely]] return 1; return n; }
"""


def run(command: list) -> "subprocess.CompletedProcess | None":
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None


def has_gpu() -> bool:
    done = run(["nvidia-smi", "-L"])
    return bool(done) and done.returncode == 0 and "GPU" in done.stdout


def install_line(packages: list) -> str:
    """The one line that installs what is missing, for the package manager at hand."""
    sudo = "sudo " if os.geteuid() != 0 and shutil.which("sudo") else ""
    if shutil.which("dnf"):
        names = {"g++": "gcc-c++", "g++-12": "gcc-toolset-12-gcc-c++", "make": "make"}
        fixed = [names.get(p, "python3-devel" if p.endswith("-dev") else "python3") for p in packages]
        return f"{sudo}dnf install -y {' '.join(dict.fromkeys(fixed))}"
    return f"{sudo}apt-get update && {sudo}apt-get install -y {' '.join(packages)}"


def main() -> int:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    missing, packages, gpu = [], [], has_gpu()
    if sys.version_info < (3, 10):
        missing.append(f"Python must be >= 3.10; {sys.executable} is {platform.python_version()}: "
                       "name another with `make ... PYTHON=python3.12`")
    if not sys.platform.startswith("linux"):
        missing.append(f"the system must be Linux; this is {sys.platform} (on Windows, WSL 2 works)")

    asked = os.environ.get("CXX", "").split()
    compiler = next((c for c in (*asked[:1], "c++", "g++") if shutil.which(c)), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(f"Python's C headers: no {header}")
        packages.append(f"{python}-dev")
    if compiler is None:
        missing.append("a C++ compiler: no c++ or g++ on PATH")
        packages.append("g++")
    elif header.exists():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(PROGRAM)
            done = run([compiler, "-std=c++20", "-fPIC", "-c", f"-I{header.parent}", str(source), "-o", f"{source}.o"])
        if done is None or done.returncode != 0:
            missing.append(f"a compiler for C++20 and x86-64-v4 clones (GCC >= 12 or Clang >= 14): {compiler} fails; after "
                           "the line below, set CXX=g++-12")
            packages.append("g++-12")
    if not shutil.which("make"):
        packages.append("make")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append("Python's venv module")
        packages.append(f"{python}-venv")

    need = (12 if gpu else 4) * GIB  # torch for CUDA brings 6 GB of libraries; for the CPU 0.8 GB (install_torch.sh looks again if it has none)
    free = shutil.disk_usage(".").free
    if free < need:
        missing.append(f"disk: {need // GIB} GiB are needed here, {free / GIB:.1f} GiB are free")

    if missing:
        print("preflight: this machine lacks\n  - " + "\n  - ".join(missing), file=sys.stderr)
        if packages:
            print(f"Type:\n  {install_line(packages)}", file=sys.stderr)
        return 1
    version = run([compiler, "-dumpfullversion", "-dumpversion"]).stdout.strip()
    card = "an NVIDIA GPU" if gpu else "no NVIDIA GPU (the CPU ops are built)"
    if platform.machine() != "x86_64":
        card += f"; {platform.machine()} is not tested, x86_64 is"
    print(f"preflight: Python {platform.python_version()} ({shlex.quote(sys.executable)}), {compiler} {version}, "
          f"{free / GIB:.0f} GiB free, {card}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
