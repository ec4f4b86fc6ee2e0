"""The decode loop under stress: shapes that change, broken logits, poisoned padding and stale KV, refused requests."""

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastverify import Decoder, GraphDecoder, NgramDrafter, SamplingParams, load_draft, load_target
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import OFF, parse_shape
from loop_checks import (  # noqa: F401
    DATA, PROMPTS, VOCAB, CheckedRun, assert_same_text, check_caches, checked, decoder, golden, plain_text)

NAN = float("nan")


class Script:
    """A controller that follows a list of shapes, then repeats the last."""

    def __init__(self, shapes: list) -> None:
        self.shapes, self.at, self.round_ms, self.reason, self.seen = shapes, -1, {"off": 1.0}, "scripted", []

    def choose(self):
        self.at += 1
        return self.shapes[min(self.at, len(self.shapes) - 1)]

    def observe(self, shape, accepted: float, ms: float) -> None:
        self.seen.append((shape, accepted, ms))


SCRIPTS = {
    "alternating": ["off", "tree-8", "off", "off", "chain-3", "tree-20", "off", "chain-2"],
    "long off": ["tree-8"] + ["off"] * 70 + ["tree-20"],
    "from the start": ["off"] * 5 + ["tree-20"],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_switching_off_and_on_keeps_the_draft_right(checked, script, temperature):
    """Plain rounds leave pairs to catch up on; requests leave the batch on the way; then the draft must stand where a draft
    stands that was never off."""
    names = SCRIPTS[script] * (4 if script == "alternating" else 1)
    p, max_new = SamplingParams(temperature=temperature, seed=1), 100 if script == "long off" else 45
    full = plain_text(PROMPTS, max_new, p)[0]
    stay = set(full[0] + full[2])  # requests 0 and 2 stay to the end
    stops = [next(t for t in full[b][6 * b:] if t not in stay) for b in (1, 3)]
    want = plain_text(PROMPTS, max_new, p, stops)
    d = decoder("auto")
    d._controllers[4] = control = Script([OFF if n == "off" else parse_shape(n) for n in names])
    result = d.generate(PROMPTS, max_new, p, stops)
    assert_same_text(PROMPTS, result.tokens, want[0], p)
    assert result.finish == want[1] and result.finish == ["length", "stop", "length", "stop"]
    made = checked[-1]
    assert not made.pending.rounds
    check_caches(made)
    # each observation carries the shape, accepted drafts and time of one and the same round, in order; neither the first
    # round (it allocates) nor the last is observed
    assert [s.name for s, _, _ in control.seen] == (names + [names[-1]] * 99)[1: len(made.round_ms) - 1]
    assert [ms for _, _, ms in control.seen] == made.round_ms[1:-1]
    assert all(a == 0 for s, a, _ in control.seen if s is OFF)
    assert sum(result.stats.steps.values()) == len(made.round_ms) and set(result.stats.steps) <= set(names)
    # trees after the switch are those of a run that always speculated
    always = decoder("tree-20").generate(PROMPTS, max_new, p, stops)
    other, common, same = checked[-1], 0, 0
    assert always.finish == result.finish
    for b in range(4):
        for prefix, tree in made.trees[b].items():
            if len(tree[0]) == 20 and prefix in other.trees[b]:
                common, same = common + 1, same + (other.trees[b][prefix] == tree)
    assert common >= 3 and same >= 0.9 * common


@pytest.mark.parametrize("shape", ["chain-3", "tree-8", "tree-60"])
def test_counts_of_a_run(checked, shape):
    result = decoder(shape).generate(PROMPTS, 40, stop_ids=[])
    s, made = result.stats, checked[-1]
    assert s.emitted == sum(map(len, result.tokens)) == 160 and s.first_tokens == 4
    assert s.accepted + s.rounds == made.unclipped_tokens - 4  # the prefill's four rows are not rounds
    assert 156 <= s.accepted + s.rounds <= 156 + 4 * parse_shape(shape).levels  # only the last round of a request is clipped
    assert s.rounds == s.spec_rounds == sum(len(t) for t in made.trees)
    assert s.drafted == sum(len(t[0]) - 1 for trees in made.trees for t in trees.values())
    assert s.steps == {shape: len(made.round_ms)} and sum(s.at_depth) == s.accepted
    assert s.offered[0] == s.rounds and all(a <= o for a, o in zip(s.at_depth, s.offered))
    assert s.decode_ms == sum(made.round_ms) and abs(sum(s.ms.values()) - s.ms["prefill"] - s.decode_ms) < 1e-6
    assert all(v > 0 for k, v in s.ms.items())


# ---- broken logits ---------------------------------------------------------------------------------------------------------


def fault_at(seed: int, position: int, kind: str):
    def fault(self, s: int, t: int, row: torch.Tensor) -> None:
        if s == seed and t == position:
            if kind == "entry":
                row[17] = NAN
            else:
                row.fill_({"nan": NAN, "-inf": -float("inf")}[kind])
    return fault


@pytest.mark.parametrize("shape", ["off", "chain-3", "tree-20", "ngram auto"])
@pytest.mark.parametrize("kind", ["nan", "-inf", "entry"])
def test_bad_logits_end_one_request_only(checked, monkeypatch, shape, kind):
    """A row without a finite entry: the text ends before it. One NaN: the best finite entry is still emitted."""
    full = plain_text(PROMPTS, 24)[0]
    d = decoder(shape)
    for at in (0, 1, 6, 7, 8):
        monkeypatch.setattr(CheckedRun, "fault", fault_at(1, len(PROMPTS[1]) + at, kind))
        if shape == "ngram auto":
            d._controllers[4] = Script([parse_shape("chain-7")])
        result = d.generate(PROMPTS, 24, stop_ids=[])
        assert result.finish == ["length", "bad_logits", "length", "length"]
        assert result.tokens[1] == full[1][: at + (kind == "entry")]
        assert [result.tokens[b] for b in (0, 2, 3)] == [full[b] for b in (0, 2, 3)]


@pytest.mark.parametrize("shape", ["off", "chain-3", "tree-20"])
def test_every_request_may_be_broken_from_the_start(monkeypatch, shape):
    """Nothing is emitted at all, and the id that was never drawn is not fed to the draft."""
    target, _ = golden()
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda h: torch.full_like(logits(h), NAN))
    for prompts in (PROMPTS, [[1] * 600]):
        result = decoder(shape).generate(prompts, 8)
        assert result.tokens == [[] for _ in prompts] and result.finish == ["bad_logits"] * len(prompts)


