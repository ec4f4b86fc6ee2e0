"""verify_tree: float64 oracle, laws, processors one by one, bad input."""

import numpy as np
import pytest
import torch

from cases import cumulative, verify_case
from conftest import positional, run_op
import fastverify as fv
from fastverify import _ops
from fastverify.accept.rule import Flag
from fastverify.reference.accept import verify_margin

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def compare(case: dict, backend: str, tolerance: float = 2e-5) -> int:
    """Checks every request whose decisions are wider than float32 rounding; returns how many were too close to call."""
    want = {k: v.clone() for k, v in case.items() if isinstance(v, torch.Tensor)}
    margins = torch.tensor(verify_margin(*positional("verify_tree", **{**case, **want})))
    got = run_op(backend, "verify_tree", **case)
    clear = margins > tolerance
    for name, value in got.items():
        if value is not None:
            assert value.shape == want[name].shape
            assert torch.allclose(value[clear].double(), want[name][clear].double(), rtol=1e-5, atol=2e-5), name
    return int((~clear).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature,filters,extras", [(0.0, False, False), (0.0, True, True), (0.8, False, False),
                                                        (1.0, True, False), (0.7, True, True)])
def test_equals_oracle(backend, rng, dtype, temperature, filters, extras):
    close = total = 0
    for i in range(40):
        case = verify_case(rng, batch=1 + i % 6, nodes=1 + i % 12, vocab=[5, 37, 64, 257, 1000][i % 5], dtype=dtype,
                           temperature=temperature, filters=filters, extras=extras, pad=3 * (i % 2),
                           ids=[torch.int64, torch.int32][i % 2])
        close += compare(case, backend)
        total += len(case["active"])
    assert close <= total * 0.05  # nearly every request is decided


def test_row_stride_and_large_vocab(backend, rng):
    case = verify_case(rng, batch=2, nodes=5, vocab=49152, temperature=0.9, scale=4.0)
    wide = torch.full((case["logits"].shape[0], 50000), float("nan"))
    wide[:, :49152] = case["logits"]
    strided = {**case, "logits": wide[:, :49160]}
    assert compare(strided, backend) == 0
    dense = run_op(backend, "verify_tree", **case)
    for name, value in run_op(backend, "verify_tree", **strided).items():
        assert torch.equal(value, dense[name]), name


def test_repeats_and_thread_counts_are_bit_equal(rng):
    case = verify_case(rng, batch=16, nodes=9, vocab=5003, temperature=0.8, filters=True, extras=True)
    first = run_op("cpu", "verify_tree", **case)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for name, value in run_op("cpu", "verify_tree", **case).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(before)


def one_node(logits_row, batch: int, **over) -> dict:
    """`batch` requests of one node that all see the same row (stride 0): plain decoding of many seeds."""
    v = logits_row.numel()
    case = dict(
        logits=logits_row.view(1, v).expand(batch, v), tokens=torch.zeros(batch, dtype=torch.int64),
        parents=torch.full((batch,), -1, dtype=torch.int32), cu_nodes=torch.arange(batch + 1, dtype=torch.int32),
        prefix_len=torch.full((batch,), 7, dtype=torch.int32), active=torch.ones(batch, dtype=torch.int32),
        remaining=torch.full((batch,), 100, dtype=torch.int32), temperature=torch.ones(batch),
        top_k=torch.zeros(batch, dtype=torch.int32), top_p=torch.ones(batch), min_p=torch.zeros(batch),
        seed=torch.arange(batch), out_tokens=torch.full((batch, 1), -9, dtype=torch.int64),
        num_tokens_out=torch.full((batch,), -9, dtype=torch.int32), path=torch.full((batch, 1), -9, dtype=torch.int32),
        next_root=torch.full((batch,), -9, dtype=torch.int64), flags=torch.full((batch,), -9, dtype=torch.int32),
        vocab_size=v, rule=1)
    case.update(over)
    return case


