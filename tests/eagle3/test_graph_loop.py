"""GraphLoop: the cycle without a host in it emits what decode.py emits; joins, leaves, stops, budgets, shapes that change."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from fastverify import GraphDecoder, NgramDrafter, SamplingParams, load_draft, load_target
from fastverify.eagle3.cycle import PAIRS, CatchUp
from fastverify.eagle3.graph_loop import GraphLoop, _Scratch
from fastverify.eagle3.shapes import OFF, parse_shape
from loop_checks import DATA, PROMPTS, VOCAB, assert_same_text, decoder, golden, plain_text, rows_of, slots_of
from test_decode import SAMPLINGS

SHAPES = ("off", "chain-3", "tree-20")


def pair(device: str, dtype: torch.dtype = torch.float32) -> tuple:
    if device == "cpu" and dtype == torch.float32:
        return golden()
    target = load_target(DATA / "target", dtype, device)
    return target, load_draft(DATA / "draft", target, dtype=dtype, device=device)


def loop(shape: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **kw) -> GraphLoop:
    """shape: a name, or several separated by commas."""
    target, draft = pair(device, dtype)
    shapes = tuple(parse_shape(s) for s in shape.split(","))
    kw = dict(max_batch=4, max_length=128, stop_ids=[]) | kw
    return GraphLoop(target, draft if any(s.speculative for s in shapes) else None, shapes=shapes, **kw)


def finish(made: GraphLoop, prompts: list = PROMPTS, max_new=40, p: SamplingParams = SamplingParams()) -> list:
    """Runs the prompts to their end; request b uses seed + b. max_new: one number, or one per prompt."""
    budgets = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
    jobs = [made.submit(x, n, replace(p, seed=p.seed + b)) for b, (x, n) in enumerate(zip(prompts, budgets))]
    spans = {}
    for job, tokens in made.run():
        assert tokens
        spans.setdefault(job.number, []).extend(tokens)
    assert all(spans.get(j.number, []) == j.tokens for j in jobs), "what was streamed is the text"
    return jobs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_tokens_of_the_host_loop(shape, name):
    """Same batch, same products: equal token for token, and so are the counts."""
    made = loop(shape)
    jobs = finish(made, p=SAMPLINGS[name])
    want = decoder(shape).generate(PROMPTS, 40, SAMPLINGS[name], [])
    assert [j.tokens for j in jobs] == want.tokens and [j.finish for j in jobs] == want.finish
    for field in ("rounds", "spec_rounds", "emitted", "first_tokens", "drafted", "accepted", "at_depth", "offered", "steps"):
        assert getattr(made.stats, field) == getattr(want.stats, field), field


def test_a_full_batch_of_more_requests_than_cycles_in_flight():
    """Every admitted request owes the ring a record before the host reads the first."""
    prompts = PROMPTS * 5
    jobs = finish(loop("chain-3", max_batch=len(prompts)), prompts, 6)
    assert len(prompts) > 16
    assert_same_text(prompts, [j.tokens for j in jobs], plain_text(PROMPTS, 6, SamplingParams())[0] * 5, SamplingParams())


@pytest.mark.parametrize("shape", SHAPES)
def test_more_requests_than_slots(shape):
    """Requests join as others leave, in buckets of one and two; ragged budgets; text as if alone."""
    budgets = [7, 40, 1, 23]
    made = loop(shape, max_batch=2)
    jobs = finish(made, max_new=budgets, p=SAMPLINGS["filters"])
    want = plain_text(PROMPTS, 40, SAMPLINGS["filters"])[0]
    assert_same_text(PROMPTS, [j.tokens for j in jobs], [w[:n] for w, n in zip(want, budgets)], SAMPLINGS["filters"])
    assert {k[0] for k in made._cycles} <= {1, 2} and [j.finish for j in jobs] == ["length"] * 4
    assert made.pool.pages.free == made.pool.pages.total and not made.busy()


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_ids(shape):
    full = plain_text(PROMPTS, 40)[0]
    for b, i in [(0, 3), (1, 5), (2, 21), (3, 9)]:
        stop = full[b][i]
        jobs = finish(loop(shape, stop_ids=[stop, VOCAB + 5]))
        for text, job in zip(full, jobs):
            assert job.tokens == (text[: text.index(stop) + 1] if stop in text else text)
            assert job.finish == ("stop" if stop in text else "length")


@pytest.mark.parametrize("shape", ["off", "tree-20"])
def test_cancel_leaves_the_others_alone(shape):
    want = plain_text(PROMPTS, 40)[0]
    made = loop(shape, max_batch=3)
    jobs = [made.submit(p, 40) for p in PROMPTS]
    waiting = made.submit([5, 6, 7], 10)
    for _ in range(4):
        made.step()
    made.cancel(jobs[1])
    made.cancel(waiting)
    made.cancel(jobs[1])  # once more does nothing
    kept = list(jobs[1].tokens)
    for _ in made.run():
        pass
    assert jobs[1].finish == waiting.finish == "cancelled" and jobs[1].tokens == kept == want[1][: len(kept)] and len(kept) < 40
    assert not waiting.tokens and made.pool.pages.free == made.pool.pages.total
    assert_same_text([PROMPTS[b] for b in (0, 2, 3)], [jobs[b].tokens for b in (0, 2, 3)], [want[b] for b in (0, 2, 3)])


class Alternating:
    """A controller that changes the shape every `period` cycles."""

    def __init__(self, shapes: tuple, period: int) -> None:
        self.shapes, self.period, self.cycles = shapes, period, 0

    def choose(self):
        self.cycles += 1
        return self.shapes[(self.cycles - 1) // self.period % len(self.shapes)]

    def observe(self, *_) -> None:
        pass


@pytest.mark.parametrize("period", [1, 3, PAIRS + 5])
def test_shapes_that_change(period):
    """Plain cycles in between: the draft catches up, and drafts as if it had run all the time."""
    made = loop("off,chain-2,tree-8", max_length=256)
    made.controller = lambda batch, processors=False, c=Alternating(made.shapes, period): c
    jobs = finish(made, max_new=PAIRS + 44)
    assert_same_text(PROMPTS, [j.tokens for j in jobs], plain_text(PROMPTS, PAIRS + 44)[0])
    assert len(made.stats.steps) == (2 if period > PAIRS else 3) and made.stats.tau > 1.1


def test_a_slow_draft_costs_little_while_plain(monkeypatch):
    """A draft forward that takes two plain steps takes less than 2 % of them: it runs once in PAIRS of them, over all at once."""
    calls, real = [], CatchUp.run
    monkeypatch.setattr(CatchUp, "run", lambda self: (calls.append(1), real(self)))
    made = loop("off,chain-2", max_batch=1, max_length=256)
    made.controller = lambda batch, processors=False, c=Alternating(made.shapes, 10**6): c
    job = made.submit(PROMPTS[2], PAIRS + 44)
    for _ in made.run():
        pass
    assert len(job.tokens) == PAIRS + 44 and len(calls) == 1 and 2 <= 0.02 * PAIRS


def test_a_new_bucket_leaves_the_drafts_cache_alone():
    """What is tried on scratch pages while a request holds pairs of plain cycles: its pages, and all others but those, stay as they are."""
    made = loop("off,chain-2", max_batch=2, max_length=512)
    made.controller = lambda batch, processors=False, c=Alternating(made.shapes, 10**6): c
    made.submit(PROMPTS[2], 120)
    for _ in range(90):
        made.step()
    held, cache = made.state.pair_count.clone(), made.state.draft_cache
    pages = [p for p in range(cache.k.shape[1]) if p not in set(made.scratch)]
    before = [t[:, pages].clone() for t in (cache.k, cache.v)]
    with _Scratch(made, 2):
        CatchUp(made.draft, made.state, 2).run()
    assert int(held.max()) > 60 and torch.equal(made.state.pair_count, held)
    assert all(torch.equal(t[:, pages].nan_to_num(), b.nan_to_num()) for t, b in zip((cache.k, cache.v), before))


def test_caught_up_drafts_are_those_of_the_host_loop():
    """After PAIRS + 5 plain cycles the draft's cache equals that of a draft that saw every pair at once."""
    made = loop("off,tree-8", max_batch=1, max_length=256)
    made.controller = lambda batch, processors=False, c=Alternating(made.shapes, PAIRS + 5): c
    job = made.submit(PROMPTS[2], PAIRS + 44)
    while not made.stats.steps["tree-8"]:
        made.step()
    r, length = made.state.requests, len(PROMPTS[2]) + PAIRS + 5
    other = loop("tree-8", max_batch=1, max_length=256)
    fresh = other.submit(PROMPTS[2] + job.tokens[:PAIRS + 6 - 1], 2)
    table = None
    while fresh.finish is None:
        other.step()
        table = other.state.requests.page_table if table is None else table
    torch.testing.assert_close(rows_of(made.state.draft_cache, r.page_table, 0, length - 1),
                               rows_of(other.state.draft_cache, table, 0, length - 1), rtol=1e-4, atol=1e-5)


