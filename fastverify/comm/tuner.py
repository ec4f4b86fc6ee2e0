"""Which way a message takes, by size: measured at start-up by all ranks together, agreed, and kept per topology.

One-shot or two-shot, own kernels or NCCL, and (tune_linear) into how many pieces a row-parallel linear is cut. A plan is kept
in $FASTVERIFY_CACHE/comm/<key>.json; the key covers everything that may change it, so nothing has to be thrown away by hand.
FASTVERIFY_TUNE: 1 (default) use a kept plan, else measure; again: measure; 0: rules without measuring.
"""

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Callable, Optional

import torch

from .._version import __version__
from .topology import topology

FORMAT = 2           # of the file; raise it when the kernels or the measurement change
CALLS, REPLAYS = 16, 7
SMALLEST = 4096      # bytes: below it every way costs a launch and a hop
CLEARLY = 0.95       # NCCL must be this much faster to be chosen: its sums may round elsewhere
LINEAR_ROWS = (64, 128, 256, 512, 1024, 2048)
SPLITS = (("rows", 1), ("columns", 2), ("columns", 4), ("growing", 3), ("growing", 4), ("rows", 2), ("rows", 4))
# ("resident", p) is not among them: on a GPU lanes that wait for a piece slow down its product (docs/performance.md).


def best_split(sizes: list, low: list, high: list) -> int:
    """The size up to which `low` is used, `high` above it, so that the sum of their times is least; 0: `high` everywhere.

    Sizes ascend; None is a way that did not work there. Ties go to `low` (fewer hops)."""
    worst = max([t for t in low + high if t is not None], default=0.0) * len(sizes) + 1.0
    cost = [(sum(worst if t is None else t for t in low[:i]) + sum(worst if t is None else t for t in high[i:]), -i)
            for i in range(len(sizes) + 1)]
    cut = -min(cost)[1]
    return sizes[cut - 1] if cut else 0


def message_sizes(max_bytes: int) -> list:
    """Powers of two from SMALLEST, and max_bytes itself (rounded to 16 bytes)."""
    sizes, n = [], SMALLEST
    while n < max_bytes:
        sizes.append(n)
        n *= 2
    return sizes + [max(16, max_bytes // 16 * 16)]


def choose(sizes: list, one_shot: list, two_shot: list, nccl: Optional[list]) -> dict:
    """The plan from measured us: {"one_shot_bytes", "nccl_bytes" or None}. Pure."""
    one = best_split(sizes, one_shot, two_shot)
    own = [a if n <= one else b for n, a, b in zip(sizes, one_shot, two_shot)]
    plan = {"one_shot_bytes": one, "nccl_bytes": None}
    if nccl is not None:
        wanted = [None if t is None else t / CLEARLY for t in nccl]
        upto = best_split(sizes, own, wanted)
        plan["nccl_bytes"] = upto + 1 if upto < sizes[-1] else sizes[-1] + 1
    return plan


def plan_key(facts: dict) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def cache_file(key: str) -> Path:
    root = os.environ.get("FASTVERIFY_CACHE") or Path.home() / ".cache" / "fastverify"
    return Path(root) / "comm" / f"{key}.json"


def mode() -> str:
    """Of FASTVERIFY_TUNE."""
    value = os.environ.get("FASTVERIFY_TUNE", "1")
    if value not in ("0", "1", "again"):
        raise ValueError(f"Communicator: FASTVERIFY_TUNE must be 0|1|again; got {value!r}. Fix: unset it.")
    return value


def facts_of(comm) -> dict:
    """What a plan depends on, the same on every rank: GPUs in rank order and the way between them, driver, NCCL, versions, kernel
    command line (IOMMU, ACS), NCCL's variables."""
    here = topology()
    gpus = {g["bus_id"]: (g["name"], g["link"], g["numa_node"]) for g in here["gpus"]}
    p = torch.cuda.get_device_properties(comm.device)
    mine = dict(host=platform.node(), gpu=p.name, uuid=str(p.uuid), sms=p.multi_processor_count)
    try:
        cmdline = Path("/proc/cmdline").read_text()
    except OSError:
        cmdline = ""
    return comm.from_first(dict(
        format=FORMAT, version=__version__, world=comm.world, transport=comm.transport, max_bytes=comm.max_bytes,
        ranks=comm._exchange(mine), gpus=gpus, links=here["links"], driver=here["driver"]["version"], torch=torch.__version__,
        nccl=None if comm.nccl is None else comm.nccl.version, cmdline=hashlib.sha256(cmdline.encode()).hexdigest(),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}))


def load_plan(key: str) -> Optional[dict]:
    try:
        plan = json.loads(cache_file(key).read_text())
    except (OSError, ValueError):
        return None
    wanted = {"one_shot_bytes": int, "linear": dict}
    return plan if isinstance(plan, dict) and all(isinstance(plan.get(k), t) for k, t in wanted.items()) else None


def save_plan(key: str, plan: dict) -> None:
    """Whole or not at all; a file system that refuses is no error: the plan is then measured again next time."""
    path = cache_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(plan, indent=1, sort_keys=True))
        os.replace(part, path)
    except OSError:
        pass


