"""What a probe found: pieces of a round, prediction against measurement, verdict. Pure functions; no torch."""

from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean
from typing import Optional

from ..cost_model import break_even_tau
from ..eagle3.stats import Stats
from . import report

NOISY = 0.25  # (p80 - p20) / median of a shape's rounds above which the machine is called busy


@dataclass(frozen=True)
class Pieces:
    """ms of one round. verify: target forward and acceptance, without communication; p20, p80: of the whole round."""

    draft: float
    verify: float
    communication: float
    other: float
    p20: float
    p80: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.communication + self.other

    def as_dict(self) -> dict:
        return asdict(self) | {"round": self.total}


def pieces(rounds: list, split: Optional[list] = None) -> Pieces:
    """Means of rounds as Decoder.time_rounds gives them, the fastest and the slowest tenth left out. A round's
    "communication" (none with one rank) is the part of its target and verify stages that are collectives.

    split  the same rounds with the device waited for after every stage (None: `rounds` themselves); their shares divide the
           round of `rounds`
    """
    kept, apart = _trimmed(rounds), _trimmed(split or rounds)
    total = fmean(r["total"] for r in kept)
    scale = min(1.0, total / fmean(r["total"] for r in apart))
    part = {s: scale * fmean(r[s] for r in apart) for s in ("draft", "target", "verify")}
    both = part["target"] + part["verify"]
    communication = min(both, scale * fmean(r.get("communication", 0.0) for r in apart))
    totals = sorted(r["total"] for r in rounds)
    fifth = len(totals) // 5
    return Pieces(part["draft"], both - communication, communication,
                  max(0.0, total - sum(part.values())), totals[fifth], totals[-1 - fifth])


def _trimmed(rounds: list) -> list:
    ordered = sorted(rounds, key=lambda r: r["total"])
    tenth = len(ordered) // 10
    return ordered[tenth:len(ordered) - tenth]


def mix(speculative: Pieces, off: Pieces, share: float) -> Pieces:
    """The mean round when a share of the rounds speculates and the others do not (an n-gram drafter without a match)."""
    a, b = asdict(speculative), asdict(off)
    return Pieces(**{k: share * a[k] + (1 - share) * b[k] for k in a})


