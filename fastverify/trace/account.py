"""Collectives of all ranks, matched; each split into wire, waiting and launch gap.

A symmetric collective ends on all ranks at (nearly) the same moment, and cannot end before its last rank has arrived.
So, per collective: wire = the shortest duration over the ranks (that of the rank that arrived last), waiting = a rank's
duration minus wire, gap = time right before it in which that rank's GPU ran nothing. The common end also gives the offset
between two ranks' clocks.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from .events import RankTrace

WHOLE = "whole trace"
SAME_RUN_US = 3600e6     # clocks of one cluster agree far better than this
MAX_DRIFT = 2e-4         # of two clocks against one another; quartz stays below 1e-4
LATE_US, LATE_SHARE = 1.0, 0.1  # a rank is late if it arrives this much after the others' median (us, or share of the wire)


@dataclass(frozen=True)
class Account:
    """ms of one rank. communication = wire + waiting + gaps."""

    wire: float
    waiting: float
    gaps: float

    @property
    def communication(self) -> float:
        return self.wire + self.waiting + self.gaps


@dataclass
class Step:
    """One step (or the whole trace): arrays over [ranks, collectives], times in us.

    last: index of the rank that arrived last, -1 if all arrived together. span: length of the step on each rank.
    """

    name: str
    kinds: list
    nbytes: list
    start: np.ndarray      # corrected to the first rank's clock
    duration: np.ndarray
    gap: np.ndarray
    span: np.ndarray
    wire: np.ndarray = field(init=False)
    waiting: np.ndarray = field(init=False)
    last: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.wire = self.duration.min(0)
        self.waiting = self.duration - self.wire
        late = self.start.max(0) - np.median(self.start, axis=0) if len(self.start) > 2 else np.ptp(self.start, axis=0)
        self.last = np.where(late > np.maximum(LATE_US, LATE_SHARE * self.wire), self.start.argmax(0), -1)

    def account(self, r: int) -> Account:
        return Account(float(self.wire.sum()) / 1e3, float(self.waiting[r].sum()) / 1e3, float(self.gap[r].sum()) / 1e3)

    def waiting_for(self, r: int) -> np.ndarray:
        """ms [ranks + 1]: rank r's waiting by the rank that arrived last; the last entry: nobody in particular."""
        return np.bincount(self.last % (len(self.start) + 1), self.waiting[r], len(self.start) + 1) / 1e3


@dataclass
class Report:
    """The account of a run.

    ranks: their numbers, in the order of the files. world: how many there were in the run. offsets, spreads: us. drifts: us
    per us.
    shown: index of the rank whose account speaks for the others: the upper median by communication time, without the late one.
    late: index of the rank that arrives last most often; None if no rank does in half of the collectives in which one is late, or
    two do.
    """

    ranks: list
    source: str
    steps: list
    offsets: np.ndarray
    spreads: np.ndarray
    drifts: np.ndarray
    notes: list
    world: int = 0
    shown: int = 0
    late: Optional[int] = None
    late_count: int = 0

    def total(self, r: int) -> Account:
        """Mean over the steps, ms."""
        parts = [s.account(r) for s in self.steps]
        return Account(*(sum(getattr(p, k) for p in parts) / len(parts) for k in ("wire", "waiting", "gaps")))

    def waiting_for(self, r: int) -> np.ndarray:
        return sum(s.waiting_for(r) for s in self.steps) / len(self.steps)

    @property
    def number(self) -> int:
        return sum(len(s.kinds) for s in self.steps)

    @property
    def span(self) -> float:
        """ms per step, of the shown rank."""
        return float(np.mean([s.span[self.shown] for s in self.steps])) / 1e3


