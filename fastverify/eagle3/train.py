"""EAGLE-3 trainer: prompts -> generate -> vocab -> train -> eval -> export, for any unscaled Llama target.

    python -m fastverify.eagle3.train prompts  --seeds DIR --tokenizer T --out prompts.npz
    python -m fastverify.eagle3.train generate --target T --prompts prompts.npz --out replies.npz
    python -m fastverify.eagle3.train vocab    --tokenizer T --replies replies.npz --size 8192 --out vocab.npy
    python -m fastverify.eagle3.train train    --target T --replies replies.npz --vocab vocab.npy --work DIR
    python -m fastverify.eagle3.train eval     --target T --draft DIR --prompts evalset.npz --out eval.json
    python -m fastverify.eagle3.train export   --work DIR --out DIR2 --target-name NAME --target-sha256 HASH

Method: training-time test (EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.2). The draft is unrolled ``ttt``
steps on its own hidden states and the loss is sum_j 0.8^j * CE(target softmax restricted to the draft vocabulary,
draft softmax) over the tokens that the target produced and whose argmax is in the draft vocabulary. Optimiser: AdamW
(Loshchilov & Hutter 2019, arXiv:1711.05101), linear warm-up and cosine decay, gradient clipping, exponential moving
average of the weights. A run is deterministic in its seed and resumable: the checkpoint holds everything that the
next step reads."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from .train_data import Prompts, Replies, Rows, batch_rows, choose_vocab, pack
from .train_eval import evaluate, held_out
from .train_generate import Generator, conversations, join
from .train_loss import teach, ttt_loss
from .train_net import DraftConfig, Eagle3Draft, TargetLlama, load_draft, load_target, save_draft


@dataclass
class TrainConfig:
    steps: int = 4000
    batch: int = 32  # rows a step
    row: int = 1024  # tokens a row
    ttt: int = 5  # unrolled steps, raised to ttt_late after ttt_switch of the run
    ttt_late: int = 7
    ttt_switch: float = 0.6
    decay: float = 0.8  # weight of step j: decay ** j
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
    max_seconds: float = float("inf")  # the schedule is by steps; this stops early and leaves a resumable checkpoint


# ------------------------------------------------------------------------------------------------------------------
# Training


def learning_rate(step: int, c: TrainConfig) -> float:
    """Factor on the peak rates: linear warm-up, then cosine to ``floor``."""
    if step < c.warmup:
        return (step + 1) / c.warmup
    x = min((step - c.warmup) / max(c.steps - c.warmup, 1), 1.0)
    return c.floor + (1 - c.floor) * 0.5 * (1 + math.cos(math.pi * x))


class Trainer:
    """The state of a run (weights, EMA, optimiser, step, curves) and its checkpoint."""

    def __init__(
        self,
        target: TargetLlama,
        draft_config: DraftConfig,
        vocab: np.ndarray,
        c: TrainConfig,
        device: str = "cpu",
        init: bool = True,
    ):
        torch.manual_seed(c.seed)
        self.target, self.c, self.device = target, c, device
        self.net = Eagle3Draft(draft_config).to(device)
        self.net.set_vocab(torch.from_numpy(np.asarray(vocab)))
        if init:
            self.net.init_from_target(target, c.seed)
        self.ema = Eagle3Draft(draft_config).to(device).requires_grad_(False)
        self.ema.load_state_dict(self.net.state_dict())
        head = list(self.net.lm_head.parameters())
        body = [p for n, p in self.net.named_parameters() if not n.startswith("lm_head")]
        self.opt = torch.optim.AdamW(
            [dict(params=body, peak=c.lr), dict(params=head, peak=c.head_lr)],
            lr=c.lr,
            betas=c.betas,
            weight_decay=c.weight_decay,
            fused=device.startswith("cuda"),
        )
        self.step, self.tokens, self.seconds, self.curve = 0, 0, 0.0, {"train": [], "eval": []}

    def train_step(self, rows: Rows) -> dict:
        c = self.c
        pick = torch.from_numpy(batch_rows(len(rows), c.batch, self.step, c.seed)).to(self.device)
        depth = c.ttt if self.step < c.ttt_switch * c.steps else c.ttt_late
        t = teach(self.target, self.net, *(x[pick] for x in (rows.ids, rows.doc, rows.pos, rows.want)))
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            loss, per_step = ttt_loss(self.target, self.net, t, depth, c.decay)
        for g in self.opt.param_groups:
            g["lr"] = g["peak"] * learning_rate(self.step, c)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), c.clip)
        self.opt.step()
        with torch.no_grad():
            keep = min(c.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.net.parameters()), 1 - keep)
        self.step += 1
        self.tokens += pick.numel() * rows.ids.shape[1]
        return dict(loss=loss.detach(), ce=per_step, norm=norm)

    def state(self) -> dict:
        return dict(
            net=self.net.state_dict(),
            ema=self.ema.state_dict(),
            opt=self.opt.state_dict(),
            step=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            curve=self.curve,
            config=asdict(self.c),
            draft=asdict(self.net.config),
        )

    def save(self, path: str) -> None:
        torch.save(self.state(), path + ".part")
        os.replace(path + ".part", path)

    def load(self, path: str) -> None:
        s = torch.load(path, map_location=self.device, weights_only=True)
        self.net.load_state_dict(s["net"])
        self.ema.load_state_dict(s["ema"])
        self.opt.load_state_dict(s["opt"])
        self.step, self.tokens, self.seconds, self.curve = s["step"], s["tokens"], s["seconds"], s["curve"]

    def evaluate(self, rows: Rows) -> dict:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            return held_out(self.target, self.ema, rows, max(1, self.c.batch // 2))

    def run(self, rows: Rows, held: Rows | None, work: str | None = None, log=print) -> dict:
        """Train to ``steps`` (or ``max_seconds`` of this call), writing ``work``/checkpoint.pt and
        ``work``/curves.json."""
        c, start, saved, last = self.c, time.time(), time.time(), time.time()
        base, seen = self.seconds, self.tokens
        while self.step < c.steps and time.time() - start < c.max_seconds:
            info = self.train_step(rows)
            if self.step % c.log_every == 0 or self.step == c.steps:
                now = time.time()
                point = dict(
                    step=self.step,
                    loss=round(float(info["loss"]), 4),
                    ce=[round(float(x), 4) for x in info["ce"]],
                    norm=round(float(info["norm"]), 3),
                    tokens_per_s=round((self.tokens - seen) / (now - last)),
                )
                last, seen, self.seconds = now, self.tokens, base + now - start
                self.curve["train"].append(point)
                log(json.dumps(point), flush=True)
            ended = self.step == c.steps
            if held is not None and len(held) and (self.step % c.eval_every == 0 or ended):
                point = dict(step=self.step) | self.evaluate(held)
                self.curve["eval"].append(point)
                log("held-out " + json.dumps(point), flush=True)
            if work and (ended or time.time() - saved > c.save_seconds):
                self.seconds, saved = base + time.time() - start, time.time()
                self.write(work)
        self.seconds = base + time.time() - start
        if work:
            self.write(work)
        return self.curve

    def write(self, work: str) -> None:
        os.makedirs(work, exist_ok=True)
        self.save(os.path.join(work, "checkpoint.pt"))
        with open(os.path.join(work, "curves.json"), "w") as f:
            json.dump(self.curve, f)


def plot_curves(curve: dict, path: str) -> None:
    """Two panels: training cross entropy per unrolled step; held-out agreement (depth 1) and free-running
    acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (a, b) = plt.subplots(1, 2, figsize=(11, 4))
    for j in range(max((len(p["ce"]) for p in curve["train"]), default=0)):
        pts = [(p["step"], p["ce"][j]) for p in curve["train"] if len(p["ce"]) > j]
        a.plot(*zip(*pts), lw=0.8, label=f"unrolled step {j}")
    a.set(xlabel="step", ylabel="cross entropy (nats)", title="training")
    for j in range(len(curve["eval"][0]["accept"]) if curve["eval"] else 0):
        b.plot(
            [p["step"] for p in curve["eval"]],
            [p["conditional"][j] for p in curve["eval"]],
            marker=".",
            label="depth 1 (teacher-forced)" if j == 0 else f"depth {j + 1} given depths 1..{j}",
        )
    b.set(xlabel="step", ylabel="top-1 agreement", title="held-out, greedy, EMA weights")
    for ax in (a, b):
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)


