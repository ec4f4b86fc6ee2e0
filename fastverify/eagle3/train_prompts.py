"""Prompts for self-generated EAGLE-3 data, built from freely licensed dictionaries and manuals and from templates.

    python -m fastverify.eagle3.train_prompts --seeds DIR --tokenizer TARGET --out prompts.npz [--exclude EVAL.jsonl ...]

Seed texts come from Debian packages unpacked into one folder (``apt-get download``, ``dpkg -x``), beside the output
of ``apt-cache dumpavail`` as ``packages.txt``; nothing of them is shipped, only a draft trained on the target's own
replies is. ``SOURCES`` records what is used and under which licence. Evaluation prompts are never used:
``build(exclude=...)`` drops every prompt that shares ten words in a row with an evaluation file."""

from __future__ import annotations

import argparse
import glob
import gzip
import importlib
import inspect
import json
import os
import random
import re
import sys
import zlib
from typing import Callable

import numpy as np

from . import train_templates as templates
from .train_data import Prompts, Ragged

SOURCES = {
    "wordnet": "WordNet 3.0 (Debian wordnet-base): WordNet licence, Princeton University, BSD-like",
    "people_places": "WordNet 3.0 instance nouns (Debian wordnet-base): WordNet licence",
    "foldoc": "Free On-line Dictionary of Computing (Debian dict-foldoc): GFDL 1.1 or later",
    "jargon": "Jargon File 4.4.7 (Debian dict-jargon): public domain",
    "manual": "Linux man-pages (Debian manpages, manpages-dev): GPL-2+, verbatim and BSD-like licences, per page",
    "packages": "Debian package descriptions (apt-cache dumpavail): the licences of the packages",
    "fortunes": "fortune cookies (Debian fortunes, fortunes-min): BSD",
    "stdlib": "signatures and docstrings of Python's standard library: PSF licence",
    "summary": "paragraphs of the sources above and of composed reports, to be summarised",
    "chat": "templates of train_templates.py over WordNet nouns",
    "instruct": "templates of train_templates.py over WordNet nouns, adjectives and example sentences",
    "math": "templates of train_templates.py",
    "code": "templates of train_templates.py",
    "structured": "templates of train_templates.py",
}
SHARE = dict(
    wordnet=4000,
    people_places=6000,
    foldoc=2500,
    jargon=1000,
    manual=1500,
    packages=2500,
    fortunes=1500,
    stdlib=3500,
    summary=6500,
    chat=10000,
    instruct=8000,
    math=9000,
    code=4500,
    structured=3000,
)


def word_lists(seeds: str) -> dict:
    """WordNet -> common nouns, adjectives, example sentences, glosses, and instances (people, places, events) with
    glosses."""
    out: dict = dict(gloss=[], sentence=[], person=[], place=[], thing=[], noun=[], adj=[], verb=[])
    for kind in ("noun", "verb", "adj"):
        path = glob.glob(f"{seeds}/**/wordnet/data.{kind}", recursive=True)[0]
        for line in open(path, encoding="latin-1"):
            if line.startswith("  "):
                continue
            head, gloss = line.rstrip().split(" | ", 1) if " | " in line else (line, "")
            f = head.split(" ")
            word, gloss = re.sub(r"\(.*\)", "", f[4]).replace("_", " "), gloss.strip()
            examples = re.findall(r'"([^"]{20,200})"', gloss)
            plain = gloss.split('; "')[0]
            out["sentence"] += examples
            out["gloss"].append((word, kind, plain))
            if kind == "noun" and " @i " in head:
                place = {"18": "person", "15": "place"}.get(f[1], "thing")
                words = [f[4 + 2 * i].replace("_", " ") for i in range(int(f[3], 16))]
                out[place].append((max(words, key=len), plain))
            elif word.isalpha() and word.islower() and len(word) > 2 and (examples or int(f[3], 16) > 1):
                out[kind].append(word)
    return out


