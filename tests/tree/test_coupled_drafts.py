"""Coupled drafts: draft_topk with verify_tree's noise."""

import math

import numpy as np
import pytest
import torch
from conftest import positional, run_op
from torch.library import opcheck

import fastverify as fv
from fastverify import _ops
from fastverify.reference.noise import gumbel
from fastverify.tree import draft_topk

I32, I64 = torch.int32, torch.int64


def coupling(batch: int, temperature=0.8, seed=5, prefix=10, active=None) -> dict:
    return dict(temperature=torch.full((batch,), temperature) if not isinstance(temperature, list) else torch.tensor(temperature),
                seed=torch.arange(batch) + seed, prefix_len=torch.arange(batch, dtype=I32) * 3 + prefix,
                active=torch.ones(batch, dtype=I32) if active is None else torch.tensor(active, dtype=I32))


def outputs(rows: int, k: int) -> dict:
    return dict(values=torch.full((rows, k), math.nan), tokens=torch.full((rows, k), -77, dtype=I32))


def emitted(logits: torch.Tensor, seed: torch.Tensor, prefix: torch.Tensor, temperature: float) -> torch.Tensor:
    """What verify_tree draws at the root of one-node trees: the token at position prefix + 1. int64 [B]."""
    batch = logits.size(0)
    one = torch.ones(batch, dtype=I32)
    sampling = fv.Sampling(torch.full((batch,), temperature), one * 0, one.float(), one.float() * 0, seed)
    out = fv.verify_tree(logits, torch.zeros(batch, dtype=I32), -one, torch.arange(batch + 1, dtype=I32), prefix, one, one * 99, sampling,
                         max_path=1)
    return out.out_tokens[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch,each,vocab,k", [(1, 1, 40, 5), (3, 1, 300, 10), (2, 3, 1000, 64), (1, 6, 32003, 6)])
def test_against_the_oracle(backend, rng, dtype, batch, each, vocab, k):
    rows = batch * each
    d2t = torch.randint(0, 5, (vocab,), generator=rng).cumsum(0)
    args = dict(logits=(3 * torch.randn(rows, vocab, generator=rng)).to(dtype), d2t=d2t, level=2, sharpness=0.7,
                **coupling(batch), **outputs(rows, min(k, vocab)))
    got, want = run_op(backend, "draft_topk", **args), run_op("reference", "draft_topk", **args)
    assert torch.equal(got["tokens"], want["tokens"])
    assert torch.allclose(got["values"], want["values"], rtol=1e-6, atol=2e-5)
    if backend != "cpu":
        cpu = run_op("cpu", "draft_topk", **args)
        assert all(torch.equal(got[n], cpu[n]) for n in cpu)


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0, 3.0])
def test_a_perfect_draft_drafts_what_is_emitted(backend, rng, temperature):
    """Same logits, same noise: the first child is the token that verify_tree draws, at every position."""
    batch, vocab = 40, 700
    logits, c = 2 * torch.randn(batch, vocab, generator=rng), coupling(40, temperature)
    got = run_op(backend, "draft_topk", logits=logits, **c, **outputs(batch, 3))
    assert torch.equal(got["tokens"][:, 0].long(), emitted(logits, c["seed"], c["prefix_len"], temperature))
    deeper = run_op(backend, "draft_topk", logits=logits, level=4, **c, **outputs(batch, 3))
    assert torch.equal(deeper["tokens"][:, 0].long(), emitted(logits, c["seed"], c["prefix_len"] + 4, temperature))


def test_noise_is_that_of_verify_tree_bit_for_bit(backend):
    """Flat rows: nothing but noise is left, and any one bit of it would reorder some of 1,000 x 64 ranks."""
    vocab, d2t = 1000, torch.arange(1000) * 7  # target ids 0, 8, 16 ...
    c = coupling(64, 1.0, seed=-2**62, prefix=2**31 - 400)
    got = run_op(backend, "draft_topk", logits=torch.zeros(64, vocab), d2t=d2t, **c, **outputs(64, 64))
    first = emitted(_on_targets(torch.zeros(64, vocab), d2t), c["seed"], c["prefix_len"], 1.0)
    assert torch.equal(got["tokens"][:, 0].long(), first)
    for b in (0, 63):
        noise = gumbel(np.arange(vocab) * 8, int(c["prefix_len"][b]) + 1, int(c["seed"][b]))
        assert got["tokens"][b].tolist() == (np.argsort(-noise, kind="stable")[:64] * 8).tolist()


