"""Arguments that subcommands share, and their checks. Nothing here imports torch: mistakes are told at once."""

import argparse
import math
import sys

from ..eagle3.shapes import parse_shape

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class Parser(argparse.ArgumentParser):
    """argparse, with an error of one line and exit code 2."""

    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, allow_abbrev=False, **kw)

    def error(self, message: str) -> None:
        print(f"{self.prog}: {message}. Fix: see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def add_model(parser: argparse.ArgumentParser, several_drafts: bool = False) -> None:
    g = parser.add_argument_group("models")
    g.add_argument("--target", metavar="PATH",
                   help="Hugging Face folder or GGUF file (default: the demo model of `fastverify fetch-demo`)")
    what = "EAGLE-3 folder, n-gram lookup, or none"
    if several_drafts:
        g.add_argument("--draft", metavar="PATH|ngram|none", action="append", help=f"{what}; may be repeated (default: the "
                       "shipped EAGLE-3 draft where it fits the target, and ngram)")
    else:
        g.add_argument("--draft", metavar="PATH|ngram|none", help=f"{what} (default: the shipped EAGLE-3 draft where it fits "
                       "the target, else ngram)")
        g.add_argument("--dummy", metavar="NAME", help="random weights in the shapes of NAME (llama-3-8b, qwen3-32b-tp8-shard, "
                       "smollm2-135m, tiny), draft and target: for timing, never for text")
        g.add_argument("--acceptance", type=float, metavar="P",
                       help="with --dummy: a drafted child is right this often, by decree (default 0.6)")
    g.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                   help="auto: cuda if every op of the step has a kernel there")
    g.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                   help="of weights and KV cache (default: float32)")
    g.add_argument("--weights", default="same", choices=("same", "fp8"),
                   help="fp8: the target's matrices in float8 with a scale per row, half the bytes (default: as --dtype says)")
    g.add_argument("--exact", action="store_true",
                   help="the text with speculation is the text without, bit for bit, in bfloat16 too (slower)")
    g.add_argument("--coupled", default="auto", choices=("auto", "off"),
                   help="auto: at a temperature, an EAGLE-3 draft shares the sampler's noise (same text, accepted further); off: it does not")
    g.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    g = parser.add_argument_group("sampling")
    g.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"default {max_new_tokens}")
    g.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy")
    g.add_argument("--top-k", type=int, default=0, metavar="K", help="0 (default): off")
    g.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 (default): off")
    g.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 (default): off")
    g.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 (default): off")
    g.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="0 (default): off")
    g.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="0 (default): off")
    g.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text, whatever the tree (default 0)")
    g.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")


def check_run(command: str, args: argparse.Namespace) -> None:
    """Ranges of the arguments above. ValueError in the house form."""
    fraction = (lambda v: 0 <= v <= 1, "in [0, 1]")
    finite = (math.isfinite, "a finite number")
    rules = {
        "max_new_tokens": (lambda v: v >= 1, "at least 1"),
        "temperature": (lambda v: 0 <= v < math.inf, "a finite number >= 0"),
        "top_k": (lambda v: 0 <= v < 2**31, "0 (off) or a positive int32"),
        "top_p": fraction, "min_p": fraction,
        "repetition_penalty": (lambda v: 0 < v < math.inf, "a finite number > 0"),
        "frequency_penalty": finite, "presence_penalty": finite,
        "seed": (lambda v: -2**63 <= v < 2**63 - 2**20, "an int64"),
    }
    for name, (valid, must) in rules.items():
        value = getattr(args, name)
        if not valid(value):
            raise ValueError(f"{command}: {name} must be {must}; got {value}. Fix: change --{name.replace('_', '-')}.")
    dummy, acceptance = getattr(args, "dummy", None), getattr(args, "acceptance", None)
    if acceptance is not None and (dummy is None or not 0 <= acceptance <= 1):
        raise ValueError(f"{command}: acceptance must be in [0, 1] and go with --dummy; got {acceptance}"
                         f"{'' if dummy else ' without --dummy'}. Fix: change --acceptance.")
    if dummy is not None and (args.target is not None or args.draft not in (None, "none")):
        raise ValueError(f"{command}: --dummy must go without a model; got --target or --draft. Fix: leave one of the two out.")
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ValueError(f"{command}: threads must be in 1..1024; got {args.threads}. Fix: change --threads.")


def check_tree(text: str) -> str:
    """`text` if it names a shape or is "auto", else ValueError."""
    if text != "auto":
        parse_shape(text)
    return text


def sampling_params(args: argparse.Namespace):
    """SamplingParams of the parsed arguments."""
    from ..eagle3.decode import SamplingParams
    return SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed,
                          *(getattr(args, name) for name in PENALTIES))


def stop_ids(args: argparse.Namespace):
    """None (the target's own stop ids), or [] with --ignore-eos."""
    return [] if args.ignore_eos else None