def _dict(seeds: str, name: str) -> list[tuple[str, str]]:
    """A dictd database -> (head word, entry text)."""
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
    number = lambda s: sum(digits[c] * 64 ** (len(s) - 1 - i) for i, c in enumerate(s))
    text = gzip.open(glob.glob(f"{seeds}/**/{name}.dict.dz", recursive=True)[0]).read()
    out = []
    for line in open(glob.glob(f"{seeds}/**/{name}.index", recursive=True)[0], encoding="utf-8", errors="replace"):
        word, at, size = line.rstrip("\n").split("\t")[:3]
        body = text[number(at) : number(at) + number(size)].decode("utf-8", "replace")
        body = re.sub(r"[{}]", "", body)
        if not word.startswith("00") and len(body) > 80:
            out.append((word, body))
    return out


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cut(text: str, chars: int) -> str:
    """Whole sentences, at most ``chars`` characters."""
    if len(text) <= chars:
        return text
    cut = text[:chars]
    return cut[: cut.rfind(". ") + 1] if ". " in cut else cut


def _manual(seeds: str) -> list[tuple[str, str]]:
    out = []
    for path in sorted(glob.glob(f"{seeds}/**/man/man[1-8]/*.gz", recursive=True)):
        text = gzip.open(path).read().decode("utf-8", "replace")
        m = re.search(r"^\.SH \"?DESCRIPTION\"?\n(.*?)^\.SH", text, re.S | re.M)
        if m:
            body = re.sub(
                r'\\f.|\\-|\\&|\\\(..|^\.[A-Z]{1,2}\b|^\.\\".*$|"',
                lambda k: "-" if k.group() == r"\-" else "",
                m.group(1),
                flags=re.M,
            )
            out.append((os.path.basename(path).split(".")[0], _flat(body)))
    return [x for x in out if len(x[1]) > 150]


def _packages(seeds: str) -> list[tuple[str, str]]:
    """``packages.txt`` of the seed folder (the output of ``apt-cache dumpavail``) -> (name, description)."""
    out, name = {}, None
    for line in open(os.path.join(seeds, "packages.txt"), encoding="utf-8", errors="replace"):
        if line.startswith("Package: "):
            name = line[9:].strip()
        elif line.startswith(("Description: ", "Description-en: ")):
            out[name] = line.split(": ", 1)[1].strip() + ":"
            open_text = True
        elif line.startswith(" ") and name in out and open_text:
            out[name] += (
                " "
                + line.strip().removesuffix(".")
                + ("." if line.strip().endswith(".") and len(line.strip()) > 1 else "")
            )
        else:
            open_text = False
    return [(k, _flat(v)) for k, v in out.items() if len(v) > 60 and not k.startswith("lib")]


def _stdlib() -> list[tuple[str, str]]:
    """(signature line, docstring) of the public functions of the standard library."""
    skip, out = re.compile(r"(test|idlelib|lib2to3|this|antigravity|turtle|tkinter|msilib|nt|_)"), {}
    for module in sorted(sys.stdlib_module_names):
        if skip.match(module):
            continue
        try:
            mod = importlib.import_module(module)
        except ImportError:
            continue
        for owner in [mod] + [c for _, c in inspect.getmembers(mod, inspect.isclass) if c.__module__ == module]:
            for name, fn in inspect.getmembers(owner, inspect.isfunction):
                doc = inspect.getdoc(fn)
                if name.startswith("_") or not doc or not 40 < len(doc) < 700:
                    continue
                try:
                    out[f"def {name}{inspect.signature(fn)}:"] = doc
                except (TypeError, ValueError):
                    continue
    return sorted(out.items())


