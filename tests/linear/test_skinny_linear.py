"""skinny_linear: oracle, every kind, rows that do not depend on their neighbours, bad arguments."""

import pytest
import torch

from conftest import positional, run_op
from fastverify import _ops, skinny_linear

OP = "skinny_linear"
BF16 = torch.bfloat16


def case(rng, rows: int, inner: int, outer: int, kind: int, norm: bool = True, bias: bool = False, dtype=BF16, pad: int = 0) -> dict:
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    x = (2 * draw(rows, inner + pad)).to(dtype)[:, :inner]
    width = outer // 2 if kind == 2 else outer
    return dict(x=x, weight=(draw(outer, inner) / inner**0.5).to(dtype), bias=draw(outer).to(dtype) if bias else None,
                norm=(1 + 0.2 * draw(inner)).to(dtype) if norm else None,
                out=draw(rows, width).to(dtype) if kind == 1 else torch.full((rows, width), float("nan"), dtype=dtype), eps=1e-5, kind=kind)


def check(backend: str, c: dict) -> None:
    got, want = run_op(backend, OP, **c)["out"].double(), run_op("reference", OP, **c)["out"].double()
    # one rounding of the result, and sums of rounded inputs that may fall on the other side of a tie
    torch.testing.assert_close(got, want, rtol=2**-7 if c["x"].dtype == BF16 else 1e-4, atol=2e-2 if c["x"].dtype == BF16 else 1e-4)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 20, 24, 31, 32, 33])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_against_the_oracle(backend, rng, rows, kind):
    check(backend, case(rng, rows, 96, 64, kind, norm=rows % 2 == 0, bias=rows % 3 == 0))


@pytest.mark.parametrize("inner,outer", [(32, 16), (64, 48), (576, 960), (1536, 64), (1728, 32), (2048, 16)])
def test_sizes(backend, rng, inner, outer):
    for kind, norm in ((0, True), (1, False), *([(2, True)] if outer % 32 == 0 else [])):
        check(backend, case(rng, 5, inner, outer, kind, norm=norm, pad=64))


