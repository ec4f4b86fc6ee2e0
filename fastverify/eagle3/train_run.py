"""One run of `fastverify train`: data from the target, draft vocabulary, training, export. Each stage leaves its result in
OUT/work, so that an interrupted run goes on where it was (--resume)."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import time
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch

from .remap import remap_vocab
from .train import TrainConfig, Trainer, training_rows
from .train_data import Replies, choose_vocab
from .train_generate import Generator, conversations, join
from .train_input import must_keep, read_training_prompts, vocabulary_size
from .train_net import DraftConfig, Eagle3Draft, load_draft, save_draft
from .train_target import TargetLlama, load_target
from .train_world import World

_HASHED = 1 << 31  # bytes of a target file up to which its sha256 is recorded
_QUIET = 30.0      # seconds between two lines where no progress bar is shown


@dataclass
class Job:
    """Everything a run is told; kept in OUT/work/settings.json.

    prompts | replies  files of prompts (train_input.read_training_prompts), or replies of an earlier run (work/replies.npz)
    samples            sampled passes over the prompts after the greedy one, at temperatures between the two given, after a cut at min_p
    draft_vocab_size   ids of the draft, or None: as many as hold `coverage` of the generated tokens
    init, remap        the draft to start from, and whether it gets a new vocabulary
    dtype              of the target and of the export: "auto" is bfloat16 on a GPU, float32 on a CPU
    """

    target: str
    out: str
    prompts: list = field(default_factory=list)
    replies: Optional[str] = None
    init: Optional[str] = None
    remap: bool = False
    aux_convention: Optional[str] = None
    max_new_tokens: int = 384
    samples: int = 2
    temperatures: tuple = (0.7, 1.0)
    min_p: float = 0.05
    generate_batch: int = 2048
    generate_seconds: float = float("inf")
    held: float = 0.01
    draft_vocab_size: Optional[int] = None
    coverage: float = 0.97
    device: str = "auto"
    dtype: str = "auto"
    config: TrainConfig = field(default_factory=TrainConfig)

    @property
    def work(self) -> Path:
        return Path(self.out) / "work"

    def save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)  # Infinity is read back by json
        (self.work / "settings.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, out: str) -> "Job":
        path = Path(out) / "work/settings.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(TrainConfig)}
            config = TrainConfig(**{k: tuple(v) if k == "betas" else v for k, v in data.pop("config").items() if k in known})
            config.max_seconds = float("inf")  # a limit of one call
            return cls(**data | dict(out=out, config=config))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"train: --resume needs {path} of an earlier run; got {type(exc).__name__}. "
                             "Fix: give that run's --out.") from None


class Quiet:
    """The user interface of processes that do not talk (cli.output.Output is the one that does)."""

    err_terminal = False

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def progress(self, text: str, total: int):
        yield lambda done, text=None, total=None: None


@dataclass
class Result:
    """finished: all steps were done (OUT holds the draft as it is in any case). last: the latest held-out figures, or None."""

    finished: bool
    step: int
    last: Optional[dict]
    record: dict


def run_job(job: Job, ui: Any = None, stop: Callable[[], bool] = lambda: False, world: Optional[World] = None,
            tokenizer: Any = None) -> Result:
    """Runs, or goes on with, the training that `job` describes.

    ui         note(text) and progress(text, total), as cli.output.Output has them
    stop       asked between steps; True leaves a checkpoint and ends the run unfinished
    tokenizer  the target's, or None: prompts are token ids then

    Errors: ValueError in one sentence for wrong settings or files. Cost: hours for large targets; each stage is written.
    """
    world = world or World(job.device)
    ui = ui if ui and world.first else Quiet()
    gpu = world.device.startswith("cuda")
    dtype = getattr(torch, ("bfloat16" if gpu else "float32") if job.dtype == "auto" else job.dtype)
    target = load_target(job.target, dtype, world.device)
    if world.first:
        job.save()
    start = time.time()
    replies = _replies(job, target, tokenizer, world, ui)
    spent = time.time() - start
    rows, held = training_rows(replies, job.config, world.device)
    need = job.config.batch * world.size
    if not len(rows) or (world.size > 1 and len(rows) < need):
        raise ValueError(f"train: the data must fill at least {need if world.size > 1 else 1} rows of {job.config.row} tokens; "
                         f"got {len(rows)}. Fix: add prompts, or lower --batch or --row.")
    vocab, cover = _vocabulary(job, replies, target, tokenizer)
    generated = int(replies.asst.flat.sum())
    meta = dict(conversations=len(replies.ids), tokens=len(replies.ids.flat), generated_tokens=generated, packed_rows=len(rows),
                generate_seconds=round(spent, 1), processes=world.size)
    trainer = _trainer(job, target, vocab, world, meta, ui)
    ids, count = trainer.net.vocab_ids.cpu().numpy(), np.bincount(replies.ids.flat[replies.asst.flat.astype(bool)],
                                                                  minlength=target.config.vocab_size)
    cover = float(count[ids].sum() / max(count.sum(), 1))
    trainer.meta |= dict(draft_vocab_size=len(ids), coverage=round(cover, 5))
    ui.note(f"{len(replies.ids)} conversations, {generated} generated tokens, {len(rows)} rows of {job.config.row}; {len(ids)} draft "
            f"ids hold {100 * cover:.2f} % of them")
    checkpoint = job.work / "checkpoint.pt"
    if checkpoint.exists():
        with _as_written(checkpoint):
            trainer.load(str(checkpoint))
        ui.note(f"resumed at step {trainer.step} of {job.config.steps}")
    _train(trainer, rows, held, job, ui, stop)
    finished = trainer.step >= job.config.steps
    record = export(job, trainer, target) if world.first else {}
    world.barrier()
    last = trainer.curve["eval"][-1] if trainer.curve["eval"] else None
    return Result(finished, trainer.step, last, record)


# ---- data ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _as_written(path: Path):
    """A file of the interrupted run that was damaged since."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as exc:
        raise ValueError(f"train: {path} must be as the interrupted run wrote it; got {type(exc).__name__}. Fix: delete it (what it held is "
                         "made again), or start over with a new --out.") from None