@dataclass
class Row:
    """One drafter under one shape (draft "none", shape "off": plain decoding).

    nodes, levels     of the shape
    calibrated, off   Pieces of a speculative round of it and of a plain round, from calibration runs
    first, second     Stats of the batches of the two halves of the prompts
    equal             texts that are plain decoding's token for token
    halves            prompts in each half
    distinct          mean distinct-4-gram ratio of the texts
    own_off           Pieces of this drafter's rounds without a match, where they are not those of plain decoding (None: they are)
    """

    draft: str
    shape: str
    nodes: int
    levels: int
    calibrated: Pieces
    off: Pieces
    first: list
    second: list
    equal: int = 0
    halves: tuple = (0, 0)
    distinct: float = 1.0
    own_off: Optional[Pieces] = None

    @property
    def prompts(self) -> int:
        return sum(self.halves)

    @property
    def plain(self) -> bool:
        return self.shape == "off"

    @property
    def stats(self) -> Stats:
        return report.merge(self.first + self.second)

    @property
    def tau_error(self) -> Optional[float]:
        """Standard error of tau over the batches, which are taken for independent."""
        runs, extra = self.first + self.second, self.stats.tau - 1
        if len(runs) < 2 or self.plain:
            return None
        squares = sum((r.accepted - extra * r.rounds) ** 2 for r in runs)
        return sqrt(len(runs) / (len(runs) - 1) * squares) / self.stats.rounds if self.stats.rounds else None

    def share(self, stats: Stats) -> float:
        """Share of the rounds that speculated."""
        return stats.steps[self.shape] / report.steps(stats) if report.steps(stats) else 0.0

    def round(self, stats: Stats) -> Pieces:
        """The mean round of a run with these counts, from the calibration."""
        return self.off if self.plain else mix(self.calibrated, self.own_off or self.off, self.share(stats))

    @property
    def break_even(self) -> float:
        p = self.round(self.stats)
        return break_even_tau(self.off.total, p.verify + p.communication, p.draft, p.other)

    def predicted(self, counts: Stats) -> Optional[float]:
        """tok/s: tokens per round as counted, over the calibrated round."""
        tokens = tokens_per_round(counts)
        return 1e3 * tokens / self.round(counts).total if tokens else None

    @property
    def measured(self) -> Optional[float]:
        """tok/s of all prompts."""
        return self.stats.tokens_per_second or None

    @property
    def error(self) -> Optional[float]:
        """Predicted over measured tok/s - 1, all prompts: what the calibrated times miss."""
        return ratio(self.predicted(self.stats), self.measured)

    @property
    def error_other_half(self) -> Optional[float]:
        """The same with the acceptance of the first half against the clock of the second: other texts, too."""
        return ratio(self.predicted(report.merge(self.first)), report.merge(self.second).tokens_per_second or None)

    @property
    def speed_up(self) -> float:
        """tau / break-even: what speculation does to the speed, by the arithmetic."""
        return self.stats.tau / self.break_even

    def verdict(self, verify_ms: Optional[float] = None) -> str:
        p = self.round(self.stats)
        if not self.plain and not self.stats.drafted:
            return "nothing was drafted: all rounds were plain"
        return verdict(self.stats.tau, self.off, p, verify_ms, self.tau_error)

    def as_dict(self, verify_ms: Optional[float] = None) -> dict:
        s, p = self.stats, self.round(self.stats)

        def clocked(runs: list) -> dict:
            x = report.merge(runs)
            return dict(tau=x.tau, rounds=x.rounds, tokens_per_round=tokens_per_round(x), round_ms=report.ms_per_step(x),
                        tokens_per_second=x.tokens_per_second or None)

        return dict(
            draft=self.draft, shape=self.shape, nodes=self.nodes, levels=self.levels, tau=s.tau, accepted=s.accepted,
            drafted=s.drafted, rounds=s.rounds, speculative_share=0.0 if self.plain else self.share(s),
            per_depth=[dict(depth=d, unconditional=u, conditional=c) for d, u, c in s.per_depth()], ms=p.as_dict(),
            speculative_ms=self.calibrated.as_dict(), break_even_tau=self.break_even, speed_up=self.speed_up,
            tau_standard_error=self.tau_error, predicted_tokens_per_second=self.predicted(s), measured=clocked(self.first + self.second),
            error=self.error, halves=[clocked(self.first), clocked(self.second)],
            predicted_from_other_half=self.predicted(report.merge(self.first)), error_other_half=self.error_other_half,
            equal=self.equal, prompts=self.prompts, distinct_4gram_ratio=self.distinct,
            verdict=None if self.plain else self.verdict(verify_ms))


def tokens_per_round(stats: Stats) -> float:
    """Tokens of all requests per batched round, prefill's token excluded, after clipping."""
    return (stats.emitted - stats.first_tokens) / report.steps(stats) if report.steps(stats) else 0.0


def ratio(a: Optional[float], b: Optional[float]) -> Optional[float]:
    """a / b - 1, None without one of them."""
    return a / b - 1 if a and b else None


def verdict(tau: float, plain: Pieces, p: Pieces, verify_ms: Optional[float] = None, tau_error: Optional[float] = None) -> str:
    """One sentence: tau against break-even, and what another verify time would do.

    tau_error  standard error of tau: within two of them of break-even the sentence says so
    verify_ms  of the other verify, communication included; None: where speculation loses, that of a plain step
    """
    even = break_even_tau(plain.total, p.verify + p.communication, p.draft, p.other)
    gain = tau / even - 1
    head = f"tau {tau:.2f} {'<' if tau < even else '>='} break-even {even:.2f}: speculation "
    if abs(gain) < report.EVEN:
        head += f"changes nothing ({100 * gain:+.1f} %)"
    else:
        head += f"loses {-100 * gain:.0f} %" if gain < 0 else f"wins {100 * gain:.0f} %"
    if tau_error and report.EVEN <= abs(gain) and abs(tau - even) < 2 * tau_error:
        head += f" (too close to call: tau is known to +-{2 * tau_error:.2f}; more prompts)"
    if verify_ms is None and gain >= report.EVEN:
        return head
    other = plain.verify + plain.communication if verify_ms is None else verify_ms
    named = f"verify at {other:.3g} ms" + (" (a plain step's)" if verify_ms is None else "")
    then = tau / break_even_tau(plain.total, other, p.draft, p.other) - 1
    if then >= 0:
        return f"{head}; with {named} it would win {100 * then:.0f} %"
    return f"{head}; even with {named} it would lose {-100 * then:.0f} %: draft {p.draft:.3g} ms, other {p.other:.3g} ms"


