"""Processes that stay: one per rank, started once per test session, so that a test over real ranks costs its calls and not two
starts of torch and CUDA."""

import atexit
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port

SECONDS = 120  # of one body
_pools: dict = {}


def spawn(body, *args, world: int = 2) -> None:
    """body(rank, world, device, *args) on every rank of the default group (gloo); raises with the first rank's traceback that fails.
    After a failure the processes are new ones."""
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = RankPool(world)
    try:
        pool.run(body, args)
    except BaseException:
        _pools.pop(world, None)
        pool.end()
        raise


class RankPool:
    def __init__(self, world: int) -> None:
        context, port = mp.get_context("spawn"), free_port()
        self.ranks = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, there), daemon=True)
            process.start()
            self.ranks.append((process, here))
        atexit.register(self.end)

    def run(self, body, args: tuple) -> None:
        for _, pipe in self.ranks:
            pipe.send((body, args))
        said = []
        for rank, (process, pipe) in enumerate(self.ranks):
            try:
                said.append(pipe.recv() if pipe.poll(5 if any(said) else SECONDS) else f"rank {rank} did not end within {SECONDS} s")
            except EOFError:
                process.join(5)
                said.append(f"rank {rank} ended with exit code {process.exitcode}")
        if any(said):
            raise AssertionError("\n".join(f"rank {r}: {text}" for r, text in enumerate(said) if text))

    def end(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join(5)
        atexit.unregister(self.end)


def _serve(rank: int, world: int, port: int, pipe) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    device = torch.device("cuda", rank if torch.cuda.device_count() >= world else 0)  # else all on one card: under MPS
    torch.cuda.set_device(device)
    kept = dict(os.environ)
    while True:
        try:
            body, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # a group with captured calls may hang in its destructor
        try:
            body(rank, world, device, *args)
            dist.barrier()
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())
        os.environ.clear()
        os.environ.update(kept)
