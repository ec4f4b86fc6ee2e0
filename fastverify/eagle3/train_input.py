"""What `fastverify train` reads and chooses before it trains: prompts, the ids that every draft vocabulary keeps, its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import numpy as np

from .train_data import Prompts, Ragged, Replies

STEP = 128  # draft vocabularies are multiples of this


def read_training_prompts(files: list, tokenizer: Any, held_share: float, max_tokens: int, vocab_size: int) -> Prompts:
    """Prompts of files as token ids; a share of each file is held out (never trained on), spread over the file.

    files       JSONL (`prompt`, `turns`: the first two are used, or `token_ids` on each line), or one .npz of Prompts.save
    tokenizer   models.tokenizer.Tokenizer, or None: token_ids only. Texts go through its chat template where it has one
    max_tokens  longer prompts are left out

    Errors: ValueError, one sentence.
    """
    if [Path(f).suffix for f in files] == [".npz"]:
        return Prompts.load(str(files[0]))
    first, second, source, held, names = [], [], [], [], []
    for file in files:
        rows = [_encode(*_line(line, f"{file}, line {n}"), tokenizer, vocab_size) for n, line in _lines(file)]
        rows = [r for r in rows if 0 < len(r[0]) <= max_tokens]
        if not rows:
            raise _error("--prompts must hold prompts that fit", f"none of at most {max_tokens} tokens in {file}",
                         "check the file, or raise --row")
        every = max(round(1 / held_share), 1) if held_share > 0 else len(rows) + 1
        names.append(Path(file).stem)
        first += [r[0] for r in rows]
        second += [r[1] for r in rows]
        source += [len(names) - 1] * len(rows)
        held += [i % every == every // 2 for i in range(len(rows))]
    return Prompts(Ragged.of(first), Ragged.of(second), np.array(source, np.int16), np.array(held, bool), names)


def must_keep(tokenizer: Any, eos_ids: tuple, vocab_size: int) -> list:
    """Ids that every draft vocabulary holds: stop ids, special ids of the chat template, single ASCII characters (digits
    among them), runs of white space. Without a tokenizer: stop ids."""
    keep = set(eos_ids)
    if tokenizer is not None:
        keep |= set(tokenizer.eos_ids)
        special = tokenizer.backend.get_added_tokens_decoder()
        keep |= {i for i, t in special.items() if t.special and t.content in (tokenizer.chat_template or "")}
        for i in range(tokenizer.vocab_size):
            text = "" if i in special else tokenizer.decode([i])
            if text and len(text) <= 16 and (not text.strip() or (len(text) == 1 and ord(text) < 127)):
                keep.add(i)
    return sorted(i for i in keep if 0 <= i < vocab_size)


def vocabulary_size(r: Replies, coverage: float, vocab_size: int, must: list) -> int:
    """The smallest multiple of 128 ids, the must ids among them, that holds `coverage` of the generated tokens."""
    count = np.bincount(r.ids.flat[r.asst.flat.astype(bool)], minlength=vocab_size).astype(np.int64)
    kept = count[must].sum()
    count[must] = 0
    share = (kept + np.concatenate([[0], np.sort(count)[::-1].cumsum()])) / max(kept + count.sum(), 1)
    need = len(must) + int(np.searchsorted(share, min(coverage, 1.0) - 1e-12))
    return min(-(-max(need, 1) // STEP) * STEP, vocab_size)


def _lines(file: "str | Path"):
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "bytes that are not UTF-8"
        raise _error("--prompts must be a readable file", f"{file}: {reason}", "check the path") from None
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _line(line: str, where: str) -> tuple:
    """(texts or None, token ids or None) of one line."""
    try:
        data = json.loads(line)
    except ValueError as exc:
        raise _error("every line of --prompts must be a JSON object", f"{exc} in {where}", "mend the line") from None
    data = data if isinstance(data, dict) else {}
    ids, turns = data.get("token_ids"), data.get("turns", [data.get("prompt")])
    if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
        return None, ids
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns[:2]):
        raise _error("every line of --prompts must have `prompt` (text), `turns` (texts) or `token_ids` (integers)",
                     f"none of them in {where}", "mend the line")
    return turns[:2], None


def _encode(turns: Optional[list], ids: Optional[list], tokenizer: Any, vocab_size: int) -> tuple:
    """(ids up to the first reply, ids between the first reply and the second or [])."""
    if ids is not None:
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise _error(f"token_ids must be in [0, {vocab_size})", f"{min(ids)} to {max(ids)}", "use ids of this target")
        return ids, []
    if tokenizer is None:
        raise _error("prompts must be token_ids where the target brings no tokenizer", "texts",
                     "put tokenizer.json beside the target's config.json")
    if not tokenizer.chat_template:
        head = [tokenizer.bos_id] if tokenizer.add_bos else []
        return head + tokenizer.encode(turns[0]), []
    from .train_prompts import ChatText
    chat = ChatText(tokenizer)
    return chat.first(turns[0]), chat.second(turns[1]) if len(turns) > 1 else []


def _error(must: str, got: str, fix: str) -> ValueError:
    return ValueError(f"train: {must}; got {got}. Fix: {fix}.")