def test_a_broken_target_under_auto(monkeypatch):
    target, draft = golden()
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda h: torch.full_like(logits(h), NAN))
    for drafter in (draft, NgramDrafter()):
        assert Decoder(target, drafter).generate(PROMPTS, 8).finish == ["bad_logits"] * 4


@pytest.mark.parametrize("drafter,nodes", [("eagle", [1, 3, 4, 8, 20]), ("ngram", [1, 8])])
def test_calibration_measures_full_rounds(checked, monkeypatch, drafter, nodes):
    """Every shape is timed twice on rounds of that shape, n-gram drafts included, for 1 and 4 requests and in a short context."""
    target, draft = golden()
    for limit in (1024, 70):
        monkeypatch.setattr(target, "config", replace(target.config, max_position=limit))
        d = Decoder(target, draft if drafter == "eagle" else NgramDrafter())
        for batch in (1, 4):
            checked.clear()
            control = d.controller(batch)
            assert list(control.round_ms) == [s.name for s in d.shapes] and control is d.controller(batch)
            assert len(checked) == 2 * len(nodes)
            for run, n in zip(checked, nodes * 2):
                assert run.stats.steps == {run.fixed.name: 5} and len(run.prompts) == batch
                sizes = [len(tree[0]) for trees in run.trees for tree in trees.values()]
                assert sizes == [n] * (5 * batch)
    monkeypatch.setattr(target, "config", replace(target.config, max_position=40))
    assert Decoder(target, draft).generate([[5, 6]], 4, stop_ids=[]).tokens == plain_text([[5, 6]], 4)[0]