@pytest.mark.parametrize("inner,outer,rows", [(2304, 64, 1), (4096, 128, 5), (4128, 64, 17), (14336, 64, 33)])
def test_long_inner(backend, rng, inner, outer, rows):
    """More chunks of K than a warp has in flight."""
    for kind, norm in ((0, True), (1, False), (2, True)):
        check(backend, case(rng, rows, inner, outer, kind, norm=norm, bias=kind == 0, pad=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_on_the_cpu(rng, dtype):
    for kind in (0, 1, 2):
        check("cpu", case(rng, 4, 64, 32, kind, bias=True, dtype=dtype))


@pytest.mark.parametrize("inner", [576, 2304])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_row_does_not_depend_on_the_others(backend, rng, kind, inner):
    """The same bits alone, among 7, 20 and 32, whatever stands beside it."""
    c = case(rng, 32, inner, 64, kind, bias=True)
    whole = run_op(backend, OP, **c)["out"]
    for first, count in ((0, 1), (31, 1), (5, 7), (3, 20)):
        rows = slice(first, first + count)
        part = run_op(backend, OP, **(c | dict(x=c["x"][rows].contiguous(), out=c["out"][rows].contiguous())))["out"]
        assert torch.equal(part, whole[rows])


def test_no_rows(backend, rng):
    assert run_op(backend, OP, **case(rng, 0, 32, 16, 0))["out"].shape == (0, 16)


BAD = [
    ("weight", lambda c: c["weight"][:, :32].contiguous(), "weight must be bfloat16 [any, 64] on cpu; got bfloat16 [32, 32] on cpu"),
    ("weight", lambda c: c["weight"][:20].contiguous(), "weight must be [N, K] with N a multiple of 16 and K of 32; got bfloat16 [20, 64]"),
    ("norm", lambda c: c["norm"].float(), "norm must be bfloat16 [64] on cpu; got float32 [64] on cpu. Fix: cast"),
    ("out", lambda c: c["out"][:, :8].contiguous(), "out must be bfloat16 [4, 32] on cpu; got bfloat16 [4, 8] on cpu"),
    ("kind", lambda c: 3, "kind must be 0 (plain), 1 (add to out) or 2 (silu of the first half times the second); got 3."),
    ("eps", lambda c: -1.0, "eps must be >= 0; got -1"),
    ("out", lambda c: c["out"][:1].expand(4, 32), "out must have memory of its own for every element; got bfloat16 [4, 32] on cpu with strides that overlap"),
    ("copy", lambda c: c["out"].flatten().as_strided((4, 32), (16, 1)), "copy must have memory of its own for every element"),
]


@pytest.mark.parametrize("name,change,message", BAD)
def test_bad_arguments(rng, name, change, message):
    c = case(rng, 4, 64, 32, 0)
    with pytest.raises(RuntimeError, match="^skinny_linear: ") as error:
        _ops.get(OP)(*positional(OP, **(c | {name: change(c)})))
    assert message in str(error.value)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_opcheck_and_wrapper(rng, kind):
    c = case(rng, 4, 64, 32, kind)
    torch.library.opcheck(_ops.get(OP), positional(OP, **c))
    want = run_op("cpu", OP, **c)["out"]
    out = skinny_linear(c["x"], c["weight"], norm=c["norm"], out=c["out"] if kind == 1 else None, eps=1e-5, kind=kind)
    assert torch.equal(out, want)


def test_add_needs_what_it_adds_to(rng):
    c = case(rng, 4, 64, 32, 1)
    with pytest.raises(RuntimeError, match="^skinny_linear: out must be given for kind 1, which adds to it; got None. Fix: "):
        skinny_linear(c["x"], c["weight"], kind=1)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_copy_gets_the_same_values(backend, rng, kind, rows):
    """Into columns of a wider matrix, whose other columns stay as they are."""
    c = case(rng, rows, 96, 64, kind, bias=True)
    wide = torch.full((rows, 192), 7.0, dtype=BF16)
    alone = run_op(backend, OP, **c)["out"]
    got = run_op(backend, OP, **c, copy=wide[:, 64:128])
    assert torch.equal(got["out"], alone) and torch.equal(got["copy"], alone)
    direct = wide.clone()
    skinny_linear(c["x"], c["weight"], bias=c["bias"], norm=c["norm"], out=c["out"].clone(), eps=c["eps"], kind=kind, copy=direct[:, 64:128])
    assert (direct[:, :64] == 7).all() and (direct[:, 128:] == 7).all() and not (direct[:, 64:128] == 7).all()


def test_no_copy_of_a_halved_result(rng):
    c = case(rng, 4, 64, 32, 2)
    with pytest.raises(RuntimeError, match="^skinny_linear: copy must be None for kind 2; got a tensor. Fix: copy the result"):
        run_op("cpu", OP, **c, copy=c["out"].clone())


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [576, 4096])
def test_each_launch_reads_what_the_one_before_wrote(inner):
    """Launches that overlap, over the same few buffers again and again: the bits of the same chain with a wait after every launch."""
    torch.manual_seed(0)
    rows = 8
    weights = [(torch.randn(inner, inner, device="cuda") / inner**0.5).to(BF16) for _ in range(3)]
    norm = torch.ones(inner, dtype=BF16, device="cuda")
    starts = torch.randn(6, rows, inner, device="cuda").to(BF16)
    h, other = torch.empty_like(starts[0]), torch.empty_like(starts[0])

    def chain(outs: list, wait: bool) -> None:
        for start in starts:
            h.copy_(start)
            for i in range(9):
                skinny_linear(h, weights[i % 3], norm=norm, out=other, eps=1e-5)
                if wait:
                    torch.cuda.synchronize()
                skinny_linear(other, weights[(i + 1) % 3], out=h, kind=1)
                if wait:
                    torch.cuda.synchronize()
            outs.append(h.clone())

    want: list = []
    chain(want, True)
    for _ in range(20):
        got: list = []
        chain(got, False)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert not torch.equal(want[0], want[1]) and all(t.isfinite().all() for t in want)
