"""plan from measured times."""

import argparse

from ..cost_model import ALLREDUCE_US, break_even_tau, implied_round_ms, tokens_per_second
from .output import Output
from .plan import allreduce_times, numbers

ONE_CONFIGURATION = 1.05  # rounds of one configuration differ by less than this factor


def compute(args: argparse.Namespace, taus: list) -> dict:
    """The JSON of a plan."""
    drafts = numbers("draft_ms", args.draft_ms)
    verifies = [("as given", args.allreduce_us, args.verify_ms)]
    notes = []
    if args.allreduce_us is not None:
        if not args.allreduces:
            raise ValueError("plan: allreduces must be given with --allreduce-us; got none. "
                             "Fix: add --allreduces (two per layer).")
        now = args.allreduces * args.allreduce_us / 1e3
        rest = args.verify_ms - now
        if rest < 0:
            raise ValueError(f"plan: the all-reduces must fit into the verify; got {args.allreduces} x {args.allreduce_us:g} us = "
                             f"{now:.1f} ms in {args.verify_ms:g} ms. Fix: change --allreduces or --allreduce-us.")
        notes.append(f"all-reduces: {args.allreduces} x {args.allreduce_us:g} us = {now:.1f} ms of the {args.verify_ms:g} ms "
                     f"verify; the other {rest:.1f} ms are held")
        wanted = args.allreduce if args.allreduce is not None else "nccl-misconfigured,nccl-p2p,kernel"
        verifies += [(name, us, rest + args.allreduces * us / 1e3) for name, us in allreduce_times(wanted)
                     if us != args.allreduce_us]
        if now > args.plain_ms:
            notes.append(f"plain decoding makes the same {args.allreduces} all-reduces within {args.plain_ms:g} ms, so in at most "
                         f"{1e3 * args.plain_ms / args.allreduces:.0f} us each: {args.allreduce_us:g} us is not what the wire "
                         "costs. Verify runs in another way (no CUDA graph, larger messages, a late rank): see fastverify trace")
        notes.append("plain decoding is held as given; a faster all-reduce speeds it up as well")
    elif args.allreduce is not None or args.allreduces:
        raise ValueError("plan: allreduce_us must be given with --allreduce and --allreduces; got none. "
                         "Fix: add --allreduce-us.")
    rows = []
    for name, us, verify in verifies:
        for draft in drafts:
            total = verify + draft + args.other_ms
            rows.append({"allreduce": name, "allreduce_us": us, "verify_ms": verify, "draft_ms": draft, "round_ms": total,
                         "break_even_tau": break_even_tau(args.plain_ms, verify, draft, args.other_ms),
                         "tokens_per_second": {f"{t:g}": tokens_per_second(t, total) for t in taus}})
    reported = _reported(args.reported)
    return {"plain_ms": args.plain_ms, "plain_tokens_per_second": 1e3 / args.plain_ms, "other_ms": args.other_ms,
            "rows": rows, "reported": reported, "one_configuration": _one(reported),
            "verdicts": _verdicts(rows, reported, args.plain_ms), "change_first": _change_first(args, drafts), "notes": notes}


def _reported(text: str) -> list:
    found = []
    for part in filter(None, text.split(",")):
        try:
            speed, tau = (float(v) for v in part.split("@"))
            if not (0 < speed < 1e9 and 1 <= tau < 1e6):
                raise ValueError
        except ValueError:
            raise ValueError(f"plan: reported must be TOKS@TAU with tok/s > 0 and tau >= 1, as 52@1.5; got {part!r}. "
                             "Fix: change --reported.") from None
        found.append({"tokens_per_second": speed, "tau": tau, "round_ms": implied_round_ms(tau, speed)})
    return found


def _one(reported: list):
    """True, False, or None with fewer than two speeds."""
    rounds = [r["round_ms"] for r in reported]
    return None if len(rounds) < 2 else max(rounds) <= ONE_CONFIGURATION * min(rounds)


def _verdicts(rows: list, reported: list, plain: float) -> list:
    lines = []
    now = [r for r in rows if r["allreduce"] == "as given"]
    if reported:
        best = max(r["tau"] for r in reported)
        for r in now:
            gain = best / r["break_even_tau"] - 1
            words = (f"tau {best:g} < break-even {r['break_even_tau']:.2f}: speculation loses {-gain:.0%}" if gain < 0 else
                     f"tau {best:g} >= break-even {r['break_even_tau']:.2f}: speculation wins {gain:.0%}")
            lines.append(f"draft {r['draft_ms']:g} ms: {words}")
    if _one(reported) is False:
        rounds = [r["round_ms"] for r in reported]
        listed = ", ".join(f"{r['tokens_per_second']:g} tok/s at tau {r['tau']:g} is a round of {r['round_ms']:.1f} ms"
                           for r in reported)
        lines.append(f"{listed}: these are not one configuration (the rounds differ by {max(rounds) / min(rounds) - 1:.0%})")
        fits = [r for r in reported if r["round_ms"] < min(x["round_ms"] for x in now) / ONE_CONFIGURATION]
        if fits:
            lines.append("shorter than any round given here: " + ", ".join(f"{r['round_ms']:.1f} ms" for r in fits))
    return lines


def _change_first(args: argparse.Namespace, drafts: list) -> list:
    """What each part could give, largest first: [{part, saves_ms, break_even_tau, what}] on the dearest draft."""
    draft, kernel = max(drafts), ALLREDUCE_US["kernel"][1]
    total = args.verify_ms + draft + args.other_ms
    options = [("draft", draft - min(drafts) if len(drafts) > 1 else draft / 2,
                f"draft in {min(drafts):g} ms" if len(drafts) > 1 else "draft in half the time")]
    if args.other_ms:
        options.append(("other", args.other_ms / 2, "halve what is neither draft nor verify (host work, launches)"))
    if args.allreduce_us is not None and args.allreduce_us > kernel:
        options.append(("communication", args.allreduces * (args.allreduce_us - kernel) / 1e3,
                        f"all-reduces in {kernel:g} us each; first see with fastverify trace how much of them is waiting"))
    else:
        options.append(("verify", args.verify_ms / 4, "verify in three quarters of the time: fewer rows, one CUDA graph"))
    return [{"part": part, "saves_ms": saved, "break_even_tau": (total - saved) / args.plain_ms, "what": what}
            for part, saved, what in sorted(options, key=lambda o: -o[1])]


def show(out: Output, data: dict) -> None:
    out.line(f"plain decoding: {data['plain_ms']:g} ms a token, {data['plain_tokens_per_second']:.1f} tok/s")
    for note in data["notes"]:
        out.line(note)
    out.line()
    taus = list(data["rows"][0]["tokens_per_second"])
    out.line("a round in ms, its break-even tau, and tok/s at accept length tau:")
    rows = []
    for r in data["rows"]:
        us = "" if r["allreduce_us"] is None else f"{r['allreduce_us']:g}"
        times = [f"{r[key]:.2f}" for key in ("verify_ms", "draft_ms", "round_ms", "break_even_tau")]
        rows.append([r["allreduce"], us, *times, *(f"{r['tokens_per_second'][t]:.0f}" for t in taus)])
    header = ["all-reduce", "us", "verify", "draft", "round", "break-even", *(f"tau {t}" for t in taus)]
    out.wide_table(header, rows)
    out.line()
    for line in data["verdicts"]:
        out.line(line)
    out.line("change first:", style="bold")
    for i, c in enumerate(data["change_first"], 1):
        out.line(f"{i}. {c['part']}: {c['what']}; saves {c['saves_ms']:.1f} ms a round, break-even tau "
                 f"{c['break_even_tau']:.2f}")
