"""Inspects a draft checkpoint without running it: what it is, what it was made for, and what is wrong with it.

A wrong draft keeps greedy output exact: only its accept length suffers. What the tensors can tell is said here.
"""

import hashlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch

from .checkpoint import load_draft, normalise_names, read_files
from .draft_config import flatten_config
from .map_health import Finding, embedding_match, head_fit, judge_head, map_health
from .target_facts import TargetFacts
from .token_coverage import coverage, special_ids

_NO_TARGET_LAYERS = 4096  # a stand-in target is as deep as any aux id needs
_HASHED = 1 << 31         # bytes of a target file up to which a recorded sha256 is compared


@dataclass
class Inspection:
    """rows: (what, value, where from) for the user; findings: sentences; data: the measured numbers, for JSON."""

    rows: list = field(default_factory=list)
    findings: list = field(default_factory=list)
    data: dict = field(default_factory=dict)

    @property
    def wrong(self) -> list:
        return [f for f in self.findings if f.level == "wrong"]

    def say(self, level: str, topic: str, text: str) -> None:
        self.findings.append(Finding(level, topic, text))

    def add(self, key: str, facts: dict, findings: list) -> None:
        self.data[key] = facts
        self.findings += findings


@dataclass
class _Files:
    """One draft folder as read: flat config keys, normalised tensors, the map's target ids (None: no readable map)."""

    path: Path
    raw: dict
    flat: dict
    tensors: dict
    ids: Optional[torch.Tensor] = None

    def integer(self, *keys: str) -> Optional[int]:
        """The first of these config keys that is a positive integer."""
        return next((self.flat[k] for k in keys if type(self.flat.get(k)) is int and self.flat[k] > 0), None)

    def rows(self, *names: str) -> Optional[int]:
        """First dimension of the first of these tensors that is there."""
        return next((self.tensors[n].size(0) for n in names if n in self.tensors and self.tensors[n].dim()), None)

    def matrix(self, name: str) -> Optional[torch.Tensor]:
        """The tensor if it is a floating-point matrix."""
        tensor = self.tensors.get(name)
        return tensor if tensor is not None and tensor.dim() == 2 and tensor.is_floating_point() else None

    @property
    def vocab_size(self) -> Optional[int]:
        """Ids of the target, as far as this draft tells."""
        return self.integer("vocab_size") or self.rows("t2d", "embed_tokens.weight")

    @property
    def aux_ids(self) -> Optional[list]:
        ids = self.flat.get("eagle_aux_hidden_state_layer_ids")
        return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def inspect_draft(path: "str | Path", target: Optional[TargetFacts] = None, tokenizer: Any = None, text: Optional[str] = None,
                  against: "str | Path | None" = None, d2t_format: str = "offset") -> Inspection:
    """Everything that files tell about the draft in folder `path`.

    target      its target (read_target): adds sizes, embedding, head; without it the draft's own config stands in
    tokenizer   the target's (models.load_tokenizer): adds stop and chat ids; with `text`: the share of its tokens inside
    against     another draft folder: are the two interchangeable?
    d2t_format  "offset", "absolute" or "identity", as load_draft reads the map

    A draft that load_draft refuses is inspected as far as its tensors go, with the refusal among the findings.
    Errors: LoadError for folders that cannot be read at all. Cost: reads the draft twice; no network is run.
    """
    out = Inspection()
    files = _read(Path(path))
    out.data |= dict(draft=str(path), tensors={k: [str(t.dtype).removeprefix("torch."), *t.shape]
                                               for k, t in sorted(files.tensors.items())})
    _load(out, files, target, d2t_format)
    _made_for(out, files, target)
    _vocabulary(out, files, target, d2t_format)
    if target is not None:
        _tables(out, files, target)
    if tokenizer is not None and files.ids is not None:
        out.add("special_ids", *special_ids(files.ids, tokenizer, target.eos_ids if target else ()))
        if text is not None:
            out.add("coverage", *coverage(files.ids, tokenizer, text))
    if against is not None:
        _against(out, files, _read(Path(against)), target, d2t_format)
    return out


def _read(path: Path) -> _Files:
    raw, stored = read_files(path)
    tensors: dict = {}
    for name, tensor in stored.items():  # one by one: names that collide are load_draft's to refuse
        tensors = normalise_names({name: tensor})[0] | tensors
    return _Files(path, raw, flatten_config(raw)[0], tensors)


# ---- loading -------------------------------------------------------------------------------------------------------------


