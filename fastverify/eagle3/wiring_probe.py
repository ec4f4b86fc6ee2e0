"""Runs a draft on its target's own texts, as its config says and under every other wiring that the same tensors allow.

A wrong norm flag, swapped input halves or aux layers that are off by one keep the output exact and cost acceptance only; no
check of shapes can see them. The wiring that a draft was trained with predicts its target best: if another one than the
config's does so clearly, its name is the finding.
"""

import copy
from dataclasses import dataclass, replace

import torch

from ..models.batch import ForwardBatch
from ..tree import Prepared, prepare_tree
from .decode import Decoder, SamplingParams
from .draft import Eagle3Draft
from .map_health import Finding

HEALTHY, POOR = 0.45, 0.1  # depth-1 agreement: above, the draft is what it should be; below, it is wired wrongly
CLEARLY = 4.0              # standard errors of the mean difference in loss
GAIN = 0.02                # and its share of the loss
_WORST = 12.0              # nats that one position may count


@dataclass
class Variant:
    """One wiring: a draft, the target layers whose input it reads, in the order of fc's chunks, and what it means."""

    name: str
    draft: Eagle3Draft
    aux_layers: tuple
    fix: str = ""


def variants(draft: Eagle3Draft, num_target_layers: int, target_theta: float) -> list:
    """The config's wiring first, then each that differs from it in one way."""
    c, layers = draft.config, draft.config.aux_layers
    out = [Variant("as its config says", draft, layers)]

    def flag(name: str) -> None:
        other = _changed(draft, **{name: not getattr(c, name)})
        out.append(Variant(f"{name}={not getattr(c, name)}", other, layers, f"{name} in config.json should be {not getattr(c, name)}"))

    flag("norm_before_residual")
    flag("norm_output")
    swapped = _changed(draft)
    first = draft.layers[0]
    swapped.layers = [replace(first, qkv=first.qkv.roll(c.hidden_size, 1)), *draft.layers[1:]]
    out.append(Variant("q/k/v reading (hidden, embedding)", swapped, layers,
                       "its q/k/v weights have their halves in the other order: swap their columns"))
    for shift, word in ((1, "one layer later"), (-1, "one layer earlier")):
        moved = tuple(i + shift for i in layers)
        if 0 <= moved[0] and moved[-1] < num_target_layers:
            out.append(Variant(f"aux layers {word}: before {moved}", draft, moved,
                               f"the ids are meant in the other convention, or are off by one: before {moved} fits"))
    if len(layers) > 1:
        out.append(Variant("aux layers in reverse order", draft, layers[::-1], "fc's chunks are in reverse order"))
    if c.rope.kind == "none" and target_theta != c.rope.theta:
        rope = replace(c.rope, theta=target_theta)
        other = _changed(draft, rope=rope)
        other.cos_sin = rope.cos_sin(c.head_dim, draft.cos_sin.shape[0]).to(draft.device)
        out.append(Variant(f"rope_theta={target_theta:g}", other, layers, f"rope_theta in config.json should be the target's {target_theta:g}"))
    return out


def _changed(draft: Eagle3Draft, **fields) -> Eagle3Draft:
    other = copy.copy(draft)
    other.config = replace(draft.config, **fields)
    return other


@torch.inference_mode()
def probe_wiring(target, draft: Eagle3Draft, prompts: list, new_tokens: int = 48) -> tuple:
    """(facts, findings) of a draft on its target (models: load_target, load_draft on one device).

    prompts: lists of token ids; the target continues each (temperature 0.7, seeded), and the draft is asked for the target's
    most probable next token from true features (depth 1) and from its own first row (depth 2), where its vocabulary has it.
    Cost: a plain decode of the texts, one target forward and two draft forwards a variant and text.
    """
    texts = Decoder(target, None, tree="off").generate(prompts, new_tokens, SamplingParams(temperature=0.7, seed=1), [])
    tried = variants(draft, target.config.num_layers, target.config.rope.theta)
    wanted = tuple(sorted({i for v in tried for i in v.aux_layers}))
    losses = [[[], []] for _ in tried]  # per variant: nats of depth 1 and of depth 2
    hits = [[0, 0, 0] for _ in tried]   # right at depth 1, right at depth 2, positions
    for prompt, text in zip(prompts, texts.tokens):
        ids = torch.tensor(prompt + text, device=target.device)
        best, streams = _target(target, ids, wanted)
        start = max(len(prompt) - 2, 0)  # the pairs whose predictions are about the reply
        for i, v in enumerate(tried):
            aux = torch.cat([streams[wanted.index(n)] for n in v.aux_layers], 1)
            for depth, rows in enumerate(_drafted(v.draft, ids, aux, start)):
                nats, right = _score(v.draft, rows, best[start + 1 + depth :][: len(rows)])
                losses[i][depth].append(nats)
                hits[i][depth] += right
                hits[i][2] += (depth == 0) * len(nats)
    scores = [torch.cat([torch.cat(d) for d in x]) for x in losses]
    n = max(hits[0][2], 1)
    facts = dict(positions=hits[0][2], agreement=[hits[0][0] / n, hits[0][1] / n], variants={
        v.name: dict(nats=float(s.mean()), agreement=[h[0] / n, h[1] / n]) for v, s, h in zip(tried, scores, hits)})
    return facts, _judge(tried, scores, hits, n)


