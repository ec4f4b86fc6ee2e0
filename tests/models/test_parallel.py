"""Tensor parallelism over gloo: ranks emit the same tokens, and those of one rank alone (golden pair, float32)."""

import pytest
from gloo_ranks import texts_of_one, texts_of_ranks

from fastverify import Decoder, SamplingParams
from fastverify.models.parallel import heads_of, split_evenly

PROMPTS = [[1, 7, 42, 42, 7, 3, 9], [5, 6, 7, 8] * 5, [11]]
RUNS = [("off", SamplingParams()), ("chain-3", SamplingParams()), ("tree-8", SamplingParams()),
        ("tree-8", SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3)),
        ("tree-8", SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.2, bias={17: 2.0, 400: -1.0}))]
NEW = 24


def decode(target, draft) -> list:
    return [Decoder(target, draft, tree=tree, prefill_chunk=8).generate(PROMPTS, NEW, params, stop_ids=[]).tokens
            for tree, params in RUNS]


def test_split_evenly_covers_everything_once():
    for n, world, step in [(10, 3, 1), (49152, 7, 32), (100, 8, 32), (5, 5, 1)]:
        parts = [split_evenly(n, world, r, step) for r in range(world)]
        assert parts[0][0] == 0 and parts[-1][1] == n and all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
        assert all(a % step == 0 for a, b in parts if a < b)


@pytest.mark.parametrize("num_heads, num_kv, world", [(8, 2, 2), (8, 2, 4), (8, 1, 8), (9, 3, 3), (64, 8, 8), (64, 4, 8)])
def test_heads_keep_their_group(num_heads, num_kv, world):
    group, seen = num_heads // num_kv, []
    for r in range(world):
        (q0, q1), (k0, k1) = heads_of(num_heads, num_kv, world, r)
        seen += range(q0, q1)
        per = (q1 - q0) // (k1 - k0)
        assert all(q // group == k0 + (q - q0) // per for q in range(q0, q1)), "a query head meets its own kv head"
    assert seen == list(range(num_heads))


def test_heads_that_do_not_divide_are_replicated():
    assert heads_of(9, 3, 2, 0) is None and heads_of(8, 3, 2, 0) is None


def first_differences(got: list, want: list) -> list:
    """(run, request, position) of texts that part."""
    found = []
    for run, (a_texts, b_texts) in enumerate(zip(got, want)):
        for b, (x, y) in enumerate(zip(a_texts, b_texts)):
            at = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), None)
            if at is not None:
                found.append((run, b, at))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_decode_on_ranks(tmp_path, world):
    texts = texts_of_ranks(decode, world, tmp_path, overlap_rows=6)  # the overlapped form runs in prefill
    assert all(t == texts[0] for t in texts), "every rank emits the same tokens"
    differences = first_differences(texts[0], texts_of_one(decode))
    assert differences == [], f"(run, request, position) of first differences from one rank: {differences}"