def account(traces: list, per_step: Optional[int] = None) -> Report:
    """RankTraces of one run -> Report. per_step: so many collectives make a step, from the first one on, whatever is
    annotated. Errors: ValueError, one sentence."""
    if len(traces) < 2:
        raise _error("at least two ranks must be given, since waiting is what one rank has more than another; got 1 file",
                     "pass the traces of every rank")
    notes = []
    ranks = _rank_numbers(traces)
    for trace, rank in zip(traces, ranks):
        if trace.damage:
            notes.append(f"rank {rank} ({trace.path.name}) is incomplete, {trace.damage}: the {trace.number_of_events} "
                         "events before that are used")
    _check_sources(traces, ranks)
    world = _check_world(traces, ranks, notes)
    base = traces[0].base
    shift = [(t.base - base) / 1e3 if base is not None and t.base is not None else 0.0 for t in traces]
    if per_step is None:
        groups = _groups(traces, ranks, notes)
    else:
        groups = _cut(traces, _whole(traces, ranks, notes), per_step, notes)
    order = [np.concatenate([g[1][r] for g in groups]) for r in range(len(traces))]
    start, end = (np.array([[getattr(t.collectives[i], k) + s for i in order[r]]
                            for r, (t, s) in enumerate(zip(traces, shift))]) for k in ("start", "end"))
    offsets, drifts, spreads, correction = clock_offsets(end)
    if traces[0].source != "param":
        _check_overlap(start - correction, end - correction, spreads, ranks)
    steps, at = [], 0
    for name, indices, span in groups:
        n = len(indices[0])
        here = slice(at, at + n)
        at += n
        gap = np.array([np.array([t.collectives[i].start for i in ix]) - np.maximum(t.idle_from[ix], lo)
                        for t, ix, (lo, _) in zip(traces, indices, span)]).clip(min=0)
        steps.append(Step(name, [traces[0].collectives[i].kind for i in indices[0]],
                          [traces[0].collectives[i].nbytes for i in indices[0]], (start - correction)[:, here],
                          (end - start)[:, here], gap, np.array([hi - lo for lo, hi in span])))
    report = Report(ranks, traces[0].source, steps, offsets, spreads, drifts, notes, world)
    _name_ranks(report)
    return report


def clock_offsets(end: np.ndarray) -> tuple:
    """Clocks against that of the first rank: (offsets, drifts, spreads, correction [ranks, n]).

    end: us [ranks, n] of the matched collectives, each on its rank's clock. offset: median of (this rank's end - the first
    rank's). drift: from the medians of the first and last third, from 30 collectives on, where it exceeds the noise and stays
    below MAX_DRIFT. spread: half the distance between the 10th and the 90th percentile of what is left.
    """
    difference = end - end[0]
    offsets = np.median(difference, axis=1)
    drifts = np.zeros(len(end))
    n = end.shape[1]
    if n >= 30:
        third = n // 3
        way = np.median(end[0, -third:]) - np.median(end[0, :third])
        rise = np.median(difference[:, -third:], axis=1) - np.median(difference[:, :third], axis=1)
        if way > 0:
            slope = rise / way
            noise = np.median(np.abs(difference - offsets[:, None]), axis=1)
            drifts = np.where((np.abs(slope) <= MAX_DRIFT) & (np.abs(rise) > noise), slope, 0.0)
    correction = offsets[:, None] + drifts[:, None] * (end[0] - np.median(end[0]))
    low, high = np.percentile(difference - correction, (10, 90), axis=1)
    return offsets, drifts, (high - low) / 2, correction


# ---- which rank is which, and do they belong together ----------------------------------------------------------------


def _rank_numbers(traces: list) -> list:
    """distributedInfo's ranks, else those in the file names (rank3, TP-3), else the order of the files."""
    seen: dict = {}
    for t in traces:
        for key in (t.path.resolve(), t.header.get("trace_id")):
            if key and key in seen:
                raise _error(f"every rank must be given once; got one trace twice, {seen[key]} and {t.path}",
                             "pass the traces of different ranks")
            if key:
                seen[key] = t.path
    said = [t.info("rank") for t in traces]
    if None not in said and len(set(said)) == len(said):
        return said
    named = [re.findall(r"(?i)(?:rank|tp)[-_]?(\d+)", t.path.name) for t in traces]
    numbers = [int(n[-1]) if n else None for n in named]
    if None not in numbers and len(set(numbers)) == len(numbers):
        return numbers
    return list(range(len(traces)))


def _check_sources(traces: list, ranks: list) -> None:
    for t, r in zip(traces, ranks):
        if t.source == "none":
            why = f" (the file is incomplete, {t.damage})" if t.damage else ""
            raise _error("every trace must hold collectives (NCCL or custom all-reduce kernels, gloo annotations); got none "
                         f"among {t.number_of_events} events of rank {r}, {t.path}{why}",
                         "profile steps that communicate, with activities CPU and CUDA")
    sources = [t.source for t in traces]
    if len(set(sources)) > 1:
        words = {"kernel": "GPU kernels", "host": "host annotations", "param": "host calls"}
        odd = next(i for i, s in enumerate(sources) if s != sources[0])
        raise _error(f"every rank must be profiled the same way; got {words[sources[0]]} on rank {ranks[0]} and "
                     f"{words[sources[odd]]} on rank {ranks[odd]}", "profile with the same activities on every rank")


