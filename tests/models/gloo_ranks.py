"""The golden pair decoded by several gloo processes, one thread each."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port

from fastverify import Communicator, load_draft, load_target
from fastverify.models.parallel import shard

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


def _rank(rank: int, world: int, port: int, out: str, decode: Callable, overlap_rows: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    whole = load_target(GOLDEN / "target")
    draft = load_draft(GOLDEN / "draft", whole)
    with Communicator() as comm:
        if overlap_rows:
            comm.overlap_rows = overlap_rows
        texts = decode(shard(whole, comm), draft)
        assert comm.from_first(rank) == 0
    (Path(out) / f"{rank}.json").write_text(json.dumps(texts))
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads abort a process that exits with them running


def texts_of_ranks(decode: Callable, world: int, out: Path, overlap_rows: int = 0) -> list:
    """decode(target, draft) of every rank; `overlap_rows`: the linears' overlapped form from that many rows on."""
    port = free_port()
    mp.spawn(_rank, (world, port, str(out), decode, overlap_rows), nprocs=world)
    return [json.loads((out / f"{r}.json").read_text()) for r in range(world)]


def texts_of_one(decode: Callable) -> list:
    """The same with the whole model in this process."""
    target = load_target(GOLDEN / "target")
    return decode(target, load_draft(GOLDEN / "draft", target))
