"""What to draft each round: named shapes, and the controller behind `--tree auto`."""

import re
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class Shape:
    """A draft shape. nodes counts the root (EAGLE's total_token); levels = greatest drafted depth; k = beam width."""

    name: str
    k: int
    levels: int
    nodes: int

    @property
    def speculative(self) -> bool:
        return self.nodes > 1

    @property
    def columns(self) -> int:
        """Cache rows behind the prefix that a round may touch: the tree, or the draft's beams."""
        return max(self.nodes, (self.levels - 1) * self.k if self.speculative else 0)


OFF = Shape("off", 0, 0, 1)
_TREES = {8: (4, 4), 20: (6, 5), 60: (10, 7)}  # nodes -> (k, levels)
AUTO = ("off", "chain-2", "chain-3", "tree-8", "tree-20")


def parse_shape(text: str) -> Shape:
    """"off", "chain-K" (K drafted tokens), "tree-N" (N nodes, root included), or "tree-N-kK-dD" with beam K and depth D."""
    if text == "off":
        return OFF
    chain = re.fullmatch(r"chain-([0-9]+)", text)
    if chain and 1 <= int(chain[1]) <= 16:
        n = int(chain[1])
        return Shape(text, 1, n, n + 1)
    tree = re.fullmatch(r"tree-([0-9]+)(?:-k([0-9]+)-d([0-9]+))?", text)
    if tree:
        nodes = int(tree[1])
        k, levels = (int(tree[2]), int(tree[3])) if tree[2] else next(
            (v for n, v in sorted(_TREES.items()) if nodes <= n), _TREES[60])
        if 2 <= nodes <= 128 and 1 <= k <= 64 and 1 <= levels <= 16 and levels * k <= 128:
            return Shape(text, k, levels, nodes)
    raise ValueError(
        f"tree: the shape must be off, auto, chain-K (1..16), tree-N (2..128 nodes) or tree-N-kK-dD (K * D <= 128); "
        f"got {text!r}. Fix: try chain-3 or tree-20.")


# Accepted drafts per round that a healthy draft reaches (an opening guess; measurements replace it within a few rounds).
_PRIOR_ACCEPTED = {"chain-2": 0.9, "chain-3": 1.05, "chain-5": 1.25, "tree-8": 1.3, "tree-20": 1.65, "tree-60": 2.2}
_PRIOR_ROUNDS = 4    # what the guess weighs, in rounds
_OPTIMISM = 1.3     # what is expected of a shape that has not run, over the guess: so that it gets its try
_WINDOW = 16         # rounds that a mean looks back over
_PROBE_SHARE = 0.01  # of the time, at most, that probing while off may cost


