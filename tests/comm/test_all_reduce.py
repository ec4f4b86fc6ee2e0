"""all_reduce against the oracle: gathered on the CPU, virtual ranks through the kernels (emulated, or on a GPU)."""

import pytest
import torch
from comm_cases import DTYPES, KERNELS, fold, gathered, virtual
from conftest import implementation, positional, run_op

from fastverify import CommunicatorError, all_reduce
from fastverify.comm.topology import _control

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_cpu_folds_in_rank_order(rng, world, dtype):
    handle = gathered(world)
    for shape in [(1,), (3, 7168), (5, 1023), (0,)]:
        x = torch.randn(world, *shape, generator=rng).to(dtype)
        out = torch.full(shape, float("nan"), dtype=dtype)
        got = run_op("cpu", "all_reduce", x=x, out=out, comm=handle.address)["out"]
        assert torch.equal(got, fold(x))
        want = run_op("reference", "all_reduce", x=x, out=out, comm=0)["out"]
        assert torch.allclose(got.double(), want.double(), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("backend", KERNELS)
def test_virtual_ranks_agree_bit_for_bit(rng, backend, world, transport):
    """Both forms, all dtypes, sizes around every internal boundary, back to back."""
    comm = virtual(backend, world, transport=transport)
    sizes = [1, 7, 8, 9, 64 * world - 1, 64 * world, 64 * world + 1, 2048 + 8 * world]
    for dtype in DTYPES:
        for n in sizes:
            x = torch.randn(world, n, generator=rng).to(dtype)
            want = fold(x).expand(world, n)
            for limit in (0, comm.max_bytes):  # two-shot, one-shot
                comm._handle.set_one_shot_bytes(limit)
                out = torch.full_like(x, float("nan"))
                got = run_op(backend, "all_reduce", x=x, out=out, comm=comm.handle)["out"]
                comm.check()
                assert torch.equal(got, want), (dtype, n, limit)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_internal_boundaries_and_float64(rng, backend, world):
    """16 bytes around every size at which blocks, threads, rounds or slices change; the error against float64."""
    comm = virtual(backend, world, blocks=2, max_bytes=1 << 15)
    # 1024 vectors: larger blocks; 2 blocks of 256 and 512 threads: full; twice that: a second round; the whole slot
    edges = [16 * v for v in (128, 256, 512, 1024, 2048, 8 * world, 256 * world)] + [comm.max_bytes]
    for dtype in DTYPES:
        unit = torch.finfo(dtype).eps / 2
        for size in {e + d for e in edges for d in (-16, 0, 16)}:
            if not 0 < size <= comm.max_bytes:
                continue
            x = torch.randn(world, size // dtype.itemsize, generator=rng).to(dtype)
            exact, most = x.double().sum(0), x.double().abs().sum(0)
            for limit in (0, comm.max_bytes):
                comm._handle.set_one_shot_bytes(limit)
                got = run_op(backend, "all_reduce", x=x, out=torch.full_like(x, float("nan")), comm=comm.handle)["out"]
                comm.check()
                assert torch.equal(got, fold(x).expand_as(x)), (dtype, size, limit)
                error = (got[0].double().cpu() - exact).abs()
                assert (error <= unit * exact.abs() + world * 2.0**-24 * most * (1 + unit) + 1e-7).all(), (dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_any_payload_travels(rng, backend, dtype):
    """NaN of every code (the word that means "empty" too), infinities, denormals and both zeros."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    x = torch.randn(3, 4096, generator=rng).to(dtype)
    special = torch.tensor([-1, 0, 1, -(1 << (31 if bits == torch.int32 else 15))], dtype=bits)
    flat = x.view(bits)
    flat[torch.rand(x.shape, generator=rng) < 0.3] = -1
    where = torch.rand(x.shape, generator=rng) < 0.3
    flat[where] = special[torch.randint(0, 4, (int(where.sum()),), generator=rng)]
    x[0, :8], x[1, 8:16] = float("inf"), float("-inf")
    want = fold(x)
    comm = virtual(backend, 3)
    for limit in (0, comm.max_bytes):
        comm._handle.set_one_shot_bytes(limit)
        got = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
        assert torch.equal(got.isnan(), want.isnan().expand_as(got))
        keep = ~want.isnan()
        assert torch.equal(got[:, keep].view(bits), want[keep].view(bits).expand(3, -1)), "signs of zeros included"


@pytest.mark.parametrize("epoch", [1, (1 << 31) - 3, (1 << 32) - 4])
@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("backend", KERNELS)
def test_epochs_wrap(rng, backend, transport, epoch):
    comm = virtual(backend, 3, transport=transport, epoch=epoch)
    for call in range(9):
        x = torch.randn(3, 100 + 50 * call, generator=rng)
        comm._handle.set_one_shot_bytes(0 if call % 2 else comm.max_bytes)
        got = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
        assert torch.equal(got, fold(x).expand_as(x))
    after = (epoch + 9) % (1 << 32) + (epoch + 9 >= 1 << 32)
    assert int(comm.state[0, 0]) & 0xFFFFFFFF == after, "one step a call, never 0"


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_traffic_is_what_the_form_says(rng, backend, world):
    """One-shot: (W - 1) S bytes out of every rank; two-shot: 2 (W - 1) / W S, that is 1.75 S at W = 8."""
    comm = virtual(backend, world, hooks=True)
    n = 64 * world
    x = torch.randn(world, n, generator=rng)
    size = 4 * n
    comm._handle.set_one_shot_bytes(comm.max_bytes)
    run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)
    sent = comm.hooks[:, 8:8 + world].clone()
    assert torch.equal(sent.cpu(), size * (1 - torch.eye(world, dtype=torch.int32)))
    comm._handle.set_one_shot_bytes(0)
    run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)
    sent = comm.hooks[:, 8:8 + world] - sent
    assert torch.equal(sent.cpu(), 2 * size // world * (1 - torch.eye(world, dtype=torch.int32)))
    assert (sent.sum(1) * world == 2 * (world - 1) * size).all()


STALL, DROP, DUPLICATE, TORN = 1, 2, 3, 4


@pytest.mark.parametrize("limit", [0, 1 << 16])
@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("backend", KERNELS)
def test_slow_torn_and_repeated_words_do_no_harm(rng, backend, transport, limit):
    for fault in (STALL, TORN, DUPLICATE):
        comm = virtual(backend, 3, transport=transport, hooks=True, one_shot_bytes=limit)
        comm.hooks[1, :4] = torch.tensor([fault, 2, 3, 200_000])
        for _ in range(4):
            x = torch.randn(3, 700, generator=rng)
            got = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
            comm.check()
            if fault != DUPLICATE or transport == "host":
                assert torch.equal(got, fold(x).expand_as(x)), fault


@pytest.mark.parametrize("limit", [0, 1 << 16])
@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_lost_word_ends_in_an_error_that_names_the_rank(rng, backend, transport, limit):
    comm = virtual(backend, 3, transport=transport, hooks=True, one_shot_bytes=limit, deadline=0.3)
    comm.hooks[1, :3] = torch.tensor([DROP, 2, 3])
    x = torch.randn(3, 700, generator=rng)
    got = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
    assert got[2].isnan().any(), "what never came is NaN"
    with pytest.raises(CommunicatorError, match=r"rank\(s\) \[1\] did not come \(seen by rank 2\)"):
        comm.check()
    again = run_op(backend, "all_reduce", x=x, out=torch.zeros_like(x), comm=comm.handle)["out"]
    assert again[2].isnan().all(), "a lost communicator gives NaN at once"


@pytest.mark.parametrize("backend", KERNELS)
def test_public_function_in_place(rng, backend):
    if backend == "emulated":
        pytest.skip("the public function calls the CUDA op; the emulator is called through run_op")
    comm = virtual(backend, 4)
    x = torch.randn(4, 500, generator=rng).cuda()
    want = fold(x.cpu()).expand_as(x)
    assert all_reduce(x, comm, out=x) is x and torch.equal(x.cpu(), want)


@pytest.mark.parametrize("backend", KERNELS)
def test_out_over_a_part_of_x(backend):
    comm, room = virtual(backend, 2), torch.zeros(2 * 64 + 8, device="cuda" if backend == "cuda" else "cpu")
    with pytest.raises(RuntimeError, match="all_reduce: out must not share memory with x; got tensors that overlap.* Fix: "):
        implementation(backend, "all_reduce")(room[:128].view(2, 64), room[8:].view(2, 64), comm.handle)


def test_bad_arguments():
    handle = gathered(2, max_bytes=64)
    x, out = torch.zeros(2, 4), torch.zeros(4)
    call = torch.ops.fastverify.all_reduce
    for args, text in [
        ((x, out, 0), "all_reduce: comm must be the handle of a living Communicator; got 0."),
        ((x.int(), out, handle.address), "all_reduce: x must be float32|float16|bfloat16; got int32 [2, 4] on cpu."),
        ((torch.zeros(3, 4), out, handle.address), "all_reduce: x must be [world = 2, ...] for a virtual communicator; got float32 [3, 4]"),
        ((torch.zeros(2, 17), torch.zeros(17), handle.address), "all_reduce: x must have at most 64 bytes per rank; got 68."),
        ((x.t(), out, handle.address), "all_reduce: x must be contiguous; got float32 [4, 2] on cpu"),
        ((x, torch.zeros(5), handle.address), "all_reduce: out must be contiguous with the 4 elements of one rank, float32 on cpu"),
        ((x, out.half(), handle.address), "all_reduce: out must be contiguous with the 4 elements of one rank, float32 on cpu"),
    ]:
        with pytest.raises(RuntimeError) as error:
            call(*args)
        assert text in str(error.value) and "Fix: " in str(error.value)
    handle.close()
    with pytest.raises(RuntimeError, match="must be the handle of a Communicator that is open; got one that was closed. Fix: make a new one."):
        call(x, out, handle.address)


@pytest.mark.parametrize("kwargs, text", [
    (dict(world=9), "world must be 1..8; got 9"), (dict(max_bytes=0), "max_bytes must be in 1..2^30; got 0"),
    (dict(blocks=0), "blocks must be in 1..256; got 0"), (dict(transport="ib"), "transport must be gathered|peer|host|nccl; got ib"),
    (dict(transport="peer"), "one set of addresses must be given per local rank; got 0"),
])
def test_bad_handles(kwargs, text):
    arguments = dict(world=2, rank=0, local_ranks=1, transport="gathered", device=-1, blocks=1, max_bytes=64,
                     one_shot_bytes=0, deadline_ns=0, ranks=[])
    with pytest.raises(ValueError) as error:
        _control().Handle(**{**arguments, **kwargs})
    assert text in str(error.value)


def test_opcheck(rng):
    handle = gathered(2)
    x = torch.randn(2, 12, generator=rng)
    torch.library.opcheck(torch.ops.fastverify.all_reduce.default,
                          positional("all_reduce", x=x, out=torch.zeros(12), comm=handle.address))
