"""Real ranks, one GPU each: every transport, all dtypes, two graphs and two communicators in turn, replays with changing input."""

import pytest
import torch
from comm_cases import fold
from rank_pool import spawn

from fastverify import (Communicator, all_gather_small, all_reduce, all_reduce_columns, all_reduce_rms_norm, linear_all_reduce)

SIZES = (7, 1000, 4 * 7168, 100_003)


def _graphs(rank, world, device, transport) -> None:
    """Two communicators, two graphs each (small one-shot, large two-shot), replayed in turn with eager calls between them."""
    comms = [Communicator(device=device, backend=transport, max_bytes=1 << 20) for _ in range(2)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        graphs, wrong = [], torch.zeros((), dtype=torch.int64, device=device)
        for c, comm in enumerate(comms):
            for n, limit in ((1000, comm.max_bytes), (100_003, 0)):
                if transport != "nccl":
                    comm.set_one_shot_bytes(limit)
                every = torch.zeros(world, n, dtype=dtype, device=device)
                out, got = torch.zeros(n, dtype=dtype, device=device), torch.zeros(world, 64, dtype=dtype, device=device)
                x = every[rank]
                all_reduce(x, comm, out=out)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(3):
                        all_reduce(x, comm, out=out)
                    all_gather_small(x[:64].contiguous(), comm, out=got)
                graphs.append((graph, every, out, got))
        g = torch.Generator(device).manual_seed(5)  # the same numbers on every rank
        for i in range(300):
            graph, every, out, got = graphs[(i * 7 + i // 5) % 4]
            every.normal_(generator=g)
            graph.replay()
            total = every[0].float()
            for r in range(1, world):
                total = total + every[r].float()
            wrong += (out != total.to(dtype)).sum() + (got != every[:, :64]).sum()
            if i % 25 == 0:
                extra = torch.full((33,), float(i + rank), dtype=dtype, device=device)
                wrong += (all_reduce(extra, comms[i % 2]) != sum(i + r for r in range(world))).sum()
        for comm in comms:
            comm.wait()
        assert int(wrong) == 0, (transport, dtype)
        del graphs, graph, every, out, got, x
    for comm in comms:
        comm.close()


@pytest.mark.gpu2
@pytest.mark.parametrize("transport", ["peer", "host", "nccl"])
def test_two_graphs_two_communicators(transport):
    spawn(_graphs, transport)


def _auto(rank, world, device, folder) -> None:
    """The tuner: measured once, kept, agreed; every size takes its way and is right on both sides of the crossovers."""
    import json
    import os
    os.environ["FASTVERIFY_CACHE"] = folder
    plans = []
    for _ in range(2):
        with Communicator(device=device, backend="auto", max_bytes=1 << 20) as comm:
            plans.append((comm.tuned.split(" (")[0], comm.one_shot_bytes, comm.nccl_bytes, comm.transport))
            agreed = comm._exchange(plans[-1])
            assert agreed == [plans[-1]] * world
            for n in {comm.one_shot_bytes // 2 + d for d in (-8, 0, 8)} | {(comm.nccl_bytes or 1 << 20) // 2 + d for d in (-8, 0, 8)} | {3 << 20}:
                if n > 0 and (n * 2 <= comm.max_bytes or comm.nccl is not None):
                    parts = [torch.randn(n, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
                    got = all_reduce(parts[rank].to(device), comm).cpu()
                    assert torch.equal(got, fold(torch.stack(parts))) if world == 2 else torch.allclose(got.float(), sum(p.float() for p in parts), atol=0.1)
            comm.wait()
    assert [p[0] for p in plans] == ["measured now", "a kept plan"] and plans[0][1:] == plans[1][1:]
    if rank == 0:
        (file,) = [p for p in os.listdir(f"{folder}/comm") if p.endswith(".json")]
        print(json.dumps({k: v for k, v in json.load(open(f"{folder}/comm/{file}")).items() if k in ("one_shot_bytes", "nccl_bytes", "sizes", "times_us")}))


@pytest.mark.gpu2
def test_the_tuner_is_measured_once_and_agreed(tmp_path):
    spawn(_auto, str(tmp_path))


def _linear(rank, world, device, transport) -> None:
    with Communicator(device=device, backend=transport, max_bytes=1 << 20) as comm:
        for dtype, rows in ((torch.float32, 70), (torch.bfloat16, 300)):
            n, k = 2048, 320
            xs = [torch.randn(rows, k, generator=torch.Generator().manual_seed(r)).to(dtype).to(device) for r in range(world)]
            ws = [torch.randn(n, k, generator=torch.Generator().manual_seed(9 + r)).to(dtype).to(device) for r in range(world)]
            partials = [x.double() @ w.double().t() for x, w in zip(xs, ws)]
            exact, size = sum(partials), 1 + sum(p.abs() for p in partials)  # a partial sum is rounded before it travels
            near = lambda y: ((y.double() - exact).abs() <= 2.0**-7 * size).all()  # noqa: E731
            for split in (None, ("rows", 1), ("rows", 3), ("columns", 2), ("columns", 8), ("growing", 3), ("resident", 1), ("resident", 8)):
                y = linear_all_reduce(xs[rank], ws[rank], comm, split=split)
                residual = torch.ones_like(y)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    linear_all_reduce(xs[rank], ws[rank], comm, split=split, residual=residual)
                residual.fill_(1)
                graph.replay()
                assert near(y), (dtype, split, ((y.double() - exact).abs() / size).max())
                assert torch.allclose(residual, 1 + y, rtol=1e-2, atol=1e-2), (split, (residual - 1 - y).abs().max())
                everyone = [torch.empty(rows, n, dtype=dtype) for _ in range(world)]
                torch.distributed.all_gather(everyone, y.cpu())
                assert all(torch.equal(e, everyone[0]) for e in everyone), "the same bits on every rank"
                comm.wait()
                del graph


@pytest.mark.gpu2
@pytest.mark.parametrize("transport", ["peer", "host", "nccl"])
def test_linear_in_pieces(transport):
    spawn(_linear, transport)


def _columns(rank, world, device, transport) -> None:
    """all_reduce_columns against all_reduce: all dtypes, piece after piece marked while it waits, replays with changing input."""
    with Communicator(device=device, backend=transport, max_bytes=1 << 20) as comm:
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for pieces, rows, width in ((1, 1, 8), (3, 33, 264), (8, 16, 512)):
                every = torch.randn(world, pieces, rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)
                x = torch.zeros_like(every[rank])
                out, residual = torch.zeros(rows, pieces * width, dtype=dtype, device=device), torch.ones(rows, pieces * width, dtype=dtype, device=device)
                all_reduce_columns(every[rank].contiguous(), comm, out)
                want = fold(every).transpose(0, 1).flatten(1)
                wrong += (out != want).sum()
                side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    main = torch.cuda.current_stream()
                    for _ in range(3):
                        side.wait_stream(main)
                        with torch.cuda.stream(side):
                            all_reduce_columns(x, comm, residual, ready=True, add=True)
                        for p in range(pieces):
                            x[p].copy_(every[rank, p])
                            comm.mark(p)
                        main.wait_stream(side)
                for i in range(20):
                    every.normal_(generator=torch.Generator(device).manual_seed(i))
                    residual.fill_(1)
                    graph.replay()
                    want = torch.ones_like(residual)
                    for _ in range(3):
                        want += fold(every).transpose(0, 1).flatten(1)
                    wrong += (residual != want).sum()
                comm.wait()
                del graph
        assert int(wrong) == 0, (transport, int(wrong))


@pytest.mark.gpu2
@pytest.mark.parametrize("transport", ["peer", "host"])
def test_columns_as_they_come(transport):
    spawn(_columns, transport)


def _norm_at_the_crossover(rank, world, device) -> None:
    """all_reduce_rms_norm on both sides of the crossover to NCCL: the same residual bits at W = 2, the norm within rounding."""
    with Communicator(device=device, backend="peer", nccl={}, max_bytes=1 << 20) as comm:
        parts = [torch.randn(16, 7168, generator=torch.Generator().manual_seed(r)).bfloat16().to(device) for r in range(world)]
        weight, found = torch.rand(7168, device=device).bfloat16(), []
        for limit in (1 << 30, 0):
            comm.nccl_bytes = limit
            residual = torch.ones(16, 7168, dtype=torch.bfloat16, device=device)
            found.append((residual, all_reduce_rms_norm(parts[rank], residual, weight, comm)))
        (a, x), (b, y) = found
        assert torch.equal(a, b) if world == 2 else torch.allclose(a.float(), b.float(), atol=0.1)
        assert ((x.float() - y.float()).abs() <= 2.0**-7 * (0.01 + x.float().abs())).all()
        comm.wait()


@pytest.mark.gpu2
def test_norm_at_the_crossover():
    spawn(_norm_at_the_crossover)
