"""Models, tokenizer and device of one command, loaded as the arguments say."""

import argparse
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch

from .. import _ops
from ..eagle3.checkpoint import load_draft
from ..eagle3.decode import Decoder
from ..eagle3.graph_decode import GraphDecoder
from ..eagle3.shapes import parse_shape
from ..models.demo import SHIPPED_DRAFT, demo_target_path
from ..models.hf import read_json
from ..models.load import load_target, load_tokenizer
from ..tree.ngram import NgramDrafter
from .output import Output
from .ranks import local_device

STEP_OPS = ("probe", "draft_topk", "grow_tree", "build_tree", "prepare_tree", "rope_append", "tree_attention", "verify_tree",
            "compact_kv")


@dataclass
class Session:
    """target, draft (Eagle3Draft, NgramDrafter or None) and tokenizer (None when the prompt is token ids)."""

    target: Any
    draft: Any
    tokenizer: Any
    target_name: str
    draft_name: str
    device: torch.device
    notes: list
    exact: bool = False
    coupled: bool = True
    hook: Any = None  # of a dummy: its imposed acceptance

    def decoder(self, tree: str) -> Decoder:
        """A decoder for one shape name; an n-gram drafter drafts as many nodes as the shape holds."""
        draft = self.draft
        if isinstance(draft, NgramDrafter) and tree not in ("auto", "off"):
            matches = 1 if tree.startswith("chain") else 4
            draft = NgramDrafter(num_draft=parse_shape(tree).nodes - 1, num_matches=matches)
        captured = self.device.type == "cuda" and self.target.comm is None and _ops.has_kernel("next_inputs", "cuda")
        if (captured or self.exact or self.hook) and not isinstance(draft, NgramDrafter):
            return GraphDecoder(self.target, draft, tree=tree, exact=self.exact, coupled=self.coupled, hook=self.hook)
        if self.exact:
            raise ValueError("exact: the drafter must be an EAGLE-3 draft or none; got n-gram lookup. Fix: leave --exact out.")
        return Decoder(self.target, draft, tree=tree, coupled=self.coupled)

    def with_draft(self, given: Optional[str]) -> "Session":
        """The same target with another drafter (PATH, "ngram", "none", or None: the shipped one where it fits)."""
        draft, name = _draft(given, self.target, self.target.dtype, self.device, self.notes)
        return replace(self, draft=draft, draft_name=name)

    def encode(self, command: str, prompt: str, system: Optional[str] = None, raw: bool = False) -> list:
        """Token ids of one prompt, in the model's chat format unless raw."""
        if raw:
            ids = self.tokenizer.encode(prompt)
            return [self.tokenizer.bos_id] + ids if self.tokenizer.add_bos else ids
        if not self.tokenizer.chat_template:
            raise ValueError(f"{command}: the model must have a chat template; got one without. Fix: add --raw.")
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])

    def room(self, decoder: Decoder) -> int:
        """Positions for prompt and new tokens together that a run of `decoder` has."""
        limit = self.target.config.max_position
        if decoder.eagle:
            limit = min(limit, decoder.draft.cos_sin.shape[0])
        return limit - max(shape.columns for shape in decoder.shapes) - 1


def open_session(command: str, args: argparse.Namespace, out: Output, with_tokenizer: bool = True,
                 drafts: bool = True) -> Session:
    """Loads what --target, --draft, --device, --dtype and --threads name. drafts False: no drafter (plain decoding)."""
    if args.threads:
        torch.set_num_threads(args.threads)
    notes: list = []
    device = local_device(_device(command, args.device, notes))
    dtype = getattr(torch, args.dtype)
    if getattr(args, "dummy", None):
        return _dummy(command, args, out, device, dtype, notes, with_tokenizer, drafts)
    path = _target_path(command, args.target)
    with out.status("loading the models"):
        tokenizer = load_tokenizer(path) if with_tokenizer else None
        target = load_target(path, dtype, device)
        _weights(target, args, notes)
        draft, name = _draft(args.draft, target, dtype, device, notes) if drafts else (None, "none")
    return Session(target, draft, tokenizer, str(path), name, device, notes, getattr(args, "exact", False),
                   getattr(args, "coupled", "auto") == "auto")


