"""The Triton back end: which ops have a Triton version, and when it is the one that runs.

A Triton version of op X is a Python function X in the module named below, with the schema's positional signature
(csrc/ops.cpp). `register` installs it as the CUDA kernel of torch.ops.fastverify.X wherever the compiled library has none,
so wrappers, torch.compile and callers of torch.ops see one op. `FASTVERIFY_BACKEND=triton` prefers it everywhere.
Neither this module nor `import fastverify` imports triton: that happens when the first of these kernels is called.
"""

import importlib
import importlib.util
import inspect
import os
import warnings
from pathlib import Path
from typing import Callable, Optional

import torch

MODULES = {  # op -> module, relative to this package
    "probe": "_probe_triton",
    "draft_topk": "tree.draft_topk_triton", "grow_tree": "tree.grow_tree_triton",
    "build_tree": "tree.build_tree_triton", "prepare_tree": "tree.prepare_tree_triton",
    "rope_append": "attention.rope_append_triton", "tree_attention": "attention.tree_attention_triton",
    "verify_tree": "accept.verify_tree_triton", "compact_kv": "kv.compact_kv_triton",
}
_functions: dict = {}
_library: Optional[torch.library.Library] = None
_registered: set = set()


def forced() -> bool:
    """True if FASTVERIFY_BACKEND=triton."""
    value = os.environ.get("FASTVERIFY_BACKEND", "")
    if value not in ("", "triton"):
        raise RuntimeError(f"fastverify: FASTVERIFY_BACKEND must be triton or unset; got {value}. Fix: unset it.")
    return value == "triton"


def installed() -> bool:
    """True if `import triton` would find a package; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def exists(op: str) -> bool:
    """True if this package has a Triton version of `op`."""
    return op in MODULES and (Path(__file__).parent / (MODULES[op].replace(".", os.sep) + ".py")).exists()


def function(op: str) -> Callable:
    """The Triton version of `op`; imports triton."""
    if op not in _functions:
        _functions[op] = getattr(importlib.import_module(f".{MODULES[op]}", __package__), op)
    return _functions[op]


def _as_kernel(op: str) -> Callable:
    def kernel(*args):
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        with torch.cuda.device(device):
            function(op)(*args)

    return kernel


def register(ops: list) -> set:
    """Makes Triton the CUDA kernel of those of `ops` that have a Triton version; returns their names. No-op without triton."""
    global _library
    if not ops or not installed():
        return set()
    _library = _library or torch.library.Library("fastverify", "IMPL")
    override = {"allow_override": True} if "allow_override" in inspect.signature(_library.impl).parameters else {}
    new = {op for op in ops if op not in _registered and exists(op)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel was replaced; it is meant to be
        for op in sorted(new):
            _library.impl(op, _as_kernel(op), "CUDA", **override)
    _registered.update(new)
    return new
