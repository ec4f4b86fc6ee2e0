"""Moves a draft to another vocabulary map: head rows follow their target ids, so that nothing learnt is lost.

Row i of a draft's head belongs to target id i + d2t[i]. Under another map the same rows stand for other tokens: the draft
still runs, accepts next to nothing, and a fine-tune from it starts at random loss.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import torch

from ..models.hf import read_json
from .checkpoint import normalise_names, read_files, vocabulary_map
from .draft_config import flatten_config
from .target_facts import TargetFacts

_ENOUGH = 64  # known rows whose mean change is more than noise


@dataclass
class RemapCounts:
    """Rows of the new head: kept (same row), moved (another row), new (ids the draft did not know); dropped: ids given up."""

    kept: int
    moved: int
    new: int
    dropped: int
    source: str = ""    # where new rows came from
    scale: float = 1.0  # what they were multiplied by
    shifted: bool = False  # and whether the mean change of the known rows was added

    def __str__(self) -> str:
        text = f"kept {self.kept} rows, moved {self.moved}, new {self.new}"
        if self.new:
            text += f" (from {self.source}, times {self.scale:.3g}{', shifted' if self.shifted else ''})"
        return f"{text}; dropped {self.dropped}"


def error(must: str, got: str, fix: str) -> ValueError:
    return ValueError(f"remap: {must}; got {got}. Fix: {fix}.")


def target_ids(tensors: dict, vocab_size: int, draft_vocab_size: int, d2t_format: str = "offset") -> torch.Tensor:
    """int64 [Vd]: the target id of every draft id. Errors: load_draft's sentence about a map that cannot be right."""
    facts = SimpleNamespace(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, sources={}, notes=[])
    offsets = vocabulary_map(facts, tensors.get("d2t"), tensors.get("t2d"), d2t_format)
    index = torch.arange(draft_vocab_size, device="cpu")
    return index if offsets is None else index + offsets


def remap_vocab(tensors: dict, new_ids: torch.Tensor, vocab_size: int, target_head: Optional[torch.Tensor] = None,
                d2t_format: str = "offset") -> tuple:
    """(new tensors, RemapCounts) of a draft under another vocabulary map.

    tensors      {normalised name: tensor} of one draft (checkpoint.normalise_names); left as it is
    new_ids      int64 [Vd']: the target id of every new draft id, all different, any order
    vocab_size   V: ids of the target
    target_head  [V, Ht]: the target's head. New rows come from it; where its width is not the draft's, from the draft's own
                 embedding. They are scaled by one factor, rms of the draft's head over rms of the source on the ids that
                 both maps know, so that new logits have the size of the old ones; with 64 such ids or more, the mean of what
                 training added to their rows is added too (without it, untrained tokens take several per cent of the
                 probability: measured on SmolLM2)
    d2t_format   how the old d2t is read: "offset", "absolute" or "identity"

    The head keeps its dtype; d2t becomes int64 offsets, t2d bool [V]. A draft without lm_head (the target's rows are used)
    gets the maps alone. Errors: ValueError for ids out of range or repeated, for new ids without a source, and for an old
    map that cannot be right. Cost: one copy of the head.
    """
    new_ids = new_ids.long().cpu()
    if new_ids.dim() != 1 or not new_ids.numel() or int(new_ids.min()) < 0 or int(new_ids.max()) >= vocab_size:
        got = f"{new_ids.numel()} ids" + (f" from {int(new_ids.min())} to {int(new_ids.max())}" if new_ids.numel() else "")
        raise error(f"the new map must hold ids in [0, {vocab_size})", got, "use ids of this draft's target")
    if new_ids.unique().numel() != new_ids.numel():
        raise error("the new map must hold every id once", f"{new_ids.numel() - new_ids.unique().numel()} repeated",
                    "remove the repeats")
    head, embed = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    size = next((tensors[k].size(0) for k in ("lm_head.weight", "d2t") if k in tensors), vocab_size)
    old_ids = target_ids(tensors, vocab_size, size, d2t_format)
    row_of = torch.full((vocab_size,), -1, device="cpu").index_copy_(0, old_ids, torch.arange(size, device="cpu"))
    rows = row_of[new_ids]  # the old row of every new one, -1: none
    known = rows >= 0
    same = known & (rows == torch.arange(len(rows), device="cpu"))
    counts = RemapCounts(int(same.sum()), int((known & ~same).sum()), int((~known).sum()), size - int(known.sum()))
    out = dict(tensors)
    if head is not None:
        new_head = head[rows.clamp(min=0)]
        if counts.new:
            source, counts.source = _source(head, embed, target_head, counts.new)
            trained, plain = (head[rows[known]], source[new_ids[known]]) if known.any() else (head, source[old_ids])
            counts.scale, counts.shifted = _rms(trained) / max(_rms(plain), 1e-30), int(known.sum()) >= _ENOUGH
            shift = trained.float().mean(0) - counts.scale * plain.float().mean(0) if counts.shifted else 0.0
            new_head[~known] = (source[new_ids[~known]].float() * counts.scale + shift).to(head.dtype)
        out["lm_head.weight"] = new_head
    elif counts.new:
        counts.source = "the target's head, which this draft uses"
    out["d2t"] = new_ids - torch.arange(len(new_ids), device="cpu")
    out["t2d"] = torch.zeros(vocab_size, dtype=torch.bool, device="cpu").index_fill_(0, new_ids, True)
    return out, counts


