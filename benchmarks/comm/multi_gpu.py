"""Everything that needs two or more GPUs, largest world first, one JSON per world size.

    bash benchmarks/comm/multi_gpu.sh                       # builds, tests, then this; under 9 minutes
    python benchmarks/comm/multi_gpu.py --quick --out DIR   # measurements only, about 100 s at two GPUs

Rows of a world size go to DIR/<device>-x<W>-<date>.json, each at once. Sections, in the order of --sections: sums (all_reduce and
all_reduce_rms_norm: peer, host mailbox, our NCCL communicator, torch's NCCL, torch symmetric memory), peers (FlashInfer's and
sglang-kernel's kernels), without-p2p (NCCL with NCCL_P2P_DISABLE=1), verifies (vocab-parallel verify_tree), loop (the decode loop), linears and resident (linear_all_reduce), one-card
(linear_all_reduce of two ranks on one GPU under MPS: the mailbox over one real link). A section that fails or takes longer than
--section-seconds does not stop the others. A sample is one replay of a graph of 100 chained calls
divided by them; a row is the minimum over ranks of the medians. NVLink multicast stays off. --rehearse: everything but the
kernels over CPU processes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import sections

os.environ.update(sections.environment_for_ranks())

import torch
from harness import names, numbers, options, store
from ranks import spawn

SECTIONS = ("sums", "peers", "without-p2p", "verifies", "loop", "linears", "resident", "one-card")
REHEARSED = ("sums", "peers", "without-p2p", "verifies", "loop", "linears", "resident")


def body(me, args) -> int:
    """One rank of a world: the sections of args.todo, each guarded by the time that is left (rank 0's clock decides)."""
    for at, item in enumerate(args.todo):
        if me.rank == 0:
            args.reached.write_text(str(at))
        name, _, only = item.partition(":")
        left = me.gathered(args.until - time.time())[0]
        if left < 5:
            me.absent("all", item, dict(W=me.world), "bfloat16", "not run: no time left")
            continue
        start = time.time()
        with me.limit(min(left + 5, args.section_seconds), item):
            section(me, args, name, tuple(only.split("+")) if only else None)
        if me.rank == 0:
            print(f"{item}: {time.time() - start:.0f} s", flush=True)
    return me.bench.finish() if me.bench else 0


def section(me, args, name: str, wanted: Optional[tuple]) -> None:
    if name == "loop":
        import loop_section
        loop_section.loops(me, args, wanted or loop_section.PARTS)
        return
    if name in ("without-p2p", "peers"):
        sections.sums_without_p2p(me, args) if name == "without-p2p" else sections.peer_sums(me, args, *([wanted] if wanted else []))
        return
    rows = max(args.rows) if name == "sums" else max(min(1024, max(args.linear_rows)), 64)
    own = tuple(way for way in args.over if way != "nccl")
    ways = wanted or {"sums": sections.WAYS, "one-card": ("host", "peer"), "resident": own}.get(name, tuple(args.over))
    comms = sections.communicators(me, rows * args.hidden * 2, ways)
    if name in ("sums", "verifies"):
        getattr(sections, name)(me, args, comms)
    else:
        sections.linears(me, args, comms, resident=name == "resident")
    for comm in comms.values():
        comm.check()


def groups(items: list) -> list:
    """[(sections, environment, same card)]: what may share processes. NCCL reads its variables once."""
    alone = {"without-p2p": (dict(NCCL_P2P_DISABLE="1"), False), "one-card": ({}, True)}
    together = [i for i in items if i.partition(":")[0] not in alone]
    return ([(together, {}, False)] if together else []) + [([i], *alone[i.partition(":")[0]]) for i in items if i.partition(":")[0] in alone]


def run_group(args, world: int, todo: list, variables: dict, same_gpu: bool) -> None:
    """Runs the sections in one set of processes; after a section that fails (a process may be lost with it) the others in a new one."""
    args.reached, args.same_gpu = args.out / "reached", same_gpu
    args.out.mkdir(parents=True, exist_ok=True)
    while todo and args.until - time.time() > 8:
        args.todo = todo
        args.reached.write_text("0")
        with environment(variables), one_card(same_gpu) as why:
            if why:
                print(f"{todo[0]}: not run: {why}", flush=True)
                return
            try:
                spawn(body, args, world)
                return
            except Exception as exc:
                at = int(args.reached.read_text())
                print(f"W={world}: section {todo[at]} broke off: {str(exc).strip().splitlines()[-1][:300]}", file=sys.stderr, flush=True)
                todo = todo[at + 1:]


@contextmanager
def environment(variables: dict):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@contextmanager
def one_card(wanted: bool):
    """Several ranks on the first visible GPU: under MPS, or they would take turns of milliseconds. Yields why it cannot be."""
    if not wanted:
        yield ""
        return
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield "no nvidia-cuda-mps-control"
        return
    with tempfile.TemporaryDirectory() as folder:
        first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
        variables = dict(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder, CUDA_VISIBLE_DEVICES=first)
        with environment(variables):  # a daemon that sees the last one would number the GPUs anew for its clients
            everything = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
            started = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, timeout=20, env=everything)
            yield "" if started.returncode == 0 else f"nvidia-cuda-mps-control: {(started.stderr or started.stdout).strip()[:200]}"
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", capture_output=True, text=True, timeout=20)


