"""Everything that needs two or more GPUs, largest world first, one JSON per world size.

    bash benchmarks/comm/multi_gpu.sh                       # builds, tests, then this; under 9 minutes
    python benchmarks/comm/multi_gpu.py --quick --out DIR   # measurements only, about 100 s at two GPUs

Rows of a world size go to DIR/<device>-x<W>-<date>.json. Sections: sums (all_reduce and all_reduce_rms_norm: peer, host mailbox, our
NCCL communicator, torch's NCCL, NCCL with NCCL_P2P_DISABLE=1, torch symmetric memory), linears (linear_all_reduce), verifies
(vocab-parallel verify_tree), loop (the decode loop, --sections loop). A sample is one replay of a graph of 100 chained calls
(20 or 10 where noted by the section) divided by them; a row is the minimum over ranks of the medians. NVLink multicast stays off.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import sections

os.environ.update(sections.environment_for_ranks())

import torch
from harness import options
from ranks import spawn

SECTIONS = ("sums", "linears", "verifies", "loop")


def body(me, args) -> int:
    """One rank of a world: all sections, each guarded by the time that is left (rank 0's clock decides)."""
    for item in args.sections:
        name, _, only = item.partition(":")
        wanted = tuple(only.split("+")) if only else None
        left = me.gathered(args.until - time.time())[0]
        if left < 8:
            me.absent("all", item, dict(W=me.world), "bfloat16", "not run: no time left")
            continue
        start = time.time()
        try:
            if name == "loop":
                import loop_section
                loop_section.loops(me, args, wanted or loop_section.PARTS)
            else:
                rows = max(args.rows) if name == "sums" else max(min(1024, max(args.linear_rows)), 64)
                ways = wanted or (sections.WAYS if name == "sums" else tuple(args.over))
                comms = sections.communicators(me, rows * args.hidden * 2, ways)
                dict(sums=sections.sums, linears=sections.linears, verifies=sections.verifies)[name](me, args, comms)
                for comm in comms.values():
                    comm.check()
        except Exception as exc:  # the rows so far are stored
            print(f"rank {me.rank}: section {item} broke off: {(str(exc) or type(exc).__name__).splitlines()[0][:300]}", file=sys.stderr, flush=True)
            return 1
        if me.rank == 0:
            print(f"{item}: {time.time() - start:.0f} s", flush=True)
    return me.bench.finish() if me.bench else 0


def without_p2p(me, args) -> int:
    sections.sums_without_p2p(me, args)
    return me.bench.finish() if me.bench else 0


def run_world(args, world: int) -> None:
    out, args.out = args.out, args.out / f"W{world}"
    for part, variables in ((body, {}), (without_p2p, dict(NCCL_P2P_DISABLE="1"))):
        if part is without_p2p and ("sums" not in args.sections or args.until - time.time() < 12):
            continue
        os.environ.update(variables)
        try:
            spawn(part, args, world)
        except Exception as exc:  # the other worlds still run
            print(f"W={world}, {part.__name__}: {str(exc).strip().splitlines()[-1][:300]}", file=sys.stderr, flush=True)
        for name in variables:
            del os.environ[name]
    for path in sorted(args.out.glob("*.json")):  # device-date.json -> device-xW-date.json
        stem = path.stem[:-11]
        path.rename(out / f"{stem}-x{world}-{path.stem[-10:]}.json")
    args.out = out


def main() -> int:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, action="append", help="instead of all GPUs, then 4, 3 and 2; may be repeated")
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[1, 2, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--linear-rows", type=lambda s: [int(v) for v in s.split(",")], default=[8, 16, 64, 256, 1024, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inner", type=lambda s: [int(v) for v in s.split(",")], default=[18432, 36864],
                        help="columns of the row-parallel weights, over all ranks")
    parser.add_argument("--over", type=lambda s: s.split(","), default=["peer", "host", "nccl"], help="transports of linears and verifies")
    parser.add_argument("--sections", type=lambda s: s.split(","), default=list(SECTIONS),
                        help="in this order; linears:host, loop:cycles-70b+compare-70b and the like take parts of a section")
    parser.add_argument("--loop-backend", choices=("auto", "peer", "host", "nccl"), default="auto", help="communicator of the loop section")
    parser.add_argument("--seconds", type=float, default=420, help="no section starts later than this")
    parser.add_argument("--quick", action="store_true", help="fewer replays")
    args = parser.parse_args()
    if wrong := [s for s in args.sections if s.split(":")[0] not in SECTIONS]:
        parser.error(f"--sections must be of {','.join(SECTIONS)}; got {wrong[0]}")
    here = torch.cuda.device_count()
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
