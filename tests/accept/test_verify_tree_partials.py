"""Vocabulary shards: partials + combine give verify_tree's tokens bit for bit."""

import datetime
import os
import tempfile

import pytest
import torch
import torch.multiprocessing as mp

from cases import verify_case
from conftest import device_of, positional, run_op, run_op_there
from fastverify import _ops
from fastverify.accept.verify_tree import Sampling
from fastverify.accept.verify_tree_combine import verify_tree_sharded
from fastverify.accept.verify_tree_partials import STATE_WORDS, num_rounds, partial_words, verify_tree_partials

TREE = ("tokens", "parents", "cu_nodes", "prefix_len", "active")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
OUTPUTS = ("out_tokens", "num_tokens_out", "path", "next_root", "flags", "remaining")


def boundaries(vocab: int, world: int, rng) -> list:
    cuts = torch.randperm(vocab - 1, generator=rng)[: world - 1].sort().values + 1 if world > 1 else torch.tensor([], dtype=torch.int64)
    return [0] + cuts.tolist() + [vocab]


def shard_case(case: dict, lo: int, hi: int) -> dict:
    pick = lambda name: None if case.get(name) is None else case[name][:, lo:hi].contiguous()  # noqa: E731
    return dict(logits=case["logits"][:, lo:hi], bias=pick("bias"), counts=pick("counts"), bitmask=case.get("bitmask"),
                penalties=case.get("penalties"))