def test_auto_measures_chooses_and_keeps_the_text():
    made = loop("off,chain-2,tree-8")
    jobs = finish(made)
    assert_same_text(PROMPTS, [j.tokens for j in jobs], plain_text(PROMPTS, 40)[0])
    assert set(made.times[(4, False)]) == {"off", "chain-2", "tree-8"} and "tok/s" in made.controllers[(4, False)].reason


def test_calibration_in_the_middle_changes_nothing():
    """A new bucket is measured while requests run: their state, caches and unread records stay."""
    made = loop("off,tree-8", max_batch=4)
    jobs = [made.submit(PROMPTS[0], 40)]
    for _ in range(3):
        made.step()
    jobs += [made.submit(p, 40, SamplingParams(repetition_penalty=1.0 + 1e-7)) for p in PROMPTS[1:]]
    for _ in made.run():
        pass
    assert_same_text(PROMPTS, [j.tokens for j in jobs], plain_text(PROMPTS, 40)[0])
    assert len(made.times) >= 2


def test_the_decoder_over_it(shape="tree-8"):
    """Decoder's interface: results, streams, errors, a loop that is kept, a stream that is left half way."""
    target, draft = golden()
    d = GraphDecoder(target, draft, tree=shape)
    for name in ("filters", "processors", "greedy"):
        want = decoder(shape).generate(PROMPTS, 40, SAMPLINGS[name], [])
        got = d.generate(PROMPTS, 40, SAMPLINGS[name], [])
        assert (got.tokens, got.finish) == (want.tokens, want.finish) and got.stats.tau == want.stats.tau
        assert got.stats.decode_ms > 0 and got.stats.emitted == 160 and got.stats.first_tokens == 4
    left = d.stream(PROMPTS, 40, stop_ids=[])
    next(left)
    left.close()
    kept = d.loop(4, 1)
    assert d.generate(PROMPTS, 40, stop_ids=[]).tokens == want.tokens and d.loop(4, 100) is kept
    assert kept.pool.pages.free == kept.pool.pages.total
    stop = want.tokens[0][5]
    assert d.generate(PROMPTS, 40, stop_ids=[stop]).tokens[0] == want.tokens[0][:want.tokens[0].index(stop) + 1]
    assert GraphDecoder(target).generate([[7]], 20, stop_ids=[]).tokens == plain_text([[7]], 20)[0]
    with pytest.raises(ValueError, match="every prompt must hold at least one token"):
        d.generate([[]])
    with pytest.raises(ValueError, match="token ids must be in"):
        d.generate([[VOCAB]])
    with pytest.raises(ValueError, match="temperature must be in"):
        d.generate([[3]], sampling=SamplingParams(temperature=-1.0))
    with pytest.raises(ValueError, match="an n-gram drafter. Fix: use Decoder"):
        GraphDecoder(target, NgramDrafter())


