"""Records the nccl_* and ours_late traces of this folder: two ranks on two GPUs, torch.profiler on both, then cut.

    python record_nccl.py OUT [nccl|ours]   # OUT/<mode>-rank<r>.json.gz, and the excerpts in OUT/cut/

All-reduces are NCCL's, or (ours) fastverify.all_reduce through GPU memory that the peer writes.

Prints, per mode, what rank 1 does before every all-reduce and how long that takes by CUDA events or the host's clock.
"""

import gzip
import json
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, schedule

LAYERS, STEPS, ROWS, HIDDEN, LATE, SLEEP = 8, 3, 4, 7168, 3, 0.001
MODES = {"nccl": ("nccl_late", "nccl_host_late", "nccl_graph_late"), "ours": ("ours_late", "ours_graph_late")}
KEPT = {"nccl_late": 2, "nccl_graph_late": 2}  # steps of the excerpt, else 1
ARGS = ("stream", "correlation", "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name")


class Rank:
    """One process: weights, a message, and the delay of rank 1."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.all_reduce, self.comm = rank, dist.all_reduce, None
        if kind == "ours":
            from fastverify import Communicator, all_reduce
            self.comm = Communicator(device=torch.device("cuda", rank), backend="peer")
            self.all_reduce = lambda x: all_reduce(x, self.comm, out=x)
        draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.w, self.h, self.large = draw(HIDDEN, HIDDEN), draw(ROWS, HIDDEN), draw(4096, 4096)
        self.y, self.out = torch.empty_like(self.h), torch.empty_like(self.large)
        self.hosts = dist.new_group(backend="gloo")

    def step(self, mode: str) -> None:
        for _ in range(LAYERS):
            torch.matmul(self.h, self.w, out=self.y)
            if self.rank == 1 and "host" in mode:
                torch.cuda.synchronize()
                time.sleep(SLEEP)
            elif self.rank == 1 and mode != "even":
                self.extra()
            self.all_reduce(self.y)

    def extra(self) -> None:
        for _ in range(LATE):
            torch.matmul(self.large, self.large, out=self.out)

    def extra_ms(self) -> float:
        """Median of 21 runs by CUDA events, the next one queued behind: a product as it is in a busy stream."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(22)]
        for m in marks:
            m.record()
            self.extra()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))[10]


def meet(rank: Rank) -> None:
    """A barrier of the hosts, not of the GPUs: no collective in the trace but those of the step."""
    torch.cuda.synchronize()
    dist.barrier(rank.hosts)


def capture(rank: Rank, mode: str):
    side = torch.cuda.Stream()
    if rank.comm:
        rank.comm.move_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rank.step(mode)
    meet(rank)
    if rank.comm:
        rank.comm.move_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rank.step(mode)
    meet(rank)
    return graph.replay


def main(number: int, port: int, folder: str, kind: str) -> None:
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2,
                            device_id=torch.device("cuda", number))
    rank = Rank(number, kind)
    for mode in ("even", "late", "host_late"):
        rank.step(mode)
        meet(rank)
    if number == 1:
        print(f"rank 1's {LATE} products take {rank.extra_ms():.4f} ms, {LAYERS} times a step: {LAYERS * rank.extra_ms():.3f} ms; "
              f"its sleeps {1e3 * LAYERS * SLEEP:.0f} ms and more", flush=True)
    meet(rank)
    for mode in MODES[kind]:
        run = capture(rank, mode) if "graph" in mode else lambda: rank.step(mode)  # noqa: B023 (called in this turn)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True,
                     acc_events=True, schedule=schedule(wait=1, warmup=1, active=STEPS)) as prof:
            for _ in range(2 + STEPS):
                meet(rank)
                run()
                meet(rank)
                prof.step()
        prof.export_chrome_trace(f"{folder}/{mode}-rank{number}.json.gz")
        run = None  # a graph that holds NCCL's kernels keeps its communicator from ending
        meet(rank)
    dist.destroy_process_group()


def cut(path: Path, target: Path, steps: int) -> None:
    """The first `steps` named steps of a trace: GPU events, annotations, collectives; no process names, ids or host events."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    spans = [e for e in data["traceEvents"] if e.get("cat") == "gpu_user_annotation" and e["name"].startswith("ProfilerStep")]
    names = sorted({e["name"] for e in spans})
    first = min(e["ts"] for e in spans if e["name"] == names[0])
    after = min(e["ts"] for e in spans if e["name"] == names[steps])
    spans = [e for e in spans if e["name"] in names[:steps]]  # one per stream
    events = []
    for e in data["traceEvents"]:
        wanted = e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") or e in spans
        if wanted and first <= e["ts"] < after:
            args = {k: v for k, v in e.get("args", {}).items() if k in ARGS}
            events.append({k: e[k] for k in ("ph", "cat", "name", "ts", "dur") if k in e} | {"pid": 0, "tid": e["tid"], "args": args})
    info = {k: data["distributedInfo"][k] for k in ("backend", "rank", "world_size")}
    kept = {"schemaVersion": data["schemaVersion"], "distributedInfo": info, "trace_id": f"{path.stem}",
            "baseTimeNanoseconds": data["baseTimeNanoseconds"], "traceEvents": events}
    with gzip.GzipFile(target, "wb", mtime=0) as f:
        f.write(json.dumps(kept).encode())


if __name__ == "__main__":
    out, which = Path(sys.argv[1]), (sys.argv[2:] or ["nccl"])[0]
    (out / "cut").mkdir(parents=True, exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(main, (free, str(out), which), nprocs=2)
    for m in MODES[which]:
        for r in range(2):
            name = f"{m}-rank{r}.json.gz"
            cut(out / name, out / "cut" / name, KEPT.get(m, 1))
