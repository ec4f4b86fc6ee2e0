"""On a GPU: replays with changing input, two graphs, two communicators, and ranks as processes that die or stop."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comm_cases import fold
from ports import free_port

from fastverify import Communicator, CommunicatorError, all_gather_small, all_reduce, all_reduce_rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_replays_with_changing_input_and_two_graphs(transport):
    """10,000 replays: two graphs of different sizes and forms take turns with eager calls on one communicator."""
    comm = Communicator.make_virtual(4, "cuda", transport=transport)
    g = torch.Generator(device="cuda").manual_seed(0)
    small, large = torch.zeros(4, 300, device="cuda"), torch.zeros(4, 9000, device="cuda")
    outs, graphs = [torch.zeros_like(small), torch.zeros_like(large)], []
    for x, out, limit in ((small, outs[0], comm.max_bytes), (large, outs[1], 0)):
        comm._handle.set_one_shot_bytes(limit)
        all_reduce(x, comm, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                all_reduce(x, comm, out=out)
        graphs.append(graph)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(10_000):
        x, out, graph = (small, outs[0], graphs[0]) if i % 3 else (large, outs[1], graphs[1])
        x.normal_(generator=g)
        graph.replay()
        wrong += (out != x[0] + x[1] + x[2] + x[3]).sum()
        if i % 100 == 0:
            wrong += (all_reduce(small, comm) != small[0] + small[1] + small[2] + small[3]).sum()
    torch.cuda.synchronize()
    comm.check()
    assert int(wrong) == 0


def test_the_shared_memory_of_one_launch_is_no_limit_for_the_next():
    """16.6 KB for a block with a row of its own, then a little more for each of two that share one."""
    comm = Communicator.make_virtual(2, "cuda")
    for forced, hidden in (((1 << 9) | 1, 4000), ((1 << 9) | 2, 7168)):
        comm._handle.set_forced(forced)
        x, residual, weight = torch.ones(2, 1, hidden, device="cuda"), torch.zeros(2, 1, hidden, device="cuda"), torch.ones(hidden, device="cuda")
        all_reduce_rms_norm(x, residual, weight, comm)
        assert (residual == 2).all()
    comm.check()


def test_a_second_stream_is_refused():
    comm = Communicator.make_virtual(2, "cuda")
    x = torch.ones(2, 10, device="cuda")
    all_reduce(x, comm)
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(RuntimeError, match="all calls must be on one stream"):
            all_reduce(x, comm)
    all_reduce(x, comm)
    comm.move_stream()
    torch.cuda.synchronize()


def _setup(rank: int, world: int, port: int) -> torch.device:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    device = torch.device("cuda", rank if torch.cuda.device_count() >= world else 0)
    torch.cuda.set_device(device)
    return device


def _agree(rank: int, world: int, port: int, transport: str) -> None:
    device = _setup(rank, world, port)
    with Communicator(device=device, backend=transport, max_bytes=1 << 18) as comm:
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 2):
            parts = [torch.randn(5, 1000, generator=torch.Generator().manual_seed(10 * i + r)).to(dtype) for r in range(world)]
            for limit in (0, comm.max_bytes):
                comm._handle.set_one_shot_bytes(limit)
                assert torch.equal(all_reduce(parts[rank].to(device), comm).cpu(), fold(torch.stack(parts)))
            residual = torch.ones(5, 1000, dtype=dtype, device=device)
            all_reduce_rms_norm(parts[rank].to(device), residual, torch.ones(1000, dtype=dtype, device=device), comm)
            assert torch.equal(residual.cpu(), (1 + fold(torch.stack(parts)).float()).to(dtype))
            got = all_gather_small(parts[rank].to(device), comm)
            assert torch.equal(got.cpu(), torch.stack(parts))
        comm.check()
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads abort a process that exits with them running


@pytest.mark.parametrize("transport", ["peer", "host", "auto"])
def test_processes_agree(transport):
    """Two processes; on one GPU they take turns in time slices, so this is slow there without MPS, but right."""
    mp.spawn(_agree, (2, free_port(), transport), nprocs=2)


def _rejoin(rank: int, world: int, port: int, transport: str) -> None:
    """The survivors (and whoever takes a lost rank's place), in a group and a communicator of their own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    device = _setup(rank, world, port)
    with Communicator(device=device, backend=transport, max_bytes=1 << 16) as comm:
        for i in range(20):
            parts = [torch.randn(3000 + i, generator=torch.Generator().manual_seed(10 * i + r)) for r in range(world)]
            assert torch.equal(all_reduce(parts[rank].to(device), comm).cpu(), fold(torch.stack(parts)))
        comm.check()
    dist.barrier()
    dist.destroy_process_group()


def _lose_a_peer(rank: int, world: int, ports: tuple, transport: str, how: int) -> None:
    device = _setup(rank, world, ports[0])
    comm = Communicator(device=device, backend=transport, max_bytes=1 << 16, deadline=3.0)
    x = torch.ones(1000, device=device)
    for _ in range(3):
        all_reduce(x, comm)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), how)
        time.sleep(120)
    start = time.time()
    out = all_reduce(x, comm)
    torch.cuda.synchronize()
    took = time.time() - start
    assert out.isnan().any() and 2 < took < 6, took
    with pytest.raises(CommunicatorError) as error:
        comm.check()
    assert f"rank(s) [{world - 1}] did not come (seen by rank " in str(error.value)
    start = time.time()
    assert all_reduce(x, comm).isnan().all() and time.time() - start < 1, "a lost communicator gives NaN at once"
    comm.close()
    _rejoin(rank, world - 1, ports[1], transport)
    os._exit(7)  # what the test looks for


