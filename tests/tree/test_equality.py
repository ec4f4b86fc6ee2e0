"""The CUDA and Triton kernels of the tree and kv ops against the CPU ops on random cases: every output byte, canaries included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, interpreted, mutable_names
from equality import (build_tree_case, compact_kv_case, compare_with_cpu, draft_topk_case, grow_tree_levels, plain,
                      prepare_tree_case, run_guarded)

from fastverify import _ops
from fastverify.tree import DraftState

DEVICES = [b for b in BACKENDS if b != "cpu" and not interpreted(b)] or [pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "draft_topk": draft_topk_case, "build_tree": build_tree_case, "prepare_tree": prepare_tree_case, "compact_kv": compact_kv_case,
    "compact_kv_layers": lambda rng: compact_kv_case(rng, layers_as_list=True),
}
ROUNDS = {"emulated": 12, "cuda": 60, "triton": 4}
CHANGING = ("logits", "pool_scores", "parents", "active", "num_tokens_out", "k_cache", "aux")  # between graph replays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", CASES)
def test_random_cases(device, op, rng):
    for _ in range(ROUNDS[device]):
        compare_with_cpu(device, op, CASES[op](rng))


@pytest.mark.parametrize("device", DEVICES)
def test_random_draft_phases(device, rng):
    """Level after level, each on the state the one before has left."""
    for _ in range(ROUNDS[device] // 2):
        make, levels = grow_tree_levels(rng)
        before = None
        for level in range(levels):
            case = make(level, before)
            before = plain("grow_tree", case, compare_with_cpu(device, "grow_tree", case))


@pytest.mark.skipif("emulated" not in BACKENDS, reason="the emulator is not built (tests/emulator/build.sh)")
@pytest.mark.parametrize("kind", ["80:108", "89:142", "100:148", "120:188"])
def test_launches_of_other_devices(kind, rng, monkeypatch):
    """No clusters before sm_90; 99 KB of shared memory on sm_89 and sm_120."""
    monkeypatch.setenv("FV_EMULATED_DEVICE", kind)
    for op in CASES:
        for _ in range(4):
            compare_with_cpu("emulated", op, CASES[op](rng))
    compare_with_cpu("emulated", "draft_topk", draft_topk_case(rng, vocabs=(32_000,)))
    compare_with_cpu("emulated", "build_tree", build_tree_case(rng, sizes=(21_000,), batches=(2,)))
    make, levels = grow_tree_levels(rng)
    before = None
    for level in range(levels):
        case = make(level, before)
        before = plain("grow_tree", case, compare_with_cpu("emulated", "grow_tree", case))


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_batch_with_wide_hidden_rows(device, rng):
    """Its launch must not ask for a cluster."""
    state = DraftState.empty(0, 10, 2, 7168)
    none = torch.zeros(0, dtype=torch.int32)
    for level in (0, 1):
        case = dict(values=torch.zeros(0, 10), tokens=torch.zeros(0, 10, dtype=torch.int32), hidden=torch.zeros(0, 7168),
                    prefix_len=none, active=none, level=level, **state._asdict())
        compare_with_cpu(device, "grow_tree", case)


@pytest.mark.parametrize("device", DEVICES)
def test_pools_past_shared_memory(device, rng):
    """More entries than scores fit into 99 KB (21,000) and into the largest shared memory there is."""
    for size in (20_000, 26_000, 66_000):
        compare_with_cpu(device, "build_tree", build_tree_case(rng, sizes=(size,), batches=(2,)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [49_152, 128_256, 163_840])
def test_wide_vocabularies(device, vocab, rng):
    for _ in range(10 if device == "cuda" else 1):
        compare_with_cpu(device, "draft_topk", draft_topk_case(rng, vocabs=(vocab,)))


@pytest.mark.parametrize("device", DEVICES)
def test_large_requests(device, rng):
    """More nodes than prepare_tree keeps in shared memory."""
    for _ in range(10 if device == "cuda" else 1):
        compare_with_cpu(device, "prepare_tree", prepare_tree_case(rng, most=3000))


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_cpu_refuses_is_skipped(device, rng):
    """Page ids, prefix_len and cu_nodes out of range: no byte outside the cache is touched, other requests are moved."""
    from cases import page_tables

    table, pages = page_tables(4, 40, 4, rng)
    path = torch.tensor([[0, 2, 5]] * 4, dtype=torch.int32)
    cache = torch.randint(0, 256, (2, pages, 4, 16), generator=rng).to(torch.uint8)
    case = dict(k_cache=cache, v_cache=cache.clone(), path=path, num_tokens_out=torch.full((4,), 3, dtype=torch.int32),
                prefix_len=torch.tensor([3, 3, 3, 3], dtype=torch.int32), page_table=table,
                cu_nodes=torch.tensor([0, 6, 12, 18, 24], dtype=torch.int32), aux=torch.randn(24, 3, generator=rng),
                aux_out=torch.full((12, 3), float("nan")), cu_out=torch.full((5,), -9, dtype=torch.int32))
    good = plain("compact_kv", case, run_guarded("cpu", "compact_kv", case))
    bad_pages = table.clone()
    bad_pages[1, :3] = torch.tensor([-1, pages, 2**31 - 1])
    past = torch.tensor([3, 3, 10**9, 3], dtype=torch.int32)
    negative = torch.tensor([3, 3, -5, 3], dtype=torch.int32)
    for change, spoilt in ((dict(page_table=bad_pages), 1), (dict(prefix_len=past), 2), (dict(prefix_len=negative), 2)):
        buffers = run_guarded(device, "compact_kv", {**case, **change})
        got = plain("compact_kv", case, buffers)
        for name in ("aux_out", "cu_out"):
            assert torch.equal(got[name], good[name])
        for b in range(4):
            own = table[b].long()
            for name in ("k_cache", "v_cache"):
                assert torch.equal(got[name][:, own], (case if b == spoilt else good)[name][:, own])
    wild = torch.tensor([0, 6, 2, 18, 10**6], dtype=torch.int32)  # request 1 has -4 nodes; 3 reaches past aux
    got = plain("compact_kv", case, run_guarded(device, "compact_kv", {**case, "cu_nodes": wild}))
    assert got["cu_out"].tolist() == [0, 3, 3, 6, 9]
    assert torch.equal(got["aux_out"][:6], torch.cat([case["aux"][[0, 2, 5]], case["aux"][[2, 4, 7]]]))


@pytest.mark.gpu
def test_replays_with_new_contents_equal_the_cpu(rng):
    """One capture per op; its inputs change in place before every replay."""
    for op, make in CASES.items():
        if op == "compact_kv_layers":
            continue
        first = make(rng)
        shapes = {n: (t.shape, t.dtype) for n, t in first.items() if isinstance(t, torch.Tensor)}
        cases = [first]
        while len(cases) < 6:  # the same shapes with rows in another order
            again = {n: t[torch.randperm(t.size(0), generator=rng)] if n in CHANGING and isinstance(t, torch.Tensor) else t
                     for n, t in first.items()}
            cases.append(again)
        static = {n: t.cuda().clone() if isinstance(t, torch.Tensor) else t for n, t in first.items()}
        call = tuple(static.get(a.name) for a in _ops.get(op)._schema.arguments)
        _ops.get(op)(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _ops.get(op)(*call)
        for case in cases:
            for n, (shape, _) in shapes.items():
                static[n].copy_(case[n])
            graph.replay()
            torch.cuda.synchronize()
            want = plain(op, {**case, **{n: case[n].contiguous() for n in shapes}}, run_guarded("cpu", op, case))
            for n in want:
                assert torch.equal(static[n].cpu().view(torch.uint8), want[n].contiguous().view(torch.uint8)), (op, n)


@pytest.mark.gpu
def test_caches_past_two_gigabytes(rng):
    """The last page of the last layer lies past 2^32 bytes; only its rows may change."""
    layers, pages, page, row = 3, 110_000, 16, 1024
    cache = torch.zeros(layers, pages, page, row, dtype=torch.uint8, device="cuda")
    assert cache.numel() > 2**32
    page_id = pages - 1
    rows = torch.randint(0, 256, (layers, page, row), generator=rng).to(torch.uint8)
    cache[:, page_id] = rows.cuda()
    i32 = dict(dtype=torch.int32, device="cuda")
    for caches in ((cache,), (list(cache),)):
        cache[:, page_id] = rows.cuda()
        one = isinstance(caches[0], torch.Tensor)
        _ops.get("compact_kv" if one else "compact_kv_layers")(
            caches[0], None if one else [], torch.tensor([[0, 3, 5, 9]], **i32), torch.tensor([4], **i32), torch.tensor([2], **i32),
            torch.tensor([[page_id]], **i32), None, None, None, None)
        want = rows.clone()
        want[:, 3:6] = rows[:, [5, 7, 11]]
        assert torch.equal(cache[:, page_id].cpu(), want)
        assert int(cache[:, :page_id].max()) == 0


@pytest.mark.gpu
def test_the_profile_of_sm_120_passes_the_same_cases():
    if os.environ.get("FASTVERIFY_PROFILE"):
        pytest.skip("this is the inner run")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "cuda and (random or shared)", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"FASTVERIFY_PROFILE": "sm_120"})
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_op_of_the_two_stages_is_covered():
    """SGLang's ops (tests/integrations) and next_inputs (tests/kv/test_next_inputs.py) have tests of their own."""
    sources = Path(__file__).parents[2] / "csrc"
    ops = {p.stem for stage in ("tree", "kv") for p in (sources / stage).glob("*.cu") if not p.stem.startswith("sgl_")}
    assert set(CASES) | {"grow_tree", "next_inputs"} == ops
    assert all(mutable_names(op) for op in ops)
