"""SGLang's tree ops against a plain restatement of their rules, golden trees, the law of the sampler, and malformed input."""

import inspect
import sys
import types
from math import sqrt

import pytest
import torch
from conftest import need_kernel, positional, run_op
from sglang_cases import build_case, greedy_case, mask_case, randint, sampling_case

import fastverify.integrations.sglang as fv_sglang
from fastverify import _ops, reference

GREEDY, SAMPLING = "sgl_verify_tree_greedy", "sgl_tree_speculative_sampling_target_only"
BUILD, RECONSTRUCT = "sgl_build_tree_kernel_efficient", "sgl_reconstruct_indices_from_tree_mask"


def same(backend: str, op: str, case: dict) -> dict:
    """Runs `op` on the back end and on the oracle; every mutable argument must agree bit for bit."""
    got, want = run_op(backend, op, **case), run_op("reference", op, **case)
    assert got.keys() == want.keys() and got
    for name in want:
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name
    return got


# ---- greedy ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("batch,nodes,levels", [(1, 1, 1), (1, 2, 2), (3, 8, 5), (4, 33, 9), (2, 130, 4), (7, 16, 1)])
def test_greedy_against_the_oracle(backend, rng, batch, nodes, levels, ids):
    deep = 0
    for _ in range(16):
        got = same(backend, GREEDY, greedy_case(rng, batch, nodes, levels, 2 if nodes < 3 else 4, ids))
        deep = max(deep, int(got["accept_token_num"].max()))
        assert got["predicts"][-1] == -7, "the spare slot is not touched"
    assert deep >= min(1, levels - 1, nodes - 1), "no case of this size accepts a draft"


def test_greedy_golden_of_sglangs_own_test(backend):
    """Two trees of six nodes, four levels; the second one's siblings descend."""
    case = dict(
        predicts=torch.full((12,), -1, dtype=torch.int32), accept_index=torch.full((2, 4), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(2, dtype=torch.int32),
        candidates=torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
        retrive_index=torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        retrive_next_token=torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
        retrive_next_sibling=torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
        target_predict=torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]]))
    got = same(backend, GREEDY, case)
    assert got["predicts"].tolist() == [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
    assert got["accept_index"].tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]]
    assert got["accept_token_num"].tolist() == [3, 2]


# ---- sampling ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("draft", ["zeros", "none", "random"])
@pytest.mark.parametrize("batch,nodes,levels,vocab", [(3, 8, 5, 64), (2, 5, 3, 5001), (1, 6, 4, 9002), (2, 20, 3, 4097), (2, 4, 2, 1),
                                                      (1, 40, 6, 300)])
def test_sampling_against_the_oracle(backend, rng, batch, nodes, levels, vocab, draft):
    for scale in (3.0, 0.3):
        same(backend, SAMPLING, sampling_case(rng, batch, nodes, levels, vocab, scale, draft=draft))


@pytest.mark.parametrize("single,acc", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6), (0.2, 0.5), (0.0, 1.0), (1.0, 0.0)])
def test_thresholds(backend, rng, single, acc):
    for _ in range(4):
        same(backend, SAMPLING, sampling_case(rng, 4, 12, 6, 32, single=single, acc=acc))


def test_coins_equal_to_a_cumulative_mass_accept(backend, rng):
    for _ in range(8):
        same(backend, SAMPLING, sampling_case(rng, 4, 12, 6, 16, scale=1.0, grid=True))


def test_walks_reach_every_depth_and_draft_probs_change_nothing(backend, rng):
    depths = set()
    for _ in range(10):
        case = sampling_case(rng, 8, 12, 5, 32, hot=1.0)
        got, bare = run_op(backend, SAMPLING, **case), run_op(backend, SAMPLING, **(case | dict(draft_probs=None)))
        assert all(torch.equal(got[k], bare[k]) for k in bare)
        depths |= set(got["accept_token_num"].tolist())
        refused = got["draft_probs"] != 0
        assert torch.equal(got["draft_probs"][refused], case["target_probs"][refused])
    assert depths == {0, 1, 2, 3, 4}


