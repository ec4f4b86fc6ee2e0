"""fastverify plan: does speculation pay, from measured times or from a model's config and an interconnect."""

import argparse
import math

from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Break-even accept length, tok/s against accept length, and what to change first. From measured times (--plain-ms, "
            "--verify-ms, --draft-ms), from a model (--config, --memory-gbs, --draft-step-ms) or from `fastverify probe` (--probe).")
    parser = commands.add_parser("plan", help="does speculation pay: the arithmetic", description=text)
    parser.add_argument("--tau", default="1.5,2,2.5,3", metavar="X,...", help="accept lengths (default 1.5,2,2.5,3)")
    parser.add_argument("--other-ms", type=float, default=0.0, metavar="MS", help="the rest of a round (default 0)")
    parser.add_argument("--allreduce", metavar="NAME|US,...", help="nccl-misconfigured (205 us), nccl-p2p (24 to 56), "
                        "host-mailbox (17 to 25), kernel (10), nvlink-kernel (6 to 7), or microseconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", metavar="OUT.svg|png", help="also draw tok/s against tau, and the shapes (needs matplotlib)")
    parser.add_argument("--probe", metavar="FILE", help="what `fastverify probe --out FILE` wrote: its drafts and shapes, and "
                        "chains between them; --plain-ms and --verify-ms replace what was measured")
    g = parser.add_argument_group("from measured times")
    g.add_argument("--plain-ms", type=float, metavar="MS", help="plain decoding, per token")
    g.add_argument("--verify-ms", type=float, metavar="MS", help="one verify forward")
    g.add_argument("--draft-ms", metavar="MS,...", help="drafting of one round; several are compared")
    g.add_argument("--allreduces", type=int, default=0, metavar="N", help="all-reduces in a verify (two per layer)")
    g.add_argument("--allreduce-us", type=float, metavar="US", help="what each takes now; --allreduce replaces it")
    g.add_argument("--reported", default="", metavar="TOKS@TAU,...", help="speeds seen, as 52@1.5: the rounds that they imply")
    m = parser.add_argument_group("from a model")
    m.add_argument("--config", metavar="PATH", help="config.json (or its folder) of a dense or MoE decoder")
    m.add_argument("--memory-gbs", type=float, metavar="GB/S", help="memory bandwidth that one GPU really delivers")
    m.add_argument("--ranks", type=int, default=1, metavar="N", help="tensor-parallel GPUs (default 1)")
    m.add_argument("--link", default="pcie5", choices=("pcie5", "pcie4", "nvlink", "host"), help="interconnect (default pcie5)")
    m.add_argument("--expert-bits", type=float, default=16, metavar="B", help="bits per weight of routed experts (default 16)")
    m.add_argument("--shared-bits", type=float, default=16, metavar="B", help="bits per weight of all else (default 16)")
    m.add_argument("--context", type=int, default=0, metavar="N", help="positions in the KV cache (default 0)")
    m.add_argument("--draft-step-ms", type=float, metavar="MS", help="one level of the draft")
    m.add_argument("--shapes", default="chain-1,chain-2,chain-3,chain-5,tree-8,tree-20,tree-60", metavar="SHAPE,...",
                   help="default: chain-1,2,3,5 and tree-8,20,60")
    m.add_argument("--accept", metavar="RATE,...", help="acceptance per depth, given the depth before: tau of chains")
    return parser


def run(args: argparse.Namespace) -> int:
    from . import plan_model, plan_plot, plan_probe, plan_times
    taus = numbers("tau", args.tau, at_least=1.0)
    _check(args)
    if args.plot:
        plan_plot.check_plot("plan", args.plot)
    out = Output(json_only=args.json)
    mode = plan_probe if args.probe else plan_model if args.config else plan_times
    data = mode.compute(args, taus)
    if args.plot:
        plan_plot.plot(args.plot, data)
    if args.json:
        out.json(data)
    else:
        mode.show(out, data)
    return 0


def _check(args: argparse.Namespace) -> None:
    times = ("plain_ms", "verify_ms", "draft_ms")
    if args.probe:
        given = [n for n in ("config", "draft_ms", "allreduce", "allreduces", "allreduce_us", "reported", "draft_step_ms",
                             "memory_gbs", "accept", "other_ms") if getattr(args, n)]
        if given:
            raise ValueError(f"plan: {_flag(given[0])} must go without --probe; got both. Fix: leave one out.")
        missing = []
    elif args.config:
        given = [n for n in times[1:] + ("allreduces", "allreduce_us", "reported") if getattr(args, n)]
        if given:
            raise ValueError(f"plan: {_flag(given[0])} must go without --config; got both. Fix: leave one out.")
        missing = [n for n in ("memory_gbs", "draft_step_ms") if getattr(args, n) is None]
    else:
        missing = [n for n in times if getattr(args, n) is None]
    if missing:
        raise ValueError(f"plan: {_flag(missing[0])} must be given{' with --config' if args.config else ''}; got none. "
                         f"Fix: add {_flag(missing[0])}" + ("." if args.config else ", or plan from a model with --config."))
    for name in ("plain_ms", "verify_ms", "allreduce_us", "memory_gbs", "expert_bits", "shared_bits"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"plan: {name} must be a finite number > 0; got {value}. Fix: change {_flag(name)}.")
    for name in ("other_ms", "draft_step_ms"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"plan: {name} must be a finite number >= 0; got {value}. Fix: change {_flag(name)}.")
    for name, least in (("allreduces", 0), ("ranks", 1), ("context", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"plan: {name} must be at least {least}; got {getattr(args, name)}. Fix: change {_flag(name)}.")


def numbers(name: str, text: str, at_least: float = 0.0, at_most: float = math.inf) -> list:
    """Floats of "a,b,c" in range. ValueError in the house form."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(at_least <= v <= at_most and v < math.inf for v in values):
        bounds = f"in [{at_least:g}, {at_most:g}]" if at_most < math.inf else f">= {at_least:g}"
        raise ValueError(f"plan: {name} must be numbers {bounds}, comma separated; got {text!r}. Fix: change {_flag(name)}.")
    return values


def allreduce_times(text: str) -> list:
    """[(name, us)] of "nccl-p2p,kernel,12": a preset with a range gives its two ends."""
    from ..cost_model import ALLREDUCE_US
    found = []
    for part in text.split(","):
        if part in ALLREDUCE_US:
            found += [(part, us) for us in dict.fromkeys(ALLREDUCE_US[part])]
            continue
        try:
            us = float(part)
        except ValueError:
            us = math.nan
        if not 0 < us < math.inf:
            raise ValueError(f"plan: allreduce must be microseconds > 0 or one of {', '.join(ALLREDUCE_US)}; got {part!r}. "
                             "Fix: change --allreduce.")
        found.append((f"{us:g} us", us))
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
