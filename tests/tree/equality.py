"""Random cases of the tree and kv ops, and their comparison with the CPU op: every output byte, canaries around it."""

import math

import torch
from cases import cumulative, mask_words, page_tables, random_parents, randint  # noqa: F401
from conftest import device_of, implementation, mutable_names, need_kernel, schema

from fastverify.tree import DraftState, Prepared, Tree

I32, I64, F32 = torch.int32, torch.int64, torch.float32
GUARD = 64  # elements before and after every output
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def one_of(options, rng):
    return options[int(randint(0, len(options), rng))]


def guarded(value: torch.Tensor, device: str) -> tuple:
    """(buffer of sentinel bytes, view of its middle that holds a copy of `value`)."""
    item = value.element_size()
    buffer = torch.full(((value.numel() + 2 * GUARD) * item,), 0xA5, dtype=torch.uint8, device=device)
    view = buffer[GUARD * item:(GUARD + value.numel()) * item].view(value.dtype).view(value.shape)
    view.copy_(value)
    return buffer, view


def moved(t: torch.Tensor, device: str) -> torch.Tensor:
    """t on `device` with its strides and its place in its storage, so that alignment stays what it is."""
    if t.is_contiguous() or t._base is None:
        return t.to(device)
    return t._base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def run_guarded(backend: str, op: str, case: dict) -> dict:
    """{name: uint8 buffer, guards included} of every mutable argument, on the CPU."""
    need_kernel(backend, op)
    device, written, args, buffers = device_of(backend), set(mutable_names(op)), [], {}
    for a in schema(op):
        value = case.get(a.name)
        tensors = value if isinstance(value, list) else [value]
        if tensors and isinstance(tensors[0], torch.Tensor):
            if a.name in written:
                both = [guarded(t, device) for t in tensors]
                buffers[a.name] = [buffer for buffer, _ in both]
                tensors = [view for _, view in both]
            else:
                tensors = [moved(t, device) for t in tensors]
            value = tensors if isinstance(value, list) else tensors[0]
        args.append(value)
    implementation(backend, op)(*args)
    return {name: torch.cat([b.cpu() for b in parts]) for name, parts in buffers.items()}


def compare_with_cpu(backend: str, op: str, case: dict) -> dict:
    """Runs both; returns the CPU's buffers. A repeat must give the same bytes."""
    want, got = run_guarded("cpu", op, case), run_guarded(backend, op, case)
    for name in want:
        if not torch.equal(want[name], got[name]):
            at = (want[name] != got[name]).nonzero()[:4].flatten().tolist()
            raise AssertionError(f"{op}: {name} differs from the CPU at bytes {at} (guard: {GUARD} elements); "
                                 f"{ {k: describe(v) for k, v in case.items()} }")
    return want


def describe(value) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def plain(op: str, case: dict, buffers: dict) -> dict:
    """The outputs themselves, from run_guarded's buffers."""
    out = {}
    for name, buffer in buffers.items():
        like = case[name]
        item = like.element_size()
        out[name] = buffer[GUARD * item:(GUARD + like.numel()) * item].clone().view(like.dtype).view(like.shape)
    return out


# ---- draft_topk ---------------------------------------------------------------------------------------------------


def random_coupling(rng, rows: int) -> dict:
    """Arguments of coupled rows: greedy and bad temperatures, inactive requests, any seed, some rows without a request."""
    batch = one_of([b for b in range(1, rows + 1) if rows % b == 0], rng)
    temperature = torch.tensor([one_of((0.0, 0.3, 0.8, 1.0, 1.0, 5.0, 1e-30, -1.0, math.nan, math.inf), rng) for _ in range(batch)])
    return dict(temperature=temperature, seed=torch.randint(-2**63, 2**63 - 1, (batch,), generator=rng),
                prefix_len=torch.randint(-2, 2**31 - 1, (batch,), generator=rng, dtype=I32),
                active=torch.randint(0, 4, (batch,), generator=rng, dtype=I32), level=one_of((0, 1, 7), rng),
                sharpness=one_of((1.0, 1.0, 0.5, 3.7), rng))


def draft_topk_case(rng, vocabs=(1, 2, 5, 63, 64, 65, 127, 300, 1000, 4097, 8192, 32003)) -> dict:
    vocab, rows, dtype = one_of(vocabs, rng), int(randint(1, 6, rng)), one_of(FLOATS, rng)
    k = min(int(randint(1, 65, rng)), vocab) if randint(0, 3, rng) else min(10, vocab)
    spread = one_of((1e-3, 0.3, 3.0, 3.0, 30.0, 1e4), rng)
    x = torch.randn(rows, vocab + 17, generator=rng) * spread
    kind = int(randint(0, 6, rng))
    if kind == 0:
        x = (x * 2).round() / 2  # ties
    elif kind == 1:
        x[:] = one_of((0.0, -0.0, 7.0, -math.inf, math.nan), rng)  # nothing but ties
    elif kind == 2:
        for odd in (math.nan, math.inf, -math.inf):
            x[torch.rand(x.shape, generator=rng) < one_of((0.001, 0.3), rng)] = odd
    elif kind == 3:
        x[torch.rand(x.shape, generator=rng) < 0.5] = -0.0
    first = int(randint(0, 17, rng))  # any alignment
    cu = one_of((None, None, torch.tensor([0, int(randint(-1, rows + 3, rng))], dtype=I32)), rng)
    return dict(logits=x.to(dtype)[:, first:first + vocab], cu_nodes=cu,
                d2t=torch.randint(0, 9, (vocab,), generator=rng).cumsum(0) if randint(0, 2, rng) else None,
                values=torch.full((rows, k), math.nan), tokens=torch.full((rows, k), -77, dtype=I32),
                **(random_coupling(rng, rows) if randint(0, 2, rng) else dict(level=0, sharpness=1.0)))


