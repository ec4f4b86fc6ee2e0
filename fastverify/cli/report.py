"""Numbers of runs as rows, one-line summaries and the verdict. Pure functions of Stats."""

from dataclasses import fields
from typing import Optional

from ..eagle3.stats import Stats, distinct_ngram_ratio

STAGES = ("draft", "target", "verify", "other")
EVEN = 0.02  # speed differences below this are called none


def merge(runs: list) -> Stats:
    """One Stats for several runs: counts and times add up."""
    total = Stats()
    for run in runs:
        for f in fields(Stats):
            mine, other = getattr(total, f.name), getattr(run, f.name)
            if f.name in ("at_depth", "offered"):
                mine += [0] * (len(other) - len(mine))
                for i, n in enumerate(other):
                    mine[i] += n
            elif f.name == "ms":
                for stage, ms in other.items():
                    mine[stage] += ms
            elif f.name == "steps":
                mine.update(other)
            elif f.name == "controller":
                total.controller = other or mine
            elif f.name != "plain_ms":
                setattr(total, f.name, mine + other)
    return total


def steps(stats: Stats) -> int:
    return sum(stats.steps.values())


def ms_per_step(stats: Stats) -> float:
    return stats.decode_ms / steps(stats) if steps(stats) else 0.0


def against(plain: Stats, spec: Stats) -> Stats:
    """`spec` with its break-even measured against `plain`."""
    spec.plain_ms = ms_per_step(plain) or None
    return spec


def speedup(plain: Stats, spec: Stats) -> Optional[float]:
    """Decode speed of spec over plain; None when one of them made no decode step."""
    if not plain.tokens_per_second or not spec.tokens_per_second:
        return None
    return spec.tokens_per_second / plain.tokens_per_second


def verdict(plain: Stats, spec: Stats) -> str:
    """One sentence: accept length against break-even, and what speculation did to the speed here."""
    ratio, even = speedup(plain, spec), against(plain, spec).break_even
    if ratio is None or even is None:
        return "no verdict: the text ended before a decode step"
    if not spec.drafted:
        return ("nothing was drafted: both runs are plain decoding (their speeds differ by "
                f"{100 * (ratio - 1):+.1f} %, which is noise)")
    sign = "<" if spec.tau < even else ">"
    numbers = f"tau {spec.tau:.2f} {sign} break-even {even:.2f}"
    if abs(ratio - 1) < EVEN:
        return f"{numbers}: speculation changes nothing here ({100 * (ratio - 1):+.1f} %)"
    if (ratio > 1) != (spec.tau > even):
        numbers += " (tau counts tokens that the end of the text cut off)"
    if ratio < 1:
        return f"{numbers}: speculation loses {100 * (1 - ratio):.0f} % here"
    return f"{numbers}: speculation wins by {100 * (ratio - 1):.0f} % here"


def shapes_used(stats: Stats) -> str:
    """"tree-8 x 31, off x 4": the batched rounds by shape."""
    return ", ".join(f"{name} x {n}" for name, n in stats.steps.most_common())


def considered(controller) -> dict:
    """{shape: {"tau": expected accept length, "break_even": ...}} of the speculative shapes --tree auto chose from."""
    shapes = [s for s in controller.shapes if s.speculative] if controller else []
    return {s.name: dict(tau=controller.tau(s), break_even=controller.break_even(s)) for s in shapes}


def auto_line(stats: Stats, controller) -> str:
    """What --tree auto ran, and why: expected accept length against break-even of each shape."""
    shapes = ", ".join(f"{name} {x['tau']:.2f}/{x['break_even']:.2f}" for name, x in considered(controller).items())
    return f"auto: {shapes_used(stats) or 'no decode step'}; expected tau/break-even: {shapes}"


def summary(stats: Stats, prompt_tokens: int) -> str:
    """One line about a single run."""
    text = (f"{stats.emitted} tokens after a prompt of {prompt_tokens}: {stats.tokens_per_second:.1f} tok/s, "
            f"{ms_per_step(stats):.1f} ms per step")
    if stats.drafted:
        text += f", tau {stats.tau:.2f}, accepted {stats.accepted} of {stats.drafted} drafted"
    return f"{text} ({shapes_used(stats) or 'no decode step'})"


def compare_rows(plain: Stats, spec: Stats, plain_tokens: list, spec_tokens: list) -> list:
    """Rows [name, plain, speculative] of the --compare table."""
    against(plain, spec)
    both = lambda name, f: [name, f(plain), f(spec)]  # noqa: E731
    stage = lambda s, name: f"{s.ms[name] / max(1, steps(s)):.2f}"  # noqa: E731
    staged = any(s.ms[name] for s in (plain, spec) for name in STAGES[:-1])  # a step in one piece has no times of its stages
    rows = [
        both("tok/s (decode)", lambda s: f"{s.tokens_per_second:.1f}"),
        both("tokens", lambda s: str(s.emitted)),
        both("steps", lambda s: str(steps(s))),
        both("ms per step", lambda s: f"{ms_per_step(s):.2f}"),
        *([f"  {name}", stage(plain, name), stage(spec, name)] for name in STAGES if staged),
        ["tau (accepted + 1)", "1.00", f"{spec.tau:.2f}"],
        ["break-even tau", "1.00", f"{spec.break_even:.2f}" if spec.break_even else "-"],
        ["accepted / drafted", "-", f"{spec.accepted}/{spec.drafted}"],
    ]
    rows += [[f"  depth {d}: rate (given depth {d - 1})" if d > 1 else "  depth 1: rate", "-",
              f"{u:.2f} ({c:.2f})" if d > 1 else f"{u:.2f}"] for d, u, c in spec.per_depth()]
    rows.append(["distinct 4-grams", *(f"{distinct_ngram_ratio(t):.2f}" for t in (plain_tokens, spec_tokens))])
    return rows


def run_dict(stats: Stats, tokens: list, text: Optional[str], finish: str) -> dict:
    """One run for JSON."""
    return dict(text=text, tokens=tokens, finish=finish, ms_per_step=ms_per_step(stats),
                distinct_4gram_ratio=distinct_ngram_ratio(tokens), **stats.as_dict())
