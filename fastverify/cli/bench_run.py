"""Runs the scripts of benchmarks/, one process each, and collects their rows."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Optional

from .bench_tables import by_op, read_rows

AXES = ("batch", "nodes", "vocab", "prefix", "hidden", "rows", "top")  # as benchmarks/harness.py has them
PASSED = ("device", "repeats", "only")
UNKNOWN_ROWS, ROW_SECONDS = 8, 0.4  # of an op that no stored result has; of a row that does not say
# provider -> (distribution, what to do without it)
PROVIDERS = {
    "fastverify, CUDA": ("", "build on a machine with nvcc, run on a GPU"),
    "fastverify, Triton": ("triton", "pip install triton; needs a GPU"),
    "fastverify, CPU": ("", ""),
    "torch": ("torch", "pip install torch"),
    "sglang-kernel": ("sglang-kernel", "pip install sglang-kernel; or SGL_KERNEL_LIBRARY=common_ops.abi3.so"),
    "FlashInfer (fa2, XQA)": ("flashinfer-python", "pip install flashinfer-python; needs a GPU"),
    "NCCL": ("", "needs two GPUs and a CUDA build of torch"),
    "torch symmetric memory": ("", "needs two GPUs and a CUDA build of torch"),
}


def folder(command: str) -> Path:
    """benchmarks/ of the source tree that the package or the current folder is in."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "benchmarks" / "harness.py").is_file():
            return root / "benchmarks"
    raise ValueError(f"{command}: the benchmarks must be beside the package or in this folder; got none (a wheel has none). "
                     "Fix: run in a clone of the repository; `bench compare` and `bench show` work everywhere.")


@dataclass
class Script:
    """One benchmark. why: the reason why it cannot run here, or ""."""

    op: str
    stage: str
    path: Path
    why: str = ""
    flags: list = field(default_factory=list)


def scripts(root: Path, gpus: int) -> list:
    """Every bench_<op>.py of a stage, the step last; `loop` has a command of its own."""
    found = []
    for path in sorted(root.glob("*/bench_*.py"), key=lambda p: (p.parent.name == "step", p)):
        stage, op = path.parent.name, path.stem.removeprefix("bench_")
        if stage in ("loop", "host"):
            continue
        script = Script(op, stage, path)
        if stage == "comm":
            script.flags = ["--world", str(gpus)]
            script.why = "" if gpus > 1 else f"needs two GPUs; this machine has {gpus}"
        found.append(script)
    return found


def chosen(all_scripts: list, names: list) -> list:
    """Those whose op or stage is named; all without names."""
    known = {s.op for s in all_scripts} | {s.stage for s in all_scripts}
    for n in names:
        if n not in known:
            raise ValueError(f"bench: every name must be an op or a stage of the suite; got {n}. Fix: one of {', '.join(sorted(known))}.")
    return [s for s in all_scripts if not names or s.op in names or s.stage in names]