def summary(rows: list) -> str:
    """The best row, measured."""
    plain, best = rows[0], max(rows, key=lambda r: r.measured or 0.0)
    if plain.measured is None:
        return "no speed was measured: every text ended before a decode step"
    if best.plain:
        return f"fastest here: plain decoding, {plain.measured:.1f} tok/s"
    return (f"fastest here: {best.draft} {best.shape}, {best.measured:.1f} tok/s, {best.measured / plain.measured:.2f}x plain "
            f"decoding ({plain.measured:.1f})")


def noise(rows: list) -> Optional[str]:
    """A sentence when rounds of one shape differ much."""
    spread = max((r.calibrated.p80 - r.calibrated.p20) / r.calibrated.total for r in rows)
    if spread <= NOISY:
        return None
    return (f"the machine is busy: rounds of one shape differ by {100 * spread:.0f} % from the 20th to the 80th percentile; "
            "predictions and speeds differ for that reason alone")


# ---- tables: (header, rows of strings) --------------------------------------------------------------------------------


def times_table(rows: list) -> tuple:
    header = ["draft", "shape", "tau", "acc/drafted", "draft ms", "verify", "comm", "other", "round", "break-even", "predicted",
              "measured", "error", "other half", "x plain", "equal"]
    plain = rows[0].measured
    out = []
    for r in rows:
        p = r.round(r.stats)
        ms = [f"{v:.2f}" for v in (p.draft, p.verify, p.communication, p.other, p.total)]
        tau = f"{r.stats.tau:.2f}" + (f" +-{r.tau_error:.2f}" if r.tau_error is not None else "")
        percent = [_or_dash(None if e is None else 100 * e, "+.1f", " %") for e in (r.error, r.error_other_half)]
        out.append([r.draft, r.shape, tau, f"{r.stats.accepted}/{r.stats.drafted}", *ms, f"{r.break_even:.2f}",
                    _or_dash(r.predicted(r.stats), ".1f"), _or_dash(r.measured, ".1f"), *percent,
                    _or_dash(r.measured / plain if r.measured and plain else None, ".2f"), f"{r.equal}/{r.prompts}"])
    return header, out


def depth_table(rows: list) -> tuple:
    """Per depth: share of the speculative rounds whose accepted path is that long (and the share given the depth before)."""
    rows = [r for r in rows if r.stats.per_depth()]
    depths = max((len(r.stats.per_depth()) for r in rows), default=0)
    header = ["draft", "shape", *(f"depth {d}" for d in range(1, depths + 1))]
    out = []
    for r in rows:
        cells = [f"{u:.2f}" if d == 1 else f"{u:.2f} ({c:.2f})" for d, u, c in r.stats.per_depth()]
        out.append([r.draft, r.shape, *cells, *[""] * (depths - len(cells))])
    return header, out


def ranks_table(rows: list, split: list) -> tuple:
    """The pieces of every row's round on every rank. split: as ranks.split_of gives it."""
    header = ["draft", "shape", "rank", "draft ms", "verify", "comm", "other", "round", "comm share"]
    out = []
    for row, parts in zip(rows, split):
        for p in parts:
            total = p["draft"] + p["verify"] + p["communication"] + p["other"]
            ms = [f"{p[k]:.2f}" for k in ("draft", "verify", "communication", "other")]
            out.append([row.draft, row.shape, str(p["rank"]), *ms, f"{total:.2f}", f"{100 * p['communication'] / total:.0f} %"])
    return header, out


def _or_dash(value: Optional[float], form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
