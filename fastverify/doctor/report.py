"""The report of `fastverify doctor`: what was found, then what to do; the exit code tells."""

import argparse
import json
import sys
from pathlib import Path

from .allreduce import measure
from .facts import collect
from .judge import allreduce, judge

MARK = {"ok": "ok   ", "note": "note ", "slow": "SLOW ", "wrong": "WRONG"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (facts and findings) and nothing else")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help="deadline of each probe that runs in a process of its "
                        "own (default 90)")
    parser.add_argument("--allreduce", action="store_true", help="also time the all-reduce between the GPUs, torch's (NCCL) and ours "
                        "(without two GPUs: two CPU processes over gloo)")
    parser.add_argument("--hidden", type=int, default=7168, metavar="H", help="hidden size of the model whose messages are timed "
                        "(default 7168)")
    parser.add_argument("--config", metavar="PATH", help="or its config.json")
    parser.add_argument("--rows", default="1,4,16,60", metavar="N,...", help="rows per forward (default 1,4,16,60)")


def run(args: argparse.Namespace) -> int:
    """0: works (perhaps slowly); 1: something does not work."""
    if not args.seconds > 0:
        raise ValueError(f"doctor: seconds must be > 0; got {args.seconds}. Fix: change --seconds.")
    hidden, layers, sizes = _sizes(args)
    facts = collect(args.seconds)
    findings = judge(facts)
    if args.allreduce:
        gpus = len(facts["torch"].get("gpus") or [])
        world, backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
        facts["allreduce"] = measure(world, backend, sizes, args.seconds, hidden)
        findings += allreduce(facts["allreduce"], 2 * layers)
    code = int(any(f.level == "wrong" for f in findings))
    if args.json:
        print(json.dumps({"facts": facts, "findings": [f.as_dict() for f in findings], "works": not code}, indent=1))
    else:
        print("\n".join(lines(findings)))
    return code


def _sizes(args: argparse.Namespace) -> tuple:
    """(hidden size, layers or 0, message bytes: rows x hidden x 2)."""
    hidden, layers = args.hidden, 0
    if args.config:
        path = Path(args.config)
        try:
            data = json.loads((path / "config.json" if path.is_dir() else path).read_text())
            data = data.get("text_config") or data
            hidden, layers = data["hidden_size"], data.get("num_hidden_layers", 0)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"doctor: config must be a config.json with hidden_size; got {args.config}. Fix: check the path.") from None
    try:
        rows = [int(n) for n in args.rows.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1 or not isinstance(hidden, int) or hidden < 1 or not isinstance(layers, int):
        raise ValueError(f"doctor: rows and hidden must be positive integers; got {args.rows!r} and {hidden}. Fix: change --rows or --hidden.")
    return hidden, layers, [n * hidden * 2 for n in rows]


def lines(findings: list) -> list:
    """The report's lines."""
    width = max(len(f.part) for f in findings)
    out = [f"{MARK[f.level]} {f.part.ljust(width)}  {f.text}" for f in findings]
    todo = [f for level in ("wrong", "slow") for f in findings if f.level == level and f.fix]
    if todo:
        out += ["", "what to do:"] + [f"{i}. {f.part}: {f.fix}   ({f.text})" for i, f in enumerate(todo, 1)]
    else:
        out += ["", "nothing to do"]
    return out


def main(argv: list) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastverify.doctor", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except ValueError as exc:
        print(f"fastverify: {exc}", file=sys.stderr)
        return 2
