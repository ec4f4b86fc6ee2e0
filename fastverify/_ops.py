"""Loads the compiled library once and hands out op overloads; every "why is it missing" text lives here."""

import json
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
_load_error: "Exception | None" = None

try:
    from . import _C  # noqa: F401  (importing it registers torch.ops.fastverify.*)
except ImportError as exc:
    _load_error = exc

# Both are filled once, so that looking up an op is a dictionary read that torch.compile can trace.
_NAMES = [n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("fastverify::")]
_OVERLOADS = {name: getattr(torch.ops.fastverify, name).default for name in _NAMES}
_KERNELS = {(name, kind) for name in _NAMES for kind in ("cpu", "cuda")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastverify::{name}", kind.upper())}


def build_info() -> dict:
    """What was built (version, git, torch headers, CUDA, architectures); {} for a source tree that was never built."""
    path = _HERE / "build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _raise_not_loaded() -> None:
    info = build_info()
    if not info:
        raise RuntimeError(
            "fastverify: the compiled library must be built; got a source tree without it. "
            "Fix: pip install --no-build-isolation -e .") from _load_error
    raise RuntimeError(
        f"fastverify: _C (built for torch >= {info['torch_target']}) must load; got torch {torch.__version__}: "
        f"{_load_error}. Fix: pip install 'torch>={info['torch_target']}', then reinstall fastverify.") from _load_error


def get(name: str):
    """The overload object `torch.ops.fastverify.<name>.default`."""
    if _load_error is not None:
        _raise_not_loaded()
    return _OVERLOADS[name]


def has_kernel(name: str, device_type: str) -> bool:
    """True if op `name` has a kernel for "cpu" or "cuda" in this install."""
    return _load_error is None and (name, device_type) in _KERNELS


def require_kernel(name: str, device: torch.device) -> None:
    """Raises, in words, when `name` cannot run on `device`."""
    if _load_error is not None:
        _raise_not_loaded()
    if device.type in ("cpu", "cuda") and has_kernel(name, device.type):
        return
    info = build_info()
    if device.type == "cuda" and info.get("cuda") is None:
        raise RuntimeError(
            f"{name}: a CUDA tensor must meet a CUDA kernel; got an install without CUDA kernels (nvcc was not found "
            "when it was built). Fix: install the CUDA toolkit and reinstall fastverify, or use CPU tensors.")
    raise RuntimeError(
        f"{name}: the device must be one this op has a kernel for; got {device}. "
        f"Fix: move the tensors to {'the CPU' if has_kernel(name, 'cpu') else 'a supported device'}.")
