"""Inputs of the acceptance benchmarks: batches of equal trees whose accepted path is known, made from rows of logits.

A tree of N nodes is a chain of `depth` nodes under the root, the other nodes hanging off the chain as wrong siblings. The chain
carries the tokens that the target itself draws at those positions, up to the wanted number of accepted drafts, then wrong ones.
"""

import lzma
from pathlib import Path
from typing import NamedTuple, Optional

import torch

import fastverify as fv
from fastverify import _ops
from fastverify.accept.rule import Rule
from fastverify.accept.verify_tree import Verified

LAWS = {"greedy": dict(temperature=0.0), "temperature": dict(temperature=0.8),
        "top-k+top-p": dict(temperature=0.8, top_k=50, top_p=0.95)}
LONG = 1 << 20  # tokens a request may still emit: no budget ends a benchmark


def chain_depth(nodes: int) -> int:
    """Depth of the benchmark's tree: what EAGLE-3 users draft (at most 7)."""
    return min(nodes - 1, 7)


def tree_parents(nodes: int) -> list:
    """Parents of one tree: node i <= depth continues the chain, later nodes hang off it in turn."""
    depth = chain_depth(nodes)
    return [i - 1 if i <= depth else (i - depth - 1) % depth for i in range(nodes)]


class Batch(NamedTuple):
    """The arguments of verify_tree for B trees of N nodes, and where the walk must end."""

    logits: torch.Tensor      # [B*N, V]
    tokens: torch.Tensor      # int64 [B*N]
    parents: torch.Tensor     # int32 [B*N]
    cu_nodes: torch.Tensor    # int32 [B+1]
    prefix_len: torch.Tensor  # int32 [B]
    active: torch.Tensor      # int32 [B]
    remaining: torch.Tensor   # int32 [B]
    sampling: fv.Sampling
    out: Verified
    accepted: int
    nodes: int

    def arguments(self, workspace: Optional[torch.Tensor], out=None) -> tuple:
        """Positional arguments of the op verify_tree."""
        o = out or self.out
        return (self.logits, self.tokens, self.parents, self.cu_nodes, self.prefix_len, self.active, self.remaining, None,
                *self.sampling, None, None, None, None, *o[:5], None, workspace, self.logits.shape[1], int(Rule.SAMPLE_MATCH))


def drawn_tokens(call, logits: torch.Tensor, positions: torch.Tensor, sampling: fv.Sampling, workspace) -> torch.Tensor:
    """int64 [R]: what the target draws in every row, as R one-node trees; positions int32 [R], sampling per row."""
    rows, device = logits.shape[0], logits.device
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    out = Verified.empty(rows, 1, device)
    batch = Batch(logits, torch.zeros(rows, dtype=torch.int64, device=device), -ones, torch.arange(rows + 1, dtype=torch.int32, device=device),
                  positions, ones, ones * LONG, sampling, out, 0, 1)
    call(*batch.arguments(workspace()))
    return out.out_tokens[:, 0].clone()


class Grove:
    """Buffer sets of one shape and law; `plant(accepted)` gives the batches with that many accepted drafts."""

    def __init__(self, call, sets: list, batch: int, nodes: int, law: str, workspace) -> None:
        device = sets[0].device
        self.sets, self.batch, self.nodes, self.law = sets, batch, nodes, law
        self.parents_list = tree_parents(nodes)
        depth = [0] * nodes
        for i in range(1, nodes):
            depth[i] = depth[self.parents_list[i]] + 1
        self.parents = torch.tensor(self.parents_list * batch, dtype=torch.int32, device=device)
        self.cu_nodes = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
        self.prefix = torch.arange(batch, dtype=torch.int32, device=device) * 37 + 1000
        self.ones = torch.ones(batch, dtype=torch.int32, device=device)
        self.sampling = fv.Sampling.make(batch, device, **LAWS[law], seed=11)
        per_row = fv.Sampling(*(x.repeat_interleave(nodes) for x in self.sampling))
        self.positions = (self.prefix[:, None] + torch.tensor(depth, dtype=torch.int32, device=device)).flatten().contiguous()
        self.drawn = [drawn_tokens(call, s, self.positions, per_row, workspace) for s in sets]

    def plant(self, accepted: int) -> list:
        """Batches whose walks accept exactly `accepted` drafts: node i <= accepted carries its parent's token, no other does."""
        out = []
        for logits, drawn in zip(self.sets, self.drawn):
            vocab = logits.shape[1]
            drawn = drawn.view(self.batch, self.nodes)
            wanted = drawn[:, [0, *self.parents_list[1:]]]
            wrong = (wanted + 1 + torch.arange(self.nodes, device=drawn.device)) % vocab
            right = torch.arange(self.nodes, device=drawn.device) <= accepted
            tokens = torch.where(right, wanted, wrong).contiguous()
            out.append(Batch(logits, tokens.flatten(), self.parents, self.cu_nodes, self.prefix, self.ones, self.ones * LONG,
                             self.sampling, Verified.empty(self.batch, chain_depth(self.nodes) + 1, drawn.device),
                             accepted, self.nodes))
        return out


def matches_cpu(b: Batch) -> bool:
    """The tensors that the timed calls left against the CPU op on the same logits: every output, bit for bit."""
    moved = Batch(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in b[:7]), fv.Sampling(*(x.cpu() for x in b.sampling)),
                  Verified.empty(b.active.numel(), b.out.path.shape[1]), b.accepted, b.nodes)
    _ops.get("verify_tree")(*moved.arguments(None))
    return (all(torch.equal(x.cpu(), y) for x, y in zip(b.out[:5], moved.out[:5]))
            and bool((moved.out.num_tokens_out == b.accepted + 1).all()))


def real_rows(path: Path, vocab: int) -> torch.Tensor:
    """bfloat16 [rows, vocab] logits saved by save_logits.py: xz of all low bytes, then all high bytes."""
    raw = torch.frombuffer(bytearray(lzma.decompress(path.read_bytes())), dtype=torch.uint8)
    return raw.view(2, -1).T.contiguous().view(torch.bfloat16).view(-1, vocab)


def links(parents: list) -> tuple:
    """(first child, next sibling) lists of a tree, siblings ascending, -1 none: SGLang's form."""
    n = len(parents)
    first, sibling = [-1] * n, [-1] * n
    for i in range(n - 1, 0, -1):
        sibling[i], first[parents[i]] = first[parents[i]], i
    return first, sibling
