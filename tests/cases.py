"""Input generators shared by tests and benchmarks: trees, ragged batches, paged caches."""

import torch


def randint(low: int, high: int, rng, size=()) -> torch.Tensor:
    return torch.randint(low, high, size, generator=rng)


def random_parents(n: int, rng, forest: bool = False) -> list:
    """Parents of a random tree of n nodes, parents before children; forest: several nodes may have parent -1."""
    parents = []
    for i in range(n):
        low = -1 if forest else 0
        parents.append(-1 if i == 0 else int(randint(low, i, rng)))
    return parents


def mask_words(parents: list, words: int) -> torch.Tensor:
    """Ancestor mask, int64 bit patterns [n, words], of one request's parents (self bit set)."""
    rows = []
    for i, p in enumerate(parents):
        rows.append((rows[p] if p >= 0 else 0) | (1 << i))
    out = torch.empty(len(parents), words, dtype=torch.int64)
    for i, m in enumerate(rows):
        for w in range(words):
            v = (m >> (64 * w)) & (2**64 - 1)
            out[i, w] = v - 2**64 if v >= 2**63 else v
    return out


def cumulative(counts: list) -> torch.Tensor:
    return torch.tensor([0] + counts).cumsum(0).to(torch.int32)


def page_tables(batch: int, max_tokens: int, page_size: int, rng, spare: int = 3) -> tuple:
    """(page_table int32 [B, P], num_pages): random disjoint pages for every request, some pages unused."""
    per = -(-max_tokens // page_size)
    num_pages = batch * per + spare
    perm = torch.randperm(num_pages, generator=rng)[: batch * per].to(torch.int32)
    return perm.view(batch, per).contiguous(), num_pages