def chain(probs: torch.Tensor, tokens: list, coin: float, last: float, levels: int = 2, wide: bool = True) -> dict:
    """One request: a root whose children are `tokens`, all rows `probs`."""
    n = len(tokens) + 1
    return dict(
        predicts=torch.full((n,), -7, dtype=torch.int32), accept_index=torch.full((1, levels), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(1, dtype=torch.int32), candidates=torch.tensor([[0, *tokens]]),
        retrive_index=torch.arange(n)[None], retrive_next_token=torch.tensor([[1] + [-1] * (n - 1)]),
        retrive_next_sibling=torch.tensor([[-1, *range(2, n), -1]]), uniform_samples=torch.full((1, n), coin),
        uniform_samples_for_final_sampling=torch.tensor([last]), target_probs=probs.expand(1, n, -1).contiguous(),
        draft_probs=None, threshold_single=1.0, threshold_acc=1.0)


def test_a_zero_coin_does_not_accept_a_child_without_mass(backend):
    probs = torch.tensor([0.0, 0.0, 0.5, 0.5])
    got = run_op(backend, SAMPLING, **chain(probs, [1, 2], 0.0, 0.0))
    assert got["accept_index"].tolist() == [[0, 2]] and got["predicts"].tolist()[0] == 2


def test_final_coin_at_the_end_emits_the_last_entry_with_mass(backend):
    """SGLang emits V-1 there, a token the target gives no mass."""
    probs = torch.tensor([0.25, 0.5, 0.25, 0.0])
    got = run_op(backend, SAMPLING, **chain(probs, [3], 0.9, 1.0))
    assert got["accept_token_num"].item() == 0 and got["predicts"][0] == 2


def test_no_mass_left_emits_the_last_refused_child(backend):
    """The children hold all mass and rounding refused the last of them: the exact rule emits it."""
    probs = torch.tensor([0.5, 0.4999999, 0.0, 0.0])
    got = run_op(backend, SAMPLING, **chain(probs, [0, 1, 2], 0.99999994, 0.3))
    assert got["accept_token_num"].item() == 0 and got["predicts"][0] == 1


@pytest.mark.parametrize("draft", [False, True])
def test_law_of_the_emitted_token_is_the_targets(backend, draft):
    """The first emitted token has the root row's distribution, whatever the tree (20,000 draws, 5 standard deviations)."""
    if backend == "emulated":
        pytest.skip("1024 fibers per draw: the law is tested on the CPU and on a GPU, the emulator against the oracle")
    rng = torch.Generator().manual_seed(1)
    n, probs = 20_000, torch.tensor([0.1, 0.35, 0.3, 0.25])
    batch = dict(
        predicts=torch.full((n * 4,), -7, dtype=torch.int32), accept_index=torch.full((n, 2), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(n, dtype=torch.int32), candidates=torch.tensor([[0, 2, 0, 1]]).repeat(n, 1),
        retrive_index=torch.arange(4 * n).view(n, 4), retrive_next_token=torch.tensor([[1, -1, -1, -1]]).repeat(n, 1),
        retrive_next_sibling=torch.tensor([[-1, 2, -1, -1]]).repeat(n, 1), uniform_samples=torch.rand(n, 4, generator=rng),
        uniform_samples_for_final_sampling=torch.rand(n, generator=rng), target_probs=probs.expand(n, 4, 4).contiguous(),
        draft_probs=torch.zeros(n, 4, 4) if draft else None, threshold_single=1.0, threshold_acc=1.0)
    got = run_op(backend, SAMPLING, **batch)
    rates = torch.bincount(got["predicts"].view(n, 4)[:, 0], minlength=4) / n
    for rate, p in zip(rates.tolist(), probs.tolist()):
        assert abs(rate - p) < 5 * sqrt(p * (1 - p) / n)
    assert 0.38 < float(got["accept_token_num"].float().mean()) < 0.42


def test_oracle_draw_is_the_inverse_cdf(rng):
    """The oracle's float32 order against float64: another token only where the coin is within rounding of a boundary."""
    ties = 0
    for vocab in (7, 1000, 5001, 9002, 20_000):
        for coin in torch.rand(40, generator=rng).tolist():
            p = torch.softmax(torch.randn(vocab, generator=rng), -1)
            cdf = p.double().cumsum(0) / p.double().sum()
            want, got = int((cdf <= coin).sum()), reference.sglang.draw(p, coin)
            if got != want:
                ties += 1
                low, high = sorted((got, want))
                assert max(abs(float(cdf[i]) - coin) for i in range(low, high)) < 1e-6
    assert ties < 20


# ---- trees -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("batch,nodes,topk,depth", [(1, 1, 1, 1), (2, 8, 4, 3), (3, 16, 4, 4), (5, 27, 8, 5), (2, 4, 1, 6), (1, 32, 10, 3)])
def test_build_against_the_oracle(backend, rng, batch, nodes, topk, depth, mode):
    same(backend, BUILD, build_case(rng, batch, nodes, topk, depth, mode))


@pytest.mark.parametrize("nodes,mode", [(64, 3), (64, 0), (260, 1), (64, 1)])
def test_build_large(backend, rng, nodes, mode):
    same(backend, BUILD, build_case(rng, 2, nodes, 10, 8, mode, longest=40))


def test_build_unsorted_candidates(backend, rng):
    """First match wins, as in SGLang, whatever the order of the list."""
    case = build_case(rng, 4, 16, 4, 4, 1)
    case["selected_index"] = case["selected_index"].flip(1).contiguous()
    same(backend, BUILD, case)


def test_build_writes_every_link_whatever_was_there(backend, rng):
    case = build_case(rng, 3, 12, 4, 3, 1)
    poisoned = case | {k: torch.full_like(case[k], 99) for k in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    got, clean = same(backend, BUILD, poisoned), run_op(backend, BUILD, **case)
    assert all(torch.equal(got[k], clean[k]) for k in clean)


def test_build_golden_tree(backend):
    """topk 2, depth 2: root, its children a b, then a's second child: links, positions and rows written out by hand."""
    case = dict(parent_list=torch.tensor([[-1, 0, 1]]), selected_index=torch.tensor([[0, 1, 3]]), verified_seq_len=torch.tensor([3]),
                tree_mask=torch.ones(4 * 3 + 16, dtype=torch.bool), positions=torch.zeros(4, dtype=torch.int64),
                retrive_index=torch.full((1, 4), -1), retrive_next_token=torch.full((1, 4), -1),
                retrive_next_sibling=torch.full((1, 4), -1), topk=2, depth=2, draft_token_num=4, tree_mask_mode=0)
    got = same(backend, BUILD, case)
    assert got["retrive_next_token"].tolist() == [[1, 3, -1, -1]] and got["retrive_next_sibling"].tolist() == [[-1, 2, -1, -1]]
    assert got["positions"].tolist() == [3, 4, 4, 5]
    assert got["tree_mask"].view(4, 7).int().tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0],
                                                          [1, 1, 1, 1, 1, 0, 1]]


@pytest.mark.parametrize("batch,nodes", [(1, 1), (3, 8), (2, 33), (2, 70), (1, 300)])
def test_reconstruct_against_the_oracle(backend, rng, batch, nodes):
    same(backend, RECONSTRUCT, mask_case(rng, batch, nodes))


def test_reconstruct_golden_of_sglangs_own_test(backend):
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    case = dict(tree_mask=mask.flatten(), verified_seq_len=torch.tensor([12]), positions=torch.zeros(4, dtype=torch.int64),
                retrive_index=torch.zeros(1, 4, dtype=torch.int64), retrive_next_token=torch.zeros(1, 4, dtype=torch.int64),
                retrive_next_sibling=torch.zeros(1, 4, dtype=torch.int64), batch_size=1, draft_token_num=4)
    got = same(backend, RECONSTRUCT, case)
    assert got["retrive_next_token"].tolist() == [[1, -1, 3, -1]] and got["retrive_next_sibling"].tolist() == [[-1, 2, -1, -1]]
    assert got["positions"].tolist() == [12, 13, 13, 14] and got["retrive_index"].tolist() == [[0, 1, 2, 3]]


def test_build_then_reconstruct_gives_the_same_links(backend, rng):
    case = build_case(rng, 4, 24, 6, 4, 1)
    built = run_op(backend, BUILD, **case)
    again = run_op(backend, RECONSTRUCT, tree_mask=built["tree_mask"].flatten(), verified_seq_len=case["verified_seq_len"],
                   **{k: torch.full_like(built[k], 5) for k in built if k != "tree_mask"}, batch_size=4, draft_token_num=24)
    for name in again:
        assert torch.equal(again[name], built[name]), name


# ---- malformed input: a defined result, no hang, nothing outside the buffers -----------------------------------------------

@pytest.mark.parametrize("op", [GREEDY, SAMPLING])
def test_circles_and_links_out_of_range(backend, rng, op):
    make = greedy_case if op == GREEDY else sampling_case
    for round_ in range(12):
        case = make(rng, 4, 10, 6, 4)
        for name in ("retrive_next_token", "retrive_next_sibling"):
            wild = randint(-3, 14, rng, (4, 10)) if round_ % 2 else randint(0, 10, rng, (4, 10))
            case[name] = torch.where(torch.rand(4, 10, generator=rng) < 0.6, wild, case[name])
        if round_ % 3 == 0:
            case["retrive_index"][:, 3] = 10**12
            case["retrive_index"][1, 0] = -1
            case["candidates"][:, 2] = -1
            case["candidates"][:, 4] = 2**40
        got = same(backend, op, case)
        assert (got["accept_token_num"] >= 0).all() and (got["accept_token_num"] < 6).all()


def test_a_node_may_be_its_own_sibling(backend):
    case = chain(torch.tensor([0.1, 0.9, 0.0, 0.0]), [2, 3], 0.5, 0.5)
    case["retrive_next_sibling"] = torch.tensor([[-1, 1, -1]])
    got = same(backend, SAMPLING, case)
    assert got["accept_token_num"].item() == 0 and got["predicts"][0] == 1


def test_nan_rows(backend, rng):
    case = sampling_case(rng, 3, 6, 4, 40)
    case["target_probs"][1] = float("nan")
    case["target_probs"][2, :, 7] = float("nan")
    got = same(backend, SAMPLING, case)
    assert got["accept_token_num"][1] == 0 and got["predicts"][6] == 39


def test_build_orphans_and_circles(backend, rng):
    for _ in range(6):
        case = build_case(rng, 3, 14, 4, 4, int(randint(0, 3, rng)))
        wild = torch.rand(case["parent_list"].shape, generator=rng) < 0.5
        case["parent_list"] = torch.where(wild, randint(-2, 60, rng, case["parent_list"].shape), case["parent_list"])
        case["selected_index"][:, 5] = 10**10
        case["selected_index"][:, 6] = -5
        same(backend, BUILD, case)


def test_build_mask_too_small_for_the_lengths(backend, rng):
    """Lengths are device data: rows that do not fit are left out instead of written behind the buffer."""
    case = build_case(rng, 3, 8, 4, 3, 0)
    case["verified_seq_len"] = torch.tensor([4, 1000, 2])
    case["tree_mask"] = torch.ones(3 * 64 + 8 * 4, dtype=torch.bool)
    same(backend, BUILD, case)


@pytest.mark.parametrize("lengths", [[2**63 - 1, 1, 2], [1, 2**63 - 2, 2], [2**63 - 1, 2**63 - 1, 3], [2**62, 2**62, 2**62 + 1], [-(2**63), 2, 1],
                                     [2**61, 2**61, 2**61], [1, -1, 2], [-8, 20, 2], [2**63 - 40, 3, 2**31], [3, 2**32, 2**60]])
def test_build_lengths_at_the_end_of_int64(backend, rng, lengths):
    """Sums and products of lengths that wrap could end inside the mask: only rows before the first such length are written."""
    case = build_case(rng, 3, 8, 4, 3, 0)
    want = run_op("reference", BUILD, **{**case, "verified_seq_len": torch.tensor([min(max(n, 0), 4000) for n in lengths]),
                                         "tree_mask": torch.ones(3 * 64 + 8 * 9, dtype=torch.bool)})
    case["verified_seq_len"], case["tree_mask"] = torch.tensor(lengths), torch.ones(3 * 64 + 8 * 9, dtype=torch.bool)
    got = same(backend, BUILD, case)
    bad = next(b for b, n in enumerate(lengths) if not 0 <= n < 2**30)
    written = 64 * bad + 8 * sum(lengths[:bad])
    assert got["tree_mask"][written:].all(), "nothing from the first length on that does not fit"
    assert torch.equal(got["tree_mask"][:written], want["tree_mask"][:written])
    for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling"):
        assert torch.equal(got[name], want[name])
    depths = run_op("reference", BUILD, **{**case, "verified_seq_len": torch.zeros(3, dtype=torch.int64)})["positions"]
    assert torch.equal(got["positions"], torch.tensor(lengths).repeat_interleave(8) + depths), "they wrap"


def test_reconstruct_lengths_at_the_end_of_int64(backend, rng):
    case = mask_case(rng, 2, 8)
    zero = run_op("reference", RECONSTRUCT, **{**case, "verified_seq_len": torch.zeros(2, dtype=torch.int64)})
    case["verified_seq_len"] = torch.tensor([2**63 - 1, -(2**63)])
    got = same(backend, RECONSTRUCT, case)
    assert torch.equal(got["positions"], case["verified_seq_len"].repeat_interleave(8) + zero["positions"])


# ---- the functions ---------------------------------------------------------------------------------------------------------

FUNCTIONS = {fv_sglang.verify_tree_greedy: (GREEDY, greedy_case), fv_sglang.tree_speculative_sampling_target_only: (SAMPLING, sampling_case),
             fv_sglang.build_tree_kernel_efficient: (BUILD, build_case),
             fv_sglang.reconstruct_indices_from_tree_mask: (RECONSTRUCT, mask_case)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_take_sglangs_arguments_by_name_and_by_place(rng, function):
    op, make = FUNCTIONS[function]
    case = make(rng)
    want, names = run_op("cpu", op, **case), [a.name for a in _ops.get(op)._schema.arguments]
    for call in (lambda c: function(**c), lambda c: function(*(c[n] for n in names))):
        mine = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        assert call(mine) is None
        assert all(torch.equal(mine[k].view(torch.uint8), want[k].view(torch.uint8)) for k in want)


@pytest.mark.parametrize("op,make", list(FUNCTIONS.values()))
def test_opcheck(rng, op, make):
    torch.library.opcheck(_ops.get(op), positional(op, **make(rng)))


@pytest.mark.gpu
@pytest.mark.parametrize("op,make", list(FUNCTIONS.values()))
def test_captured_and_replayed_with_new_contents(rng, op, make):
    need_kernel("cuda", op)
    names = [a.name for a in _ops.get(op)._schema.arguments]
    on_gpu = lambda case: {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}  # noqa: E731
    case = on_gpu(make(rng))
    _ops.get(op)(*(case.get(n) for n in names))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ops.get(op)(*(case.get(n) for n in names))
    for _ in range(20):
        fresh = make(rng)
        if fresh.get("tree_mask_mode") == 0:
            fresh["verified_seq_len"] = case["verified_seq_len"].cpu()
            fresh["tree_mask"] = torch.ones_like(case["tree_mask"].cpu())
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                case[name].copy_(value)
        graph.replay()
        want = run_op("cpu", op, **fresh)
        assert all(torch.equal(case[k].cpu().view(torch.uint8), want[k].view(torch.uint8)) for k in want)


BAD = [
    (GREEDY, greedy_case, dict(candidates=torch.zeros(3, 8)),
     "candidates must be int64|int32 [any, any] on cpu; got float32 [3, 8] on cpu. Fix: cast with .to(dtype)."),
    (GREEDY, greedy_case, dict(candidates=torch.zeros(3, 1025, dtype=torch.int64)),
     "candidates must have 1..1024 columns; got 1025. Fix: pass [B, draft_token_num] with at most that many nodes per request."),
    (GREEDY, greedy_case, dict(predicts=torch.zeros(23, dtype=torch.int32)),
     "predicts must have at least B*N = 24 entries; got 23. Fix: allocate one slot per node."),
    (GREEDY, greedy_case, dict(accept_index=torch.zeros(3, 0, dtype=torch.int32)),
     "accept_index must have at least 1 column; got 0. Fix: allocate [B, spec_steps + 1]."),
    (GREEDY, greedy_case, dict(target_predict=torch.zeros(3, 7, dtype=torch.int64)),
     "target_predict must be int64|int32 [3, 8] on cpu; got int64 [3, 7] on cpu. Fix: pass that shape."),
    (SAMPLING, sampling_case, dict(target_probs=torch.zeros(3, 8, 64, dtype=torch.bfloat16)),
     "target_probs must be float32 [3, 8, any] on cpu; got bfloat16 [3, 8, 64] on cpu. Fix: cast with .to(dtype)."),
    (SAMPLING, sampling_case, dict(draft_probs=torch.zeros(3, 8, 63)),
     "draft_probs must be float32 [3, 8, 64] on cpu; got float32 [3, 8, 63] on cpu. Fix: pass that shape."),
    (SAMPLING, sampling_case, dict(uniform_samples=torch.zeros(3, 9)),
     "uniform_samples must be float32 [3, 8] on cpu; got float32 [3, 9] on cpu. Fix: pass that shape."),
    (SAMPLING, sampling_case, dict(threshold_single=1.5), "threshold_single must be in [0, 1]; got 1.5. Fix: 1.0 is the exact rule."),
    (SAMPLING, sampling_case, dict(threshold_acc=-0.5), "threshold_acc must be in [0, 1]; got -0.5. Fix: 1.0 is the exact rule."),
    (SAMPLING, sampling_case, dict(target_probs=torch.zeros(3 * 8 * 64 + 1)[1:].view(3, 8, 64)),
     "target_probs must start at a multiple of 16 bytes; got another offset into its storage. Fix: call .clone()."),
    (SAMPLING, sampling_case, dict(draft_probs=torch.zeros(3 * 8 * 64 + 2)[2:].view(3, 8, 64)),
     "draft_probs must start at a multiple of 16 bytes; got another offset into its storage. Fix: call .clone()."),
    (BUILD, build_case, dict(topk=0), "topk and depth must be at least 1; got 0 and 3. Fix: pass the shape that the tree was drafted with."),
    (BUILD, build_case, dict(tree_mask_mode=4),
     "tree_mask_mode must be 0 (full), 1 (tree only), 2 (bits) or 3 (64-bit words); got 4. Fix: pass one of them."),
    (BUILD, build_case, dict(tree_mask=torch.zeros(100, dtype=torch.bool)),
     "tree_mask must hold at least 192 bytes; got 100. Fix: allocate B*N*N booleans (mode 0: plus N * sum of the lengths)."),
    (BUILD, build_case, dict(selected_index=torch.zeros(3, 8, dtype=torch.int64)),
     "selected_index must be int64 [3, 7] on cpu; got int64 [3, 8] on cpu. Fix: pass that shape."),
    (BUILD, lambda rng: build_case(rng, 2, 40, 10, 4, 1), dict(tree_mask_mode=2),
     "draft_token_num must be at most 32 in tree_mask_mode 2; got 40. Fix: use mode 3 (up to 64 nodes) or 1."),
    (RECONSTRUCT, mask_case, dict(tree_mask=torch.zeros(191, dtype=torch.bool)),
     "tree_mask must be bool [192] on cpu; got bool [191] on cpu. Fix: pass that shape."),
    (RECONSTRUCT, mask_case, dict(batch_size=2**62),
     f"verified_seq_len must be int64 [{2**62}] on cpu; got int64 [3] on cpu. Fix: pass that shape."),
    (RECONSTRUCT, mask_case, dict(draft_token_num=0), "draft_token_num must be in 1..1024; got 0. Fix: draft at most that many nodes per request."),
]


@pytest.mark.parametrize("op,make,change,message", BAD, ids=[f"{op[4:]}-{next(iter(c))}-{i}" for i, (op, _, c, _) in enumerate(BAD)])
def test_bad_argument(rng, op, make, change, message):
    case = make(rng) | change
    with pytest.raises(RuntimeError) as error:
        _ops.get(op)(*(case.get(a.name) for a in _ops.get(op)._schema.arguments))
    assert str(error.value).splitlines()[0] == f"{op}: {message}"


# ---- install ---------------------------------------------------------------------------------------------------------------

@pytest.fixture
def fake_kernel(monkeypatch):
    """A module sgl_kernel with sglang-kernel 0.4.4's signatures, and a module that imported one function from it."""
    kernel, user = types.ModuleType("sgl_kernel"), types.ModuleType("engine_that_uses_it")
    for function in FUNCTIONS:
        names = [p for p in inspect.signature(function).parameters if p != "cuda_stream"]
        exec(f"def {function.__name__}({', '.join(names)}): return 'theirs'", kernel.__dict__)
    user.verify_tree_greedy = kernel.verify_tree_greedy
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernel)
    monkeypatch.setitem(sys.modules, "engine_that_uses_it", user)
    yield kernel, user
    fv_sglang.uninstall()


def test_install_replaces_in_every_module_and_uninstall_undoes(fake_kernel):
    kernel, user = fake_kernel
    theirs = {f.__name__: getattr(kernel, f.__name__) for f in FUNCTIONS}
    assert all("would be replaced in" in line for line in fv_sglang.install(dry_run=True))
    assert kernel.verify_tree_greedy is theirs["verify_tree_greedy"]
    lines = fv_sglang.install()
    assert "verify_tree_greedy: replaced in engine_that_uses_it, sgl_kernel" in lines and len(lines) == 4
    assert user.verify_tree_greedy is kernel.verify_tree_greedy is fv_sglang.verify_tree_greedy
    assert fv_sglang.install() == [f"{f.__name__}: already fastverify's" for f in FUNCTIONS]
    fv_sglang.uninstall()
    assert all(getattr(kernel, n) is f for n, f in theirs.items()) and user.verify_tree_greedy is theirs["verify_tree_greedy"]


def test_install_leaves_other_signatures_alone(fake_kernel):
    kernel, _ = fake_kernel
    kernel.build_tree_kernel_efficient = lambda parent_list, something_new: None
    del kernel.reconstruct_indices_from_tree_mask
    lines = fv_sglang.install()
    assert "build_tree_kernel_efficient: left alone (its arguments are others than tested)" in lines
    assert "reconstruct_indices_from_tree_mask: left alone (not in this sgl_kernel)" in lines


def test_install_without_sgl_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(RuntimeError, match=r"^install: sgl_kernel must be importable"):
        fv_sglang.install()