def test_kept_set_of_each_filter_by_hand(backend):
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    row = p.log().float()
    n = 4000
    seen = lambda **kw: set(run_op(backend, "verify_tree", **one_node(row, n, **kw))["next_root"].tolist())  # noqa: E731
    assert seen() == {0, 1, 2, 3, 4}
    assert seen(top_k=torch.full((n,), 2, dtype=torch.int32)) == {0, 1}
    assert seen(top_p=torch.full((n,), 0.69)) == {0, 1}
    assert seen(top_p=torch.full((n,), 0.71)) == {0, 1, 2}
    assert seen(top_p=torch.zeros(n)) == {0}
    assert seen(min_p=torch.full((n,), 0.3)) == {0, 1, 2}
    assert seen(min_p=torch.ones(n)) == {0}
    # top-p acts on what top-k left: 0.4/0.7 = 0.571 covers 0.55 of the two kept ids
    assert seen(top_k=torch.full((n,), 2, dtype=torch.int32), top_p=torch.full((n,), 0.55)) == {0}
    # temperature comes first: at T = 0.5 the masses are p^2 / sum p^2 (0.567, 0.319, ...)
    assert seen(temperature=torch.full((n,), 0.5), top_p=torch.full((n,), 0.56)) == {0}
    bits = torch.tensor([[0b10110]], dtype=torch.int32).expand(n, 1).contiguous()
    assert seen(bitmask=bits) == {1, 2, 4}
    assert seen(bitmask=bits, top_k=torch.ones(n, dtype=torch.int32)) == {1}


def test_ties_at_every_cut_are_kept_and_lowest_id_wins_at_zero(backend):
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    n = 3000
    seen = lambda **kw: set(run_op(backend, "verify_tree", **one_node(row, n, **kw))["next_root"].tolist())  # noqa: E731
    assert seen(top_k=torch.ones(n, dtype=torch.int32)) == {1, 2, 3}
    assert seen(top_p=torch.full((n,), 0.01)) == {1, 2, 3}
    assert seen(temperature=torch.zeros(n)) == {1}
    assert seen(rule=0) == {1}


def test_top_p_is_exact_at_the_boundary(backend):
    """Masses 1/2, 1/4, 1/4 are exact: p = 1/2 is covered by the first alone, anything above it needs the others (a tie)."""
    row = torch.tensor([0.0, -0.6931472, -0.6931472, -40.0])
    n = 500
    seen = lambda p: set(run_op(backend, "verify_tree", **one_node(row, n, top_p=torch.full((n,), p)))["next_root"].tolist())  # noqa: E731
    assert seen(0.5) == {0} and seen(0.5 - 2.0**-24) == {0}
    assert seen(0.5 + 2.0**-23) == {0, 1, 2}


def test_counts_and_ancestors_add_up(backend):
    """A node sees each id as often as it was emitted before plus on its own path: exactly that much frequency penalty."""
    v = 8
    for emitted_before in (0, 1, 3):
        for on_path in (0, 1, 2):
            n = on_path + 1
            rows = torch.zeros(n, v)
            rows[:, 5] = 100.0       # the path repeats id 5 ...
            rows[n - 1, 5] = 4.0     # ... and the last row has it 4 above the others
            for step, want in ((3.9, 5), (4.1, 0)):  # the penalty of all earlier 5s stays just below, then passes the gap
                total = emitted_before + on_path
                frequency = step / total if total else 1e6
                case = small([-1, *range(n - 1)], [9] + [5] * on_path, rows, penalties=torch.tensor([[1.0, frequency, 0.0]]),
                             counts=torch.tensor([[0] * 5 + [emitted_before, 0, 0]], dtype=torch.int32))
                out = run_op(backend, "verify_tree", **case)
                assert out["out_tokens"][0].tolist()[:n] == [5] * on_path + [want if total else 5]
                assert out["counts"][0, 5] == total + (out["out_tokens"][0, n - 1] == 5)


def test_minus_zero_is_zero(backend):
    """-0 and +0 are one value: a tie at temperature 0 (lowest id) and at every cut (both stay)."""
    row = torch.tensor([-0.0, 0.0, -1.0])
    n = 500
    seen = lambda **kw: set(run_op(backend, "verify_tree", **one_node(row, n, **kw))["next_root"].tolist())  # noqa: E731
    assert seen(temperature=torch.zeros(n)) == {0}
    assert seen(top_k=torch.ones(n, dtype=torch.int32)) == {0, 1}
    assert seen(top_p=torch.full((n,), 0.1)) == {0, 1}
    assert seen(temperature=torch.zeros(n), bias=torch.tensor([[0.0, -0.0, 1.0]]).repeat(n, 1)) == {0}


