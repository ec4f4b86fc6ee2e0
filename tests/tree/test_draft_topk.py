"""draft_topk: values and ids of the k best children."""

import math

import pytest
import torch
from conftest import positional, run_op
from torch.library import opcheck

from fastverify import _ops
from fastverify.tree import draft_topk

INF = math.inf


def outputs(rows: int, k: int) -> dict:
    """Poisoned outputs."""
    return {"values": torch.full((rows, k), math.nan), "tokens": torch.full((rows, k), -77, dtype=torch.int32)}


def check(backend: str, logits: torch.Tensor, k: int, **kw) -> dict:
    """Runs `backend` and the oracle: same ids, values within float32 rounding of the float64 log-probability."""
    args = dict(logits=logits, **outputs(logits.size(0), k), **kw)
    got, want = run_op(backend, "draft_topk", **args), run_op("reference", "draft_topk", **args)
    assert torch.equal(got["tokens"], want["tokens"])
    assert torch.allclose(got["values"], want["values"], rtol=3e-7, atol=4e-6)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows,vocab,k", [(1, 1, 1), (3, 5, 5), (2, 64, 64), (7, 127, 4), (5, 1000, 10), (2, 8192, 64),
                                          (3, 32003, 10), (1, 163840, 16)])
def test_random_rows(backend, rng, dtype, rows, vocab, k):
    check(backend, (4 * torch.randn(rows, vocab, generator=rng)).to(dtype), k)  # bf16 rows hold many ties


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 1e4, 1e38])
def test_scales(backend, rng, spread):
    check(backend, spread * torch.randn(4, 2000, generator=rng), 10)


def test_strided_rows_and_map(backend, rng):
    wide = torch.randn(6, 300, generator=rng)
    d2t = torch.randint(0, 5, (250,), generator=rng).cumsum(0)
    got = check(backend, wide[:, 20:270], 8, d2t=d2t)
    plain = check(backend, wide[:, 20:270].contiguous(), 8)
    assert torch.equal(got["values"], plain["values"])
    assert torch.equal(got["tokens"], (plain["tokens"] + d2t[plain["tokens"].long()]).int())


def test_broadcast_row(backend, rng):
    got = check(backend, torch.randn(1, 400, generator=rng).expand(5, 400), 6)
    assert (got["tokens"] == got["tokens"][0]).all()


def test_ties_go_to_the_lower_id(backend):
    x = torch.zeros(2, 300)
    x[0, [250, 7, 130]] = 3.0
    x[1, 5], x[1, 2] = 0.0, -0.0  # equal, whatever the sign
    got = check(backend, x, 4)
    assert got["tokens"].tolist() == [[7, 130, 250, 0], [0, 1, 2, 3]]


def test_not_finite_entries(backend):
    x = torch.full((4, 260), -INF)
    x[0, 200], x[0, 10], x[0, 11] = 1.0, math.nan, INF  # only one finite entry
    x[2] = math.nan
    x[3, 100], x[3, 255] = 2.0, 2.0
    got = check(backend, x, 3)
    assert got["tokens"].tolist() == [[200, 0, 1], [0, 1, 2], [0, 1, 2], [100, 255, 0]]
    assert got["values"][0].tolist() == [0.0, -INF, -INF]
    assert got["values"][1:3].eq(-INF).all()
    assert torch.allclose(got["values"][3], torch.tensor([-math.log(2)] * 2 + [-INF]), atol=1e-6)


def test_empty_row_is_mapped(backend):
    got = check(backend, torch.full((1, 40), -INF), 2, d2t=torch.arange(40) * 3)
    assert got["tokens"].tolist() == [[0, 4]]


