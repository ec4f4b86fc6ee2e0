"""Prompt files: one JSON object a line, with `prompt` (text), `turns` (texts; the first one is used) or `token_ids`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

OWN = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"


@dataclass
class Prompt:
    id: str
    category: str
    text: str
    token_ids: Optional[list] = None  # instead of a text


def read_prompts(path: "str | Path", command: str = "evaluate") -> list:
    """Prompts of a file. `id` or `question_id` names one (default: its line), `category` is optional. Errors: ValueError."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "bytes that are not UTF-8"
        raise ValueError(f"{command}: prompts must be a readable file; got {path}: {reason}. Fix: check the path.") from None
    out = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            out.append(_prompt(line, f"{path}, line {number}", str(number), command))
    if not out:
        raise ValueError(f"{command}: prompts must hold at least one line; got none in {path}. Fix: check the file.")
    return out


def read_sets(files: "list | None", limit: Optional[int] = None, by_category: bool = False) -> dict:
    """{file stem, or stem/category: its prompts}; files None: our own. limit: prompts of each of these sets."""
    sets: dict = {}
    for file in files or [OWN]:
        stem, prompts = Path(file).stem, read_prompts(file)
        if any(name.split("/")[0] == stem for name in sets):
            raise ValueError(f"evaluate: prompt files must have different names; got {stem} twice. Fix: rename one.")
        for p in prompts:
            sets.setdefault(f"{stem}/{p.category or '-'}" if by_category else stem, []).append(p)
    return {name: prompts[:limit] for name, prompts in sets.items()}


def halves(prompts: list) -> tuple:
    """Two lists of prompts, as even in size and categories as can be; the categories take turns, so that the first prompts
    of a list hold all of them."""
    groups: dict = {}
    for p in prompts:
        groups.setdefault(p.category, []).append(p)
    first, second = [], []
    for k in range(0, max(map(len, groups.values()), default=0), 2):
        for group in groups.values():
            for p in group[k:k + 2]:
                (first if len(first) <= len(second) else second).append(p)
    return first, second


def need_tokenizer(sets: dict) -> bool:
    """Whether any prompt is text."""
    return any(p.token_ids is None for prompts in sets.values() for p in prompts)


def _prompt(line: str, where: str, number: str, command: str) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as exc:
        raise ValueError(f"{command}: every line of a prompt file must be a JSON object; got {exc} in {where}. "
                         "Fix: mend the line.") from None
    data = data if isinstance(data, dict) else {}
    turns, ids = data.get("turns"), data.get("token_ids")
    text = data.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    good_ids = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
    if not good_ids and not (isinstance(text, str) and text.strip()):
        raise ValueError(f"{command}: every line of a prompt file must have `prompt` (text), `turns` (texts) or `token_ids` "
                         f"(integers); got none of them in {where}. Fix: mend the line.")
    return Prompt(str(data.get("id", data.get("question_id", number))), str(data.get("category") or ""), text or "",
                  ids if good_ids else None)
