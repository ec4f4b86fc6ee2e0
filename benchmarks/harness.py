"""How every benchmark here measures: graph replay over rotating buffers, beside the floor, the peers and a correctness check.

    bench = Bench("verify_tree", options("verify_tree against its peers").parse_args())
    for shape in shapes:                                                  # e.g. dict(B=8, N=32, V=128256)
        sets = [make_inputs(shape, i) for i in range(bench.sets(nbytes))]  # as many as a cold L2 needs
        bench.measure("cuda", shape, "bfloat16", [partial(op, s) for s in sets], nbytes, check=lambda: all(map(right, sets)))
        bench.absent("flashinfer", shape, "bfloat16", "not installed")
    bench.finish()                                                        # table to stdout, rows to --out DIR

One GPU measurement is one CUDA graph with at least 50 calls, each on the next buffer set; a sample is one replay divided by its
calls, so the gap between two graph nodes is in it. `empty_us` is the same for kernels that do nothing: what is left above
max(floor_us, empty_us) belongs to the op. floor_us = bytes / copy bandwidth of this device, measured in this run.
On a CPU the calls are timed one by one with the host's clock: look at ratios there, not at times.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch

from fastverify.cli.bench_tables import SCHEMA, key, table_rows
from fastverify.cli.environment import command, environment
from fastverify.cli.output import Output

MIN_CALLS = 50         # calls of one replay: the graph's own launch is then under 0.2 us a call
MAX_SETS = 1024        # buffer sets of a cold run; very small ops stay partly warm, and their rows say so
CPU_SETS = 8           # enough for ratios
BUDGET_S = 0.15        # device time of one measurement: long calls get fewer samples, at least MIN_SAMPLES
MIN_SAMPLES = 7
MOST_WARM = 100        # samples thrown away in one round of the warm-up, at most
WARM_S = 0.01          # device time of such a round: a GPU that waited for the host has lowered its clocks
WARM_ROUNDS = 5        # rounds, at most, until two in a row agree to SETTLED: the clocks are up
SETTLED = 0.005
COLD_L2S = 3           # bytes that pass between two uses of a buffer, in sizes of the L2
COLUMNS = ("op", "provider", "shape", "dtype", "median_us", "p20_us", "p80_us", "floor_us", "empty_us", "bytes", "copy_gb_s",
           "cold", "graph", "correct", "note", "seconds", "command", "device", "date", "versions")
PEERS = ("triton", "sglang-kernel", "flashinfer-python", "vllm")
ROOT = Path(__file__).resolve().parents[1]
# flag of every benchmark -> the axes that it sets, by their names in rows
AXES = {"batch": ("B",), "nodes": ("N",), "vocab": ("V",), "prefix": ("KV", "kv"), "hidden": ("H",), "rows": ("rows",), "top": ("k",)}
QUICK_SHAPES, QUICK_REPEATS = 2, 8


class Timing(NamedTuple):
    """Microseconds per call, and whether the calls ran as one CUDA graph."""

    median_us: float
    p20_us: float
    p80_us: float
    graph: bool


def quantile(sorted_values: list, q: float) -> float:
    """Linear between neighbours, of a list that is sorted already."""
    at = q * (len(sorted_values) - 1)
    low = int(at)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (at - low) * (sorted_values[high] - sorted_values[low])


def summary(samples: list, graph: bool) -> Timing:
    s = sorted(samples)
    return Timing(quantile(s, 0.5), quantile(s, 0.2), quantile(s, 0.8), graph)


def buffer_sets(nbytes: int, l2_bytes: int) -> int:
    """Sets of `nbytes` so that COLD_L2S times the L2 is touched before a set comes round again; 2..MAX_SETS."""
    return max(2, min(MAX_SETS, -(-COLD_L2S * l2_bytes // max(nbytes, 1)) + 1))


def is_cold(count: int, nbytes: int, l2_bytes: int) -> bool:
    """Whether `count` sets of `nbytes` reach what buffer_sets asks for."""
    return count > 1 and (count - 1) * nbytes >= COLD_L2S * l2_bytes


def l2_bytes(device: torch.device) -> int:
    """L2 of the GPU; on a CPU 32 MiB stand for the last-level cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 << 20


