"""Exact one-level laws of acceptance rules: verify_tree follows the target's, and the same test rejects every biased one.

The rational laws below were enumerated exactly. At a node with distinct children C the rule sample_match (and every rule
with one-hot drafts) emits y ~ p and accepts with probability sum p(C): optimal for children that are a function of the
prefix. The biased rows are what other rules give for the same children; each is a public bug or a documented threshold.
"""

from fractions import Fraction as F

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare

from conftest import run_op
from fastverify.accept.rule import Flag

P = (F(1, 5), F(1, 2), F(1, 5), F(1, 10))
WIDE = (F(1, 10), F(7, 20), F(3, 10), F(1, 4))
TABLE = [  # target, children, probability that a child is accepted
    (P, (0,), F(1, 5)), (P, (0, 1), F(7, 10)), (P, (0, 1, 2), F(9, 10)), (P, (3, 2, 1, 0), F(1)),
    (P, (0, 0), F(1, 5)),   # a duplicate sibling never counts twice: the first one is taken
    (P, (7, -1), F(0)),     # ids outside the vocabulary never match
    (WIDE, (0,), F(1, 10)), (WIDE, (0, 1), F(9, 20)), (WIDE, (0, 1, 2), F(3, 4)),
]
BIASED = {  # the same target P, children by draft order (0, 1, 2)
    "duplicate siblings counted twice, or threshold_acc 0.5": (F(2, 5), F(3, 8), F(3, 20), F(3, 40)),
    "threshold_single 0.5": (F(0), F(1), F(0), F(0)),
    "first child always accepted": (F(1), F(0), F(0), F(0)),
    "p/q rule fed a deterministic child": (F(2, 5), F(3, 5), F(0), F(0)),
    "siblings tested each with its own p/q, residual subtracts q once": (F(1, 5), F(8, 25), F(8, 25), F(4, 25)),
    "without-replacement rule fed iid drafts": (F(7, 20), F(7, 20), F(1, 5), F(1, 10)),
    "the same with three drafts": (F(79, 200), F(29, 100), F(53, 250), F(103, 1000)),
    "a fresh draw from p after a mismatch": (F(9, 25), F(2, 5), F(4, 25), F(2, 25)),  # p(0) + p(1-p(0)) at 0, (1-p(0)) p elsewhere
}
SEEDS = 200_000


def emitted(target, children, seeds: int, **kw) -> tuple:
    """(histogram of the first token, accepted drafts, first tokens) over `seeds` requests of one tree."""
    v, n = len(target), 1 + len(children)
    logits = torch.tensor([[float(p) for p in target]] * n).double().log().float()
    flat = lambda *x: torch.tensor(x).repeat(seeds)  # noqa: E731
    full = lambda x, dtype=torch.float32: torch.full((seeds,), x, dtype=dtype)  # noqa: E731
    i32 = torch.int32
    out = run_op(
        "cpu", "verify_tree", logits=logits.repeat(seeds, 1), tokens=flat(0, *children), parents=flat(-1, *[0] * len(children)).int(),
        cu_nodes=torch.arange(seeds + 1, dtype=i32) * n, prefix_len=full(kw.get("position", 11), i32), active=full(1, i32),
        remaining=full(9, i32), temperature=full(1.0), top_k=full(0, i32), top_p=full(1.0), min_p=full(0.0),
        seed=torch.arange(seeds) * kw.get("stride", 1), out_tokens=torch.full((seeds, 2), -9), num_tokens_out=full(-9, i32),
        path=torch.full((seeds, 2), -9, dtype=i32), next_root=full(-9, torch.int64), flags=full(-9, i32), vocab_size=v, rule=1)
    outside = any(not 0 <= c < v for c in children)
    assert (out["flags"] == (Flag.BAD_TOKEN if outside else 0)).all()
    accepted = (out["path"] >= 0).sum(1).numpy() - 1
    assert (out["num_tokens_out"].numpy() == accepted + 1).all()
    first = out["out_tokens"][:, 0].numpy()
    took = out["path"][:, 1].numpy()
    assert all((first[took == i + 1] == c).all() for i, c in enumerate(children))  # a child is accepted only with the token that was drawn
    assert not np.isin(first[accepted == 0], children).any()  # a drawn child is always accepted
    return np.bincount(first, minlength=v), accepted, first


def p_value(hist: np.ndarray, law) -> float:
    keep = np.array([p > 0 for p in law])
    if hist[~keep].sum():
        return 0.0
    return 1.0 if keep.sum() == 1 else chisquare(hist[keep], np.array([float(p) for p in law])[keep] * hist.sum()).pvalue


@pytest.mark.parametrize("target,children,accept", TABLE)
def test_the_emitted_token_follows_the_target(target, children, accept):
    hist, accepted, _ = emitted(target, children, SEEDS)
    assert p_value(hist, target) > 1e-4
    k = int((accepted > 0).sum())
    assert k == (0 if accept == 0 else SEEDS if accept == 1 else k)
    assert accept in (0, 1) or binomtest(k, SEEDS, float(accept)).pvalue > 1e-4


@pytest.mark.parametrize("stride,position", [(1, 0), (2**32, 5), (2**40, 5), (-1, 2**31 - 2)])
def test_any_family_of_seeds_and_positions(stride, position):
    """Seeds that differ in one bit, in the high word only, or are negative, and positions at both ends."""
    hist, _, _ = emitted(P, (0, 1), 100_000, stride=stride, position=position)
    assert p_value(hist, P) > 1e-4


def test_consecutive_positions_are_independent():
    """The token at t+1 does not depend on the one at t (shared or shifted noise would show)."""
    p, n = np.array([float(x) for x in P]), 100_000
    at = [emitted(P, (), n, position=t)[2] for t in (20, 21)]
    joint = np.zeros((4, 4), dtype=np.int64)
    np.add.at(joint, (at[0], at[1]), 1)
    assert chisquare(joint.ravel(), (np.outer(p, p) * n).ravel()).pvalue > 1e-4


@pytest.mark.parametrize("name", BIASED)
def test_the_test_rejects_biased_laws(name):
    """Samples of the biased law, as many as above, fail the same comparison by far."""
    law = BIASED[name]
    assert sum(law) == 1 and law != P
    hist = np.random.default_rng(1).multinomial(SEEDS, [float(p) for p in law])
    assert p_value(hist, law) > 1e-4 and p_value(hist, P) < 1e-12


def test_the_test_rejects_a_wrong_acceptance():
    """Counting a duplicate sibling twice, 2/5 instead of 1/5, is seen."""
    _, accepted, _ = emitted(P, (0, 0), 20_000)
    assert binomtest(int((accepted > 0).sum()), 20_000, 0.4).pvalue < 1e-12