@pytest.mark.parametrize("kind", ["nan", "entry"])
@pytest.mark.parametrize("shape", ["off", "chain-3", "tree-20"])
def test_a_bad_row_behind_the_end_of_the_text_changes_nothing(checked, monkeypatch, shape, kind):
    """Rows that the walk visits after the stop id or past the budget do not decide how the request finished."""
    full = plain_text([PROMPTS[1]], 40)[0][0]
    reached = 0
    for i in [i for i in range(3, 32) if full[i] not in full[:i]][:: 9 if shape == "off" else 2]:
        monkeypatch.setattr(CheckedRun, "fault", fault_at(0, 1 + i + 1, kind))
        for max_new, want in ((40, "stop"), (i + 1, "stop"), (i, "length")):
            result = decoder(shape).generate([PROMPTS[1]], max_new, stop_ids=[full[i]])
            assert result.tokens[0] == full[: min(max_new, i + 1)] and result.finish == [want]
            reached += checked[-1].clipped
    assert reached > 3 or shape == "off"


@pytest.mark.parametrize("where", ["logits", "forward", "fuse", "one row"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_broken_draft_never_changes_the_text(checked, monkeypatch, where, value):
    target, draft = golden()
    p = SamplingParams(temperature=0.6, seed=2)
    want = plain_text(PROMPTS, 20, p)[0]
    method = "logits" if where == "one row" else where
    honest = getattr(draft, method)

    def broken(*a, **kw):
        out = honest(*a, **kw).clone()
        (out[:1] if where == "one row" else out).fill_(value)
        return out

    monkeypatch.setattr(draft, method, broken)
    for shape in ("chain-2", "tree-20"):
        result = Decoder(target, draft, tree=shape).generate(PROMPTS, 20, p, [])
        assert result.tokens == want and result.finish == ["length"] * 4
        assert result.stats.accepted == 0 or where in ("one row", "fuse")


# ---- stale data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["chain-3", "tree-8", "tree-60", "auto"])
def test_nothing_stale_is_read(checked, monkeypatch, shape):
    """NaN in every KV slot that is not committed, in every padding row that leaves a forward and in every reused buffer:
    the same trees and the same text."""
    target, draft = golden()
    p = SamplingParams(temperature=0.8, seed=6)
    stops = plain_text(PROMPTS, 40, p)[0][2][5:6]

    def scripted() -> Decoder:
        d = decoder(shape)
        if shape == "auto":
            d._controllers[4] = Script([OFF if n == "off" else parse_shape(n) for n in SCRIPTS["alternating"] * 4])
        return d

    clean = scripted().generate(PROMPTS, 40, p, stops)
    clean_run = checked[-1]
    forward, draft_forward, plan_of = target.forward, draft.forward, Decoder.plan

    def target_forward(batch, *a, **kw):
        hidden, aux = forward(batch, *a, **kw)
        for x in (hidden, aux):
            x[int(batch.cu_nodes[-1]):] = NAN
        return hidden, aux

    def poisoned_draft(batch, *a, **kw):
        h2 = draft_forward(batch, *a, **kw)
        h2[int(batch.cu_nodes[-1]):] = NAN
        return h2

    def poisoned_plan(self, batch, shape_):
        plan = plan_of(self, batch, shape_)
        buffers = plan.grow
        for t in (plan.aux_out, *(buffers.state if buffers else ()), *(buffers.first + buffers.beam if buffers else ())):
            if t is not None and t.is_floating_point():
                t.fill_(NAN)
        for t in (plan.out.out_tokens, plan.out.path, plan.out.num_tokens_out, plan.out.next_root, plan.next_tokens):
            t.fill_(VOCAB - 1)
        plan.tree.mask.fill_(-1)
        return plan

    monkeypatch.setattr(target, "forward", target_forward)
    monkeypatch.setattr(draft, "forward", poisoned_draft)
    monkeypatch.setattr(Decoder, "plan", poisoned_plan)
    monkeypatch.setattr(CheckedRun, "poison", True)
    result = scripted().generate(PROMPTS, 40, p, stops)
    assert result.tokens == clean.tokens and result.finish == clean.finish
    assert checked[-1].trees == clean_run.trees


def test_a_decoder_can_be_used_again(checked):
    """Plans and controllers are kept between calls: longer, shorter, other batch sizes, an abandoned stream."""
    d = decoder("tree-20")
    for prompts, n in ((PROMPTS, 20), (PROMPTS[:1], 60), (PROMPTS[::-1], 5), (PROMPTS[1:3], 33)):
        assert_same_text(prompts, d.generate(prompts, n, stop_ids=[]).tokens, plain_text(prompts, n)[0])
        next(d.stream(prompts, n, stop_ids=[]))


# ---- refusals -------------------------------------------------------------------------------------------------------------


REFUSED = [
    (dict(prompts=[]), "every prompt must hold at least one token; got an empty one. Fix: drop it"),
    (dict(prompts=[[1], []]), "every prompt must hold at least one token; got an empty one. Fix: drop it"),
    (dict(prompts=[[1, VOCAB]]), r"token ids must be in \[0, 512\); got 512. Fix: encode with this target's tokenizer"),
    (dict(prompts=[[-1, 3]]), r"token ids must be in \[0, 512\); got -1. Fix: "),
    (dict(max_new_tokens=0), "max_new_tokens must be at least 1; got 0. Fix: "),
    (dict(prompts=[[1] * 1000]), r"at most 1024 positions; got 1000 \+ 8 \+ 25 = 1033. Fix: shorten the prompt or ask for fewer"),
    (dict(sampling=SamplingParams(bias={-1: 3.0})), r"bias ids must be in \[0, 512\); got -1. Fix: "),
    (dict(sampling=SamplingParams(bias={4: 1.0, 512: 3.0})), r"bias ids must be in \[0, 512\); got 512. Fix: "),
    (dict(sampling=SamplingParams(temperature=-0.5)), r"temperature must be in \[0, 1e\+38\]; got -0.5. Fix: "),
    (dict(sampling=SamplingParams(top_p=NAN)), r"top_p must be in \[0, 1\]; got nan. Fix: "),
    (dict(sampling=SamplingParams(min_p=1.5)), r"min_p must be in \[0, 1\]; got 1.5. Fix: "),
    (dict(sampling=SamplingParams(repetition_penalty=0.0)), r"repetition_penalty must be in \[1e-38, 1e\+38\]; got 0.0. Fix: "),
    (dict(sampling=SamplingParams(temperature=1e-38)), "temperature must be 0 or at least 1e-30; got 1e-38. Fix: pass 0 for greedy text"),
    (dict(sampling=SamplingParams(temperature=NAN)), r"temperature must be in \[0, 1e\+38\]; got nan. Fix: "),
    (dict(sampling=SamplingParams(temperature="hot")), r"temperature must be in \[0, 1e\+38\]; got hot. Fix: "),
    (dict(sampling=SamplingParams(seed=2**64)), r"seed must be an integer in \[-9223372036854775808, 9223372036854775807\]; got 184"),
    (dict(prompts=[[1], [2]], sampling=SamplingParams(seed=2**63 - 1)), r"seed must be an integer in \[-9223372036854775808, 92.*806\]"),
    (dict(sampling=SamplingParams(seed=0.5)), "seed must be an integer in .*; got 0.5. Fix: "),
    (dict(sampling=SamplingParams(top_k=2**40)), r"top_k must be an integer in \[-2147483648, 2147483647\]; got 1099511627776. Fix: "),
    (dict(sampling=SamplingParams(top_k=2.5)), "top_k must be an integer in .*; got 2.5. Fix: "),
    (dict(sampling=SamplingParams(bias={3: NAN})), r"bias must be in \[-1e\+38, 1e\+38\], or -inf; got nan for id 3. Fix: "),
    (dict(sampling=SamplingParams(bias={3: float("inf")})), r"bias must be in \[-1e\+38, 1e\+38\], or -inf; got inf for id 3. Fix: "),
    (dict(sampling=SamplingParams(bias={3: -1e300})), r"bias must be in .*; got -1e\+300 for id 3. Fix: "),
    (dict(sampling=SamplingParams(bias={1.5: 1.0})), r"bias ids must be in \[0, 512\); got 1.5. Fix: "),
    (dict(sampling=SamplingParams(bias=[1.0])), "bias must be a dict from token ids to numbers; got list. Fix: "),
    (dict(stop_ids=[3, 2**70]), "stop_ids must be 64-bit integers; got 1180591620717411303424. Fix: "),
    (dict(stop_ids=[3.5]), "stop_ids must be 64-bit integers; got 3.5. Fix: "),
    (dict(stop_ids=3), r"stop_ids must be a list of token ids; got 3. Fix: pass \[id\]"),
    (dict(prompts=[[1, 1.5]]), r"a prompt must be a list of token ids \(integers\); got \[1, 1.5\]. Fix: "),
    (dict(prompts=["abc"]), r"a prompt must be a list of token ids \(integers\); got 'abc'. Fix: encode the text"),
    (dict(prompts=[5, 6]), r"a prompt must be a list of token ids \(integers\); got 5. Fix: "),
    (dict(prompts=None), r"prompts must be a list of prompts; got None. Fix: pass \[prompt\]"),
    (dict(max_new_tokens=2.5), "max_new_tokens must be an integer; got 2.5. Fix: "),
]


@pytest.mark.parametrize("over,message", REFUSED)
def test_refused_with_the_numbers(over, message):
    with pytest.raises(ValueError, match="generate: .*" + message):
        decoder("tree-20").generate(**{"prompts": [[1, 2]], "max_new_tokens": 8, **over})
    with pytest.raises(ValueError, match="generate: .*" + message):
        GraphDecoder(*golden(), tree="tree-20").generate(**{"prompts": [[1, 2]], "max_new_tokens": 8, **over})


def test_what_is_at_the_edge_runs():
    """A forbidden id, the least temperature (greedy text), the last seed, ids of numpy and torch."""
    want = plain_text(PROMPTS, 20)[0]
    p = SamplingParams(temperature=1e-30, seed=2**63 - len(PROMPTS), top_k=2**31 - 1)
    for made in (decoder("tree-8"), GraphDecoder(*golden(), tree="tree-8")):
        assert_same_text(PROMPTS, made.generate(PROMPTS, 20, p, []).tokens, want)
        banned = made.generate(PROMPTS, 20, SamplingParams(bias={want[0][3]: -float("inf")}), []).tokens
        assert banned[0][:3] == want[0][:3] and all(want[0][3] not in t for t in banned)
        arrays = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[1]), *PROMPTS[2:]]
        assert_same_text(PROMPTS, made.generate(arrays, np.int64(20), stop_ids=np.array([VOCAB + 1])).tokens, want)
    assert_same_text(PROMPTS, decoder("ngram auto").generate(arrays, 20, stop_ids=[]).tokens, want)


