"""sglang-kernel's custom all-reduce and its fused add + RMSNorm, where sglang-kernel is installed or SGL_KERNEL_LIBRARY names its library."""

import os

import torch
import torch.distributed as dist
from peers import EPS, Memory

NAME = "sglang-kernel's custom all-reduce"
RANK_DATA_BYTES = 8 << 20  # it keeps 64 bytes for every call that is captured


def library(on_gpu: bool) -> tuple:
    """(torch.ops.sgl_kernel, "") or (None, why not)."""
    if not on_gpu:
        return None, "not on a CPU"
    try:
        if os.environ.get("SGL_KERNEL_LIBRARY"):
            torch.ops.load_library(os.environ["SGL_KERNEL_LIBRARY"])
        else:
            import sgl_kernel  # noqa: F401
        return torch.ops.sgl_kernel, ""
    except Exception as exc:  # not installed, or built for another torch
        return None, f"not loaded: {(str(exc).strip().splitlines() or [type(exc).__name__])[0][:140]}"


class Sglang:
    """Its rows for every message; one set of memory for the largest."""

    def __init__(self, me, rows: int, hidden: int) -> None:
        self.ops, why = library(me.cuda)
        self.why = next((w for w in me.gathered(why) if w), "")
        if not self.why and me.world not in (2, 4, 6, 8):
            self.why = "2, 4, 6 or 8 ranks only"
        if self.why:
            return
        size = rows * hidden * 2
        self.signals, self.input = Memory(me, self.ops.meta_size() + size), Memory(me, size)
        self.data = torch.zeros(RANK_DATA_BYTES, dtype=torch.uint8, device=me.device)
        self.handle = self.ops.init_custom_ar(self.signals.addresses, self.data, me.rank, True)
        self.ops.register_buffer(self.handle, self.input.addresses)
        torch.cuda.synchronize()
        me.together()

    def rows(self, me, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shape: dict, close) -> None:
        if self.why:
            for op in ("all_reduce", "all_reduce_rms_norm"):
                me.absent(NAME, op, shape, "bfloat16", self.why)
            return
        mine, out, res, y = self.input.view(torch.bfloat16)[:x.numel()].view_as(x), torch.empty_like(x), residual.clone(), x.clone()
        mine.copy_(x)

        def captured() -> None:  # it looks up the addresses of captured calls before the first replay
            said = me.gathered(self.ops.get_graph_buffer_ipc_meta(self.handle))
            self.ops.register_graph_buffers(self.handle, [list(h) for h, _ in said], [list(o) for _, o in said])

        def call() -> None:
            self.ops.all_reduce(self.handle, mine, out, 0, 0)

        def fused() -> None:
            call()
            self.ops.fused_add_rmsnorm(out, res, weight, EPS, False)

        def over_nccl() -> None:
            dist.all_reduce(y, group=me.fabric)
            self.ops.fused_add_rmsnorm(y, res, weight, EPS, False)
        call()
        if not all(me.gathered(close(out))):
            me.absent(NAME, "all_reduce", shape, "bfloat16", "failed: wrong before it was timed")
            return
        me.row(NAME, "all_reduce", shape, "bfloat16", call, lambda: close(out), "input registered, no copy", captured=captured)
        me.row(f"{NAME} + its fused add and norm", "all_reduce_rms_norm", shape, "bfloat16", fused, lambda: bool(out.isfinite().all()), captured=captured)
        me.row("NCCL + sglang-kernel's fused add and norm", "all_reduce_rms_norm", shape, "bfloat16", over_nccl, lambda: True, "values not compared")
