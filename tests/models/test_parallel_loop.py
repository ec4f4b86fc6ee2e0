"""The device-resident cycle over ranks (gloo, eager cycles): every rank emits the tokens of one rank alone."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastverify import Communicator, SamplingParams, load_draft, load_target
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape
from fastverify.models.parallel import shard

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
PROMPTS = [[1, 7, 42, 42, 7, 3, 9], [5, 6, 7, 8] * 5]
RUNS = [(("off",), {}), (("tree-8",), {}), (("off", "chain-3", "tree-8"), {}), (("tree-8",), dict(temperature=0.9, top_k=20, top_p=0.9, seed=3)),
        (("tree-8",), dict(temperature=0.7, seed=5, repetition_penalty=1.2))]


def decode(target, draft) -> list:
    texts = []
    for shapes, params in RUNS:
        loop = GraphLoop(target, draft, shapes=tuple(map(parse_shape, shapes)), max_batch=2, max_length=64, stop_ids=[], calibration_length=16)
        jobs = [loop.submit(p, 20, SamplingParams(**params)) for p in PROMPTS]
        for _ in loop.run():
            pass
        texts.append([j.tokens for j in jobs])
    return texts


def _rank(rank: int, world: int, port: int, out: str, late: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    if late and rank == 1:
        GraphLoop._known = lambda self, flight: flight.rows is not None
    whole = load_target(GOLDEN / "target")
    draft = load_draft(GOLDEN / "draft", whole)
    with Communicator() as comm:
        texts = decode(shard(whole, comm), draft)
    (Path(out) / f"{rank}.json").write_text(json.dumps(texts))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world, late", [(2, False), (2, True)])
def test_cycles_on_ranks(tmp_path, world, late):
    """late: one rank's records are never there when its host first looks, as on a GPU that is behind: it must launch the same cycles."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, (world, port, str(tmp_path), late), nprocs=world)
    texts = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(world)]
    assert texts[0] == texts[1], "every rank emits the same tokens"
    target = load_target(GOLDEN / "target")
    assert texts[0] == decode(target, load_draft(GOLDEN / "draft", target))
