"""The report of `fastverify doctor`: what was found, then what to do; the exit code tells."""

import argparse
import json
import sys

from .facts import collect
from .judge import judge

MARK = {"ok": "ok   ", "note": "note ", "slow": "SLOW ", "wrong": "WRONG"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (facts and findings) and nothing else")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help="deadline of each probe that runs in a process of its "
                        "own (default 90)")


def run(args: argparse.Namespace) -> int:
    """0: works (perhaps slowly); 1: something does not work."""
    if not args.seconds > 0:
        raise ValueError(f"doctor: seconds must be > 0; got {args.seconds}. Fix: change --seconds.")
    facts = collect(args.seconds)
    findings = judge(facts)
    code = int(any(f.level == "wrong" for f in findings))
    if args.json:
        print(json.dumps({"facts": facts, "findings": [f.as_dict() for f in findings], "works": not code}, indent=1))
    else:
        print("\n".join(lines(findings)))
    return code


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
