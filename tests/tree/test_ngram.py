"""NgramDrafter: prompt lookup as chains, trees and pools."""

import math

import pytest
import torch

from fastverify.tree import NgramDrafter, build_tree


def test_chain_after_the_most_recent_longest_match():
    text = [1, 2, 3, 9, 9, 2, 3, 7, 7, 1, 2, 3]
    # the last three tokens occur at the start: longer than the more recent match of "2 3"
    assert NgramDrafter(num_matches=1, num_draft=4).propose(text) == ([9, 9, 2, 3], [-1, 0, 1, 2])
    assert NgramDrafter(max_ngram=2, num_matches=1, num_draft=3).propose(text) == ([7, 7, 1], [-1, 0, 1])
    assert NgramDrafter(max_ngram=1, num_matches=1, num_draft=2).propose(text) == ([7, 7], [-1, 0])


def test_continuations_are_ordered_and_limited():
    text = [5, 1, 5, 2, 5, 3, 5]
    assert NgramDrafter(num_draft=2, num_matches=9).continuations(text) == [[3, 5], [2, 5], [1, 5]]
    assert NgramDrafter(num_draft=2, num_matches=2).continuations(text) == [[3, 5], [2, 5]]
    assert NgramDrafter(min_ngram=2, num_draft=2).continuations(text) == []


def test_merged_tree():
    """Matches: "... 5 3 4", "... 5 3 1", "... 5 2 6": the first two share node 3."""
    text = [5, 2, 6, 5, 3, 1, 5, 3, 4, 5]
    drafter = NgramDrafter(max_ngram=1, num_draft=2, num_matches=3, decay=0.5)
    forest = drafter.forest(text)
    assert forest.tokens == [3, 4, 1, 2, 6] and forest.parents == [-1, 0, 0, -1, 3]
    shares = [6 / 7, 4 / 7 / 2, 2 / 7 / 2, 1 / 7, 1 / 7 / 2]
    assert all(math.isclose(s, math.log(w)) for s, w in zip(forest.scores, shares))
    assert drafter.propose(text) == ([3, 4], [-1, 0])
    assert NgramDrafter(max_ngram=1, num_draft=4, num_matches=3, decay=0.5).propose(text)[0][:2] == [3, 4]


def test_selection_renumbers_parents():
    text = [7, 1, 2, 7, 3, 4, 7]
    tokens, parents = NgramDrafter(num_draft=3, num_matches=2, decay=0.3).propose(text)
    # shares: 3 (2/3), 1 (1/3), 4 (2/3 * 0.3) are the best three; pool order is 3 4 7 1 ...
    assert (tokens, parents) == ([3, 4, 1], [-1, 0, -1])


def test_repetition_goes_on_periodically():
    assert NgramDrafter(num_matches=1, num_draft=5).propose([8, 8]) == ([8] * 5, [-1, 0, 1, 2, 3])
    assert NgramDrafter(num_matches=1, num_draft=5).propose([1, 2, 1, 2])[0] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("text", [[], [4], [1, 2, 3]])
def test_nothing_to_find(text):
    drafter = NgramDrafter()
    assert drafter.propose(text) == ([], [])
    assert drafter.pool([text])[0].eq(-math.inf).all()


def test_against_a_slow_search(rng):
    """Every proposed continuation follows a real occurrence; order by match length, then recency."""
    drafter = NgramDrafter(max_ngram=4, min_ngram=2, num_draft=6, num_matches=5)
    for _ in range(50):
        n = int(torch.randint(1, 120, (), generator=rng))
        text = torch.randint(0, 4, (n,), generator=rng).tolist()
        slow = []
        for end in range(1, n):  # text[:end] ends with the same run as text
            length = max([m for m in range(1, 5) if m <= end and text[end - m:end] == text[n - m:]], default=0)
            if length >= 2:
                period = text[end:]
                slow.append((-length, -end, (period * 6)[:6]))
        assert drafter.continuations(text) == [c for *_, c in sorted(slow)[:5]]
        tokens, parents = drafter.propose(text)
        assert len(tokens) == len(parents) <= 6 and all(-1 <= p < i for i, p in enumerate(parents))
        assert len({(p, t) for p, t in zip(parents, tokens)}) == len(tokens)  # no duplicate siblings


def test_pool_feeds_build_tree(rng):
    drafter = NgramDrafter(num_draft=7, num_matches=4)
    texts = [torch.randint(0, 5, (n,), generator=rng).tolist() for n in (60, 2, 33, 90)] + [[3, 1, 2]]
    scores, tokens, parents = drafter.pool(texts)
    assert scores.shape == tokens.shape == parents.shape == (5, 28)
    assert scores.dtype == torch.float32 and tokens.dtype == parents.dtype == torch.int32
    one = torch.ones(5, dtype=torch.int32)
    roots = torch.tensor([t[-1] for t in texts], dtype=torch.int32)
    tree = build_tree(scores, tokens, parents, roots, one, one, 8, 5)
    assert tree.flags.eq(0).all()
    for b, text in enumerate(texts):
        rows = slice(int(tree.cu_nodes[b]), int(tree.cu_nodes[b + 1]))
        want_tokens, want_parents = drafter.propose(text)
        assert tree.tokens[rows].tolist() == [text[-1]] + want_tokens
        assert tree.parents[rows].tolist() == [-1] + [p + 1 for p in want_parents]
    assert drafter.pool([])[0].shape == (0, 28)


def test_the_pool_is_on_the_cpu_whatever_the_default_device():
    text, drafter = [[1, 2, 3, 1, 2]], NgramDrafter()
    want = drafter.pool(text)
    with torch.device("meta"):
        got = drafter.pool(text)
    assert all(a.device.type == "cpu" and torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("kwargs,message", [
    (dict(min_ngram=0), "NgramDrafter: min_ngram must be in 1..max_ngram; got min_ngram 0, max_ngram 3. Fix: swap or raise them."),
    (dict(min_ngram=4), "NgramDrafter: min_ngram must be in 1..max_ngram; got min_ngram 4, max_ngram 3. Fix: swap or raise them."),
    (dict(num_draft=0), "NgramDrafter: num_draft and num_matches must be at least 1; got 0, 4. Fix: pass positive numbers."),
    (dict(num_matches=0), "NgramDrafter: num_draft and num_matches must be at least 1; got 7, 0. Fix: pass positive numbers."),
    (dict(decay=1.0), "NgramDrafter: decay must be in (0, 1); got 1.0. Fix: pass e.g. 0.8."),
])
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError) as error:
        NgramDrafter(**kwargs)
    assert str(error.value) == message