def providers() -> list:
    """[(provider, version or "here", "")] or [(provider, None, what to do)]."""
    import torch

    from .. import _ops
    gpu = torch.cuda.is_available()
    nccl = gpu and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    here = {"fastverify, CUDA": gpu and _ops.has_native_kernel("verify_tree", "cuda"), "fastverify, CPU": True,
            "NCCL": nccl and torch.cuda.device_count() > 1,
            "torch symmetric memory": nccl and torch.cuda.device_count() > 1
            and importlib.util.find_spec("torch.distributed._symmetric_memory") is not None}
    out = []
    for name, (distribution, fix) in PROVIDERS.items():
        if name in here:
            version = ("NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if name == "NCCL" else "here") if here[name] else None
        else:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                version = None
            if distribution == "sglang-kernel" and not version and Path(os.environ.get("SGL_KERNEL_LIBRARY", "")).is_file():
                version = "SGL_KERNEL_LIBRARY"
            if distribution in ("triton", "flashinfer-python") and version and not gpu:
                version, fix = None, f"needs a GPU; {version} is installed"
        out.append((name, version, "" if version else fix))
    return out


def expected(results: Path, device_type: str) -> dict:
    """script -> (rows, seconds) of its newest stored result on this kind of device: what the time left is estimated from."""
    counts: dict = {}
    for path in sorted(results.glob("*-????-??-??.json")):
        rows = [r for r in json.loads(path.read_text()).get("rows", ()) if r.get("device_type") == device_type and "op" in r]
        scripts: dict = {}
        for op, mine in by_op(rows).items():
            scripts.setdefault(op.split(".")[0], []).extend(mine)  # sglang.<kernel>: one script
        counts |= {name: (len(mine), sum(r.get("seconds") or ROW_SECONDS for r in mine)) for name, mine in scripts.items()}
    return counts


@dataclass
class Outcome:
    """What one script gave. status 0: right; 1: a result was wrong; else it failed, and `error` is its last line."""

    script: Script
    rows: list
    seconds: float
    status: int = 0
    error: str = ""


def run(chosen_scripts: list, flags: list, progress: Callable, quick: bool = False, limit: Optional[float] = None,
        counts: Optional[dict] = None, ahead: bool = False) -> Iterator[Outcome]:
    """Runs the scripts in turn. progress(share done in 0..1, text). limit: seconds per script.

    ahead: the next script's process imports torch while this one measures, and waits for its turn (on a CPU it would disturb it).
    """
    plans = [(counts or {}).get(s.op, (UNKNOWN_ROWS, UNKNOWN_ROWS * ROW_SECONDS)) for s in chosen_scripts]
    total, before = sum(seconds for _, seconds in plans) or 1, 0.0
    waiting: dict = {}
    start = lambda script, wait: _Process(script, [*flags, *script.flags, *(["--quick"] if quick else [])], wait)  # noqa: E731
    try:
        for i, (script, (wanted, seconds)) in enumerate(zip(chosen_scripts, plans)):
            def update(rows: int) -> None:
                progress((before + min(rows / wanted, 1) * seconds) / total, script.op)  # noqa: B023 (called in this turn)
            update(0)
            process = waiting.pop(i, None) or start(script, False)
            process.go()
            if ahead and i + 1 < len(chosen_scripts) and chosen_scripts[i + 1].stage != "comm":  # its ranks are processes of their own
                waiting[i + 1] = start(chosen_scripts[i + 1], True)
            yield process.outcome(update, limit)
            before += seconds
    finally:
        for process in waiting.values():
            process.stop()
    progress(1.0, "done")


class _Process:
    """One script, started. wait: it measures nothing before go()."""

    def __init__(self, script: Script, flags: list, wait: bool) -> None:
        self.script, self.wait = script, wait
        self.place = tempfile.TemporaryDirectory()
        self.out, self.log = Path(self.place.name) / "rows", Path(self.place.name) / "log"
        package = str(Path(__file__).resolve().parents[2])  # this fastverify, not an unbuilt source tree beside the scripts
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([package, *(os.path.abspath(p) for p in sys.path if p)])}
        with open(self.log, "w") as stream:
            self.process = subprocess.Popen([sys.executable, str(script.path), "--out", str(self.out), *flags, *(["--wait"] if wait else [])],
                                            stdin=subprocess.PIPE if wait else subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                                            env=environment, cwd=script.path.parents[2])

    def go(self) -> None:
        self.begun = time.monotonic()
        if self.wait:
            with contextlib.suppress(BrokenPipeError):  # it has failed already: outcome() says so
                self.process.stdin.write(b"\n")
                self.process.stdin.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.place.cleanup()

    def outcome(self, update: Callable, limit: Optional[float]) -> Outcome:
        """Waits for the end."""
        status = None
        try:
            while status is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = self.process.wait(0.3)
                update(_count(self.out))
                if status is None and limit is not None and time.monotonic() - self.begun > limit:
                    self.process.kill()
                    self.process.wait()
                    status = 124
            files = sorted(self.out.glob("*.json")) if self.out.is_dir() else []
            rows = [r for f in files for r in read_rows("bench", str(f))]
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        finally:
            self.stop()
        error = "" if status in (0, 1) and rows else (f"stopped after {limit:g} s" if status == 124 else
                                                     (lines[-1] if lines else f"exit code {status}"))
        return Outcome(self.script, rows, time.monotonic() - self.begun, status, error)


def _count(out: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(f.read_text().count('"op": ') for f in out.glob("*.json"))
    return 0
