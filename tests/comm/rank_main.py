"""One rank of the environment tests, a process of its own: python rank_main.py RANK WORLD PORT BACKEND WHAT. Prints one JSON line."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def fold(parts):
    total = parts[0].float()
    for p in parts[1:]:
        total = total + p.float()
    return total.to(parts[0].dtype)


def main(rank: int, world: int, port: str, backend: str, what: str) -> dict:
    from fastverify import Communicator, CommunicatorError, all_gather_small, all_reduce, all_reduce_rms_norm
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    device = torch.device("cuda", 0 if what == "first-device" or torch.cuda.device_count() == 1 else rank)
    torch.cuda.set_device(device)
    try:
        comm = Communicator(device=device, backend=backend, max_bytes=1 << 16, deadline=2.0)
    except CommunicatorError as exc:
        return {"error": str(exc)}
    said = {"transport": comm.transport, "reason": comm.reason, "nccl": comm.nccl is not None, "uuid": str(torch.cuda.get_device_properties(device).uuid)}
    x = torch.full((1000,), float(rank + 1), device=device)
    want = world * (world + 1) / 2
    if what == "orders":  # two communicators, first called in different orders by the ranks: a stream each is right ...
        other = Communicator(device=device, backend=backend, max_bytes=1 << 16, deadline=2.0)
        streams, outs = [torch.cuda.Stream(), torch.cuda.Stream()], [torch.empty_like(x), torch.empty_like(x)]
        torch.cuda.synchronize()  # nothing between the calls may wait for the device: not an allocation, not a read
        for i in range(20):
            for which in ((0, 1), (1, 0))[rank % 2]:
                with torch.cuda.stream(streams[which]):
                    all_reduce(x, (comm, other)[which], out=outs[which])
        torch.cuda.synchronize()
        said["sums"] = float(outs[0][0] + outs[1][0]) / 2
        comm.check(), other.check()
        comm.move_stream(), other.move_stream()
        start = time.time()
        for c in ((comm, other), (other, comm))[rank % 2]:  # ... one stream waits in a circle and ends at the deadline
            all_reduce(x, c, out=outs[0])
        torch.cuda.synchronize()
        said["seconds"] = time.time() - start
        try:
            comm.check(), other.check()
            said["circle"] = ""
        except CommunicatorError as exc:
            said["circle"] = str(exc)
        return said
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(4, 512, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        mine = parts[rank].to(device)
        graph = torch.cuda.CUDAGraph()
        eager = all_reduce(mine, comm)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = all_reduce(mine, comm)
            gathered = all_gather_small(mine, comm)
        for _ in range(20):
            graph.replay()
        residual = torch.ones(4, 512, dtype=dtype, device=device)
        all_reduce_rms_norm(mine, residual, torch.ones(512, dtype=dtype, device=device), comm)
        right = (torch.equal(eager.cpu(), fold(parts)), torch.equal(replayed.cpu(), fold(parts)), torch.equal(gathered.cpu(), torch.stack(parts)),
                 torch.equal(residual.cpu(), (1 + fold(parts).float()).to(dtype)))
        said[str(dtype)] = all(right)
        del graph
    said["right"] = said.pop("torch.float32") and said.pop("torch.bfloat16") and float(all_reduce(x, comm)[0]) == want
    comm.check()
    comm.close()
    return said


if __name__ == "__main__":
    print("SAID" + json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])), flush=True)
    os._exit(0)
