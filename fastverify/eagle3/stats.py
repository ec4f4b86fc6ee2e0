"""What a run measured: counts by definition (docs/algorithm.md), times by stage."""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Optional


@dataclass
class Stats:
    """Counters of one run.

    rounds             request-rounds: verifies in which a request took part (prefill not counted)
    emitted            tokens after clipping by stop ids and budget, the prefill's token included
    drafted, accepted  drafted nodes verified; drafted nodes on accepted paths (bonus excluded, unclipped)
    at_depth[d-1]      rounds whose accepted path reached depth d
    offered[d-1]       rounds that drafted a node at depth d
    ms                 {"prefill", "draft", "target", "verify", "other"}: wall-clock milliseconds
    steps              batched rounds by shape name
    """

    rounds: int = 0
    spec_rounds: int = 0
    emitted: int = 0
    first_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    at_depth: list = field(default_factory=list)
    offered: list = field(default_factory=list)
    ms: dict = field(default_factory=lambda: dict.fromkeys(("prefill", "draft", "target", "verify", "other"), 0.0))
    steps: Counter = field(default_factory=Counter)
    host_steps: int = 0  # cycles cut in two for a grammar's host step
    decode_ms: float = 0.0
    plain_ms: Optional[float] = None
    controller: str = ""

    @contextmanager
    def timer(self, stage: str):
        start = time.perf_counter()
        yield
        self.ms[stage] += (time.perf_counter() - start) * 1e3

    def count(self, accepted: list, depths: list, nodes: list) -> None:
        """One batched round: per active request the accepted drafts, the greatest drafted depth and the node count."""
        for a, d, n in zip(accepted, depths, nodes):
            self.rounds += 1
            self.spec_rounds += n > 1
            self.drafted += n - 1
            self.accepted += a
            while len(self.at_depth) < max(a, d):
                self.at_depth.append(0)
                self.offered.append(0)
            for i in range(d):
                self.offered[i] += 1
            for i in range(a):
                self.at_depth[i] += 1

    @property
    def tau(self) -> float:
        """Accept length: accepted drafts + 1 per request-round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of all requests together, prefill and its token excluded."""
        return 1e3 * (self.emitted - self.first_tokens) / self.decode_ms if self.decode_ms else 0.0

    @property
    def break_even(self) -> Optional[float]:
        """Accept length at which this run's rounds would be as fast as plain decoding: (T_draft + T_verify + T_other) / T_plain."""
        steps = sum(self.steps.values())
        return self.decode_ms / steps / self.plain_ms if self.plain_ms and steps else None

    def per_depth(self) -> list:
        """[(depth, P(accepted >= depth), P(accepted >= depth | accepted >= depth - 1))] over speculative rounds."""
        out, before = [], self.spec_rounds
        for d, n in enumerate(self.at_depth, 1):
            out.append((d, n / max(1, self.spec_rounds), n / before if before else 0.0))
            before = n
        return out

    def as_dict(self) -> dict:
        return dict(
            rounds=self.rounds, steps=dict(self.steps), emitted=self.emitted, tau=self.tau, accepted=self.accepted,
            drafted=self.drafted, per_depth=[dict(depth=d, unconditional=u, conditional=c) for d, u, c in self.per_depth()],
            ms=dict(self.ms), decode_ms=self.decode_ms, tokens_per_second=self.tokens_per_second,
            host_steps=self.host_steps, break_even_tau=self.break_even, plain_ms_per_step=self.plain_ms, controller=self.controller)


class SynchronizedStats(Stats):
    """Stats whose stage times include the device's work: `wait` (torch.cuda.synchronize, or nothing) ends every stage."""

    def __init__(self, wait: Callable = lambda: None) -> None:
        super().__init__()
        self.wait = wait

    @contextmanager
    def timer(self, stage: str):
        with super().timer(stage):
            yield
            self.wait()


def distinct_ngram_ratio(tokens: list, n: int = 4) -> float:
    """Distinct n-grams over all n-grams of a text: near 0 means a loop, whose accept length says nothing."""
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