def run_sharded(backend: str, case: dict, cuts: list, filters: bool) -> list:
    """Every rank's outputs; each rank combines for itself. Between rounds everything stays on the device."""
    def there(values: dict) -> dict:
        return {k: v.to(device_of(backend)) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    world, rows, vocab = len(cuts) - 1, case["logits"].shape[0], case["vocab_size"]
    rounds = num_rounds(filters, case["logprobs"] is not None)
    shards = [there(shard_case(case, lo, hi)) for lo, hi in zip(cuts, cuts[1:])]
    case = there({k: case[k] for k in TREE + SAMPLING + OUTPUTS + ("logprobs", "seed", "stop_ids", "rule")})
    states = [torch.zeros(rows, STATE_WORDS, dtype=torch.int64, device=device_of(backend)) for _ in range(world)]
    outs = [None] * world
    for r in range(rounds):
        common = dict(vocab_size=vocab, round=r, num_rounds=rounds, rule=case["rule"])
        poison = torch.full((rows, partial_words(rounds)), -12345, dtype=torch.int64, device=device_of(backend))
        words = torch.stack([
            run_op_there(backend, "verify_tree_partials", state=states[w], vocab_offset=cuts[w], seed=case["seed"], partials=poison, **shards[w],
                         **common, **{k: case[k] for k in TREE + SAMPLING})["partials"] for w in range(world)])
        for w in range(world):
            outs[w] = run_op_there(
                backend, "verify_tree_combine", partials=words, counts=shards[w]["counts"], state=states[w],
                vocab_offset=cuts[w], stop_ids=case["stop_ids"], **common,
                **{k: case[k] for k in TREE + SAMPLING + OUTPUTS + ("logprobs",)})
            states[w] = outs[w]["state"]
    return [{k: v.cpu() for k, v in out.items()} for out in outs]


def assert_same(whole: dict, outs: list, cuts: list) -> None:
    for w, out in enumerate(outs):
        for name in OUTPUTS + ("logprobs",):
            if whole.get(name) is not None:
                assert torch.equal(out[name], whole[name]), name
        if whole.get("counts") is not None:
            assert torch.equal(out["counts"], whole["counts"][:, cuts[w]:cuts[w + 1]])


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("filters,extras,logprobs", [(False, False, False), (False, True, True), (True, False, False), (True, True, True)])
def test_equal_to_the_whole_vocabulary(backend, rng, world, filters, extras, logprobs, part):
    """110 batches of up to 6 requests per world and setting, in four parts: over 5,000 requests in all."""
    for i in range(part, 110, 4):
        case = verify_case(rng, batch=1 + i % 6, nodes=1 + i % 7, vocab=[9, 37, 128, 515][i % 4], extras=extras,
                           dtype=[torch.float32, torch.bfloat16, torch.float16][i % 3], temperature=[0.0, 0.8, 1.2][i % 3],
                           filters=filters, logprobs=logprobs, scale=[0.5, 3.0][i % 2])
        if i % 10 == 0:  # bad rows travel too
            case["logits"][0, int(torch.randint(0, case["vocab_size"], (), generator=rng))] = [float("nan"), float("inf"), float("-inf")][i // 10 % 3]
        cuts = boundaries(case["vocab_size"], world, rng)
        assert_same(run_op(backend, "verify_tree", **case), run_sharded(backend, case, cuts, filters), cuts)


def test_ties_across_shards(backend, rng):
    """Equal logits on both sides of a boundary: cuts keep all of them, temperature 0 takes the lowest id."""
    for i in range(40):
        case = verify_case(rng, batch=4, nodes=5, vocab=40, temperature=1.0, filters=True)
        case["logits"] = torch.randint(-2, 3, case["logits"].shape, generator=rng).float()
        cuts = boundaries(40, 3, rng)
        assert_same(run_op(backend, "verify_tree", **case), run_sharded(backend, case, cuts, True), cuts)


@pytest.mark.parametrize("top_k", [0, 1, 2, 39, 40])
def test_extreme_filters(backend, rng, top_k):
    """Nothing kept but the maximum, everything but the last entry, every cut at a tie."""
    for top_p in (0.0, 1e-9, 2.0**-24, 0.5, 1 - 2.0**-24):
        for min_p in (0.0, 1e-30, 1.0):
            case = verify_case(rng, batch=4, nodes=4, vocab=40, temperature=1.0)
            case.update(temperature=torch.tensor([1.0, 1e-30, 1e30, 0.7]), top_k=torch.full((4,), top_k, dtype=torch.int32),
                        top_p=torch.full((4,), top_p), min_p=torch.full((4,), min_p))
            case["logits"] = torch.randn(case["logits"].shape, generator=rng)
            if top_p == 0.5:
                case["logits"] = case["logits"].round()
            cuts = boundaries(40, 3, rng)
            whole = run_op(backend, "verify_tree", **case)
            assert_same(whole, run_sharded(backend, case, cuts, True), cuts)
            if top_p < 1e-3 or min_p == 1.0 or top_k == 1:  # only the maximum is left
                live = case["active"].bool() & (torch.tensor([1, 1, 0, 1]) > 0) & (whole["num_tokens_out"] > 0)
                row = case["cu_nodes"][:-1].long()
                best = case["logits"][row].max(1).values
                got = case["logits"][row].gather(1, whole["out_tokens"][:, :1].clamp(min=0)).squeeze(1)
                assert torch.equal(got[live], best[live])


def test_oracle_pair_agrees(rng):
    """The float64 partials/combine pair is the float64 verify_tree."""
    for _ in range(10):
        case = verify_case(rng, batch=3, nodes=5, vocab=12, temperature=0.9, filters=True, extras=True)
        whole = run_op("reference", "verify_tree", **case)
        shards = [shard_case(case, lo, lo + 4) for lo in (0, 4, 8)]
        state = torch.zeros(case["logits"].shape[0], STATE_WORDS, dtype=torch.int64)
        common = dict(vocab_size=12, round=0, num_rounds=1, rule=1)
        words = torch.stack([run_op(
            "reference", "verify_tree_partials", state=state, vocab_offset=4 * w, seed=case["seed"],
            partials=torch.empty(case["logits"].shape[0], 13, dtype=torch.int64), **shards[w], **common,
            **{k: case[k] for k in TREE + SAMPLING})["partials"] for w in range(3)])
        out = run_op("reference", "verify_tree_combine", partials=words, state=state, vocab_offset=0, counts=None,
                     stop_ids=case["stop_ids"], **common, **{k: case[k] for k in TREE + SAMPLING + OUTPUTS})
        for name in OUTPUTS[:5]:
            assert torch.equal(out[name], whole[name]), name


def _gloo_rank(rank: int, world: int, port_file: str, cases: list, results) -> None:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=60))
    torch.set_num_threads(1)

    def gather(words):
        parts = [torch.empty_like(words) for _ in range(world)]
        dist.all_gather(parts, words)
        return torch.stack(parts)

    got = []
    for case in cases:
        v = case["vocab_size"]
        step = -(-v // world)
        lo, hi = rank * step, min(v, (rank + 1) * step)
        s = shard_case(case, lo, hi)
        sampling = Sampling(case["temperature"], case["top_k"], case["top_p"], case["min_p"], case["seed"])
        out = verify_tree_sharded(
            s["logits"], case["tokens"], case["parents"], case["cu_nodes"], case["prefix_len"], case["active"],
            case["remaining"].clone(), sampling, gather, vocab_offset=lo, vocab_size=v, filters=True,
            max_path=case["path"].shape[1], stop_ids=case["stop_ids"], bias=s["bias"], bitmask=s["bitmask"],
            penalties=s["penalties"], counts=s["counts"], logprobs=True)
        got.append((out.out_tokens.tolist(), out.num_tokens_out.tolist(), out.flags.tolist()))
    results[rank] = got
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_gloo_processes(rng, world):
    cases = [verify_case(rng, batch=3, nodes=6, vocab=[64, 131][i % 2], temperature=0.9, filters=True, extras=True) for i in range(6)]
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_gloo_rank, (world, os.path.join(folder, "store"), cases, results), nprocs=world)
        for i, case in enumerate(cases):
            whole = run_op("cpu", "verify_tree", **case)
            want = (whole["out_tokens"].tolist(), whole["num_tokens_out"].tolist(), whole["flags"].tolist())
            assert all(results[r][i] == want for r in range(world))


