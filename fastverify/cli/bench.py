"""fastverify bench: the benchmarks of every op, of the verify step and of the loop; tables, Markdown, plots; two results compared."""

import argparse
import runpy
import shutil
import signal
import sys
from pathlib import Path

from . import bench_compare
from .bench_tables import SCHEMA, by_op, markdown, read_rows, table_rows
from .options import add_model, add_sampling
from .output import Output

AXES = {"batch": "requests", "nodes": "nodes per request", "vocab": "vocabulary", "prefix": "tokens in the cache", "hidden": "hidden size",
        "rows": "rows", "top": "k of a top-k"}
FLAGS = {"--device": dict(default="auto", metavar="DEVICE", help="cuda, cuda:1, cpu; auto (default): cuda where there is one"),
         "--repeats": dict(type=int, metavar="N", help="samples per measurement (default 30)"),
         "--only": dict(metavar="PROVIDER,...", help="these providers only")}


def add_parser(commands) -> argparse.ArgumentParser:
    text = "Benchmarks: every op beside its floor and its peers, with a correctness check of the timed outputs in the last column."
    parser = commands.add_parser("bench", help="benchmarks of ops, step and loop; compare two results", description=text)
    kinds = parser.add_subparsers(metavar="WHAT", dest="what", title="what")
    kinds.add_parser("list", help="ops, and providers that are installed or not (default)")
    run_ = kinds.add_parser("run", help="ops or stages; without a name all of them and the step")
    run_.add_argument("names", nargs="*", metavar="OP|STAGE")
    step = kinds.add_parser("step", help="a whole verify step, stage by stage and in one run")
    step.add_argument("--model", metavar="NAME,...", help="smollm2-135m, llama-3-8b, ... (default: what the device can hold)")
    for p in (run_, step):
        for flag, kw in FLAGS.items():
            p.add_argument(flag, **kw)
        p.add_argument("--quick", action="store_true", help="two shapes per op, few samples: seconds instead of minutes")
        p.add_argument("--limit", type=float, metavar="S", help="seconds per op")
        for name, what in AXES.items():
            p.add_argument(f"--{name}", metavar="N,...", help=f"{what}, instead of the benchmark's own values")
        p.add_argument("--out", type=Path, metavar="DIR", help="add the rows to DIR/<device>-<date>.json")
        _add_output(p)
    loop = kinds.add_parser("loop", help="the decode loop on prompts, every drafter and shape against plain decoding")
    loop.add_argument("--prompts", nargs="+", metavar="FILE", help="JSON lines (default: the prompts that ship with the package)")
    loop.add_argument("--limit", type=int, metavar="N", help="prompts per file")
    loop.add_argument("--batch", type=int, default=1, metavar="N")
    loop.add_argument("--eagle3", metavar="SHAPES", help="shapes of the EAGLE-3 draft")
    loop.add_argument("--ngram", metavar="SHAPES", help="shapes of the n-gram drafter, '' for none")
    loop.add_argument("--out", type=Path, metavar="DIR", help="write <device>-loop-<date>.json there")
    add_sampling(loop, 48)
    add_model(loop)
    show = kinds.add_parser("show", help="a stored result as table, Markdown or plots")
    show.add_argument("file", metavar="FILE.json")
    show.add_argument("--op", metavar="OP,...", help="these ops only")
    _add_output(show)
    two = kinds.add_parser("compare", help="two results: SAME, FASTER, SLOWER or UNCLEAR per row; exit code 1 if a row is slower")
    two.add_argument("old", metavar="A.json")
    two.add_argument("new", metavar="B.json")
    two.add_argument("--tolerance", type=float, default=bench_compare.TOLERANCE, metavar="X", help="medians that are this near are the "
                     f"same (default {bench_compare.TOLERANCE})")
    two.add_argument("--all", action="store_true", help="show rows that are SAME too")
    two.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw: roofline per op, step by stage, all-reduce against size")


def run(args: argparse.Namespace) -> int:
    return {"run": _run, "step": _run, "loop": _loop, "show": _show, "compare": _compare}.get(args.what, _list)(args)


def _list(args: argparse.Namespace) -> int:
    import torch

    from . import bench_run
    out = Output()
    found = bench_run.scripts(bench_run.folder("bench"), torch.cuda.device_count())
    out.table(["op", "stage", "script", "here"], [[s.op, s.stage, f"benchmarks/{s.stage}/{s.path.name}", s.why or "yes"] for s in found], left=4)
    out.line()
    out.table(["provider", "version", "missing: what to do"],
              [[name, version or "absent", fix] for name, version, fix in bench_run.providers()], left=3)
    out.line()
    out.line("fastverify bench run [OP|STAGE ...] [--quick] [--batch 1,8 ...]; bench step; bench loop --prompts FILE; bench compare A B")
    return 0


def _check(args: argparse.Namespace) -> list:
    """The flags for a script, after their values were checked."""
    flags = []
    for name in AXES:
        value = getattr(args, name)
        if value is None:
            continue
        if not all(v.isdigit() and int(v) > 0 for v in value.split(",")):
            raise ValueError(f"bench: {name} must be positive integers with commas; got {value}. Fix: --{name} 1,8.")
        flags += [f"--{name}", value]
    if args.repeats is not None and args.repeats < 1:
        raise ValueError(f"bench: repeats must be at least 1; got {args.repeats}. Fix: change --repeats.")
    if args.limit is not None and not args.limit > 0:
        raise ValueError(f"bench: limit must be above 0 seconds; got {args.limit}. Fix: change --limit.")
    if args.plot:
        from .bench_plots import need_matplotlib
        need_matplotlib("bench")
    for flag in ("device", "repeats", "only", *(["model"] if args.what == "step" else [])):
        if getattr(args, flag) is not None:
            flags += [f"--{flag}", str(getattr(args, flag))]
    return flags


