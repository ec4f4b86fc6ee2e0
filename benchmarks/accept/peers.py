"""What people run today instead of verify_tree: the same output law from torch ops, and from sglang-kernel's.

Each maker takes a Batch and returns a callable for one buffer set; the callable's `emitted()` gives int32|int64 [B, S] tokens.
"""

import os
from typing import Optional

import torch
from trees import LAWS, Batch, chain_depth, links

import fastverify.integrations.sglang as drop_in


def load_sglang() -> Optional[object]:
    """torch.ops.sgl_kernel of an installed sglang-kernel, or of the library that SGL_KERNEL_LIBRARY names; None: absent."""
    try:
        if os.environ.get("SGL_KERNEL_LIBRARY"):
            torch.ops.load_library(os.environ["SGL_KERNEL_LIBRARY"])
        else:
            import sgl_kernel  # noqa: F401
    except (ImportError, OSError):
        return None
    return torch.ops.sgl_kernel


class TorchPipeline:
    """Plain torch, no host read: filters, one draw per row by the exponential race, then a walk of `depth` rounds of gathers."""

    def __init__(self, b: Batch, law: str) -> None:
        self.b, self.law, self.batch = b, LAWS[law], b.active.numel()
        self.parents = b.parents.view(self.batch, b.nodes).long()
        self.tokens = b.tokens.view(self.batch, b.nodes)
        self.out = torch.full((self.batch, chain_depth(b.nodes) + 1), -1, device=b.logits.device)

    def draw(self) -> torch.Tensor:
        t, k, p = self.law["temperature"], self.law.get("top_k", 0), self.law.get("top_p", 1.0)
        if t == 0:
            return self.b.logits.argmax(-1)
        scaled = self.b.logits.float() / t
        ids = None
        if k:
            scaled, ids = scaled.topk(min(k, scaled.shape[-1]))
        probs = scaled.softmax(-1)
        if p < 1:
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= p, 0.0)
        pick = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return (ids.gather(-1, pick) if k else pick).squeeze(-1)

    def __call__(self) -> None:
        drawn = self.draw().view(self.batch, self.b.nodes)
        node, alive = torch.zeros(self.batch, 1, dtype=torch.long, device=drawn.device), None
        for level in range(self.out.shape[1]):
            token = drawn.gather(1, node)
            self.out[:, level:level + 1] = token if alive is None else torch.where(alive, token, -1)
            hit = (self.parents == node) & (self.tokens == token)
            found = hit.any(1, keepdim=True)
            alive = found if alive is None else alive & found
            node = torch.where(alive, hit.int().argmax(1, keepdim=True), node)

    def emitted(self) -> torch.Tensor:
        return self.out


class SglangPipeline:
    """SGLang's steps on sglang-kernel: argmax + greedy walk, or softmax (+ top-k and top-p renormalisation) + sampling walk.

    Coins are set so that exactly the planted drafts are accepted. The zero fill of draft_probs that SGLang does every step is
    not counted. ours=True: the walk is fastverify's drop-in, which needs no draft_probs.
    """

    def __init__(self, b: Batch, law: str, sgl, ours: bool = False, draft_probs: Optional[torch.Tensor] = None) -> None:
        batch, nodes, device = b.active.numel(), b.nodes, b.logits.device
        self.b, self.law, self.sgl, self.ours, self.draft_probs = b, LAWS[law], sgl, ours, draft_probs
        first, sibling = links(b.parents.view(batch, nodes)[0].tolist())
        repeat = lambda x: torch.tensor(x, device=device).repeat(batch, 1)  # noqa: E731
        self.predicts = torch.zeros(batch * nodes, dtype=torch.int32, device=device)
        self.index = torch.full((batch, chain_depth(nodes) + 1), -1, dtype=torch.int32, device=device)
        self.count = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tree = (b.tokens.view(batch, nodes), torch.arange(batch * nodes, device=device).view(batch, nodes), repeat(first),
                     repeat(sibling))
        self.coins = torch.full((batch, nodes), 0.9999999, device=device)
        self.coins[:, :b.accepted] = 1e-30
        self.last_coin = torch.full((batch,), 0.5, device=device)
        self.top_k = torch.full((batch * nodes,), self.law.get("top_k", 0), dtype=torch.int32, device=device)
        self.top_p = torch.full((batch * nodes,), self.law.get("top_p", 1.0), device=device)

    def probs(self) -> torch.Tensor:
        p = torch.softmax(self.b.logits.float() / self.law["temperature"], dim=-1)
        for wanted, op, limit in (("top_k", "top_k_renorm_probs", self.top_k), ("top_p", "top_p_renorm_probs", self.top_p)):
            if wanted in self.law:
                renormed = torch.empty_like(p)
                getattr(self.sgl, op).default(p, renormed, limit, self.law[wanted])
                p = renormed
        return p

    def __call__(self) -> None:
        head = (self.predicts, self.index, self.count, *self.tree)
        if self.law["temperature"] == 0:
            argmax = self.b.logits.argmax(-1).view_as(self.tree[0])
            (drop_in if self.ours else self.sgl).verify_tree_greedy(*head, argmax)
            return
        probs = self.probs().view(*self.tree[0].shape, -1)
        if self.ours:
            drop_in.tree_speculative_sampling_target_only(*head, self.coins, self.last_coin, probs)
        else:
            self.sgl.tree_speculative_sampling_target_only(*head, self.coins, self.last_coin, probs,
                                                           self.draft_probs, 1.0, 1.0, True)

    def accepted(self) -> torch.Tensor:
        return self.count
