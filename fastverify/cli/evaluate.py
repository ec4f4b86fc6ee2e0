"""fastverify evaluate: prompt files through the loop; accept lengths, speed and equality with plain decoding."""

import argparse
import json
from pathlib import Path

from .options import add_model, add_sampling, check_run, check_tree, sampling_params, stop_ids
from .output import Output
from .prompts import need_tokenizer, read_sets


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Runs prompt files (one JSON object a line, with `prompt`, `turns` or `token_ids`) and prints one row per file and "
            "shape: accept length, accepted/drafted, depth-1 rate, distinct 4-grams, tok/s.")
    parser = commands.add_parser("evaluate", help="run prompt files and report accept lengths", description=text)
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="default: the 30 prompts that ship with the package")
    parser.add_argument("--tree", default="auto", metavar="SHAPE,...", help="shapes to run, comma separated (default: auto)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N prompts of each file (or category)")
    parser.add_argument("--by-category", action="store_true", help="one row per category of each file")
    parser.add_argument("--compare-plain", action="store_true",
                        help="also run plain decoding: speed, equality, first differences")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="requests per batch (default 1)")
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are, without the chat template")
    parser.add_argument("--json", metavar="OUT",
                        help="write the results to a file; - is stdout, and nothing else is printed there")
    add_sampling(parser, 64)
    add_model(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    trees = _check(args)
    sets = read_sets(args.prompts, args.limit, args.by_category)
    from . import evaluation
    from .session import open_session
    out = Output(json_only=args.json == "-")
    session = open_session("evaluate", args, out, need_tokenizer(sets), drafts=trees != ("off",))
    if session.draft is None and trees != ("off",):
        raise ValueError("evaluate: a draft must be given for shapes other than off; got --draft none. Fix: add --tree off.")
    for note in session.notes:
        out.note(note)
    settings = evaluation.Settings(trees, args.max_new_tokens, args.batch, args.compare_plain, sampling_params(args),
                                   stop_ids(args))
    room = evaluation.room(session, settings)
    encoded = {name: evaluation.encode(session, name, prompts, settings, out, args.raw) for name, prompts in sets.items()}
    rows, done = [], 0
    with out.progress("prompts", sum(map(len, encoded.values()))) as update:
        def count(n: int) -> None:
            nonlocal done
            done += n
            update(done)

        for name, items in encoded.items():
            if items:
                rows += evaluation.evaluate(session, name, items, settings, count)
    if not rows:
        raise ValueError(f"evaluate: at least one prompt must fit into {room} positions; got none. "
                         "Fix: lower --max-new-tokens.")
    data = evaluation.results(session, rows, settings)
    _show(out, rows, args)
    if args.json == "-":
        out.json(data)
    elif args.json:
        Path(args.json).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        out.note(f"written: {args.json}")
    return 0


def _show(out: Output, rows: list, args: argparse.Namespace) -> None:
    from . import evaluation
    out.table(*evaluation.table(rows, args.compare_plain), left=2)
    for row in rows:
        for key, difference in row.differences:
            out.line(f"{row.name} {row.tree}, prompt {key}: {difference}")
    if args.compare_plain and not any(row.differences for row in rows):
        out.line("every text equals plain decoding token for token")


def _check(args: argparse.Namespace) -> tuple:
    check_run("evaluate", args)
    trees = tuple(check_tree(t) for t in args.tree.split(","))
    for name in ("limit", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"evaluate: {name} must be at least 1; got {value}. Fix: change --{name}.")
    if args.json not in (None, "-") and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"evaluate: the folder of the result file must exist; got {args.json}. Fix: create it.")
    return trees