@pytest.mark.parametrize("end,valid", [(3, 3), (0, 0), (5, 5), (99, 5), (-4, 0)])
def test_padding_rows_are_not_read(backend, rng, end, valid):
    x = torch.randn(5, 50, generator=rng)
    cu = torch.tensor([0, 1, end], dtype=torch.int32)
    got = check(backend, x, 4, cu_nodes=cu)
    assert got["values"][valid:].eq(0).all() and got["tokens"][valid:].eq(0).all()
    x[valid:] = math.nan
    again = check(backend, x, 4, cu_nodes=cu)
    assert torch.equal(got["values"], again["values"]) and torch.equal(got["tokens"], again["tokens"])


def test_subnormal_halves(backend):
    x = torch.arange(-500, 500, dtype=torch.int32).abs().to(torch.int16).view(torch.float16).view(1, -1)
    assert check(backend, x, 3)["tokens"].tolist() == [[0, 1, 999]]


def test_every_half_against_its_neighbour(backend):
    bits = torch.arange(-(2**15), 2**15 - 1, 61 if backend == "emulated" else 1, dtype=torch.int32)  # a block per row
    check(backend, torch.stack([bits, bits + 1], 1).to(torch.int16).view(torch.float16), 2)


def test_rows_are_independent_and_repeatable(backend, rng):
    x = torch.randn(33, 9000, generator=rng)
    whole = run_op(backend, "draft_topk", logits=x, **outputs(33, 10))
    for _ in range(3):
        again = run_op(backend, "draft_topk", logits=x, **outputs(33, 10))
        assert all(torch.equal(whole[n], again[n]) for n in whole)
    order = torch.randperm(33, generator=rng)
    shuffled = run_op(backend, "draft_topk", logits=x[order], **outputs(33, 10))
    assert all(torch.equal(whole[n][order], shuffled[n]) for n in whole)


def test_probabilities_sum_to_one(backend, rng):
    got = check(backend, torch.randn(4, 64, generator=rng), 64)
    assert torch.allclose(got["values"].double().exp().sum(1), torch.ones(4, dtype=torch.float64), atol=1e-5)
    assert (got["values"][:, :-1] >= got["values"][:, 1:]).all()


def test_empty_batch(backend):
    check(backend, torch.empty(0, 40), 4)


def test_wrapper_allocates_and_writes_only_its_outputs(rng):
    x = torch.randn(3, 200, generator=rng)
    values, tokens = draft_topk(x, 5)
    assert values.dtype == torch.float32 and tokens.dtype == torch.int32 and values.shape == tokens.shape == (3, 5)
    guard_v, guard_t = torch.full((5, 5), 9.0), torch.full((5, 5), 9, dtype=torch.int32)
    before = x.clone()
    draft_topk(x, values=guard_v[1:4], tokens=guard_t[1:4])
    assert torch.equal(guard_v[1:4], values) and torch.equal(guard_t[1:4], tokens) and torch.equal(x, before)
    for guard in (guard_v, guard_t):
        assert guard[0].eq(9).all() and guard[4].eq(9).all()


def test_opcheck_and_compile(rng):
    x, cu = torch.randn(4, 50, generator=rng), torch.tensor([0, 3], dtype=torch.int32)
    for args in (dict(), dict(d2t=torch.arange(50), cu_nodes=cu)):
        opcheck(_ops.get("draft_topk"), positional("draft_topk", logits=x, values=torch.zeros(4, 3),
                                                   tokens=torch.zeros(4, 3, dtype=torch.int32), **args))
    compiled = torch.compile(draft_topk, fullgraph=True, backend="eager")(x, 3)
    assert all(torch.equal(a, b) for a, b in zip(compiled, draft_topk(x, 3)))


