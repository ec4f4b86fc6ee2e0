"""The decode loop emits what plain decoding emits: shapes, sampling, batches, stops, chunks, pages, streams."""

import pytest
import torch

from fastverify import Decoder, SamplingParams, load_draft, load_target
from loop_checks import (  # noqa: F401
    DATA, PROMPTS, SHAPES, VOCAB, assert_same_text, check_caches, checked, decoder, fresh_prefill, golden, plain_text, rows_of)

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.9, seed=11),
    "filters": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=5),
    "processors": SamplingParams(temperature=0.7, seed=2**40 + 3, repetition_penalty=1.15, frequency_penalty=0.2,
                                 presence_penalty=0.3, bias={5: 1.5, 77: -2.0}),
    "greedy with processors": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5, bias={9: 2.0}),
}


def run(shape: str, prompts: list = PROMPTS, max_new: int = 40, p: SamplingParams = SamplingParams(), stop_ids: tuple = (), **kw):
    return decoder(shape, **kw).generate(prompts, max_new, p, list(stop_ids))


@pytest.fixture(scope="module")
def plain():
    """sampling name -> texts of PROMPTS by plain decoding."""
    return {name: plain_text(PROMPTS, 40, p)[0] for name, p in SAMPLINGS.items()}


@pytest.mark.parametrize("shape", SHAPES + ("ngram", "ngram chain-3", "ngram tree-20", "auto"))
@pytest.mark.parametrize("name", SAMPLINGS)
def test_speculation_emits_the_plain_text(checked, plain, shape, name):
    result = run(shape, p=SAMPLINGS[name])
    assert_same_text(PROMPTS, result.tokens, plain[name], SAMPLINGS[name])
    assert result.finish == ["length"] * 4 and all(len(t) == 40 for t in result.tokens)
    if shape in SHAPES:
        assert result.stats.accepted > 0 and result.stats.tau > 1.2


def test_the_comparison_itself_sees_one_wrong_token(plain):
    """Texts may differ at a tie only; no position of these texts is one."""
    for name, b in (("greedy", 0), ("filters", 2), ("processors", 3)):
        for i in (0, 7, 39):
            wrong = [list(t) for t in plain[name]]
            wrong[b][i] = (wrong[b][i] + 1) % VOCAB
            with pytest.raises(AssertionError, match=f"request {b}, token {i}: .*margin"):
                assert_same_text(PROMPTS, wrong, plain[name], SAMPLINGS[name])
    with pytest.raises(AssertionError, match="one text is longer"):
        assert_same_text(PROMPTS, [t[:-1] for t in plain["greedy"]], plain["greedy"])


