"""fastverify probe: drafters on a target, measured: what a round costs, what it brings, does it pay on this machine."""

import argparse
import json
import math
import os
from pathlib import Path

from .options import add_model, add_sampling, check_run, sampling_params, stop_ids
from .output import Output
from .prompts import halves, need_tokenizer, read_prompts, read_sets

EAGLE_SHAPES, NGRAM_SHAPES = "chain-2,chain-3,chain-5,tree-8", "tree-8"


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Runs drafters on a target and prints, per drafter and shape: accept length, where a round's time goes, the break-even "
            "accept length of this machine, predicted and measured speed, and a verdict.")
    parser = commands.add_parser("probe", help="does speculation pay here: drafters measured", description=text)
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines with `prompt`, `turns` or `token_ids` (default: the 30 "
                        "prompts that ship with the package)")
    parser.add_argument("--limit", type=int, default=12, metavar="N", help="prompts to run, spread over the categories "
                        "(default 12; 0: all)")
    parser.add_argument("--tree", metavar="SHAPE,...", help=f"shapes of every drafter (default: {EAGLE_SHAPES} for EAGLE-3, "
                        f"{NGRAM_SHAPES} for ngram)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="requests per batch (default 1)")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no pair of prompts that would end later than this")
    parser.add_argument("--verify-ms", type=float, metavar="MS", help="another verify time for the verdicts to try (default: a "
                        "plain step's, where speculation loses)")
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--out", metavar="FILE", help="also write that JSON to a file, for fastverify plan --probe FILE")
    add_sampling(parser, 64)
    add_model(parser, several_drafts=True)
    return parser


