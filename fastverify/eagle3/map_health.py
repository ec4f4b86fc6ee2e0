"""Measures and judges a draft's vocabulary map, head and embedding from tensors alone. Every judgement is one sentence."""

from dataclasses import asdict, dataclass
from typing import Optional

import torch

HEAD_SAMPLE = 1024
FITS, DOUBTFUL = 0.9, 0.7  # share of head rows nearer to their own id's row; chance is 0.5, related tokens give up to 0.66
STRETCHES, SHIFTS, STRANGERS = 8, 4, 0.01


@dataclass
class Finding:
    """One sentence of the verdict. level: "ok", "note" (worth knowing) or "wrong"."""

    level: str
    topic: str
    text: str

    def as_dict(self) -> dict:
        return asdict(self)


def map_health(d2t: Optional[torch.Tensor], t2d: Optional[torch.Tensor], draft_vocab_size: int, vocab_size: int,
               d2t_format: str = "offset") -> tuple:
    """(facts dict, findings, target ids int64 [Vd] or None where no map can be read).

    d2t int [Vd] or None, t2d bool or int [V] or None. Never raises for values; ids may be out of range or repeated, and then
    a finding says so.
    """
    v, vd = vocab_size, draft_vocab_size
    facts = dict(draft_vocab_size=vd, vocab_size=v, d2t=d2t is not None, t2d=t2d is not None)
    say = lambda level, text: Finding(level, "vocabulary map", text)  # noqa: E731
    if d2t is None and d2t_format != "identity":
        if vd != v:
            return facts, [say("wrong", f"no d2t for {vd} draft ids of {v}: the draft cannot be served without its map")], None
        return facts, [say("ok", "no map: draft ids are target ids")], torch.arange(vd, device="cpu")
    if d2t is not None and (d2t.dim() != 1 or d2t.is_floating_point() or not d2t.numel()):
        return facts, [say("wrong", f"d2t must be a list of integers; it is {d2t.dtype} {list(d2t.shape)}")], None
    raw = d2t.cpu().long() if d2t is not None else torch.zeros(vd, dtype=torch.int64, device="cpu")
    index = torch.arange(raw.numel(), device="cpu")
    ids = index if d2t_format == "identity" else raw if d2t_format == "absolute" else index + raw
    outside = int(((ids < 0) | (ids >= v)).sum())
    repeated = ids.numel() - ids.unique().numel()
    increasing = bool((ids[1:] > ids[:-1]).all())
    rising = raw.numel() > 1 and bool((raw[1:] > raw[:-1]).all()) and 0 <= int(raw[0]) and int(raw[-1]) < v
    facts |= dict(entries=ids.numel(), lowest=int(ids.min()), highest=int(ids.max()), out_of_range=outside, repeated=repeated,
                  increasing=increasing)
    found = []
    if ids.numel() != vd:
        found.append(say("wrong", f"d2t has {ids.numel()} entries for {vd} head rows"))
    marks = None if t2d is None else t2d.cpu().flatten().bool()
    inside = ids[(ids >= 0) & (ids < v)]
    agrees = None
    if marks is not None:
        both = int(marks[inside[inside < marks.numel()]].sum())
        agrees = int(marks.sum()) == ids.numel() == both
        facts |= dict(t2d_marked=int(marks.sum()), t2d_in_d2t=both, t2d_agrees=agrees)
    if d2t_format == "offset" and rising and not agrees:
        found.append(say("wrong", f"d2t looks absolute (it rises at every entry, from {int(raw[0])} to {int(raw[-1])}): offsets "
                         "are meant (target id = i + d2t[i]); read it with --d2t-format absolute, or repair it with "
                         "fastverify remap --d2t-format absolute"))
    if d2t_format == "offset" and vd < v and not raw.any() and not agrees:
        found.append(say("wrong", f"d2t is all zeros: it names the first {vd} ids, which is hardly the trained map; if it is, "
                         "use --d2t-format identity"))
    if outside:
        first = int(((ids < 0) | (ids >= v)).nonzero()[0])
        found.append(say("wrong", f"{outside} of {ids.numel()} entries map outside [0, {v}), the first is draft id {first} to "
                         f"{int(ids[first])}: they can never be accepted"))
    if repeated:
        found.append(say("wrong", f"{repeated} of {ids.numel()} entries repeat an id that another entry has: head rows compete "
                         "for one token, and other tokens are lost"))
    if agrees is False:
        found.append(say("wrong", f"t2d marks {facts['t2d_marked']} ids, {facts['t2d_in_d2t']} of them in d2t's {ids.numel()}: "
                         "d2t and t2d are of two drafts"))
    if not found:
        marked = {None: "no t2d to compare", True: "t2d agrees"}[agrees]
        order = "increasing" if increasing else "in no order"
        found.append(say("ok", f"{ids.numel()} different ids from {facts['lowest']} to {facts['highest']} of {v}, {order}; "
                         f"{marked}"))
        if not increasing:
            found.append(say("note", "d2t is not increasing: unusual for a map sorted by id"))
    return facts, found, ids