@pytest.mark.parametrize("target_dtype,draft_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                                      (torch.float16, torch.float16)])
def test_other_dtypes(checked, target_dtype, draft_dtype):
    """Features cross from the target's dtype to the draft's; the invariants hold and drafts are accepted."""
    target = load_target(DATA / "target", dtype=target_dtype)
    draft = load_draft(DATA / "draft", target, dtype=draft_dtype)
    result = Decoder(target, draft, tree="tree-20").generate(PROMPTS, 24, stop_ids=[])
    assert [len(t) for t in result.tokens] == [24] * 4 and result.stats.tau > 1.8
    if target_dtype == torch.float32:
        assert_same_text(PROMPTS, result.tokens, plain_text(PROMPTS, 24)[0])


@pytest.mark.parametrize("shape", ["chain-3", "tree-20"])
@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_a_request_alone_and_in_a_batch(checked, shape, name):
    """Text and, round by round, drafted trees do not depend on the rest of the batch, nor on requests that ended before."""
    p = SAMPLINGS[name]
    stops = plain_text(PROMPTS, 40, p)[0][0][11:12]  # request 0 leaves the batch early: later ones move up a rank
    together = run(shape, p=p, stop_ids=stops)
    batch = checked[-1]
    assert together.finish[0] == "stop" and set(together.finish) == {"stop", "length"}
    same = total = 0
    for b, prompt in enumerate(PROMPTS):
        seed = SamplingParams(**{**vars(p), "seed": p.seed + b})
        alone = run(shape, [prompt], p=seed, stop_ids=stops)
        assert_same_text([prompt], alone.tokens, together.tokens[b:b + 1], seed)
        assert alone.finish == together.finish[b:b + 1]
        for prefix, tree in checked[-1].trees[0].items():
            total += 1
            same += batch.trees[b].get(prefix) == tree
    assert total > 30 and same >= 0.95 * total  # a draft tie may be decided otherwise in another product shape


def test_trees_are_those_of_a_draft_that_prefills_the_same_text(checked):
    """No state of earlier rounds leaks: after any round the draft stands where a fresh prefill stands."""
    run("tree-20", max_new=24)
    made, same, total = checked[-1], 0, 0
    for b, prompt in enumerate(PROMPTS):
        text = prompt + made.tokens[b]
        for prefix, tree in list(made.trees[b].items())[::2]:
            fresh = fresh_prefill(text[:prefix], "tree-20", rounds=1)
            total += 1
            same += fresh.trees[0][prefix] == tree
    assert total > 10 and same >= 0.9 * total


def test_seeds():
    texts = [run("tree-8", p=SamplingParams(temperature=1.0, seed=s), max_new=16).tokens for s in (3, 3, 4, -3, 2**62)]
    assert texts[0] == texts[1]
    assert len({str(t) for t in texts}) == 4
    assert texts[0][1:2] != texts[2][1:2]
    same = run("tree-8", [[7], [7]], p=SamplingParams(temperature=1.0, seed=3), max_new=16).tokens
    assert same[0] != same[1]  # request b uses seed + b
    assert same[1] == run("chain-2", [[7]], p=SamplingParams(temperature=1.0, seed=4), max_new=16).tokens[0]


@pytest.mark.parametrize("shape", ["chain-3", "tree-60", "ngram chain-7"])
def test_caches_after_acceptance(checked, shape):
    """Target and draft KV equal a fresh prefill's, after rounds that moved rows of other branches."""
    # a text that repeats, so that the n-gram drafter is accepted too
    prompts = PROMPTS if not shape.startswith("ngram") else [[7, 8, 9] * 6, [300, 301] * 5]
    run(shape, prompts, p=SamplingParams(bias={} if not shape.startswith("ngram") else {t: 30.0 for t in (7, 8, 9, 300, 301)}))
    assert checked[-1].unclipped_tokens > 50
    if shape == "tree-60":
        assert checked[-1].moved > 20
    check_caches(checked[-1])


@pytest.mark.parametrize("shape", ["chain-3", "tree-20", "ngram"])
def test_page_sizes(checked, plain, shape):
    for page_size in (1, 7, 16):
        result = run(shape, page_size=page_size)
        assert_same_text(PROMPTS, result.tokens, plain["greedy"])
        check_caches(checked[-1])


def test_any_chunking_gives_the_same_caches_and_text(checked):
    gen = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, VOCAB, (n,), generator=gen).tolist() for n in (23, 1, 8, 9)]
    whole = run("tree-8", prompts, max_new=12)
    reference = fresh_prefill(prompts[0])
    for chunk in (1, 2, 7, 22, 23):
        assert_same_text(prompts, run("tree-8", prompts, max_new=12, prefill_chunk=chunk).tokens, whole.tokens)
        parts = fresh_prefill(prompts[0], chunk=chunk)
        assert parts.tokens == reference.tokens and torch.equal(parts.req.draft_len, reference.req.draft_len)
        for a, b in ((parts.cache, reference.cache), (parts.draft_cache, reference.draft_cache)):
            torch.testing.assert_close(rows_of(a, parts.req.page_table, 0, 23), rows_of(b, reference.req.page_table, 0, 23),
                                       rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts.last_hidden, reference.last_hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ["off", "chain-3", "tree-20"])
