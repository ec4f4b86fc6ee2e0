"""Where a rank waits in eager calls: host and device times of every one of thousands of all_reduce calls on two GPUs.

    python benchmarks/comm/eager_gaps.py [--world 2] [--calls 2000]

Each rank notes the host clock (the same on all ranks: CLOCK_MONOTONIC) before and after each call, and device events around it. A
kernel that takes long has waited for the other rank; what that one's host did meanwhile says why: a slow first call (modules are
loaded lazily), a garbage collection, the scheduler, or the profiler. Settings: as a script runs; with gc.freeze() and gc off;
under torch.profiler. Prints medians, p99, the largest, and the longest waits with their cause.
"""

import gc
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import names, options
from ranks import Rank, spawn

from fastverify import Communicator, all_reduce

LONG_US = 100.0


def run(me: Rank, comm, calls: int) -> dict:
    """Host begin and end of every call (us, common clock), device us of every call, collections, context switches."""
    x, out = torch.ones(4, 7168, dtype=torch.bfloat16, device=me.device), torch.empty(4, 7168, dtype=torch.bfloat16, device=me.device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    host, collections = [], []
    note = lambda phase, _: collections.append((time.perf_counter_ns() / 1e3, phase))  # noqa: E731
    gc.callbacks.append(note)
    torch.cuda.synchronize()
    me.together()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for begin, end in events:
        t0 = time.perf_counter_ns()
        begin.record()
        all_reduce(x, comm, out=out)
        end.record()
        host.append((t0 / 1e3, time.perf_counter_ns() / 1e3))
    torch.cuda.synchronize()
    after = resource.getrusage(resource.RUSAGE_SELF)
    gc.callbacks.remove(note)
    return dict(host=host, device=[b.elapsed_time(e) * 1e3 for b, e in events], collections=collections,
                switches=(after.ru_nivcsw - before.ru_nivcsw, after.ru_nvcsw - before.ru_nvcsw))


def cause(other: dict, i: int) -> str:
    """What the other rank's host did before it launched call i."""
    begin, end = other["host"][i]
    idle = begin - other["host"][i - 1][1] if i else 0.0
    if any(begin - idle <= t <= end for t, _ in other["collections"]):
        return f"a garbage collection of the other rank ({max(idle, end - begin):.0f} us)"
    if i < 3 and end - begin > LONG_US:
        return f"the other rank's first calls ({end - begin:.0f} us in the call)"
    if end - begin > LONG_US:
        return f"the other rank's host was {end - begin:.0f} us in this call"
    if idle > LONG_US:
        return f"the other rank's host was away {idle:.0f} us between two calls"
    behind = other["host"][i][1]
    return f"the other rank launched call {i} at its usual pace (host clock {behind:.0f}): its device was late"


def percentile(values: list, share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def say(title: str, ranks: list) -> None:
    print(f"== {title}")
    for r, said in enumerate(ranks):
        took = [b - a for a, b in said["host"]]
        lag = [b - o for (_, b), (_, o) in zip(said["host"], ranks[1 - r]["host"])]
        print(f"rank {r}: host us a call median {percentile(took, 0.5):.1f} p99 {percentile(took, 0.99):.1f} max {max(took):.0f} (call {took.index(max(took))}); "
              f"device us median {percentile(said['device'], 0.5):.1f} p99 {percentile(said['device'], 0.99):.1f} max {max(said['device']):.0f} "
              f"(call {said['device'].index(max(said['device']))}); behind the other by {percentile(lag, 0.5):.0f} median, {max(lag):.0f} at most; "
              f"{len(said['collections']) // 2} collections, {said['switches'][0]} preemptions, {said['switches'][1]} sleeps")
        long = sorted(((d, i) for i, d in enumerate(said["device"]) if d > LONG_US), reverse=True)
        for d, i in long[:5]:
            print(f"   call {i} waited {d:.0f} us: {cause(ranks[1 - r], i)}")
        if len(long) > 5:
            print(f"   and {len(long) - 5} more above {LONG_US:.0f} us")


def body(me: Rank, args) -> int:
    for backend in args.backends:
        with Communicator(device=me.device, backend=backend, max_bytes=1 << 18) as comm:
            found = [("cold: the first calls of the process", me.gathered(run(me, comm, 50)))]
            found.append(("warm", me.gathered(run(me, comm, args.calls))))
            gc.collect(), gc.freeze(), gc.disable()
            found.append(("no garbage collection", me.gathered(run(me, comm, args.calls))))
            gc.enable(), gc.unfreeze()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]):
                profiled = run(me, comm, min(args.calls, 1000))
            found.append(("under torch.profiler", me.gathered(profiled)))
            comm.check()
        if me.rank == 0:
            for title, ranks in found:
                say(f"{backend}, {title}", ranks)
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    parser = options("eager calls of two ranks, one by one")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--backends", type=names("peer", "host", "nccl"), default=["peer"])
    arguments = parser.parse_args()
    spawn(body, arguments, arguments.world)