def _run(args: argparse.Namespace) -> int:
    flags = _check(args)
    import torch

    from . import bench_run
    out, root = Output(json_only=args.json), bench_run.folder("bench")
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    if args.what == "step":
        wanted = [bench_run.Script("step", "step", root / "step" / "bench_step.py")]
    else:
        wanted = bench_run.chosen(bench_run.scripts(root, 0 if on_cpu else torch.cuda.device_count()), args.names)
        for s in wanted:
            if s.why:
                out.note(f"{s.op}: not run, {s.why}")
        wanted = [s for s in wanted if not s.why]
    rows, failed, wrong = [], [], []
    if args.out:
        sys.path.insert(0, str(root))
        from harness import write_rows
    counts = bench_run.expected(root / "results", "cpu" if on_cpu else "cuda")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the scripts end with this process
    try:
        with out.progress("benchmarks", 1000) as update:
            for outcome in bench_run.run(wanted, flags, lambda share, text: update(int(1000 * share), text=text), args.quick, args.limit, counts,
                                         ahead=not on_cpu):
                rows += outcome.rows
                if args.out and outcome.rows:  # at once: a run that is cut short keeps what it has
                    stored = write_rows(args.out, outcome.rows)
                if outcome.error:
                    if "no provider of --only" not in outcome.error:  # that other scripts have it is no failure
                        failed.append(outcome.script.op)
                    out.note(f"{outcome.script.op}: {outcome.error}")
                elif outcome.status == 1:
                    wrong.append(outcome.script.op)
                out.note(f"{outcome.script.op}: {len(outcome.rows)} rows in {outcome.seconds:.0f} s")
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.out and rows:
        out.note(f"{len(rows)} rows in {stored}")
    _present(out, rows, args)
    if wrong:
        out.note(f"WRONG results: {', '.join(wrong)}")
    return 1 if failed or wrong or not rows else 0


def _present(out: Output, rows: list, args: argparse.Namespace) -> None:
    if args.markdown:
        args.markdown.write_text(markdown(rows), encoding="utf-8")
        out.note(f"written: {args.markdown}")
    if args.plot:
        from .bench_plots import draw
        out.note(f"written: {', '.join(map(str, draw(rows, args.plot)))}")
    if args.json:
        out.json(dict(kind="fastverify bench", schema=SCHEMA, rows=rows))
        return
    for op, mine in by_op(rows).items():
        first = mine[0]
        title = (f"{op} on {first['device']}, {first['date'][:10]}, torch {first['versions'].get('torch', '?')}; copy {first['copy_gb_s']:.0f} "
                 f"GB/s, empty {first['empty_us']:.2f} us")
        header, cells = table_rows(mine)
        width = sum(max(len(row[i]) for row in (header, *cells)) + 3 for i in range(len(header)))
        if out.out_terminal and out.rich and width <= shutil.get_terminal_size().columns:
            out.table(header, cells, title=title)
            continue
        out.line(title, style="bold")  # a narrow terminal wraps lines instead of cutting columns
        out.wide_table(header, cells)
        out.line()


def _show(args: argparse.Namespace) -> int:
    rows = read_rows("bench", args.file)
    if args.op:
        names = args.op.split(",")
        missing = [n for n in names if n not in {r["op"] for r in rows}]
        if missing:
            raise ValueError(f"bench: every op must be in the result; got {missing[0]}. Fix: one of {', '.join(by_op(rows))}.")
        rows = [r for r in rows if r["op"] in names]
    if args.plot:
        from .bench_plots import need_matplotlib
        need_matplotlib("bench")
    _present(Output(json_only=args.json), rows, args)
    return 0


def _compare(args: argparse.Namespace) -> int:
    if not 0 <= args.tolerance < 1:
        raise ValueError(f"bench: tolerance must be in [0, 1); got {args.tolerance}. Fix: change --tolerance.")
    out = Output(json_only=args.json)
    result = bench_compare.compare(read_rows("bench", args.old), read_rows("bench", args.new), args.tolerance)
    for note in result["notes"]:
        out.note(note)
    if args.json:
        out.json(dict(kind="fastverify bench compare", tolerance=args.tolerance, **result))
    else:
        header, cells = bench_compare.table(result, args.all)
        if cells:
            out.wide_table(header, cells, left=4)
            out.line()
        out.line(bench_compare.summary(result), style="bold")
    return 1 if result["count"][bench_compare.SLOWER] else 0


def _loop(args: argparse.Namespace) -> int:
    """Runs benchmarks/loop/bench_decode.py in this process, with the options that were given."""
    from . import bench_run
    script = bench_run.folder("bench") / "loop" / "bench_decode.py"
    given = []
    for name, value in vars(args).items():
        if name in ("what", "run") or value is None or value is False:
            continue
        given += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [] if value is True else [str(value)])]
    before = sys.argv
    sys.argv = [str(script), *given]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return 0