def test_filters_in_too_few_rounds_are_flagged(rng):
    case = verify_case(rng, batch=2, nodes=3, vocab=20, temperature=1.0, logprobs=False)
    case["active"].fill_(1)
    case = {**case, "cu_nodes": torch.tensor([0, 1, 2], dtype=torch.int32), "parents": torch.full_like(case["parents"], -1),
            "logits": torch.randn(7, 20, generator=rng), "temperature": torch.ones(2), "top_k": torch.tensor([3, 0], dtype=torch.int32)}
    flags = run_sharded("cpu", case, [0, 20], False)[0]["flags"]
    assert flags[0].item() & 128 and not flags[1].item() & 128


def test_penalties_out_of_range_are_flagged_on_every_rank(rng):
    """The combine op does not see the penalties: the flag travels with the words."""
    case = verify_case(rng, batch=4, nodes=3, vocab=20, temperature=0.9, extras=True, logprobs=False, fixed_nodes=True)
    case["active"].fill_(1)
    case = {**case, "cu_nodes": torch.arange(5, dtype=torch.int32), "parents": torch.full_like(case["parents"], -1),
            "logits": torch.randn(case["logits"].shape, generator=rng), "penalties": torch.tensor(
                [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 0.0], [1.0, 0.0, float("inf")]])}
    whole = run_op("cpu", "verify_tree", **case)
    assert [bool(f & 128) for f in whole["flags"].tolist()] == [False, True, True, True]
    for filters in (False, True):
        cuts = [0, 7, 8, 20]
        assert_same(whole, run_sharded("cpu", case, cuts, filters), cuts)


def test_bad_arguments_raise_in_words(rng):
    case = verify_case(rng, batch=2, nodes=4, vocab=11, fixed_nodes=True)
    rows = case["logits"].shape[0]
    good = dict(state=torch.zeros(rows, STATE_WORDS, dtype=torch.int64), partials=torch.zeros(rows, 256, dtype=torch.int64),
                vocab_offset=0, round=0, num_rounds=10, vocab_size=11, rule=1, logits=case["logits"], seed=case["seed"],
                **{k: case[k] for k in TREE + SAMPLING})
    for over, message in [
        (dict(vocab_offset=11), r"verify_tree_partials: vocab_offset must be in \[0, 11\); got 11. Fix: "),
        (dict(num_rounds=3), "verify_tree_partials: num_rounds must be 1, 2 or 10; got 3. Fix: "),
        (dict(round=10), r"verify_tree_partials: round must be in \[0, 10\); got 10. Fix: "),
        (dict(partials=torch.zeros(rows, 3, dtype=torch.int64)), "verify_tree_partials: partials must have at least 256 columns for 10 rounds; got 3. Fix: "),
        (dict(state=torch.zeros(rows, 4, dtype=torch.int64)), r"verify_tree_partials: state must be int64 \[9, 8\]"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            _ops.get("verify_tree_partials")(*positional("verify_tree_partials", **{**good, **over}))


def test_rounds_that_there_are_not(rng):
    case = verify_case(rng, batch=1, nodes=2, vocab=11, fixed_nodes=True)
    with pytest.raises(RuntimeError, match=r"verify_tree_partials: rounds must be 1\|2\|10; got 3. Fix: pass num_rounds"):
        verify_tree_partials(case["logits"], *(case[k] for k in TREE), None, None, vocab_offset=0, vocab_size=11, round=0, rounds=3)


def test_opcheck(rng):
    case = verify_case(rng, batch=2, nodes=3, vocab=20, temperature=0.9, filters=True, extras=True)
    rows = case["logits"].shape[0]
    torch.library.opcheck(_ops.get("verify_tree_partials"), positional(
        "verify_tree_partials", state=torch.zeros(rows, STATE_WORDS, dtype=torch.int64), seed=case["seed"],
        partials=torch.zeros(rows, 256, dtype=torch.int64), vocab_offset=0, round=0, num_rounds=10, vocab_size=20, rule=1,
        **shard_case(case, 0, 20), **{k: case[k] for k in TREE + SAMPLING}))