def samples_within(seconds: float, repeats: int) -> int:
    """Samples of `seconds` each: `repeats`, or what BUDGET_S allows."""
    return max(min(repeats, MIN_SAMPLES), min(repeats, int(BUDGET_S / max(seconds, 1e-9))))


# ---- timing ----------------------------------------------------------------------------------------------------------------

def time_host(calls: Sequence[Callable], repeats: int, before: Optional[Callable] = None) -> Timing:
    samples = []
    for call in calls:
        call()
    for i in range(max(repeats, len(calls))):
        if before:
            before()
        start = time.perf_counter()
        calls[i % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e6)
    return summary(samples, False)


def _samples(run: Callable, calls: int, repeats: int, before: Optional[Callable]) -> list:
    """Device microseconds per call of `repeats` runs (fewer where BUDGET_S asks for it), once rounds of WARM_S take equally long."""
    def timed(count: int) -> list:
        marks = []
        for _ in range(count):
            if before:
                before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [s.elapsed_time(e) for s, e in marks]

    ms = timed(2)[-1]
    for _ in range(0 if before else WARM_ROUNDS if ms < WARM_S * 1e3 else 1):
        last, ms = ms, quantile(sorted(timed(max(1, min(MOST_WARM, int(WARM_S * 1e3 / max(ms, 1e-3)))))), 0.5)
        if abs(ms - last) <= SETTLED * last:
            break
    return [ms * 1e3 / calls for ms in timed(samples_within(ms * 1e-3, repeats))]


