"""What is a collective, and what one rank's trace says about it."""

import re
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import numpy as np

from .reader import TraceReader

# (what the name holds, kind). First match wins. Names: NCCL 2.x, vLLM and SGLang custom all-reduce, TensorRT-LLM and FlashInfer
# (one-shot, two-shot, lamport, fused with RMSNorm), torch symmetric memory, QuickReduce, MSCCL++.
KERNELS = tuple((re.compile(pattern), kind) for pattern, kind in (
    (r"^nccl\w*Kernel_?.*(SendRecv|Broadcast|_Reduce_)", None),  # ranks play different parts: durations do not compare
    (r"(?i)(block|warp|cta)_?all_?reduce", None),  # inside one GPU
    (r"^nccl\w*Kernel_?.*AllReduce", "all-reduce"),
    (r"^nccl\w*Kernel_?.*AllGather", "all-gather"),
    (r"^nccl\w*Kernel_?.*ReduceScatter", "reduce-scatter"),
    (r"^nccl\w*Kernel_?.*AllToAll", "all-to-all"),
    (r"^nccl\w*Kernel", "collective"),
    (r"cross_device_reduce_", "all-reduce"),
    (r"quickreduce::|allreduce_prototype", "all-reduce"),
    (r"(?i)all_?reduce", "all-reduce"),
    (r"(?i)all_?gather", "all-gather"),
    (r"(?i)reduce_?scatter", "reduce-scatter"),
    (r"(?i)all_?to_?all", "all-to-all"),
))
HOST = tuple((re.compile(pattern), kind) for pattern, kind in (
    (r"^(gloo|mpi|ucc|xccl):all_?reduce", "all-reduce"),
    (r"^(gloo|mpi|ucc|xccl):_?all_?gather", "all-gather"),
    (r"^(gloo|mpi|ucc|xccl):_?reduce_?scatter", "reduce-scatter"),
    (r"^(gloo|mpi|ucc|xccl):all_?to_?all", "all-to-all"),
))
PARAM_KINDS = {"allreduce": "all-reduce", "all_reduce": "all-reduce", "allreduce_coalesced": "all-reduce",
               "allgather": "all-gather", "all_gather": "all-gather", "_allgather_base": "all-gather",
               "allgather_into_tensor_coalesced": "all-gather", "reduce_scatter": "reduce-scatter",
               "_reduce_scatter_base": "reduce-scatter", "reduce_scatter_tensor_coalesced": "reduce-scatter",
               "all_to_all": "all-to-all", "all_to_allv": "all-to-all"}