@pytest.mark.parametrize("where", ["next_inputs", "verify_tree", "prepare_tree"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.cuda.OutOfMemoryError])
def test_an_exception_in_the_middle_of_a_cycle_leaves_a_usable_decoder(monkeypatch, where, error):
    from fastverify.eagle3 import cycle
    target, draft = golden()
    d, real, calls = GraphDecoder(target, draft, tree="tree-8"), getattr(cycle, where), 0

    def failing(*args, **kw):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise error("here")
        return real(*args, **kw)

    monkeypatch.setattr(cycle, where, failing)
    with pytest.raises(error):
        d.generate(PROMPTS, 40, stop_ids=[])
    kept = d.loop(4, 1)
    assert not kept.busy() and kept.pool.pages.free == kept.pool.pages.total
    assert d.generate(PROMPTS, 40, stop_ids=[]).tokens == decoder("tree-8").generate(PROMPTS, 40, stop_ids=[]).tokens
    assert d.loop(4, 1) is kept


def test_the_decoder_in_auto():
    target, draft = golden()
    d = GraphDecoder(target, draft)
    result = d.generate(PROMPTS, 40, stop_ids=[])
    assert_same_text(PROMPTS, result.tokens, plain_text(PROMPTS, 40)[0])
    assert d.controller(4).reason == result.stats.controller and result.stats.plain_ms > 0