def _on_targets(logits: torch.Tensor, d2t: torch.Tensor) -> torch.Tensor:
    """Draft logits in the target's vocabulary, -inf elsewhere."""
    ids = torch.arange(logits.size(1)) + d2t
    full = torch.full((logits.size(0), int(ids.max()) + 1), -math.inf)
    full[:, ids] = logits
    return full


def test_greedy_requests_are_ranked_as_without(backend, rng):
    logits = torch.randn(8, 500, generator=rng)
    c = coupling(8, [0.0, 1.0, math.nan, -1.0, math.inf, 0.0, 1.0, 0.0])
    got = run_op(backend, "draft_topk", logits=logits, sharpness=0.3, **c, **outputs(8, 9))
    plain = run_op(backend, "draft_topk", logits=logits, **outputs(8, 9))
    left_alone = torch.tensor([True, False, True, True, True, True, False, True])
    assert all(torch.equal(got[n][left_alone], plain[n][left_alone]) for n in plain)
    assert not torch.equal(got["tokens"][1], plain["tokens"][1])


def test_rows_belong_to_active_requests_in_order(backend, rng):
    """m rows each for requests 1 and 3; what is behind them is padding and never read."""
    logits = torch.randn(12, 90, generator=rng)
    c = coupling(4, active=[0, 1, 0, 7])
    got = run_op(backend, "draft_topk", logits=logits, level=1, **c, **outputs(12, 4))
    for request, first in ((1, 0), (3, 3)):
        alone = {n: t[request:request + 1] for n, t in c.items()}
        want = run_op(backend, "draft_topk", logits=logits[first:first + 3], level=1, **alone, **outputs(3, 4))
        assert all(torch.equal(got[n][first:first + 3], want[n]) for n in want)
    assert got["values"][6:].eq(0).all() and got["tokens"][6:].eq(0).all()
    logits[6:] = math.nan
    again = run_op(backend, "draft_topk", logits=logits, level=1, **c, **outputs(12, 4))
    assert all(torch.equal(got[n], again[n]) for n in got)


def test_more_requests_than_a_warp_counts_at_once(backend, rng):
    active = (torch.rand(75, generator=rng) < 0.4).int().tolist()
    args = dict(logits=torch.randn(75, 33, generator=rng), **coupling(75, active=active), **outputs(75, 3))
    got, want = run_op(backend, "draft_topk", **args), run_op("reference", "draft_topk", **args)
    assert torch.equal(got["tokens"], want["tokens"]) and torch.allclose(got["values"], want["values"], atol=2e-5)


def test_not_finite_entries_stay_out(backend):
    x = torch.full((3, 260), -math.inf)
    x[0, 200], x[0, 10], x[0, 11] = 1.0, math.nan, math.inf
    x[2] = math.nan
    got = run_op(backend, "draft_topk", logits=x, **coupling(3), **outputs(3, 3))
    assert got["tokens"].tolist() == [[200, 0, 1], [0, 1, 2], [0, 1, 2]]
    assert got["values"][0].tolist() == [0.0, -math.inf, -math.inf] and got["values"][1:].eq(-math.inf).all()


def test_rows_that_do_not_fit_into_shared_memory(backend, rng):
    """One block a row, more entries than it can keep: scores are computed twice."""
    rows = 200 if backend == "cuda" else 2
    x = torch.randn(rows, 70_001, generator=rng)[:, 1:]
    args = dict(logits=x, **coupling(rows), **outputs(rows, 10))
    got, cpu = run_op(backend, "draft_topk", **args), run_op("cpu", "draft_topk", **args)
    assert all(torch.equal(got[n], cpu[n]) for n in cpu)


# ---- what it is for ---------------------------------------------------------------------------------------------------

