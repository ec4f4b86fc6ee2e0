"""What tools around a draft need of its target, without loading the network: sizes, embedding, head, stop ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

from ..models import gguf, hf
from ..models.config import LoadError, merge_ids
from ..models.gguf_file import open_gguf
from ..models.load import resolve

_LARGE = 1 << 28  # values above which a table is read as bfloat16


@dataclass
class TargetFacts:
    """Stands in for a target model in load_draft.

    config                        {"hidden_size", "vocab_size", "num_layers"}
    embed_weight, lm_head_weight  [V, Ht] or None (a folder without weights); the same tensor when the head is tied
    eos_ids                       ids that end a generation
    path                          where it was read from
    """

    config: dict
    embed_weight: Optional[torch.Tensor] = None
    lm_head_weight: Optional[torch.Tensor] = None
    eos_ids: tuple = ()
    path: Optional[Path] = None


def read_target(path: "str | Path") -> TargetFacts:
    """Facts of the target at `path`: a Hugging Face folder of any architecture (text_config is followed), or a GGUF file.

    Tables are float32 (bfloat16 above 2^28 values). Cost: reads two tensors. Errors: LoadError, one sentence.
    """
    kind, where = resolve(path)
    if kind == "gguf":
        file = open_gguf(where)
        config = gguf.parse_config(file)
        return _with_tables(TargetFacts(_sizes(config.hidden_size, config.vocab_size, config.num_layers, where),
                                        eos_ids=config.eos_ids, path=where), gguf.GGUFSource(file, config))
    raw = hf.read_json(where / "config.json")
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    generation = hf.read_json(where / "generation_config.json", needed=False)
    facts = TargetFacts(_sizes(text.get("hidden_size"), text.get("vocab_size"), text.get("num_hidden_layers"), where),
                        eos_ids=merge_ids(text.get("eos_token_id", raw.get("eos_token_id")), generation.get("eos_token_id")),
                        path=where)
    if not any(where.glob("*.safetensors")) and not (where / "model.safetensors.index.json").exists():
        return facts
    return _with_tables(facts, hf.SafetensorsSource(where))


def _sizes(hidden, vocab, layers, where: Path) -> dict:
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "num_layers": layers}
    wrong = [f"{k} {v!r}" for k, v in sizes.items() if type(v) is not int or v < 1]
    if wrong:
        raise LoadError(f"target: the config of {where} must state hidden_size, vocab_size and the number of layers; got "
                        f"{', '.join(wrong)}. Fix: give the target model's own folder.")
    return sizes


def _with_tables(facts: TargetFacts, source) -> TargetFacts:
    shapes = source.shapes()
    for field, suffix in (("embed_weight", "embed_tokens.weight"), ("lm_head_weight", "lm_head.weight")):
        name = next((n for n in sorted(shapes, key=len) if n.endswith(suffix)), None)
        if name is not None:
            size = shapes[name]
            dtype = torch.float32 if size[0] * size[1] < _LARGE else torch.bfloat16
            setattr(facts, field, torch.empty(size, dtype=dtype))
            source.read(name, getattr(facts, field))
    if facts.lm_head_weight is None:
        facts.lm_head_weight = facts.embed_weight
    return facts