def test_scratch_pages_are_nobodys():
    made = loop("tree-20")
    taken = [p for _ in range(4) for p in made.pool.pages.take(made.pool.pages_for(88, 40))]
    assert not set(taken) & set(made.scratch) and max(made.scratch) < made.state.cache.k.shape[1]


def test_inactive_rows_idle_without_harm():
    """NaN in every slot of the cache that nobody owns, and rows without requests: the text stays."""
    made = loop("tree-20", max_batch=4)
    job = made.submit(PROMPTS[2], 40)
    made.step()
    used = slots_of(made.state.requests.page_table, 0, len(PROMPTS[2]) + 40 + made.extra, made.state.cache.page_size)
    for cache in (made.state.cache, made.state.draft_cache):
        for x in (cache.k, cache.v):
            flat = x.flatten(1, 2)
            keep = torch.zeros(flat.shape[1], dtype=torch.bool)
            keep[used] = True
            flat[:, ~keep] = float("nan")
    made.pool.buckets = (4,)
    for _ in made.run():
        pass
    assert_same_text([PROMPTS[2]], [job.tokens], plain_text([PROMPTS[2]], 40)[0])


@pytest.mark.parametrize("why,kw,prompt,new", [
    ("must be at least 1 token", {}, [], 4), ("must be at least 1 token", {}, [3], 0),
    ("at most 128 positions", {}, [3], 128), ("must fit into 2 pages", dict(num_pages=2), [3], 100)])
def test_requests_that_cannot_be(why, kw, prompt, new):
    with pytest.raises(ValueError, match=why):
        loop("off", **kw).submit(prompt, new)


def test_loops_that_cannot_be():
    with pytest.raises(ValueError, match="draft must be an EAGLE-3 draft"):
        GraphLoop(golden()[0], shapes=(parse_shape("chain-2"),))
    with pytest.raises(ValueError, match="stop_ids must be at most 16"):
        GraphLoop(golden()[0], shapes=(OFF,), stop_ids=list(range(17)))


@pytest.mark.parametrize("kw,why", [
    (dict(page_size=0), "page_size must be at least 1; got 0"), (dict(prefill_chunk=0), "prefill_chunk must be at least 1; got 0"),
    (dict(max_batch=0), "max_batch must be at least 1; got 0"), (dict(max_length=1.5), "max_length must be an integer; got 1.5"),
    (dict(num_pages=0), "num_pages must be at least 1; got 0"), (dict(run_ahead=-1), "run_ahead must be at least 0; got -1"),
    (dict(shapes=()), "shapes must be one, or several that begin with OFF; got .*Fix: put OFF first"),
    (dict(shapes=(parse_shape("chain-2"), OFF)), "shapes must be one, or several that begin with OFF; got .*'chain-2', 'off'"),
    (dict(stop_ids=[2**70]), "stop_ids must be 64-bit integers"),
    (dict(stop_ids=range(40), max_stop_ids=32), "stop_ids must be at most 32; got 40")])
def test_settings_that_cannot_be(kw, why):
    with pytest.raises(ValueError, match="GraphLoop: " + why):
        GraphLoop(*golden(), **kw)


@pytest.mark.parametrize("prompt,new,kw,why", [
    ([5, 600], 4, {}, r"token ids must be in \[0, 512\); got 600"), ("abc", 6, {}, "a prompt must be a list of token ids"),
    (None, 6, {}, "a prompt must be a list of token ids"), ([5], 2.5, {}, "max_new_tokens must be an integer; got 2.5"),
    ([5], 4, dict(bias={-1: 100.0}), r"bias ids must be in \[0, 512\); got -1"), ([5], 4, dict(bias={600: 1.0}), "bias ids must be in"),
    ([5], 4, dict(bias={6: float("nan")}), "bias must be in"), ([5], 4, dict(temperature=float("nan")), "temperature must be in"),
    ([5], 4, dict(seed=2**64), "seed must be an integer in"), ([5], 4, dict(top_k=2**40), "top_k must be an integer in")])
