"""Synthetic profiler traces whose account is known: a small simulation of ranks that meet in collectives."""

import gzip
import json
from pathlib import Path

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
VLLM = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)"
BASE = 1_700_000_000_000_000_000  # ns


def kernel(name: str, start: float, duration: float, stream: int = 7, **args) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration,
            "args": {"stream": stream, **args}}


def simulate(ranks: int, steps: int, per_step: int, *, wire: float = 20.0, compute: float = 40.0, late: "dict | None" = None,
             gaps: "dict | None" = None, offsets: "dict | None" = None, drift: "dict | None" = None, names: tuple = (NCCL,),
             annotate: bool = True, nbytes: "int | None" = None, pause: float = 300.0, begin: float = 1e6) -> list:
    """Per rank, a list of events. late: rank -> us of extra compute before every collective; gaps: rank -> us of idle GPU there;
    offsets: rank -> us added to its clock; drift: rank -> us per us. A dict's key None: every other rank."""
    late, gaps, offsets, drift = ({} if d is None else d for d in (late, gaps, offsets, drift))
    pick = lambda d, r: d.get(r, d.get(None, 0.0))  # noqa: E731
    now = [begin] * ranks
    events = [[] for _ in range(ranks)]
    clock = lambda r, t: t * (1 + pick(drift, r)) + pick(offsets, r)  # noqa: E731
    args = {} if nbytes is None else {"Collective name": "allreduce", "In msg nelems": nbytes // 2, "dtype": "BFloat16",
                                      "Group size": ranks, "Process Group Name": "tp"}
    for s in range(steps):
        first = list(now)
        for k in range(per_step):
            starts = []
            for r in range(ranks):
                busy = compute + pick(late, r)
                events[r].append(kernel("gemm", clock(r, now[r]), busy))
                starts.append(now[r] + busy + pick(gaps, r))
            end = max(starts) + wire
            for r in range(ranks):
                a, b = clock(r, starts[r]), clock(r, end)
                events[r].append(kernel(names[k % len(names)], a, b - a, **args))
            now = [end] * ranks
        if annotate:
            for r in range(ranks):
                a, b = clock(r, first[r]), clock(r, now[r])
                events[r].append({"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{s}", "pid": 0, "tid": 7,
                                  "ts": a, "dur": b - a})
        now = [t + pause for t in now]
    return events


def document(events: list, rank: int, world: int, **header) -> str:
    return json.dumps({"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
                       "trace_id": f"id-{rank}", "baseTimeNanoseconds": BASE, **header, "traceEvents": events,
                       "traceName": "x"}, indent=1)


def write(folder: Path, per_rank: list, compress: bool = False, world: "int | None" = None, **header) -> list:
    """One file per rank; returns their paths."""
    paths = []
    for r, events in enumerate(per_rank):
        text = document(events, r, world or len(per_rank), **header).encode()
        paths.append(folder / f"rank{r}.json{'.gz' if compress else ''}")
        paths[-1].write_bytes(gzip.compress(text) if compress else text)
    return paths