def _replies(job: Job, target: TargetLlama, tokenizer: Any, world: World, ui: Any) -> Replies:
    """work/replies.npz, made if it is not there: a greedy pass over the prompts, then sampled ones, each pass kept."""
    whole = job.work / "replies.npz"
    there = whole.exists()
    world.barrier()  # before anyone writes it
    if there:
        with _as_written(whole):
            return Replies.load(str(whole))
    if job.replies:
        _check_replies(job.replies, target)
        if world.first:
            shutil.copyfile(job.replies, whole)
        world.barrier()
        return Replies.load(str(whole))
    room = job.config.row - 2
    prompts = read_training_prompts(job.prompts, tokenizer, job.held, room, target.config.vocab_size)
    eos = sorted({*target.eos_ids, *(tokenizer.eos_ids if tokenizer else ())})
    gen = Generator(target, eos or [-1], job.generate_batch, job.min_p, job.config.seed)
    deadline, names = time.time() + job.generate_seconds, []
    for n in range(1 + job.samples):
        part = job.work / f"replies-{n}-{world.rank}.npz"
        names.append(f"replies-{n}-{{}}.npz")
        if not part.exists():
            order = np.arange(len(prompts.first))
            order = order[~prompts.held] if n else order  # the held-out figures are about greedy text
            order = order[world.rank :: world.size]
            with ui.progress(f"generate, pass {n + 1} of {1 + job.samples}", len(order)) as update:
                last = [time.time()]

                def log(text: str) -> None:
                    done = int(text.split()[1]) if text.split()[1].isdigit() else 0
                    update(done, text)
                    if not ui.err_terminal and time.time() - last[0] > _QUIET:
                        last[0] = time.time()
                        ui.note(f"pass {n + 1} of {1 + job.samples}: {text}")

                conversations(gen, prompts, job.max_new_tokens, n == 0, job.config.seed + n, deadline, order=order,
                              log=log, temperatures=tuple(job.temperatures)).save(str(part))
        if world.any(time.time() > deadline):
            break
    world.barrier()
    if world.first:
        parts = [Replies.load(str(job.work / name.format(r))) for name in names for r in range(world.size)]
        join(parts).save(str(whole))
        for name in names:
            for r in range(world.size):
                (job.work / name.format(r)).unlink()
    world.barrier()
    return Replies.load(str(whole))


def _check_replies(path: str, target: TargetLlama) -> None:
    try:
        top = int(Replies.load(path).ids.flat.max(initial=0))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as exc:
        raise ValueError(f"train: --replies must be the replies.npz of an earlier run; got {path}: {type(exc).__name__}. "
                         "Fix: check the path.") from None
    if top >= target.config.vocab_size:
        raise ValueError(f"train: --replies must hold ids of this target, below {target.config.vocab_size}; got {top}. "
                         "Fix: generate them with this target.")