# ------------------------------------------------------------------------------------------------------------------
# Commands


def _device(a) -> tuple[str, torch.dtype]:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if a.device == "auto" else a.device
    return device, torch.bfloat16 if device.startswith("cuda") else torch.float32


def cmd_prompts(a) -> None:
    from .train_prompts import build

    build(a.seeds, a.tokenizer, a.out, a.limit, a.seed, a.exclude)


def cmd_evalset(a) -> None:
    from .train_prompts import from_jsonl

    from_jsonl(a.jsonl, a.tokenizer, a.out, a.limit)


def cmd_generate(a) -> None:
    """Greedy replies for every prompt, then sampled ones for ``--samples`` passes; the file is rewritten after every
    pass."""
    device, dtype = _device(a)
    prompts = Prompts.load(a.prompts)
    gen = Generator(load_target(a.target, dtype, device), a.eos, a.rows, seed=a.seed)
    deadline, parts = time.time() + a.max_seconds, []
    for n in range(1 + a.samples):
        order = np.arange(len(prompts.first))
        if n:
            order = order[~prompts.held]  # the held-out figures are about greedy text
        parts.append(conversations(gen, prompts, a.max_new, n == 0, a.seed + n, deadline, order=order))
        both = join(parts)
        both.save(a.out)
        print(
            f"generate: pass {n}: {len(both.ids)} conversations, {int(both.asst.flat.sum())} generated tokens",
            flush=True,
        )
        if time.time() > deadline:
            break


