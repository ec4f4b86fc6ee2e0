"""Shape names and the controller behind --tree auto, with simulated times."""

import random

import pytest

from fastverify.eagle3.shapes import AUTO, OFF, Controller, parse_shape


@pytest.mark.parametrize("text,k,levels,nodes,columns", [
    ("off", 0, 0, 1, 1), ("chain-1", 1, 1, 2, 2), ("chain-3", 1, 3, 4, 4), ("chain-16", 1, 16, 17, 17),
    ("tree-2", 4, 4, 2, 12), ("tree-8", 4, 4, 8, 12), ("tree-9", 6, 5, 9, 24), ("tree-20", 6, 5, 20, 24),
    ("tree-60", 10, 7, 60, 60), ("tree-128", 10, 7, 128, 128), ("tree-12-k2-d6", 2, 6, 12, 12), ("tree-128-k64-d2", 64, 2, 128, 128),
])
def test_named_shapes(text, k, levels, nodes, columns):
    s = parse_shape(text)
    assert (s.name, s.k, s.levels, s.nodes, s.columns) == (text, k, levels, nodes, columns)
    assert s.speculative == (nodes > 1)


@pytest.mark.parametrize("text", [
    "", "on", "auto", "chain", "chain-", "chain-0", "chain-17", "chain--2", "chain-2.5", "chain-3 ", " chain-3", "chain-3\n", "Chain-3",
    "tree-1", "tree-129", "tree-8-k4", "tree-8-d4", "tree-8-k0-d4", "tree-8-k4-d0", "tree-8-k65-d1", "tree-8-k4-d17", "tree-8-k16-d9",
    "chain-\u0663",
])
def test_other_names_are_refused_with_the_choices(text):
    with pytest.raises(ValueError, match=r"tree: the shape must be off, auto, chain-K \(1..16\), .*; got .*Fix: try chain-3 or tree-20"):
        parse_shape(text)


SHAPES = tuple(parse_shape(s) for s in AUTO)
GOOD = {"chain-2": 1.2, "chain-3": 1.4, "tree-8": 2.0, "tree-20": 2.6}       # accepted drafts a round
BAD = dict.fromkeys(GOOD, 0.1)
FAST = {"off": 10.0, "chain-2": 13.0, "chain-3": 14.0, "tree-8": 16.0, "tree-20": 22.0}
SLOW = {"off": 10.0, "chain-2": 35.0, "chain-3": 40.0, "tree-8": 45.0, "tree-20": 60.0}


def drive(c: Controller, rounds: int, ms: dict, accepted: dict) -> list:
    """Names of the shapes chosen while rounds take `ms` and accept `accepted`."""
    names = []
    for _ in range(rounds):
        shape = c.choose()
        names.append(shape.name)
        c.observe(shape, accepted.get(shape.name, 0.0), ms[shape.name])
    return names


@pytest.mark.parametrize("ms,accepted", [(FAST, GOOD), (FAST, BAD), (SLOW, GOOD), (FAST, dict.fromkeys(GOOD, 1.5)),
                                         ({**FAST, "tree-20": 15.0}, GOOD)])
def test_a_good_choice_is_reached_and_kept(ms, accepted):
    """Within 15 % of the best rate (shapes that the priors rank low may stay untried), after at most 80 rounds."""
    c = Controller(SHAPES, dict(ms))
    names = drive(c, 400, ms, accepted)
    rate = {n: (1 + accepted.get(n, 0.0)) / ms[n] for n in ms}
    late = names[80:]
    assert sum(rate[n] for n in late) / len(late) >= 0.85 * max(rate.values())
    assert late.count(late[-1]) >= 0.9 * len(late)
    assert (late[-1] == "off") == (max(rate, key=rate.get) == "off")
    assert c.reason.startswith(late[-1] + ": tau") and "break-even" in c.reason


def test_a_draft_that_accepts_nothing_is_switched_off_soon():
    names = drive(Controller(SHAPES, dict(FAST)), 60, FAST, BAD)
    assert names[0] != "off" and names.index("off") <= 24


