"""fastverify inspect: what a draft checkpoint is, what it was made for, and what is wrong with it."""

import argparse
from pathlib import Path

from .output import Output, plain_table

D2T_FORMATS = ("offset", "absolute", "identity")
STYLES = {"ok": "green", "note": "", "wrong": "bold red"}


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Reads an EAGLE-3 draft and says what it is, what it was made for, and whether its vocabulary map, head and "
            "embedding are sound; with --probe also how well it predicts its target, wired as its config says and otherwise. Exit code 0: healthy, 1: something is wrong, 2: it cannot be read.")
    parser = commands.add_parser("inspect", help="what a draft is and what is wrong with it", description=text)
    parser.add_argument("draft", metavar="DRAFT", help="EAGLE-3 folder")
    parser.add_argument("--target", metavar="PATH", help="its target, a Hugging Face folder or GGUF file: compares sizes, "
                        "embedding, head, stop ids")
    parser.add_argument("--against", metavar="DRAFT2", help="another draft: exit code 1 when the two maps differ")
    parser.add_argument("--text", metavar="FILE", help="share of its tokens inside the draft vocabulary (needs --target)")
    parser.add_argument("--probe", action="store_true", help="run it on the target's own texts (seconds for small targets; needs --target): "
                        "names a wrong norm flag, aux layers off by one, swapped input halves")
    parser.add_argument("--d2t-format", default="offset", choices=D2T_FORMATS, help="how d2t is read (default: offset)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.text and not args.target:
        raise ValueError("inspect: --text must go with --target, whose tokenizer splits it; got no --target. Fix: add it.")
    if args.probe and not args.target:
        raise ValueError("inspect: --probe must go with --target, on whose texts it runs; got no --target. Fix: add it.")
    text = read_text(args.text) if args.text else None
    from ..eagle3.inspection import inspect_draft
    from ..eagle3.target_facts import read_target
    from ..models.load import load_tokenizer
    out = Output(json_only=args.json)
    with out.status("reading"):
        target = read_target(args.target) if args.target else None
        tokenizer, why = None, ""
        if args.target:
            try:
                tokenizer = load_tokenizer(args.target)
            except ValueError as exc:
                if args.text:
                    raise
                why = str(exc)
        result = inspect_draft(args.draft, target, tokenizer, text, args.against, args.d2t_format)
        if args.probe:
            probe(result, args, tokenizer)
    if why:
        result.say("note", "special ids", f"not checked: {why}")
    if args.json:
        out.json(dict(healthy=not result.wrong, findings=[f.as_dict() for f in result.findings],
                      rows=[dict(zip(("what", "value", "source"), row)) for row in result.rows], **result.data))
        return 1 if result.wrong else 0
    out.line(f"draft {args.draft}", style="bold")
    for row in plain_table(["", "value", "from"], [list(row) for row in result.rows], left=3):
        out.line(row)
    out.line()
    for f in result.findings:
        out.line(f"{f.level.upper() if f.level == 'wrong' else f.level:5}  {f.topic}: {f.text}", style=STYLES[f.level])
    count = len(result.wrong)
    out.line(f"{count} thing{'s are' if count > 1 else ' is'} wrong" if count else "healthy",
             style="bold red" if count else "bold green")
    return 1 if count else 0


def probe(result, args: argparse.Namespace, tokenizer) -> None:
    """Adds the findings of wiring_probe, on the shipped prompts or (without a tokenizer) on random ids."""
    import torch
    from ..eagle3.checkpoint import load_draft
    from ..eagle3.wiring_probe import probe_wiring
    from ..models.load import load_target
    from .prompts import read_prompts, OWN
    if any(f.topic == "load" and f.level == "wrong" for f in result.findings):
        result.say("note", "probe", "not run: the draft does not load")
        return
    gpu = torch.cuda.is_available()
    kind = dict(device="cuda" if gpu else "cpu", dtype=torch.bfloat16 if gpu else torch.float32)
    model = load_target(args.target, **kind)
    draft = load_draft(args.draft, model, d2t_format=args.d2t_format, **kind)
    if tokenizer is not None and tokenizer.chat_template:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": p.text}]) for p in read_prompts(OWN, "inspect")[::4]]
    else:
        rng = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, min(model.config.vocab_size, draft.config.vocab_size), (8, 6), generator=rng).tolist()
    result.add("probe", *probe_wiring(model, draft, prompts))


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "bytes that are not UTF-8"
        raise ValueError(f"inspect: --text must be a readable text file; got {path}: {reason}. Fix: check the path.") from None