@pytest.mark.parametrize("kw,message", [
    (dict(tree="tree-1"), "tree: the shape must be .*got 'tree-1'"),
    (dict(tree="treee"), "tree: the shape must be .*got 'treee'"),
    (dict(page_size=0), "page_size must be at least 1; got 0. Fix: "),
    (dict(prefill_chunk=0), "prefill_chunk must be at least 1; got 0. Fix: "),
    (dict(page_size=2.5), "page_size must be an integer; got 2.5. Fix: "),
])
def test_a_decoder_with_bad_settings(kw, message):
    for draft in (None, golden()[1]):
        with pytest.raises(ValueError, match=message):
            Decoder(golden()[0], draft, **kw)


def narrow(ids: int):
    """The golden draft with its first `ids` ids."""
    draft = copy.copy(golden()[1])
    draft.config, draft.head, draft.d2t = replace(draft.config, draft_vocab_size=ids), draft.head[:ids], draft.d2t[:ids]
    return draft


def test_a_draft_with_fewer_ids_than_a_beam():
    target, _ = golden()
    for kind in (Decoder, GraphDecoder):
        with pytest.raises(ValueError, match=f"{kind.__name__}: shapes must have beams of at most 3, the draft's ids; got tree-8 with"):
            kind(target, narrow(3), tree="tree-8")
        assert all(s.k <= 3 for s in kind(target, narrow(3)).shapes)
        for draft, tree in ((narrow(3), "auto"), (narrow(3), "chain-3"), (narrow(4), "tree-8")):
            got = kind(target, draft, tree=tree).generate(PROMPTS[:1], 12, stop_ids=[])
            assert_same_text(PROMPTS[:1], got.tokens, plain_text(PROMPTS[:1], 12)[0])
    with pytest.raises(ValueError, match="GraphLoop: shapes must have beams of at most 3"):
        GraphLoop(target, narrow(3), shapes=(OFF, parse_shape("tree-8")))


