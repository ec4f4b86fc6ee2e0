"""all_reduce_columns: bits of all_reduce, pieces that come late, bad input."""

import pytest
import torch
from comm_cases import DTYPES, KERNELS, fold, gathered, virtual
from conftest import implementation, positional, run_op

from fastverify import all_reduce_columns


def expected(x, out, add):
    """x [world, pieces, rows, width]."""
    total = fold(x).transpose(0, 1).flatten(1)
    return (total.float() + out.float()).to(x.dtype) if add else total


def case(rng, world, pieces, rows, width, dtype):
    return torch.randn(world, pieces, rows, width, generator=rng).to(dtype), torch.randn(rows, pieces * width, generator=rng).to(dtype)


SHAPES = [(1, 1, 8), (2, 3, 16), (4, 5, 1032), (3, 2, 2056)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_cpu(rng, world, dtype, add):
    handle = gathered(world)
    for shape in SHAPES:
        x, out = case(rng, world, *shape, dtype)
        got = run_op("cpu", "all_reduce_columns", x=x, out=out if add else torch.full_like(out, float("nan")), ready=None, add=add,
                     comm=handle.address)["out"]
        assert torch.equal(got, expected(x, out, add))
        want = run_op("reference", "all_reduce_columns", x=x, out=out, ready=None, add=add, comm=0)["out"]
        near = 1e-5 if dtype == torch.float32 else 3e-2
        assert torch.allclose(got.double(), want.double(), rtol=near, atol=near)


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_virtual_ranks(rng, backend, world, transport):
    for dtype in DTYPES:
        for shape in SHAPES:
            comm = virtual(backend, world, transport=transport, max_bytes=1 << 17)
            for add in (False, True):
                x, out = case(rng, world, *shape, dtype)
                stacked = out.expand(world, *out.shape).contiguous()
                ready = torch.ones(shape[0], dtype=torch.int32) * (1 + add)  # the numbers of the two calls
                got = run_op(backend, "all_reduce_columns", x=x, out=stacked, ready=ready, add=add, comm=comm.handle)["out"]
                comm.check()
                assert torch.equal(got, expected(x, out, add).expand_as(got)), (dtype, shape, add)


@pytest.mark.parametrize("backend", KERNELS)
def test_faults_do_no_harm(rng, backend):
    stall, duplicate, torn = 1, 3, 4
    for fault in (stall, torn, duplicate):
        comm = virtual(backend, 3, hooks=True)
        comm.hooks[1, :4] = torch.tensor([fault, 2, 3, 200_000])
        for _ in range(3):
            x, out = case(rng, 3, 2, 4, 104, torch.float32)
            got = run_op(backend, "all_reduce_columns", x=x, out=out.expand(3, -1, -1).contiguous(), ready=None, add=False,
                         comm=comm.handle)["out"]
            comm.check()
            if fault != duplicate:
                assert torch.equal(got, expected(x, out, False).expand_as(got)), fault


@pytest.mark.parametrize("backend", KERNELS)
def test_a_piece_that_never_comes_ends_at_the_deadline(rng, backend):
    comm = virtual(backend, 2, deadline=0.05)
    x, out = case(rng, 2, 2, 2, 64, torch.float32)
    got = run_op(backend, "all_reduce_columns", x=x, out=out.expand(2, -1, -1).contiguous(), ready=torch.tensor([1, 7], dtype=torch.int32),
                 add=False, comm=comm.handle)["out"]
    assert got[:, :, 64:].isnan().all()
    with pytest.raises(RuntimeError, match="did not come|gave up first"):
        comm.check()


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_traffic(rng, backend, world):
    comm = virtual(backend, world, hooks=True)
    x, out = case(rng, world, 2, 3, 64, torch.float32)
    run_op(backend, "all_reduce_columns", x=x, out=out.expand(world, -1, -1).contiguous(), ready=None, add=False, comm=comm.handle)
    assert torch.equal(comm.hooks[:, 8:8 + world].cpu(), x[0].nbytes * (1 - torch.eye(world, dtype=torch.int32))), "W - 1 times S"


def test_the_function_says_what_is_missing():
    comm = virtual("emulated", 2)
    with pytest.raises(RuntimeError, match=r"all_reduce_columns: x must be \[world, pieces, rows, width\]; got float32 \[4, 8\] on cpu. Fix: "):
        all_reduce_columns(torch.zeros(4, 8), comm)
    with pytest.raises(RuntimeError, match="all_reduce_columns: out must be given with add=True, which adds to it; got None. Fix: "):
        all_reduce_columns(torch.zeros(2, 3, 4, 8), comm, add=True)


@pytest.mark.parametrize("backend", KERNELS)
def test_out_over_x(backend):
    comm, x = virtual(backend, 2), torch.zeros(2, 1, 4, 8, device="cuda" if backend == "cuda" else "cpu")
    with pytest.raises(RuntimeError, match="all_reduce_columns: out must not share memory with x; got tensors that overlap.* Fix: "):
        implementation(backend, "all_reduce_columns")(x, x.view(2, 4, 8), None, False, comm.handle)


def test_bad_arguments():
    handle = gathered(2)
    good = dict(x=torch.zeros(2, 3, 4, 8), out=torch.zeros(4, 24), ready=None, add=False, comm=handle.address)
    for change, message in [
        (dict(x=torch.zeros(2, 4, 8)), "all_reduce_columns: x must be [world, pieces, rows, width]; got float32 [2, 4, 8]"),
        (dict(x=torch.zeros(2, 3, 4, 6)), "all_reduce_columns: x must have rows of whole 16-byte vectors, aligned to 16 bytes; got "),
        (dict(x=torch.zeros(2, 3, 4, 8).int()), "all_reduce_columns: x must be float32|float16|bfloat16; got int32"),
        (dict(out=torch.zeros(3, 4, 8)), "all_reduce_columns: out must be float32 [4, 24] on cpu"),
        (dict(ready=torch.zeros(2, dtype=torch.int32)), "all_reduce_columns: ready must be int32 [3] on cpu"),
        (dict(comm=0), "all_reduce_columns: comm must be the handle of a living Communicator; got 0."),
    ]:
        with pytest.raises(RuntimeError) as error:
            run_op("cpu", "all_reduce_columns", **{**good, **change})
        assert message in str(error.value), str(error.value)[:300]


def test_opcheck():
    handle = gathered(2)
    torch.library.opcheck(torch.ops.fastverify.all_reduce_columns.default, positional(
        "all_reduce_columns", x=torch.zeros(2, 3, 4, 8), out=torch.zeros(4, 24), ready=None, add=True, comm=handle.address))