SMALL_P, SMALL_Q = (0.1, 0.35, 0.3, 0.25), (0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize("k,coupled_rate,plain_rate", [(1, 0.643, 0.10), (2, 0.920, 0.45), (3, 0.985, 0.75)])
def test_match_rates_of_the_small_pair(k, coupled_rate, plain_rate):
    """Exact rates of one level for these two distributions: with the noise 0.643, 0.920, 0.985; without, the mass of q's best k."""
    n = 40_000
    p, q = torch.tensor(SMALL_P).log().expand(n, 4), torch.tensor(SMALL_Q).log().expand(n, 4)
    seed, prefix = torch.arange(n), torch.full((n,), 3, dtype=I32)
    token = emitted(p.contiguous(), seed, prefix, 1.0)
    sampling = fv.Coupling(torch.ones(n), seed, prefix, torch.ones(n, dtype=I32))
    for coupling_, rate in ((sampling, coupled_rate), (None, plain_rate)):
        _, drafted = draft_topk(q.contiguous(), k, coupling=coupling_)
        hit = (drafted == token[:, None]).any(1).float().mean().item()
        assert abs(hit - rate) < 5 * math.sqrt(rate * (1 - rate) / n) + 5e-4


def test_the_law_of_the_output_is_the_target_s():
    """Trees of coupled drafts, two levels deep: (first, second) token over 200,000 seeds against p x p, chi-square."""
    n, temperature = 200_000, 1.25
    first = torch.tensor(SMALL_P).log()
    second = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.05, 0.05, 0.45, 0.45], [0.1, 0.2, 0.3, 0.4]]).log()
    seed, prefix, one = torch.arange(n), torch.full((n,), 8, dtype=I32), torch.ones(n, dtype=I32)
    c = fv.Coupling(torch.full((n,), temperature), seed, prefix, one)
    _, child = draft_topk(torch.tensor(SMALL_Q).log().expand(n, 4).contiguous(), 2, coupling=c)
    _, grandchild = draft_topk(second[child.long()].flip(-1).reshape(2 * n, 4), 1, coupling=c, level=1)  # a poor draft
    tokens = torch.cat([torch.zeros(n, 1, dtype=I32), child, grandchild.view(n, 2)], 1)
    logits = torch.stack([first.expand(n, 4), second[child[:, 0].long()], second[child[:, 1].long()], *[torch.zeros(n, 4)] * 2], 1)
    sampling = fv.Sampling(torch.full((n,), temperature), one * 0, one.float(), one.float() * 0, seed)
    out = fv.verify_tree(logits.reshape(5 * n, 4), tokens.flatten(), torch.tensor([-1, 0, 0, 1, 2], dtype=I32).repeat(n),
                         torch.arange(n + 1, dtype=I32) * 5, prefix, one, one * 99, sampling, max_path=3)
    p1, p2 = torch.softmax(first / temperature, 0).double(), torch.softmax(second / temperature, 1).double()
    a, b = out.out_tokens[:, 0], out.out_tokens[:, 1]
    assert chi_square(torch.bincount(a, minlength=4), p1) < 25  # 3 degrees of freedom: p = 1e-5
    went_on = b >= 0
    assert went_on.float().mean() > 0.8
    # where the walk stopped, the second token is that of plain decoding at the same position
    plain = emitted(second[a].contiguous(), seed, prefix + 1, temperature)
    assert torch.equal(b[went_on], plain[went_on])
    both = torch.bincount(4 * a + torch.where(went_on, b, plain), minlength=16)
    assert chi_square(both, (p1[:, None] * p2).flatten()) < 50  # 15 degrees of freedom: p = 1e-5


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# ---- arguments ----------------------------------------------------------------------------------------------------------

BAD = {
    "alone": (dict(temperature=None), "draft_topk: seed, prefix_len and active must be given with temperature, or not at all; got no "
              "temperature. Fix: pass all four for coupled rows, none otherwise."),
    "without": (dict(active=None), "draft_topk: temperature must come with seed, prefix_len and active; got it without. "
                "Fix: pass all four for coupled rows, none otherwise."),
    "seed": (dict(seed=torch.zeros(2, dtype=I32)), "draft_topk: seed must be int64 [2] on cpu; got int32 [2] on cpu. "
             "Fix: cast with .to(dtype)."),
    "rows": (dict({n: t[:1].repeat(3) for n, t in coupling(1).items()}), "draft_topk: logits must be a multiple of the batch of 3 rows; "
             "got 4. Fix: pass one row per request at level 0 and k rows later."),
    "level": (dict(level=1024), "draft_topk: level must be in 0..1023; got 1024. Fix: count draft levels from 0."),
    "sharpness": (dict(sharpness=0.0), "draft_topk: sharpness must be above 0 and at most 64; got 0. Fix: leave it out."),
    "sharpness nan": (dict(sharpness=math.nan), "draft_topk: sharpness must be above 0 and at most 64; got nan. Fix: leave it out."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    with pytest.raises(RuntimeError) as error:
        run_op("cpu", "draft_topk", **{**dict(logits=torch.zeros(4, 10), **coupling(2), **outputs(4, 2)), **change})
    assert str(error.value) == message


def test_opcheck_and_compile(rng):
    x, c = torch.randn(4, 50, generator=rng), coupling(2)
    opcheck(_ops.get("draft_topk"), positional("draft_topk", logits=x, level=1, **c, **outputs(4, 3)))
    shared = fv.Coupling(**c)
    compiled = torch.compile(draft_topk, fullgraph=True, backend="eager")(x, 3, coupling=shared, level=1)
    assert all(torch.equal(a, b) for a, b in zip(compiled, draft_topk(x, 3, coupling=shared, level=1)))