def seeds(folder: str) -> dict[str, Callable[[random.Random], str]]:
    """Seed folder -> for each source a function that draws one user message."""
    w = word_lists(folder)
    foldoc, jargon, manual = _dict(folder, "foldoc"), _dict(folder, "jargon"), _manual(folder)
    packages, stdlib = _packages(folder), _stdlib()
    cookies = []
    for path in sorted(glob.glob(f"{folder}/**/games/fortunes/*", recursive=True)):
        if "." not in os.path.basename(path) and os.path.isfile(path):
            cookies += [_flat(t) for t in open(path, encoding="utf-8", errors="replace").read().split("\n%\n")]
    cookies = [c for c in cookies if 60 < len(c) < 500]
    long = [t for _, t in manual + packages if len(t) > 400] + [_flat(t) for _, t in foldoc + jargon if len(t) > 400]

    def wordnet(r):
        (a, k, g), (b, _, _) = r.choice(w["gloss"]), r.choice(w["gloss"])
        return r.choice(
            [
                f"What does the {k if k != 'adj' else 'adjective'} '{a}' mean?",
                f"What is the difference between {a} and {b}?",
                f"Define {a} and use it in a sentence.",
                f"Which word means: {g}?",
                f"Rewrite this definition in your own words: {g}",
                f"Is this a good definition of '{a}'? {g}",
                f"Explain the word '{a}' to a child.",
                f"Write two sentences with the words {a} and {b}.",
            ]
        )

    def people_places(r):
        kind = r.choice(["person", "person", "place", "thing"])
        name, gloss = r.choice(w[kind])
        return r.choice(
            {
                "person": [
                    f"Who was {name}?",
                    f"When was {name} born?",
                    f"What is {name} famous for?",
                    f"Where did {name} live?",
                    f"Who is {name} and why is he or she remembered?",
                    f"Which person is described here: {gloss}?",
                    f"When did {name} die?",
                    f"Who was older, {name} or {r.choice(w['person'])[0]}?",
                ],
                "place": [
                    f"Where is {name}?",
                    f"What country is {name} in?",
                    f"What is {name} known for?",
                    f"How many people live in {name}?",
                    f"What is the capital of {name}?",
                    f"When was {name} founded?",
                    f"What language is spoken in {name}?",
                    f"Where is {name} on the map?",
                ],
                "thing": [
                    f"What is {name}?",
                    f"When did {name} happen?",
                    f"Where does the name {name} come from?",
                    f"What do you know about {name}?",
                    f"Who started {name}?",
                ],
            }[kind]
        )

    def entry(items, r, chars=700):
        name, text = r.choice(items)
        text = _cut(_flat(text), chars)
        return r.choice(
            [
                f"What is {name}?",
                f"Explain {name} to a beginner.",
                f"What is {name} used for?",
                f"Rewrite this in simpler words: {text}",
                f"Shorten this text: {text}",
                f"{text}\n\nWhat is this text about?",
                f"Give three key points of the following text.\n\n{text}",
                f"When should I use {name}?",
            ]
        )

    def summary(r):
        if r.random() < 0.5:
            text = " ".join(templates.report(r, w) for _ in range(r.choice([1, 1, 2, 3])))
        else:
            text = " ".join(_cut(t, 1600) for t in r.sample(long, r.choice([1, 1, 1, 2])))
        return r.choice(
            [
                "Summarize: ",
                "Summarize: ",
                "Summarize: ",
                "Summarize the following text in two sentences: ",
                "Write a short summary of this: ",
            ]
        ) + _cut(text, 3200)

    def std(r):
        sig, doc = r.choice(stdlib)
        body = "\n    ".join(doc.split("\n"))
        return r.choice(
            [
                f'Complete the code I provided.\n\n{sig}\n    """{body}\n    """\n',
                f'Complete the code I provided.\n{sig}\n    """\n    {body}\n    """\n',
                f"Write a Python function with this signature and docstring:\n{sig}\n{doc}",
                f"What does this Python function do?\n{sig}\n{doc}",
            ]
        )

    def cookie(r):
        c = r.choice(cookies)
        return r.choice(
            [
                f"What does this quote mean? {c}",
                f"Explain the joke: {c}",
                f"Rewrite in modern English: {c}",
                f"Continue this text: {c}",
                f"Who might have said this, and why? {c}",
            ]
        )

    return dict(
        wordnet=wordnet,
        people_places=people_places,
        foldoc=lambda r: entry(foldoc, r),
        jargon=lambda r: entry(jargon, r),
        manual=lambda r: entry(manual, r),
        packages=lambda r: entry(packages, r),
        fortunes=cookie,
        stdlib=std,
        summary=summary,
        chat=lambda r: templates.chat(r, w),
        instruct=lambda r: templates.instruct(r, w),
        math=lambda r: templates.math(r, w),
        code=lambda r: templates.code(r, w),
        structured=lambda r: templates.structured(r, w),
    )


# ------------------------------------------------------------------------------------------------------------------


