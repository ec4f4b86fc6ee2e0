"""fastverify trace: profiler traces of all ranks; whose time the communication of a step is."""

import argparse
import re
from pathlib import Path

from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Reads torch profiler traces (plain or .gz) of all ranks, from SGLang, vLLM or any loop; matches their collectives; "
            "splits each into wire, waiting and launch gap; and names the rank that the others wait for.")
    parser = commands.add_parser("trace", help="where the communication time of a step goes", description=text)
    parser.add_argument("traces", nargs="+", metavar="RANK.json[.gz]", help="one file per rank of one run")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="rows of steps to print (default 10; 0: none)")
    parser.add_argument("--step-name", metavar="REGEX", help="annotations that mark steps (default: ProfilerStep#N and those of "
                        "vLLM and SGLang)")
    parser.add_argument("--per-step", type=int, metavar="N", help="no annotations: so many collectives make a step")
    parser.add_argument("--timeline", metavar="OUT.svg", help="also draw the collectives of one step, a lane per rank")
    parser.add_argument("--timeline-step", type=int, default=0, metavar="N", help="the step to draw, from 0 (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every step, and nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.steps < 0:
        raise ValueError(f"trace: steps must be at least 0; got {args.steps}. Fix: change --steps.")
    if args.per_step is not None and args.per_step < 1:
        raise ValueError(f"trace: per_step must be at least 1; got {args.per_step}. Fix: change --per-step.")
    try:
        re.compile(args.step_name or "")
    except re.error as exc:
        raise ValueError(f"trace: step_name must be a regular expression; got {args.step_name!r} ({exc}). "
                         "Fix: change --step-name.") from None
    if args.timeline and (not args.timeline.endswith(".svg") or not Path(args.timeline).resolve().parent.is_dir()):
        raise ValueError(f"trace: timeline must be an .svg file in a folder that exists; got {args.timeline}. "
                         "Fix: change --timeline.")
    for path in args.traces:
        if not Path(path).is_file():
            raise ValueError(f"trace: every trace must be an existing file; got {path}. Fix: check the path.")
    sizes = [Path(p).stat().st_size for p in args.traces]
    if len(args.traces) < 2:
        raise ValueError("trace: at least two ranks must be given, since waiting is what one rank has more than another; got 1 "
                         "file. Fix: pass the traces of every rank.")
    from ..trace import account, read_rank
    from ..trace.timeline import timeline
    out = Output(json_only=args.json)
    ranks = []
    with out.progress("reading traces", sum(sizes), bytes_=True) as update:
        for i, path in enumerate(args.traces):
            before = sum(sizes[:i])
            ranks.append(read_rank(path, args.step_name, lambda done: update(before + done)))  # noqa: B023 (called at once)
    report = account(ranks, args.per_step)
    picture = timeline(report, args.timeline_step) if args.timeline else None
    for note in report.notes:
        out.note(f"fastverify: trace: {note}")
    if picture:
        Path(args.timeline).write_text(picture, encoding="utf-8")
        out.note(f"written: {args.timeline}")
    if args.json:
        out.json(as_dict(report))
    else:
        _show(out, report, args.steps)
    return 0


def _show(out: Output, report, shown_steps: int) -> None:
    from ..trace.advice import advice, mean_sentence, step_sentence
    what = {"kernel": "GPU kernels", "host": "host annotations", "param": "host calls"}[report.source]
    steps = f"{len(report.steps)} steps" if len(report.steps) > 1 else "1 step"
    out.line(f"{len(report.ranks)} ranks, {report.number} collectives ({what}) in {steps}; "
             f"rank {report.ranks[report.shown]} stands for the others")
    out.line()
    out.line(mean_sentence(report) + (f"   per step of {report.span:.1f} ms"), style="bold")
    out.line()
    if shown_steps and len(report.steps) > 1:
        for s in report.steps[:shown_steps]:
            out.line(f"{s.name}, {len(s.kinds)} collectives, {s.span[report.shown] / 1e3:.2f} ms: {step_sentence(s, report)}")
        if len(report.steps) > shown_steps:
            out.line(f"... and {len(report.steps) - shown_steps} more steps (--steps)")
        out.line()
    last = [sum(int((s.last == r).sum()) for s in report.steps) for r in range(len(report.ranks))]
    rows = []
    for r, rank in enumerate(report.ranks):
        a = report.total(r)
        drift = f"{report.drifts[r] * 1e6:+.1f}" if report.drifts[r] else ""
        rows.append([str(rank), f"{a.wire:.3f}", f"{a.waiting:.3f}", f"{a.gaps:.3f}", str(last[r]),
                     f"{report.offsets[r]:+.1f}", f"{report.spreads[r]:.1f}", drift])
    out.table(["rank", "wire", "waiting", "gaps", "last", "clock us", "+-", "ppm"], rows)
    out.line("wire, waiting, gaps: ms per step. last: collectives in which the rank arrived last. clock: offset to rank "
             f"{report.ranks[0]}, what is left after it, and drift.")
    out.line()
    for line in advice(report):
        out.line(line)


def as_dict(report) -> dict:
    """The JSON of a report. Times in ms per step unless the name says us."""
    from ..trace.advice import advice, mean_sentence, step_sentence

    def parts(a, waiting_for) -> dict:
        named = {str(rank): float(v) for rank, v in zip(report.ranks, waiting_for)}
        return {"communication": a.communication, "wire": a.wire, "waiting": a.waiting, "gaps": a.gaps,
                "waiting_for": named | {"nobody": float(waiting_for[-1])}}

    shown = report.shown
    return {
        "source": report.source, "collectives": report.number, "number_of_steps": len(report.steps),
        "shown_rank": report.ranks[shown], "late_rank": None if report.late is None else report.ranks[report.late],
        "late_count": report.late_count, "step_ms": report.span, "account": mean_sentence(report),
        **parts(report.total(shown), report.waiting_for(shown)),
        "ranks": [{"rank": rank, "clock_offset_us": float(report.offsets[r]), "clock_spread_us": float(report.spreads[r]),
                   "clock_drift_ppm": float(report.drifts[r] * 1e6), **parts(report.total(r), report.waiting_for(r))}
                  for r, rank in enumerate(report.ranks)],
        "steps": [{"name": s.name, "collectives": len(s.kinds), "step_ms": float(s.span[shown]) / 1e3,
                   "account": step_sentence(s, report), **parts(s.account(shown), s.waiting_for(shown))} for s in report.steps],
        "advice": advice(report), "notes": report.notes,
    }
