"""Small random inputs for every op, and the comparison with its oracle. The full cases are in tests/."""

import math
from typing import Callable

import torch

from .. import _ops, reference
from ..accept.lm_head_verify_tree import lm_head_verify_tree_workspace
from ..accept.verify_tree_partials import FILTER_ROUNDS, STATE_WORDS, partial_words
from ..reference.accept import verify_margin
from ..tree import DraftState, Prepared, Tree

I32, I64 = torch.int32, torch.int64
SENTINEL = -77  # what every output holds before the call
CHECKS: dict = {}  # op -> check(device, rng) -> number of cases; a mismatch raises AssertionError


def check(op: str) -> Callable:
    def register(f: Callable) -> Callable:
        CHECKS[op] = f
        return f
    return register


# ---- running and comparing ----------------------------------------------------------------------------------------------


def arguments(op: str) -> list:
    return _ops.get(op)._schema.arguments


def call(op: str, device: str, case: dict, function: "Callable | None" = None) -> dict:
    """Calls `op` on `device` ("reference": the oracle, or `function`) with clones of what it writes; {name: output}."""
    args, outputs = [], {}
    for a in arguments(op):
        value = case.get(a.name, a.default_value if a.has_default_value() else None)
        if isinstance(value, (torch.Tensor, list)):
            moved = [t.to("cpu" if device == "reference" else device) for t in ([value] if isinstance(value, torch.Tensor) else value)]
            if a.alias_info is not None and a.alias_info.is_write:
                moved = outputs[a.name] = [t.clone() for t in moved]
            value = moved[0] if isinstance(value, torch.Tensor) else moved
        args.append(value)
    (function or (getattr(reference, op) if device == "reference" else _ops.get(op)))(*args)
    return {name: (tensors[0] if len(tensors) == 1 else torch.stack(tensors)).cpu() for name, tensors in outputs.items()}


def same(got: dict, want: dict, tolerance: "dict | None" = None, rows: "torch.Tensor | None" = None) -> None:
    """Every output equal bit for bit, or within tolerance[name] * max(1, |oracle|). rows: which requests to compare."""
    for name, b in want.items():
        a, limit = got[name], (tolerance or {}).get(name, 0.0)
        if rows is not None:
            a, b = a[rows], b[rows]
        a, b = a.double(), b.double()
        bad = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit * b.abs().clamp(min=1)))
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise AssertionError(f"{name}{at} is {a[tuple(at)].item()}, the oracle says {b[tuple(at)].item()} "
                                 f"({int(bad.sum())} of {bad.numel()} differ)")


def poisoned(buffers) -> dict:
    """A NamedTuple of buffers, filled with the sentinel, as keyword arguments."""
    return {name: t.fill_(SENTINEL) for name, t in buffers._asdict().items()}


def ints(low: int, high: int, rng, *size: int) -> torch.Tensor:
    return torch.randint(low, high, size, generator=rng, dtype=I32)


def cumulative(counts: list) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(I32)


def forest(counts: list, rng, roots: int) -> torch.Tensor:
    """Parents of random trees, flat: the first `roots` nodes of a request have none."""
    return torch.tensor([-1 if i < roots else int(ints(0, i, rng, 1)) for n in counts for i in range(n)], dtype=I32)