def _lose_a_peer_at_work(rank: int, world: int, ports: tuple, transport: str, started) -> None:
    """All ranks replay a graph over and over; the parent kills one in the middle of it."""
    device = _setup(rank, world, ports[0])
    comm = Communicator(device=device, backend=transport, max_bytes=1 << 16, deadline=3.0)
    x = torch.ones(20000, device=device, dtype=torch.bfloat16)
    all_reduce(x, comm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            out = all_reduce(x, comm)
    dist.barrier()
    end = time.time() + 60
    while time.time() < end:
        graph.replay()
        torch.cuda.synchronize()
        try:
            comm.check()
        except CommunicatorError as error:
            assert f"[{world - 1}] did not come" in str(error) and out.isnan().any()
            comm.close()
            del graph
            _rejoin(rank, world - 1, ports[1], transport)
            os._exit(7)
        assert (out == world).all()
        started.set()
    os._exit(8)


def _ranks() -> int:
    """A GPU each where there are two or more, else three on one card."""
    return 3 if torch.cuda.device_count() in (0, 1) else min(3, torch.cuda.device_count())


def _end(ranks: list) -> None:
    for p in ranks:
        p.kill()
        p.join(10)
    names = tuple(f"fastverify-{p.pid}-" for p in ranks)
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(names)], "no mailbox is left behind"


def _survivors(target, world: int, arguments: tuple, then=None) -> None:
    context = mp.get_context("spawn")
    ports = (free_port(), free_port())
    ranks = [context.Process(target=target, args=(r, world, ports, *arguments)) for r in range(world)]
    for p in ranks:
        p.start()
    try:
        if then:
            then(ranks)
        for p in ranks[:-1]:
            p.join(90)
            assert p.exitcode == 7
    finally:
        _end(ranks)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_lost_peer_ends_in_an_error_and_the_others_go_on(transport, how):
    _survivors(_lose_a_peer, _ranks(), (transport, how))


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_peer_killed_at_work(transport):
    started = mp.get_context("spawn").Event()

    def kill(ranks) -> None:
        assert started.wait(60)
        time.sleep(0.3)
        ranks[-1].kill()
    _survivors(_lose_a_peer_at_work, _ranks(), (transport, started), kill)


def _wait_in_the_kernel(rank: int, world: int, ports: tuple, transport: str, two_hops: bool, inside, killed) -> None:
    """Rank 1 waits for rank 0 inside its kernel, is killed there, and only then rank 0 comes."""
    device = _setup(rank, world, ports[0])
    comm = Communicator(device=device, backend=transport, max_bytes=1 << 16, deadline=3.0)
    comm.set_one_shot_bytes(0 if two_hops else comm.max_bytes)
    x = torch.full((16000,), float(rank + 1), device=device)
    for _ in range(3):
        all_reduce(x, comm)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        all_reduce(x, comm)
        end = torch.cuda.Event()
        end.record()
        time.sleep(0.2)
        assert not end.query(), "in its kernel"
        inside.set()
        time.sleep(120)
    assert killed.wait(60)
    for call in range(2):  # one hop: what rank 1 had sent before it was killed makes one more sum
        start = time.time()
        out = all_reduce(x, comm)
        torch.cuda.synchronize()
        if time.time() - start > 1:
            break
        assert not two_hops and (out == 3).all()
    assert 2 < time.time() - start < 6 and out.isnan().any()
    with pytest.raises(CommunicatorError) as error:
        comm.check()
    assert "rank(s) [1] did not come (seen by rank 0)" in str(error.value)
    comm.close()
    _rejoin(rank, world, ports[1], transport)
    os._exit(7)


def _take_its_place(port: int, transport: str) -> None:
    _rejoin(1, 2, port, transport)
    os._exit(7)


@pytest.mark.parametrize("two_hops", [False, True])
@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_peer_killed_inside_its_kernel(transport, two_hops):
    """The other rank gets an exception within the deadline; with a new process in the lost one's place a new communicator works."""
    context, ports = mp.get_context("spawn"), (free_port(), free_port())
    inside, killed = context.Event(), context.Event()
    ranks = [context.Process(target=_wait_in_the_kernel, args=(r, 2, ports, transport, two_hops, inside, killed)) for r in range(2)]
    for p in ranks:
        p.start()
    try:
        assert inside.wait(60)
        ranks[1].kill()
        ranks[1].join(20)
        assert ranks[1].exitcode == -signal.SIGKILL
        killed.set()
        ranks.append(context.Process(target=_take_its_place, args=(ports[1], transport)))
        ranks[2].start()
        for p in (ranks[0], ranks[2]):
            p.join(60)
            assert p.exitcode == 7
    finally:
        _end(ranks)
