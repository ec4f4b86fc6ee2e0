"""Compiles Triton kernels for GPUs that are not there: a call of an op on CPU tensors compiles what it would launch."""

import contextlib
from typing import Iterator
from unittest import mock

DEVICES = {  # compute capability -> (multiprocessors, bytes of shared memory per block)
    80: (108, 163 * 1024), 89: (128, 99 * 1024), 90: (132, 227 * 1024), 100: (148, 227 * 1024), 120: (188, 99 * 1024)}


class _Driver:
    """What JITFunction.run asks of a driver when it only compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list]:
    """Launches inside compile for this GPU and do nothing; the list receives the compiled kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled, run, used = [], JITFunction.run, []

    def compile_it(self, *args, grid, warmup, **kwargs):
        self.device_caches.clear()  # of kernels compiled for another GPU under the same device number
        used.append(self)
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    try:
        with mock.patch.object(driver, "_active", _Driver(capability)), mock.patch.object(JITFunction, "run", compile_it):
            yield compiled
    finally:
        for function in used:  # a later test may launch the same function on the GPU that is there
            function.device_caches.clear()
