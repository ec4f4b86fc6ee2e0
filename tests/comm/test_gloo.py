"""The CPU back end: the same calls over gloo, 2 and 3 processes; bad groups; a rank that leaves."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comm_cases import fold
from ports import free_port

from fastverify import (Communicator, CommunicatorError, all_gather_small, all_reduce, all_reduce_columns, all_reduce_rms_norm,
                        linear_all_reduce)


BYTES = [torch.bool, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float64, torch.complex64,
         torch.float8_e4m3fn, torch.float8_e5m2]


def _join(rank: int, world: int, port: int, seconds: float = 60) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))


def _calls(rank: int, world: int, port: int) -> None:
    _join(rank, world, port)
    with Communicator(max_bytes=1 << 16) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            parts = [torch.randn(5, 300, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
            x = parts[rank].clone()
            want = fold(torch.stack(parts))
            assert torch.equal(all_reduce(x, comm), want)
            assert all_reduce(x, comm, out=x) is x and torch.equal(x, want)
            assert torch.equal(all_gather_small(parts[rank], comm), torch.stack(parts))
            residual, weight = torch.ones(5, 300, dtype=dtype), torch.full((300,), 2.0, dtype=dtype)
            out = all_reduce_rms_norm(parts[rank], residual, weight, comm, eps=1e-5)
            r = (1 + want.float()).to(dtype)
            assert torch.equal(residual, r)
            exact = r.double() * torch.rsqrt(r.double().square().mean(-1, keepdim=True) + 1e-5) * 2
            assert torch.allclose(out.double(), exact, rtol=2.0**-7 if dtype != torch.float32 else 1e-6, atol=1e-6)
        a, w = torch.randn(20, 8, generator=torch.Generator().manual_seed(rank)), torch.randn(16, 8, generator=torch.Generator().manual_seed(9 + rank))
        whole = linear_all_reduce(a, w, comm, split=("rows", 1))
        assert torch.allclose(linear_all_reduce(a, w, comm, split=("rows", 3)), whole, rtol=1e-5, atol=1e-5)
        assert torch.allclose(linear_all_reduce(a, w, comm, split=("columns", 4)), whole, rtol=1e-5, atol=1e-5)
        assert torch.allclose(linear_all_reduce(a, w, comm, split=("resident", 4)), whole, rtol=1e-5, atol=1e-5)
        residual, bias = torch.ones_like(whole), torch.arange(16.0) if rank == 0 else None
        summed = linear_all_reduce(a, w, comm, bias, split=("columns", 2), residual=residual)
        assert summed is residual and torch.allclose(residual, whole + 1 + torch.arange(16.0), rtol=1e-5, atol=1e-5)
        residual.fill_(1)
        summed = linear_all_reduce(a, w, comm, bias, split=("resident", 2), residual=residual)
        assert summed is residual and torch.allclose(residual, whole + 1 + torch.arange(16.0), rtol=1e-5, atol=1e-5)
        b, v = torch.randn(9, 8, generator=torch.Generator().manual_seed(rank)), torch.randn(1024, 8, generator=torch.Generator().manual_seed(rank))
        assert torch.allclose(linear_all_reduce(b, v, comm, split=("growing", 3)), linear_all_reduce(b, v, comm, split=("rows", 1)), rtol=1e-5, atol=1e-5)
        assert comm.splits == {} and torch.equal(linear_all_reduce(a, w, comm), whole), "few rows: one piece"
        comm.splits = {"16,8,float32": [(1, "rows", 1), (20, "columns", 2)]}
        assert torch.equal(linear_all_reduce(a, w, comm), linear_all_reduce(a, w, comm, split=("columns", 2)))
        comm.splits = {}
        with pytest.raises(ValueError, match="split must be .* got .'columns', 3. for 16 columns. Fix: "):
            linear_all_reduce(a, w, comm, split=("columns", 3))
        everyone = [torch.empty_like(whole) for _ in range(world)]
        dist.all_gather(everyone, whole)
        assert all(torch.equal(e, whole) for e in everyone)
        words = torch.arange(100 * 256).view(100, 256) + rank  # 2 KiB a row: more than one small gather
        assert torch.equal(comm.gather_rows(words), torch.stack([words - rank + r for r in range(world)]))
        comm.check()
        for dtype in BYTES:  # gloo itself knows few of them
            for shape in ((3, 2), (), (0,), (5,)):
                parts = [(torch.arange(torch.Size(shape).numel()).reshape(shape) + r).float().to(dtype) for r in range(world)]
                got = all_gather_small(parts[rank], comm)
                assert got.dtype is dtype and got.shape == (world, *shape)
                assert torch.equal(got.flatten().view(torch.uint8), torch.stack(parts).flatten().view(torch.uint8)), dtype
    with Communicator(max_bytes=1 << 16, debug=True) as comm:
        assert float(all_reduce(torch.ones(3), comm)[0]) == world
        calls = [lambda: all_reduce(torch.ones(4), comm), lambda: all_gather_small(torch.ones(4), comm), lambda: all_reduce(torch.ones(5), comm)]
        for which in ((0, 1, 0), (2, 0, 0)):
            with pytest.raises(CommunicatorError, match="all ranks must make the same call; got rank 0: .*float32.*; rank 1: .* Fix: ") as told:
                calls[which[rank]]()
            everyone = [None] * world
            dist.all_gather_object(everyone, str(told.value).split(": ", 1)[1])
            assert len(set(everyone)) == 1, "every rank is told the same"
    with pytest.raises(RuntimeError, match="must be the handle of a Communicator"):
        all_reduce(torch.ones(3), comm)
    if rank == 0:  # alone: nothing is gathered first
        for call in (lambda: all_reduce(torch.ones(3), comm), lambda: all_gather_small(torch.ones(3), comm),
                     lambda: all_reduce_rms_norm(torch.ones(1, 3), torch.ones(1, 3), torch.ones(3), comm),
                     lambda: all_reduce_columns(torch.ones(1, 1, 4), comm)):
            with pytest.raises(RuntimeError, match="comm must be the handle of a Communicator that is open; got one that was closed. Fix: make a new one."):
                call()
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads abort a process that exits with them running


@pytest.mark.parametrize("world", [2, 3])
def test_calls(world):
    mp.spawn(_calls, (world, free_port()), nprocs=world)


def _leave(rank: int, world: int, port: int) -> None:
    _join(rank, world, port, seconds=5)
    comm = Communicator()
    all_reduce(torch.ones(3), comm)
    if rank == 1:
        os._exit(0)
    with pytest.raises(CommunicatorError, match="all 2 ranks must take part; got .* Fix: "):
        all_reduce(torch.ones(3), comm)
    os._exit(0)


def test_a_rank_that_leaves_is_an_error():
    mp.spawn(_leave, (2, free_port()), nprocs=2)


def _alone(rank: int, port: int) -> None:
    _join(rank, 1, port)
    for kwargs, text in [(dict(device="meta"), "Communicator: device must be cpu|cuda; got meta. Fix: "),
                         (dict(blocks=0), "Communicator: blocks must be in 1..256; got 0. Fix: leave it out.")]:
        with pytest.raises(ValueError) as error:
            Communicator(**kwargs)
        assert text in str(error.value)
    with Communicator() as comm:
        with pytest.raises(ValueError, match=r"linear_all_reduce: weight must have at least one row; got \[0, 8\]. Fix: "):
            linear_all_reduce(torch.ones(2, 8), torch.ones(0, 8), comm)
        for x, text in [(torch.ones(4, 8), r"x must be \[pieces, rows, width\]; got float32 \[4, 8\] on cpu"),
                        (torch.ones(1, 1, 4), None)]:
            with pytest.raises(RuntimeError, match=f"all_reduce_columns: {text or 'out must be given with add=True, which adds to it; got None'}. Fix: "):
                all_reduce_columns(x, comm, add=True)
        with pytest.raises(RuntimeError, match="x must be on cpu, the device of the communicator; got float32 .3. on another device. Fix: "):
            all_reduce(torch.ones(3, device="meta"), comm)
        residual = torch.ones(2, 4)
        with pytest.raises(RuntimeError, match="all_reduce_rms_norm: out must not share memory with residual; got tensors that overlap"):
            all_reduce_rms_norm(torch.ones(2, 4), residual, torch.ones(4), comm, out=residual)
        assert residual.eq(1).all()
        x = torch.ones(2, 4)
        assert all_reduce_rms_norm(x, residual, torch.ones(4), comm, out=x) is x and residual.eq(2).all(), "x was copied"
        original = dist.all_gather
        dist.all_gather = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("No backend type associated with device type cpu"))
        with pytest.raises(CommunicatorError, match="the process group must gather CPU tensors; got No backend type associated with device type cpu. Fix: "):
            all_reduce(torch.ones(3), comm)
        dist.all_gather = original
    dist.destroy_process_group()


def test_what_is_refused_in_words():
    mp.spawn(_alone, (free_port(),), nprocs=1)


def test_without_a_group():
    with pytest.raises(RuntimeError, match="torch.distributed must be initialised; got no process group. Fix: "):
        Communicator()
