"""rope_append: float64 oracle, rotation laws, partial rotary, norms, slots, cache dtypes, bad input."""

import pytest
import torch

from cases import randint
from conftest import device_of, implementation, positional, run_op
from fastverify import _ops
from fastverify.attention.rope_append import GPTJ, NEOX

OP = "rope_append"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CACHE_DTYPES = DTYPES + [torch.float8_e4m3fn]
ULP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
SENTINEL = 9.0


def cos_sin_table(positions: int, rot: int, base: float = 10000.0) -> torch.Tensor:
    freq = base ** (-torch.arange(0, rot, 2).double() / max(rot, 1))
    angle = torch.arange(positions).double()[:, None] * freq
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def rope_case(rng, rows: int = 9, q_heads: int = 6, kv_heads: int = 2, head_dim: int = 16, rot: int = 16, page_size: int = 4,
              dtype=torch.float32, cache_dtype=None, style: int = NEOX, norm: bool = False, scales: bool = False,
              skip: float = 0.2) -> dict:
    """Keyword arguments of rope_append: random distinct slots over several pages, some rows without a slot (NaN there)."""
    pages = -(-rows // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=rng)[:rows]
    slots = torch.where(torch.rand(rows, generator=rng) < skip, -1 - randint(0, 3, rng, (rows,)), slots)
    randn = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    q, k, v = randn(rows, q_heads, head_dim), randn(rows, kv_heads, head_dim), randn(rows, kv_heads, head_dim)
    for t in (q, k, v):
        t[slots < 0] = float("nan")
    cache = lambda: torch.full((pages, page_size, kv_heads, head_dim), SENTINEL).to(cache_dtype or dtype)  # noqa: E731
    weight = lambda: (randn(head_dim) + 1).to(dtype) if norm else None  # noqa: E731
    scale = lambda: torch.rand(kv_heads, generator=rng) + 0.5 if scales else None  # noqa: E731
    return dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), positions=randint(0, 50, rng, (rows,)).to(torch.int32), slots=slots,
                cos_sin=cos_sin_table(50, rot), q_norm=weight(), k_norm=weight(), k_scale=scale(), v_scale=scale(),
                k_cache=cache(), v_cache=cache(), eps=1e-5, rotary_style=style)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Within one rounding step of the format (the oracle rounds the float64 value once)."""
    got, want = got.double(), want.double()
    same_nan = torch.equal(got.isnan(), want.isnan())
    error = (got - want).nan_to_num(0.0).abs()
    return same_nan and bool((error <= ULP[dtype] * want.nan_to_num(0.0).abs() + 2e-6).all())


def compare(backend: str, case: dict) -> dict:
    got, want = run_op(backend, OP, **case), run_op("reference", OP, **case)
    assert close(got["q"], want["q"], case["q"].dtype)
    assert close(got["k_cache"], want["k_cache"], case["k_cache"].dtype)
    assert close(got["v_cache"], want["v_cache"], case["v_cache"].dtype)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("style", [NEOX, GPTJ])
def test_equals_oracle(backend, rng, dtype, cache_dtype, style):
    for i, (d, rot) in enumerate([(16, 16), (64, 64), (128, 32), (20, 6), (8, 0)]):
        compare(backend, rope_case(rng, rows=1 + 7 * i, kv_heads=1 + i % 3, q_heads=6, head_dim=d, rot=rot, page_size=[1, 4, 17][i % 3],
                                   dtype=dtype, cache_dtype=cache_dtype, style=style, norm=i % 2 == 1, scales=i % 3 == 1))


def test_only_the_named_slots_and_rows_change(backend, rng):
    """Rows without a slot keep q and touch no cache; every other cache row keeps its bits; k and v are inputs."""
    case = rope_case(rng, rows=23, skip=0.5)
    keep = {k: case[k].clone() for k in ("k", "v")}
    got = run_op(backend, OP, **case)
    skipped = case["slots"] < 0
    assert 0 < skipped.sum() < 23
    assert got["q"][skipped].isnan().all() and got["q"][~skipped].isfinite().all()
    for name in ("k_cache", "v_cache"):
        flat = got[name].flatten(0, 1)
        written = torch.zeros(len(flat), dtype=torch.bool)
        written[case["slots"][~skipped]] = True
        assert (flat[~written] == SENTINEL).all() and (flat[written] != SENTINEL).all()
    assert torch.equal(got["v_cache"].flatten(0, 1)[case["slots"][~skipped]], case["v"][~skipped])
    for name, value in keep.items():
        assert torch.equal(case[name].nan_to_num(7.0), value.nan_to_num(7.0))


@pytest.mark.parametrize("style", [NEOX, GPTJ])
def test_rotation_laws(backend, rng, style):
    """Position 0 is the identity; lengths stay; q . k depends on the distance of their positions only."""
    case = rope_case(rng, rows=2, q_heads=2, kv_heads=2, head_dim=32, rot=32, style=style, skip=0.0)
    case["q"][:], case["k"][:] = case["q"][0].clone(), case["k"][0].clone()
    at = lambda a, b: run_op(backend, OP, **{**case, "positions": torch.tensor([a, b], dtype=torch.int32)})  # noqa: E731
    key = lambda out, row: out["k_cache"].flatten(0, 1)[case["slots"][row]]  # noqa: E731
    zero = at(0, 0)
    assert torch.equal(zero["q"], case["q"]) and torch.equal(key(zero, 1), case["k"][1])
    one, two = at(7, 3), at(44, 40)
    assert not torch.allclose(one["q"][0], case["q"][0], atol=1e-2)
    assert torch.allclose(one["q"].norm(dim=-1), case["q"].norm(dim=-1), rtol=1e-5)
    assert torch.allclose((one["q"][0] * key(one, 1)).sum(-1), (two["q"][0] * key(two, 1)).sum(-1), atol=1e-4)


def test_styles_are_the_complex_rotation(backend, rng):
    """Against complex multiplication: neox pairs (i, i + rot/2), gptj pairs (2i, 2i + 1); dims past rot pass through."""
    for style in (NEOX, GPTJ):
        case = rope_case(rng, rows=6, head_dim=24, rot=16, style=style, skip=0.0)
        got = run_op(backend, OP, **case)["q"]
        turn = torch.polar(torch.ones(()).double(), case["positions"].double()[:, None] * 10000.0 ** (-torch.arange(8).double() / 8))
        pair = lambda t: (t[..., :8], t[..., 8:16]) if style == NEOX else (t[..., 0:16:2], t[..., 1:16:2])  # noqa: E731
        want = torch.complex(*(x.double() for x in pair(case["q"]))) * turn[:, None]
        assert torch.allclose(torch.complex(*(x.double() for x in pair(got))), want, atol=2e-6)
        assert torch.equal(got[..., 16:], case["q"][..., 16:])


def test_norm_comes_before_the_rotation_and_uses_eps(backend, rng):
    case = rope_case(rng, rows=3, norm=True, skip=0.0)
    case["q"][0] = 0.0
    case["q"][1] *= 1e-4
    got = compare(backend, case)
    assert (got["q"][0] == 0).all()
    other = run_op(backend, OP, **{**case, "eps": 1.0})
    assert (other["q"][1].abs() < 1e-3).all() and not torch.allclose(other["q"][1], got["q"][1], rtol=0.5)
    none = run_op(backend, OP, **{**case, "q_norm": None})
    assert torch.equal(none["k_cache"], got["k_cache"]) and not torch.equal(none["q"], got["q"])


def test_scales_divide_before_the_cast(backend, rng):
    """Cache times scale gives K and V back; a scalar scale equals the same scale per head; None is 1."""
    case = rope_case(rng, rows=5, skip=0.0)
    plain = run_op(backend, OP, **case)
    scaled = run_op(backend, OP, **{**case, "k_scale": torch.tensor([4.0]), "v_scale": torch.tensor([0.5, 0.5])})
    slots = case["slots"]
    assert torch.equal(scaled["k_cache"].flatten(0, 1)[slots] * 4, plain["k_cache"].flatten(0, 1)[slots])
    assert torch.equal(scaled["v_cache"].flatten(0, 1)[slots] / 2, plain["v_cache"].flatten(0, 1)[slots])
    ones = run_op(backend, OP, **{**case, "k_scale": torch.ones(2), "v_scale": torch.ones(1)})
    assert torch.equal(ones["k_cache"], plain["k_cache"]) and torch.equal(ones["v_cache"], plain["v_cache"])


def test_fp8_saturates(backend, rng):
    case = rope_case(rng, rows=2, cache_dtype=torch.float8_e4m3fn, skip=0.0)
    case["v"][0], case["v"][1] = 1e6, -449.0
    got = run_op(backend, OP, **case)["v_cache"].float().flatten(0, 1)[case["slots"]]
    assert (got[0] == 448).all() and (got[1] == -448).all()


@pytest.mark.parametrize("lead", [0, 1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_one_merged_qkv_matrix(backend, rng, dtype, lead):
    """In place on the q columns; the k and v columns keep their bits; the cache is a layer view of [L, ...]. With `lead`
    columns before them nothing is aligned any more."""
    case = rope_case(rng, rows=7, dtype=dtype)
    want = run_op(backend, OP, **case)
    device = device_of(backend)
    before = torch.full((7, lead), SENTINEL, dtype=dtype)
    merged = torch.cat([before, *(case[x].flatten(1) for x in ("q", "k", "v"))], 1).to(device)
    qkv = merged[:, lead:]
    q, k, v = (qkv[:, a:b].unflatten(1, (-1, 16)) for a, b in ((0, 96), (96, 128), (128, 160)))
    layers = torch.full((2, 3, *case["k_cache"].shape), SENTINEL, device=device).to(dtype)
    implementation(backend, OP)(q, k, v, case["positions"].to(device), case["slots"].to(device), case["cos_sin"].to(device), None,
                                None, None, None, layers[0, 1], layers[1, 1], 1e-5, NEOX)
    assert torch.equal(q.cpu().nan_to_num(7.0), want["q"].nan_to_num(7.0))
    assert torch.equal(layers[0, 1].cpu(), want["k_cache"]) and torch.equal(layers[1, 1].cpu(), want["v_cache"])
    assert torch.equal(qkv[:, 96:].cpu().nan_to_num(7.0), torch.cat([case[x].flatten(1) for x in ("k", "v")], 1).nan_to_num(7.0))
    assert (layers[:, 0::2] == SENTINEL).all() and (merged[:, :lead] == SENTINEL).all()


def test_rows_and_threads_do_not_change_bits(rng):
    case = rope_case(rng, rows=200, q_heads=8, kv_heads=2, head_dim=64, rot=64, norm=True)
    want = run_op("cpu", OP, **case)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = run_op("cpu", OP, **case)
            assert all(torch.equal(got[k].nan_to_num(7.0), want[k].nan_to_num(7.0)) for k in want)
    finally:
        torch.set_num_threads(before)
    row = int((case["slots"] >= 0).nonzero()[0])
    alone = run_op("cpu", OP, **{**case, **{k: case[k][row:row + 1].contiguous() for k in ("q", "k", "v", "positions", "slots")}})
    assert torch.equal(alone["q"][0], want["q"][row])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; a NaN equals any NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.float().isnan()
    return torch.equal(nan, b.float().isnan()) and bool(((a.view(words) == b.view(words)) | nan).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_kernels_have_the_bits_of_the_cpu_op(backend, rng, dtype, cache_dtype):
    """Norm, rotation, scales and rounding, small to huge values, infinities; Triton: within one rounding step."""
    if backend == "cpu":
        pytest.skip("the CPU op is what the kernels are compared with")
    for i, (d, rot) in enumerate([(128, 128), (64, 64), (96, 32), (20, 6), (256, 64), (300, 300), (8, 0), (1, 0)]):
        case = rope_case(rng, rows=17, q_heads=3 + i, kv_heads=1 + i % 3, head_dim=d, rot=rot, page_size=[1, 16, 17][i % 3], dtype=dtype,
                         cache_dtype=cache_dtype, style=i % 2, norm=i % 3 != 2, scales=i % 2 == 0)
        size = 2.0 ** randint(-30, 14, rng, (17, 1, 1)).float()
        for name in ("q", "k", "v"):
            case[name] = (case[name].float() * size).to(dtype)
        case["v"][3], case["k"][4] = float("inf"), -float("inf")
        got, want = run_op(backend, OP, **case), run_op("cpu", OP, **case)
        for name in got:
            if backend == "triton":
                kind = want[name].dtype
                finite = want[name].float().isfinite()
                assert close(got[name].float().where(finite, 0.0), want[name].float().where(finite, 0.0), kind), name
                assert same_bits(got[name].float().where(~finite, 0.0), want[name].float().where(~finite, 0.0)), name
            else:
                assert same_bits(got[name], want[name]), (name, d, rot)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_rounding_of_every_kind_of_float(backend, rng, cache_dtype):
    """v is converted as torch does (fp8: after the clamp to 448): random bit patterns, ties, subnormals, NaN."""
    bits = torch.randint(-2**31, 2**31 - 1, (64, 2, 512), generator=rng)
    half = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.float16).float().view(64, 2, 512)
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(1.0).repeat(256).view(64, 2, 512)
    ties = (e4m3 + e4m3.roll(1, -1)) / 2
    for values in (bits.int().view(torch.float32), half, half * 2.0**-13, half * (1 + 2.0**-11), ties, ties.nextafter(e4m3)):
        case = rope_case(rng, rows=64, head_dim=512, rot=0, cache_dtype=cache_dtype, skip=0.0)
        got = run_op(backend, OP, **{**case, "v": values})["v_cache"].flatten(0, 1)[case["slots"]]
        want = (values.clamp(-448, 448) if cache_dtype == torch.float8_e4m3fn else values).to(cache_dtype)
        assert same_bits(got, want)


def test_rows_out_of_range_are_left_alone_on_a_gpu(backend, rng):
    """The CPU op raises; a kernel cannot, so it skips the row and touches nothing else."""
    if backend == "cpu":
        pytest.skip("the CPU op raises")
    case = rope_case(rng, rows=6, skip=0.0)
    case["slots"][1], case["slots"][2] = case["k_cache"].shape[0] * 4, 2**40
    case["positions"][3], case["positions"][4] = 50, -7
    got = run_op(backend, OP, **case)
    good = run_op("cpu", OP, **{**case, "slots": torch.where(torch.tensor([0, 1, 1, 1, 1, 0]) > 0, -1, case["slots"])})
    assert torch.equal(got["q"][1:5], case["q"][1:5])
    for name in got:
        assert close(got[name], good[name], case["q"].dtype), name


def test_no_rows(backend, rng):
    case = rope_case(rng, rows=4)
    empty = run_op(backend, OP, **{**case, **{k: case[k][:0] for k in ("q", "k", "v", "positions", "slots")}})
    assert (empty["k_cache"] == SENTINEL).all()


@pytest.mark.parametrize("q_heads,kv_heads,rot", [(0, 2, 16), (6, 0, 16), (0, 0, 16), (6, 2, 0)])
def test_no_heads_or_no_rotation(backend, rng, q_heads, kv_heads, rot):
    compare(backend, rope_case(rng, q_heads=q_heads, kv_heads=kv_heads, rot=rot))


def base_case() -> dict:
    return rope_case(torch.Generator().manual_seed(0), rows=5, skip=0.0)


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_ARGUMENTS = [
    (dict(q=torch.zeros(5, 6, 1025)), r"head_dim must be in \[1, 1024\]; got float32 .5, 6, 1025. on cpu. Fix: "),
    (dict(q=torch.zeros(5, 6, 16).double()), r"q must be float32\|bfloat16\|float16 \[any, any, any\] on cpu; got float64 \[5, 6, 16\] on cpu. Fix: cast"),
    (dict(q=torch.zeros(5, 96)), "q must be .* got float32 .5, 96. on cpu. Fix: pass that shape"),
    (dict(q=torch.zeros(5, 16, 6).transpose(1, 2)), "q must be dense in its last dimension"),
    (dict(k=torch.zeros(5, 2, 16).half()), "k must be float32 .5, any, 16. on cpu; got float16"),
    (dict(k=torch.zeros(4, 2, 16)), "k must be float32 .5, any, 16. on cpu; got float32 .4, 2, 16."),
    (dict(v=torch.zeros(5, 3, 16)), "v must be float32 .5, 2, 16. on cpu; got float32 .5, 3, 16."),
    (dict(positions=torch.zeros(5, dtype=torch.int64)), "positions must be int32 .5. on cpu; got int64"),
    (dict(slots=i32(0, 1, 2, 3, 4)), "slots must be int64 .5. on cpu; got int32"),
    (dict(slots=torch.tensor([0, 1, 2, 16, 4])), "slots must be below 16 .pages . page_size.; got 16 in row 3. Fix: "),
    (dict(positions=i32(0, 1, 50, 3, 4)), "positions must be in .0, 50. .rows of cos_sin.; got 50 in row 2. Fix: "),
    (dict(positions=i32(0, 1, -1, 3, 4)), "positions must be in .0, 50. .*; got -1 in row 2"),
    (dict(cos_sin=torch.zeros(50, 15)), "cos_sin must have an even width of at most 16; got float32 .50, 15. on cpu. Fix: "),
    (dict(cos_sin=torch.zeros(50, 18)), "cos_sin must have an even width of at most 16; got float32 .50, 18."),
    (dict(cos_sin=torch.zeros(50, 16).half()), "cos_sin must be float32"),
    (dict(q_norm=torch.ones(15)), "q_norm must be .* .16. on cpu; got float32 .15."),
    (dict(k_norm=torch.ones(16).double()), "k_norm must be .* got float64"),
    (dict(k_scale=torch.ones(3)), "k_scale must be float32 .2. on cpu; got float32 .3."),
    (dict(v_scale=torch.ones(1).half()), "v_scale must be float32 .1. on cpu; got float16"),
    (dict(k_cache=torch.zeros(4, 4, 3, 16)), "k_cache must be .* .any, any, 2, 16. on cpu; got float32 .4, 4, 3, 16."),
    (dict(k_cache=torch.zeros(4, 4, 2, 16, dtype=torch.int8)), "k_cache must be .* got int8"),
    (dict(v_cache=torch.zeros(4, 4, 2, 16).half()), "v_cache must be float32 .4, 4, 2, 16. on cpu; got float16"),
    (dict(v_cache=torch.zeros(3, 4, 2, 16)), "v_cache must be float32 .4, 4, 2, 16. on cpu; got float32 .3, 4, 2, 16."),
    (dict(rotary_style=2), "rotary_style must be 0 .neox. or 1 .gptj.; got 2. Fix: "),
    (dict(eps=-1e-6), "eps must be >= 0; got -1e-06. Fix: "),
    (dict(k_cache=torch.zeros(1, 4, 2, 16).expand(4, 4, 2, 16)), "k_cache must have memory of its own for every element; got float32 .4, 4, 2, 16. on cpu "
                                                                 "with strides that overlap. Fix: "),
    (dict(v_cache=torch.zeros(512).as_strided((4, 4, 2, 16), (112, 32, 16, 1))), "v_cache must have memory of its own for every element"),
    (dict(q=torch.zeros(1, 6, 16).expand(5, 6, 16)), "q must have memory of its own for every element"),
]


@pytest.mark.parametrize("over,message", BAD_ARGUMENTS)
def test_bad_arguments_raise_before_anything_is_written(over, message):
    case = {**base_case(), **over}
    before = {k: case[k].clone() for k in ("q", "k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match="rope_append: " + message):
        _ops.get(OP)(*positional(OP, **case))
    assert all(torch.equal(case[k], v) for k, v in before.items())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_opcheck(rng, norm, cache_dtype):
    case = rope_case(rng, norm=norm, scales=norm, cache_dtype=cache_dtype)
    for name in ("q", "k", "v"):
        case[name].nan_to_num_(0.0)  # opcheck compares inputs with equal, which NaN is not
    torch.library.opcheck(_ops.get(OP), positional(OP, **case))
