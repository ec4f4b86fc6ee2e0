"""EAGLE-3 trainer: prompts -> generate -> vocab -> train -> eval -> export, for any unscaled Llama target.

    python -m fastverify.eagle3.train prompts  --seeds DIR --tokenizer T --out prompts.npz
    python -m fastverify.eagle3.train generate --target T --prompts prompts.npz --out replies.npz
    python -m fastverify.eagle3.train vocab    --target T --replies replies.npz --size 8192 --out vocab.npy
    python -m fastverify.eagle3.train train    --target T --replies replies.npz --vocab vocab.npy --work DIR
    python -m fastverify.eagle3.train eval     --target T --draft DIR --prompts evalset.npz --out eval.json
    python -m fastverify.eagle3.train export   --work DIR --out DIR2 --target-name NAME --target-sha256 HASH

Method: training-time test (EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.2). The draft is unrolled ``ttt`` steps on its own
hidden states and the loss is sum_j 0.8^j * CE(target softmax restricted to the draft vocabulary, draft softmax) over the tokens
that the target produced and whose argmax is in the draft vocabulary. Optimiser: AdamW (Loshchilov & Hutter 2019,
arXiv:1711.05101), linear warm-up and cosine decay, gradient clipping, exponential moving average of the weights. A run is
deterministic in its seed and resumable: the checkpoint holds everything that the next step reads.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from .train_data import Prompts, Replies, Rows, batch_rows, choose_vocab, pack
from .train_net import DraftConfig, Eagle3Draft, TargetLlama, load_draft, load_target, packed_mask, save_draft


@dataclass
class TrainConfig:
    steps: int = 4000
    batch: int = 32                # rows a step
    row: int = 1024                # tokens a row
    ttt: int = 5                   # unrolled steps, raised to ttt_late after ttt_switch of the run
    ttt_late: int = 7
    ttt_switch: float = 0.6
    decay: float = 0.8             # weight of step j: decay ** j
    lr: float = 1e-3
    head_lr: float = 5e-4
    warmup: int = 200
    floor: float = 0.05            # cosine ends at floor * lr
    betas: tuple = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    ema: float = 0.999
    seed: int = 0
    eval_every: int = 200
    eval_rows: int = 64
    log_every: int = 20
    save_seconds: float = 60.0
    max_seconds: float = float("inf")   # the schedule is by steps; this stops early and leaves a resumable checkpoint


# ------------------------------------------------------------------------------------------------------------------
# Loss


class SoftCrossEntropy(torch.autograd.Function):
    """sum_a w[a] * CE(p[a], softmax(logits[a])), with the gradient made in the forward pass and kept in the logits' dtype.

    logits [A, Vd]; p [A, Vd] rows sum to one; w [A]. Chunked, so that no float32 copy of the logits outlives a chunk."""

    @staticmethod
    def forward(ctx, logits: Tensor, p: Tensor, w: Tensor) -> Tensor:
        grad, total = torch.empty_like(logits), logits.new_zeros((), dtype=torch.float32)
        for a in range(0, logits.shape[0], 8192):
            s = slice(a, a + 8192)
            x, q, wa = logits[s].float(), p[s].float(), w[s].float()
            log_z = x.logsumexp(-1)
            total += ((log_z - (q * x).sum(-1)) * wa).sum()
            grad[s] = x.sub_(log_z[:, None]).exp_().sub_(q).mul_(wa[:, None]).to(grad.dtype)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.saved_tensors[0] * g.to(ctx.saved_tensors[0].dtype), None, None


@dataclass
class Teacher:
    """What the draft learns from one batch: everything the loss needs, taken from one target forward."""

    ids: Tensor                    # [B, T] int64
    pos: Tensor                    # [B, T] int64
    mask: Tensor                   # [B, 1, T, T] bool
    aux: Tensor                    # [B, T, 3*Ht]
    at: Tensor                     # [A] flat positions whose next token the target produced
    prob: Tensor                   # [A, Vd] target softmax over the draft vocabulary, renormalised
    top: Tensor                    # [A] target argmax over V
    inside: Tensor                 # [A] bool: argmax in the draft vocabulary


@torch.no_grad()
def teach(target: TargetLlama, draft: Eagle3Draft, ids: Tensor, doc: Tensor, pos: Tensor, want: Tensor) -> Teacher:
    """One target forward over packed rows (all arguments [B, T])."""
    ids, pos = ids.long(), pos.long()
    mask = packed_mask(doc)
    hidden, aux = target(ids, pos, mask, draft.config.aux_layers)
    at = want.flatten().nonzero().squeeze(1)
    vocab, h = draft.vocab_ids, hidden.flatten(0, 1)[at]
    prob = torch.empty(at.numel(), vocab.numel(), dtype=torch.bfloat16 if h.is_cuda else torch.float32, device=h.device)
    top = torch.empty_like(at)
    for a in range(0, at.numel(), 8192):
        x = target.logits(h[a:a + 8192])
        top[a:a + 8192] = x.argmax(-1)
        prob[a:a + 8192] = x.index_select(1, vocab).softmax(-1)
    return Teacher(ids, pos, mask, aux, at, prob, top, draft.t2d[top])


def ttt_loss(target: TargetLlama, draft: Eagle3Draft, t: Teacher, steps: int, decay: float) -> tuple[Tensor, list[Tensor]]:
    """-> (loss, per-step mean cross entropies). Chain k = at - 1 - j of step j predicts the token after ``at``."""
    loss, per_step = 0.0, []
    flat_pos = t.pos.flatten()[t.at]
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, t.ids, t.aux, t.pos, t.mask, steps)):
        w = (t.inside & (flat_pos >= 1 + j)).float()
        rows = h2.flatten(0, 1)[(t.at - 1 - j).clamp_(min=0)]
        ce = SoftCrossEntropy.apply(draft.logits(rows), t.prob, w / w.sum().clamp(min=1.0))
        loss = loss + decay ** j * ce
        per_step.append(ce.detach())
    return loss, per_step


# ------------------------------------------------------------------------------------------------------------------
# Held-out figures


@torch.no_grad()
def match_table(target: TargetLlama, draft: Eagle3Draft, ids: Tensor, doc: Tensor, pos: Tensor, want: Tensor, depth: int) -> dict:
    """Per position and depth: does the draft's argmax at depth j+1 equal the token the target's argmax gives there?

    The chain is given the true tokens, so its first j depths are right exactly when a free-running draft's are: the run of
    leading matches from pair k is the number of drafts a greedy verify accepts there. All returned tensors are flat [A'] over
    ``want`` positions q; entry j of ``match`` is about the chain that starts at k = q - 1 - j.
    """
    t = teach(target, draft, ids, doc, pos, want)
    flat_pos = t.pos.flatten()[t.at]
    vocab = draft.vocab_ids
    match, overlap, ok = [], [], []
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, t.ids, t.aux, t.pos, t.mask, depth)):
        x = draft.logits(h2.flatten(0, 1)[(t.at - 1 - j).clamp_(min=0)]).float()
        match.append(vocab[x.argmax(-1)] == t.top)
        overlap.append(torch.minimum(x.softmax(-1), t.prob.float()).sum(-1))
        ok.append(flat_pos >= 1 + j)
    return dict(at=t.at, match=torch.stack(match), overlap=torch.stack(overlap), ok=torch.stack(ok), inside=t.inside, pos=flat_pos)


@torch.no_grad()
def held_out(target: TargetLlama, draft: Eagle3Draft, rows: Rows, batch: int, depth: int = 5) -> dict:
    """Per-depth figures over packed rows.

    agreement[j]   depth j+1 given true tokens; depth 1 is plain teacher forcing
    overlap[j]     mean of sum min(p, q) over the draft vocabulary
    accept[j]      free-running: P(depths 1..j+1 all match); conditional[j] = accept[j] / accept[j-1]
    """
    hits, over, count = torch.zeros(depth), torch.zeros(depth), torch.zeros(depth)
    run, starts = torch.zeros(depth), 0
    for a in range(0, len(rows), batch):
        part = [x[a:a + batch] for x in (rows.ids, rows.doc, rows.pos, rows.want)]
        m = match_table(target, draft, *part, depth)
        hits += (m["match"] & m["ok"]).sum(1).cpu()
        over += (m["overlap"] * m["ok"]).sum(1).cpu()
        count += m["ok"].sum(1).cpu()
        n = part[0].numel()
        want = part[3].flatten()
        grid = torch.zeros(depth, n, dtype=torch.bool, device=want.device)      # [j, k]: chain k right at depth j+1
        for j in range(depth):
            keep = m["ok"][j]
            grid[j, (m["at"] - 1 - j)[keep]] = m["match"][j][keep]
        whole = torch.zeros(n, dtype=torch.bool, device=want.device)            # chains whose every depth has a wanted target
        idx = torch.arange(n - depth, device=want.device)
        whole[:n - depth] = torch.stack([want[idx + 1 + j] for j in range(depth)]).all(0)
        whole[:n - depth] &= (part[1].flatten()[idx] == part[1].flatten()[idx + depth])
        run += grid[:, whole].cumprod(0).sum(1).float().cpu()
        starts += int(whole.sum())
    accept = (run / max(starts, 1)).tolist()
    cond = [accept[0]] + [accept[j] / max(accept[j - 1], 1e-9) for j in range(1, depth)]
    r = lambda xs: [round(float(x), 4) for x in xs]
    return dict(agreement=r(hits / count.clamp(min=1)), overlap=r(over / count.clamp(min=1)), accept=r(accept),
                conditional=r(cond), chain_tau=r(1 + np.cumsum(accept)), positions=int(count[0]))


@torch.no_grad()
def greedy_rounds(target: TargetLlama, draft: Eagle3Draft, ids: Tensor, asst: Tensor, depth: int) -> dict:
    """Replay greedy chain speculation over one conversation whose marked tokens are the target's greedy reply.

    ids, asst [T]. The first reply token comes from prefill; each round starts at the last emitted token n, drafts ``depth`` tokens
    from pair n-1, accepts the leading matches (all inside the reply) and emits one more. -> rounds, accepted, emitted,
    depth-wise counts."""
    t = ids.numel()
    want = torch.zeros(t, dtype=torch.bool, device=ids.device)
    want[:-1] = asst[1:].bool()
    zero = torch.zeros(1, t, dtype=torch.int16, device=ids.device)
    m = match_table(target, draft, ids[None], zero, torch.arange(t, device=ids.device)[None], want[None], depth)
    grid = torch.zeros(depth, t, dtype=torch.bool, device=ids.device)
    nxt = torch.cat([ids[1:], ids[:1]])
    for j in range(depth):
        keep = m["ok"][j]
        grid[j, (m["at"] - 1 - j)[keep]] = m["match"][j][keep]
    first = int(want.nonzero()[0])                                      # position whose next token is the first reply token
    agree = int((m["inside"] & m["match"][0] & m["ok"][0]).sum())
    run, table = grid.cumprod(0).sum(0).tolist(), dict(rounds=0, accepted=0, emitted=0, by_depth=[0] * depth)
    wanted = want.tolist()
    n = first + 1                                                       # index of the last emitted token (the root)
    while n < t and wanted[n] if n < t else False:
        left = 0
        while n + left < t and wanted[n + left]:
            left += 1                                                   # reply tokens after the root
        a = min(run[n - 1], depth, left)
        table["rounds"] += 1
        table["accepted"] += a
        table["emitted"] += min(a + 1, left)
        for j in range(a):
            table["by_depth"][j] += 1
        n += a + 1
    table |= dict(agree=agree, positions=int(m["ok"][0].sum()),
                  target_greedy=int((m["ok"][0] & (nxt[m["at"]] == teach_top(m, target, ids))).sum()) if False else None)
    return table
