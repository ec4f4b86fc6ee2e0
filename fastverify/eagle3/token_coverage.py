"""Which tokens a draft vocabulary lacks: stop ids, ids of the chat template, and those of a text."""

from collections import Counter
from typing import Any

import torch

from .map_health import Finding

USUAL, POOR = 0.99, 0.9  # shares of a text's tokens inside


def special_ids(ids: torch.Tensor, tokenizer: Any, more_stop_ids: tuple = ()) -> tuple:
    """(facts, findings): stop ids must be in the draft vocabulary ids [Vd], special ids of the chat template should be.

    tokenizer: models.tokenizer.Tokenizer. more_stop_ids: those of the target's config.
    """
    inside = set(ids.tolist())
    special = {i: t.content for i, t in tokenizer.backend.get_added_tokens_decoder().items() if t.special}
    named = lambda group: ", ".join(f"{special.get(i) or tokenizer.backend.id_to_token(i) or '?'} (id {i})" for i in group)  # noqa: E731
    stops = sorted(set(tokenizer.eos_ids) | set(more_stop_ids))
    chat = sorted(i for i, text in special.items() if text in (tokenizer.chat_template or "") and i not in stops)
    lost_stops, lost_chat = ([i for i in group if i not in inside] for group in (stops, chat))
    found = []
    if lost_stops:
        found.append(Finding("wrong", "special ids", f"outside the draft vocabulary: stop id {named(lost_stops)}: the end of a reply "
                             "can never be drafted"))
    elif stops:
        found.append(Finding("ok", "special ids", f"stop ids are inside: {named(stops)}"))
    if lost_chat:
        found.append(Finding("note", "special ids", f"outside the draft vocabulary: {named(lost_chat)} of the chat template (it "
                             "matters if the target writes them itself)"))
    return dict(stop=stops, chat=chat, stop_outside=lost_stops, chat_outside=lost_chat), found


def coverage(ids: torch.Tensor, tokenizer: Any, text: str) -> tuple:
    """(facts, findings): the share of the text's tokens inside the draft vocabulary ids [Vd], and what is missing most."""
    tokens, inside = tokenizer.encode(text), set(ids.tolist())
    lost = Counter(i for i in tokens if i not in inside)
    share = 1 - lost.total() / len(tokens) if tokens else 0.0
    most = [dict(id=i, text=tokenizer.decode([i]), count=n) for i, n in lost.most_common(5)]
    facts = dict(tokens=len(tokens), inside=len(tokens) - lost.total(), share=share, most_missing=most)
    if not tokens:
        return facts, [Finding("note", "coverage", "the text has no tokens")]
    line = f"{100 * share:.1f} % of the text's {len(tokens)} tokens are inside the draft vocabulary"
    if most:
        line += "; missing most: " + ", ".join("%r x %d" % (m["text"], m["count"]) for m in most)
    if share >= USUAL:
        return facts, [Finding("ok", "coverage", line)]
    line += ". Each missing token ends an accepted path: "
    if share >= POOR:
        return facts, [Finding("note", "coverage", line + "99 % is usual")]
    return facts, [Finding("wrong", "coverage", line + "this vocabulary is not for such text")]