def _check_world(traces: list, ranks: list, notes: list) -> int:
    """Number of ranks that the collectives had."""
    worlds = {t.info("world_size") for t in traces} - {None}
    if len(worlds) > 1:
        raise _error(f"all ranks must be of one run; got world sizes {', '.join(map(str, sorted(worlds)))}",
                     "pass traces of the same run")
    begins = [t.base / 1e3 + t.collectives[0].start for t in traces if t.base is not None]
    if len(begins) == len(traces) and max(begins) - min(begins) > SAME_RUN_US:
        raise _error("all ranks must be of one run; got traces that begin "
                     f"{(max(begins) - min(begins)) / 3600e6:.1f} hours apart", "pass traces of the same run")
    sizes = {c.group_size for t in traces for c in t.collectives} - {None}
    world = max(sizes, default=max(worlds, default=len(traces)))
    if world > len(traces):
        notes.append(f"{len(traces)} of {world} ranks are given (missing: {_missing(ranks, world)}): a missing rank may be "
                     "the one that the others wait for, and wire is an upper bound")
    if traces[0].source == "param":
        notes.append("only the host calls of the collectives (record_param_comms) are in these traces: the times are those "
                     "of the calls, not of the transfers; profile with the CUDA activity")
    return world


def _missing(ranks: list, world: int) -> str:
    gone = [r for r in range(world) if r not in ranks]
    return ", ".join(map(str, gone[:16])) + (", ..." if len(gone) > 16 else "")


def _check_overlap(start: np.ndarray, end: np.ndarray, spreads: np.ndarray, ranks: list) -> None:
    """All ranks of one run are inside a collective at the same moment."""
    slack = 50 + 0.05 * (end - start).max(0)
    apart = start.max(0) > end.min(0) + slack
    if apart.mean() > 0.5:
        odd = int(spreads.argmax())
        raise _error(f"all ranks must be of one run; got {int(apart.sum())} of {apart.size} collectives in which the ranks were "
                     f"not at the same time, whatever the clock offset (worst: rank {ranks[odd]})", "pass traces of the same run")


# ---- matching --------------------------------------------------------------------------------------------------------


def _groups(traces: list, ranks: list, notes: list) -> list:
    """[(step name, indices per rank [n], (from, to) per rank)] of the steps whose collectives are the same on every rank."""
    if not all(t.steps for t in traces):
        if any(t.steps for t in traces):
            notes.append("not every rank has step annotations: the traces are read as one step")
        return [_whole(traces, ranks, notes)]
    per_rank = [_by_step(t) for t in traces]
    outside = sum(len(t.collectives) - sum(map(len, steps.values())) for t, steps in zip(traces, per_rank))
    if outside:
        notes.append(f"{outside} collectives outside of every step are left out")
    groups, reasons, empty = [], [], 0
    for span in traces[0].steps:
        if not all(span.name in steps for steps in per_rank):
            absent = next(r for r, steps in zip(ranks, per_rank) if span.name not in steps)
            reasons.append(f"{span.name} is not in the trace of rank {absent}")
            continue
        indices = [steps[span.name] for steps in per_rank]
        matched, reason = _match(traces, ranks, indices)
        if reason:
            reasons.append(f"{span.name}: {reason}")
        elif matched is None or not len(matched[0]):
            empty += 1
        else:
            spans = [next((s.start, s.end) for s in t.steps if s.name == span.name) for t in traces]
            groups.append((span.name, matched, spans))
    if not groups:
        got = reasons[0] if reasons else "steps without collectives"
        raise _error(f"the ranks must hold the same collectives; got {got}", "pass traces of the same steps of one run")
    if reasons:
        notes.append(f"{len(reasons)} steps are left out: {reasons[0]}" + (", ..." if len(reasons) > 1 else ""))
    return groups


def _by_step(trace: RankTrace) -> dict:
    """step name -> indices of the collectives whose middle is in it."""
    begins = [s.start for s in trace.steps]
    found = {s.name: [] for s in trace.steps}
    for i, c in enumerate(trace.collectives):
        middle = c.start + c.duration / 2
        k = bisect_right(begins, middle) - 1
        if k >= 0 and middle <= trace.steps[k].end:
            found[trace.steps[k].name].append(i)
    return {name: np.array(ix, dtype=np.int64) for name, ix in found.items()}