def test_a_slow_draft_is_never_tried_beyond_probes():
    c = Controller(SHAPES, dict(SLOW))
    names = drive(c, 95, SLOW, GOOD)
    assert set(names) == {"off"}


@pytest.mark.parametrize("slow", [False, True])
def test_probing_while_off_is_bounded_and_goes_on(slow):
    """Two rounds in a row of one speculative shape, every 96 plain rounds, or as rarely as 1 % of the time asks for."""
    ms = {n: 10.0 if n == "off" else t * (2.0 if slow else 0.93) for n, t in FAST.items()}
    c = Controller(SHAPES, dict(ms))
    names = drive(c, 4000, ms, BAD)[100:]
    probes = [i for i, n in enumerate(names) if n != "off"]
    assert all(b - a == 1 and names[a] == names[b] for a, b in zip(probes[::2], probes[1::2]))
    lost = sum(ms[names[i]] / 10.0 - 1.1 for i in probes)
    assert 0.002 * 3900 < lost < 0.0115 * 3900
    assert all(b - a >= 96 for a, b in zip(probes[1::2], probes[2::2])) and len(probes) >= (20 if slow else 60)


def test_what_can_never_pay_is_not_probed():
    """A verify of ten plain steps cannot win with five tokens."""
    ms = {"off": 10.0, **{n: 100.0 for n in GOOD}}
    assert set(drive(Controller(SHAPES, dict(ms)), 3000, ms, GOOD)) == {"off"}


def test_it_comes_back_when_the_text_becomes_predictable_again():
    c = Controller(SHAPES, dict(FAST))
    first = drive(c, 300, FAST, BAD)
    assert first[-1] == "off"
    later = drive(c, 300, FAST, GOOD)
    assert later[130:].count("off") == 0, "one probe suffices"


def test_it_follows_round_times_that_change():
    """A context that grows makes drafting dearer: the estimate of the running shape follows within some 60 rounds."""
    c = Controller(SHAPES, dict(FAST))
    assert drive(c, 200, FAST, GOOD)[-1] != "off"
    dear = {n: ms * (1 if n == "off" else 4) for n, ms in FAST.items()}
    names = drive(c, 400, dear, GOOD)
    assert names[-1] == "off" and names.count("off") > 200


def test_a_small_advantage_does_not_switch():
    two = (OFF, parse_shape("chain-2"))
    c = Controller(two, {"off": 10.0, "chain-2": 21.35})  # expected 2.17 tokens in 21.35 ms, 1.6 % better
    c.current = OFF
    assert c.choose() is OFF
    c = Controller(two, {"off": 10.0, "chain-2": 20.5})  # 5.9 % better
    c.current = OFF
    assert c.choose().name == "chain-2"
    c = Controller(two, {"off": 10.0, "chain-2": 22.0})  # 1.4 % worse, but running
    c.current = two[1]
    assert c.choose().name == "chain-2"


def test_definitions():
    c = Controller(SHAPES, dict(FAST), trust=4)
    chain = parse_shape("chain-2")
    assert c.tau(OFF) == 1.0 and c.rate(OFF) == 100.0 and c.break_even(chain) == pytest.approx(1.3)
    assert c.tau(chain) == pytest.approx(1 + 1.3 * 0.9)  # the prior, and a try
    for a in (2.0, 0.0, 1.0):
        c.observe(chain, a, 13.0)
    assert c.accepted["chain-2"] == (pytest.approx(1.0), 3)
    assert c.tau(chain) == pytest.approx(1 + (4 * 1.3 * c.ratio * 0.9 + 3 * 1.0) / 7)  # the prior weighs four rounds
    c.observe(chain, 2.0, 13.0)
    assert c.tau(chain) == pytest.approx(2.25)  # its own mean from the fourth round on
    assert c.rate(chain) == pytest.approx(1000 * 2.25 / 13)
    c.observe(chain, 2.0, 33.0)
    assert c.round_ms["chain-2"] == pytest.approx(14.0)
    before = dict(c.accepted)
    c.observe(OFF, 0.0, 10.0)
    assert c.accepted == before
    # one shape's measurements move what is expected of those that have not run
    low = Controller(SHAPES, dict(FAST))
    for _ in range(60):
        low.observe(chain, 0.09, 13.0)
    assert low.tau(parse_shape("tree-20")) == pytest.approx(1 + 1.3 * 0.1 * 1.65, rel=0.1)


