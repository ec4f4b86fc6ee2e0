"""A large trace of a known account, and what reading it takes.

    python tests/trace/large_trace.py --megabytes 1000 FOLDER      # writes two ranks there, reads them, prints memory and time
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from trace_fixtures import document, simulate

STEPS, PER_STEP = 20, 100
MEASURE = """
import resource, sys, time
import numpy
from fastverify.cli import main, trace
from fastverify.trace import account, read_rank
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
ranks = [read_rank(p) for p in sys.argv[1:]]
report = account(ranks)
assert report.number == 2000 and abs(report.total(0).wire - 40) < 1e-3, (report.number, report.total(0))
print(peak() - before, peak(), ranks[0].number_of_events, time.perf_counter() - start)
"""


def filler(kind: str, n: int = 1000) -> str:
    """JSON of n events that are no collectives: CPU ops with stacks, or GPU kernels (which the reader must remember)."""
    if kind == "stacks":
        events = [{"ph": "X", "cat": "cpu_op", "name": f"aten::op{i % 97}", "pid": 1, "tid": 1, "ts": 1e6 + i, "dur": 0.5,
                   "args": {"External id": i, "Call stack": "model.py(12): forward; " * 20}} for i in range(n)]
    else:
        events = [{"ph": "X", "cat": "kernel", "name": f"void at::native::vectorized_elementwise_kernel<4, op{i % 97}>", "pid": 0,
                   "tid": 9, "ts": 9e5 + i, "dur": 0.5, "args": {"stream": 9, "grid": [1, 1, 1], "block": [128, 1, 1],
                                                                 "registers per thread": 16, "correlation": i}} for i in range(n)]
    return json.dumps(events)[1:-1]


def write_large(folder: Path, megabytes: float, kind: str) -> list:
    """Two ranks of 2000 collectives (40 ms of wire in all, in one step): rank 0 in a file of that size, rank 1 in a small one."""
    events = simulate(2, STEPS, PER_STEP, annotate=False)
    paths = [folder / f"rank{r}.json" for r in (0, 1)]
    paths[1].write_text(document(events[1], 1, 2))
    piece = filler(kind) + ","
    head, tail = document(events[0], 0, 2).split('"traceEvents": [', 1)
    with open(paths[0], "w") as f:
        f.write(head + '"traceEvents": [')
        while f.tell() < megabytes * 1e6:
            f.write(piece)
        f.write(tail)
    return paths


def read_large(paths: list, root: "str | Path") -> dict:
    """Reads them in a process of its own: MiB above the imports, MiB in all, events of the large file, seconds."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return dict(zip(("mib", "peak_mib", "events", "seconds"), map(float, done.stdout.split())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--kind", default="stacks", choices=("stacks", "kernels"))
    args = parser.parse_args()
    start = time.perf_counter()
    files = write_large(args.folder, args.megabytes, args.kind)
    print(f"{files[0]}: {files[0].stat().st_size / 1e6:.0f} MB written in {time.perf_counter() - start:.0f} s")
    r = read_large(files, Path(__file__).resolve().parents[2])
    print(f"read in {r['seconds']:.0f} s: {r['events']:.0f} events, {r['mib']:.0f} MiB above the imports, {r['peak_mib']:.0f} MiB in all")
