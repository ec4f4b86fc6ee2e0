"""Records the traces of this folder: two ranks on one GPU, each a process; torch.profiler on both.

    nvidia-cuda-mps-control -d; python record.py OUT; echo quit | nvidia-cuda-mps-control

Without MPS the two processes take turns of milliseconds on the GPU. Triton must be installed.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile, schedule

LAYERS, STEPS, ROWS, HIDDEN, LATE = 8, 4, 4, 7168, 3
MODES = ("late", "host_late", "graph_late")


@triton.jit
def one_shot_all_reduce_kernel(mine, peer, my_flag, peer_flag, epoch_ptr, out, n, BLOCK: tl.constexpr):
    """out = mine + peer, once the peer has arrived: one block, flags in memory that both processes map."""
    epoch = tl.load(epoch_ptr) + 1
    tl.atomic_xchg(peer_flag, epoch, sem="release", scope="sys")
    seen = tl.atomic_add(my_flag, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = tl.atomic_add(my_flag, 0, sem="acquire", scope="sys")
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(mine + i, mask=i < n) + tl.load(peer + i, mask=i < n), mask=i < n)
    tl.store(epoch_ptr, epoch)


class Rank:
    """One process: its weights, its slab, and the peer's."""

    def __init__(self, rank: int, queues: list) -> None:
        self.rank = rank
        self.x = torch.ones(ROWS, HIDDEN, device="cuda")
        self.slab, self.flag, self.epoch = torch.zeros_like(self.x), *(torch.zeros(1, device="cuda", dtype=torch.int32) for _ in "ab")
        self.w, self.h, self.large = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
                                      for shape in ((HIDDEN, HIDDEN), (ROWS, HIDDEN), (4096, 4096)))
        self.y, self.out = torch.empty_like(self.h), torch.empty_like(self.large)
        torch.cuda.synchronize()
        queues[1 - rank].put((self.slab, self.flag))
        self.peer_slab, self.peer_flag = queues[rank].get(timeout=60)

    def step(self, mode: str) -> None:
        for _ in range(LAYERS):
            torch.matmul(self.h, self.w, out=self.y)
            if self.rank == 1 and mode == "host_late":
                torch.cuda.synchronize()
                time.sleep(0.001)
            elif self.rank == 1 and mode != "even":
                self.extra()
            one_shot_all_reduce_kernel[(1,)](self.slab, self.peer_slab, self.flag, self.peer_flag, self.epoch, self.x,
                                             self.x.numel(), BLOCK=1024, num_warps=8)

    def extra(self) -> None:
        for _ in range(LATE):
            torch.matmul(self.large, self.large, out=self.out)


def meet() -> None:
    """A barrier of the hosts: no kernel waits for its peer while the other process needs the driver."""
    torch.cuda.synchronize()
    dist.barrier()


def capture(rank: Rank, mode: str):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rank.step(mode)
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rank.step(mode)
    meet()
    return graph.replay


def main(number: int, queues: list, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    rank = Rank(number, queues)
    for mode in ("even", "late"):
        rank.step(mode)
        meet()
    if number == 1:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        times = []
        for _ in range(21):
            begin.record()
            rank.extra()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        print(f"the extra products take {sorted(times)[10]:.3f} ms, {LAYERS * sorted(times)[10]:.3f} ms a step", flush=True)
    meet()
    for mode in MODES:
        run = capture(rank, mode) if mode.startswith("graph") else lambda: rank.step(mode)  # noqa: B023 (called in this turn)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True,
                     schedule=schedule(wait=1, warmup=1, active=STEPS)) as prof:
            for _ in range(2 + STEPS):
                meet()
                run()
                meet()
                prof.step()
            meet()
        prof.export_chrome_trace(f"{folder}/{mode}-rank{number}.json.gz")
        meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    boxes = [context.Queue() for _ in range(2)]
    with tempfile.TemporaryDirectory() as place:
        ranks = [context.Process(target=main, args=(r, boxes, f"{place}/store", str(target))) for r in range(2)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join()
    sys.exit(max(abs(p.exitcode) for p in ranks))
