"""fastverify check: every op against its oracle on small random inputs, in seconds."""

import argparse

from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Runs every op against its float64 oracle on small random inputs, on each device that has kernels. Exit code 1 if "
            "one fails.")
    parser = commands.add_parser("check", help="every op against its oracle", description=text)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random inputs (default 0)")
    return parser


def run(args: argparse.Namespace) -> int:
    import torch

    from .. import _ops
    from . import check_cases
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"check: seed must be in [0, 2^63); got {args.seed}. Fix: change --seed.")
    out = Output()
    _ops.get("probe")  # raises, in words, when the library is not there
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    counts = dict.fromkeys(("OK", "FAIL", "SKIP"), 0)
    width = max(map(len, _ops._NAMES))
    for device in devices:
        for op in sorted(_ops._NAMES):
            state, detail = check_op(check_cases, op, device, args.seed)
            counts[state] += 1
            style = {"OK": "green", "FAIL": "bold red", "SKIP": "yellow"}[state]
            out.line(f"{state:4}  {device:4}  {op.ljust(width)}  {detail}", style=style)
    if "cuda" not in devices:
        counts["SKIP"] += 1
        out.line(f"SKIP  cuda  {'every op'.ljust(width)}  torch sees no CUDA GPU", style="yellow")
    out.line(f"{counts['OK']} ok, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


def check_op(cases, op: str, device: str, seed: int) -> tuple:
    """("OK" | "FAIL" | "SKIP", why) of one op on one device."""
    import torch

    from .. import _ops
    if not _ops.has_kernel(op, device):
        return "SKIP", f"no {device} kernel in this install"
    if op not in cases.CHECKS:
        return "FAIL", "no check is written for this op"
    try:
        n = cases.CHECKS[op](device, torch.Generator().manual_seed(seed))
    except Exception as exc:  # whatever goes wrong in one op, the others are still checked
        return "FAIL", " ".join(str(exc).split())[:200] or type(exc).__name__
    return "OK", f"{n} case{'s' * (n != 1)}"