def cmd_vocab(a) -> None:
    from .train_prompts import keep_tokens

    must = keep_tokens(a.tokenizer) if a.tokenizer else [0, 1, 2]
    ids, cover = choose_vocab(Replies.load(a.replies), a.size, a.vocab_size, must)
    np.save(a.out, ids)
    print(f"vocab: {len(ids)} of {a.vocab_size} ids cover {100 * cover:.3f} % of the generated tokens")


def training_rows(replies: Replies, c: TrainConfig, device: str) -> tuple[Rows, Rows]:
    """-> (training rows, held-out greedy rows), on ``device``."""
    held = np.flatnonzero(replies.held & replies.greedy)
    rows = pack(replies, np.flatnonzero(~replies.held), c.row, c.seed).to(device)
    held_rows = pack(replies, held, c.row, c.seed) if len(held) else None
    if held_rows is not None:
        held_rows = Rows(
            *(x[: c.eval_rows].to(device) for x in (held_rows.ids, held_rows.doc, held_rows.pos, held_rows.want))
        )
    return rows, held_rows


def cmd_train(a) -> None:
    device, dtype = _device(a)
    c = TrainConfig(**{k: v for k, v in vars(a).items() if k in TrainConfig.__dataclass_fields__ and v is not None})
    target = load_target(a.target, dtype, device)
    vocab, t0 = np.load(a.vocab), time.time()
    rows, held = training_rows(Replies.load(a.replies), c, device)
    print(
        f"train: {len(rows)} rows of {c.row} ({len(rows) / c.batch:.0f} steps an epoch), packed in "
        f"{time.time() - t0:.0f} s",
        flush=True,
    )
    trainer = Trainer(
        target, DraftConfig.for_target(target.config, len(vocab)), vocab, c, device, init=not a.random_init
    )
    path = os.path.join(a.work, "checkpoint.pt")
    if os.path.exists(path):
        trainer.load(path)
        print(f"train: resumed at step {trainer.step}", flush=True)
    trainer.run(rows, held, a.work)