def _weights(target, args: argparse.Namespace, notes: list) -> None:
    if getattr(args, "weights", "same") == "fp8":
        from ..models.fp8 import to_fp8
        to_fp8(target)
        notes.append("weights: the target's matrices are rounded to float8, so its text is not the unrounded model's")


def _dummy(command: str, args: argparse.Namespace, out: Output, device: torch.device, dtype: torch.dtype, notes: list,
           with_tokenizer: bool, drafts: bool) -> Session:
    """A session of random weights; its name and its notes say so."""
    from ..models.dummy import ImposedAcceptance, dummy_draft, dummy_target, label
    if with_tokenizer:
        raise ValueError(f"{command}: --dummy must have token ids, it knows no words; got text. Fix: pass --token-ids, or prompts with "
                         "token_ids.")
    rate = 0.6 if args.acceptance is None else args.acceptance
    with out.status("making random weights"):
        target = dummy_target(args.dummy, dtype, device)
        draft = dummy_draft(target) if drafts else None
        _weights(target, args, notes)
    name = label(args.dummy, rate if drafts else None)
    notes.append(f"{name}: times only, the text means nothing")
    return Session(target, draft, None, name, name if drafts else "none", device, notes, args.exact, args.coupled == "auto",
                   ImposedAcceptance(rate) if drafts else None)


def _target_path(command: str, given: Optional[str]) -> Path:
    path = Path(given) if given else demo_target_path()
    asked = os.environ.get("FASTVERIFY_DEMO_TARGET")
    if path is None and asked:
        raise ValueError(f"{command}: FASTVERIFY_DEMO_TARGET must name the demo model's file; got {asked}, which is no file. "
                         "Fix: unset it (the model is then where `fastverify fetch-demo` puts it), or name the file.")
    if path is None:
        raise ValueError(f"{command}: the demo model must be on this machine; got none. Fix: run `fastverify fetch-demo` "
                         "(or pass --target PATH).")
    return path


def _draft(given: Optional[str], target, dtype: torch.dtype, device: torch.device, notes: list) -> tuple:
    """(drafter, its name)."""
    if given == "none":
        return None, "none"
    if given == "ngram":
        return NgramDrafter(), "ngram"
    if given is None:
        why = _does_not_fit(target.config)
        if why:
            notes.append(f"draft: {why}: using n-gram lookup (--draft PATH names an EAGLE-3 draft)")
            return NgramDrafter(), "ngram"
        given = str(SHIPPED_DRAFT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draft = load_draft(given, target, dtype=dtype, device=device)
    notes += [str(w.message) for w in caught]
    return draft, given


def _does_not_fit(config) -> str:
    """Why the shipped draft is not this target's, or ""."""
    if not (SHIPPED_DRAFT / "config.json").is_file():
        return "no EAGLE-3 draft is shipped with this install"
    draft = read_json(SHIPPED_DRAFT / "config.json")
    sizes = draft.get("target_hidden_size", draft.get("hidden_size")), draft.get("vocab_size")
    if sizes != (config.hidden_size, config.vocab_size):
        return "the shipped EAGLE-3 draft was trained for another model"
    return ""


def _device(command: str, asked: str, notes: list) -> torch.device:
    """The device to run on; "auto" leaves a line in notes when it is not the GPU."""
    missing = [] if not torch.cuda.is_available() else [op for op in STEP_OPS if not _ops.has_kernel(op, "cuda")]
    if not torch.cuda.is_available():
        why = "torch sees no CUDA GPU"
    elif missing:
        why = f"no CUDA or Triton kernel of {', '.join(missing)} in this install"
    else:
        why = ""
    if asked == "cuda" and why:
        raise ValueError(f"{command}: --device cuda must find a GPU and a CUDA or Triton kernel of every op of the step; got: {why}. "
                         "Fix: use --device auto.")
    if asked == "auto" and why:
        notes.append(f"device: the CPU ({why})")
    return torch.device("cpu" if asked == "cpu" or why else "cuda")