def remap_draft(path: "str | Path", new_ids: torch.Tensor, out: "str | Path", target: Optional[TargetFacts] = None,
                d2t_format: str = "offset") -> RemapCounts:
    """remap_vocab on a draft folder: writes config.json and model.safetensors to `out`, a new or empty folder.

    Tensor names stay as stored; config.json changes in draft_vocab_size alone. Errors: ValueError, one sentence.
    """
    from safetensors.torch import save_file
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise error("the output must be a new or empty folder", str(out), "choose another one")
    raw, stored = read_files(Path(path))
    stored_name = {next(iter(normalise_names({name: t})[0]), name): name for name, t in stored.items()}
    flat = flatten_config(raw)[0]
    vocab = flat.get("vocab_size") or (target.config["vocab_size"] if target else None)
    if type(vocab) is not int:
        raise error("config.json must state vocab_size when no target is given", repr(vocab), "add --target")
    if target and not vocab <= target.config["vocab_size"] < vocab + 1024:
        raise error(f"the draft's vocab_size must be the target's {target.config['vocab_size']}", str(vocab),
                    "use the draft's own target")
    tensors, counts = remap_vocab(normalise_names(stored)[0], new_ids, vocab, target.lm_head_weight if target else None,
                                  d2t_format)
    ignored = {name: t for name, t in stored.items() if not normalise_names({name: t})[0]}
    tensors = {stored_name.get(name, name): t for name, t in tensors.items()} | ignored
    tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    for level in (raw, raw.get("eagle_config"), raw.get("transformer_layer_config")):
        if isinstance(level, dict) and (level is raw or "draft_vocab_size" in level):
            level["draft_vocab_size"] = len(new_ids)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return counts


def ids_like(draft: "str | Path", like: "str | Path", vocab_size: Optional[int] = None,
             d2t_format: str = "offset") -> torch.Tensor:
    """int64 [Vd']: the target ids of the map of `like`, a draft folder, for remapping `draft`.

    vocab_size: where config.json does not state it. d2t_format: of `like`. Errors: ValueError, one sentence.
    """
    own = flatten_config(read_json(Path(draft) / "config.json"))[0].get("vocab_size") or vocab_size
    raw, stored = read_files(Path(like))
    vocab, tensors = flatten_config(raw)[0].get("vocab_size") or vocab_size, normalise_names(stored)[0]
    if type(vocab) is not int or vocab != own:
        raise error("both drafts must be made for one vocabulary", f"{own} and {vocab} ids", "use drafts of sibling targets")
    size = next((tensors[k].size(0) for k in ("d2t", "lm_head.weight") if k in tensors), vocab)
    return target_ids(tensors, vocab, size, d2t_format)


def _source(head: torch.Tensor, embed: Optional[torch.Tensor], target_head: Optional[torch.Tensor], new: int) -> tuple:
    """(table whose rows replace missing head rows, its name)."""
    for table, name in ((target_head, "the target's head"), (embed, "the draft's own embedding")):
        if table is not None and table.size(1) == head.size(1):
            return table, name
    widths = "no target" if target_head is None else f"a target of width {target_head.size(1)}"
    raise error(f"{new} ids that the draft does not know must come from a target head of width {head.size(1)}",
                f"{widths} and {'no' if embed is None else 'another'} embedding in the draft",
                "add --target with the draft's own target (with its weights)")


def _rms(x: torch.Tensor) -> float:
    return float(x.float().pow(2).mean().sqrt())
