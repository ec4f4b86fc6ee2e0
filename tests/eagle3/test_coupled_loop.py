"""Coupled drafts in the loops: the text of plain decoding, accepted further; greedy requests as they were."""

from dataclasses import replace

import pytest

from fastverify import Decoder, GraphDecoder, SamplingParams
from fastverify.eagle3 import grow
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape
from loop_checks import PROMPTS, assert_same_text, golden, plain_text

SAMPLED = SamplingParams(temperature=0.8, seed=100)
COUNTS = ("rounds", "drafted", "accepted", "at_depth", "offered", "emitted")


def counts(stats) -> dict:
    return {name: getattr(stats, name) for name in COUNTS}


@pytest.mark.parametrize("make", [Decoder, GraphDecoder])
@pytest.mark.parametrize("shape,gain", [("chain-3", 0.03), ("tree-20", 0.0)])  # the golden draft is a poor one
def test_the_same_text_accepted_further(make, shape, gain):
    prompts = PROMPTS * 8  # more at once than a ring of 16 records
    want = plain_text(prompts, 40, SAMPLED)[0]
    tau = {}
    for coupled in (False, True):
        result = make(*golden(), tree=shape, coupled=coupled).generate(prompts, 40, SAMPLED, [])
        assert_same_text(prompts, result.tokens, want, SAMPLED)
        tau[coupled] = result.stats.tau
    assert tau[True] > tau[False] + gain


@pytest.mark.parametrize("p", [SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, seed=3),
                               SamplingParams(temperature=0.7, repetition_penalty=1.2, bias={4: 2.0}, seed=-9)])
def test_processors_act_on_the_target_alone(p):
    result = Decoder(*golden(), tree="tree-20").generate(PROMPTS, 40, p, [])
    assert_same_text(PROMPTS, result.tokens, plain_text(PROMPTS, 40, p)[0], p)
    assert result.stats.tau > 1.5


@pytest.mark.parametrize("make", [Decoder, GraphDecoder])
def test_greedy_runs_do_not_change(make):
    runs = [make(*golden(), tree="tree-8", coupled=coupled).generate(PROMPTS, 30, stop_ids=[]) for coupled in (False, True)]
    assert runs[0].tokens == runs[1].tokens and counts(runs[0].stats) == counts(runs[1].stats)


def test_a_loop_is_coupled_from_its_first_sampled_run_on():
    d = GraphDecoder(*golden(), tree="tree-8")
    greedy = d.generate(PROMPTS, 30, stop_ids=[])
    plain = d.loop(4, 1)
    assert not plain.coupled
    d.generate(PROMPTS, 30, SAMPLED, [])
    coupled = d.loop(4, 1)
    assert coupled.coupled and coupled is not plain
    again = d.generate(PROMPTS, 30, stop_ids=[])  # with the coupled cycles: greedy rows are left alone
    assert d.loop(4, 1) is coupled
    assert again.tokens == greedy.tokens and counts(again.stats) == counts(greedy.stats)
    off = GraphDecoder(*golden(), tree="tree-8", coupled=False)
    off.generate(PROMPTS, 30, SAMPLED, [])
    assert not off.loop(4, 1).coupled


def test_greedy_and_sampled_requests_in_one_batch():
    target, draft = golden()
    made = GraphLoop(target, draft, shapes=(parse_shape("tree-20"),), max_batch=4, max_length=128, stop_ids=[])
    params = [SamplingParams(), SAMPLED, SamplingParams(), replace(SAMPLED, temperature=1.3)]
    jobs = [made.submit(prompt, n, p) for prompt, n, p in zip(PROMPTS, (40, 9, 25, 40), params)]
    for _ in made.run():
        pass
    for job, prompt, p in zip(jobs, PROMPTS, params):
        want = Decoder(target).generate([prompt], len(job.tokens), p, []).tokens
        assert_same_text([prompt], [job.tokens], want, p)


def test_deeper_levels_are_scored_less_sharply(monkeypatch):
    seen, topk = [], grow.draft_topk

    def spy(*args, coupling=None, level=0, **kw):
        seen.append((level, coupling.sharpness if coupling else None))
        return topk(*args, coupling=coupling, level=level, **kw)

    monkeypatch.setattr(grow, "draft_topk", spy)
    Decoder(*golden(), tree="tree-8").generate(PROMPTS, 5, SAMPLED, [])
    assert seen[:4] == [(level, pytest.approx(grow.FADE ** level)) for level in range(4)] and grow.FADE < 1
    seen.clear()
    Decoder(*golden(), tree="tree-8").generate(PROMPTS, 5, stop_ids=[])
    assert set(seen) == {(level, None) for level in range(4)}
