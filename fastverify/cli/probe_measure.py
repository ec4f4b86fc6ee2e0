"""Runs the settings of a probe: calibration, and the two halves of the prompts. One slow minute touches all settings alike."""

import math
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

from ..eagle3.decode import Decoder, SamplingParams
from ..eagle3.shapes import OFF, Shape
from ..eagle3.stats import SynchronizedStats, distinct_ngram_ratio
from . import ranks
from .probe_report import Pieces, Row, pieces
from .report import ms_per_step

WARM_TOKENS = 12


@dataclass
class Setting:
    """One drafter under one shape."""

    draft: str
    decoder: Decoder

    @property
    def shape(self) -> Shape:
        return self.decoder.shapes[0]


@dataclass
class Plan:
    """How prompts are run. rounds: calibrated rounds per group and setting, the first of which does not count. seconds: no pair
    of groups is begun that would end later, the first one excepted. agree: makes a choice that depends on a clock that of the first rank."""

    max_new_tokens: int = 64
    batch: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Optional[list] = None
    rounds: int = 13
    seconds: float = math.inf
    agree: Callable = lambda choice: choice


@dataclass
class _Record:
    """What the runs of one setting gave."""

    rounds: list = field(default_factory=list)   # of calibration, as Decoder.time_rounds gives them
    split: list = field(default_factory=list)    # the same, the device waited for after every stage
    plain: list = field(default_factory=list)    # rounds of this decoder without drafts, where they are not those of plain decoding
    stats: tuple = field(default_factory=lambda: ([], []))   # of each half
    texts: tuple = field(default_factory=lambda: ([], []))


def measure(settings: list, halves: tuple, plan: Plan, progress: Callable = lambda done, total: None) -> list:
    """Rows of all settings; settings[0] must be plain decoding. halves: two lists of token-id lists.

    Group by group (plan.batch prompts) every setting runs a group of the first half, is calibrated behind its text, and runs
    a group of the second half. No clock of these runs enters a prediction: it has the calibrated rounds and counts.
    """
    groups = [[half[i:i + plan.batch] for i in range(0, len(half), plan.batch)] for half in halves]
    records = [_Record() for _ in settings]
    total, done = (sum(map(len, groups)) + len(groups[0])) * len(settings), 0

    def each(step: Callable) -> None:
        nonlocal done
        for setting, record in zip(settings, records):
            step(setting, record)
            done += 1
            progress(done, total)

    begin = time.monotonic()
    for size in {len(g) for half in groups for g in half}:
        group = next(g for half in groups for g in half if len(g) == size)
        for s in settings:
            _run(s, group, plan, min(WARM_TOKENS, plan.max_new_tokens))
    longest = 0.0
    for i in range(max(map(len, groups))):
        now = time.monotonic()
        if i and plan.agree(now + longest > begin + plan.seconds):
            break
        if i < len(groups[0]):
            group = groups[0][i]
            each(lambda s, r: _keep(_run(s, group, plan), r, 0))
            text = records[0].texts[0][-len(group):]
            behind = [ids + tokens[:len(tokens) // 2] for ids, tokens in zip(group, text)]
            each(lambda s, r: _calibrate(s, behind, plan, r))
        if i < len(groups[1]):
            each(lambda s, r: _keep(_run(s, groups[1][i], plan), r, 1))
        longest = max(longest, time.monotonic() - now)
    return _rows(settings, records)


def _run(setting: Setting, group: list, plan: Plan, max_new_tokens: Optional[int] = None):
    return setting.decoder.generate(group, max_new_tokens or plan.max_new_tokens, plan.params, plan.stop_ids)


def _keep(result, record: _Record, half: int) -> None:
    record.stats[half].append(result.stats)
    record.texts[half].extend(result.tokens)


def _calibrate(setting: Setting, prompts: list, plan: Plan, record: _Record) -> None:
    """Times rounds behind the prompts; an n-gram drafter gets text of that length that repeats, so that it drafts."""
    decoder, shape = setting.decoder, setting.shape
    if shape.speculative and not decoder.eagle:
        prompts = [(p[-4:] * (len(p) // 4 + 1))[:len(p)] for p in prompts]
    room = decoder.limit - plan.rounds * (shape.levels + 1) - shape.columns - 3
    prompts = [p[-room:] for p in prompts]
    on_gpu, alone = decoder.target.device.type == "cuda", decoder.target.comm is None
    if not decoder.interleaves:  # captured cycles: the host sees no round by itself, so a run gives one mean
        record.rounds += [_mean_cycle(setting, prompts, plan) for _ in range(2)][1:]  # the first may capture
    elif alone or on_gpu:
        record.rounds += decoder.time_rounds(prompts, shape, plan.rounds)[1:]
    else:
        record.rounds += ranks.time_rounds(decoder, prompts, shape, plan.rounds)[1:]
    if on_gpu or not decoder.interleaves:
        wait = torch.cuda.synchronize if on_gpu else lambda: None
        record.split += (decoder.time_rounds(prompts, shape, plan.rounds, SynchronizedStats(wait)) if alone
                         else ranks.time_rounds(decoder, prompts, shape, plan.rounds))[1:]
    if on_gpu and shape.speculative and not decoder.eagle:  # its rounds without a match are not those of captured plain decoding
        record.plain += decoder.time_rounds(prompts, OFF, plan.rounds)[1:]


def _mean_cycle(setting: Setting, prompts: list, plan: Plan) -> dict:
    """{"total": ms} of a round of a captured loop behind the prompts, stop ids ignored."""
    stats = setting.decoder.generate(prompts, plan.rounds * (setting.shape.levels + 1) + 2, SamplingParams(), stop_ids=[]).stats
    return {"total": ms_per_step(stats)}


def _rows(settings: list, records: list) -> list:
    plain = records[0]
    off: Pieces = pieces(plain.rounds, plain.split)
    rows = []
    for s, r in zip(settings, records):
        texts = r.texts[0] + r.texts[1]
        equal = sum(a == b for a, b in zip(texts, plain.texts[0] + plain.texts[1]))
        distinct = [distinct_ngram_ratio(t) for t in texts]
        calibrated = off if s.shape == OFF else pieces(r.rounds, r.split)
        rows.append(Row(s.draft, s.shape.name, s.shape.nodes, s.shape.levels, calibrated, off, r.stats[0], r.stats[1], equal, tuple(map(len, r.texts)),
                        sum(distinct) / len(distinct), pieces(r.plain) if r.plain else None))
    return rows