def cmd_eval(a) -> None:
    """Greedy replies to the prompts of an evaluation set, then exact chain replay. Runs in float32."""
    device, _ = _device(a)
    target = load_target(a.target, torch.float32, device)
    draft, prompts = load_draft(a.draft, device), Prompts.load(a.prompts)
    if a.replies and os.path.exists(a.replies):
        replies = Replies.load(a.replies)
    else:
        gen = Generator(target, a.eos, a.rows, seed=a.seed, cache_bytes=a.cache_gb * 1e9)
        replies = conversations(gen, prompts, a.max_new, True, a.seed, max_repeat=2.0)
        if a.replies:
            replies.save(a.replies)
    out = evaluate(target, draft, replies)
    with open(a.out, "w") as f:
        json.dump(out, f, indent=1)
    for name, d in out.items():
        print(
            f"eval: {name:12s} depth-1 {d['depth1_agreement']:.3f}  chain-3 tau {d['chain3']['tau']:.3f}  chain-5 tau "
            f"{d['chain5']['tau']:.3f}",
            flush=True,
        )


def cmd_export(a) -> None:
    s = torch.load(os.path.join(a.work, "checkpoint.pt"), map_location="cpu", weights_only=True)
    net = Eagle3Draft(DraftConfig(**s["draft"]))
    net.load_state_dict(s["ema"])
    save_draft(net, a.out, dict(name=a.target_name, sha256=a.target_sha256), getattr(torch, a.dtype))
    record = dict(
        steps=s["step"],
        tokens_seen=s["tokens"],
        minutes=round(s["seconds"] / 60, 2),
        hyper_parameters={k: v for k, v in s["config"].items() if v != float("inf")},
        held_out=s["curve"]["eval"][-1] if s["curve"]["eval"] else None,
    )
    if a.extra:
        with open(a.extra) as f:
            record |= json.load(f)
    with open(os.path.join(a.out, "training_record.json"), "w") as f:
        json.dump(record, f, indent=1)
        f.write("\n")
    if a.plot:
        plot_curves(s["curve"], os.path.join(a.out, "curves.png"))
    with open(os.path.join(a.out, "model.safetensors"), "rb") as f:
        print("export: sha256", hashlib.sha256(f.read()).hexdigest())


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="fastverify.eagle3.train", description=__doc__.split("\n")[0])
    sub = p.add_subparsers(dest="command", required=True)

    def add(name, fn, *names, **extra):
        q = sub.add_parser(name)
        q.set_defaults(fn=fn)
        for n in names:
            q.add_argument("--" + n, required=True)
        q.add_argument("--device", default="auto")
        q.add_argument("--seed", type=int, default=0)
        for k, v in extra.items():
            kind = dict(action="store_true") if v is False else dict(default=v, type=type(v) if v is not None else str)
            q.add_argument("--" + k.replace("_", "-"), **kind)
        return q

    add("prompts", cmd_prompts, "seeds", "tokenizer", "out", limit=60000).add_argument(
        "--exclude", nargs="*", default=[]
    )
    add("evalset", cmd_evalset, "tokenizer", "out", limit=0).add_argument("--jsonl", nargs="+", required=True)
    q = add("generate", cmd_generate, "target", "prompts", "out", max_new=384, samples=2, rows=2048, max_seconds=1e9)
    q.add_argument("--eos", type=int, nargs="+", default=[2])
    add("vocab", cmd_vocab, "replies", "out", size=8192, vocab_size=49152, tokenizer=None)
    q = add("train", cmd_train, "target", "replies", "vocab", "work", random_init=False)
    for name, f in TrainConfig.__dataclass_fields__.items():
        if name not in ("seed", "betas"):
            q.add_argument("--" + name.replace("_", "-"), type=type(f.default), default=None)
    q = add("eval", cmd_eval, "target", "draft", "prompts", "out", replies=None, max_new=256, rows=512, cache_gb=60.0)
    q.add_argument("--eos", type=int, nargs="+", default=[2])
    add("export", cmd_export, "work", "out", target_name="", target_sha256="", extra=None, dtype="bfloat16", plot=False)
    return p


def main(argv: list[str] | None = None) -> None:
    a = parser().parse_args(argv)
    a.fn(a)


if __name__ == "__main__":
    main()
