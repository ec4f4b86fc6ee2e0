"""Runs prompt sets under draft shapes and against plain decoding; the numbers of `evaluate` and benchmarks/loop."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Optional

from ..eagle3.decode import SamplingParams
from ..eagle3.stats import Stats, distinct_ngram_ratio
from . import report
from .difference import first_difference
from .environment import environment
from .output import Output
from .session import Session

WARM_TOKENS = 12


@dataclass
class Settings:
    """How prompts are run; stop_ids None: the target's own."""

    trees: tuple = ("auto",)
    max_new_tokens: int = 64
    batch: int = 1
    compare_plain: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Optional[list] = None


@dataclass
class Row:
    """One set of prompts under one shape.

    stats        of all its runs together; plain: the same prompts without speculation, or None
    distinct     mean distinct-4-gram ratio of the texts
    differences  [(prompt id, Difference)] against plain decoding
    auto         of tree "auto": expected accept length and break-even of each shape at the end (report.considered)
    """

    name: str
    tree: str
    prompts: int
    stats: Stats
    distinct: float
    plain: Optional[Stats] = None
    differences: list = field(default_factory=list)
    auto: dict = field(default_factory=dict)

    @property
    def depth_1(self) -> float:
        """Rate at which the first drafted token is accepted, over speculative rounds."""
        rates = self.stats.per_depth()
        return rates[0][1] if rates else 0.0

    @property
    def speedup(self) -> Optional[float]:
        return report.speedup(self.plain, self.stats) if self.plain else None

    def as_dict(self) -> dict:
        out = dict(set=self.name, tree=self.tree, prompts=self.prompts, depth_1=self.depth_1,
                   distinct_4gram_ratio=self.distinct, ms_per_step=report.ms_per_step(self.stats), auto=self.auto,
                   **self.stats.as_dict())
        if self.plain:
            out |= dict(plain=self.plain.as_dict(), speedup=self.speedup, equal=self.prompts - len(self.differences),
                        differences=[dict(id=i, **d.as_dict()) for i, d in self.differences],
                        verdict=report.verdict(self.plain, self.stats))
        return out


def room(session: Session, settings: Settings) -> int:
    """Positions that prompt and new tokens together may take under every shape."""
    return min(session.room(session.decoder(tree)) for tree in settings.trees)


def encode(session: Session, name: str, prompts: list, settings: Settings, out: Output, raw: bool = False) -> list:
    """[(prompt id, token ids)] of the prompts that fit into the context; says how many do not."""
    items = [(p.id, p.token_ids or session.encode("evaluate", p.text, raw=raw)) for p in prompts]
    positions, new = room(session, settings), settings.max_new_tokens
    fitting = [(key, ids) for key, ids in items if len(ids) + new <= positions]
    if len(fitting) < len(items):
        longest = max(len(ids) for _, ids in items)
        out.note(f"{name}: {len(items) - len(fitting)} of {len(items)} prompts left out (up to {longest} + {new} tokens in "
                 f"{positions} positions)")
    return fitting


def evaluate(session: Session, name: str, items: list, settings: Settings, on_batch: Callable = lambda prompts: None) -> list:
    """Rows of one set, one per shape. items: [(prompt id, token ids)]; they run in batches of settings.batch, and every
    batch runs under all shapes before the next one starts, so that a slow minute of the machine touches them alike.
    """
    decoders = {tree: session.decoder(tree) for tree in settings.trees}
    if settings.compare_plain:
        decoders = {"plain": session.decoder("off"), **decoders}
    runs = {tree: [] for tree in decoders}       # tree -> [Stats of a batch]
    texts = {tree: [] for tree in decoders}      # tree -> [tokens of a prompt]
    warm: set = set()
    for start in range(0, len(items), settings.batch):
        group = items[start:start + settings.batch]
        prompts = [ids for _, ids in group]
        for tree, decoder in decoders.items():
            if (tree, len(group)) not in warm:  # buffers, threads and (auto) the measured shapes of this batch size
                decoder.generate(prompts, min(WARM_TOKENS, settings.max_new_tokens), settings.params, settings.stop_ids)
                warm.add((tree, len(group)))
            result = decoder.generate(prompts, settings.max_new_tokens, settings.params, settings.stop_ids)
            runs[tree].append(result.stats)
            texts[tree] += result.tokens
        on_batch(len(group))
    rows = [_row(session, name, items, tree, runs, texts, settings) for tree in settings.trees]
    for row in rows:
        row.auto = report.considered(decoders[row.tree].controller(min(settings.batch, len(items))))
    return rows


def _row(session: Session, name: str, items: list, tree: str, runs: dict, texts: dict, settings: Settings) -> Row:
    distinct = [distinct_ngram_ratio(t) for t in texts[tree]]
    row = Row(name, tree, len(items), report.merge(runs[tree]), sum(distinct) / len(distinct))
    if settings.compare_plain:
        row.plain = report.merge(runs["plain"])
        report.against(row.plain, row.stats)
        for i, ((key, ids), plain, spec) in enumerate(zip(items, texts["plain"], texts[tree])):
            seed = settings.params.seed + i % settings.batch  # request b of a batch uses seed + b
            difference = first_difference(session.target, ids, plain, spec, settings.params, seed)
            if difference is not None:
                row.differences.append((key, difference))
    return row


def results(session: Session, rows: list, settings: Settings) -> dict:
    """Rows for JSON, with everything that makes their numbers numbers."""
    return dict(environment=environment(session.device, session.target.dtype), target=Path(session.target_name).name,
                draft=Path(session.draft_name).name if session.draft_name else None, max_new_tokens=settings.max_new_tokens, batch=settings.batch,
                sampling=asdict(settings.params), rows=[row.as_dict() for row in rows])


def table(rows: list, compare_plain: bool) -> tuple:
    """(header, rows of strings) for Output.table."""
    header = ["set", "tree", "prompts", "tau", "acc/drafted", "depth 1", "4-grams", "tok/s"]
    out = [[r.name, r.tree, str(r.prompts), f"{r.stats.tau:.2f}", f"{r.stats.accepted}/{r.stats.drafted}", f"{r.depth_1:.2f}",
            f"{r.distinct:.2f}", f"{r.stats.tokens_per_second:.1f}"] for r in rows]
    if compare_plain:
        header += ["plain", "x plain", "even at", "equal"]
        for cells, r in zip(out, rows):
            cells += [f"{r.plain.tokens_per_second:.1f}", f"{r.speedup:.2f}" if r.speedup else "-",
                      f"{r.stats.break_even:.2f}" if r.stats.break_even else "-",
                      f"{r.prompts - len(r.differences)}/{r.prompts}"]
    return header, out