def _whole(traces: list, ranks: list, notes: list) -> tuple:
    indices = [np.arange(len(t.collectives)) for t in traces]
    fewest = min(map(len, indices))
    short = [t for t in traces if len(t.collectives) == fewest]
    if any(len(ix) > fewest for ix in indices) and all(t.damage and t.in_order for t in short):
        indices = [ix[:fewest] for ix in indices]
        notes.append(f"the first {fewest} collectives are compared: that is where the incomplete file ends")
    matched, reason = _match(traces, ranks, indices)
    if reason:
        raise _error(f"the ranks must hold the same collectives; got {reason}", "pass traces of the same steps of one run")
    if matched is None or not len(matched[0]):
        raise _error("the ranks must share collectives; got only collectives of smaller groups", "pass the ranks of one group")
    spans = [(float(t.idle_from[ix].min()), max(t.collectives[i].end for i in ix)) for t, ix in zip(traces, matched)]
    return WHOLE, matched, spans


def _cut(traces: list, whole: tuple, per_step: int, notes: list) -> list:
    """The whole trace as steps of per_step collectives each; a step begins where the one before it ended."""
    _, matched, spans = whole
    number, rest = divmod(len(matched[0]), per_step)
    if not number:
        raise _error(f"a step must not hold more collectives than the trace; got {per_step} > {rest}", "change --per-step")
    if rest:
        notes.append(f"the last {rest} of {len(matched[0])} collectives fill no step of {per_step} and are left out")
    groups, begin = [], [lo for lo, _ in spans]
    for k in range(number):
        indices = [ix[k * per_step:(k + 1) * per_step] for ix in matched]
        end = [max(t.collectives[i].end for i in ix) for t, ix in zip(traces, indices)]
        groups.append((f"step {k}", indices, list(zip(begin, end))))
        begin = end
    return groups


def _match(traces: list, ranks: list, indices: list) -> tuple:
    """(indices per rank in a common order, None), or (None, why not). Order within a process group is what is compared."""
    channels = []
    for t, ix in zip(traces, indices):
        mine: dict = {}
        for i in ix:
            c = t.collectives[i]
            if c.group_size is None or c.group_size >= len(traces):
                mine.setdefault(c.group, []).append(int(i))
        channels.append(mine)
    columns = []
    for group in dict.fromkeys(g for mine in channels for g in mine):
        lists = [mine.get(group, []) for mine in channels]
        if len(set(map(len, lists))) > 1:
            odd = next(r for r, x in enumerate(lists) if len(x) != len(lists[0]))
            return None, (f"{len(lists[0])} collectives on rank {ranks[0]} and {len(lists[odd])} on rank {ranks[odd]}"
                          + (f" in group {group}" if group else ""))
        for k, column in enumerate(zip(*lists)):
            first = traces[0].collectives[column[0]]
            for r, i in enumerate(column):
                c = traces[r].collectives[i]
                if c.kind != first.kind or (None not in (c.nbytes, first.nbytes) and c.nbytes != first.nbytes):
                    return None, f"{_words(first)} on rank {ranks[0]} and {_words(c)} on rank {ranks[r]} as collective {k}"
            columns.append(column)
    columns.sort(key=lambda column: column[0])
    return [np.array(x, dtype=np.int64) for x in zip(*columns)] if columns else None, None


def _words(c) -> str:
    return f"{c.kind}" + (f" of {c.nbytes} bytes" if c.nbytes is not None else "")


def _name_ranks(report: Report) -> None:
    last = np.concatenate([s.last for s in report.steps])
    counts = np.bincount(last[last >= 0], minlength=len(report.ranks))
    if counts.sum() and counts.max() * 2 >= counts.sum() and (counts == counts.max()).sum() == 1:
        report.late, report.late_count = int(counts.argmax()), int(counts.max())
    others = [r for r in range(len(report.ranks)) if r != report.late]
    totals = [report.total(r).communication for r in others]
    report.shown = others[int(np.argsort(totals, kind="stable")[len(others) // 2])]


def _error(must: str, fix: str) -> ValueError:
    return ValueError(f"trace: {must}. Fix: {fix}.")