def test_submit_refuses_what_generate_refuses(prompt, new, kw, why):
    """And the loop goes on as if nothing had been."""
    made = loop("tree-8")
    first = made.submit(PROMPTS[0], 12)
    made.step()
    with pytest.raises(ValueError, match="submit: " + why):
        made.submit(prompt, new, SamplingParams(**kw))
    jobs = [first, made.submit(PROMPTS[1], 12)]
    for _ in made.run():
        pass
    assert [j.number for j in jobs] == [0, 1]
    assert_same_text(PROMPTS[:2], [j.tokens for j in jobs], plain_text(PROMPTS[:2], 12)[0])


def test_as_many_stop_ids_as_one_likes():
    """The decoder makes room for them; a loop refuses what it has no room for, and keeps those it had."""
    target, draft = golden()
    full = plain_text(PROMPTS, 40)[0]
    stop = full[0][5]
    never = [VOCAB + i for i in range(40)]
    want = plain_text(PROMPTS, 40, SamplingParams(), (*never, stop))
    d = GraphDecoder(target, draft, tree="tree-8")
    assert d.generate(PROMPTS, 40, stop_ids=[stop]).tokens[0] == want[0][0]
    got = d.generate(PROMPTS, 40, stop_ids=[*never, stop])
    assert (got.tokens, got.finish) == want and got.finish[0] == "stop"
    assert d.generate(PROMPTS, 40, stop_ids=[stop] * 50).tokens == want[0]
    assert d.generate(PROMPTS, 40, stop_ids=[]).tokens == full
    made = loop("off", stop_ids=[stop])
    with pytest.raises(ValueError, match="set_stop_ids: stop_ids must be at most 16; got 40. Fix: "):
        made.set_stop_ids(never)
    assert finish(made)[0].tokens == want[0][0]
    assert [j.tokens for j in finish(loop("off", stop_ids=[*never, stop], max_stop_ids=41))] == want[0]


@pytest.mark.parametrize("mode", [True, False])
def test_a_loop_made_in_inference_mode(mode):
    """Cancel, reset and new stop ids from outside it, and the other way round."""
    want = plain_text(PROMPTS, 20)[0]
    with torch.inference_mode(mode):
        made = loop("tree-8")
        jobs = [made.submit(p, 20) for p in PROMPTS]
        made.step()
    with torch.inference_mode(not mode):
        made.cancel(jobs[1])
        made.set_stop_ids([want[2][6]])
        for _ in made.run():
            pass
        assert jobs[1].finish == "cancelled" and jobs[2].tokens == want[2][:want[2].index(want[2][6]) + 1]
        made.reset()
        made.set_stop_ids([])
    assert_same_text(PROMPTS, [j.tokens for j in finish(made, max_new=20)], want)


def test_a_cancel_that_fails_loses_nothing(monkeypatch):
    want = plain_text(PROMPTS, 20)[0]
    made = loop("tree-8")
    jobs = [made.submit(p, 20) for p in PROMPTS]
    made.step()
    with monkeypatch.context() as patch:
        patch.setattr(made.state.requests, "active", None)
        for failing in (lambda: made.cancel(jobs[1]), made.reset):
            with pytest.raises((TypeError, AttributeError)):
                failing()
    assert all(j.finish is None for j in jobs)
    for _ in made.run():
        pass
    assert_same_text(PROMPTS, [j.tokens for j in jobs], want)


def test_a_job_of_another_loop_is_not_cancelled():
    one, other = loop("off"), loop("off")
    job, mine = other.submit(PROMPTS[0], 8), one.submit(PROMPTS[0], 8)
    for _ in range(2):  # waiting, then running in the same slot
        with pytest.raises(ValueError, match="cancel: the job must be one of this loop; got job 0 of another. Fix: "):
            one.cancel(job)
        one.step()
        other.step()
    for made in (one, other):
        for _ in made.run():
            pass
    assert job.tokens == mine.tokens == plain_text(PROMPTS[:1], 8)[0][0]