# ---- defaults of the process, threads --------------------------------------------------------------------------------------


MIXED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, bias={5: 1.0}, repetition_penalty=1.2, presence_penalty=0.1)


def everything() -> list:
    """Texts of every kind of decoder on a pair that is loaded here."""
    target = load_target(DATA / "target")
    draft = load_draft(DATA / "draft", target)
    made = (Decoder(target, draft, tree="tree-8"), GraphDecoder(target, draft, tree="tree-8"),
            Decoder(target, NgramDrafter(), tree="chain-3"), GraphDecoder(target))
    return [d.generate(PROMPTS, 16, p, []).tokens for d in made for p in (SamplingParams(), MIXED)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    want = everything()
    torch.set_default_dtype(dtype)
    try:
        assert everything() == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_does_not_matter():
    want = everything()
    with torch.device("meta"):
        assert everything() == want


@pytest.mark.parametrize("kind", [Decoder, GraphDecoder])
def test_a_second_thread_is_refused_and_the_first_goes_on(monkeypatch, kind):
    target, draft = golden()
    want, real, inside, go = plain_text(PROMPTS, 12)[0], target.forward, threading.Event(), threading.Event()
    d, got = kind(target, draft, tree="tree-8"), []

    def waiting(*args, **kw):
        if threading.current_thread() is first:
            inside.set()
            assert go.wait(60)
        return real(*args, **kw)

    monkeypatch.setattr(target, "forward", waiting)
    first = threading.Thread(target=lambda: got.append(d.generate(PROMPTS, 12, stop_ids=[]).tokens))
    first.start()
    try:
        assert inside.wait(60)
        for again in (lambda: d.generate(PROMPTS, 12, stop_ids=[]), lambda: next(d.stream(PROMPTS[:1], 12, stop_ids=[]))):
            with pytest.raises(RuntimeError, match=f"{kind.__name__}: the thread must be the only one in it; .*Fix: make one"):
                again()
        other = kind(target, draft, tree="tree-8")  # the weights are shared
        assert_same_text(PROMPTS, other.generate(PROMPTS, 12, stop_ids=[]).tokens, want)
    finally:
        go.set()
        first.join(60)
    assert_same_text(PROMPTS, got[0], want)
    assert_same_text(PROMPTS, copy.deepcopy(d).generate(PROMPTS, 12, stop_ids=[]).tokens, want)
