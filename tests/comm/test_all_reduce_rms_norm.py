"""all_reduce_rms_norm: the oracle, equal bits of all ranks and forms, prefetch, bad input."""

import pytest
import torch
from comm_cases import DTYPES, KERNELS, fold, gathered, virtual
from conftest import implementation, positional, run_op

EPS = 1e-5


def case(rng, world: int, rows: int, hidden: int, dtype):
    x = torch.randn(world, rows, hidden, generator=rng).to(dtype)
    residual = (3 * torch.randn(rows, hidden, generator=rng)).to(dtype)
    weight = (1 + 0.1 * torch.randn(hidden, generator=rng)).to(dtype)
    return x, residual, weight


def expected(x, residual, weight):
    """The residual bit for bit; the norm of it in float64."""
    new = (residual.float() + fold(x).float()).to(x.dtype)
    r = new.double()
    return new, r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS) * weight.double()


def tolerance(dtype) -> float:
    return {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]


def check(got, x, residual, weight):
    new, norm = expected(x, residual, weight)
    assert torch.equal(got["residual"], new.expand_as(got["residual"]))
    error = (got["out"].double() - norm).abs()
    assert (error <= tolerance(x.dtype) * (norm.abs() + 1e-3)).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_cpu(rng, world, dtype):
    for rows, hidden in [(1, 7168), (4, 100), (3, 1)]:
        x, residual, weight = case(rng, world, rows, hidden, dtype)
        out = torch.full((rows, hidden), float("nan"), dtype=dtype)
        handle = gathered(world)
        got = run_op("cpu", "all_reduce_rms_norm", x=x, residual=residual, weight=weight, out=out,
                     comm=handle.address, eps=EPS)
        check(got, x, residual, weight)
        oracle = run_op("reference", "all_reduce_rms_norm", x=x, residual=residual, weight=weight, out=out, comm=0, eps=EPS)
        near = 2 * tolerance(dtype)  # the oracle rounds a float64 sum
        assert torch.allclose(got["out"].double(), oracle["out"].double(), rtol=8 * near, atol=8 * near)


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_virtual_ranks(rng, backend, world, transport):
    for dtype in DTYPES:
        for rows, hidden in [(1, 1000), (5, 264), (3, 8)]:
            comm = virtual(backend, world, transport=transport)
            x, residual, weight = case(rng, world, rows, hidden, dtype)
            stacked = residual.expand(world, -1, -1).contiguous()
            results = []
            for limit in (0, comm.max_bytes):
                comm._handle.set_one_shot_bytes(limit)
                out = torch.full_like(x, float("nan"))
                got = run_op(backend, "all_reduce_rms_norm", x=x, residual=stacked, weight=weight, out=out,
                             comm=comm.handle, eps=EPS)
                comm.check()
                check(got, x, residual, weight)
                results.append(got["out"])
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[0][:1].expand_as(results[0]))


NO_REGISTERS = 1 << 9


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_no_choice_changes_a_bit(rng, backend, world, transport):
    """Blocks that share a row, one vector per thread or many, rows of one team or more, both forms."""
    comm = virtual(backend, world, transport=transport, blocks=4)
    for rows, hidden, dtype in [(1, 2056, torch.bfloat16), (3, 1030, torch.float32), (6, 2056, torch.float16)]:
        x, residual, weight = case(rng, world, rows, hidden, dtype)
        stacked, results = residual.expand(world, -1, -1).contiguous(), []
        for limit in (comm.max_bytes, 0):
            comm._handle.set_one_shot_bytes(limit)
            for forced in (0, 1, 2, 4, NO_REGISTERS, NO_REGISTERS | 4):
                comm._handle.set_forced(forced)
                got = run_op(backend, "all_reduce_rms_norm", x=x, residual=stacked, weight=weight, out=torch.full_like(x, float("nan")),
                             comm=comm.handle, eps=EPS)
                comm.check()
                results.append(got["out"])
                if len(results) == 1:
                    check(got, x, residual, weight)
                assert torch.equal(got["residual"], (residual.float() + fold(x).float()).to(dtype).expand_as(x)), forced
                assert torch.equal(got["out"], results[0][:1].expand_as(x)), (rows, limit, forced)


@pytest.mark.parametrize("backend", KERNELS)
def test_rows_that_do_not_fit_their_slot_when_padded(backend):
    comm = virtual(backend, 2, max_bytes=1 << 14)
    x = torch.zeros(2, 8000, 1)
    with pytest.raises(RuntimeError, match=r"x must have at most 20480 bytes per rank with its rows padded to 16 bytes; got 128000\. Fix: "):
        run_op(backend, "all_reduce_rms_norm", x=x.bfloat16(), residual=x.bfloat16(), weight=torch.ones(1).bfloat16(), out=x.bfloat16(),
               comm=comm.handle, eps=EPS)


@pytest.mark.parametrize("backend", KERNELS)
def test_one_rank_alone(rng, backend):
    """W = 1: a fused residual add and norm; nothing is stacked."""
    comm = virtual(backend, 1)
    x, residual, weight = case(rng, 1, 3, 256, torch.bfloat16)
    got = run_op(backend, "all_reduce_rms_norm", x=x[0], residual=residual, weight=weight, out=torch.zeros(3, 256).bfloat16(),
                 comm=comm.handle, eps=EPS)
    check(got, x, residual, weight)