def time_cuda(calls: Sequence[Callable], repeats: int, before: Optional[Callable] = None, graph: bool = True,
              min_calls: int = MIN_CALLS) -> Timing:
    """`calls` in turn, at least `min_calls` of them, as one CUDA graph (or plain launches where graph=False)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    sequence = [calls[i % len(calls)] for i in range(max(min_calls, len(calls)))]
    if not graph:
        return summary(_samples(lambda: [call() for call in sequence], len(sequence), repeats, before), False)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in sequence:
            call()
    return summary(_samples(captured.replay, len(sequence), repeats, before), True)


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second, read plus written, of a copy far larger than the L2."""
    n = max(64 << 20, 8 * l2_bytes(device))
    source = torch.empty(n // 8, dtype=torch.int64, device=device).random_()  # zeros need not be in memory at all
    target = source.clone()
    timed = time_cuda if device.type == "cuda" else time_host
    return 2 * source.nbytes / (timed([lambda: target.copy_(source)], max(3, repeats // 4)).median_us * 1e-6)


def empty_node(device: torch.device, repeats: int) -> float:
    """Microseconds of a graph node (on a CPU: of a Python call) that does nothing."""
    if device.type == "cuda":
        return time_cuda([lambda: torch.cuda._sleep(0)], repeats).median_us
    return time_host([lambda: None], repeats).median_us


# ---- results ---------------------------------------------------------------------------------------------------------------

def installed(distribution: str) -> Optional[str]:
    """Version of an installed package, None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def slug(device_name: str, device_type: str) -> str:
    """File name of a device: NVIDIA H200 -> nvidia-h200; every CPU -> cpu."""
    return "cpu" if device_type == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def typed() -> str:
    """The command of this process, the script as a path from the repository's root."""
    script = Path(sys.argv[0]).resolve()
    here = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", here, *sys.argv[1:]]) if script.suffix == ".py" and script.stem != "__main__" else command()


def without_paths(text: str) -> str:
    """The command without --out and --wait, and with file names instead of paths: results are read on other machines."""
    words = re.sub(r"\s--out(=|\s+)\S+|\s--wait\b", "", text).split(" ")
    return " ".join(w if w.startswith("--") and "=" not in w else w.rsplit("/", 1)[-1] if w.startswith(("/", "~", ".")) else w
                    for w in words)


def merge_rows(old: list, new: list) -> list:
    taken = {key(r) for r in new}
    return [r for r in old if key(r) not in taken] + new


def write_rows(folder: Path, rows: list) -> Path:
    """Adds the rows to <device>-<date>.json in `folder`; returns the file."""
    path = folder / f"{slug(rows[0]['device'], rows[0]['device_type'])}-{rows[0]['date'][:10]}.json"
    store(path, rows)
    return path


def store(path: Path, rows: list) -> None:
    """Adds the rows to a result file; a row that is there already is replaced. The file is whole at any time: a reader, or
    a limit that stops this process, meets the old rows or the new ones."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r, allow_nan=False) for r in merge_rows(old, rows))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(f'{{"schema": {SCHEMA}, "rows": [\n' + lines + "\n]}\n")
    os.replace(part, path)


def show(title: str, rows: list) -> None:
    """A rich table on a terminal that has rich, else plain columns."""
    header, cells = table_rows(rows)
    Output().table(header, cells, title=title)


# ---- one benchmark ---------------------------------------------------------------------------------------------------------

def options(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description, conflict_handler="resolve")  # a script's own option goes first
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, cpu; auto (default): cuda where there is one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="add the rows to DIR/<device>-<date>.json")
    parser.add_argument("--repeats", type=int, default=30, help="replays per measurement (default 30)")
    parser.add_argument("--warm", action="store_true", help="one buffer set only: inputs stay in the L2")
    parser.add_argument("--only", metavar="PROVIDER,...", help="measure these providers only")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_SHAPES} shapes, {QUICK_REPEATS} replays")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)  # `bench run` starts a script while another still measures
    axes = parser.add_argument_group("axes", "values that replace those of the table of shapes, where an op has the axis")
    for flag, names in AXES.items():
        axes.add_argument(f"--{flag}", metavar="N,...", type=numbers, help=f"{' or '.join(names)}")
    return parser


def numbers(text: str) -> list:
    """"1,8" -> [1, 8]."""
    found = [int(x) for x in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be positive; got {text}")
    return found


def names(*allowed: str) -> Callable:
    """An argparse type: "peer,host" -> ["peer", "host"], each of `allowed`."""
    def parse(text: str) -> list:
        found = text.split(",")
        if wrong := [n for n in found if n not in allowed]:
            raise argparse.ArgumentTypeError(f"must be of {','.join(allowed)}; got {wrong[0]}")
        return found
    return parse


def with_axes(args: argparse.Namespace, shapes: Sequence, names: Sequence[str] = ()) -> list:
    """The shapes to measure: `shapes` with every axis of the command line put in, each combination once; two under --quick.

    shapes: dicts, or tuples (strings "1,16") of the axes `names`; the result has the same form.
    """
    as_dicts = [s if isinstance(s, dict) else dict(zip(names, map(int, s.split(",")) if isinstance(s, str) else s)) for s in shapes]
    given = {axis: values for flag, axes in AXES.items() if (values := getattr(args, flag, None)) is not None and isinstance(values, list)
             for axis in axes}
    found = []
    for shape in as_dicts:
        mine = {axis: values for axis, values in given.items() if axis in shape}
        for values in itertools.product(*mine.values()):
            new = shape | dict(zip(mine, values))
            if new not in found:
                found.append(new)
    found = found[:QUICK_SHAPES] if args.quick else found
    if isinstance(shapes[0], dict):
        return found
    return [",".join(str(s[n]) for n in names) if isinstance(shapes[0], str) else tuple(s[n] for n in names) for s in found]


class Bench:
    """Collects the rows of one op. `args` as from `options`."""

    def __init__(self, op: str, args: argparse.Namespace) -> None:
        kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.op, self.args, self.device, self.rows = op, args, torch.device(kind), []
        if args.quick:
            args.repeats = min(args.repeats, QUICK_REPEATS)
        if args.wait and not sys.stdin.readline():
            sys.exit(2)  # whoever started this is gone
        torch.manual_seed(0)  # equal inputs in every run
        self.l2 = l2_bytes(self.device)
        self.bandwidth = copy_bandwidth(self.device, args.repeats)
        self.empty_us = empty_node(self.device, args.repeats)
        env = environment(self.device, torch.float32)
        versions = {k: env[k] for k in ("fastverify", "torch", "python")} | {p: v for p in PEERS if (v := installed(p))}
        if torch.version.cuda and self.device.type == "cuda":
            versions["cuda"] = torch.version.cuda
        self.about = dict(command=without_paths(typed()), device=env["device"], device_type=env["device_type"],
                          date=env["date"], versions=versions)
        self.last = time.monotonic()

    def sets(self, nbytes: int) -> int:
        """How many buffer sets of `nbytes` (what one call reads and writes) to make: 1 under --warm, at most CPU_SETS on a CPU."""
        wanted = 1 if self.args.warm else buffer_sets(nbytes, self.l2)
        return wanted if self.device.type == "cuda" else min(wanted, CPU_SETS)

    def shapes(self, shapes: Sequence, names: Sequence[str] = ()) -> list:
        """The shapes to measure, see with_axes."""
        return with_axes(self.args, shapes, names)

    def wanted(self, provider: str) -> bool:
        """Whether --only names the provider, or what stands before its first comma or bracket ("cuda, sm_120 configuration")."""
        return not self.args.only or bool({provider, re.split(r",| \(", provider)[0]} & set(self.args.only.split(",")))

    def triton(self) -> Optional[Callable]:
        """The op's Triton version, with the schema's positional arguments; None without a GPU or without triton."""
        from fastverify import _triton
        here = self.device.type == "cuda" and _triton.installed() and _triton.exists(self.op)
        return _triton.function(self.op) if here else None

    def measure(self, provider: str, shape: dict, dtype: str, calls: Sequence[Callable], nbytes: int,
                check: Optional[Callable[[], Any]] = None, before: Optional[Callable] = None, graph: bool = True,
                note: str = "", min_calls: int = MIN_CALLS, cold: Optional[bool] = None) -> Optional[dict]:
        """Times one provider on one shape and adds its row.

        calls   one callable per buffer set; in a graph each of them runs more than once
        nbytes  what one call must read and write at least (the floor)
        check   looks at what the timed calls left behind: True, False, or a text such as "1 tie in 300"
        before  untimed work before every sample (e.g. restoring what an in-place op has changed)
        graph   False for calls that cannot be captured: they are launched one by one, and the row says so
        min_calls, cold   for calls that are long, and that go through more memory than the L2 holds by themselves
        """
        if not self.wanted(provider):
            return None
        try:
            t = (time_cuda(calls, self.args.repeats, before, graph, min_calls) if self.device.type == "cuda"
                 else time_host(calls, self.args.repeats, before))
            correct = check() if check else None
        except Exception as error:  # a peer that cannot run this shape is a row, not the end of the run
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return self.absent(provider, shape, dtype, f"failed: {first[:160]}")
        if self.device.type == "cuda" and not t.graph:
            note = "; ".join(x for x in (note, "no graph") if x)
        return self._add(provider, shape, dtype, t, nbytes, correct, note, is_cold(len(calls), nbytes, self.l2) if cold is None else cold)

    def absent(self, provider: str, shape: dict, dtype: str, why: str) -> Optional[dict]:
        """A row without times: the provider is not installed, or does not support this."""
        if not self.wanted(provider):
            return None
        return self._add(provider, shape, dtype, Timing(None, None, None, False), 0, None, why, not self.args.warm)

    def _add(self, provider, shape, dtype, t: Timing, nbytes, correct, note, cold) -> dict:
        row = dict(op=self.op, provider=provider, shape=dict(shape), dtype=str(dtype).removeprefix("torch."), **t._asdict(),
                   floor_us=nbytes / self.bandwidth * 1e6 if nbytes else None, empty_us=self.empty_us, bytes=nbytes,
                   copy_gb_s=self.bandwidth / 1e9, cold=cold, correct=correct, note=note, **self.about)
        now = time.monotonic()
        row["seconds"], self.last = now - self.last, now  # inputs, timing and check: where the time of a suite goes
        for name in ("median_us", "p20_us", "p80_us", "floor_us", "empty_us", "copy_gb_s", "seconds"):
            row[name] = None if row[name] is None else round(row[name], 3)
        self.rows.append(row)
        if self.args.out:  # at once: a run that is cut short keeps what it has
            write_rows(self.args.out, [row])
        return row

    def title(self) -> str:
        a = self.about
        return (f"{self.op} on {a['device']}, {a['date'][:10]}, torch {a['versions']['torch']}; copy {self.bandwidth / 1e9:.0f} GB/s, "
                f"empty node {self.empty_us:.2f} us; {a['command']}")

    def finish(self) -> int:
        """Shows the table, stores the rows under --out; the exit status: 1 if a result was wrong."""
        if not self.rows:
            print("nothing measured: no provider of --only is among this benchmark's", file=sys.stderr)
            return 2
        show(self.title(), self.rows)
        if self.args.out:
            print(f"{len(self.rows)} rows in {write_rows(self.args.out, self.rows)}")
        return int(any(r["correct"] is False for r in self.rows))
