"""fastverify train: an EAGLE-3 draft for any target that loads, from the target's own replies."""

import argparse
import math
import signal
from pathlib import Path

from .output import Output

# option -> (field of TrainConfig, type, help)
SETTINGS = {
    "steps": ("steps", int, "optimiser steps (default 4000)"),
    "batch": ("batch", int, "rows a step and GPU (default 32)"),
    "row": ("row", int, "tokens a row; conversations are packed into rows (default 1024)"),
    "ttt": ("ttt", int, "unrolled draft steps (default 5)"),
    "ttt-late": ("ttt_late", int, "unrolled steps after 60 %% of the run (default 7)"),
    "acceptance-loss": ("accept", float, "weight of -log sum min(p, q), from --acceptance-from on (default 0: off)"),
    "acceptance-from": ("accept_from", float, "fraction of the run after which it counts (default 0.6)"),
    "lr": ("lr", float, "peak learning rate of the body (default 1e-3; 1e-4 or less for targets of billions of weights)"),
    "head-lr": ("head_lr", float, "peak learning rate of the head (default 5e-4)"),
    "warmup": ("warmup", int, "steps of linear warm-up (default 200)"),
    "ema": ("ema", float, "decay of the averaged weights, which are what is exported (default 0.999)"),
    "seed": ("seed", int, "of data and training (default 0)"),
    "eval-every": ("eval_every", int, "steps between held-out figures (default 200)"),
    "cache-gb": ("cache_gb", float, "GPU memory for the target's states: epochs after the first skip the target (default 0: off)"),
    "save-seconds": ("save_seconds", float, "seconds between checkpoints (default 60)"),
}
ONLY_RESUMED = ("out", "resume", "seconds", "device", "run")


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Trains an EAGLE-3 draft: the target answers the prompts, the draft learns the target's own replies by training-time "
            "test, and OUT gets a draft in the EAGLE/SpecForge format. On several GPUs: torchrun --nproc-per-node N -m fastverify "
            "train ... Interrupted runs go on with --resume. See docs/training.md.")
    parser = commands.add_parser("train", help="train an EAGLE-3 draft for a target", description=text)
    parser.add_argument("--target", metavar="PATH", help="Hugging Face folder or GGUF file of 7 layers or more")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder: the draft, and work/ with data and checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with the settings it had")
    parser.add_argument("--seconds", type=float, metavar="S", help="train at most so long in this call, then leave a checkpoint")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="of the target and the export (default: bfloat16 on a GPU, float32 on a CPU)")
    g = parser.add_argument_group("data")
    g.add_argument("--prompts", nargs="+", metavar="FILE", help="JSONL with `prompt`, `turns` or `token_ids` a line")
    g.add_argument("--replies", metavar="FILE", help="work/replies.npz of an earlier run, instead of --prompts")
    g.add_argument("--max-new-tokens", type=int, metavar="N", help="of a reply (default 384)")
    g.add_argument("--samples", type=int, metavar="N", help="sampled replies a prompt beside the greedy one (default 2)")
    g.add_argument("--temperatures", type=float, nargs=2, metavar="T",
                   help="sampled replies use one between these two (default 0.7 1.0); twice the one you serve at, for that one alone")
    g.add_argument("--min-p", type=float, metavar="P", help="cut of sampled replies; 0: none, as plain sampling (default 0.05)")
    g.add_argument("--generate-batch", type=int, metavar="N", help="prompts answered at once (default 2048)")
    g.add_argument("--generate-seconds", type=float, metavar="S", help="stop generating after so long and train on what there is")
    g.add_argument("--held", type=float, metavar="SHARE", help="prompts kept for held-out figures (default 0.01)")
    g = parser.add_argument_group("draft")
    g.add_argument("--draft-vocab-size", type=int, metavar="N", help="ids of the draft, most frequent first")
    g.add_argument("--coverage", type=float, metavar="SHARE",
                   help="without --draft-vocab-size: the fewest ids that hold this share of the generated tokens (default 0.97)")
    g.add_argument("--init", metavar="DRAFT", help="start from this EAGLE-3 draft")
    g.add_argument("--remap-vocab", action="store_true", default=None,
                   help="give the draft of --init a vocabulary from this data: its head rows follow their ids")
    g.add_argument("--aux-convention", choices=("input", "output"), help="how the aux ids of --init are meant, if it is not clear")
    g = parser.add_argument_group("training")
    for name, (_, kind, help_) in SETTINGS.items():
        g.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help_)
    return parser