@pytest.mark.parametrize("backend", KERNELS)
def test_prefetch_changes_nothing(rng, backend):
    comm = virtual(backend, 2)
    x, residual, weight = case(rng, 2, 2, 128, torch.bfloat16)
    big = torch.zeros(100_000)
    device = "cuda" if backend == "cuda" else "cpu"
    big = big.to(device)
    table = torch.tensor([[big.data_ptr(), 400_000], [big.data_ptr(), 1]])
    stacked = residual.expand(2, -1, -1).contiguous()
    for prefetch in (None, table):
        got = run_op(backend, "all_reduce_rms_norm", x=x, residual=stacked, weight=weight, out=torch.zeros_like(x),
                     prefetch=prefetch, comm=comm.handle, eps=EPS)
        check(got, x, residual, weight)


def test_bad_arguments():
    x, residual, weight = torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(4)
    handle = gathered(2)
    good = dict(x=x, residual=residual, weight=weight, out=residual, comm=handle.address, eps=EPS)
    for change, text in [
        (dict(x=torch.zeros(2, 12)), "all_reduce_rms_norm: x must be [world, rows, H]; got float32 [2, 12] on cpu."),
        (dict(residual=torch.zeros(3, 5)), "all_reduce_rms_norm: residual must be float32 [3, 4] on cpu; got float32 [3, 5]"),
        (dict(weight=weight.half()), "all_reduce_rms_norm: weight must be float32 [4] on cpu; got float16 [4]"),
        (dict(out=torch.zeros(4, 3)), "all_reduce_rms_norm: out must be float32 [3, 4] on cpu; got float32 [4, 3]"),
        (dict(prefetch=torch.zeros(3, 2)), "all_reduce_rms_norm: prefetch must be int64 [any, 2] on cpu; got float32 [3, 2]"),
        (dict(x=torch.zeros(2, 3, 0)), "all_reduce_rms_norm: x must have rows of at least one element"),
    ]:
        with pytest.raises(RuntimeError) as error:
            run_op("cpu", "all_reduce_rms_norm", **{**good, **change})
        assert text in str(error.value) and "Fix: " in str(error.value)


def test_arguments_that_share_memory():
    """The sum is written to out, then the residual is read: out over it would drop it."""
    handle, room = gathered(2), torch.arange(24.0)
    x, weight, a = torch.ones(2, 3, 4), torch.ones(4), room[:12].view(3, 4)
    for residual, w, out, text in [
        (a, weight, a, "out must not share memory with residual"),
        (a, weight, room[4:16].view(3, 4), "out must not share memory with residual"),
        (room[11:23].view(3, 4), weight, a, "out must not share memory with residual"),
        (a, room[12:16], room[12:].view(3, 4), "out must not share memory with weight"),
        (a, room[8:12], room[12:].view(3, 4), "residual must not share memory with weight"),
    ]:
        with pytest.raises(RuntimeError, match=f"^all_reduce_rms_norm: {text}; got tensors that overlap, .* Fix: give "):
            torch.ops.fastverify.all_reduce_rms_norm(x, residual, w, out, None, handle.address, EPS)
        assert torch.equal(room, torch.arange(24.0))
    torch.ops.fastverify.all_reduce_rms_norm(x, a, weight, room[12:].view(3, 4), None, handle.address, EPS)
    assert torch.equal(a, torch.arange(12.0).view(3, 4) + 2)


@pytest.mark.parametrize("backend", KERNELS)
def test_x_may_be_out_but_not_overlap_it(rng, backend):
    comm, device = virtual(backend, 2), "cuda" if backend == "cuda" else "cpu"
    x, residual, weight = case(rng, 2, 3, 64, torch.float32)
    op, stacked = implementation(backend, "all_reduce_rms_norm"), residual.expand(2, -1, -1).contiguous().to(device)
    room = torch.cat([x.flatten(), torch.zeros(8)]).to(device)
    for out, res, text in [(room[8:].view_as(x), stacked, "out"), (torch.zeros_like(x).to(device), room[8:].view_as(x), "residual")]:
        with pytest.raises(RuntimeError, match=f"all_reduce_rms_norm: {text} must not share memory with x; got .* Fix: "):
            op(room[:x.numel()].view_as(x), res, weight.to(device), out, None, comm.handle, EPS)
    same = x.clone().to(device)
    op(same, stacked, weight.to(device), same, None, comm.handle, EPS)
    want = run_op(backend, "all_reduce_rms_norm", x=x, residual=residual.expand(2, -1, -1).contiguous(), weight=weight, out=torch.zeros_like(x),
                  comm=comm.handle, eps=EPS)
    assert torch.equal(same.cpu(), want["out"]) and torch.equal(stacked.cpu(), want["residual"])


def test_opcheck(rng):
    x, residual, weight = case(rng, 2, 3, 8, torch.float32)
    handle = gathered(2)
    torch.library.opcheck(torch.ops.fastverify.all_reduce_rms_norm.default, positional(
        "all_reduce_rms_norm", x=x, residual=residual, weight=weight, out=torch.zeros(3, 8), comm=handle.address, eps=EPS))
