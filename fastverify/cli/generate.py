"""fastverify generate: answers one prompt, streamed; with --compare also without speculation, and says whether it paid."""

import argparse
import sys
from dataclasses import asdict
from typing import Callable, Iterator, Optional

from .options import add_model, add_sampling, check_run, check_tree, sampling_params, stop_ids
from .output import Output

WARM_TOKENS = 12
EXAMPLE = "fastverify generate --compare 'Why is the sky blue?'"


def add_parser(commands) -> argparse.ArgumentParser:
    text = f"Answers one prompt with speculative decoding; text on stdout, the rest on stderr. Example: {EXAMPLE}"
    parser = commands.add_parser("generate", help="answer one prompt", description=text)
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt (default: stdin)")
    parser.add_argument("--prompt", metavar="TEXT", help="the same as PROMPT")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--token-ids", metavar="I,J,...",
                        help="the prompt as token ids; prints token ids (needs no tokenizer)")
    parser.add_argument("--tree", metavar="SHAPE", help="auto (default), off, chain-K, tree-N, tree-N-kK-dD")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding (the same as --draft none)")
    parser.add_argument("--compare", action="store_true",
                        help="run with and without speculation; print the table and the verdict")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    add_sampling(parser, 128)
    add_model(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    speculative = _check(args)
    prompt, ids = _prompt(args)
    from .session import open_session
    out = Output(args.json)
    session = open_session("generate", args, out, with_tokenizer=ids is None, drafts=speculative)
    if ids is None:
        ids = session.encode("generate", prompt, args.system, args.raw)
    job = _Job(args, session, ids, out)
    tree = "off" if session.draft is None else args.tree or "auto"
    return job.compare(tree) if args.compare else job.single(tree)


def _check(args: argparse.Namespace) -> bool:
    """Refuses what cannot be meant, before anything is loaded. Returns whether a draft is wanted."""
    check_run("generate", args)
    check_tree(args.tree or "auto")
    plain = args.no_speculation or args.draft == "none" or args.tree == "off"
    if plain and args.tree not in (None, "off"):
        raise ValueError(f"generate: --tree {args.tree} must have a draft; got --draft none. Fix: leave one of the two out.")
    if plain and args.compare:
        raise ValueError("generate: --compare must have a draft to compare; got plain decoding. "
                         "Fix: leave out --no-speculation, --draft none or --tree off.")
    if args.system is not None and (args.raw or args.token_ids):
        raise ValueError("generate: --system must go with the chat template; got --raw or --token-ids. "
                         "Fix: leave one of the two out.")
    return not plain


def _prompt(args: argparse.Namespace) -> tuple:
    """(text, None) or (None, token ids)."""
    given = [x for x in (args.text, args.prompt, args.token_ids) if x is not None]
    if len(given) > 1:
        raise ValueError(f"generate: the prompt must be given once; got {len(given)}. "
                         "Fix: use one of PROMPT, --prompt, --token-ids.")
    if args.token_ids is not None:
        try:
            return None, [int(x) for x in args.token_ids.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"generate: token_ids must be integers; got {args.token_ids!r}. "
                             "Fix: write --token-ids 1,2,3.") from None
    if not given and sys.stdin.isatty():
        raise ValueError(f"generate: the prompt must be an argument or on stdin; got a terminal. Fix: {EXAMPLE}")
    text = given[0] if given else sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise ValueError(f"generate: the prompt must hold text; got an empty one. Fix: {EXAMPLE}")
    return text, None


def drain(spans: Iterator, on_tokens: Callable = lambda tokens: None):
    """Runs a stream to its end; on_tokens sees the tokens of every span. Returns the Result."""
    while True:
        try:
            _, tokens = next(spans)
        except StopIteration as end:
            return end.value
        on_tokens(tokens)


class _Follower:
    """A run that keeps up with another one, token for token."""

    def __init__(self, spans: Iterator) -> None:
        self.spans, self.behind, self.result = spans, 0, None

    def follow(self, tokens: list) -> None:
        """The other run emitted `tokens`."""
        self.behind += len(tokens)
        while self.behind > 0 and self.result is None:
            try:
                self.behind -= len(next(self.spans)[1])
            except StopIteration as end:
                self.result = end.value

    def finish(self):
        return self.result or drain(self.spans)


class _Job:
    """One prompt, run in one or two ways."""

    def __init__(self, args: argparse.Namespace, session, ids: list, out: Output) -> None:
        self.args, self.session, self.ids, self.out = args, session, ids, out
        self.params, self.stops = sampling_params(args), stop_ids(args)

    # ---- the two forms of the command ---------------------------------------------------------------------------------

    def single(self, tree: str) -> int:
        from . import report
        decoder = self.session.decoder(tree)
        with self.out.status("measuring the shapes"):
            decoder.controller(1)
        result = self._stream(decoder)
        tokens, stats = result.tokens[0], result.stats
        if self.args.json:
            self.out.json(self._head(tree) | report.run_dict(stats, tokens, self._text(tokens), result.finish[0]) | dict(
                auto=report.considered(decoder.controller(1))))
            return 0
        self.out.note(report.summary(stats, len(self.ids)))
        if decoder.controller(1):
            self.out.note(report.auto_line(stats, decoder.controller(1)))
        return 0

    def compare(self, tree: str) -> int:
        """Both runs advance side by side, so that a slow moment of the machine touches them alike."""
        from . import report
        from .difference import first_difference
        plain_decoder, spec_decoder = self.session.decoder("off"), self.session.decoder(tree)
        with self.out.status("warming up"):
            for decoder in (plain_decoder, spec_decoder):
                drain(self._spans(decoder, min(WARM_TOKENS, self.args.max_new_tokens)))
        follower = _Follower(self._spans(plain_decoder))
        if spec_decoder.interleaves:
            spec = self._stream(spec_decoder, follower.follow)
        else:  # one after the other
            follower.result = drain(follower.spans)
            spec = self._stream(spec_decoder)
        plain = follower.finish()
        a, b = plain.tokens[0], spec.tokens[0]
        difference = first_difference(self.session.target, self.ids, a, b, self.params, self.args.seed)
        verdict = report.verdict(plain.stats, spec.stats)
        if self.args.json:
            self.out.json(self._head(tree) | dict(
                plain=report.run_dict(plain.stats, a, self._text(a), plain.finish[0]),
                speculative=report.run_dict(spec.stats, b, self._text(b), spec.finish[0]), equal=difference is None,
                first_difference=difference and difference.as_dict(), speedup=report.speedup(plain.stats, spec.stats),
                verdict=verdict, auto=report.considered(spec_decoder.controller(1))))
            return 0
        self.out.line()
        self.out.table(["", "plain", tree], report.compare_rows(plain.stats, spec.stats, a, b))
        if spec_decoder.controller(1):
            self.out.line(report.auto_line(spec.stats, spec_decoder.controller(1)))
        equal = f"are equal ({len(a)} tokens)" if difference is None else f"differ: {difference}"
        self.out.line(f"the two texts {equal}")
        gain = (report.speedup(plain.stats, spec.stats) or 1.0) - 1
        self.out.line(verdict, style="bold yellow" if abs(gain) < report.EVEN else "bold green" if gain > 0 else "bold red")
        return 0

    # ---- runs ------------------------------------------------------------------------------------------------------------

    def _spans(self, decoder, max_new_tokens: Optional[int] = None):
        return decoder.stream([self.ids], max_new_tokens or self.args.max_new_tokens, self.params, self.stops)

    def _stream(self, decoder, on_tokens: Callable = lambda tokens: None):
        """A run whose text is shown as it is emitted. Ctrl-C leaves what was shown and one line."""
        tokenizer, count = self.session.tokenizer, 0
        pieces = tokenizer.stream(skip_special_tokens=True) if tokenizer else None

        def show(tokens: list) -> None:
            nonlocal count
            if count == 0:  # not earlier: an error in the prompt stays one line
                for note in self.session.notes:
                    self.out.note(note)
            text = pieces.push(tokens) if pieces else "".join(f"{' ' if count or i else ''}{t}" for i, t in enumerate(tokens))
            count += len(tokens)
            self.out.text(text)
            on_tokens(tokens)

        try:
            result = drain(self._spans(decoder), show)
            self.out.text(pieces.finish() if pieces else "")
        except KeyboardInterrupt:
            self.out.end_text()
            raise KeyboardInterrupt(f"interrupted after {count} tokens") from None
        self.out.end_text()
        return result

    # ---- JSON ------------------------------------------------------------------------------------------------------------

    def _text(self, tokens: list) -> Optional[str]:
        tokenizer = self.session.tokenizer
        return tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else None

    def _head(self, tree: str) -> dict:
        from .environment import environment
        s = self.session
        return dict(target=s.target_name, draft=s.draft_name, tree=tree, prompt_tokens=len(self.ids),
                    sampling=asdict(self.params), max_new_tokens=self.args.max_new_tokens, notes=s.notes, environment=environment(s.device, s.target.dtype))