# torch.profiler's schedule, vLLM's model runner, SGLang's scheduler, and names with "step" and a number.
STEPS = re.compile(r"^ProfilerStep#\d+$|^execute_(context|new|model)|^step\[|^(\w+[:.])?step[ _#]?\d+$")
GPU_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
ITEM_BYTES = {"float": 4, "int": 4, "double": 8, "long": 8, "long int": 8, "half": 2, "bfloat16": 2, "c10::half": 2,
              "c10::bfloat16": 2, "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1,
              "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1}


class Collective(NamedTuple):
    """One collective on one rank. Times in us on that rank's clock; nbytes: message, None if the trace does not say."""

    start: float
    duration: float
    kind: str
    nbytes: Optional[int]
    group: str             # process group name, "" if unknown
    group_size: Optional[int]
    name: str
    stream: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


class Span(NamedTuple):
    name: str
    start: float
    end: float


@dataclass
class RankTrace:
    """One rank's file, reduced.

    source       "kernel" (GPU), "host" (gloo and the like), "param" (record_param_comms: host time of the call) or "none"
    collectives  in order of start
    idle_from    us per collective: from here to its start the GPU ran nothing, on any stream (its start without a GPU)
    in_order     the file lists its collectives in order of time (so that a truncated file holds the first of them)
    """

    path: Path
    header: dict
    damage: Optional[str]
    source: str
    collectives: list
    idle_from: np.ndarray = field(repr=False)
    steps: list = field(default_factory=list)
    in_order: bool = True
    number_of_events: int = 0

    @property
    def base(self) -> Optional[int]:
        """ns: what the times of this file count from."""
        value = self.header.get("baseTimeNanoseconds")
        return value if isinstance(value, int) else None

    def info(self, key: str) -> Optional[int]:
        info = self.header.get("distributedInfo")
        value = info.get(key) if isinstance(info, dict) else None
        return value if isinstance(value, int) else None


def read_rank(path: "str | Path", step_pattern: Optional[str] = None, progress: Optional[Callable] = None) -> RankTrace:
    """Streams one file. step_pattern: regular expression of the step annotations (default: STEPS).

    Memory: about 60 bytes per GPU event, and the collectives. Errors: ValueError if the file is no trace.
    """
    wanted = re.compile(step_pattern) if step_pattern else STEPS
    reader = TraceReader(path, progress)
    found = {"kernel": [], "host": [], "param": []}
    starts, ends, streams = array("d"), array("d"), array("i")
    spans = {"user_annotation": [], "gpu_user_annotation": []}
    kernel_kinds: dict = {}
    count = 0
    for event in reader:
        count += 1
        if event.get("ph") != "X":
            continue
        try:
            start, duration = float(event["ts"]), float(event.get("dur", 0))
        except (KeyError, TypeError, ValueError):
            continue
        cat, name = event.get("cat"), str(event.get("name", ""))
        if cat in GPU_WORK:
            starts.append(start)
            ends.append(start + duration)
            streams.append(_stream(event))
            if cat == "kernel":
                if name not in kernel_kinds:
                    kernel_kinds[name] = kind_of(KERNELS, name)
                if kernel_kinds[name]:
                    _keep(found["kernel"], start, duration, kernel_kinds[name], name, event)
        elif cat in spans:
            if wanted.search(name):
                spans[cat].append(Span(name, start, start + duration))
            elif cat == "user_annotation" and (kind := kind_of(HOST, name)):
                _keep(found["host"], start, duration, kind, name, event)
        elif name == "record_param_comms":
            args = event.get("args") or {}
            if kind := PARAM_KINDS.get(str(args.get("Collective name", "")).lower()):
                _keep(found["param"], start, duration, kind, name, event)
    source = next((s for s in ("kernel", "host", "param") if found[s]), "none")
    collectives = found.get(source, [])
    in_order = all(a.start <= b.start for a, b in zip(collectives, collectives[1:]))
    collectives.sort(key=lambda c: c.start)
    on_gpu = source == "kernel"
    if on_gpu:
        collectives = not_before_its_stream(collectives, starts, ends, streams)
    idle_from = _idle_from(collectives, starts, ends) if on_gpu else np.array([c.start for c in collectives])
    steps = merge_spans(spans["gpu_user_annotation" if on_gpu else "user_annotation"])
    return RankTrace(Path(path), reader.header, reader.damage, source, collectives, idle_from,
                     with_trailing(steps, collectives, whole=not reader.damage) if on_gpu else steps, in_order, count)


def kind_of(table: tuple, name: str) -> Optional[str]:
    """What collective a name is in KERNELS or HOST; None: no symmetric one."""
    return next((kind for pattern, kind in table if pattern.search(name)), None)


def _keep(into: list, start: float, duration: float, kind: str, name: str, event: dict) -> None:
    args = event.get("args") or {}
    said = str(args.get("Collective name", "")).lower()
    if said and said not in PARAM_KINDS:
        return  # a broadcast, send or receive in a kernel with a generic name
    group, size = args.get("Process Group Name", ""), args.get("Group size")
    into.append(Collective(start, duration, PARAM_KINDS.get(said, kind), _nbytes(args), str(group),
                           size if isinstance(size, int) else None, name, _stream(event)))


def _nbytes(args: dict) -> Optional[int]:
    """Message bytes: NCCL metadata, else the shapes of record_shapes."""
    count, dtype = args.get("In msg nelems"), str(args.get("dtype", "")).lower()
    if isinstance(count, int) and dtype in ITEM_BYTES:
        return count * ITEM_BYTES[dtype]
    dims, types = args.get("Input Dims"), args.get("Input type")
    try:
        if dims and types and dims[0] and str(types[0]).lower() in ITEM_BYTES:
            return int(np.prod(dims[0])) * ITEM_BYTES[str(types[0]).lower()]
    except (TypeError, ValueError, IndexError, KeyError):
        pass
    return None


def _stream(event: dict) -> int:
    value = (event.get("args") or {}).get("stream", event.get("tid", 0))
    return value if isinstance(value, int) and abs(value) < 1 << 31 else 0


def not_before_its_stream(collectives: list, starts: array, ends: array, streams: array) -> list:
    """A kernel that was launched to start early (programmatic dependent launch) waits for the one before it on its stream: what it
    spends there is its own rank's work. Such a collective starts when that kernel ends."""
    begin, end, stream = np.frombuffer(starts), np.frombuffer(ends), np.frombuffer(streams, dtype=np.int32)
    out = list(collectives)
    for s in {c.stream for c in collectives}:
        mine = np.flatnonzero(stream == s)
        order = mine[np.argsort(begin[mine], kind="stable")]
        last = np.maximum.accumulate(end[order])
        at = [i for i, c in enumerate(collectives) if c.stream == s]
        before = np.searchsorted(begin[order], [collectives[i].start for i in at], side="left") - 1
        for i, b in zip(at, before):
            c = collectives[i]
            if b >= 0 and c.start < last[b] < c.end:
                out[i] = c._replace(start=float(last[b]), duration=c.end - float(last[b]))
    return out


def _idle_from(collectives: list, starts: array, ends: array) -> np.ndarray:
    """us per collective: end of the last GPU work (any stream) that began before it, or its own start if that still ran."""
    begin, end = np.frombuffer(starts, dtype=np.float64), np.frombuffer(ends, dtype=np.float64)
    order = np.argsort(begin, kind="stable")
    begin, last = begin[order], np.maximum.accumulate(end[order])
    own = np.array([c.start for c in collectives])
    before = np.searchsorted(begin, own, side="left") - 1
    return np.where(before >= 0, np.minimum(last[np.maximum(before, 0)], own), own)


def with_trailing(steps: list, collectives: list, whole: bool = True) -> list:
    """ProfilerSteps with the collectives behind their last kernel (the last step only in a file that is whole).

    A kernel counts for the innermost annotation only, so on the GPU a ProfilerStep ends before a collective that has an annotation of
    its own (nccl:all_reduce). ProfilerSteps follow one another without a pause: what starts before the next one is in this one.
    """
    if not all(s.name.startswith("ProfilerStep#") for s in steps):
        return steps
    begins = [c.start for c in collectives]
    out = []
    for step, after in zip(steps, [*(s.start for s in steps[1:]), float("inf") if whole else 0.0]):
        inside = collectives[bisect_left(begins, step.start):bisect_left(begins, after)]
        out.append(step._replace(end=max([step.end, *(c.end for c in inside)])))
    return out


def merge_spans(spans: list) -> list:
    """The steps by start, each named "NAME" or, from its second occurrence on, "NAME (2)".

    ProfilerStep# where there is one, else the outermost. The parts that one annotation has on several streams (same name,
    overlapping) are one span.
    """
    if any(s.name.startswith("ProfilerStep#") for s in spans):
        spans = [s for s in spans if s.name.startswith("ProfilerStep#")]
    merged: list = []
    newest: dict = {}
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        i = newest.get(span.name)
        if i is not None and span.start < merged[i].end:
            merged[i] = merged[i]._replace(end=max(merged[i].end, span.end))
        elif not merged or span.end > merged[-1].end:
            newest[span.name] = len(merged)
            merged.append(span)
    seen: dict = {}
    out = []
    for span in merged:
        seen[span.name] = seen.get(span.name, 0) + 1
        out.append(span if seen[span.name] == 1 else span._replace(name=f"{span.name} ({seen[span.name]})"))
    return out
