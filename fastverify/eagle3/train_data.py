"""Token data of the EAGLE-3 trainer: ragged files, the loop filter, packing into rows, and the draft vocabulary.

Data is self-generated (the target's own replies), as EAGLE-3 (arXiv:2503.01840, section 4) and every public recipe
since recommend: a draft trained on other people's text learns the wrong distribution. Packing into rows with
block-diagonal masks and restarted positions follows Krell et al. 2021 (arXiv:2107.02027)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


class Ragged:
    """A list of integer sequences as one flat array and offsets (N+1)."""

    def __init__(self, flat: np.ndarray, off: np.ndarray):
        self.flat, self.off = flat, off

    @classmethod
    def of(cls, seqs, dtype=np.int32) -> "Ragged":
        off = np.zeros(len(seqs) + 1, np.int64)
        np.cumsum([len(s) for s in seqs], out=off[1:])
        flat = np.concatenate([np.asarray(s, dtype) for s in seqs]) if len(seqs) else np.zeros(0, dtype)
        return cls(flat.astype(dtype), off)

    def __len__(self) -> int:
        return len(self.off) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.off[i] : self.off[i + 1]]

    def lengths(self) -> np.ndarray:
        return np.diff(self.off)


@dataclass
class Prompts:
    """Prompts as token ids. ``first`` ends where the reply begins; ``second`` is what follows reply 1 (may be
    empty)."""

    first: Ragged
    second: Ragged
    source: np.ndarray  # [N] int16 index into names
    held: np.ndarray  # [N] bool: held out, never trained on
    names: list[str] = field(default_factory=list)

    def save(self, path: str) -> None:
        _save(
            path,
            first=self.first.flat,
            first_off=self.first.off,
            second=self.second.flat,
            second_off=self.second.off,
            source=self.source,
            held=self.held,
            names=np.array(self.names),
        )

    @classmethod
    def load(cls, path: str) -> "Prompts":
        z = np.load(path)
        return cls(
            Ragged(z["first"], z["first_off"]),
            Ragged(z["second"], z["second_off"]),
            z["source"],
            z["held"],
            [str(s) for s in z["names"]],
        )

    def subset(self, idx) -> "Prompts":
        return Prompts(
            Ragged.of([self.first[i] for i in idx]),
            Ragged.of([self.second[i] for i in idx]),
            self.source[idx],
            self.held[idx],
            self.names,
        )


@dataclass
class Replies:
    """Conversations with the target's replies. ``asst`` marks the tokens that the target itself produced."""

    ids: Ragged
    asst: Ragged  # same offsets, uint8
    source: np.ndarray  # [N] int16
    held: np.ndarray  # [N] bool
    greedy: np.ndarray  # [N] bool: produced at temperature 0
    names: list[str] = field(default_factory=list)

    def save(self, path: str) -> None:
        _save(
            path,
            ids=self.ids.flat,
            off=self.ids.off,
            asst=self.asst.flat,
            source=self.source,
            held=self.held,
            greedy=self.greedy,
            names=np.array(self.names),
        )

    @classmethod
    def load(cls, path: str) -> "Replies":
        z = np.load(path)
        return cls(
            Ragged(z["ids"], z["off"]),
            Ragged(z["asst"], z["off"]),
            z["source"],
            z["held"],
            z["greedy"],
            [str(s) for s in z["names"]],
        )

    def subset(self, idx) -> "Replies":
        idx = np.asarray(idx, np.int64)
        return Replies(
            Ragged.of([self.ids[i] for i in idx]),
            Ragged.of([self.asst[i] for i in idx], np.uint8),
            self.source[idx],
            self.held[idx],
            self.greedy[idx],
            self.names,
        )


def _save(path: str, **arrays) -> None:
    """Prompt files travel and are compressed; reply files are large and are not."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".part", "wb") as f:
        (np.savez_compressed if "second" in arrays else np.savez)(f, **arrays)
    os.replace(path + ".part", path)


def repeat_rate(tokens: np.ndarray, n: int = 8) -> float:
    """Share of the n-grams of a reply that occurred before in it: 0 for fresh text, near 1 for a loop."""
    if len(tokens) <= n:
        return 0.0
    mult = np.random.default_rng(0).integers(1, 2**62, n) | 1
    grams = np.convolve(np.asarray(tokens, np.int64), mult, "valid")  # a hash of each n-gram, modulo 2^64
    return 1.0 - len(np.unique(grams)) / len(grams)


def choose_vocab(r: Replies, size: int, vocab_size: int, must: list[int]) -> tuple[np.ndarray, float]:
    """Most frequent generated tokens plus ``must`` -> (sorted ids [size], share of generated tokens that they
    cover)."""
    count = np.bincount(r.ids.flat[r.asst.flat.astype(bool)], minlength=vocab_size).astype(np.int64)
    rank = count.copy()
    rank[np.asarray(must, np.int64)] = count.max() + 1
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    return ids, float(count[ids].sum() / max(count.sum(), 1))


@dataclass
class Rows:
    """Packed training rows, R of T tokens each, as tensors on one device."""

    ids: Tensor  # [R, T] int32
    doc: Tensor  # [R, T] int16 document number inside the row, -1 padding
    pos: Tensor  # [R, T] int16 position inside the document
    want: Tensor  # [R, T] bool: the NEXT token exists in the document and the target produced it

    def to(self, device) -> "Rows":
        return Rows(*(getattr(self, k).to(device) for k in ("ids", "doc", "pos", "want")))

    def __len__(self) -> int:
        return self.ids.shape[0]


def pack(r: Replies, idx, row: int, seed: int = 0, open_rows: int = 64) -> Rows:
    """First-fit packing of the conversations ``idx``, shuffled, into rows of ``row`` tokens; longer ones are cut."""
    order = np.random.default_rng(seed).permutation(np.asarray(idx, np.int64))
    lengths = np.minimum(r.ids.lengths(), row)
    bins: list[list[int]] = []
    open_bins: list[list] = []  # [free, bin]
    for i in order:
        n = int(lengths[i])
        for ob in open_bins:
            if ob[0] >= n:
                ob[0] -= n
                bins[ob[1]].append(i)
                break
        else:
            if len(open_bins) >= open_rows:
                open_bins.remove(min(open_bins, key=lambda o: o[0]))
            bins.append([i])
            open_bins.append([row - n, len(bins) - 1])
    shape = (len(bins), row)
    ids, doc = np.zeros(shape, np.int32), np.full(shape, -1, np.int16)
    pos, want = np.zeros(shape, np.int16), np.zeros(shape, bool)
    for b, members in enumerate(bins):
        at = 0
        for d, i in enumerate(members):
            n = int(lengths[i])
            ids[b, at : at + n] = r.ids[i][:n]
            doc[b, at : at + n] = d
            pos[b, at : at + n] = np.arange(n)
            want[b, at : at + n - 1] = r.asst[i][1:n]
            at += n
    return Rows(*(torch.from_numpy(x) for x in (ids, doc, pos, want)))


def batch_rows(n_rows: int, batch: int, step: int, seed: int) -> np.ndarray:
    """Row numbers of step ``step``: a pure function of its arguments, so that a resumed run sees the same data."""
    per_epoch = max(n_rows // batch, 1)
    epoch, k = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(n_rows)
    return order[k * batch : (k + 1) * batch]