def test_a_second_thread_in_a_loop_is_refused():
    made, seen, threads = loop("off", hook=lambda *_: None), [], []
    job = made.submit(PROMPTS[0], 8)

    def other() -> None:
        for call in (made.step, made.reset, lambda: made.cancel(job), lambda: made.set_stop_ids([])):
            with pytest.raises(RuntimeError, match="GraphLoop: the thread must be the only one in it"):
                call()
        seen.append(made.submit(PROMPTS[1], 8))  # a request may come from any

    def hook(*_) -> None:
        if not threads:
            threads.append(threading.Thread(target=other))
            threads[0].start()
            threads[0].join(60)

    made.hook = hook
    for _ in made.run():
        pass
    assert_same_text(PROMPTS[:2], [job.tokens, seen[0].tokens], plain_text(PROMPTS[:2], 8)[0])


def test_a_second_stream_is_refused_and_the_first_goes_on():
    """Of as many prompts; streams of other batch sizes have loops of their own."""
    target, draft = golden()
    d, want = GraphDecoder(target, draft, tree="tree-8"), plain_text(PROMPTS, 24)[0]
    stream, got = d.stream(PROMPTS[:1], 24, stop_ids=[]), []
    got += next(stream)[1]
    for again in (lambda: next(d.stream(PROMPTS[1:2], 24, stop_ids=[])), lambda: d.generate(PROMPTS[1:2], 24, stop_ids=[])):
        with pytest.raises(RuntimeError, match="GraphDecoder: a run must be at its end or closed before the next .*Fix: finish or close"):
            again()
    assert_same_text(PROMPTS[:2], d.generate(PROMPTS[:2], 24, stop_ids=[]).tokens, want[:2])
    for _, tokens in stream:
        got += tokens
    assert_same_text(PROMPTS[:1], [got], want[:1])
    left = d.stream(PROMPTS[:1], 24, stop_ids=[])
    next(left)
    left.close()
    assert_same_text(PROMPTS[:1], d.generate(PROMPTS[:1], 24, stop_ids=[]).tokens, want[:1])


def test_times_of_an_uncaptured_run():
    """Every cycle whose tokens count is in decode_ms, the caller's own time is not: as Decoder counts."""
    d = GraphDecoder(golden()[0], hook=lambda *_: time.sleep(0.04), capture=False)
    for new in (2, 5):
        s = d.generate([[7]], new, stop_ids=[]).stats
        assert s.steps == {"off": new - 1} and s.first_tokens == 1 and s.decode_ms >= 40 * (new - 1) and s.ms["prefill"] > 0
    stream, end = d.stream([[7]], 3, stop_ids=[]), None
    while end is None:
        try:
            next(stream)
            time.sleep(1)
        except StopIteration as stop:
            end = stop.value
    assert 80 <= end.stats.decode_ms < 1500