def _vocabulary(job: Job, r: Replies, target: TargetLlama, tokenizer: Any) -> tuple:
    """(ids of the draft vocabulary, the share of generated tokens inside); (None, 0) where the draft of --init keeps its own."""
    if job.init and not job.remap:
        return None, 0.0
    v = target.config.vocab_size
    must = must_keep(tokenizer, target.eos_ids, v)
    size = job.draft_vocab_size or vocabulary_size(r, job.coverage, v, must)
    if not len(must) <= size <= v:
        raise ValueError(f"train: --draft-vocab-size must be {max(len(must), 1)}..{v} (ids that are always inside, and all ids); "
                         f"got {size}. Fix: change it.")
    return choose_vocab(r, size, v, must)


# ---- training ------------------------------------------------------------------------------------------------------------


def _trainer(job: Job, target: TargetLlama, vocab: Optional[np.ndarray], world: World, meta: dict, ui: Any) -> Trainer:
    net = None
    if job.init:
        net = load_draft(job.init, target=target, aux_convention=job.aux_convention)
        if vocab is not None:
            net, counts = remapped(net, torch.from_numpy(vocab), target)
            meta["remap"] = str(counts)
            ui.note(f"vocabulary of {job.init} remapped: {counts}")
    config = net.config if net is not None else DraftConfig.for_target(target.config, len(vocab))
    return Trainer(target, config, vocab, job.config, world.device, net=net, world=world, meta=meta)


def remapped(net: Eagle3Draft, ids: torch.Tensor, target: TargetLlama) -> tuple:
    """(the draft under the vocabulary `ids`, RemapCounts): head rows follow their ids, unknown ones come from the target."""
    names = ("lm_head.weight", "d2t", "t2d")
    state = net.state_dict()
    new, counts = remap_vocab({k: state[k].cpu() for k in names}, ids, net.config.vocab_size,
                              target.lm_head.weight.detach().float().cpu())
    config = DraftConfig.from_saved(asdict(net.config) | dict(draft_vocab_size=len(ids)))
    out = Eagle3Draft(config)
    out.load_state_dict({k: v.cpu() for k, v in state.items()} | {k: new[k] for k in names})
    return out, counts


def _train(trainer: Trainer, rows, held, job: Job, ui: Any, stop: Callable[[], bool]) -> None:
    c = trainer.c
    with ui.progress("train", c.steps) as update:
        last = [time.time()]

        def report(kind: str, point: dict) -> None:
            if kind == "train":
                text = (f"step {point['step']} of {c.steps}, loss {point['loss']:.3f}, {point['tokens_per_s']} tok/s, "
                        f"{point['seconds_left']:.0f} s to go")
                update(point["step"], f"loss {point['loss']:.3f}, {point['tokens_per_s']} tok/s")
                if not ui.err_terminal and time.time() - last[0] > _QUIET:
                    last[0] = time.time()
                    ui.note(text)
            elif kind == "eval":
                ui.note(f"step {point['step']}: {held_out_line(point)}")

        update(trainer.step)
        trainer.run(rows, held, str(job.work), report, stop)


def held_out_line(point: dict) -> str:
    """The held-out figures in one line."""
    rates = " ".join(f"{x:.3f}" for x in point["conditional"])
    return (f"held-out agreement by depth {rates} (each given the ones before), chain of 3 drafts: "
            f"tau {point['chain_tau'][2]:.2f}")


# ---- export --------------------------------------------------------------------------------------------------------------


def export(job: Job, trainer: Trainer, target: TargetLlama) -> dict:
    """Writes the EMA weights as an EAGLE draft to OUT, with training_record.json, curves.json and (matplotlib) curves.png."""
    out, path = Path(job.out), Path(job.target)
    gpu = trainer.device.startswith("cuda")
    dtype = getattr(torch, ("bfloat16" if gpu else "float32") if job.dtype == "auto" else job.dtype)
    origin = dict(name=path.name)
    if path.is_file() and path.stat().st_size <= _HASHED:
        origin["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    save_draft(trainer.ema, str(out), origin, dtype, target.config.num_hidden_layers)
    curve = trainer.curve
    hardware = torch.cuda.get_device_name(trainer.device) if gpu else "CPU"
    record = dict(steps=trainer.step, planned_steps=trainer.c.steps, tokens_seen=trainer.tokens, minutes=round(trainer.seconds / 60, 2),
                  hardware=f"{trainer.size} x {hardware}", target=origin, init=job.init and Path(job.init).name, data=trainer.meta,
                  hyper_parameters={k: v for k, v in asdict(trainer.c).items() if v != float("inf")},
                  held_out=curve["eval"][-1] if curve["eval"] else None)
    for name, data in (("training_record.json", record), ("curves.json", curve)):
        (out / name).write_text(json.dumps(data, indent=1 if name != "curves.json" else None) + "\n", encoding="utf-8")
    try:
        from .train_plot import plot_curves
        plot_curves(curve, str(out / "curves.png"))
    except ImportError:
        record["note"] = "curves.png needs matplotlib"
    return record
