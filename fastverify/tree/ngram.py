"""NgramDrafter: drafts from the request's own text (prompt lookup). Plain host code, outside the captured step."""

import math
from typing import NamedTuple

import torch


class Forest(NamedTuple):
    """Drafted nodes of one request: parents before children, parent -1 = child of the root (the last token)."""

    tokens: list   # int ids
    parents: list  # int, each below its own index
    scores: list   # float, log scale, each below its parent's


class NgramDrafter:
    """Finds earlier places where the last tokens occurred and drafts what followed them.

    max_ngram, min_ngram  longest and shortest run of last tokens that must match; longer ones go first, then recent
    num_draft             drafted nodes per request (the root is not counted)
    num_matches           continuations that are merged into one tree; 1 drafts a chain
    decay                 belief that one more token is right: a node's score is log(share of the match weights that
                          pass through it) + (depth - 1) * log(decay); match number r (0 = best) weighs 2^-r

    A continuation that reaches the end of the text goes on periodically (after "a b a b" follows "a b a b ...").
    Cost of one request: O(len(tokens)) comparisons at the speed of list.index, plus num_matches * num_draft steps.
    Source: Saxena, Prompt Lookup Decoding (2023); the merge into a weighted tree is ours.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, num_draft: int = 7, num_matches: int = 4,
                 decay: float = 0.8) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"NgramDrafter: min_ngram must be in 1..max_ngram; got min_ngram {min_ngram}, "
                             f"max_ngram {max_ngram}. Fix: swap or raise them.")
        if num_draft < 1 or num_matches < 1:
            raise ValueError("NgramDrafter: num_draft and num_matches must be at least 1; "
                             f"got {num_draft}, {num_matches}. Fix: pass positive numbers.")
        if not 0.0 < decay < 1.0:
            raise ValueError(f"NgramDrafter: decay must be in (0, 1); got {decay}. Fix: pass e.g. 0.8.")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.num_draft, self.num_matches, self.decay = num_draft, num_matches, decay

    def continuations(self, tokens: list) -> list:
        """Up to num_matches continuations of num_draft tokens, best first."""
        if not tokens:
            return []
        text = tokens[::-1]  # the last token is text[0]; an earlier match ends at text[back]
        found, back = [], 0
        while True:
            try:
                back = text.index(text[0], back + 1)
            except ValueError:
                break
            length = 1
            while length < self.max_ngram and back + length < len(text) and text[back + length] == text[length]:
                length += 1
            if length >= self.min_ngram:
                found.append((-length, back))
        found.sort()
        end = len(tokens)
        return [[tokens[end - back + i % back] for i in range(self.num_draft)] for _, back in found[: self.num_matches]]

    def forest(self, tokens: list) -> Forest:
        """All continuations merged as a trie: at most num_matches * num_draft nodes."""
        continuations = self.continuations(tokens)
        children: dict = {}  # (parent, token) -> node
        parents, ids, weights, depths = [], [], [], []
        for rank, continuation in enumerate(continuations):
            node = -1
            for depth, token in enumerate(continuation):
                parent, node = node, children.setdefault((node, token), len(ids))
                if node == len(ids):
                    parents.append(parent)
                    ids.append(token)
                    weights.append(0.0)
                    depths.append(depth)
                weights[node] += 0.5 ** rank
        total = sum(0.5 ** rank for rank in range(len(continuations)))
        scores = [math.log(w / total) + d * math.log(self.decay) for w, d in zip(weights, depths)]
        return Forest(ids, parents, scores)

    def propose(self, tokens: list) -> tuple:
        """(tokens, parents) of the at most num_draft best nodes for one history; empty lists when nothing matches.

        tokens: ids of prompt and output so far, the last one not yet in the KV cache (the root of the verify tree).
        """
        forest = self.forest(tokens)
        best = sorted(range(len(forest.tokens)), key=lambda i: (-forest.scores[i], i))[: self.num_draft]
        new = {-1: -1, **{old: i for i, old in enumerate(sorted(best))}}
        chosen = sorted(best)  # parents first; closed, since scores fall along every path
        return [forest.tokens[i] for i in chosen], [new[forest.parents[i]] for i in chosen]

    def pool(self, histories: list) -> tuple:
        """(scores float32, tokens int32, parents int32) [B, num_matches * num_draft] on the CPU that build_tree accepts.

        histories: one list of ids per request; build_tree's num_nodes is num_draft + 1. Unused entries: -inf, 0, -1.
        """
        size = self.num_matches * self.num_draft
        scores, ids, parents = [], [], []
        for history in histories:
            forest = self.forest(history)
            pad = size - len(forest.tokens)
            scores.append(forest.scores + [-math.inf] * pad)
            ids.append(forest.tokens + [0] * pad)
            parents.append(forest.parents + [-1] * pad)
        shape = (len(histories), size)
        return tuple(torch.tensor(rows, dtype=dtype, device="cpu").reshape(shape)
                     for rows, dtype in ((scores, torch.float32), (ids, torch.int32), (parents, torch.int32)))
