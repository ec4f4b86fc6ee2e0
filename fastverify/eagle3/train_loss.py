"""The loss of EAGLE-3's training-time test (Li et al. 2025, arXiv:2503.01840, section 3.2).

loss = sum_j decay^j * mean over tokens of CE(target softmax restricted to the draft vocabulary, draft softmax of step
j), over tokens that the target produced and whose argmax lies in the draft vocabulary; optionally with the acceptance loss
-log sum min(p, q). Shapes: B rows, T tokens, A
selected positions, V / Vd target / draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from .train_net import Eagle3Draft, TargetLlama, packed_mask


class SoftCrossEntropy(torch.autograd.Function):
    """sum_a w[a] * (CE(p[a], q[a]) + accept * -log sum_v min(p[a, v], q[a, v])) with q = softmax(logits).

    The second term is the acceptance loss: the logarithm of the rate at which drafts sampled from q are accepted against p.
    logits [A, Vd]; p [A, Vd] rows sum to one; w [A]; accept a number -> (loss, its cross entropy alone without gradient).
    The gradient is made in the forward pass and kept in the logits' dtype; chunked, so that no float32 copy of the logits
    outlives a chunk."""

    @staticmethod
    def forward(ctx, logits: Tensor, p: Tensor, w: Tensor, accept: float = 0.0) -> tuple[Tensor, Tensor]:
        grad, total = torch.empty_like(logits), logits.new_zeros((), dtype=torch.float32)
        extra = torch.zeros_like(total)
        with torch.autocast(logits.device.type, enabled=False):
            for a in range(0, logits.shape[0], 8192):
                s = slice(a, a + 8192)
                log_q, wa, pa = logits[s].log_softmax(-1, dtype=torch.float32), w[s].float(), p[s].float()
                total -= torch.linalg.vecdot(log_q, pa).dot(wa)
                q = log_q.exp_()
                if not accept:
                    grad[s] = q.sub_(p[s]).mul_(wa[:, None])
                    continue
                rate = torch.minimum(q, pa).sum(-1).clamp_min(1e-6)
                below = q * (q < pa)
                extra -= accept * rate.log().dot(wa)
                pull = (q * below.sum(-1, keepdim=True) - below) * (accept / rate)[:, None]
                grad[s] = (q - pa + pull) * wa[:, None]
        ctx.save_for_backward(grad)
        cross = total.clone()
        ctx.mark_non_differentiable(cross)
        return total + extra, cross

    @staticmethod
    def backward(ctx, g: Tensor, _):
        return ctx.saved_tensors[0] * g.to(ctx.saved_tensors[0].dtype), None, None, None


@dataclass
class Teacher:
    """What the draft learns from one batch: everything the loss needs, taken from one target forward."""

    ids: Tensor  # [B, T] int64
    pos: Tensor  # [B, T] int64
    mask: Tensor  # [B, 1, T, T] bool
    aux: Tensor  # [B, T, 3*Ht]
    at: Tensor  # [A] flat positions whose next token the target produced
    prob: Tensor  # [A, Vd] target softmax over the draft vocabulary, renormalised
    top: Tensor  # [A] target argmax over V
    inside: Tensor  # [A] bool: argmax in the draft vocabulary


@torch.no_grad()
def teach(target: TargetLlama, draft: Eagle3Draft, ids: Tensor, doc: Tensor, pos: Tensor, want: Tensor,
          states: "Callable | None" = None) -> Teacher:
    """One target forward over packed rows (all arguments [B, T]).

    states: called with that forward as a function without arguments; returns its (hidden, aux), perhaps kept from before."""
    ids, pos = ids.long(), pos.long()
    mask = packed_mask(doc)

    def forward() -> tuple:
        return target(ids, pos, mask, draft.config.aux_layers)

    hidden, aux = states(forward) if states else forward()
    at = want.flatten().nonzero().squeeze(1)
    vocab, h = draft.vocab_ids, hidden.flatten(0, 1)[at]
    prob = torch.empty(at.numel(), vocab.numel(), dtype=torch.bfloat16 if h.is_cuda else torch.float32, device=h.device)
    top = torch.empty_like(at)
    for a in range(0, at.numel(), 8192):
        x = target.logits(h[a : a + 8192])
        top[a : a + 8192] = x.argmax(-1)
        prob[a : a + 8192] = x.index_select(1, vocab).softmax(-1)
    inside = draft.t2d[top.clamp(max=draft.t2d.numel() - 1)] & (top < draft.t2d.numel())  # the target's table may be padded
    return Teacher(ids, pos, mask, aux, at, prob, top, inside)


def ttt_loss(target: TargetLlama, draft: Eagle3Draft, t: Teacher, steps: int, decay: float, accept: float = 0.0,
             total=None) -> tuple[Tensor, Tensor]:
    """-> (loss, cross entropies [steps]). Chain k = at - 1 - j of step j predicts the token after ``at``.

    accept: weight of the acceptance loss. total: sums a tensor of token counts [steps] over all processes in place; the loss
    and the cross entropies are then this process's share, to be summed."""
    flat_pos = t.pos.flatten()[t.at]
    weights = [(t.inside & (flat_pos >= 1 + j)).float() for j in range(steps)]
    counts = torch.stack([w.sum() for w in weights])
    if total is not None:
        total(counts)
    loss, cross = 0.0, []
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, t.ids, t.aux, t.pos, t.mask, steps)):
        rows = h2.flatten(0, 1)[(t.at - 1 - j).clamp_(min=0)]
        one, ce = SoftCrossEntropy.apply(draft.logits(rows), t.prob, weights[j] / counts[j].clamp(min=1.0), accept)
        loss = loss + decay**j * one
        cross.append(ce)
    return loss, torch.stack(cross)