def _target(target, ids: torch.Tensor, layers: tuple) -> tuple:
    """(best next token of every position [T], the residual streams before these layers, each [T, Ht])."""
    hidden, aux = target.forward(_chain(ids, target.device), target.make_cache(ids.numel() + 1, 1), layers)
    best = target.logits(hidden).argmax(-1)
    return best, aux.split(target.config.hidden_size, 1)


def _drafted(draft: Eagle3Draft, ids: torch.Tensor, aux: torch.Tensor, start: int) -> tuple:
    """Rows of logits of depth 1 (pair k predicts token k+2 ...) and depth 2 for the pairs start .. T-4.

    Depth 2: every pair is a request of its own whose prefix is the shared pages of the pairs before it, then one page."""
    n, device = ids.numel() - 1, draft.device
    cache = draft.make_cache(2 * n + 1, 1)
    h2 = draft.forward(_chain(ids[1:], device), draft.fuse(aux[:-1]), cache)
    pairs = torch.arange(start, n - 2, device=device)
    count = pairs.numel()
    table = torch.arange(n + 1, dtype=torch.int32, device=device).repeat(count, 1)
    table[torch.arange(count), pairs + 1] = (n + torch.arange(count, device=device)).int()
    cu, prefix = torch.arange(count + 1, dtype=torch.int32, device=device), (pairs + 1).int()
    p = Prepared(positions=torch.zeros(count, dtype=torch.int32, device=device), slots=torch.zeros(count, dtype=torch.int64, device=device))
    prepare_tree(None, cu, prefix, table, 1, p)
    second = draft.forward(ForwardBatch(ids[pairs + 2], p.positions, p.slots, cu, prefix, table), h2[pairs], cache)
    return draft.logits(h2[pairs]), draft.logits(second)


def _chain(tokens: torch.Tensor, device) -> ForwardBatch:
    """One request of these tokens from position 0, one page a token."""
    n = tokens.numel()
    index = torch.arange(n, device=device)
    return ForwardBatch(tokens, index.int(), index, torch.tensor([0, n], dtype=torch.int32, device=device),
                        torch.zeros(1, dtype=torch.int32, device=device), index.int()[None])


def _score(draft: Eagle3Draft, logits: torch.Tensor, best: torch.Tensor) -> tuple:
    """(nats of the target's best tokens, those outside the vocabulary counting _WORST; how many are the draft's best too)."""
    vd = logits.size(1)
    ids = torch.arange(vd, device=logits.device)
    ids = ids if draft.d2t is None else ids + draft.d2t
    row_of = torch.full((max(int(ids.max()), int(best.max())) + 1,), -1, device=ids.device).index_copy_(0, ids, torch.arange(vd, device=ids.device))
    row = row_of[best]
    nats = -logits.float().log_softmax(-1).gather(1, row.clamp(min=0)[:, None])[:, 0]
    return nats.masked_fill(row < 0, _WORST).clamp(max=_WORST).cpu(), int((logits.argmax(-1) == row).sum())


def _judge(tried: list, scores: list, hits: list, n: int) -> list:
    first, second = hits[0][0] / n, hits[0][1] / n
    text = f"the draft's first choice is the target's in {100 * first:.0f} % of {n} positions, {100 * second:.0f} % one step deeper"
    found = []
    if first >= HEALTHY:
        found.append(Finding("ok", "probe", text))
    elif first >= POOR:
        found.append(Finding("note", "probe", f"{text}. 60 % and more is usual for a draft of this very target on text like its training's: "
                             "a sibling's draft, a wrong flag, or other text than it knows"))
    else:
        found.append(Finding("wrong", "probe", f"only {text}: it is wired wrongly, or is the draft of another model"))
    for v, s in zip(tried[1:], scores[1:]):
        gain = scores[0] - s
        error = float(gain.std() / max(len(gain), 2) ** 0.5)
        if float(gain.mean()) > max(CLEARLY * error, GAIN * float(scores[0].mean())):
            found.append(Finding("wrong", "wiring", f"{v.name} predicts the target better: {float(s.mean()):.2f} instead of "
                                 f"{float(scores[0].mean()):.2f} nats a token. {v.fix[0].upper() + v.fix[1:]}"))
    if len(found) == 1:
        found.append(Finding("ok", "wiring", f"none of {len(tried) - 1} other wirings of the same tensors predicts the target better"))
    return found