def test_stop_ids_inside_an_accepted_span(checked, shape):
    """The text ends right after the first stop id, wherever in a span it falls; the caches hold the kept text only."""
    full = plain_text(PROMPTS, 40)[0]
    clipped = 0
    for b, i in [(0, 0), (0, 3), (1, 5), (2, 7), (2, 21), (3, 9)][:: 3 if shape == "off" else 1]:
        stop = full[b][i]
        result = run(shape, stop_ids=(stop, VOCAB + 5))
        for text, got, finish in zip(full, result.tokens, result.finish):
            want = text[: text.index(stop) + 1] if stop in text else text
            assert got == want and finish == ("stop" if stop in text else "length")
        clipped += checked[-1].clipped
    if shape != "off":
        assert clipped >= 4
    check_caches(checked[-1])


@pytest.mark.parametrize("shape", ["off", "chain-2", "tree-20"])
def test_stop_against_budget(checked, shape):
    text = plain_text([PROMPTS[0]], 40)[0][0]
    i = next(i for i in range(6, 40) if text[i] not in text[:i])
    for budget, want in ((i, "length"), (i + 1, "stop"), (i + 2, "stop")):
        result = run(shape, [PROMPTS[0]], budget, stop_ids=(text[i],))
        assert result.tokens[0] == text[: min(budget, i + 1)] and result.finish == [want]
    for budget in (1, 2, 3):
        result = run(shape, PROMPTS, budget)
        assert [len(t) for t in result.tokens] == [budget] * 4 and result.finish == ["length"] * 4
        assert result.stats.emitted == 4 * budget and result.stats.first_tokens == 4


def test_stop_ids_default_to_the_target_eos():
    target, draft = golden()
    want = {"seed": 0, "temperature": 1.0, "bias": {2: 6.0}}  # eos is 2
    result = Decoder(target, draft, tree="tree-8").generate(PROMPTS, 40, SamplingParams(**want))
    assert result.finish.count("stop") >= 2
    for tokens, finish in zip(result.tokens, result.finish):
        assert (tokens[-1] == 2) == (finish == "stop") and 2 not in tokens[:-1]
    assert Decoder(target, draft, tree="tree-8").generate(PROMPTS, 40, SamplingParams(**want), []).finish == ["length"] * 4


@pytest.mark.parametrize("shape", ["off", "tree-20", "ngram"])
def test_stream_is_generate_in_pieces(shape):
    p = SamplingParams(temperature=0.7, seed=8)
    whole = run(shape, p=p, stop_ids=(3, 50, 60, 70))
    stream, spans = decoder(shape).stream(PROMPTS, 40, p, [3, 50, 60, 70]), []
    while True:
        try:
            spans.append(next(stream))
        except StopIteration as end:
            result = end.value
            break
    for b in range(4):
        assert sum((t for r, t in spans if r == b), []) == whole.tokens[b] == result.tokens[b]
    assert all(tokens for _, tokens in spans) and result.finish == whole.finish


def test_two_streams_of_one_decoder_do_not_meet():
    d = decoder("tree-8")
    want = [d.generate([p], 24, stop_ids=[]).tokens[0] for p in PROMPTS[:2]]
    got, streams = [[], []], [d.stream([p], 24, stop_ids=[]) for p in PROMPTS[:2]]
    open_streams = {0, 1}
    while open_streams:
        for s in sorted(open_streams):
            span = next(streams[s], None)
            if span is None:
                open_streams.discard(s)
            else:
                got[s] += span[1]
    assert got == want


def test_the_longest_request_that_fits():
    """Exactly at the limit of positions and pages: nothing is written or read outside."""
    target, _ = golden()
    prompt = [(7 * i) % VOCAB for i in range(target.config.max_position - 61 - 30)]
    want = plain_text([prompt], 30)[0]
    assert_same_text([prompt], run("tree-60", [prompt], 30).tokens, want)
    with pytest.raises(ValueError, match=r"at most 1024 positions; got 933 \+ 31 \+ 61 = 1025. Fix: shorten the prompt"):
        run("tree-60", [prompt], 31)
