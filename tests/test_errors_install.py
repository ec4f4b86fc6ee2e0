"""What an install, a load or a build says when something is missing: one sentence, with what to do."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastverify import _ops

ROOT = Path(__file__).resolve().parents[1]
FORM = re.compile(r"[\w.]+: .+ must .+; (got .+|it is not)\. Fix: .+")


# ---- loading ------------------------------------------------------------------------------------------------------

@pytest.fixture
def unloaded(monkeypatch):
    """_C failed to load with this text."""
    def fail(text: str) -> ImportError:
        error = ImportError(text)
        monkeypatch.setattr(_ops, "_load_error", error)
        return error
    return fail


def raised(call) -> RuntimeError:
    with pytest.raises(RuntimeError) as info:
        call()
    assert FORM.fullmatch(str(info.value)), str(info.value)
    return info.value


def test_never_built(unloaded, monkeypatch, tmp_path):
    cause = unloaded("No module named 'fastverify._C'")
    monkeypatch.setattr(_ops, "_HERE", tmp_path)
    assert _ops.build_info() == {}
    error = raised(lambda: _ops.get("probe"))
    assert str(error) == ("fastverify: the compiled library must be built; got a source tree without it. "
                          "Fix: pip install --no-build-isolation -e . (installed already? leave this folder)")
    assert error.__cause__ is cause


def test_torch_too_old_for_the_library(unloaded, monkeypatch):
    cause = unloaded("_C.abi3.so: undefined symbol: torch_call_dispatcher")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    for call in (lambda: _ops.get("probe"), lambda: _ops.require_kernel("probe", torch.device("cpu"))):
        error = raised(call)
        assert str(error) == (
            "fastverify: _C (built for torch >= 2.10) must load; got torch 2.9.1: _C.abi3.so: undefined symbol: "
            "torch_call_dispatcher. Fix: pip install 'torch>=2.10', then reinstall fastverify.")
        assert error.__cause__ is cause, "the loader's own words stay reachable"
    assert not _ops.has_kernel("probe", "cpu")


def test_no_cuda_kernels_in_this_build(monkeypatch):
    monkeypatch.setattr(_ops, "_KERNELS", {("probe", "cpu")})
    monkeypatch.setattr(_ops, "build_info", lambda: {"cuda": None})
    error = raised(lambda: _ops.require_kernel("probe", torch.device("cuda:0")))
    assert str(error) == (
        "probe: a CUDA tensor must meet a CUDA kernel; got an install without CUDA kernels (nvcc was not found when it "
        "was built). Fix: install the CUDA toolkit and reinstall fastverify, or use CPU tensors.")
    _ops.require_kernel("probe", torch.device("cpu"))


def test_op_without_a_kernel_for_the_device(monkeypatch):
    monkeypatch.setattr(_ops, "_KERNELS", {("probe", "cpu")})
    monkeypatch.setattr(_ops, "build_info", lambda: {"cuda": "13.0"})
    for device in ("cuda:1", "xpu"):
        error = raised(lambda: _ops.require_kernel("probe", torch.device(device)))
        assert str(error) == (f"probe: the device must be one this op has a kernel for; got {device}. "
                              "Fix: move the tensors to the CPU.")


# ---- building -----------------------------------------------------------------------------------------------------

def fake_torch(folder: Path, version: str) -> Path:
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise SystemExit('the build must not import torch')")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    return folder


def build(tmp_path: Path, path: "str | None" = None, **env) -> str:
    """The last line that `setup.py build_ext` prints when it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "-q", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp",
         str(tmp_path / "tmp")], cwd=ROOT, env=os.environ | env | ({"PATH": path} if path else {}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout
    last = done.stdout.rstrip().splitlines()[-1]
    assert FORM.fullmatch(last), done.stdout
    return last


def test_old_torch_is_refused_with_both_versions(tmp_path):
    site = fake_torch(tmp_path / "site", "2.9.1+cu128")
    assert build(tmp_path, PYTHONPATH=str(site)).startswith(
        f"fastverify: torch must be >= 2.10; got 2.9.1+cu128 in {site}. Fix: pip install ")


def test_no_torch_at_all(tmp_path):
    """An interpreter environment of its own, as pip's isolated build on a machine without torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    links = tmp_path / "links"
    links.mkdir()
    for source in (*site.glob("setuptools*"), site / "_distutils_hack"):
        (links / source.name).symlink_to(source)
    done = subprocess.run([str(tmp_path / "venv/bin/python"), "-s", str(ROOT / "setup.py"), "-q", "build_ext"], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(links)}, capture_output=True, text=True)
    last = done.stderr.rstrip().splitlines()[-1]
    assert done.returncode != 0 and last == (
        f"fastverify: torch must be installed before the build; got none in {tmp_path / 'venv'}. Fix: pip install cmake "
        "ninja pybind11 'torch>=2.10' && pip install --no-build-isolation .")


def test_build_tools_missing(tmp_path):
    """PATH without cmake, then without ninja and make. The environment's own tools are hidden, too."""
    site = fake_torch(tmp_path / "site", "2.13.0")
    (site / "sitecustomize.py").write_text(
        f"import sysconfig\nold = sysconfig.get_path\nsysconfig.get_path = lambda name, *a, **k: {str(tmp_path / 'none')!r} "
        "if name == 'scripts' else old(name, *a, **k)\n")
    empty = tmp_path / "bin"
    empty.mkdir()
    assert build(tmp_path, str(empty), PYTHONPATH=str(site)).startswith("fastverify: cmake must be on PATH for the build; got none.")
    (empty / "cmake").write_text("#!/bin/sh\nexit 1\n")
    (empty / "cmake").chmod(0o755)
    assert build(tmp_path, str(empty), PYTHONPATH=str(site)).startswith(
        "fastverify: ninja (or make) must be on PATH for the build; got neither.")
    (empty / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (empty / "ninja").chmod(0o755)
    assert build(tmp_path, str(empty), PYTHONPATH=str(site)).startswith(
        "fastverify: the CMake configure step must succeed; got exit status 1 (the messages above say why). Fix: ")


@pytest.fixture
def configure(tmp_path):
    """Runs only CMake's configure step; returns (exit status, output)."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=os.path.dirname(sys.executable))
    if cmake is None or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("needs cmake and a C++ compiler")

    def run(*options: str, **env: str) -> tuple:
        done = subprocess.run([cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={sys.executable}",
                               f"-DFASTVERIFY_OUTPUT_DIR={tmp_path}", *options], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=os.environ | env)
        return done.returncode, " ".join(done.stdout.split())
    return run


def test_cmake_says_once_that_there_is_no_cuda(configure, tmp_path):
    code, text = configure("-DFASTVERIFY_NO_CUDA=ON")
    assert code == 0, text
    assert text.count("fastverify: FASTVERIFY_NO_CUDA is set: CPU ops only") == 1
    assert '"cuda": null' in (tmp_path / "build_info.json").read_text()


def test_nvcc_that_is_not_on_path(configure, tmp_path):
    """A CUDA toolkit whose bin/ nobody put on PATH gives a CUDA build, also in a folder where an earlier run found no nvcc that works."""
    nvcc = shutil.which("nvcc")
    tools = "/usr/bin:/bin"
    if nvcc is None or shutil.which("nvcc", path=tools) or not shutil.which("c++", path=tools):
        pytest.skip("needs an nvcc on PATH that is not in /usr/bin, and a C++ compiler that is")
    (tmp_path / "broken/bin").mkdir(parents=True)
    (tmp_path / "broken/bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken/bin/nvcc").chmod(0o755)
    root = subprocess.run([nvcc, "-dryrun", "x.cu"], capture_output=True, text=True).stderr
    root = re.search(r"^#\$ TOP=(.+)$", root, re.M)[1]
    code, text = configure(PATH=tools, CUDA_HOME=str(tmp_path / "broken"), CUDA_PATH="")
    assert code == 0 and "no nvcc that works on PATH, in CUDA_HOME or in /usr/local/cuda: CPU ops only" in text, text
    code, text = configure("-DFASTVERIFY_CUDA_ARCHS=90", PATH=tools, CUDA_HOME=root, CUDA_PATH="")
    assert code == 0 and '"cuda": "' in (tmp_path / "build_info.json").read_text(), text


def test_cmake_refuses_a_folder_that_is_not_torch(configure):
    code, text = configure("-DFASTVERIFY_NO_CUDA=ON", "-DTORCH_DIR=/no/such/torch")
    assert code != 0 and "fastverify: TORCH_DIR must be an installed torch package; got '/no/such/torch'. Fix: " in text


def test_cmake_refuses_architectures_nvcc_does_not_know(configure):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on PATH")
    code, text = configure("-DFASTVERIFY_CUDA_ARCHS=7")
    assert code != 0 and re.search(r"FASTVERIFY_CUDA_ARCHS must name an architecture nvcc [\d.]+ knows; got '7'\. Fix: ", text)


# ---- preflight ----------------------------------------------------------------------------------------------------

def preflight(path: object) -> tuple:
    env = {k: v for k, v in os.environ.items() if k != "CXX"} | {"PATH": str(path)}
    done = subprocess.run([sys.executable, str(ROOT / ".ci/preflight.py")], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_preflight_names_what_is_missing_and_the_line_to_type(tmp_path):
    code, _, lines = preflight(tmp_path)
    assert code == 1 and "  - a C++ compiler: no c++ or g++ on PATH" in lines
    assert lines[-2] == "Type:" and re.fullmatch(r"  apt-get update && apt-get install -y .*\bg\+\+ .*make", lines[-1])
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    code, _, lines = preflight(tmp_path)
    assert code == 1 and any("c++ fails" in line for line in lines) and "g++-12" in lines[-1]


def test_preflight_is_content_where_this_package_was_built():
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler on PATH")
    code, out, lines = preflight(os.environ["PATH"])
    assert (code == 0) == out.startswith("preflight: Python ") and (code == 0 or any("disk" in line for line in lines))