def tune(comm, own_forms: bool = True) -> None:
    """Sets one_shot_bytes (where own_forms) and nccl_bytes of a communicator. Collective; some tenths of a second when nothing
    is kept. Rank 0's file decides for all ranks."""
    if comm.from_first(mode()) == "0" or comm.transport == "nccl" or comm.world == 1:
        return
    comm.facts = facts_of(comm)
    comm.key = plan_key(comm.facts)
    plan = comm.from_first(load_plan(comm.key) if mode() == "1" else None)
    comm.tuned = f"a kept plan ({comm.key})"
    if plan is None:
        plan = {**measure(comm), "linear": {}, "facts": comm.facts}
        comm.tuned = f"measured now ({comm.key})"
        if comm.rank == 0:
            save_plan(comm.key, plan)
    comm.plan = plan
    if own_forms:
        comm.set_one_shot_bytes(plan["one_shot_bytes"])
    if comm.nccl is not None and plan["nccl_bytes"] is not None:
        comm.nccl_bytes = plan["nccl_bytes"]


def measure(comm) -> dict:
    """Times of every way at every size, and the plan they give. Collective."""
    from .all_reduce import all_reduce
    sizes, keep = message_sizes(comm.max_bytes), (comm.one_shot_bytes, comm.nccl_bytes)
    times: dict = {"one-shot": [], "two-shot": [], "nccl": []}
    for nbytes in sizes:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=comm.device)
        for way in times:
            if way == "nccl" and comm.nccl is None:
                continue
            comm.set_one_shot_bytes(comm.max_bytes if way == "one-shot" else 0)
            comm.nccl_bytes = 0 if way == "nccl" else None
            times[way].append(time_call(comm, lambda: all_reduce(x, comm, out=x)))
    comm.set_one_shot_bytes(keep[0])
    comm.nccl_bytes = keep[1]
    plan = choose(sizes, times["one-shot"], times["two-shot"], times["nccl"] or None)
    return {**plan, "sizes": sizes, "times_us": times}


def time_call(comm, call: Callable, calls: int = CALLS) -> Optional[float]:
    """us of one of `calls` chained calls in a CUDA graph: median of REPLAYS, least over ranks (waiting for a late rank is not
    the collective's). None where it failed on any rank."""
    from .slabs import wait_until_idle
    stream, before, failed = torch.cuda.Stream(comm.device), comm._stream, ""
    samples: list = []
    comm.move_stream()
    try:
        with torch.cuda.stream(stream):
            call()
            wait_until_idle(comm.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    call()
            for _ in range(REPLAYS):
                comm._exchange(None)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                end.record(stream)
                wait_until_idle(comm.device)
                samples.append(start.elapsed_time(end) * 1e3 / calls)
            del graph
        comm.check()
    except RuntimeError as exc:
        failed = str(exc)
    comm._stream = before
    everyone = comm._exchange(None if failed else sorted(samples)[len(samples) // 2])
    return None if None in everyone else min(everyone)


def tune_linear(comm, n: int, k: int, dtype: torch.dtype, rows: tuple = LINEAR_ROWS) -> list:
    """Cuts of a row-parallel linear [R, k] x [n, k] that are fastest, [(rows, kind, pieces), ...] ascending; kept in the plan.

    Collective; once per shape, at load time. k may differ between ranks. Memory: one weight and max(rows) rows of input and
    output."""
    from .linear_all_reduce import cut, fits, linear_all_reduce, shape_name
    if getattr(comm, "plan", None) is None:
        return []
    name, kept = shape_name(n, k, dtype), shape_name(n, max(comm._exchange(k)), dtype)
    if kept in comm.plan["linear"]:
        comm.splits[name] = [tuple(row) for row in comm.plan["linear"][kept]]
        return comm.splits[name]
    weight = torch.zeros(n, k, dtype=dtype, device=comm.device)
    found: list = []
    for r in rows:
        x = torch.zeros(r, k, dtype=dtype, device=comm.device)
        timed = []
        for kind, pieces in SPLITS:
            if (not fits(n, dtype.itemsize, kind, pieces) or (kind == "columns" and n % (16 * pieces)) or
                    (kind == "rows" and pieces > 1 and r // pieces < 128) or cut(r, weight, comm, (kind, pieces)) != (kind, pieces)):
                continue
            us = time_call(comm, lambda: linear_all_reduce(x, weight, comm, split=(kind, pieces)), calls=4)
            if us is not None:
                timed.append((us * (1.0 if (kind, pieces) == SPLITS[0] else 1.03), pieces, kind))  # a cut must gain 3 %
        if timed:
            us, pieces, kind = min(timed)
            found.append((r, kind, pieces))
    comm.splits[name] = found = comm.from_first(found)
    comm.plan["linear"][kept] = found
    if comm.rank == 0:
        save_plan(comm.key, comm.plan)
    return found