def run_world(args, world: int) -> None:
    out, args.out = args.out, args.out / f"W{world}"
    for todo, variables, same_gpu in groups(args.sections):
        run_group(args, world, todo, variables, same_gpu)
    args.reached.unlink(missing_ok=True)
    for path in sorted(args.out.glob("*.json")):  # device-date.json -> device-xW-date.json, whose rows of other sections stay
        merged = out / f"{path.stem[:-11]}-x{world}-{path.stem[-10:]}.json"
        store(merged, json.loads(path.read_text())["rows"])
        path.unlink()
    args.out = out


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, action="append", help="instead of all GPUs, then 4, 3 and 2; may be repeated")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--linear-rows", type=numbers, default=[8, 16, 64, 256, 1024, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inner", type=numbers, default=[18432, 36864],
                        help="columns of the row-parallel weights, over all ranks")
    parser.add_argument("--over", type=names("peer", "host", "nccl"), default=["peer", "host", "nccl"], help="transports of linears and verifies")
    parser.add_argument("--sections", type=lambda s: s.split(","), default=list(SECTIONS),
                        help="in this order; linears:host, loop:cycles-70b+compare-70b and the like take parts of a section")
    parser.add_argument("--loop-backends", type=names("auto", "peer", "host", "nccl"), default=["auto", "host", "nccl"],
                        help="communicators of the loop section: the first for texts, each for the times of cycles")
    parser.add_argument("--vocab", type=int, default=163840, help="of verifies")
    parser.add_argument("--peers-lib", help="benchmarks/comm/peers.cu built elsewhere; default: built here where FlashInfer is installed")
    parser.add_argument("--seconds", type=float, default=420, help="no section starts later than this")
    parser.add_argument("--section-seconds", type=float, default=120, help="a section that takes longer is ended")
    parser.add_argument("--quick", action="store_true", help="fewer replays")
    parser.add_argument("--rehearse", action="store_true", dest="cpu", help="two CPU processes over gloo: whether everything runs, no times")
    args = parser.parse_args()
    if wrong := [s for s in args.sections if s.split(":")[0] not in SECTIONS]:
        parser.error(f"--sections must be of {','.join(SECTIONS)}; got {wrong[0]}")
    here = 2 if args.cpu else torch.cuda.device_count()
    if args.cpu:
        args.loop_backends, args.sections = args.loop_backends[:1], [s for s in args.sections if s.partition(":")[0] in REHEARSED]
    worlds = args.world or sorted({w for w in (here, 4, 3, 2) if 2 <= w <= min(here, 8)}, reverse=True)
    if not worlds:
        print(f"multi_gpu: at least 2 GPUs are needed; this machine shows {here}.", file=sys.stderr)
        return 2
    args.out, args.until = args.out or Path("benchmarks/results"), time.time() + args.seconds
    if args.quick:
        args.repeats = min(args.repeats, 8)
    for world in worlds:
        run_world(args, world)
    wrong = []
    for world in worlds:
        for path in sorted(args.out.glob(f"*-x{world}-*.json")):
            rows = json.loads(path.read_text())["rows"]
            wrong += [r for r in rows if r["correct"] is False]
            print(f"W={world}: {len(rows)} rows in {path}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