def law(row, n_seeds: int, batch: int = 100_000, **kw) -> np.ndarray:
    hist = np.zeros(row.numel(), dtype=np.int64)
    for start in range(0, n_seeds, batch):
        out = run_op("cpu", "verify_tree", **one_node(row, batch, seed=torch.arange(start, start + batch), **kw))
        hist += np.bincount(out["next_root"].numpy(), minlength=row.numel())
    return hist


def p_value(hist: np.ndarray, probs: np.ndarray) -> float:
    from scipy.stats import chisquare
    assert hist[probs == 0].sum() == 0
    keep = probs > 0
    return 1.0 if keep.sum() == 1 else chisquare(hist[keep], probs[keep] / probs[keep].sum() * hist.sum()).pvalue


FILTERS = {
    "plain": {}, "temperature": dict(temperature=0.6), "top_k": dict(top_k=5), "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.1), "all": dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("name", FILTERS)
def test_law_of_one_row(name):
    """chi-square over 10^6 seeds against the exact float64 law of the filtered row."""
    from fastverify.reference.accept import keep_set
    gen = torch.Generator().manual_seed(11)
    row = torch.randn(16, generator=gen) * 1.5
    f = FILTERS[name]
    batch = 100_000
    kw = {k: torch.full((batch,), v, dtype=torch.int32 if k == "top_k" else torch.float32) for k, v in f.items()}
    z = row.double().numpy() / np.float32(f.get("temperature", 1.0)).astype(np.float64)
    keep, _ = keep_set(z.copy(), f.get("top_k", 0), f.get("top_p", 1.0), f.get("min_p", 0.0))
    probs = np.where(keep, np.exp(z - z.max()), 0.0)
    assert p_value(law(row, 1_000_000, batch, **kw), probs / probs.sum()) > 1e-3


@pytest.mark.parametrize("filters", [False, True])
def test_law_of_a_depth_three_tree(filters):
    """10^6 seeds through a branching tree: the joint law of the emitted tokens is the product of the filtered rows."""
    gen = torch.Generator().manual_seed(5)
    v, n_seeds, batch = 5, 1_000_000, 20_000
    parents = torch.tensor([-1, 0, 0, 1, 1, 3], dtype=torch.int32)
    tokens = torch.tensor([4, 0, 1, 2, 0, 3])
    rows = torch.randn(6, v, generator=gen)
    t, k = (0.9, 3) if filters else (1.0, 0)
    z = rows.double().numpy() / np.float32(t).astype(np.float64)
    if k:
        z = np.where(z >= np.sort(z, 1)[:, -k][:, None], z, -np.inf)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    want = {}

    def extend(node, text, mass):
        for y in range(v):
            child = next((j for j in range(6) if parents[j] == node and tokens[j] == y), None)
            if child is None:
                want[text + (y,)] = mass * p[node, y]
            else:
                extend(child, text + (y,), mass * p[node, y])

    extend(0, (), 1.0)
    names = sorted(want)
    index = {s: i for i, s in enumerate(names)}
    hist = np.zeros(len(names), dtype=np.int64)
    n = 6
    case = dict(
        tokens=tokens.repeat(batch), parents=parents.repeat(batch), cu_nodes=torch.arange(batch + 1, dtype=torch.int32) * n,
        logits=rows.repeat(batch, 1), prefix_len=torch.full((batch,), 3, dtype=torch.int32),
        active=torch.ones(batch, dtype=torch.int32), remaining=torch.full((batch,), 99, dtype=torch.int32),
        temperature=torch.full((batch,), t), top_k=torch.full((batch,), k, dtype=torch.int32), top_p=torch.ones(batch),
        min_p=torch.zeros(batch), out_tokens=torch.zeros(batch, 4, dtype=torch.int64),
        num_tokens_out=torch.zeros(batch, dtype=torch.int32), path=torch.zeros(batch, 4, dtype=torch.int32),
        next_root=torch.zeros(batch, dtype=torch.int64), flags=torch.zeros(batch, dtype=torch.int32), vocab_size=v, rule=1)
    for start in range(0, n_seeds, batch):
        out = run_op("cpu", "verify_tree", **case, seed=torch.arange(start, start + batch) * 7919)
        code = ((out["out_tokens"] + 1) * torch.tensor([216, 36, 6, 1])).sum(1).numpy()
        values, counts = np.unique(code, return_counts=True)
        for c, m in zip(values, counts):
            digits = [(c // d) % 6 - 1 for d in (216, 36, 6, 1)]
            hist[index[tuple(int(d) for d in digits if d >= 0)]] += m
    probs = np.array([want[s] for s in names])
    assert abs(probs.sum() - 1) < 1e-12
    assert p_value(hist, probs) > 1e-3


def test_tree_equals_plain_decoding_token_for_token(backend, rng):
    """Same logits, seed and position: the walk emits what one-node decoding emits, whatever the tree (T3)."""
    v = 23
    table = torch.randn(v, v, generator=rng) * 1.5  # next-token logits depend on the last token only
    seed, prefix = torch.tensor([1234567]), 40
    common = dict(stop_ids=None, temperature=torch.tensor([0.9]), top_k=torch.tensor([12], dtype=torch.int32),
                  top_p=torch.tensor([0.97]), min_p=torch.tensor([0.01]), seed=seed, vocab_size=v, rule=1,
                  active=torch.ones(1, dtype=torch.int32), remaining=torch.tensor([1000], dtype=torch.int32))

    def step(tokens, parents, position):
        n = len(tokens)
        out = run_op(backend, "verify_tree", logits=table[tokens], tokens=torch.tensor(tokens),
                     parents=torch.tensor(parents, dtype=torch.int32), cu_nodes=cumulative([n]),
                     prefix_len=torch.tensor([position], dtype=torch.int32),
                     out_tokens=torch.zeros(1, n, dtype=torch.int64), num_tokens_out=torch.zeros(1, dtype=torch.int32),
                     path=torch.zeros(1, n, dtype=torch.int32), next_root=torch.zeros(1, dtype=torch.int64),
                     flags=torch.zeros(1, dtype=torch.int32), **common)
        return out["out_tokens"][0, : int(out["num_tokens_out"])].tolist()

    plain = [0]
    while len(plain) < 60:
        plain += step(plain[-1:], [-1], prefix + len(plain) - 1)
    spec, rounds = [0], 0
    while len(spec) < 60:
        tokens, parents = [spec[-1]], [-1]
        for i in range(1, 30):
            par = int(torch.randint(0, i, (), generator=rng))
            tokens.append(int(table[tokens[par]].topk(6).indices[int(torch.randint(0, 6, (), generator=rng))]))
            parents.append(par)
        spec += step(tokens, parents, prefix + len(spec) - 1)
        rounds += 1
    assert spec[:60] == plain[:60]
    assert rounds < 50  # it did accept drafts


def base_case(rng=None, **kw):
    return verify_case(rng or torch.Generator().manual_seed(3), batch=2, nodes=4, vocab=11, fixed_nodes=True, **kw)


def small(parents, tokens, logits, **over) -> dict:
    n = len(parents)
    case = one_node(logits[0], 1)
    case.update(logits=logits, tokens=torch.tensor(tokens), parents=torch.tensor(parents, dtype=torch.int32),
                cu_nodes=cumulative([n]), temperature=torch.zeros(1), out_tokens=torch.full((1, n), -9, dtype=torch.int64),
                path=torch.full((1, n), -9, dtype=torch.int32))
    case.update(over)
    return case


EYE = torch.eye(6) * 5  # row i prefers token i


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 2, 0], [-1, 0, 7], [-1, -1, 0], [0, 0, 0], [-1, 0, -7], [-2, 0, 1]])
def test_malformed_trees_fall_back_to_the_root(backend, parents):
    out = run_op(backend, "verify_tree", **small(parents, [0, 0, 1], EYE[:3]))
    assert out["flags"].item() & Flag.BAD_TREE
    assert out["out_tokens"][0].tolist() == [0, -1, -1] and out["path"][0].tolist() == [0, -1, -1]
    assert out["num_tokens_out"].item() == 1


