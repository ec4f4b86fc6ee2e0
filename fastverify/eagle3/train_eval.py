"""Held-out figures of an EAGLE-3 draft and an exact replay of greedy chain speculation, both from teacher-forced
unrolls.

Why no decoding loop is needed: the unroll gives the chain that starts at pair k the true tokens. Its first j depths
are therefore right exactly when those of a free-running draft are (a free-running draft has only been fed true tokens
until its first miss), so the leading matches of a chain are the drafts that a greedy verify accepts there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .train_data import Replies, Rows
from .train_loss import teach
from .train_net import Eagle3Draft, TargetLlama


@torch.no_grad()
def match_table(target: TargetLlama, draft: Eagle3Draft, part: tuple, depth: int) -> dict:
    """part = (ids, doc, pos, want), each [B, T] -> flat tensors over the A wanted positions q (next token is the
    target's).

    match [depth, A]    draft argmax of the chain starting at k = q - 1 - j equals the target argmax at q
    token [depth, A]    the same against the token that follows q in the text
    overlap [depth, A]  sum min(p, q) over the draft vocabulary
    ok [depth, A]       that chain exists (k >= 0 in the document)
    """
    t = teach(target, draft, *part)
    nxt = t.ids.roll(-1, 1).flatten()[t.at]
    flat_pos, vocab = t.pos.flatten()[t.at], draft.vocab_ids
    match, token, overlap, ok = [], [], [], []
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, t.ids, t.aux, t.pos, t.mask, depth)):
        x = draft.logits(h2.flatten(0, 1)[(t.at - 1 - j).clamp_(min=0)]).float()
        pick = vocab[x.argmax(-1)]
        match.append(pick == t.top)
        token.append(pick == nxt)
        overlap.append(torch.minimum(x.softmax(-1), t.prob.float()).sum(-1))
        ok.append(flat_pos >= 1 + j)
    return dict(
        at=t.at,
        match=torch.stack(match),
        token=torch.stack(token),
        overlap=torch.stack(overlap),
        ok=torch.stack(ok),
        greedy=t.top == nxt,
    )


def chain_grid(m: dict, n: int, key: str) -> Tensor:
    """match_table -> bool [depth, n] indexed by the chain's first pair k: right at depth j+1."""
    depth = m["ok"].shape[0]
    grid = torch.zeros(depth, n, dtype=torch.bool, device=m["at"].device)
    for j in range(depth):
        keep = m["ok"][j]
        grid[j, (m["at"] - 1 - j)[keep]] = m[key][j][keep]
    return grid


def _round(xs) -> list[float]:
    return [round(float(x), 4) for x in xs]


@torch.no_grad()
def held_out(target: TargetLlama, draft: Eagle3Draft, rows: Rows, batch: int, depth: int = 5) -> dict:
    """Per-depth figures over packed rows (use rows of greedy replies: the free-running figures assume them).

    agreement[j]   depth j+1 given true tokens; depth 1 is plain teacher forcing
    overlap[j]     mean of sum min(p, q) over the draft vocabulary
    accept[j]      free-running, unconditional: P(depths 1..j+1 all match); conditional[j] = accept[j] / accept[j-1]
    chain_tau[j]   1 + accept[0] + .. + accept[j]: tokens a round of j+1 drafts would emit if every position started one
    """
    hits, over, count = torch.zeros(depth), torch.zeros(depth), torch.zeros(depth)
    run, starts = torch.zeros(depth), 0
    for a in range(0, len(rows), batch):
        part = tuple(x[a : a + batch] for x in (rows.ids, rows.doc, rows.pos, rows.want))
        m = match_table(target, draft, part, depth)
        hits += (m["match"] & m["ok"]).sum(1).cpu()
        over += (m["overlap"] * m["ok"]).sum(1).cpu()
        count += m["ok"].sum(1).cpu()
        doc, want, n = part[1].flatten(), part[3].flatten(), part[0].numel()
        k = torch.arange(n - depth, device=want.device)
        whole = (doc[k] == doc[k + depth]) & torch.stack([want[k + 1 + j] for j in range(depth)]).all(0)
        run += chain_grid(m, n, "match")[:, k[whole]].cumprod(0).sum(1).float().cpu()
        starts += int(whole.sum())
    accept = (run / max(starts, 1)).tolist()
    cond = [accept[0]] + [accept[j] / max(accept[j - 1], 1e-9) for j in range(1, depth)]
    return dict(
        agreement=_round(hits / count.clamp(min=1)),
        overlap=_round(over / count.clamp(min=1)),
        accept=_round(accept),
        conditional=_round(cond),
        chain_tau=_round(1 + np.cumsum(accept)),
        positions=int(count[0]),
    )


def replay(run: np.ndarray, asst: np.ndarray, depth: int) -> list[int]:
    """run [T]: leading matches of the chain at pair k (cut at ``depth``); asst [T]: reply tokens -> accepted drafts
    per round.

    In each reply span the first token comes from prefill; a round has root n (the last emitted token), drafts from
    pair n-1, accepts a tokens and emits a + 1."""
    accepted = []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], asst.astype(np.int8), [0]])))
    for first, end in zip(edges[::2], edges[1::2]):
        n = first
        while n < end - 1:
            a = int(min(run[n - 1], depth, end - 1 - n))
            accepted.append(a)
            n += a + 1
    return accepted


