"""Others' all-reduce kernels, where they can be had: those that an installed FlashInfer ships (TensorRT-LLM's Lamport fusion and vLLM's
custom all-reduce; SGLang's is of the same source), compiled from its headers with nvcc, or --peers-lib, built so elsewhere:

    nvcc -shared -O3 -std=c++17 --expt-relaxed-constexpr -Xcompiler -fPIC -arch=sm_90a -I .../flashinfer/data/include \
         -I .../flashinfer/data/spdlog/include -o peers.so benchmarks/comm/peers.cu
"""

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Optional

import torch

from fastverify.comm.topology import _control

BARRIER_FLAGS = 256  # per rank, of the Lamport workspace
EPS = 1e-6


def library(given: Optional[str], on_gpu: bool) -> tuple:
    """(path, "") or ("", why not)."""
    if not on_gpu:
        return "", "not on a CPU"
    if given:
        return (given, "") if Path(given).exists() else ("", f"no {given}")
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return "", "not installed"
    data, nvcc = Path(list(found.submodule_search_locations)[0]) / "data", shutil.which("nvcc")
    if nvcc is None:
        return "", "no nvcc to compile its kernels with"
    major, minor = torch.cuda.get_device_capability()
    built = Path(tempfile.gettempdir()) / f"fastverify-peers-{major}{minor}.so"
    run = subprocess.run([nvcc, "-shared", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-w", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}a",
                          "-I", str(data / "include"), "-I", str(data / "spdlog" / "include"), "-o", f"{built}.part",
                          str(Path(__file__).with_name("peers.cu"))], capture_output=True, text=True, timeout=100)
    if run.returncode:
        return "", "failed: " + (run.stderr.strip().splitlines() or ["nvcc"])[0][:160]
    Path(f"{built}.part").rename(built)
    return str(built), ""


class Memory:
    """Bytes on every rank that all ranks can address."""

    def __init__(self, me, nbytes: int) -> None:
        control, size = _control(), -(-nbytes // (2 << 20)) * (2 << 20)
        self.own = control.DeviceSlab(size)
        self.own.fill(0, size, 0)
        handles = me.gathered(self.own.ipc_handle())
        self.all = [self.own if r == me.rank else control.PeerSlab(h) for r, h in enumerate(handles)]
        self.addresses, self.size, self.device = [m.address for m in self.all], size, me.device

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        class Raw:
            __cuda_array_interface__ = dict(shape=(self.size,), typestr="|u1", data=(self.own.address, False), version=3)
            owner = self.own
        return torch.as_tensor(Raw(), device=self.device).view(dtype)


class Peers:
    """Rows of both for every message; one set of memory for the largest."""

    def __init__(self, me, rows: int, hidden: int, given: Optional[str]) -> None:
        path, why = library(given, me.cuda) if me.rank == 0 else ("", "")
        path, self.why = me.gathered((path, why))[0]
        if not self.why and me.world not in (2, 4, 8):
            self.why = "2, 4 or 8 ranks only"
        if self.why:
            return
        self.lib, self.me, w = ctypes.CDLL(path), me, me.world
        size = w * rows * hidden * 2
        self.memory = [Memory(me, size), Memory(me, w * BARRIER_FLAGS * 4), Memory(me, 3 * size)]  # two-shot, flags, Lamport
        self.memory[2].view(torch.float16).fill_(-0.0)  # what "not there yet" looks like to it
        flags = torch.tensor([0, 0, 0, size, 0], dtype=torch.int32, device=me.device)
        self.workspace = torch.tensor([a for m in self.memory for a in m.addresses] + [flags.data_ptr()], dtype=torch.int64, device=me.device)
        self.flags = flags
        self.input = Memory(me, rows * hidden * 2)
        self.signals = Memory(me, self.lib.peers_signal_bytes() + size)
        self.data = torch.tensor(self.input.addresses + [0] * (8 - w), dtype=torch.int64, device=me.device)
        self.signal_list = (ctypes.c_void_p * 8)(*self.signals.addresses)
        torch.cuda.synchronize()
        me.together()

    def rows(self, me, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shape: dict, close) -> None:
        names = ("FlashInfer's Lamport fusion one-shot", "FlashInfer's Lamport fusion two-shot", "vLLM's custom all-reduce (FlashInfer's copy)")
        if self.why:
            for name in names:
                me.absent(name, "all_reduce", shape, "bfloat16", self.why)
            return
        n, h = x.shape
        out, norm, res = torch.empty_like(x), torch.empty_like(x), residual.clone()
        p = lambda t: ctypes.c_void_p(t.data_ptr() if t is not None else 0)  # noqa: E731

        def lamport(one_shot: bool, fused: bool) -> None:
            code = self.lib.peers_lamport(me.world, me.rank, n, h, p(self.workspace), p(x), p(out), p(res if fused else None),
                                          p(norm if fused else None), p(weight if fused else None), ctypes.c_float(EPS), one_shot, True,
                                          ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            if code:
                raise RuntimeError(f"peers_lamport: CUDA error {code}")

        mine = self.input.view(torch.bfloat16)[:x.numel()].view_as(x)
        mine.copy_(x)

        def vllm() -> None:
            code = self.lib.peers_vllm(me.world, me.rank, p(self.data), self.signal_list, p(out), x.numel(),
                                       ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            if code:
                raise RuntimeError(f"peers_vllm: CUDA error {code}")
        for name, one_shot in zip(names[:2], (True, False)):
            if not one_shot and n < me.world:
                continue  # it gives whole tokens to ranks
            me.row(name, "all_reduce", shape, "bfloat16", lambda: lamport(one_shot, False), lambda: close(out))
            res.copy_(residual)
            me.row(name, "all_reduce_rms_norm", shape, "bfloat16", lambda: lamport(one_shot, True), lambda: bool(norm.isfinite().all()))
        me.row(names[2], "all_reduce", shape, "bfloat16", vllm, lambda: close(out), "input registered, no copy")
