"""all_gather_small: every bit pattern, any dtype, every rank, in order."""

import pytest
import torch
from comm_cases import KERNELS, gathered, virtual
from conftest import implementation, positional, run_op


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16, torch.float32])
def test_cpu(dtype):
    x = torch.arange(24).reshape(3, 2, 4).to(dtype)
    handle = gathered(3)
    got = run_op("cpu", "all_gather_small", x=x, out=torch.zeros_like(x), comm=handle.address)["out"]
    assert torch.equal(got, x)
    assert torch.equal(run_op("reference", "all_gather_small", x=x, out=torch.zeros_like(x), comm=0)["out"], x)


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_virtual_ranks(rng, backend, world, transport):
    comm = virtual(backend, world, transport=transport)
    for n in (1, 15, 16, 17, 1000):
        for _ in range(4):  # the slots come round again
            x = torch.randint(0, 256, (world, n), generator=rng).to(torch.uint8)
            x[torch.rand(x.shape, generator=rng) < 0.5] = 255  # the other ops' "empty" is data here
            got = run_op(backend, "all_gather_small", x=x, out=torch.zeros(world, world, n, dtype=torch.uint8),
                         comm=comm.handle)["out"]
            assert torch.equal(got, x.expand(world, world, n))
    keys = torch.randint(-(2**62), 2**62, (world, 8, 1), generator=rng)
    got = run_op(backend, "all_gather_small", x=keys, out=torch.zeros(world, world, 8, 1, dtype=torch.int64), comm=comm.handle)["out"]
    assert torch.equal(got, keys.expand(world, world, 8, 1))
    comm.check()


@pytest.mark.parametrize("backend", KERNELS)
def test_mixed_with_all_reduce(rng, backend):
    """Gathers and sums share the epoch but not the slots."""
    comm = virtual(backend, 3)
    for call in range(12):
        if call % 3 == 1:
            x = torch.randint(-100, 100, (3, 50), generator=rng)
            out = torch.zeros(3, 3, 50, dtype=torch.int64)
            assert torch.equal(run_op(backend, "all_gather_small", x=x, out=out, comm=comm.handle)["out"], x.expand(3, 3, 50))
        else:
            comm._handle.set_one_shot_bytes(0 if call % 2 else comm.max_bytes)
            x = torch.randint(-9, 9, (3, 300), generator=rng).float()
            got = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
            assert torch.equal(got, x.sum(0).expand_as(x))


@pytest.mark.parametrize("backend", KERNELS)
def test_out_over_x(rng, backend):
    comm = virtual(backend, 2)
    both = torch.zeros(2 * 2 * 8, device="cuda" if backend == "cuda" else "cpu")
    with pytest.raises(RuntimeError, match="all_gather_small: out must not share memory with x; got tensors that overlap.* Fix: "):
        implementation(backend, "all_gather_small")(both[:16].view(2, 8), both.view(2, 2, 8), comm.handle)


def test_bad_arguments():
    handle = gathered(2)
    for x, out, text in [
        (torch.zeros(3, 2), torch.zeros(3, 2), "all_gather_small: x must be [world = 2, ...] for a virtual communicator"),
        (torch.zeros(2, 20000), torch.zeros(2, 20000), "all_gather_small: x must have at most 65536 bytes per rank; got 80000."),
        (torch.zeros(2, 2), torch.zeros(2, 3), "all_gather_small: out must be float32 of 16 bytes like x; got float32 [2, 3]"),
        (torch.zeros(2, 2), torch.zeros(2, 2).int(), "all_gather_small: out must be float32 of 16 bytes like x; got int32 [2, 2]"),
        (torch.zeros(2, 2).t(), torch.zeros(2, 2), "all_gather_small: x and out must be contiguous"),
    ]:
        with pytest.raises(RuntimeError) as error:
            run_op("cpu", "all_gather_small", x=x, out=out, comm=handle.address)
        assert text in str(error.value) and "Fix: " in str(error.value)


def test_opcheck():
    handle = gathered(2)
    torch.library.opcheck(torch.ops.fastverify.all_gather_small.default,
                          positional("all_gather_small", x=torch.zeros(2, 3), out=torch.zeros(2, 3), comm=handle.address))
