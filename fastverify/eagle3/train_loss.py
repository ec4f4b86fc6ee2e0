"""The loss of EAGLE-3's training-time test (Li et al. 2025, arXiv:2503.01840, section 3.2).

loss = sum_j decay^j * mean over tokens of CE(target softmax restricted to the draft vocabulary, draft softmax of step
j), over tokens that the target produced and whose argmax lies in the draft vocabulary. Shapes: B rows, T tokens, A
selected positions, V / Vd target / draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .train_net import Eagle3Draft, TargetLlama, packed_mask


class SoftCrossEntropy(torch.autograd.Function):
    """sum_a w[a] * CE(p[a], softmax(logits[a])), with the gradient made in the forward pass and kept in the logits'
    dtype.

    logits [A, Vd]; p [A, Vd] rows sum to one; w [A]. Chunked, so that no float32 copy of the logits outlives a
    chunk."""

    @staticmethod
    def forward(ctx, logits: Tensor, p: Tensor, w: Tensor) -> Tensor:
        grad, total = torch.empty_like(logits), logits.new_zeros((), dtype=torch.float32)
        with torch.autocast(logits.device.type, enabled=False):
            for a in range(0, logits.shape[0], 8192):
                s = slice(a, a + 8192)
                log_q, wa = logits[s].log_softmax(-1, dtype=torch.float32), w[s].float()
                total -= torch.linalg.vecdot(log_q, p[s].float()).dot(wa)
                grad[s] = log_q.exp_().sub_(p[s]).mul_(wa[:, None])
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.saved_tensors[0] * g.to(ctx.saved_tensors[0].dtype), None, None


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
        x = target.logits(h[a : a + 8192])
        top[a : a + 8192] = x.argmax(-1)
        prob[a : a + 8192] = x.index_select(1, vocab).softmax(-1)
    return Teacher(ids, pos, mask, aux, at, prob, top, draft.t2d[top])


def ttt_loss(
    target: TargetLlama, draft: Eagle3Draft, t: Teacher, steps: int, decay: float
) -> tuple[Tensor, list[Tensor]]:
    """-> (loss, per-step mean cross entropies). Chain k = at - 1 - j of step j predicts the token after ``at``."""
    loss, per_step = 0.0, []
    flat_pos = t.pos.flatten()[t.at]
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, t.ids, t.aux, t.pos, t.mask, steps)):
        w = (t.inside & (flat_pos >= 1 + j)).float()
        rows = h2.flatten(0, 1)[(t.at - 1 - j).clamp_(min=0)]
        ce = SoftCrossEntropy.apply(draft.logits(rows), t.prob, w / w.sum().clamp(min=1.0))
        loss = loss + decay**j * ce
        per_step.append(ce.detach())
    return loss, per_step