def pages(batch: int, tokens: int, page_size: int, rng) -> tuple:
    """(page_table int32 [B, P] of distinct pages, number of pages)."""
    per = -(-tokens // page_size)
    return torch.randperm(batch * per, generator=rng).to(I32).view(batch, per), batch * per


# ---- common, tree ---------------------------------------------------------------------------------------------------------


@check("probe")
def probe(device: str, rng) -> int:
    case = dict(x=torch.randn(1000, generator=rng), out=torch.full((1000,), math.nan))
    same(call("probe", device, case), call("probe", "reference", case))
    return 1


@check("draft_topk")
def draft_topk(device: str, rng) -> int:
    sizes = [(3, 50, 4), (1, 8192, 10), (5, 333, 16)]
    for rows, vocab, k in sizes:
        case = dict(logits=4 * torch.randn(rows, vocab, generator=rng), d2t=ints(0, 4, rng, vocab).cumsum(0),
                    values=torch.full((rows, k), math.nan), tokens=torch.full((rows, k), SENTINEL, dtype=I32))
        same(call("draft_topk", device, case), call("draft_topk", "reference", case), dict(values=1e-5))
    coupled = dict(case, temperature=torch.tensor([0.8, 0.0, 1.5, 0.6, 1.0]), seed=ints(0, 2**30, rng, 5).long(),
                   prefix_len=ints(0, 999, rng, 5).to(I32), active=torch.tensor([1, 1, 0, 1, 1], dtype=I32), level=2, sharpness=0.9)
    same(call("draft_topk", device, coupled), call("draft_topk", "reference", coupled), dict(values=1e-4))
    return len(sizes) + 1


@check("grow_tree")
def grow_tree(device: str, rng) -> int:
    batch, k, levels, hidden = 3, 4, 3, 8
    state = poisoned(DraftState.empty(batch, k, levels, hidden))
    active = torch.tensor([1, 0, 1], dtype=I32)
    for level in range(levels):
        rows = batch if level == 0 else batch * k
        values = torch.log_softmax(torch.randn(rows, 4 * k, generator=rng), 1).sort(1, descending=True).values[:, :k]
        case = dict(values=values.contiguous(), tokens=ints(0, 99, rng, rows, k), active=active, level=level,
                    hidden=torch.randn(rows, hidden, generator=rng), prefix_len=ints(0, 90, rng, batch), **state)
        want = call("grow_tree", "reference", case)
        same(call("grow_tree", device, case), want)
        state = want
    return levels


@check("build_tree")
def build_tree(device: str, rng) -> int:
    sizes = [(1, 20, 8), (4, 60, 20), (2, 200, 100)]
    for batch, pool, nodes in sizes:
        parents = torch.stack([forest([pool], rng, 3) for _ in range(batch)])
        case = dict(pool_scores=-3 * torch.rand(batch, pool, generator=rng), pool_tokens=ints(0, 500, rng, batch, pool),
                    pool_parents=parents, root_tokens=ints(0, 500, rng, batch), prefix_len=ints(0, 90, rng, batch),
                    active=ints(0, 4, rng, batch).clamp(max=1), num_nodes=nodes, vocab_size=500,
                    **poisoned(Tree.empty(batch, nodes)))
        same(call("build_tree", device, case), call("build_tree", "reference", case))
    return len(sizes)


@check("prepare_tree")
def prepare_tree(device: str, rng) -> int:
    sizes = [([1], 1), ([7, 0, 20], 1), ([30, 65], 5)]
    for counts, roots in sizes:
        rows, words = sum(counts) + 2, -(-max(counts) // 64)
        table, _ = pages(len(counts), 160, 16, rng)
        padding = torch.full((2,), 999, dtype=I32)
        case = dict(parents=torch.cat([forest(counts, rng, roots), padding]), cu_nodes=cumulative(counts),
                    prefix_len=ints(0, 90, rng, len(counts)), page_table=table, page_size=16, row_base=0,
                    **poisoned(Prepared.empty(rows, len(counts), words)))
        same(call("prepare_tree", device, case), call("prepare_tree", "reference", case))
    return len(sizes)


# ---- attention, kv ---------------------------------------------------------------------------------------------------------


@check("rope_append")
def rope_append(device: str, rng) -> int:
    rows, heads, kv_heads, dim, page = 9, 4, 2, 16, 8
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    slots = torch.randperm(4 * page, generator=rng)[:rows]
    slots[3] = -1
    for style, norm in ((0, None), (1, None), (0, torch.rand(dim, generator=rng) + 0.5)):
        case = dict(q=torch.randn(rows, heads, dim, generator=rng), k=torch.randn(rows, kv_heads, dim, generator=rng),
                    v=torch.randn(rows, kv_heads, dim, generator=rng), positions=ints(0, 64, rng, rows), slots=slots,
                    cos_sin=torch.cat([angle.cos(), angle.sin()], 1), q_norm=norm, k_norm=norm,
                    k_cache=torch.full((4, page, kv_heads, dim), 9.0), v_cache=torch.full((4, page, kv_heads, dim), 9.0),
                    eps=1e-5, rotary_style=style)
        same(call("rope_append", device, case), call("rope_append", "reference", case), dict.fromkeys(("q", "k_cache"), 1e-5))
    return 3


@check("tree_attention")
def tree_attention(device: str, rng) -> int:
    kinds = [dict(), dict(window=9), dict(softcap=5.0), dict(chain=True)]
    for kind in kinds:
        counts, prefix, heads, kv_heads, dim, page = [7, 0, 20], ints(0, 90, rng, 3), 6, 2, 16, 16
        table, num_pages = pages(3, 120, page, rng)
        cu, rows = cumulative(counts), sum(counts) + 1
        parents = torch.cat([forest(counts, rng, 1), torch.full((1,), -1, dtype=I32)])
        tree = Prepared.empty(rows, 3, 1)
        reference.prepare_tree(parents, cu, prefix, table, *tree, page, 0)
        cache = lambda: torch.randn(num_pages, page, kv_heads, dim, generator=rng)  # noqa: E731
        case = dict(q=torch.randn(rows, heads, dim, generator=rng), k_cache=cache(), v_cache=cache(),
                    mask=None if kind.get("chain") else tree.mask, cu_nodes=cu, prefix_len=prefix, page_table=table,
                    schedule=tree.schedule, out=torch.full((rows, heads, dim), math.nan),
                    lse=torch.full((rows, heads), math.nan), row_base=0, scale=dim ** -0.5, window=kind.get("window", 0), softcap=kind.get("softcap", 0.0))
        want = call("tree_attention", "reference", case)
        same(call("tree_attention", device, case), want, dict(out=2e-5, lse=2e-5))
    return len(kinds)


@check("mla_tree_attention")
def mla_tree_attention(device: str, rng) -> int:
    kinds = [dict(), dict(chain=True), dict(dims=(576, 512), dtype=torch.bfloat16)]
    for kind in kinds:
        counts, prefix, heads, (dim, out_dim), page = [7, 0, 20], ints(0, 90, rng, 3), 4, kind.get("dims", (24, 16)), 16
        dtype, (table, num_pages) = kind.get("dtype", torch.float32), pages(3, 120, page, rng)
        cu, rows = cumulative(counts), sum(counts) + 1
        parents = torch.cat([forest(counts, rng, 1), torch.full((1,), -1, dtype=I32)])
        tree = Prepared.empty(rows, 3, 1)
        reference.prepare_tree(parents, cu, prefix, table, *tree, page, 0)
        case = dict(q=torch.randn(rows, heads, dim, generator=rng).to(dtype), kv_cache=torch.randn(num_pages, page, dim, generator=rng).to(dtype),
                    mask=None if kind.get("chain") else tree.mask, cu_nodes=cu, prefix_len=prefix, page_table=table,
                    out=torch.full((rows, heads, out_dim), math.nan, dtype=dtype), lse=torch.full((rows, heads), math.nan), row_base=0, scale=dim ** -0.5)
        want = call("mla_tree_attention", "reference", case)
        same(call("mla_tree_attention", device, case), want, dict(out=2e-5 if dtype == torch.float32 else 2e-2, lse=2e-5))
    return len(kinds)


def compact_case(rng) -> dict:
    counts, page = [5, 1, 9], 4
    table, num_pages = pages(3, 60, page, rng)
    path = torch.tensor([[0, 2, 4, -1], [0, -1, -1, -1], [0, 1, 5, 8]], dtype=I32)
    cache = lambda: torch.randn(2, num_pages, page, 2, 8, generator=rng)  # noqa: E731
    return dict(k_cache=cache(), v_cache=cache(), path=path, num_tokens_out=torch.tensor([3, 0, 4], dtype=I32),
                prefix_len=ints(0, 40, rng, 3), page_table=table, cu_nodes=cumulative(counts), aux=torch.randn(15, 6, generator=rng), aux_out=torch.full((12, 6), math.nan),
                cu_out=torch.full((4,), SENTINEL, dtype=I32))


@check("compact_kv")
def compact_kv(device: str, rng) -> int:
    case = compact_case(rng)
    same(call("compact_kv", device, case), call("compact_kv", "reference", case))
    return 1


@check("compact_kv_layers")
def compact_kv_layers(device: str, rng) -> int:
    case = compact_case(rng)
    case["k_caches"], case["v_caches"] = list(case.pop("k_cache")), list(case.pop("v_cache"))
    same(call("compact_kv_layers", device, case), call("compact_kv_layers", "reference", case))
    return 1


# ---- accept ---------------------------------------------------------------------------------------------------------

KINDS = [dict(), dict(temperature=0.9), dict(temperature=0.8, filters=True), dict(temperature=0.8, filters=True, extras=True)]


def verify_case(rng, temperature: float = 0.0, filters: bool = False, extras: bool = False, vocab: int = 90, batch: int = 8,
                nodes: int = 7) -> dict:
    """Keyword arguments of verify_tree: trees whose nodes are likely tokens of their parents' rows, so that walks go deep."""
    rows = batch * nodes
    logits, parents = 2 * torch.randn(rows, vocab, generator=rng), forest([nodes] * batch, rng, 1)
    best = logits.topk(3).indices
    above = torch.arange(rows) // nodes * nodes + parents.clamp(min=0)
    tokens = best[above, ints(0, 3, rng, rows).long()]
    uniform = lambda low, high: low + (high - low) * torch.rand(batch, generator=rng)  # noqa: E731
    fixed = lambda value, dtype: torch.full((batch,), value, dtype=dtype)  # noqa: E731
    case = dict(
        logits=logits, tokens=tokens, parents=parents, cu_nodes=cumulative([nodes] * batch),
        prefix_len=ints(0, 900, rng, batch), active=torch.ones(batch, dtype=I32), remaining=ints(1, 9, rng, batch),
        stop_ids=torch.tensor([3, 5]), temperature=fixed(temperature, torch.float32),
        top_k=ints(5, vocab, rng, batch) if filters else fixed(0, I32),
        top_p=uniform(0.5, 1.0) if filters else fixed(1.0, torch.float32),
        min_p=uniform(0.0, 0.1) if filters else fixed(0.0, torch.float32),
        seed=torch.randint(-2**62, 2**62, (batch,), generator=rng), out_tokens=torch.full((batch, nodes), SENTINEL),
        path=torch.full((batch, nodes), SENTINEL, dtype=I32), num_tokens_out=fixed(SENTINEL, I32),
        next_root=fixed(SENTINEL, I64), flags=fixed(SENTINEL, I32), logprobs=torch.full((batch, nodes), math.nan),
        vocab_size=vocab, rule=1)
    if extras:
        bits = (ints(-2**31, 2**31 - 1, rng, rows, -(-vocab // 32)) | ints(-2**31, 2**31 - 1, rng, rows, -(-vocab // 32)))
        case |= dict(bias=torch.randn(batch, vocab, generator=rng), bitmask=bits, counts=ints(0, 3, rng, batch, vocab),
                     penalties=torch.tensor([[1.2, 0.3, 0.1]]).repeat(batch, 1))
    return case


def verify_oracle(case: dict) -> tuple:
    """(outputs, which requests are clear: no choice on their path was closer than rounding)."""
    margins: list = []
    want = call("verify_tree", "reference", case, lambda *args: margins.extend(verify_margin(*args)))
    clear = torch.tensor(margins) > 1e-4
    assert clear.sum() >= 0.7 * len(clear), "too few clear requests: the inputs of this check are unfit"
    return want, clear


@check("verify_tree")
def verify_tree(device: str, rng) -> int:
    for kind in KINDS:
        case = verify_case(rng, **kind)
        want, clear = verify_oracle(case)
        same(call("verify_tree", device, case), want, dict(logprobs=1e-4), clear)
    return len(KINDS)


@check("lm_head_verify_tree")
def lm_head_verify_tree(device: str, rng) -> int:
    for kind in KINDS:
        case = verify_case(rng, **kind)
        rows, vocab = case.pop("logits").shape
        head = dict(hidden=torch.randn(rows, 24, generator=rng), weight=torch.randn(vocab, 24, generator=rng) / 2)
        space = dict(workspace=lm_head_verify_tree_workspace(rows, vocab, device)) if device.startswith("cuda") else {}
        want, clear = verify_oracle(dict(case, logits=head["hidden"].double() @ head["weight"].double().T))
        same(call("lm_head_verify_tree", device, dict(case, **head, **space)), want, dict(logprobs=1e-4), clear)
    return len(KINDS)


def sharded(device: str, case: dict, cuts: list) -> dict:
    """verify_tree over vocabulary shards, all on one device: what the last rank's combine writes (counts: of its own ids)."""
    rows, vocab = case["logits"].shape
    state = torch.zeros(rows, STATE_WORDS, dtype=I64)
    for r in range(FILTER_ROUNDS):
        common = dict(case, state=state, round=r, num_rounds=FILTER_ROUNDS)
        words = []
        for low, high in zip(cuts, cuts[1:]):
            part = {k: case[k][:, low:high].contiguous() for k in ("logits", "bias", "counts") if k in case}
            words.append(call("verify_tree_partials", device, dict(
                common, **part, vocab_offset=low,
                partials=torch.full((rows, partial_words(FILTER_ROUNDS)), SENTINEL)))["partials"])
        counts = case["counts"][:, cuts[-2]:].contiguous() if "counts" in case else None
        out = call("verify_tree_combine", device,
                   dict(common, partials=torch.stack(words), counts=counts, vocab_offset=cuts[-2]))
        state = out["state"]
    return out


@check("verify_tree_partials")
@check("verify_tree_combine")
def verify_tree_shards(device: str, rng) -> int:
    for kind in KINDS:
        case = verify_case(rng, **kind)
        want, clear = verify_oracle(case)
        if "counts" in want:
            want["counts"] = want["counts"][:, 40:]
        same(sharded(device, case, [0, 31, 40, case["vocab_size"]]), want, dict(logprobs=1e-4), clear)
    return len(KINDS)


from . import check_comm, check_loop, check_sglang  # noqa: E402, F401  (they register their checks)