def test_more_nodes_than_the_limit(backend):
    """1024 nodes are a tree, 1025 are refused as a whole."""
    for n, emitted in ((1024, 2), (1025, 0)):
        case = small([-1] + [0] * (n - 1), [9] + [5] * (n - 2) + [0], EYE[:1].expand(n, 6),
                     out_tokens=torch.full((1, 4), -9), path=torch.full((1, 4), -9, dtype=torch.int32))
        out = run_op(backend, "verify_tree", **case)
        assert out["num_tokens_out"].item() == emitted and out["flags"].item() == (0 if emitted else Flag.BAD_TREE)


@pytest.mark.parametrize("cu", [[0, -1], [2, 1], [0, 99], [0, 0]])
def test_bad_cu_nodes_emit_nothing(backend, cu):
    case = small([-1, 0, 1], [0, 0, 1], EYE[:3], cu_nodes=torch.tensor(cu, dtype=torch.int32))
    out = run_op(backend, "verify_tree", **case)
    assert out["flags"].item() & Flag.BAD_TREE and out["num_tokens_out"].item() == 0
    assert out["remaining"].item() == 100 and out["next_root"].item() == -9


def test_duplicate_siblings_first_wins_and_ids_outside_never_match(backend):
    out = run_op(backend, "verify_tree", **small([-1, 0, 0, 2, 1], [9, 0, 0, 2, 1], EYE[:5]))
    assert out["path"][0].tolist() == [0, 1, 4, -1, -1]
    for bad in (-1, 6, 10**9):
        out = run_op(backend, "verify_tree", **small([-1, 0, 1], [9, bad, 1], EYE[:3]))
        assert out["flags"].item() & Flag.BAD_TOKEN and out["num_tokens_out"].item() == 1


