"""Chrome-trace JSON of any size, read event by event in bounded memory."""

import codecs
import json
import re
import zlib
from pathlib import Path
from typing import Callable, Iterator, Optional

CHUNK = 1 << 20           # characters asked for at a time
LARGEST_EVENT = 16 << 20  # characters; what is longer than this and does not parse is not JSON
_BLANK = re.compile(r"[\s,]*")
_SPACE = re.compile(r"\s*")


class TraceReader:
    """Iterates over the events (dicts) of one trace file, plain or gzip, whatever its name.

    header     the other members of the file's top object that were met so far (distributedInfo, baseTimeNanoseconds, ...);
               complete when the iteration has ended
    damage     None, or one sentence about why the file ended early: then the events before that place were yielded

    Accepts {"traceEvents": [...], ...} and a bare array, whose closing bracket may be missing. Memory: one chunk of about
    1 MiB and one event. progress(bytes of the file read so far) is called once per chunk. Errors: ValueError for a file that
    is no trace, OSError as open() raises it.
    """

    def __init__(self, path: "str | Path", progress: Optional[Callable] = None) -> None:
        self.path, self.header, self.damage = Path(path), {}, None
        self._progress = progress or (lambda done: None)
        self._decoder = json.JSONDecoder(strict=False)  # names may hold raw control characters
        self._text, self._at, self._dropped, self._ended = "", 0, 0, False

    def __iter__(self) -> Iterator[dict]:
        with open(self.path, "rb") as raw:
            self._raw = raw
            magic = raw.read(2)
            raw.seek(0)
            self._read = _Gunzip(raw).read if magic == b"\x1f\x8b" else lambda: raw.read(CHUNK)
            self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
            yield from self._document()

    # ---- the buffer ---------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Appends a chunk to the buffer and drops what was consumed. False at the end of the file."""
        if self._ended:
            return False
        try:
            data = self._read()
        except EOFError:
            data, self.damage = b"", "its gzip stream ends early"
        except zlib.error as exc:
            data, self.damage = b"", f"its gzip stream is damaged ({exc})"
        self._ended = not data
        self._dropped += self._at
        self._text = self._text[self._at:] + self._utf8.decode(data, final=self._ended)
        self._at = 0
        self._progress(self._raw.tell())
        return not self._ended

    def _skip(self, blank: re.Pattern) -> str:
        """The next character that is not blank, not consumed; "" at the end of the file."""
        while True:
            self._at = blank.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _value(self):
        """The JSON value at the cursor, consumed. EOFError if the file ends in it or it is no JSON."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number may go on in the next chunk
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if len(self._text) - self._at > LARGEST_EVENT:
                    raise EOFError(f"what it holds is no JSON at character {self._dropped + self._at}") from None
            if not self._fill() and self._text[self._at:] == "":
                raise EOFError("it ends in the middle of a value")
            if self._ended:
                try:
                    value, self._at = self._decoder.raw_decode(self._text, self._at)
                    return value
                except json.JSONDecodeError:
                    raise EOFError(f"it ends or is damaged in the value at character {self._dropped + self._at}") from None

    # ---- the grammar --------------------------------------------------------------------------------------------------

    def _document(self) -> Iterator[dict]:
        first = self._skip(_SPACE)
        if first not in ("{", "["):
            raise self._no_trace("a JSON object or array", self.damage or (f"its first character is {first!r}" if first else
                                                                           "it is empty"))
        self._at += 1
        try:
            if first == "[":
                yield from self._events(closing_optional=True)
            else:
                yield from self._members()
        except EOFError as exc:
            self.damage = self.damage or str(exc)
        if "traceEvents" not in self.header:
            raise self._no_trace('"traceEvents"', self.damage or "it has none")

    def _members(self) -> Iterator[dict]:
        while (char := self._skip(_BLANK)) != "}":
            if not char:
                raise EOFError("it ends before its closing brace")
            key = self._value()
            if self._skip(_SPACE) != ":":
                raise EOFError(f"what it holds is no JSON at character {self._dropped + self._at}")
            self._at += 1
            if key == "traceEvents" and self._skip(_SPACE) == "[":
                self._at += 1
                yield from self._events()
            else:
                self._skip(_SPACE)
                self.header[key] = self._value()

    def _events(self, closing_optional: bool = False) -> Iterator[dict]:
        self.header["traceEvents"] = True
        while (char := self._skip(_BLANK)) != "]":
            if not char:
                if closing_optional and not self.damage:
                    return
                raise EOFError("it ends before the list of its events does")
            event = self._value()
            if isinstance(event, dict):
                yield event
        self._at += 1

    def _no_trace(self, must: str, got: str) -> ValueError:
        return ValueError(f"trace: {self.path} must be a torch profiler trace (Chrome JSON), with {must}; got another file: "
                          f"{got}. Fix: export it with torch.profiler's export_chrome_trace.")


class _Gunzip:
    """Chunks of a gzip file (any number of members), up to the very byte where a truncated one ends."""

    def __init__(self, raw) -> None:
        self._raw, self._zlib, self._input = raw, zlib.decompressobj(31), b""

    def read(self) -> bytes:
        """Some bytes, at most CHUNK; b"" at the end. EOFError if the file ends inside a member, zlib.error if it is damaged."""
        while True:
            self._input = self._input or self._raw.read(CHUNK // 4)
            if self._zlib.eof and self._input:
                self._zlib = zlib.decompressobj(31)
            data = self._zlib.decompress(self._input, min(CHUNK, 1 << 16))  # damage costs at most this much
            ended = not self._input
            self._input = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
            if data:
                return data
            if ended:
                if not self._zlib.eof:
                    raise EOFError
                return b""