@torch.no_grad()
def evaluate(target: TargetLlama, draft: Eagle3Draft, r: Replies, depths=(3, 5), tokens: int = 16384) -> dict:
    """Greedy conversations -> per source: depth-1 agreement and, per chain length, tau, accepted/drafted and
    per-depth rates."""
    device, most = target.norm.weight.device, max(depths)
    order = np.argsort(r.ids.lengths(), kind="stable")
    rounds = {s: {d: [] for d in depths} for s in range(len(r.names))}
    agree, greedy, count = np.zeros(len(r.names)), np.zeros(len(r.names)), np.zeros(len(r.names))
    at = 0
    while at < len(order):
        size = 1
        while at + size < len(order) and (size + 1) * len(r.ids[order[at + size]]) <= tokens:
            size += 1
        members, at = order[at : at + size], at + size
        t = max(len(r.ids[i]) for i in members)
        ids, doc = torch.zeros(size, t, dtype=torch.int32), torch.full((size, t), -1, dtype=torch.int16)
        asst = torch.zeros(size, t, dtype=torch.bool)
        for b, i in enumerate(members):
            n = len(r.ids[i])
            ids[b, :n], doc[b, :n] = torch.from_numpy(r.ids[i]), 0
            asst[b, :n] = torch.from_numpy(r.asst[i].astype(bool))
        want = torch.zeros_like(asst)
        want[:, :-1] = asst[:, 1:]
        part = tuple(x.to(device) for x in (ids, doc, torch.arange(t).expand(size, t), want))
        m = match_table(target, draft, part, most)
        run = chain_grid(m, size * t, "token").cumprod(0).sum(0).view(size, t).cpu().numpy()
        src = torch.from_numpy(r.source[members].astype(np.int64)).to(device)[m["at"] // t]
        for s in set(r.source[members].tolist()):
            mine = (src == s) & m["ok"][0]
            agree[s] += int((m["match"][0] & mine).sum())
            greedy[s] += int((m["greedy"] & mine).sum())
            count[s] += int(mine.sum())
        for b, i in enumerate(members):
            for d in depths:
                rounds[int(r.source[i])][d] += replay(run[b], asst[b].numpy(), d)
    out = {}
    for s, name in enumerate(r.names):
        if count[s]:
            out[name] = dict(
                conversations=int((r.source == s).sum()),
                positions=int(count[s]),
                depth1_agreement=round(agree[s] / count[s], 4),
                text_is_greedy=round(greedy[s] / count[s], 4),
            )
            for d in depths:
                out[name][f"chain{d}"] = chain_stats(rounds[s][d], d)
    out["all"] = dict(depth1_agreement=round(agree.sum() / max(count.sum(), 1), 4)) | {
        f"chain{d}": chain_stats([a for s in rounds for a in rounds[s][d]], d) for d in depths
    }
    return out


def chain_stats(accepted: list[int], depth: int) -> dict:
    """Accepted drafts per round -> tau (bonus included), accepted/drafted, unconditional and conditional per-depth
    rates."""
    a = np.asarray(accepted)
    if not len(a):
        return dict(rounds=0)
    reach = [float((a >= j).mean()) for j in range(depth + 1)]
    return dict(
        rounds=len(a),
        tau=round(float(a.mean()) + 1, 4),
        accepted_per_drafted=round(float(a.mean()) / depth, 4),
        unconditional=_round(reach[1:]),
        conditional=_round(reach[j + 1] / max(reach[j], 1e-9) for j in range(depth)),
    )
