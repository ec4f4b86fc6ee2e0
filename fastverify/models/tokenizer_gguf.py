"""Byte-level BPE tokenizers out of GGUF metadata (tokenizer.ggml.*)."""

import warnings
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from .config import LoadError
from .gguf import eos_ids
from .gguf_file import open_gguf
from .tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types

# How text is cut before merging. The file only names the rule (tokenizer.ggml.pre); the rules are those of the models'
# own tokenizer.json. GPT-2: Radford et al. 2019; Llama 3 and Qwen2 add case-insensitive endings and digit groups.
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = ("gpt-2", "gpt2")
_DIGITS = ("smollm", "starcoder", "refact", "codeshell")  # every digit on its own, then GPT-2's rule
_RULES = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}


def _pre_tokenizer(pre: "str | None", file: Path):
    if pre in _RULES:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_RULES[pre]), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in (None, "default"):
        warnings.warn(f"{file.name} does not name its pre-tokenizer: text is cut as GPT-2 does, which may not be this "
                      "model's own way (digits, endings).", stacklevel=4)
    elif pre not in _GPT2:
        known = ", ".join([*_GPT2[:1], *_DIGITS, *_RULES, "default"])
        raise LoadError(f"load_tokenizer: tokenizer.ggml.pre must be one of {known}; got {pre!r}. "
                        "Fix: load the tokenizer from the model's Hugging Face folder.")
    return gpt2


def from_gguf(path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file describes; only byte-level BPE (tokenizer.ggml.model gpt2) is supported."""
    file = open_gguf(path)
    meta = {k.removeprefix("tokenizer."): v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    if meta.get("ggml.model") != "gpt2":
        raise LoadError("load_tokenizer: tokenizer.ggml.model must be gpt2 (byte-level BPE); got "
                        f"{meta.get('ggml.model')!r}. "
                        "Fix: load the tokenizer from the model's Hugging Face folder.")
    absent = [k for k in ("ggml.tokens", "ggml.merges") if not isinstance(meta.get(k), list)]
    if absent:
        raise LoadError(f"load_tokenizer: {path.name} must hold tokenizer.{absent[0]}; got no such key. "
                        "Fix: convert the model again.")
    tokens, pre = meta["ggml.tokens"], meta.get("ggml.pre")
    try:
        bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)},
                         merges=[tuple(m.split(" ", 1)) for m in meta["ggml.merges"]],
                         ignore_merges=_RULES.get(pre) is _LLAMA3)
    except Exception as exc:  # the library raises plain Exception
        raise LoadError(f"load_tokenizer: the merges of {path.name} must be made of its tokens; got {exc}. "
                        "Fix: convert the model again.") from None
    backend = Backend(bpe)
    backend.pre_tokenizer, backend.decoder = _pre_tokenizer(pre, path), decoders.ByteLevel()
    if _RULES.get(pre) is _QWEN2:
        backend.normalizer = normalizers.NFC()
    types = meta.get("ggml.token_type") or [1] * len(tokens)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True)
                                for t, kind in zip(tokens, types) if kind == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False)
                        for t, kind in zip(tokens, types) if kind == USER_DEFINED])
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[i] for name, key in ids.items()
               if (i := meta.get(f"ggml.{key}_token_id")) is not None and i < len(tokens)}
    return Tokenizer(backend, eos_ids(file.metadata), meta.get("ggml.bos_token_id"),
                     bool(meta.get("ggml.add_bos_token", False)), meta.get("chat_template"), special)