def test_bad_rows_emit_their_best_finite_entry_and_stop(backend):
    for value in (float("nan"), float("inf")):
        rows = EYE[:3].clone()
        rows[1, 4] = value
        out = run_op(backend, "verify_tree", **small([-1, 0, 1], [9, 0, 1], rows))
        assert out["out_tokens"][0].tolist() == [0, 1, -1]  # row 1's finite argmax is 1; its child 2 is not visited
        assert out["path"][0].tolist() == [0, 1, -1] and out["flags"].item() & Flag.BAD_ROW
    dead = EYE[:3].clone()
    dead[1] = float("-inf")
    out = run_op(backend, "verify_tree", **small([-1, 0, 1], [9, 0, 1], dead))
    assert out["out_tokens"][0].tolist() == [0, -1, -1] and out["flags"].item() & Flag.EMPTY_ROW
    assert out["path"][0].tolist() == [0, 1, -1]
    dead[0] = float("nan")
    out = run_op(backend, "verify_tree", **small([-1, 0, 1], [9, 0, 1], dead, temperature=torch.ones(1)))
    assert out["num_tokens_out"].item() == 0 and out["flags"].item() & Flag.EMPTY_ROW and out["flags"].item() & Flag.BAD_ROW
    masked = run_op(backend, "verify_tree", **small([-1], [9], EYE[:1], bitmask=torch.zeros(1, 1, dtype=torch.int32)))
    assert masked["num_tokens_out"].item() == 0 and masked["flags"].item() == Flag.EMPTY_ROW


def test_other_requests_go_on_beside_a_bad_one(backend, rng):
    case = verify_case(rng, batch=3, nodes=4, vocab=11, fixed_nodes=True)
    case["active"].fill_(1)
    case = {**case, "logits": torch.randn(13, 11, generator=rng)}
    good = run_op(backend, "verify_tree", **{**case, "cu_nodes": cumulative([4, 4, 4])})
    broken = case["parents"].clone()
    broken[4:8] = torch.tensor([3, -1, 9, 2], dtype=torch.int32)
    nan = case["logits"].clone()
    nan[4:8] = float("nan")
    out = run_op(backend, "verify_tree", **{**case, "cu_nodes": cumulative([4, 4, 4]), "parents": broken, "logits": nan})
    for name in ("out_tokens", "path", "num_tokens_out", "next_root", "remaining"):
        assert torch.equal(out[name][[0, 2]], good[name][[0, 2]]), name