def shingles(text: str, n: int = 10) -> set[int]:
    """Hashes of every run of ``n`` words."""
    words = re.findall(r"\w+", text.lower())
    return {zlib.crc32(" ".join(words[i : i + n]).encode()) for i in range(len(words) - n + 1)}


def _turns(paths: list[str]) -> list[tuple[str, list[str]]]:
    """(file stem, user turns) of every line of the evaluation files (``turns`` key, as in MT-bench and Spec-Bench)."""
    return [
        (os.path.splitext(os.path.basename(p))[0], json.loads(line)["turns"])
        for p in paths
        for line in open(p, encoding="utf-8")
    ]


class ChatText:
    """Chat turns as token ids, in the model's own template (Hugging Face folder or GGUF file)."""

    def __init__(self, tokenizer):
        """tokenizer: a path, or models.tokenizer.Tokenizer."""
        from ..models.tokenizer import load_tokenizer

        self.tok = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer

    def first(self, user: str) -> list[int]:
        """Everything up to the first reply."""
        return self.tok.apply_chat_template([dict(role="user", content=user)])

    def second(self, user: str) -> list[int]:
        """What follows a reply that ended with eos: the rest of the assistant turn and the next user turn."""
        head = self.first("x")
        turns = [("user", "x"), ("assistant", "y"), ("user", user)]
        ids = self.tok.apply_chat_template([dict(role=r, content=t) for r, t in turns])
        end = next((i for i in range(len(head), len(ids)) if ids[i] in self.tok.eos_ids), None)
        if ids[: len(head)] != head or end is None:
            raise ValueError(
                "prompts: the chat template must end a reply with eos and keep earlier turns as they were; got one "
                "that "
                "does not. Fix: train on single turns (follow=0)"
            )
        return ids[end + 1 :]


def build(
    folder: str,
    tokenizer: str,
    out: str,
    limit: int,
    seed: int,
    exclude: list[str],
    max_tokens: int = 256,
    max_summary: int = 860,
    follow: float = 0.35,
) -> None:
    """Draw distinct prompts per source in the proportions of ``SHARE``, a share ``follow`` with a second turn, 1 %
    held out."""
    banned = {h for _, turns in _turns(exclude) for t in turns for h in shingles(t)}
    whole = {_flat(t).lower() for _, turns in _turns(exclude) for t in turns}
    chat, makers, scale = ChatText(tokenizer), seeds(folder), limit / sum(SHARE.values())
    first, second, source, held, dropped = [], [], [], [], 0
    for s, (name, share) in enumerate(SHARE.items()):
        r, seen, texts = random.Random(f"{seed}-{name}"), set(), []
        for _ in range(int(share * scale) * 6):
            text = makers[name](r)
            if text in seen:
                continue
            seen.add(text)
            if _flat(text).lower() in whole or shingles(text) & banned:
                dropped += 1
                continue
            texts.append(text)
            if len(texts) >= share * scale * 1.15:
                break
        cap = max_summary if name == "summary" else max_tokens
        ids = [x for x in map(chat.first, texts) if len(x) <= cap][: round(share * scale)]
        first += ids
        second += [chat.second(r.choice(templates.FOLLOW)) if r.random() < follow else [] for _ in ids]
        source += [s] * len(ids)
        mark = np.zeros(len(ids), bool)
        mark[r.sample(range(len(ids)), max(1, round(0.01 * len(ids))))] = True
        held += mark.tolist()
        print(f"prompts: {name:14s} {len(ids)} prompts, mean {np.mean([len(x) for x in ids]):.0f} tokens", flush=True)
    Prompts(Ragged.of(first), Ragged.of(second), np.array(source, np.int16), np.array(held), list(SHARE)).save(out)
    print(
        f"prompts: {len(first)} in all, {sum(map(len, first))} tokens; {dropped} dropped because they overlap with "
        f"evaluation prompts"
    )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="fastverify.eagle3.train_prompts", description=__doc__.split("\n")[0])
    for name in ("seeds", "tokenizer", "out"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--limit", type=int, default=60000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--exclude", nargs="*", default=[])
    a = p.parse_args(argv)
    build(a.seeds, a.tokenizer, a.out, a.limit, a.seed, a.exclude)


if __name__ == "__main__":
    main()