# ---- grow_tree ----------------------------------------------------------------------------------------------------


def grow_tree_levels(rng, most_k: int = 64):
    """(case of level 0, f(level, outputs of the level before) -> case) and the number of levels."""
    batch, k = int(randint(0, 7, rng)), int(randint(1, most_k + 1, rng)) if randint(0, 3, rng) else 10
    levels, hidden = min(int(randint(1, 5, rng)), 1024 // k), int(one_of((0, 1, 3, 8, 40, 129), rng))
    dtype = one_of((*FLOATS, torch.float64), rng)
    state = DraftState.empty(batch, k, levels, hidden, dtype)
    if randint(0, 2, rng):  # more words and pool than needed
        state = state._replace(mask=torch.zeros(batch * k, 16, dtype=I64))
    for t in state:
        t.fill_(math.nan if t.is_floating_point() else -77)
    common = dict(prefix_len=torch.randint(0, 5000, (batch,), generator=rng, dtype=I32),
                  active=(torch.rand(batch, generator=rng) < 0.7).to(I32))

    def case(level: int, before: "dict | None") -> dict:
        rows = batch if level == 0 else batch * k
        values = -torch.rand(rows, k, generator=rng) * one_of((1, 20), rng)
        if randint(0, 2, rng):
            values = (values * 4).round() / 4  # ties
        if randint(0, 4, rng) == 0:
            for odd in (math.nan, math.inf, -math.inf, -0.0):
                values[torch.rand(values.shape, generator=rng) < 0.1] = odd
        wide = torch.randn(rows, hidden + 24, generator=rng).to(dtype)
        start = int(one_of((0, 8, 5), rng))
        return dict(values=values, tokens=torch.randint(-5, 10**6, (rows, k), generator=rng, dtype=I32),
                    hidden=wide[:, start:start + hidden] if randint(0, 2, rng) else wide[:, :hidden].contiguous(), level=level,
                    **common, **(before or state._asdict()))

    return case, levels


# ---- build_tree ---------------------------------------------------------------------------------------------------


def random_pool(batch: int, size: int, rng, deep: bool) -> tuple:
    """Scores that mostly fall along paths, with ties and the odd NaN; parents before children, now and then not."""
    index = torch.arange(size)
    if deep:  # parents just before their children
        parents = index - 1 - torch.randint(0, 3, (batch, size), generator=rng)
        parents.clamp_(min=-1)
    else:
        parents = (torch.rand(batch, size, generator=rng) ** 2 * (index + 1)).long() - 1
    scores = -torch.randint(0, 40, (batch, size), generator=rng).float() / 4 - (0.0 if randint(0, 2, rng) else 1.0) * index / max(size, 1)
    if randint(0, 2, rng):
        scores -= torch.rand(batch, size, generator=rng)
    kind = int(randint(0, 5, rng))
    if kind == 0:
        scores[torch.rand(scores.shape, generator=rng) < 0.4] = -math.inf
    elif kind == 1:
        for odd in (math.nan, math.inf, -math.inf, -0.0, 3.0, -1e-40, -3e38):
            scores[torch.rand(scores.shape, generator=rng) < 0.02] = odd
    elif kind == 2:
        parents[torch.rand(parents.shape, generator=rng) < 0.01] = one_of((-2, -(2**31), 2**31 - 1, size), rng)
    return scores, torch.randint(-3, 1010, (batch, size), generator=rng), parents.to(I32)


def build_tree_case(rng, sizes=(0, 1, 7, 31, 64, 110, 700, 1023, 1025, 2100), batches=(0, 1, 3, 8, 40)) -> dict:
    size, batch = one_of(sizes, rng), one_of(batches, rng)
    batch = min(batch, max(1, 60000 // max(size, 1)))
    num_nodes = int(one_of((1, 2, 8, 64, 65, 300, 1024), rng))
    scores, tokens, parents = random_pool(batch, size, rng, bool(randint(0, 3, rng) == 0))
    tree = Tree.empty(batch, num_nodes, one_of((I32, I64), rng))
    rows = batch * num_nodes + int(randint(0, 5, rng))
    words = int(one_of((-(-num_nodes // 64), 16), rng))
    shapes = dict(tokens=(rows,), parents=(rows,), mask=(rows, words), depth=(rows,), positions=(rows,))
    outputs = {name: torch.full(shapes.get(name, t.shape), -77, dtype=t.dtype) for name, t in tree._asdict().items()}
    return dict(pool_scores=scores, pool_tokens=tokens.to(one_of((I32, I64), rng)), pool_parents=parents,
                root_tokens=torch.randint(-2, 1005, (batch,), generator=rng).to(one_of((I32, I64), rng)),
                prefix_len=torch.randint(0, 10**6, (batch,), generator=rng, dtype=I32),
                active=(torch.rand(batch, generator=rng) < 0.8).to(I32), num_nodes=num_nodes, vocab_size=1000, **outputs)


# ---- prepare_tree -------------------------------------------------------------------------------------------------


def prepare_tree_case(rng, most: int = 300) -> dict:
    batch, most = int(randint(0, 9, rng)), int(one_of((1, 8, 64, 65, most), rng))
    counts = [int(randint(0, most + 1, rng)) for _ in range(batch)]
    rows, page_size = sum(counts) + int(randint(0, 5, rng)), int(one_of((1, 7, 16, 64), rng))
    parents = [p for n in counts for p in random_parents(n, rng, forest=bool(randint(0, 2, rng)))]
    parents = torch.tensor(parents + [99] * (rows - len(parents)), dtype=I32)
    if randint(0, 4, rng) == 0:
        parents[torch.rand(rows, generator=rng) < 0.1] = one_of((-2, 2**31 - 1, -(2**31), 50), rng)
    cu = cumulative(counts)
    if randint(0, 6, rng) == 0:
        cu[int(randint(0, batch + 1, rng))] = one_of((-1, 3, 2**31 - 1, -(2**31)), rng)
    chain, row_base = bool(randint(0, 4, rng) == 0), int(one_of((0, 0, 1, 63, 900), rng))
    lengths = torch.randint(-1, int(one_of((2, 300, 200000), rng)), (batch,), generator=rng, dtype=I32)
    table = torch.randint(-1 if randint(0, 3, rng) == 0 else 0, 10**5, (batch, int(one_of((1, 40, 200), rng))), generator=rng, dtype=I32)
    words = int(one_of((1, -(-(row_base + most) // 64), 16), rng))
    out = {n: t.fill_(-77) for n, t in Prepared.empty(rows, batch, min(words, 16))._asdict().items() if randint(0, 5, rng)}
    return dict(parents=None if chain else parents, cu_nodes=cu, prefix_len=lengths, page_table=table, page_size=page_size,
                row_base=row_base, **out)


# ---- compact_kv ---------------------------------------------------------------------------------------------------


def compact_kv_case(rng, layers_as_list: bool = False) -> dict:
    batch, page_size = int(randint(0, 6, rng)), int(one_of((1, 16, 17, 64, 1072), rng))
    layers = int(randint(1, 6, rng))
    counts = [int(randint(0, one_of((2, 14, 100), rng), rng)) for _ in range(batch)]
    prefixes = [int(randint(0, 200, rng)) for _ in range(batch)]
    depth = max([1, *counts]) if randint(0, 2, rng) else 5
    table, pages = page_tables(batch, max([p + n for p, n in zip(prefixes, counts)] + [1]), page_size, rng)
    path, bounded = torch.full((batch, depth), -1, dtype=I32), bool(randint(0, 2, rng))
    for b, n in enumerate(counts):
        nodes = ([0] * (n > 0) + [i for i in range(1, n) if float(torch.rand((), generator=rng)) < 0.5])[:depth]
        path[b, :len(nodes)] = torch.tensor(nodes, dtype=I32)
    if batch and randint(0, 4, rng) == 0:
        path[int(randint(0, batch, rng)), int(randint(0, depth, rng))] = one_of((-1, 0, 2**31 - 1, -(2**31), 5 if bounded else 0), rng)
    item = int(one_of((1, 2, 4), rng))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]

    def cache(row: tuple) -> torch.Tensor:
        shape = (layers, pages, page_size, *row)
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * item), generator=rng).to(torch.uint8).view(dtype)

    rows = [(2, 8), (16,), (3, 5), (1,), (2, 2, 3), (36,), (144,)]
    k = cache(one_of(rows, rng))
    v = None if randint(0, 3, rng) == 0 else cache(one_of(rows, rng) if randint(0, 2, rng) else tuple(k.shape[3:]))
    caches = (dict(k_caches=list(k), v_caches=[] if v is None else list(v)) if layers_as_list else dict(k_cache=k, v_cache=v))
    width = int(one_of((0, 1, 5, 64, 300), rng))
    aux = torch.randint(0, 100, (sum(counts) + 2, width + 16), generator=rng).to(one_of((torch.uint8, torch.int16, I32), rng))
    aux = aux[:, :width] if width else None
    return dict(path=path, num_tokens_out=torch.randint(-1, depth + 3, (batch,), generator=rng, dtype=I32),
                prefix_len=torch.tensor(prefixes, dtype=I32), page_table=table,
                cu_nodes=cumulative(counts) if width or bounded else None, aux=aux,
                aux_out=None if aux is None else torch.full((batch * depth, width), 77, dtype=aux.dtype),
                cu_out=torch.full((batch + 1,), -99, dtype=I32) if randint(0, 3, rng) else None, **caches)
