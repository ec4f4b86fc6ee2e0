"""Tokenizers of Hugging Face folders and GGUF files behind one small class, and decoding of a token stream."""

import codecs
from pathlib import Path
from typing import Iterable, Optional

import tokenizers
from tokenizers import decoders

from . import chat
from .config import LoadError, merge_ids
from .hf import read_json


def _byte_alphabet() -> dict:
    """{character: byte} of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest for U+0100 upwards."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Text <-> token ids of one model.

    bos_id          id that starts a text, or None; add_bos: whether raw (not chat) text should start with it
    eos_ids         ids that end a generation
    chat_template   jinja source, or None
    vocab_size      number of tokens (a model's logits may be wider)
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: tuple = (), bos_id: Optional[int] = None,
                 add_bos: bool = False, chat_template: Optional[str] = None, special_tokens: Optional[dict] = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.eos_ids, self.bos_id, self.add_bos = backend, tuple(eos_ids), bos_id, add_bos
        self.chat_template, self._special = chat_template, special_tokens or {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list:
        """Ids of `text`; nothing is put before or after it. Names of special tokens in the text become their ids. ValueError for text
        with surrogates, as Python has it of bytes that are not UTF-8."""
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError("encode: the text must be Unicode; got bytes that are not UTF-8. Fix: write it in UTF-8 (under LANG=C set PYTHONUTF8=1).")
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable, skip_special_tokens: bool = False) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A decoder for ids that arrive one after the other."""
        return StreamDecoder(self, skip_special_tokens)

    def apply_chat_template(self, messages: list, add_generation_prompt: bool = True, **variables) -> list:
        """Ids of a conversation [{"role": "user", "content": "..."}, ...] in the model's own format.

        add_generation_prompt: end with the opening of the assistant's reply. variables: extra template variables.
        Errors: LoadError when the model has no template or the template refuses the messages.
        """
        if not self.chat_template:
            raise LoadError("apply_chat_template: the tokenizer must have a chat template; got one without. "
                            "Fix: use an instruct model, or encode plain text.")
        return self.encode(chat.render(self.chat_template, messages, add_generation_prompt, **self._special, **variables))


class StreamDecoder:
    """Turns ids that arrive in pieces into text that is never torn inside a character.

    push() returns the text that became complete, often "" in the middle of a multi-byte character; finish() returns what is
    left (U+FFFD for an unfinished character). Together they give Tokenizer.decode of all ids. Byte-level tokenizers cost
    O(1) per token; others (SentencePiece with byte fallback) are decoded over a window that grows until a character is
    complete, and a run of byte tokens that turns out not to be UTF-8 may have been shown up to the break.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._byte_level = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        self._special = {i for i, t in tokenizer.backend.get_added_tokens_decoder().items() if t.special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window, self._shown = [], 0  # ids, of which the first `_shown` are out

    def push(self, ids: "int | Iterable") -> str:
        """Adds one id or several; returns the newly completed text."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        if self._skip:
            ids = [i for i in ids if i not in self._special]
        if self._byte_level:
            return self._utf8.decode(b"".join(map(self._bytes, ids)))
        self._window += ids
        return self._release(final=False)

    def finish(self) -> str:
        """The rest of the text; the decoder can be used again afterwards."""
        rest = self._utf8.decode(b"", final=True) if self._byte_level else self._release(final=True)
        self._utf8.reset()
        self._window, self._shown = [], 0
        return rest

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[c] for c in token)
        except KeyError:  # an added token is spelt in plain characters
            return token.encode("utf-8")

    def _release(self, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._shown])
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._window, self._shown = self._window[self._shown :], len(self._window) - self._shown
        return text[len(before):]


def load_tokenizer(path: "str | Path") -> Tokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json) or of a GGUF file's metadata.

    Errors: LoadError, one sentence. Cost: one parse of the file; no network.
    """
    from . import load
    kind, where = load.resolve(path)
    if kind == "hf":
        return _from_folder(where)
    from . import tokenizer_gguf
    return tokenizer_gguf.from_gguf(where)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise LoadError(f"load_tokenizer: tokenizer.json must be in {folder}; got no such file. "
                        "Fix: save the tokenizer in its fast form (tokenizer.json).")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises plain Exception
        raise LoadError(f"load_tokenizer: {file} must be a complete tokenizer file; got {exc}. "
                        "Fix: download the file again.") from None
    config = read_json(folder / "tokenizer_config.json", needed=False)
    model = read_json(folder / "config.json", needed=False)
    generation = read_json(folder / "generation_config.json", needed=False)
    special = {k: _token_text(config[k]) for k in config if k.endswith("_token") and _token_text(config[k]) is not None}
    eos, bos = (backend.token_to_id(special[k]) if k in special else None for k in ("eos_token", "bos_token"))
    prefix = backend.encode("", add_special_tokens=True).ids
    return Tokenizer(
        backend, merge_ids(eos, model.get("eos_token_id"), generation.get("eos_token_id")),
        model.get("bos_token_id") if bos is None else bos, add_bos=bool(prefix) and prefix[0] == bos,
        chat_template=_template(folder, config), special_tokens=special)


def _token_text(value) -> Optional[str]:
    """A special token of tokenizer_config.json: a string, or a dict with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(folder: Path, config: dict) -> Optional[str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template
