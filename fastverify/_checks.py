"""Argument checks of the Triton ops, in the words of csrc/common/check.h: "op: argument must be X; got Y. Fix: Z."

The compiled ops check in C++; tests/test_triton.py holds both to the same sentences.
"""

from typing import Any, Optional, Sequence

import torch

MAX_NODES, MAX_BEAM, MAX_MASK_WORDS, MAX_VOCAB = 1024, 64, 16, 1 << 20  # csrc/common/types.h
FLOATS = ("float32", "float16", "bfloat16")
IDS = ("int32", "int64")
I32, I64, F32 = ("int32",), ("int64",), ("float32",)
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
          torch.int32: "int32", torch.int64: "int64", torch.int16: "int16", torch.uint8: "uint8", torch.int8: "int8",
          torch.bool: "bool", torch.float8_e4m3fn: "float8_e4m3fn"}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, "another dtype")


def _device(t: torch.Tensor) -> str:
    return "cpu" if t.is_cpu else f"cuda:{t.get_device()}" if t.is_cuda else "another device"


def describe(t: Any) -> str:
    """int32 [8, 64] on cpu"""
    return f"{dtype_name(t.dtype)} [{', '.join(map(str, t.shape))}] on {_device(t)}"


def that(condition: bool, op: str, text: str) -> None:
    """`text` is "argument must be X; got Y. Fix: Z."."""
    if not condition:
        raise RuntimeError(f"{op}: {text}")


def tensor(op: str, name: str, t: torch.Tensor, dtypes: Sequence[str], shape: Sequence, like: torch.Tensor,
           rows_free: bool = False) -> None:
    """dtype, shape (None: any), the device of `like`, contiguous; `rows_free`: only the last dimension must be dense."""
    have = tuple(t.shape)
    shape_ok = have == shape or (len(have) == len(shape) and all(w is None or w == h for w, h in zip(shape, have)))
    dtype_ok = _NAMES.get(t.dtype, "another dtype") in dtypes
    if shape_ok and dtype_ok and t.device == like.device and t.is_contiguous():
        return
    if not (shape_ok and dtype_ok and t.device == like.device):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        fix = "pass that shape" if not shape_ok else "cast with .to(dtype)" if not dtype_ok else "move it with .to(device)"
        raise RuntimeError(f"{op}: {name} must be {'|'.join(dtypes)} [{wanted}] on {_device(like)}; got {describe(t)}. "
                           f"Fix: {fix}.")
    if t.numel() == 0:
        return
    last_dense = t.dim() == 0 or t.shape[-1] <= 1 or t.stride(-1) == 1
    if not (last_dense if rows_free else t.is_contiguous()):
        raise RuntimeError(f"{op}: {name} must be {'dense in its last dimension' if rows_free else 'contiguous'}; "
                           f"got {describe(t)} with other strides. Fix: call .contiguous() once, outside the loop.")


def optional(op: str, name: str, t: Optional[torch.Tensor], dtypes: Sequence[str], shape: Sequence, like: torch.Tensor,
             rows_free: bool = False) -> None:
    if t is not None:
        tensor(op, name, t, dtypes, shape, like, rows_free)


def own_memory(op: str, name: str, t: torch.Tensor) -> None:
    """Of a tensor that is written: each dimension steps over all that the dimensions with smaller strides reach."""
    if t.numel() == 0 or t.is_contiguous():
        return
    reach = 0
    for stride, size in sorted((t.stride(d), t.shape[d]) for d in range(t.dim()) if t.shape[d] > 1):
        that(stride > reach, op, f"{name} must have memory of its own for every element; got {describe(t)} with "
             "strides that overlap. Fix: pass a tensor of its own, not an expanded one.")
        reach += (size - 1) * stride


def output(op: str, name: str, t: Optional[torch.Tensor], dtypes: Sequence[str], shape: Sequence, like: torch.Tensor) -> None:
    """A tensor that is written, rows free; None: not asked for."""
    if t is not None:
        tensor(op, name, t, dtypes, shape, like, True)
        own_memory(op, name, t)