def test_a_measurement_taken_at_a_bad_moment_does_not_last():
    """Noise only adds time: one round at half the estimate replaces it; slow rounds move it slowly."""
    off, chain = parse_shape("off"), parse_shape("chain-2")
    c = Controller((off, chain), {"off": 50.0, "chain-2": 2000.0})
    assert c.choose() == off
    c.observe(chain, 1.0, 60.0)
    assert c.round_ms["chain-2"] == 60.0 and c.choose() == chain
    c.observe(chain, 1.0, 2000.0)
    assert c.round_ms["chain-2"] < 160.0


def simulate(shapes: tuple, ms, rate, tokens: int, seed: int, fixed=None) -> tuple:
    """(time of `tokens` tokens, controller): ms(token, name) per round, every draft of depth d taken with rate(token)."""
    rng = random.Random(seed)
    c = Controller(shapes, {s.name: ms(0, s.name) for s in shapes})
    done = time = 0
    while done < tokens:
        shape = fixed or c.choose()
        taken = 0
        while taken < shape.levels and rng.random() < rate(done) * (1.0 if shape.k <= 1 else 1.2):
            taken += 1
        took = ms(done, shape.name)
        c.observe(shape, taken, took, [taken])
        done, time = done + taken + 1, time + took
    return time, c


FORCED = {
    "tau 1.1": (lambda t, n: FAST[n], lambda t: 0.1),
    "a slow draft": (lambda t, n: SLOW[n], lambda t: 0.6),
    "verify ten times slower": (lambda t, n: 10.0 if n == "off" else 10 * FAST[n], lambda t: 0.7),
    "verify ten times slower from the middle": (lambda t, n: FAST[n] * (10 if n != "off" and t > 250 else 1), lambda t: 0.7),
    "good, then bad": (lambda t, n: FAST[n], lambda t: 0.75 if t < 250 else 0.08),
    "bad, then good": (lambda t, n: FAST[n], lambda t: 0.08 if t < 250 else 0.75),
    "good throughout": (lambda t, n: FAST[n], lambda t: 0.75),
}


@pytest.mark.parametrize("name", FORCED)
def test_forced_cases_are_within_5_percent_of_the_better_of_plain_and_the_best_fixed_shape(name):
    """500 tokens, 40 seeds, simulated times; the mean over seeds. Trying the shapes of a good draft takes a little more."""
    ms, rate = FORCED[name]
    mean = lambda fixed: sum(simulate(SHAPES, ms, rate, 500, seed, fixed)[0] for seed in range(40)) / 40  # noqa: E731
    assert mean(None) <= (1.07 if name == "good throughout" else 1.05) * min(mean(shape) for shape in SHAPES)


def test_depth_rates_are_conditional():
    c = Controller(SHAPES, dict(FAST))
    shape = parse_shape("chain-3")
    c.observe(shape, 1.5, 14.0, [0, 1, 2, 3])
    assert c.depth_rate == [pytest.approx(3 / 4), pytest.approx(2 / 3), pytest.approx(1 / 2)]
    c.observe(shape, 0.0, 14.0, [0, 0])
    assert c.depth_rate[0] == pytest.approx(0.75 * 15 / 16) and c.depth_rate[1] == pytest.approx(2 / 3)
    other = Controller(SHAPES, dict(SLOW))
    other.learn_from(c)
    assert other.depth_rate == c.depth_rate and other.tau(shape) == c.tau(shape) and other.round_ms == SLOW
    c.observe(shape, 3.0, None)
    assert c.round_ms["chain-3"] == pytest.approx(14.0) and other.tau(shape) < c.tau(shape)
