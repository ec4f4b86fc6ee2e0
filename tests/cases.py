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


def verify_case(rng, batch: int = 3, nodes: int = 8, vocab: int = 37, dtype=torch.float32, temperature: float = 0.0,
                filters: bool = False, extras: bool = False, agree: float = 0.7, pad: int = 0, ids=torch.int64,
                scale: float = 2.0, fixed_nodes: bool = False, logprobs: bool = True) -> dict:
    """Keyword arguments of verify_tree on random ragged trees with poisoned outputs.

    agree: chance that a node carries one of its parent row's three best ids (so that walks go deep).
    """
    counts = [nodes if fixed_nodes else int(randint(1, nodes + 1, rng)) for _ in range(batch)]
    active = (torch.rand(batch, generator=rng) < 0.9).to(torch.int32)
    counts = [c if a else 0 for c, a in zip(counts, active.tolist())]
    rows = batch * nodes + 1
    logits = (torch.randn(rows, vocab + pad, generator=rng) * scale).to(dtype)
    tokens, parents = torch.full((rows,), 10**6, dtype=ids), torch.full((rows,), 77, dtype=torch.int32)
    base = 0
    for c in counts:
        par = random_parents(c, rng)
        parents[base:base + c] = torch.tensor(par, dtype=torch.int32)
        for i in range(c):
            t = int(randint(0, vocab, rng))
            if i and float(torch.rand((), generator=rng)) < agree:
                best = logits[base + par[i], :vocab].float().topk(min(3, vocab)).indices
                t = int(best[int(randint(0, len(best), rng))])
            tokens[base + i] = t
        base += c
    logits[base:] = float("nan")  # padding rows are never read
    u = lambda lo, hi: torch.rand(batch, generator=rng) * (hi - lo) + lo  # noqa: E731
    temp = torch.full((batch,), temperature)
    if temperature > 0:
        temp = torch.where(torch.rand(batch, generator=rng) < 0.15, torch.zeros(()), temp * u(0.5, 1.5))
    off = lambda t, value: torch.where(torch.rand(batch, generator=rng) < 0.4, torch.full_like(t, value), t)  # noqa: E731
    depth = nodes
    case = dict(
        logits=logits, tokens=tokens, parents=parents, cu_nodes=cumulative(counts),
        prefix_len=randint(0, 5000, rng, (batch,)).to(torch.int32), active=active,
        remaining=randint(0, nodes + 4, rng, (batch,)).to(torch.int32),
        stop_ids=randint(0, vocab, rng, (2,)) if vocab > 8 else None,
        temperature=temp,
        top_k=off(randint(1, vocab, rng, (batch,)).to(torch.int32), 0) if filters else torch.zeros(batch, dtype=torch.int32),
        top_p=off(u(0.05, 1.0), 1.0) if filters else torch.ones(batch),
        min_p=off(u(0.0, 0.4), 0.0) if filters else torch.zeros(batch),
        seed=torch.randint(-2**63, 2**63 - 1, (batch,), generator=rng),
        out_tokens=torch.full((batch, depth), -99, dtype=ids), num_tokens_out=torch.full((batch,), -99, dtype=torch.int32),
        path=torch.full((batch, depth), -99, dtype=torch.int32), next_root=torch.full((batch,), -5, dtype=ids),
        flags=torch.full((batch,), -99, dtype=torch.int32), logprobs=torch.full((batch, depth), float("nan")) if logprobs else None,
        vocab_size=vocab, rule=1)
    if extras:
        case["bias"] = torch.randn(batch, vocab, generator=rng)
        bits = torch.randint(-2**31, 2**31 - 1, (rows, (vocab + 31) // 32), generator=rng).to(torch.int32)
        case["bitmask"] = bits | torch.randint(-2**31, 2**31 - 1, bits.shape, generator=rng).to(torch.int32)
        case["penalties"] = torch.stack([u(0.8, 1.6), u(-0.5, 0.8), u(-0.5, 0.8)], 1).contiguous()
        case["counts"] = (torch.rand(batch, vocab, generator=rng) < 0.2).to(torch.int32) * randint(0, 4, rng, (batch, vocab)).to(torch.int32)
    return case


def attention_case(rng, counts: list, prefixes: list, page_size: int = 16, q_heads: int = 6, kv_heads: int = 2,
                   head_dim: int = 16, dtype=torch.float32, cache_dtype=None, chain: bool = False, row_base: int = 0,
                   window: int = 0, softcap: float = 0.0, sinks: bool = False, scales: bool = False, spare_words: int = 0,
                   padding: int = 3) -> dict:
    """Keyword arguments of tree_attention on random forests, poisoned wherever no row may look.

    Cache slots outside [0, prefix + row_base + n) of a request, padding rows of q and the outputs are NaN; mask bits at
    columns that do not exist, and whole mask rows of padding, are random. `parents` (list per request) rides along.
    """
    batch, cache_dtype = len(counts), cache_dtype or dtype
    columns = [row_base + n for n in counts]
    tokens = max([p + c for p, c in zip(prefixes, columns)] + [1])
    table, pages = page_tables(batch, tokens, page_size, rng)
    caches = []
    for _ in range(2):
        cache = torch.full((pages, page_size, kv_heads, head_dim), float("nan"))
        for b in range(batch):
            pos = torch.arange(prefixes[b] + columns[b])
            cache[table[b].long()[pos // page_size], pos % page_size] = torch.randn(len(pos), kv_heads, head_dim, generator=rng)
        caches.append(cache.to(cache_dtype))
    rows = sum(counts) + padding
    words = -(-max(columns + [1]) // 64) + spare_words
    parents = [random_parents(c, rng, forest=row_base > 0) for c in columns]
    mask = torch.randint(-2**63, 2**63 - 1, (rows, words), generator=rng)
    for b, base in enumerate(cumulative(counts)[:-1].tolist()):
        visible = mask_words(parents[b], words)[row_base:]
        noise = mask[base:base + counts[b]]
        for w in range(words):
            bits = min(max(columns[b] - 64 * w, 0), 64)
            beyond = 0 if bits == 64 else -1 << bits
            visible[:, w] |= noise[:, w] & (beyond if beyond >= -2**63 else 0)
        mask[base:base + counts[b]] = visible
    q = torch.randn(rows, q_heads, head_dim, generator=rng).to(dtype)
    q[sum(counts):] = float("nan")
    scale = lambda: torch.rand(kv_heads, generator=rng) + 0.5  # noqa: E731
    return dict(
        q=q, k_cache=caches[0], v_cache=caches[1], mask=None if chain else mask, cu_nodes=cumulative(counts),
        prefix_len=torch.tensor(prefixes, dtype=torch.int32), page_table=table,
        sinks=torch.randn(q_heads, generator=rng) if sinks else None, k_scale=scale() if scales else None,
        v_scale=scale() if scales else None, out=torch.full((rows, q_heads, head_dim), float("nan")).to(dtype),
        lse=torch.full((rows, q_heads), float("nan")), row_base=row_base, scale=head_dim ** -0.5, window=window,
        softcap=softcap, parents=parents)