def test_stop_ids_and_budget_the_earlier_wins(backend):
    chain = small([-1, 0, 1, 2], [9, 0, 1, 2], EYE[:4])
    full = run_op(backend, "verify_tree", **chain)
    assert full["out_tokens"][0].tolist() == [0, 1, 2, 3] and full["flags"].item() == 0 and full["remaining"].item() == 96
    stop = run_op(backend, "verify_tree", **{**chain, "stop_ids": torch.tensor([2, 5])})
    assert stop["out_tokens"][0].tolist() == [0, 1, 2, -1] and stop["next_root"].item() == 2
    assert stop["flags"].item() == Flag.STOP and stop["path"][0].tolist() == [0, 1, 2, 3]  # the path is not clipped
    two = torch.tensor([2], dtype=torch.int32)
    budget = run_op(backend, "verify_tree", **{**chain, "stop_ids": torch.tensor([2]), "remaining": two})
    assert budget["out_tokens"][0].tolist() == [0, 1, -1, -1] and budget["flags"].item() == Flag.BUDGET
    three = torch.tensor([3], dtype=torch.int32)
    both = run_op(backend, "verify_tree", **{**chain, "stop_ids": torch.tensor([2]), "remaining": three})
    assert both["num_tokens_out"].item() == 3 and both["flags"].item() == Flag.STOP | Flag.BUDGET
    none = run_op(backend, "verify_tree", **{**chain, "remaining": torch.zeros(1, dtype=torch.int32)})
    assert none["num_tokens_out"].item() == 0 and none["flags"].item() == Flag.BUDGET and none["next_root"].item() == -9


def test_inactive_requests_are_left_alone(backend, rng):
    case = base_case(rng)
    case["active"] = torch.tensor([0, 0], dtype=torch.int32)
    out = run_op(backend, "verify_tree", **case)
    assert out["num_tokens_out"].tolist() == [0, 0] and (out["path"] == -1).all() and (out["flags"] == 0).all()
    assert torch.equal(out["remaining"], case["remaining"]) and torch.equal(out["next_root"], case["next_root"])


def test_parameters_out_of_range_are_flagged_with_a_defined_result(backend):
    row = torch.tensor([0.0, 3.0, 1.0])
    for over in (dict(temperature=torch.tensor([-1.0])), dict(temperature=torch.tensor([float("nan")])),
                 dict(temperature=torch.tensor([float("inf")]))):
        out = run_op(backend, "verify_tree", **one_node(row, 1, **over))
        assert out["next_root"].item() == 1 and out["flags"].item() == Flag.BAD_PARAM
    for over in (dict(top_p=torch.tensor([-0.5])), dict(top_p=torch.tensor([1.5])), dict(min_p=torch.tensor([float("nan")]))):
        out = run_op(backend, "verify_tree", **one_node(row, 1, **over))
        assert out["flags"].item() == Flag.BAD_PARAM
        assert out["next_root"].item() == run_op(backend, "verify_tree", **one_node(row, 1))["next_root"].item()
    out = run_op(backend, "verify_tree", **one_node(row, 1, top_k=torch.tensor([10**6], dtype=torch.int32)))
    assert out["flags"].item() == 0  # top_k above the vocabulary is simply off
    tiny = run_op(backend, "verify_tree", **one_node(row, 1, temperature=torch.tensor([1e-38])))
    assert tiny["next_root"].item() == 1 and tiny["flags"].item() == 0


def test_path_buffer_shorter_than_the_tree(backend):
    case = small([-1, 0, 1, 2], [9, 0, 1, 2], EYE[:4])
    case.update(out_tokens=torch.full((1, 2), -9, dtype=torch.int64), path=torch.full((1, 2), -9, dtype=torch.int32))
    out = run_op(backend, "verify_tree", **case)
    assert out["out_tokens"][0].tolist() == [0, 1] and out["flags"].item() == Flag.PATH_FULL


def test_empty_batch_is_a_no_op(backend):
    case = one_node(torch.zeros(3), 1)
    empty = {k: (v[:0] if isinstance(v, torch.Tensor) and k != "cu_nodes" else v) for k, v in case.items()}
    run_op(backend, "verify_tree", **{**empty, "cu_nodes": torch.zeros(1, dtype=torch.int32)})