def even_only(job, drafted: list) -> torch.Tensor:
    """Even ids, but every third token must be odd: what is allowed depends on what was drafted before."""
    odd = (len(job.tokens) + len(drafted)) % 3 == 2
    return torch.full((VOCAB // 32,), -0x55555556 if odd else 0x55555555, dtype=torch.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_a_grammar_cuts_the_cycle_in_two(device, name):
    """Every token is an allowed one, and speculation emits what plain decoding under the same grammar emits."""
    texts = {}
    for shape in ("off", "chain-3", "tree-20"):
        made = loop(shape, device, grammar=even_only)
        jobs = finish(made, p=SAMPLINGS[name])
        texts[shape] = [j.tokens for j in jobs]
        assert made.stats.host_steps == sum(made.stats.steps.values()) > 0
        for text in texts[shape]:
            assert [t % 2 for t in text] == [int(i % 3 == 2) for i in range(40)]
    for shape in ("chain-3", "tree-20"):
        same = sum(a == b for a, b in zip(texts[shape], texts["off"]))
        assert same >= (4 if device == "cpu" else 3), "a tie of float32 may fall either way on a GPU"


# ---- exact mode -----------------------------------------------------------------------------------------------------------


def exact_texts(device: str, shape: str, exact: bool, p: SamplingParams, max_batch: int = 4, prompts: list = PROMPTS) -> list:
    return [j.tokens for j in finish(loop(shape, device, torch.bfloat16, exact=exact, max_batch=max_batch), prompts, 40, p)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["greedy", "filters", "processors"])
def test_exact_mode_is_bit_for_bit(device, name):
    """In bfloat16, where a rounding decides many a token: no margin is allowed for."""
    p = SAMPLINGS[name]
    plain = exact_texts(device, "off", True, p, 1)
    for shape, max_batch in (("chain-3", 4), ("tree-20", 1), ("tree-20", 3), ("tree-60", 2)):
        assert exact_texts(device, shape, True, p, max_batch) == plain
    assert exact_texts(device, "off", True, p, 4) == plain


def test_exact_mode_has_conditions():
    target, _ = golden()
    layer = replace(target.layers[0], down_bias=torch.zeros(64))
    odd = type(target)(target.config, target.embed_weight, [layer] * 8, target.norm, target.lm_head_weight)
    with pytest.raises(ValueError, match="exact must have a whole target"):
        GraphLoop(odd, exact=True)


# ---- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_captured_eager_and_cpu(shape, name):
    """Captured = eager token for token; both are the CPU's text, ties of float32 aside."""
    eager = finish(loop(shape, "cuda", capture=False), p=SAMPLINGS[name])
    graph = finish(loop(shape, "cuda"), p=SAMPLINGS[name])
    assert [j.tokens for j in graph] == [j.tokens for j in eager]
    assert_same_text(PROMPTS, [j.tokens for j in graph], plain_text(PROMPTS, 40, SAMPLINGS[name])[0], SAMPLINGS[name])


@pytest.mark.gpu
def test_captured_with_joins_and_shapes_that_change():
    made = loop("off,chain-2,tree-8", "cuda", max_batch=2)
    made.controller = lambda batch, processors=False, c=Alternating(made.shapes, 3): c
    jobs = finish(made, max_new=[60, 11, 60, 33])
    want = plain_text(PROMPTS, 60)[0]
    assert_same_text(PROMPTS, [j.tokens for j in jobs], [w[:n] for w, n in zip(want, [60, 11, 60, 33])])


@pytest.mark.gpu
@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_run_ahead_does_not_change_the_text(run_ahead):
    jobs = finish(loop("tree-8", "cuda", run_ahead=run_ahead), p=SAMPLINGS["filters"])
    assert_same_text(PROMPTS, [j.tokens for j in jobs], plain_text(PROMPTS, 40, SAMPLINGS["filters"])[0], SAMPLINGS["filters"])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_captured_is_eager(shape):
    """In one bucket: when the host learns that a request has left, and the next cycle may be of fewer rows, depends on the clock; and
    in bfloat16 the products of 20 rows round otherwise than those of 80."""
    texts = []
    for capture in (False, True):
        made = loop(shape, "cuda", torch.bfloat16, capture=capture)
        made.pool.buckets = (4,)
        texts.append([j.tokens for j in finish(made)])
    assert texts[0] == texts[1] and all(len(t) == 40 for t in texts[0])


@pytest.mark.gpu
def test_the_draft_catches_up_in_one_launch():
    """Captured, as cycles are: some thirty launches would take a plain step of a small model each time."""
    made = loop("off,chain-2", "cuda", torch.bfloat16, max_batch=1)
    finish(made, PROMPTS[:1], 4)
    (kept, run), = made._catch_up.values()
    assert isinstance(run.__self__, torch.cuda.CUDAGraph)
    # its buffers are its own, whatever is allocated afterwards: as an eager one, over many plain cycles
    texts = []
    for capture in (True, False):
        made = loop("off,chain-2", "cuda", torch.bfloat16, max_batch=1, max_length=256, capture=capture)
        made.controller(1)
        other = [torch.full((n,), 1 << 20, dtype=torch.int32, device="cuda") for n in range(1, 2000, 7)]
        made.controller = lambda batch, processors=False, c=Alternating(made.shapes, PAIRS + 5): c
        texts.append([j.tokens for j in finish(made, PROMPTS[2:3], PAIRS + 44)])
        assert all(bool((t == 1 << 20).all()) for t in other)
    assert texts[0] == texts[1]
