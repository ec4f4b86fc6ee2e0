"""The numbers a run reports, by definition, on counts worked out by hand."""

import json

import pytest

from fastverify.eagle3.stats import Stats, distinct_ngram_ratio


def test_counts_of_three_rounds():
    """Two requests: a tree of depth 3 (7 drafts) and one of depth 2 (4), then a plain round of one, then a chain of 2."""
    s = Stats()
    s.count([2, 0], [3, 2], [8, 5])
    s.count([0], [0], [1])
    s.count([2], [2], [3])
    assert (s.rounds, s.spec_rounds, s.drafted, s.accepted) == (4, 3, 7 + 4 + 2, 4)
    assert s.at_depth == [2, 2, 0] and s.offered == [3, 3, 1]
    assert s.tau == pytest.approx((4 + 4) / 4)  # accepted drafts + one token of the target's own per round
    assert s.per_depth() == [(1, 2 / 3, 2 / 3), (2, 2 / 3, 1.0), (3, 0.0, 0.0)]


def test_a_walk_deeper_than_offered_is_kept():
    s = Stats()
    s.count([1], [0], [2])
    assert s.at_depth == [1] and s.offered == [0]


def test_per_depth_is_conditional_on_the_depth_before():
    s = Stats()
    for accepted in (0, 1, 1, 3, 3, 3, 2, 0, 0, 0):
        s.count([accepted], [3], [4])
    assert [round(u, 9) for _, u, _ in s.per_depth()] == [0.6, 0.4, 0.3]
    assert [round(c, 9) for _, _, c in s.per_depth()] == [0.6, round(4 / 6, 9), 0.75]
    assert s.tau == pytest.approx(1 + sum(u for _, u, _ in s.per_depth()))  # E[accepted] = sum of P(accepted >= d)
    assert s.accepted / s.drafted == pytest.approx(13 / 30)


def test_the_published_definition():
    """vLLM's counters: accept length 3.53 = 1 + 12208 / 4816."""
    s = Stats(rounds=4816, accepted=12208)
    assert s.tau == pytest.approx(3.5349, abs=1e-4)


def test_nothing_ran():
    s = Stats()
    assert s.tau == 1.0 and s.tokens_per_second == 0.0 and s.break_even is None and s.per_depth() == []
    s.plain_ms = 10.0
    assert s.break_even is None
    assert distinct_ngram_ratio([]) == 1.0 and distinct_ngram_ratio([1, 2, 3]) == 1.0


def test_speed_and_break_even():
    s = Stats(emitted=101, first_tokens=1, decode_ms=2000.0, plain_ms=10.0)
    s.steps["tree-8"] = 30
    s.steps["off"] = 10
    assert s.tokens_per_second == pytest.approx(50.0)  # the prefill's token is not decoding
    assert s.break_even == pytest.approx(5.0)          # a round took 50 ms, a plain one 10


def test_timer_adds_up():
    s = Stats()
    for _ in range(3):
        with s.timer("draft"):
            pass
    assert s.ms["draft"] > 0 and s.ms["target"] == 0


def test_as_dict_is_json():
    s = Stats(emitted=5, decode_ms=1.0)
    s.count([1], [2], [3])
    s.steps["chain-2"] = 1
    d = json.loads(json.dumps(s.as_dict()))
    assert d["tau"] == 2.0 and d["steps"] == {"chain-2": 1} and d["accepted"] == 1 and d["drafted"] == 2
    assert d["per_depth"] == [dict(depth=1, unconditional=1.0, conditional=1.0), dict(depth=2, unconditional=0.0, conditional=0.0)]


def test_distinct_ngrams():
    assert distinct_ngram_ratio([7] * 103) == pytest.approx(1 / 100)
    assert distinct_ngram_ratio([1, 2] * 10, 2) == pytest.approx(2 / 19)
    assert distinct_ngram_ratio(list(range(50))) == 1.0
    assert distinct_ngram_ratio([1, 1, 1, 2], 1) == pytest.approx(0.5)