@dataclass
class Controller:
    """Chooses the shape with the most expected tokens per second (docs/algorithm.md, "does it pay").

    round_ms  {shape name: milliseconds of one round}, measured at start and followed by an EMA
    A shape's accept length is the mean of its last rounds, blended with a prior until it has run `trust` rounds; the prior is
    scaled by the ratio that the shapes in use show between measured and prior. `depth_rate[d-1]`: P(depth d | depth d - 1) of
    the shapes that ran, also an EMA. While off, `probe_rounds` speculative rounds keep the estimate alive, every
    `probe_every` rounds or as rarely as 1 % of the time asks for; old knowledge weighs little then, so that one good probe
    brings speculation back. A switch needs `hysteresis` more tokens per second.
    """

    shapes: tuple
    round_ms: dict
    hysteresis: float = 0.03
    trust: int = 16
    probe_every: int = 96
    probe_rounds: int = 2
    ratio: float = 1.0
    accepted: dict = field(default_factory=dict)  # name -> (mean of accepted drafts per round, rounds)
    depth_rate: list = field(default_factory=list)
    current: Optional[Shape] = None
    reason: str = ""
    switches: int = 0
    _observed: int = 0
    _off_rounds: int = 0
    _probing: int = 0
    _probe: Optional[Shape] = None

    def tau(self, shape: Shape) -> float:
        """Expected accept length of a shape (1 for off)."""
        if not shape.speculative:
            return 1.0
        mean, rounds = self.accepted.get(shape.name, (0.0, 0))
        if rounds >= self.trust:
            return 1.0 + mean
        guess = _OPTIMISM * self.ratio * _PRIOR_ACCEPTED.get(shape.name, 1.0)
        return 1.0 + (_PRIOR_ROUNDS * guess + rounds * mean) / (_PRIOR_ROUNDS + rounds)

    def rate(self, shape: Shape) -> float:
        """Expected tokens per second of one request."""
        return 1000.0 * self.tau(shape) / self.round_ms[shape.name]

    def break_even(self, shape: Shape) -> float:
        """Accept length at which the shape is as fast as plain decoding."""
        return self.round_ms[shape.name] / self.round_ms["off"]

    def choose(self) -> Shape:
        """The shape of the next round."""
        if self._probing > 0:
            self._probing -= 1
            return self._probe
        best = max(self.shapes, key=self.rate)
        if self.current is None or self.rate(best) > self.rate(self.current) * (1 + self.hysteresis):
            self.switches += self.current is not None
            self.current = best
            plain = self.rate(self.shapes[0])
            self.reason = (f"{best.name}: tau {self.tau(best):.2f} against break-even {self.break_even(best):.2f}, "
                           f"{self.rate(best):.1f} tok/s expected, plain {plain:.1f}")
        if self.current.speculative:
            self._off_rounds = 0
        elif len(self.shapes) > 1:
            self._off_rounds += 1
            probe = self._next_probe()
            if probe is not None:
                self._off_rounds, self._probing, self._probe = 0, self.probe_rounds - 1, probe
                for name, (mean, rounds) in self.accepted.items():  # what was learned long ago weighs little
                    self.accepted[name] = (mean, min(rounds, _PRIOR_ROUNDS))
                return probe
        return self.current

    def _next_probe(self) -> Optional[Shape]:
        """The shape to probe now: the most promising one that could pay at all, when its turn has come."""
        able = [s for s in self.shapes[1:] if s.levels + 1 > self.break_even(s)]
        if not able or self._off_rounds < self.probe_every:
            return None
        shape = max(able, key=self.rate)
        loss = self.probe_rounds * max(0.0, self.break_even(shape) - self.tau(shape))  # plain rounds
        return shape if self._off_rounds >= loss / _PROBE_SHARE else None

    def learn_from(self, other: "Controller") -> None:
        """Takes over what another batch size has learned about acceptance."""
        self.ratio, self.accepted, self.depth_rate = other.ratio, dict(other.accepted), list(other.depth_rate)
        self._observed = other._observed

    def observe(self, shape: Shape, accepted: float, ms: Optional[float], depths: Optional[list] = None) -> None:
        """accepted: drafts accepted per request in this round; ms: its duration, None where it is not known; depths: accepted
        drafts of every request, for depth_rate."""
        if ms is not None:
            old = self.round_ms.get(shape.name)
            # noise only ever adds time: a round at half the estimate or less shows that the estimate was taken at a bad moment
            weight = 1.0 if old is None or ms <= 0.5 * old else 0.05
            self.round_ms[shape.name] = ms if weight == 1.0 else old + weight * (ms - old)
            if weight < 1.0 and shape.speculative:  # what makes one shape dearer makes the others so
                for other in self.shapes[1:]:
                    if other.name != shape.name and other.speculative:
                        self.round_ms[other.name] *= self.round_ms[shape.name] / old
        if not shape.speculative:
            return
        mean, rounds = self.accepted.get(shape.name, (0.0, 0))
        step = max(1.0 / (rounds + 1), 1.0 / _WINDOW)
        self.accepted[shape.name] = (mean + step * (accepted - mean), rounds + 1)
        prior = _PRIOR_ACCEPTED.get(shape.name, 1.0)
        self._observed += 1
        self.ratio += max(1.0 / (self._observed + _PRIOR_ROUNDS / 2), 0.08) * (accepted / prior - self.ratio)
        self._count_depths(shape, depths or [])

    def _count_depths(self, shape: Shape, depths: list) -> None:
        self.depth_rate += [None] * (shape.levels - len(self.depth_rate))
        for d in range(shape.levels):
            reached = [a > d for a in depths if a >= d]
            if reached:
                rate, old = sum(reached) / len(reached), self.depth_rate[d]
                self.depth_rate[d] = rate if old is None else old + (rate - old) / _WINDOW
