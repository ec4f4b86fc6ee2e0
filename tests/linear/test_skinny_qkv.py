"""skinny_qkv: the bits of skinny_linear, rounded, then rope_append; oracle; rows that are left alone; bad arguments."""

import pytest
import torch

from conftest import positional, run_op
from fastverify import _ops, skinny_qkv

OP = "skinny_qkv"
BF16 = torch.bfloat16


def case(rng, rows: int, inner: int, heads: int, kv: int, d: int, dtype=BF16, bias: bool = True, pages: int = 9, page: int = 4) -> dict:
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    slots = torch.randperm(pages * page, generator=rng)[:rows]
    slots[torch.rand(rows, generator=rng) < 0.2] = -1
    outer = (heads + 2 * kv) * d
    return dict(x=draw(rows, inner).to(dtype), weight=(draw(outer, inner) / inner**0.5).to(dtype), bias=draw(outer).to(dtype) if bias else None,
                norm=(1 + 0.1 * draw(inner)).to(dtype), positions=torch.randint(0, 50, (rows,), generator=rng, dtype=torch.int32),
                slots=slots, cos_sin=draw(50, d), q=torch.full((rows, heads, d), 7.0, dtype=dtype),
                k_cache=torch.full((pages, page, kv, d), 7.0, dtype=dtype), v_cache=torch.full((pages, page, kv, d), 7.0, dtype=dtype), eps=1e-5)


SIZES = [(1, 64, 4, 2, 16), (4, 64, 4, 2, 16), (8, 576, 9, 3, 64), (20, 96, 6, 1, 32), (33, 32, 2, 2, 48), (9, 2304, 4, 2, 128), (17, 2304, 2, 1, 64)]


@pytest.mark.parametrize("settled", [False, True], ids=["", "settled"])
@pytest.mark.parametrize("size", SIZES)
def test_against_the_oracle(backend, rng, size, settled):
    c = case(rng, *size) | dict(settled=settled)
    got, want = run_op(backend, OP, **c), run_op("reference", OP, **c)
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value.float(), rtol=2**-6, atol=4e-2)
        assert torch.equal(got[name] == 7.0, value == 7.0), "what is not written stays"


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_of_two_steps(backend, rng, size):
    rows, inner, heads, kv, d = size
    c = case(rng, *size)
    out = torch.empty(rows, (heads + 2 * kv) * d, dtype=BF16)
    qkv = run_op(backend, "skinny_linear", **{k: c[k] for k in ("x", "weight", "bias", "norm", "eps")}, out=out, kind=0)["out"]
    q, k, v = qkv.view(rows, -1, d).split((heads, kv, kv), dim=1)
    step = run_op("cpu", "rope_append", q=q, k=k, v=v, **{n: c[n] for n in ("positions", "slots", "cos_sin", "k_cache", "v_cache")},
                  eps=1e-5, rotary_style=0)
    got = run_op(backend, OP, **c)
    live = c["slots"] >= 0
    assert torch.equal(got["q"][live], step["q"][live])
    assert torch.equal(got["k_cache"], step["k_cache"]) and torch.equal(got["v_cache"], step["v_cache"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_on_the_cpu(rng, dtype):
    c = case(rng, 5, 64, 4, 2, 16, dtype)
    got, want = run_op("cpu", OP, **c), run_op("reference", OP, **c)
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value.float(), rtol=2e-3, atol=2e-3)


def test_what_is_out_of_range(rng):
    """The CPU refuses; a GPU leaves the row alone."""
    for name, value, text in (("slots", 36, "slots must be below 36"), ("positions", 50, "positions must be in [0, 50)")):
        c = case(rng, 4, 64, 4, 2, 16)
        c["slots"] = torch.arange(4)
        c[name][1] = value
        with pytest.raises(RuntimeError) as error:
            run_op("cpu", OP, **c)
        assert text in str(error.value)


@pytest.mark.parametrize("heads,kv", [(4, 0), (0, 2), (0, 0)])
def test_no_heads(rng, heads, kv):
    c = case(rng, 4, 64, heads, kv, 16)
    got, want = run_op("cpu", OP, **c), run_op("reference", OP, **c)
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value.float(), rtol=2**-6, atol=4e-2)


BAD = [
    ("q", lambda c: c["q"][:1].expand(4, 4, 16), "q must have memory of its own for every element; got bfloat16 [4, 4, 16] on cpu with strides that overlap"),
    ("k_cache", lambda c: c["k_cache"][:1].expand(9, 4, 2, 16), "k_cache must have memory of its own for every element"),
    ("v_cache", lambda c: c["v_cache"][:, :1].expand(9, 4, 2, 16), "v_cache must have memory of its own for every element"),
    ("q", lambda c: c["q"][:, :3].contiguous(), "weight must have 112 rows (q, k and v heads); got 128."),
    ("cos_sin", lambda c: c["cos_sin"][:, :8].contiguous(), "cos_sin must be float32 [any, 16] on cpu; got float32 [50, 8] on cpu"),
    ("slots", lambda c: c["slots"].int(), "slots must be int64 [4] on cpu; got int32 [4] on cpu. Fix: cast"),
    ("v_cache", lambda c: c["v_cache"].float(), "v_cache must be bfloat16 [9, 4, 2, 16] on cpu; got float32"),
]


@pytest.mark.parametrize("name,change,message", BAD)
def test_bad_arguments(rng, name, change, message):
    c = case(rng, 4, 64, 4, 2, 16)
    with pytest.raises(RuntimeError, match="^skinny_qkv: ") as error:
        _ops.get(OP)(*positional(OP, **(c | {name: change(c)})))
    assert message in str(error.value)


def test_opcheck_and_wrapper(rng):
    c = case(rng, 4, 64, 4, 2, 16)
    torch.library.opcheck(_ops.get(OP), positional(OP, **c))
    want = run_op("cpu", OP, **c)
    skinny_qkv(*(c[n] for n in ("x", "weight", "positions", "slots", "cos_sin", "q", "k_cache", "v_cache")), bias=c["bias"],
               norm=c["norm"], eps=1e-5)
    for name, value in want.items():
        assert torch.equal(c[name], value)
