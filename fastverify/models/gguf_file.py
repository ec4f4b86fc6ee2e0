"""Reads the header of a GGUF file (v2, v3): metadata and tensor table, checked against the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block formats and their dequantisation come from the
`gguf` package; its own reader makes one array object per vocabulary entry, which costs seconds.
"""

import mmap
import os
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .config import LoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFFile:
    """One GGUF file, memory-mapped. metadata: {key: value}; tensors: {name: (shape, type, byte offset, byte count)}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as f:
                self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise LoadError(f"load: {path} must be a readable GGUF file; got {exc}. Fix: give the path of a .gguf file."
                            ) from None
        if self._data[:4] != b"GGUF":
            raise LoadError(f"load: {path} must be a GGUF file; got one that starts with {bytes(self._data[:4])!r}. "
                            "Fix: give the path of a .gguf file.")
        self.metadata, self.tensors = {}, {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError) as exc:
            raise LoadError(f"load: {path} must be a complete GGUF file; got {len(self._data)} bytes whose header breaks "
                            f"off or does not parse ({exc}). Fix: download the file again.") from None
        end = max((offset + size for _, _, offset, size in self.tensors.values()), default=0)
        if end > len(self._data):
            raise LoadError(f"load: {path} must have at least {end} bytes; got {len(self._data)} (cut off). "
                            "Fix: download the file again.")

    def array(self, name: str) -> np.ndarray:
        """The tensor as float32 in its [out, in] shape (a new array)."""
        shape, kind, offset, size = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, size, offset)
        block, width = GGML_QUANT_SIZES[kind]
        try:
            flat = dequantize(raw.reshape(-1, shape[-1] // block * width), kind)
        except RuntimeError:  # what gguf raises for a type it has no code for
            raise LoadError(f"load_target: {name} must be of a type the gguf package can dequantise; got {kind.name}. "
                            "Fix: use a file quantised as Q8_0 or Q4_1, or update gguf.") from None
        return (flat if flat.flags.writeable else flat.copy()).astype(np.float32, copy=False).reshape(shape)

    def _parse(self) -> None:
        version, tensors, pairs = self._unpack("<IQQ", 4)
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        at = 24
        for _ in range(pairs):
            key, at = self._string(at)
            (kind,) = self._unpack("<I", at)
            self.metadata[key], at = self._value(kind, at + 4)
        table = []
        for _ in range(tensors):
            name, at = self._string(at)
            (dims,) = self._unpack("<I", at)
            if not 1 <= dims <= 4:
                raise ValueError(f"tensor {name} of {dims} dimensions")
            *sizes, kind, offset = self._unpack(f"<{dims}QIQ", at + 4)
            at += 16 + 8 * dims
            table.append((name, tuple(reversed(sizes)), GGMLQuantizationType(kind), offset))
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"alignment {align!r}")
        start = -(-at // align) * align
        for name, shape, kind, offset in table:
            block, width = GGML_QUANT_SIZES[kind]
            count = int(np.prod(shape, dtype=object))
            if name in self.tensors or count < 1 or shape[-1] % block:
                raise ValueError(f"tensor {name} of shape {list(shape)} and type {kind.name}")
            self.tensors[name] = (shape, kind, start + offset, count // block * width)

    def _unpack(self, form: str, at: int) -> tuple:
        return struct.unpack_from(form, self._data, at)

    def _string(self, at: int) -> tuple:
        (length,) = self._unpack("<Q", at)
        raw = self._data[at + 8 : at + 8 + length]
        if len(raw) != length:
            raise ValueError(f"string of {length} bytes at offset {at}")
        return raw.decode("utf-8"), at + 8 + length

    def _value(self, kind: int, at: int) -> tuple:
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            form = "<" + _SCALARS[kind]
            return self._unpack(form, at)[0], at + struct.calcsize(form)
        inner, count = self._unpack("<IQ", at)
        at += 12
        if count > len(self._data) - at:
            raise ValueError(f"array of {count} entries at offset {at}")
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner]}"
            return list(self._unpack(form, at)), at + struct.calcsize(form)
        if inner != _STRING:
            raise ValueError(f"array of type {inner} at offset {at}")
        out = []
        for _ in range(count):
            value, at = self._string(at)
            out.append(value)
        return out, at


@lru_cache(maxsize=2)
def _open(path: Path, size: int, mtime: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: "str | Path") -> GGUFFile:
    """The parsed file; one parse serves target and tokenizer."""
    path = Path(path).expanduser().resolve()
    try:
        stat = os.stat(path)
    except OSError:
        raise LoadError(f"load: {path} must exist; got no such file. Fix: give the path of a .gguf file.") from None
    return _open(path, stat.st_size, stat.st_mtime_ns)
