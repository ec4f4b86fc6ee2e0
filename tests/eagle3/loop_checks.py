"""What the decode-loop tests share: the golden pair, a run that checks its invariants every round, and comparisons.

CheckedRun takes the place of decode._Run (fixture `checked`): it asserts, it never repairs.
"""

import functools
from pathlib import Path

import pytest
import torch

from fastverify import Decoder, NgramDrafter, SamplingParams, load_draft, load_target
from fastverify.accept.verify_tree import Sampling
from fastverify.eagle3 import decode
from fastverify.models.batch import ForwardBatch
from fastverify.reference.accept import verify_margin

DATA = Path(__file__).parents[1] / "data" / "golden"
VOCAB = 512
PROMPTS = [[5, 9, 33], [7], [100, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [400, 401, 402, 403, 404, 405]]
SHAPES = ("chain-2", "chain-3", "tree-8", "tree-20", "tree-60")


@functools.cache
def golden() -> tuple:
    """(target, draft), loaded once; tests that patch them must undo it."""
    target = load_target(DATA / "target")
    return target, load_draft(DATA / "draft", target)


def decoder(shape: str, **kw) -> Decoder:
    """"off", a shape name or "auto" with the EAGLE-3 draft; "ngram" (auto) or "ngram SHAPE" with the n-gram drafter."""
    target, draft = golden()
    if shape.startswith("ngram"):
        return Decoder(target, NgramDrafter(), tree=shape.removeprefix("ngram").strip() or "auto", **kw)
    return Decoder(target, None if shape == "off" else draft, tree=shape, **kw)


@pytest.fixture
def checked(monkeypatch):
    """Every run of the test is a CheckedRun; returns the list of runs made."""
    monkeypatch.setattr(decode, "_Run", CheckedRun)
    monkeypatch.setattr(CheckedRun, "made", [])
    return CheckedRun.made


def plain_text(prompts: list, max_new: int, sampling: SamplingParams = SamplingParams(), stop_ids: tuple = ()) -> tuple:
    """(tokens, finish) of plain decoding."""
    r = Decoder(golden()[0]).generate(prompts, max_new, sampling, list(stop_ids))
    return r.tokens, r.finish


class CheckedRun(decode._Run):
    """Asserts the invariants of eagle3/requests.py before and after every round and keeps what tests look at.

    poison  KV slots that nothing may attend to are NaN before every round
    fault   fault(seed of the request, absolute position, logits row) may change the row a token is drawn from
    """

    made: list = []
    poison = False
    fault = None

    def __init__(self, *a, **kw) -> None:
        super().__init__(*a, **kw)
        pages = torch.randperm(self.req.page_table.numel(), generator=torch.Generator().manual_seed(1))
        self.req.page_table.copy_(pages.view_as(self.req.page_table))  # no request owns neighbouring pages
        self.max_new = self.req.remaining.tolist()
        self.seeds = self.req.sampling.seed.tolist()
        self.trees = [{} for _ in self.prompts]  # per request: prefix_len -> (tokens, parents)
        self.moved = self.clipped = self.unclipped_tokens = 0
        CheckedRun.made.append(self)

    # ---- hooks

    def _round(self) -> list:
        self._before()
        live = [b for b, f in enumerate(self.finish) if f is None]
        before = [len(t) for t in self.tokens]
        spans = super()._round()
        assert sorted(b for b, _ in spans) == sorted(b for b in live if len(self.tokens[b]) > before[b])
        for b, tokens in spans:
            assert b in live and self.tokens[b][before[b]:] == tokens
        self._after()
        return spans

    def _draft(self, shape, plan) -> None:
        super()._draft(shape, plan)
        if self.d.eagle and shape.speculative:
            assert not self.pending.rounds and torch.equal(self.req.draft_len[self._live()], self.req.prefix_len[self._live()])
        self._check_tree(shape, plan.tree)

    def _accept(self, logits, tokens, parents, cu_nodes, req, plan) -> None:
        if self.fault is not None:
            self._apply_fault(logits, parents, cu_nodes, req)
        before = req.remaining.clone()
        super()._accept(logits, tokens, parents, cu_nodes, req, plan)
        out = plan.out
        n = out.num_tokens_out
        assert torch.equal(req.remaining, before - n)
        for b in range(len(n)):
            path = [p for p in out.path[b].tolist() if p >= 0]
            assert n[b] <= len(path) and out.path[b].tolist()[: len(path)] == path
            self.moved += any(p != i for i, p in enumerate(path[: n[b]]))
            self.clipped += 0 < n[b] < len(path)
            self.unclipped_tokens += len(path)

    # ---- checks

    def _live(self) -> list:
        return [b for b, f in enumerate(self.finish) if f is None]

    def _before(self) -> None:
        r = self.req
        for b in self._live():
            text = self.prompts[b] + self.tokens[b]
            assert r.active[b] == 1 and r.root[b] == text[-1]
            assert r.prefix_len[b] == len(text) - 1
            assert r.remaining[b] == self.max_new[b] - len(self.tokens[b]) > 0
            if self.d.eagle:
                waiting = sum(int(valid[b]) for _, _, valid in self.pending.rounds)
                assert r.draft_len[b] + waiting == r.prefix_len[b]
        assert [int(a) for a in r.active] == [f is None for f in self.finish]
        if self.poison:
            poison_beyond(self.cache, r.page_table, r.prefix_len)
            if self.d.eagle:
                poison_beyond(self.draft_cache, r.page_table, r.draft_len)

    def _after(self) -> None:
        for b, f in enumerate(self.finish):
            assert self.req.prefix_len[b] == len(self.prompts[b]) + max(len(self.tokens[b]), 1) - 1
            assert (f is None) == bool(self.req.active[b])

    def _check_tree(self, shape, tree) -> None:
        cu = tree.cu_nodes.tolist()
        for b in range(len(self.prompts)):
            lo, hi = cu[b], cu[b + 1]
            if self.finish[b] is not None:
                assert lo == hi
                continue
            tokens, parents = tree.tokens[lo:hi].tolist(), tree.parents[lo:hi].tolist()
            masks = [sum((w & (2**64 - 1)) << (64 * i) for i, w in enumerate(row)) for row in tree.mask[lo:hi].tolist()]
            depth, prefix = tree.depth[lo:hi].tolist(), int(self.req.prefix_len[b])
            assert 1 <= hi - lo <= shape.nodes and max(depth) <= (shape.levels if self.d.eagle else shape.nodes)
            assert tokens[0] == (self.prompts[b] + self.tokens[b])[-1] and parents[0] == -1
            assert all(0 <= t < VOCAB for t in tokens) and int(tree.flags[b]) == 0
            assert tree.positions[lo:hi].tolist() == [prefix + d for d in depth]
            for i, (p, m, d) in enumerate(zip(parents, masks, depth)):
                assert m == (masks[p] if i else 0) | 1 << i and bin(m).count("1") == d + 1 and p < i
            assert len(set(zip(parents, tokens))) == hi - lo  # siblings are pairwise distinct
            self.trees[b][prefix] = (tokens, parents)

    def _apply_fault(self, logits, parents, cu_nodes, req) -> None:
        for b, (lo, hi) in enumerate(zip(cu_nodes.tolist(), cu_nodes.tolist()[1:])):
            depth = []
            for i in range(hi - lo):
                p = int(parents[lo + i])
                depth.append(0 if p < 0 else depth[p] + 1)
                self.fault(int(req.sampling.seed[b]), int(req.prefix_len[b]) + depth[i] + 1, logits[lo + i])


def slots_of(page_table: torch.Tensor, b: int, count: int, page_size: int) -> torch.Tensor:
    at = torch.arange(count)
    return page_table[b, at // page_size].long() * page_size + at % page_size


def poison_beyond(cache, page_table: torch.Tensor, length: torch.Tensor) -> None:
    """NaN in every slot of `cache` that no request has committed."""
    keep = torch.zeros(cache.k.shape[1] * cache.page_size, dtype=torch.bool)
    for b, n in enumerate(length.tolist()):
        keep[slots_of(page_table, b, n, cache.page_size)] = True
    for x in (cache.k, cache.v):
        x.flatten(1, 2)[:, ~keep] = float("nan")


def rows_of(cache, page_table: torch.Tensor, b: int, count: int) -> torch.Tensor:
    """The first `count` positions of request b: [2, L, count, Hkv, D]."""
    at = slots_of(page_table, b, count, cache.page_size)
    return torch.stack([x.flatten(1, 2)[:, at] for x in (cache.k, cache.v)])


def fresh_prefill(text: list, tree: str = "tree-8", chunk: int = 512, page_size: int = 16, rounds: int = 0):
    """A run that has prefilled `text` from nothing (which emits one token) and gone on for `rounds` rounds."""
    target, draft = golden()
    d = Decoder(target, draft, tree=tree, prefill_chunk=chunk, page_size=page_size)
    run = decode._Run(d, [text], 32, SamplingParams(), [])
    for _ in run.spans(limit=rounds):
        pass
    return run


def check_caches(run) -> None:
    """Both caches of a finished run hold what a prefill over the same text writes."""
    for b, prompt in enumerate(run.prompts):
        text = prompt + run.tokens[b]
        count = int(run.req.prefix_len[b])
        assert count == len(text) - 1
        fresh = fresh_prefill(text)
        torch.testing.assert_close(rows_of(run.cache, run.req.page_table, b, count),
                                   rows_of(fresh.cache, fresh.req.page_table, 0, count), rtol=1e-5, atol=1e-5)
        if run.d.eagle:
            count = int(run.req.draft_len[b])
            torch.testing.assert_close(rows_of(run.draft_cache, run.req.page_table, b, count),
                                       rows_of(fresh.draft_cache, fresh.req.page_table, 0, count), rtol=1e-5, atol=1e-5)


def margin_at(text: list, seed: int, p: SamplingParams, emitted: list) -> float:
    """How clear the choice of the token after `text` is (reference/accept.py, verify_margin)."""
    target, _ = golden()
    n = len(text)
    i32 = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    batch = ForwardBatch(i32(*text), torch.arange(n, dtype=torch.int32), torch.arange(n), i32(0, n), i32(0), i32(0)[None])
    hidden, _ = target.forward(batch, target.make_cache(1, n))
    bias = torch.zeros(1, VOCAB)
    for token, value in p.bias.items():
        bias[:, token] = value
    counts = torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=VOCAB).int()[None]
    s = Sampling.make(1, "cpu", p.temperature, p.top_k, p.top_p, p.min_p, seed)
    zero = torch.zeros(1, dtype=torch.int64)
    penalties = torch.tensor([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty]])
    return verify_margin(
        target.logits(hidden[-1:]), zero, i32(-1), i32(0, 1), i32(n - 1), i32(1), i32(9), None, *s, bias, None, penalties, counts,
        zero[None].clone(), i32(0), i32(0)[None], zero.clone(), i32(0), None, None, VOCAB, 1)[0]


def assert_same_text(prompts: list, got: list, want: list, p: SamplingParams = SamplingParams(), seeds: list = None) -> None:
    """Token for token. Where a text differs, the first difference must be a tie within float32 rounding of the logits."""
    for b, (x, y) in enumerate(zip(got, want, strict=True)):
        if x == y:
            continue
        i = next((i for i, (u, v) in enumerate(zip(x, y)) if u != v), min(len(x), len(y)))
        assert i < min(len(x), len(y)), f"request {b}: one text is longer: {x} {y}"
        margin = margin_at(prompts[b] + y[:i], p.seed + b if seeds is None else seeds[b], p, y[:i])
        assert margin < 2e-5, f"request {b}, token {i}: {x[i]} instead of {y[i]}, margin {margin}"