def run(args: argparse.Namespace) -> int:
    _check(args)
    from ..eagle3.train_run import Job, held_out_line, run_job
    from ..eagle3.train_world import World
    from ..models.load import load_tokenizer
    job = Job.load(args.out) if args.resume else _job(args)
    job.config.max_seconds = args.seconds or math.inf
    job.device = args.device or job.device
    if not args.resume and [*job.work.glob("replies*.npz"), *job.work.glob("checkpoint.pt")]:
        raise ValueError(f"train: --out must be a new folder; got {args.out}, which holds a run. Fix: add --resume to go on with it, "
                         "or choose another (--replies takes that run's data along).")
    out, asked = Output(), []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(job.target)
    except ValueError:  # prompts are token ids then; texts are refused with their own sentence
        pass
    world = World(job.device)
    before = {s: signal.signal(s, lambda *_: asked.append(1)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = run_job(job, out, lambda: bool(asked), world, tokenizer)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        world.close()
    if not world.first:
        return 0
    if not result.finished:
        out.note(f"stopped at step {result.step} of {job.config.steps}; go on with: fastverify train --out {args.out} --resume")
        if asked:
            raise KeyboardInterrupt("interrupted; the checkpoint is whole")
        return 0
    if result.last:
        out.line(held_out_line(result.last))
    out.line(f"draft: {args.out} (fastverify inspect {args.out} --target {job.target})")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.resume:
        given = [k for k, v in vars(args).items() if v is not None and k not in ONLY_RESUMED]
        if given:
            raise ValueError("train: --resume goes on with the settings that the run had; got --" + given[0].replace("_", "-")
                             + ". Fix: leave it out, or start a new run.")
        return
    if not args.target:
        raise ValueError("train: --target must be given for a new run; got none. Fix: add it, or --resume.")
    if bool(args.prompts) == bool(args.replies):
        raise ValueError(f"train: one of --prompts and --replies must be given; got {'both' if args.prompts else 'neither'}. "
                         "Fix: --prompts for new data, --replies for that of an earlier run.")
    if args.remap_vocab and not args.init:
        raise ValueError("train: --remap-vocab must go with --init, whose vocabulary it changes; got no --init. Fix: add it.")
    if args.init and args.draft_vocab_size and not args.remap_vocab:
        raise ValueError("train: --draft-vocab-size with --init must go with --remap-vocab; got none. Fix: add it, or keep the "
                         "draft's vocabulary.")
    at_least_1 = ("steps", "batch", "ttt", "ttt_late", "max_new_tokens", "generate_batch", "draft_vocab_size", "eval_every")
    rules = {name: (lambda v: v >= 1, "at least 1") for name in at_least_1}
    rules |= {name: (lambda v: v >= 0, "0 or more") for name in ("samples", "warmup", "acceptance_loss", "cache_gb")}
    rules |= {name: (lambda v: 0 <= v <= 1, "in [0, 1]") for name in ("coverage", "acceptance_from", "min_p")}
    rules["temperatures"] = (lambda v: 0 < v[0] <= v[1] < math.inf, "two numbers above 0 in rising order")
    rules |= {name: (lambda v: 0 < v < math.inf, "above 0") for name in ("lr", "head_lr", "seconds", "generate_seconds", "save_seconds")}
    rules |= {"row": (lambda v: v >= 16, "at least 16"), "held": (lambda v: 0 <= v < 1, "in [0, 1)"),
              "ema": (lambda v: 0 <= v < 1, "in [0, 1)"), "seed": (lambda v: 0 <= v < 2**31, "in 0..2^31 - 1")}
    for name, (valid, must) in rules.items():
        value = getattr(args, name)
        if value is not None and not valid(value):
            raise ValueError(f"train: {name} must be {must}; got {value}. Fix: change --{name.replace('_', '-')}.")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise ValueError(f"train: --out must be a folder; got the file {args.out}. Fix: choose another.")


def _job(args: argparse.Namespace):
    from ..eagle3.train import TrainConfig
    from ..eagle3.train_run import Job
    config = TrainConfig(**{f: getattr(args, name.replace("-", "_")) for name, (f, _, _) in SETTINGS.items()
                            if getattr(args, name.replace("-", "_")) is not None})
    if args.ttt and not args.ttt_late:
        config.ttt_late = max(config.ttt, 1)
    names = ("prompts", "replies", "init", "aux_convention", "max_new_tokens", "samples", "temperatures", "min_p", "generate_batch", "generate_seconds",
             "held", "draft_vocab_size", "coverage", "dtype")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    return Job(args.target, args.out, remap=bool(args.remap_vocab), config=config, **given)