def _load(out: Inspection, files: _Files, target: Optional[TargetFacts], d2t_format: str) -> None:
    stand_in, convention = (target, None) if target else _stand_in(files)
    fc = files.tensors.get("fc.weight")
    dtype = fc.dtype if fc is not None and fc.dtype in (torch.float16, torch.bfloat16) else torch.float32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is among the findings
            draft = load_draft(files.path, stand_in, dtype=dtype, aux_convention=convention, d2t_format=d2t_format)
    except ValueError as exc:
        out.say("wrong", "load", f"refused: {exc}")
        out.rows = _tensor_rows(files)
        return
    out.rows = draft.report()
    out.data["config"] = {k: v for k, v, _ in out.rows}
    out.say("ok", "load", "loads for this target" if target else
            "loads by its own config (add --target to compare it with its target)")
    for note in draft.config.notes:
        if "embedding is not" not in note and "not increasing" not in note:
            out.say("note", "load", note)
    if target:
        n = target.config["num_layers"]
        usual = (2, n // 2, n - 3)
        if draft.config.aux_layers != usual:
            out.say("note", "aux layers", f"before {draft.config.aux_layers}, where EAGLE's default for {n} layers is before "
                    f"{usual}: right only if it was trained so")
    if convention:
        out.say("note", "aux layers", "whether the ids mean inputs or outputs of layers cannot be told without --target")


def _stand_in(files: _Files) -> tuple:
    """(the target that the draft's own files describe, aux_convention where only the target could tell it)."""
    ids, fc = files.aux_ids, files.matrix("fc.weight")
    hidden = files.integer("hidden_size") or files.rows("norm.weight") or 1
    width = files.integer("target_hidden_size") or (hidden if fc is None else max(fc.size(1) // len(ids or "lmh"), 1))
    vocab = files.vocab_size or files.rows("lm_head.weight") or 1
    depth = _target_depth(ids)
    unknown = (ids is not None and depth is None and ids[0] != 1 and not files.flat.get("aux_convention")
               and "speculators_model_type" not in files.raw and "transformer_layer_config" not in files.raw)
    head = torch.zeros(1, 1, dtype=torch.float32, device="cpu").expand(vocab, hidden) if width == hidden else None
    facts = TargetFacts(dict(hidden_size=width, vocab_size=vocab, num_layers=depth or _NO_TARGET_LAYERS), None, head)
    return facts, "input" if unknown else None


def _target_depth(ids: Optional[list]) -> Optional[int]:
    """Layers of the target for which these ids are EAGLE's default, in either convention; None: of no target."""
    for first, last in ((2, 3), (1, 4)):
        n = ids[-1] + last if ids else 0
        if ids == [first, n // 2 - (2 - first), n - last]:
            return n
    return None


def _tensor_rows(files: _Files) -> list:
    """Rows for a draft that does not load: its tensors as they are."""
    return [(name, f"[{', '.join(map(str, t.shape))}] {str(t.dtype).removeprefix('torch.')}", "tensor")
            for name, t in sorted(files.tensors.items())]


def _made_for(out: Inspection, files: _Files, target: Optional[TargetFacts]) -> None:
    """What config and tensors tell about the draft's target."""
    record = files.raw.get("target")
    outer = files.raw.get("speculators_config")
    verifier = outer.get("verifier") if isinstance(outer, dict) else None
    name = record.get("name") if isinstance(record, dict) else record
    name = name or (verifier.get("name_or_path") if isinstance(verifier, dict) else None)
    ids, fc, hidden = files.aux_ids, files.matrix("fc.weight"), files.integer("target_hidden_size", "hidden_size")
    depth = _target_depth(ids)
    parts = [f"hidden size {hidden or 'unknown'}", f"{files.vocab_size or 'unknown'} ids"]
    if depth:
        parts.append(f"{depth} layers (aux ids {ids} are the default of that depth)")
    if fc is not None and hidden and fc.size(1) % hidden == 0:
        parts.append(f"{fc.size(1) // hidden} aux layers (fc reads {fc.size(1)} columns)")
    out.data["made_for"] = dict(name=name and str(name), hidden_size=hidden, vocab_size=files.vocab_size, num_layers=depth)
    out.say("note", "made for", f"{name or 'a target that is not recorded'}: {', '.join(parts)}")
    if target is None:
        return
    if depth and depth != target.config["num_layers"]:
        out.say("note", "made for", f"its aux ids are the default of {depth} layers; this target has "
                f"{target.config['num_layers']}")
    digest = record.get("sha256") if isinstance(record, dict) else None
    if digest and target.path is not None and target.path.is_file() and target.path.stat().st_size <= _HASHED:
        same = hashlib.sha256(target.path.read_bytes()).hexdigest() == digest
        out.data["made_for"]["target_file_matches"] = same
        out.say("ok" if same else "note", "made for", "this very target file (sha256)" if same else
                "another target file than this one (sha256 differs): another quantisation at best")


# ---- vocabulary and tables -------------------------------------------------------------------------------------------------


def _map(files: _Files, target: Optional[TargetFacts], d2t_format: str) -> tuple:
    """map_health of one draft; the head's rows, where there are any, say how many ids there should be."""
    v = files.vocab_size or (target.config["vocab_size"] if target else None) or files.rows("lm_head.weight")
    if v is None:
        return {}, [Finding("note", "vocabulary map", "config.json states no vocab_size: add --target to check the map")], None
    vd = files.rows("lm_head.weight") or files.integer("draft_vocab_size") or files.rows("d2t") or v
    return map_health(files.tensors.get("d2t"), files.tensors.get("t2d"), vd, v, d2t_format)


def _vocabulary(out: Inspection, files: _Files, target: Optional[TargetFacts], d2t_format: str) -> None:
    facts, found, files.ids = _map(files, target, d2t_format)
    out.add("vocabulary", facts, found)


def _tables(out: Inspection, files: _Files, target: TargetFacts) -> None:
    head, embed = files.matrix("lm_head.weight"), files.matrix("embed_tokens.weight")
    if head is not None and files.ids is not None and target.lm_head_weight is not None:
        fit = head_fit(head, files.ids, target.lm_head_weight)
        out.add("head", fit, judge_head(fit))
    if embed is None:
        out.say("ok", "embedding", "the target's")
    elif target.embed_weight is not None:
        out.add("embedding", *embedding_match(embed, target.embed_weight))
    if target.embed_weight is None:
        out.say("note", "target", "its folder has no weights in safetensors form: head and embedding are not compared")


# ---- two drafts ----------------------------------------------------------------------------------------------------------


def _against(out: Inspection, a: _Files, b: _Files, target: Optional[TargetFacts], d2t_format: str) -> None:
    facts, found, b.ids = _map(b, target, d2t_format)
    data = out.data["against"] = dict(draft=str(b.path), vocabulary=facts)
    bad = [f for f in found if f.level == "wrong"]
    for f in bad:
        out.say("wrong", "against", f"{b.path.name}: {f.text}")
    if a.vocab_size and b.vocab_size and a.vocab_size != b.vocab_size:
        out.say("wrong", "against", f"they are made for vocabularies of {a.vocab_size} and {b.vocab_size} ids: drafts of "
                "unrelated targets, neither can serve or start the other")
        return
    if a.ids is None or b.ids is None:
        out.say("wrong", "against", "the maps cannot be compared: one of them cannot be read")
        return
    n = min(a.ids.numel(), b.ids.numel())
    differ = a.ids[:n] != b.ids[:n]
    entries = max(a.ids.numel(), b.ids.numel())
    count = int(differ.sum()) + entries - n
    shared = int(torch.isin(a.ids.unique(), b.ids).sum())
    data |= dict(entries=entries, differ=count, shared_ids=shared)
    head_a, head_b = a.matrix("lm_head.weight"), b.matrix("lm_head.weight")
    fc_a, fc_b = a.tensors.get("fc.weight"), b.tensors.get("fc.weight")
    data["same_fc"] = fc_a is not None and fc_b is not None and torch.equal(fc_a, fc_b)
    if not count:
        out.say("ok", "against", f"both have the same map of {entries} ids: head rows mean the same tokens"
                + (", and fc is equal" if data["same_fc"] else "; fc differs (another training)"))
        return
    out.say("wrong", "against", f"{count} of {entries} d2t entries differ; both know {shared} ids")
    out.say("note", "serving", "not interchangeable: where only the other one's target is right (a wrong sibling target), this "
            "draft loads, its output stays exact, and an accept length near 1.5 or below is to be expected; one's map over the "
            "other's head is near 1.0")
    out.say("note", "fine-tuning", "head rows of one belong to other ids in the other's map: training on from them starts at "
            f"random loss. Remap first: fastverify remap {a.path} --like {b.path} --target TARGET --out DIR")
    if head_a is not None and head_b is not None and head_a.size(1) == head_b.size(1) and min(map(len, (head_a, head_b))) >= n:
        carried = int((head_a[:n][differ] == head_b[:n][differ]).all(-1).sum())
        data["rows_carried_over"] = carried
        if carried:
            out.say("wrong", "head", f"{carried} of {int(differ.sum())} head rows whose id differs are the same numbers in both: "
                    "one of the two has its head under the other's map. Remap from the one that was trained")
