"""Do the product and the sum run at the same time? Reads a profiler trace of calls: intervals of both kinds of kernels."""

from pathlib import Path
from typing import Callable, Optional

import torch

SUM_WORDS = ("all_reduce", "nccl", "AllReduce")  # in names of kernels that move data between ranks
PRODUCT_WORDS = ("gemm", "nvjet", "cutlass", "xmma", "matmul", "splitK")


def union(intervals: list) -> list:
    """Disjoint ascending intervals that cover the same times."""
    out: list = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def length(intervals: list) -> float:
    return sum(end - start for start, end in intervals)


def common(a: list, b: list) -> float:
    """Time in both of two unions."""
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(events: list) -> dict:
    """events: (name, start us, end us) of kernels -> {"sum_us", "product_us", "both_us", "share"}: share of the shorter one."""
    pick = lambda words: union([[s, e] for name, s, e in events if any(w in name for w in words)])  # noqa: E731
    sums, products = pick(SUM_WORDS), pick(PRODUCT_WORDS)
    both, shorter = common(sums, products), min(length(sums), length(products))
    return dict(sum_us=length(sums), product_us=length(products), both_us=both, share=both / shorter if shorter else 0.0)


def trace(me, call: Callable, folder: Optional[Path], name: str, calls: int = 4) -> dict:
    """`overlap` of `calls` calls in one CUDA graph under torch's profiler, times per call; rank 0 writes its Chrome trace."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        me.together()
        graph.replay()
        torch.cuda.synchronize()
    if folder is not None and me.rank == 0:
        prof.export_chrome_trace(str(folder / f"overlap-{name}.json.gz"))
    events = [(e.name, e.time_range.start, e.time_range.end) for e in prof.events()
              if e.device_type == torch.autograd.DeviceType.CUDA]
    return {k: v / calls if k.endswith("_us") else v for k, v in overlap(events).items()}