def head_fit(head: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> dict:
    """Do head rows [Vd, H] belong to the target ids [Vd] that the map gives them? table [V, Ht]: the target's head.

    Two shares over up to HEAD_SAMPLE random rows, 0.5 being chance (0.66 where a wrong map gives related tokens): "direct" (equal
    widths), rows nearer in cosine to their own id's row than to another row's; "structure", the same for each row's similarities to
    other rows, which needs no common basis: a head trained from random weights shows it too. Also n, the mean cosine of "direct",
    and of the larger share: "strangers", the rows nearer to most other rows than to their own; "stretches", [first draft id, last, share]
    of STRETCHES equal parts of the map; and where some are low, "shift", [s, share there, first, last]: target ids + s fit best there.
    """
    valid = ((ids >= 0) & (ids < table.size(0)) & (torch.arange(ids.numel(), device="cpu") < head.size(0))).nonzero()[:, 0]
    pick = valid[torch.randperm(valid.numel(), device="cpu", generator=torch.Generator().manual_seed(0))[:HEAD_SAMPLE]]
    out = dict(n=pick.numel())
    if pick.numel() < 64:
        return out
    kinds = _fits(head[pick], table[ids[pick]])
    if "cosine" in kinds:
        out["cosine"] = kinds.pop("cosine")
    out |= {kind: float(share.mean()) for kind, share in kinds.items()}
    kind = max(kinds, key=lambda k: out[k])
    rows = kinds[kind]
    out["strangers"] = float((rows < 0.5).float().mean())
    draft_ids = pick[:rows.numel()]
    part, edge = draft_ids * STRETCHES // head.size(0), [-(-i * head.size(0) // STRETCHES) for i in range(STRETCHES + 1)]
    out["stretches"] = [[edge[i], edge[i + 1] - 1, float(rows[part == i].mean())] for i in range(STRETCHES) if (part == i).sum() >= 16]
    low = [x for x in out["stretches"] if x[2] < FITS]
    if low:
        there = sum((pick >= first) & (pick <= last) for first, last, _ in low).bool()
        shifts = [s for d in range(1, SHIFTS + 1) for s in (d, -d)]
        fits = [_fits(head[pick], table[(ids[pick] + s * there).clamp(0, table.size(0) - 1)])[kind][there[:rows.numel()]].mean() for s in shifts]
        best = max(range(len(shifts)), key=fits.__getitem__)
        out["shift"] = [shifts[best], float(fits[best]), low[0][0], low[-1][1]]
    return out


def _fits(a: torch.Tensor, b: torch.Tensor) -> dict:
    """Per row i, the share of other rows to which a[i] is less near than to b[i]: {"direct" [n], "structure" [n / 2], "cosine"}."""
    unit = lambda x: torch.nn.functional.normalize(x.float() - x.float().mean(0), dim=-1)  # noqa: E731
    a, b = unit(a), unit(b)
    half = a.size(0) // 2
    out = dict(structure=_nearer(unit(a[:half] @ a[half:].T), unit(b[:half] @ b[half:].T)))
    if a.size(1) == b.size(1):
        out |= dict(direct=_nearer(a, b), cosine=float((a * b).sum(-1).mean()))
    return out


def _nearer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Share of other rows, per row, where a[i] is nearer to b[i] than to b[other]; 16 others a row. a, b unit rows."""
    own = (a * b).sum(-1)
    return torch.stack([own > (a * b.roll(s, 0)).sum(-1) for s in range(1, 17)]).float().mean(0)


def judge_head(fit: dict) -> list:
    """Findings of head_fit's facts; none for too few rows."""
    if "structure" not in fit:
        return []
    share = max(fit.get("direct", 0.0), fit["structure"])
    text = f"{100 * share:.0f} % of its rows are nearer to their own id's row of the target's head than to another's (chance: 50 %)"
    low = [x for x in fit["stretches"] if x[2] < FITS]
    shifted = ""
    if low:
        s, better, first, last = fit["shift"]
        if better >= max(FITS, max(x[2] for x in low) + 0.1):
            shifted = (f" From draft id {first} to {last} the map is off by {-s:+d}: with target ids {s:+d}, {100 * better:.0f} % of the rows "
                       "there are.")
    if share < DOUBTFUL:
        return [Finding("wrong", "head", f"only {text}: the head does not belong to this vocabulary map.{shifted} Expect an accept length "
                        "near 1, and random loss when it is trained on: find the map it was trained with, or move it with fastverify remap")]
    if shifted:
        return [Finding("wrong", "head", f"{text}.{shifted} The tokens of those rows are never accepted: find the map that the head was "
                        "trained with")]
    if any(x[2] < DOUBTFUL for x in low):
        where = ", ".join(f"{first} to {last} ({100 * s:.0f} %)" for first, last, s in low if s < DOUBTFUL)
        return [Finding("note", "head", f"{text}, but few of draft ids {where}: these may belong to another map, or are hardly trained")]
    if share < FITS:
        return [Finding("note", "head", f"only {text}: part of it may belong to another map")]
    if fit["strangers"] > STRANGERS:
        return [Finding("note", "head", f"{text}, but {100 * fit['strangers']:.0f} % of the rows are nearer to most others: these may belong to "
                        "other ids, or are hardly trained")]
    return [Finding("ok", "head", text)]


def embedding_match(own: torch.Tensor, target: torch.Tensor) -> tuple:
    """(facts, findings) of the draft's own table [V, H] against the target's [V', Ht]."""
    if own.size(1) != target.size(1):
        return {}, [Finding("note", "embedding", f"the draft's own, of width {own.size(1)}: the target's has {target.size(1)}, so "
                            "they cannot be compared")]
    n = min(own.size(0), target.size(0))
    pick = torch.randperm(n, device="cpu", generator=torch.Generator().manual_seed(0))[:4096]
    a, b = own[pick].float(), target[pick].float()
    dead = (a.norm(dim=-1) == 0) & (b.norm(dim=-1) == 0)  # padding rows
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)[~dead]
    mean, low = float(cosine.mean()), float(cosine.min())
    facts = dict(rows=n, compared=pick.numel(), mean_cosine=mean, lowest_cosine=low)
    if mean >= 0.999:
        return facts, [Finding("ok", "embedding", f"the draft's own equals the target's (mean cosine {mean:.4f} over "
                               f"{pick.numel()} rows)")]
    return facts, [Finding("wrong", "embedding", f"the draft's embedding is not this target's (mean cosine {mean:.3f} over "
                           f"{pick.numel()} rows): it is the draft of another model, or its table was never filled in")]
