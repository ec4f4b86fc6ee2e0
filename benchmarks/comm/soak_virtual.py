"""Virtual ranks under random sizes, dtypes, forms and delays; every element of every call is checked.

    python benchmarks/comm/soak_virtual.py CALLS [SEED [SECONDS]]       # at most so many seconds

Calls run as CUDA graphs of CHAIN random calls each, replayed with new inputs every time (drawn inside the graph); a graph
ends by comparing all its results with the sums in rank order. Each setting has its world size, transport, dtype, number of
blocks and first epoch (near 2^31 and 2^32 too), each norm its number of blocks per row, and two such graphs that take turns on
one communicator. In every second setting random ranks stall at random vectors for up to 30 us (the kernels with test hooks).
"""

import sys
import time

import torch

from fastverify import Communicator, all_gather_small, all_reduce, all_reduce_rms_norm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_BYTES = 1 << 17
CHAIN = 100
STALL = 1
FORCED = (0, 0, 1, 2, 4, 1 << 9, 1 << 9 | 4)  # blocks that share a row of all_reduce_rms_norm; 2^9: not in registers


class Setting:
    """One communicator and graphs of random calls on it."""

    def __init__(self, pick, number: int):
        self.pick, self.world = pick, 2 + number % 7
        self.dtype = DTYPES[number // 7 % 3]
        self.stalls = number % 2 == 1
        transport = ("peer", "host")[number // 2 % 2]
        epoch = [1, (1 << 31) - 1000, (1 << 32) - 1000][pick(3)]
        self.comm = Communicator.make_virtual(self.world, "cuda", MAX_BYTES, transport=transport, epoch=epoch,
                                              blocks=(1, 3, 8, 16)[pick(4)], hooks=self.stalls)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.keep = []
        self.graphs = [self.capture() for _ in range(2)]

    def elements(self) -> int:
        most = MAX_BYTES // self.dtype.itemsize
        if self.pick(3) == 0:  # around a boundary: a vector, a slice, a block
            return max(1, min(most, 8 * self.world * (1 + self.pick(64)) + self.pick(17) - 8))
        return 1 + self.pick(most >> self.pick(7))

    def call(self) -> tuple:
        """(run, inputs to fill, pairs of (got, want) to compare, each a function of nothing)."""
        comm, w = self.comm, self.world
        kind = self.pick(5)
        if kind == 0:
            x = torch.zeros(w, 1 + self.pick(3000), device="cuda", dtype=self.dtype)
            out = torch.zeros(w, *x.shape, device="cuda", dtype=self.dtype)
            return lambda: all_gather_small(x, comm, out), x, lambda: (out != x).sum()
        if kind == 1:
            hidden = 1 + self.pick(7168)
            rows = max(1, min(9, MAX_BYTES // self.dtype.itemsize // hidden))
            x = torch.zeros(w, rows, hidden, device="cuda", dtype=self.dtype)
            residual, out, weight = torch.zeros_like(x), torch.zeros_like(x), torch.ones(hidden, device="cuda", dtype=self.dtype)

            def run():
                residual.fill_(0.5)
                all_reduce_rms_norm(x, residual, weight, comm, out=out)
            return run, x, lambda: (residual != (0.5 + fold(x).float()).to(self.dtype)).sum() + (out != out[:1]).sum()
        x = torch.zeros(w, self.elements(), device="cuda", dtype=self.dtype)
        out = torch.zeros_like(x)
        return lambda: all_reduce(x, comm, out), x, lambda: (out != fold(x)).sum()

    def capture(self) -> torch.cuda.CUDAGraph:
        calls = [self.call() for _ in range(CHAIN)]
        limits = [self.pick(2) * self.comm.max_bytes for _ in calls]
        forced = [FORCED[self.pick(len(FORCED))] for _ in calls]
        self.keep.append(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _, x, _ in calls:
                x.normal_()
            for (run, _, _), limit, force in zip(calls, limits, forced):
                self.comm._handle.set_one_shot_bytes(limit)
                self.comm._handle.set_forced(force)
                if self.stalls:
                    self.comm.hooks[:, 0] = STALL
                    self.comm.hooks[:, 1].random_(0, self.world)
                    self.comm.hooks[:, 2].random_(0, 2000)
                    self.comm.hooks[:, 3].random_(0, 30_000)
                    self.comm.hooks[:, 4:].zero_()
                run()
            for _, _, wrong in calls:
                self.wrong += wrong()
        return graph

    def run(self, calls: int, until: float) -> int:
        """Makes `calls` calls, fewer if the time is over; how many."""
        for i in range(-(-calls // CHAIN)):
            self.graphs[i % 2].replay()
            if i % 20 == 19:
                torch.cuda.synchronize()
                if time.time() > until:
                    break
        torch.cuda.synchronize()
        self.comm.check()
        return (i + 1) * CHAIN


def fold(x: torch.Tensor) -> torch.Tensor:
    parts = x.float()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def main(calls: int, seed: int = 0, seconds: float = 1e9) -> int:
    generator = torch.Generator().manual_seed(seed)
    torch.cuda.manual_seed(seed)
    settings, start, wrong, refused = 42, time.time(), 0, 0
    done = dict.fromkeys(("plain", "with stalls"), 0)
    for number in range(settings):
        setting = None
        share = calls * 8 // (5 * settings)  # half of the settings make a quarter
        try:
            setting = Setting(lambda n: int(torch.randint(0, n, (), generator=generator)), number)
            made = setting.run(share if not setting.stalls else share // 4, start + seconds * (number + 1) / settings)
        except RuntimeError as error:
            if setting is not None:  # a wrong or lost call; what a launch refused is named and does not end the others
                print(f"setting {number}: W = {setting.world}, {setting.dtype}, {setting.comm.transport}, stalls {setting.stalls}")
                raise
            print(f"setting {number}: refused: {str(error).splitlines()[0]}", flush=True)
            refused += 1
            continue
        done["with stalls" if setting.stalls else "plain"] += made
        wrong += int(setting.wrong)
        del setting
    print(f"{sum(done.values())} calls in {time.time() - start:.0f} s ({done}), wrong elements {wrong}" + (f", {refused} settings refused" if refused else ""))
    return int(wrong != 0 or refused != 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
