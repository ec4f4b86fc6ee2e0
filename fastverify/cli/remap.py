"""fastverify remap: a draft's head rows under another vocabulary map, written as a new draft."""

import argparse
import json
from pathlib import Path

from .inspect import D2T_FORMATS
from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Moves an EAGLE-3 draft to another vocabulary map: every head row follows its token, rows of tokens that the draft "
            "does not know come from the target's head. Writes a new draft folder and prints kept, moved and new rows.")
    parser = commands.add_parser("remap", help="move a draft to another vocabulary map", description=text)
    parser.add_argument("draft", metavar="DRAFT", help="EAGLE-3 folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ids", metavar="FILE", help="target ids of the new vocabulary: integers in a text file, a JSON list, or "
                       "a .pt tensor; they are sorted")
    which.add_argument("--like", metavar="DRAFT2", help="the vocabulary of another draft, in its order")
    parser.add_argument("--target", metavar="PATH", help="Hugging Face folder or GGUF file: for rows of ids that DRAFT lacks")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder")
    parser.add_argument("--d2t-format", default="offset", choices=D2T_FORMATS,
                        help="how DRAFT's d2t is read; the new one holds offsets (default: offset)")
    return parser


def run(args: argparse.Namespace) -> int:
    from ..eagle3.remap import ids_like, remap_draft
    from ..eagle3.target_facts import read_target
    out = Output()
    with out.status("remapping"):
        target = read_target(args.target) if args.target else None
        vocab = target.config["vocab_size"] if target else None
        ids = ids_like(args.draft, args.like, vocab, like_format(args)) if args.like else read_ids(Path(args.ids))
        counts = remap_draft(args.draft, ids, args.out, target, args.d2t_format)
    out.line(f"{counts}")
    out.line(f"written: {args.out} ({len(ids)} ids)")
    return 0


def like_format(args: argparse.Namespace) -> str:
    """A draft remapped onto its own ids is read as DRAFT is; another one holds offsets."""
    return args.d2t_format if Path(args.like).resolve() == Path(args.draft).resolve() else "offset"


def read_ids(path: Path):
    """int64 [n], sorted, of a text file of integers, a JSON list or a .pt tensor of target ids."""
    import torch
    fix = "Fix: give target ids, separated by spaces, commas or line ends."
    try:
        if path.suffix == ".pt":
            ids = torch.load(path, map_location="cpu", weights_only=True)
            ids = torch.as_tensor(ids)
        else:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text) if text.lstrip().startswith("[") else [int(x) for x in text.replace(",", " ").split()]
            if not isinstance(values, list) or not all(type(i) is int and abs(i) < 2**62 for i in values):
                raise ValueError("values that are not integers")
            ids = torch.tensor(values, dtype=torch.int64)
    except Exception as exc:  # files, JSON, pickles: each has its own error types; all mean the same here
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc).strip().split("\n")[0][:120]
        raise ValueError(f"remap: --ids must be a file of integers; got {path}: {reason}. {fix}") from None
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"remap: --ids must be a file of integers; got {path}: {ids.dtype} {list(ids.shape)}. {fix}")
    return ids.long().sort().values