BAD_ARGUMENTS = [
    (dict(logits=torch.zeros(9, 11, dtype=torch.float64)), r"verify_tree: logits must be float32\|float16\|bfloat16 .* got float64 \[9, 11\] on cpu. Fix: cast"),
    (dict(logits=torch.zeros(11)), "verify_tree: logits must be .*any, any.* got float32 .11. on cpu. Fix: pass that shape"),
    (dict(logits=torch.zeros(11, 9).T), "verify_tree: logits must be dense in its last dimension"),
    (dict(tokens=torch.zeros(9)), "verify_tree: tokens must be int32.int64 .9.* got float32"),
    (dict(parents=torch.zeros(8, dtype=torch.int32)), "verify_tree: parents must be int32 .9. on cpu; got int32 .8."),
    (dict(cu_nodes=torch.zeros(3, dtype=torch.int64)), "verify_tree: cu_nodes must be int32"),
    (dict(prefix_len=torch.zeros(3, dtype=torch.int32)), "verify_tree: prefix_len must be int32 .2."),
    (dict(temperature=torch.zeros(2, dtype=torch.float64)), "verify_tree: temperature must be float32 .2."),
    (dict(seed=torch.zeros(2, dtype=torch.int32)), "verify_tree: seed must be int64 .2."),
    (dict(bitmask=torch.zeros(9, 2, dtype=torch.int32)), "verify_tree: bitmask must be int32 .9, 1."),
    (dict(penalties=torch.ones(2, 3)), "verify_tree: counts must be given with penalties; got None. Fix: "),
    (dict(vocab_size=12), "verify_tree: vocab_size must be at most the row width 11; got 12. Fix: "),
    (dict(vocab_size=0), "verify_tree: vocab_size must be in .1, 1048576.; got 0"),
    (dict(rule=7), "verify_tree: rule must be 0 .greedy. or 1 .sample_match.; got 7"),
    (dict(path=torch.zeros(2, 3, dtype=torch.int32)), "verify_tree: path must be int32 .2, 4."),
    (dict(out_tokens=torch.zeros(2, 8, dtype=torch.int64)[:, ::2]), "verify_tree: out_tokens must be contiguous"),
]


@pytest.mark.parametrize("over,message", BAD_ARGUMENTS)
def test_bad_arguments_raise_in_words(over, message):
    with pytest.raises(RuntimeError, match=message):
        _ops.get("verify_tree")(*positional("verify_tree", **{**base_case(), **over}))


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(rng, extras):
    case = verify_case(rng, batch=2, nodes=4, vocab=19, temperature=0.8, filters=True, extras=extras)
    torch.library.opcheck(_ops.get("verify_tree"), positional("verify_tree", **case))


# ---- the Python function --------------------------------------------------------------------------------------------------


def call(logits: torch.Tensor, cu: list, **kw):
    rows, batch = logits.shape[0], len(cu) - 1
    i32 = dict(dtype=torch.int32)
    full = lambda n, value: torch.full((n,), value, **i32)  # noqa: E731
    return fv.verify_tree(logits, full(rows, 0), full(rows, -1), torch.tensor(cu, **i32), full(batch, 7), full(batch, 1), full(batch, 9),
                          fv.Sampling.make(batch), **kw)


def test_an_empty_batch_gives_empty_results():
    for kw in ({}, dict(max_path=4), dict(logprobs=True)):
        out = call(torch.zeros(0, 8), [0], **kw)
        assert out.out_tokens.shape == out.path.shape == (0, kw.get("max_path", 1))
        assert out.num_tokens_out.shape == out.next_root.shape == out.flags.shape == (0,)
    assert call(torch.zeros(0, 8), [0, 0]).num_tokens_out.tolist() == [0]  # a request without a row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    want = call(logits, [0, 1, 2], logprobs=True)
    torch.set_default_dtype(dtype)
    try:
        got = call(logits, [0, 1, 2], logprobs=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert want.logprobs.dtype == torch.float32 and all(torch.equal(a, b) for a, b in zip(got, want))