def run(args: argparse.Namespace) -> int:
    shapes = _check(args)
    prompts = read_prompts(args.prompts, "probe") if args.prompts else read_sets(None)["prompts"]
    both = halves(prompts)
    if args.limit:
        both = both[0][:-(-args.limit // 2)], both[1][:args.limit // 2]
    if not both[1]:
        raise ValueError(f"probe: prompts must be at least 2, since half of them predicts the other; got {len(prompts)}. "
                         "Fix: add prompts.")
    from . import probe_measure, probe_report
    from .environment import environment
    from .ranks import Silent, split_of, world_size
    from .session import open_session
    out = Output(json_only=args.json) if world_size() == 1 or os.environ.get("RANK") == "0" else Silent()
    given = args.draft
    args.draft = None
    session = open_session("probe", args, out, need_tokenizer({"": prompts}), drafts=False)
    session, settings, ranks = _settings(session, given, shapes, out)
    for note in session.notes:
        out.note(note)
    ids = _encode(session, settings, both, args, out)
    plan = probe_measure.Plan(args.max_new_tokens, args.batch, sampling_params(args), stop_ids(args), seconds=args.seconds or math.inf,
                              agree=ranks.agree)
    with out.progress("probing", 1) as update:
        rows = probe_measure.measure(settings, ids, plan, lambda done, total: update(done, total=total))
    split = split_of(rows, ranks)
    ranks.leave()
    busy = probe_report.noise(rows)
    from dataclasses import asdict
    data = dict(kind="fastverify probe", environment=environment(session.device, session.target.dtype),
                target=Path(session.target_name).name, world_size=ranks.world, batch=args.batch,
                prompts=dict(halves=list(rows[0].halves)), max_new_tokens=args.max_new_tokens,
                sampling=asdict(plan.params), plain_ms=rows[0].off.as_dict(), rows=[r.as_dict(args.verify_ms) for r in rows],
                summary=probe_report.summary(rows), notes=session.notes + ([busy] if busy else []))
    if split:
        for row, parts in zip(data["rows"], split):
            row["ranks"] = parts
    if ranks.rank:
        return 0
    if args.out:
        Path(args.out).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        out.note(f"written: {args.out}")
    if args.json:
        out.json(data)
    else:
        _show(out, rows, data, args, split)
    return 0


def _show(out: Output, rows: list, data: dict, args: argparse.Namespace, split: "list | None") -> None:
    from . import probe_report
    e = data["environment"]
    out.line(f"{data['target']} on {e['device']} ({e['threads']} threads), {e['dtype']}, batch {data['batch']}, world size "
             f"{data['world_size']}: plain "
             f"step {rows[0].off.total:.2f} ms (p20 {rows[0].off.p20:.2f}, p80 {rows[0].off.p80:.2f})")
    first, second = data["prompts"]["halves"]
    out.line(f"{first + second} prompts, {args.max_new_tokens} new tokens each. predicted: counted tokens per round over calibrated ms. "
             f"other half: acceptance of {first} prompts against the clock of the other {second}")
    out.line()
    out.wide_table(*probe_report.times_table(rows), left=2)
    if split:
        out.line()
        out.line("the round on every rank; communication holds the waiting for other ranks (fastverify trace tells them apart):")
        out.wide_table(*probe_report.ranks_table(rows, split), left=2)
    header, depths = probe_report.depth_table(rows)
    if depths:
        out.line()
        out.line("accepted at least so deep (given the depth before), share of the rounds that drafted:")
        out.wide_table(header, depths, left=2)
    out.line()
    for r in rows[1:]:
        out.line(f"{r.draft} {r.shape}: {r.verdict(args.verify_ms)}")
    out.line(data["summary"], style="bold")
    if data["notes"] and data["notes"][-1].startswith("the machine is busy"):
        out.note(data["notes"][-1])


def _check(args: argparse.Namespace) -> "list | None":
    """Refuses what cannot be meant, before anything is loaded. Returns the shapes of --tree, or None."""
    check_run("probe", args)
    if args.limit < 0 or args.limit == 1:
        raise ValueError(f"probe: limit must be 0 (all) or at least 2, since half of the prompts predicts the other; got {args.limit}. "
                         "Fix: change --limit.")
    if args.batch < 1:
        raise ValueError(f"probe: batch must be at least 1; got {args.batch}. Fix: change --batch.")
    if args.max_new_tokens < 8:
        raise ValueError(f"probe: max_new_tokens must be at least 8, or there are no rounds to measure; got {args.max_new_tokens}. "
                         "Fix: change --max-new-tokens.")
    for name in ("verify_ms", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"probe: {name} must be a finite number > 0; got {value}. Fix: change --{name.replace('_', '-')}.")
    if args.out and not Path(args.out).resolve().parent.is_dir():
        raise ValueError(f"probe: the folder of the result file must exist; got {args.out}. Fix: create it.")
    for d in args.draft or []:
        if args.draft.count(d) > 1:
            raise ValueError(f"probe: drafts must be different; got {d} twice. Fix: name each once.")
    if args.tree is None:
        return None
    from ..eagle3.shapes import parse_shape
    names = list(dict.fromkeys(args.tree.split(",")))
    for name in names:
        if name in ("auto", "off"):
            raise ValueError(f"probe: tree must be shapes that draft (plain decoding always runs beside them); got {name}. "
                             "Fix: name them, as --tree chain-3,tree-8.")
        parse_shape(name)
    return names


def _settings(session, given: "list | None", shapes: "list | None", out: Output) -> tuple:
    """(session, settings, ranks): plain decoding and every draft under every shape, on this rank's part of the target."""
    from dataclasses import replace

    from ..tree.ngram import NgramDrafter
    from .probe_measure import Setting
    from .ranks import Ranks
    with out.status("loading the drafts"):
        sessions = [session.with_draft(d) for d in given or [None]]
        if given is None and not isinstance(sessions[0].draft, NgramDrafter):
            sessions.append(session.with_draft("ngram"))
    ranks = Ranks.join("probe", session.device)
    target = ranks.shard(session.target)  # drafts stay whole on every rank
    session, *sessions = (replace(s, target=target) for s in (session, *sessions))
    found = [Setting("none", session.decoder("off"))]
    names = _names([s.draft_name for s in sessions])
    for name, s in zip(names, sessions):
        if s.draft is None:
            continue
        default = NGRAM_SHAPES if isinstance(s.draft, NgramDrafter) else EAGLE_SHAPES
        found += [Setting(name, s.decoder(shape)) for shape in shapes or default.split(",")]
    return session, found, ranks


def _names(paths: list) -> list:
    """As short as they differ: the folder's name, with the folder above it where two are alike."""
    short = [Path(p).name or p for p in paths]
    return [s if short.count(s) == 1 else "/".join(Path(p).resolve().parts[-2:]) for s, p in zip(short, paths)]


def _encode(session, settings: list, both: tuple, args: argparse.Namespace, out: Output) -> tuple:
    """Token ids of both halves; prompts that do not fit under every shape are left out."""
    room = min(session.room(s.decoder) for s in settings) - args.max_new_tokens
    found = [[p.token_ids or session.encode("probe", p.text, raw=args.raw) for p in half] for half in both]
    fitting = tuple([ids for ids in half if len(ids) <= room] for half in found)
    gone = sum(map(len, found)) - sum(map(len, fitting))
    if gone:
        out.note(f"{gone} prompts left out: longer than the {room} positions that {args.max_new_tokens} new tokens leave")
    if not all(fitting):
        raise ValueError(f"probe: each half of the prompts must hold one of at most {room} tokens; got none. "
                         "Fix: lower --max-new-tokens, or shorten the prompts.")
    return fitting
