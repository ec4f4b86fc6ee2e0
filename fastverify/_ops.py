"""Loads the compiled library once and hands out op overloads; every "why is it missing" text lives here."""

import json
from pathlib import Path

import torch

from . import _triton

_HERE = Path(__file__).resolve().parent
_load_error: "Exception | None" = None

try:
    if not any(_HERE.glob("_C*.so")):  # the finder of an editable install elsewhere would hand out that one's
        raise ImportError(f"no _C in {_HERE}")
    from . import _C  # noqa: F401  (importing it registers torch.ops.fastverify.*)
except ImportError as exc:
    _load_error = exc

# Both are filled once, so that looking up an op is a dictionary read that torch.compile can trace.
_NAMES = [n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("fastverify::")]
_OVERLOADS = {name: getattr(torch.ops.fastverify, name).default for name in _NAMES}
_NATIVE = {(name, kind) for name in _NAMES for kind in ("cpu", "cuda")
           if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastverify::{name}", kind.upper())}
_TRITON = _triton.register([n for n in _NAMES if _triton.forced() or (n, "cuda") not in _NATIVE])
_KERNELS = _NATIVE | {(name, "cuda") for name in _TRITON}
_fitting_devices: set = set()  # CUDA device indices that the compiled kernels, or Triton's, are known to run on


def build_info() -> dict:
    """What was built (version, git, torch headers, CUDA, architectures); {} for a source tree that was never built."""
    path = _HERE / "build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _raise_not_loaded() -> None:
    info = build_info()
    if not info:
        raise RuntimeError(
            "fastverify: the compiled library must be built; got a source tree without it. "
            "Fix: pip install --no-build-isolation -e . (installed already? leave this folder)") from _load_error
    raise RuntimeError(
        f"fastverify: _C (built for torch >= {info['torch_target']}) must load; got torch {torch.__version__}: "
        f"{_load_error}. Fix: pip install 'torch>={info['torch_target']}', then reinstall fastverify.") from _load_error


def get(name: str):
    """The overload object `torch.ops.fastverify.<name>.default`."""
    if _load_error is not None:
        _raise_not_loaded()
    return _OVERLOADS[name]


def has_kernel(name: str, device_type: str) -> bool:
    """True if op `name` has a kernel, compiled or Triton, for "cpu" or "cuda" in this install."""
    return _load_error is None and (name, device_type) in _KERNELS


def has_native_kernel(name: str, device_type: str) -> bool:
    """True if the compiled library itself has a kernel of op `name` for "cpu" or "cuda"."""
    return _load_error is None and (name, device_type) in _NATIVE


def runs_on(capability: tuple, archs: list, ptx: "str | None") -> bool:
    """True if binaries for `archs` (such as "90") or PTX `ptx` run on a GPU of this compute capability.

    A binary runs on its own major version from its own minor version on ("90a": on nothing else); PTX on anything later.
    """
    major, minor = capability
    for arch in archs:
        digits = arch.rstrip("af")
        have = int(digits[:-1]), int(digits[-1])
        if have == (major, minor) or (arch == digits and have[0] == major and have[1] <= minor):
            return True
    return bool(ptx) and ptx.isdigit() and (int(ptx[:-1]), int(ptx[-1])) <= (major, minor)


def _fit(device: torch.device) -> None:
    """On a GPU this build has no code for, Triton's kernels replace the compiled ones, for the process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _fitting_devices:
        return
    _fitting_devices.add(index)
    info = build_info()
    if not runs_on(torch.cuda.get_device_capability(index), info.get("cuda_archs") or [], info.get("cuda_ptx")):
        _TRITON.update(_triton.register([n for n in _NAMES if (n, "cuda") in _NATIVE]))


def require_kernel(name: str, device: torch.device) -> None:
    """Raises, in words, when `name` cannot run on `device`."""
    if _load_error is not None:
        _raise_not_loaded()
    if device.type in ("cpu", "cuda") and has_kernel(name, device.type):
        if device.type == "cuda":
            _fit(device)
        return
    info = build_info()
    if device.type == "cuda" and info.get("cuda") is None:
        raise RuntimeError(
            f"{name}: a CUDA tensor must meet a CUDA kernel; got an install without CUDA kernels (nvcc was not found "
            "when it was built). Fix: install the CUDA toolkit and reinstall fastverify, or use CPU tensors.")
    raise RuntimeError(
        f"{name}: the device must be one this op has a kernel for; got {device}. "
        f"Fix: move the tensors to {'the CPU' if has_kernel(name, 'cpu') else 'a supported device'}.")