F32, I32 = torch.float32, torch.int32
BAD = {
    "dtype": (dict(logits=torch.zeros(4, 10, dtype=torch.float64)),
              "draft_topk: logits must be float32|float16|bfloat16 [any, any] on cpu; got float64 [4, 10] on cpu. "
              "Fix: cast with .to(dtype)."),
    "rank": (dict(logits=torch.zeros(10)),
             "draft_topk: logits must be float32|float16|bfloat16 [any, any] on cpu; got float32 [10] on cpu. "
             "Fix: pass that shape."),
    "transposed": (dict(logits=torch.zeros(10, 4).t()),
                   "draft_topk: logits must be dense in its last dimension; got float32 [4, 10] on cpu with other strides. "
                   "Fix: call .contiguous() once, outside the loop."),
    "wide": (dict(logits=torch.zeros(1).expand(4, 2**20 + 1)),
             "draft_topk: logits must be dense in its last dimension; got float32 [4, 1048577] on cpu with other strides. "
             "Fix: call .contiguous() once, outside the loop."),
    "vocab": (dict(logits=torch.zeros(2**20 + 1, dtype=torch.bfloat16).expand(4, -1)),
              "draft_topk: logits must be at most 1048576 entries wide; got bfloat16 [4, 1048577] on cpu. "
              "Fix: pass one vocabulary row per node."),
    "k > Vd": (dict(values=torch.zeros(4, 11), tokens=torch.zeros(4, 11, dtype=I32)),
               "draft_topk: values must be 1..10 candidates wide (at most the draft vocabulary and 64); "
               "got float32 [4, 11] on cpu. Fix: choose k in that range."),
    "k > 64": (dict(logits=torch.zeros(4, 100), values=torch.zeros(4, 65), tokens=torch.zeros(4, 65, dtype=I32)),
               "draft_topk: values must be 1..64 candidates wide (at most the draft vocabulary and 64); "
               "got float32 [4, 65] on cpu. Fix: choose k in that range."),
    "k = 0": (dict(values=torch.zeros(4, 0), tokens=torch.zeros(4, 0, dtype=I32)),
              "draft_topk: values must be 1..10 candidates wide (at most the draft vocabulary and 64); "
              "got float32 [4, 0] on cpu. Fix: choose k in that range."),
    "values rows": (dict(values=torch.zeros(3, 2)),
                    "draft_topk: values must be float32 [4, any] on cpu; got float32 [3, 2] on cpu. Fix: pass that shape."),
    "tokens": (dict(tokens=torch.zeros(4, 2, dtype=torch.int64)),
               "draft_topk: tokens must be int32 [4, 2] on cpu; got int64 [4, 2] on cpu. Fix: cast with .to(dtype)."),
    "d2t dtype": (dict(d2t=torch.zeros(10, dtype=I32)),
                  "draft_topk: d2t must be int64 [10] on cpu; got int32 [10] on cpu. Fix: cast with .to(dtype)."),
    "d2t size": (dict(d2t=torch.zeros(9, dtype=torch.int64)),
                 "draft_topk: d2t must be int64 [10] on cpu; got int64 [9] on cpu. Fix: pass that shape."),
    "cu_nodes": (dict(cu_nodes=torch.zeros(0, dtype=I32)),
                 "draft_topk: cu_nodes must be int32 [B+1]; got int32 [0] on cpu. "
                 "Fix: pass prefix sums that start with 0, or None."),
    "cu dtype": (dict(cu_nodes=torch.zeros(2)),
                 "draft_topk: cu_nodes must be int32 [any] on cpu; got float32 [2] on cpu. Fix: cast with .to(dtype)."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    args = dict(logits=torch.zeros(4, 10), values=torch.zeros(4, 2), tokens=torch.zeros(4, 2, dtype=I32))
    with pytest.raises(RuntimeError) as error:
        run_op("cpu", "draft_topk", **{**args, **change})
    assert str(error.value) == message


def test_no_k_and_nothing_to_tell_it_from():
    with pytest.raises(RuntimeError, match="draft_topk: k must be given where values and tokens are not; got None. Fix: pass k."):
        draft_topk(torch.zeros(4, 10))


def test_missing_kernel_names_the_fix():
    with pytest.raises(RuntimeError, match="draft_topk: the device must be one this op has a kernel for; got meta"):
        draft_topk(torch.zeros(4, 10, device="meta"), 2)
