"""The EAGLE-3 trainer: the state of a run, its step, its checkpoint. `fastverify train` (cli/train.py) is its command line.

Method: training-time test (EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.2). The draft is unrolled ``ttt`` steps on
its own hidden states and the loss is sum_j decay^j * CE(target softmax restricted to the draft vocabulary, draft softmax)
over the tokens that the target produced and whose argmax is in the draft vocabulary, late in the run optionally with the
acceptance loss (train_loss.py). Optimiser: AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), linear warm-up and cosine
decay, gradient clipping, exponential moving average of the weights. A run is a function of its settings, its data and the
number of processes; the checkpoint holds everything that the next step reads, so that a resumed run is the same run."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Callable

import numpy as np
import torch

from .train_data import Replies, Rows, batch_rows, pack
from .train_eval import held_out
from .train_loss import teach, ttt_loss
from .train_net import DraftConfig, Eagle3Draft, TargetLlama
from .train_world import World


@dataclass
class TrainConfig:
    steps: int = 4000
    batch: int = 32  # rows a step and process
    row: int = 1024  # tokens a row
    ttt: int = 5  # unrolled steps, raised to ttt_late after ttt_switch of the run
    ttt_late: int = 7
    ttt_switch: float = 0.6
    decay: float = 0.8  # weight of step j: decay ** j
    accept: float = 0.0  # weight of the acceptance loss in the last part of the run
    accept_from: float = 0.6  # fraction of the run after which it counts
    lr: float = 1e-3
    head_lr: float = 5e-4
    warmup: int = 200
    floor: float = 0.05  # cosine ends at floor * lr
    betas: tuple = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    ema: float = 0.999
    seed: int = 0
    eval_every: int = 200
    eval_rows: int = 64
    log_every: int = 20
    save_seconds: float = 60.0
    cache_gb: float = 0.0  # device memory for target states of rows seen before: later epochs skip the target
    max_seconds: float = float("inf")  # the schedule is by steps; this stops early and leaves a resumable checkpoint


def learning_rate(step: int, c: TrainConfig) -> float:
    """Factor on the peak rates: linear warm-up, then cosine to ``floor``."""
    if step < c.warmup:
        return (step + 1) / c.warmup
    x = min((step - c.warmup) / max(c.steps - c.warmup, 1), 1.0)
    return c.floor + (1 - c.floor) * 0.5 * (1 + math.cos(math.pi * x))


class Trainer:
    """The state of a run (weights, EMA, optimiser, step, curves) and its checkpoint.

    net     the draft to train on from (train_net.load_draft, init_from_target); None: made from the target
    world   processes that share the batch; gradients are summed over them
    meta    JSON-able facts about the run that its checkpoint should carry
    """

    def __init__(self, target: TargetLlama, draft_config: DraftConfig, vocab: np.ndarray, c: TrainConfig, device: str = "cpu",
                 init: bool = True, net: Eagle3Draft | None = None, world: World | None = None, meta: dict | None = None):
        torch.manual_seed(c.seed)
        self.target, self.c, self.device, self.world, self.meta = target, c, device, world, meta or {}
        if net is None:
            net = Eagle3Draft(draft_config).to(device)
            net.set_vocab(torch.from_numpy(np.asarray(vocab)))
            if init:
                net.init_from_target(target, c.seed)
        self.net = net.to(device)
        self.ema = Eagle3Draft(draft_config).to(device).requires_grad_(False)
        self.ema.load_state_dict(self.net.state_dict())
        head = list(self.net.lm_head.parameters())
        body = [p for n, p in self.net.named_parameters() if not n.startswith("lm_head")]
        self.opt = torch.optim.AdamW([dict(params=body, peak=c.lr), dict(params=head, peak=c.head_lr)], lr=c.lr,
                                     betas=tuple(c.betas), weight_decay=c.weight_decay, fused=device.startswith("cuda"))
        self.step, self.tokens, self.seconds, self.curve = 0, 0, 0.0, {"train": [], "eval": []}
        self._states: tuple | None = None

    @property
    def size(self) -> int:
        return self.world.size if self.world else 1

    def train_step(self, rows: Rows) -> dict:
        """One step over this process's rows of the batch; returns tensors (loss, ce [ttt], norm), not read on the host."""
        c, world = self.c, self.world
        pick = batch_rows(len(rows), c.batch * self.size, self.step, c.seed)
        pick = pick[world.rank * c.batch : (world.rank + 1) * c.batch] if world else pick
        pick = torch.from_numpy(pick).to(self.device)
        depth = c.ttt if self.step < c.ttt_switch * c.steps else c.ttt_late
        accept = c.accept if self.step >= c.accept_from * c.steps else 0.0
        t = teach(self.target, self.net, *(x[pick] for x in (rows.ids, rows.doc, rows.pos, rows.want)),
                  states=self._kept(rows, pick) if c.cache_gb else None)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            loss, per_step = ttt_loss(self.target, self.net, t, depth, c.decay, accept, world.total if world else None)
        for g in self.opt.param_groups:
            g["lr"] = g["peak"] * learning_rate(self.step, c)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        loss = loss.detach()
        if world:
            world.sum(loss, per_step, *(p.grad for p in self.net.parameters() if p.grad is not None))
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), c.clip)
        self.opt.step()
        with torch.no_grad():
            keep = min(c.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.net.parameters()), 1 - keep)
        self.step += 1
        self.tokens += pick.numel() * rows.ids.shape[1] * self.size
        return dict(loss=loss, ce=per_step, norm=norm)

    def _kept(self, rows: Rows, pick: torch.Tensor) -> Callable[[Callable], tuple]:
        """teach's `states`: a batch whose rows were all seen before takes their target states from memory, if all rows fit."""
        if self._states is None:
            config, dtype = self.target.config, self.target.norm.weight.dtype
            shape, aux = rows.ids.shape, len(self.net.config.aux_layers)
            fits = shape[0] * shape[1] * (1 + aux) * config.hidden_size * dtype.itemsize <= self.c.cache_gb * 1e9
            new = lambda n: torch.zeros(*shape, n * config.hidden_size, dtype=dtype, device=self.device)  # noqa: E731
            self._states = (new(1), new(aux), np.zeros(shape[0], bool)) if fits else ()

        def states(forward: Callable) -> tuple:
            if not self._states:
                return forward()
            hidden, aux, have = self._states
            numbers = pick.cpu().numpy()
            if not have[numbers].all():
                hidden[pick], aux[pick] = forward()
                have[numbers] = True
            return hidden[pick], aux[pick]

        return states

    # ---- checkpoint ------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        return dict(net=self.net.state_dict(), ema=self.ema.state_dict(), opt=self.opt.state_dict(), step=self.step,
                    tokens=self.tokens, seconds=self.seconds, curve=self.curve, config=asdict(self.c),
                    draft=asdict(self.net.config), meta=self.meta)

    def save(self, path: str) -> None:
        """Written beside `path` and moved over it: an interrupted write leaves the old checkpoint."""
        torch.save(self.state(), path + ".part")
        os.replace(path + ".part", path)

    def load(self, path: str) -> None:
        s = torch.load(path, map_location=self.device, weights_only=True)
        self.net.load_state_dict(s["net"])
        self.ema.load_state_dict(s["ema"])
        self.opt.load_state_dict(s["opt"])
        self.step, self.tokens, self.seconds, self.curve = s["step"], s["tokens"], s["seconds"], s["curve"]
        self.meta = s.get("meta", self.meta)

    def write(self, work: str) -> None:
        """checkpoint.pt and curves.json; by one process."""
        if self.world and not self.world.first:
            return
        os.makedirs(work, exist_ok=True)
        self.save(os.path.join(work, "checkpoint.pt"))
        with open(os.path.join(work, "curves.json"), "w", encoding="utf-8") as f:
            json.dump(self.curve, f)

    # ---- the run ---------------------------------------------------------------------------------------------------

    def evaluate(self, rows: Rows) -> dict:
        """held_out of the EMA weights."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            return held_out(self.target, self.ema, rows, max(1, self.c.batch // 2))

    def run(self, rows: Rows, held: Rows | None, work: str | None = None,
            report: Callable[[str, dict], None] = lambda kind, point: None, stop: Callable[[], bool] = lambda: False) -> dict:
        """Train to ``steps`` (or ``max_seconds`` of this call, or until ``stop()``), writing ``work``/checkpoint.pt and
        ``work``/curves.json.

        report is called with ("train", point), ("eval", point) and ("saved", {"step": n}). An exception leaves a checkpoint
        of the last whole step, or, raised inside a step, the one before. Returns the curves."""
        c, start = self.c, time.time()
        clock = dict(base=self.seconds, start=start, saved=start, last=start, seen=self.tokens, first=self.step)
        whole = True  # no step is half done

        def measure() -> None:
            self.curve["eval"].append(dict(step=self.step) | self.evaluate(held))
            report("eval", self.curve["eval"][-1])

        held = held if held is not None and len(held) else None
        try:
            if held is not None and not self.curve["eval"]:  # what the run starts from
                measure()
            while self.step < c.steps and not self._any(time.time() - start > c.max_seconds or stop()):
                whole = False
                info = self.train_step(rows)
                whole = True
                ended = self.step == c.steps
                if self.step % c.log_every == 0 or ended:
                    self.curve["train"].append(self._point(info, clock))
                    report("train", self.curve["train"][-1])
                if held is not None and (self.step % c.eval_every == 0 or ended):
                    measure()
                if work and not ended and time.time() - clock["saved"] > c.save_seconds:
                    self.seconds, clock["saved"] = clock["base"] + time.time() - start, time.time()
                    self.write(work)
                    report("saved", dict(step=self.step))
        finally:
            self.seconds = clock["base"] + time.time() - start
            if work and whole:
                self.write(work)
        return self.curve

    def _any(self, late: bool) -> bool:
        return self.world.any(late) if self.world else late

    def _point(self, info: dict, clock: dict) -> dict:
        now = time.time()
        self.seconds = clock["base"] + now - clock["start"]
        left = (self.c.steps - self.step) * (now - clock["start"]) / max(self.step - clock["first"], 1)
        point = dict(step=self.step, loss=round(float(info["loss"]), 4), ce=[round(float(x), 4) for x in info["ce"]],
                     norm=round(float(info["norm"]), 3), tokens_per_s=round((self.tokens - clock["seen"]) / (now - clock["last"])),
                     seconds_left=round(left, 1))
        clock["last"], clock["seen"] = now, self.tokens
        return point


def training_rows(replies: Replies, c: TrainConfig, device: str) -> tuple[Rows, Rows | None]:
    """-> (training rows, held-out greedy rows or None), on ``device``."""
    held = np.flatnonzero(replies.held & replies.greedy)
    rows = pack(replies, np.flatnonzero(~replies.held), c.row, c.seed).to(device)
    if not len(held):
        return rows, None
    h = pack(replies, held, c.row, c.seed)
    return rows, Rows(*(x[: c.eval_rows].to(device) for x in (h.ids, h.doc, h.pos, h.want)))
