"""Where two texts of one seed part, and by how little the target preferred one over the other there."""

from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np
import torch

from ..eagle3.decode import SamplingParams
from ..models.batch import ForwardBatch
from ..reference.accept import keep_set, process
from ..reference.noise import gumbel
from ..tree.prepare_tree import Prepared, prepare_tree


@dataclass
class Difference:
    """First place where two texts differ.

    index            place in the generated tokens
    plain, spec      the two tokens there (None: that text had ended, and there is no margin)
    margin           by how much the target preferred one: at temperature 0 the gap of their logits; else the smaller of the
                     gap in perturbed score and the distance to the nearest filter cut. Rounding explains small margins only
    """

    index: int
    plain: Optional[int]
    spec: Optional[int]
    margin: Optional[float]

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        name = lambda t: "the end" if t is None else f"token {t}"  # noqa: E731
        margin = "" if self.margin is None else f", margin {self.margin:.2g}"
        return f"first difference at token {self.index}: plain {name(self.plain)}, speculative {name(self.spec)}{margin}"


def first_difference(target: Any, prompt: list, plain: list, spec: list, params: SamplingParams,
                     seed: int) -> Optional[Difference]:
    """None for equal texts. Costs one target forward over the common text when they differ. seed: of this request."""
    if plain == spec:
        return None
    common = 0
    while common < min(len(plain), len(spec)) and plain[common] == spec[common]:
        common += 1
    a, b = (t[common] if common < len(t) else None for t in (plain, spec))
    margin = None
    if a is not None and b is not None:
        row = last_logits(target, prompt + plain[:common])
        margin = _margin(row, plain[:common], len(prompt) + common, a, b, params, seed)
    return Difference(common, a, b, margin)


def _margin(row: np.ndarray, emitted: list, position: int, a: int, b: int, p: SamplingParams, seed: int) -> float:
    bias = np.zeros(len(row))
    for token, value in p.bias.items():
        bias[token] = value
    x, _ = process(row, emitted, None, bias, None, (p.repetition_penalty, p.frequency_penalty, p.presence_penalty), True)
    if p.temperature == 0:
        return abs(float(x[a] - x[b]))
    z = x / p.temperature
    keep, cut = keep_set(z, p.top_k if p.top_k < len(z) else 0, p.top_p, p.min_p)
    noise = gumbel(np.arange(len(z)), position, seed)
    gap = abs(float(z[a] + noise[a] - z[b] - noise[b])) if keep[a] and keep[b] else np.inf
    return float(min(gap, cut))


@torch.inference_mode()
def last_logits(target: Any, ids: list, chunk: int = 512, page_size: int = 16) -> np.ndarray:
    """float64 [V]: the target's logits after `ids`, by prefill in chunks over a cache of its own."""
    device, pages = target.device, -(-len(ids) // page_size)
    i32 = dict(dtype=torch.int32, device=device)
    cache = target.make_cache(pages, page_size)
    table, base = torch.arange(pages, **i32).view(1, pages), torch.zeros(1, **i32)
    for start in range(0, len(ids), chunk):
        tokens = torch.tensor(ids[start:start + chunk], **i32)
        n = tokens.numel()
        cu = torch.tensor([0, n], **i32)
        p = Prepared(positions=torch.zeros(n, **i32), slots=torch.zeros(n, dtype=torch.int64, device=device))
        prepare_tree(None, cu, base, table, page_size, p)
        hidden, _ = target.forward(ForwardBatch(tokens, p.positions, p.slots, cu, base, table), cache)
        base += n
    return target.logits(hidden[-1:])[0, : target.config.vocab_size].double().cpu().numpy()
