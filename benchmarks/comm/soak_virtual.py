"""Virtual ranks under random sizes, dtypes, forms and delays; every element of every call is checked.

    python benchmarks/comm/soak_virtual.py CALLS [SEED [SECONDS]]       # at most so many seconds

Calls run as CUDA graphs of CHAIN random calls each, replayed with new inputs every time (drawn inside the graph); a graph ends by comparing
all its results with the sums in rank order. Each setting has its world size, transport, dtype, number of blocks and first epoch (near 2^31
and 2^32 too), each norm its number of blocks per row, and two such graphs that take turns on one communicator. In every second setting random
ranks stall at random vectors for up to 10 us each (the kernels with test hooks).
"""

import sys
import time

import torch

from fastverify import Communicator, all_gather_small, all_reduce, all_reduce_rms_norm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_BYTES = 1 << 17
CHAIN = 100
STALL, MOST_STALL = 1, 10_000  # ns, of every vector from a random one on
SETTINGS = 42
ALIGN = 8  # elements: calls begin at whole vectors, their ends are ragged
FORCED = (0, 0, 1, 2, 4, 1 << 9, 1 << 9 | 4)  # blocks that share a row of all_reduce_rms_norm; 2^9: not in registers


class Packed:
    """Tensors of many calls of one kind, each [W, *shape], in one buffer per role: one launch draws all inputs, W check all results."""

    def __init__(self, world: int, shapes: list, dtype: torch.dtype, roles: int):
        sizes = [torch.Size(s).numel() for s in shapes]
        starts, total = [], 0
        for n in sizes:
            starts.append(total)
            total += -(-world * n // ALIGN) * ALIGN
        self.buffers = torch.zeros(roles, max(total, 1), dtype=dtype, device="cuda")
        self.of = [[b[a:a + world * n].view(world, *s) for a, n, s in zip(starts, sizes, shapes)] for b in self.buffers]
        # [W, elements]: where every rank's elements lie
        at = [torch.arange(a, a + world * n, device="cuda").view(world, n) for a, n in zip(starts, sizes)]
        self.index = torch.cat(at, 1).contiguous() if at else torch.zeros(world, 0, dtype=torch.int64, device="cuda")

    def fold(self) -> torch.Tensor:
        """The sums of the inputs (role 0) in rank order, fp32, rounded once."""
        total = self.buffers[0].index_select(0, self.index[0]).float()
        for i in self.index[1:]:
            total += self.buffers[0].index_select(0, i).float()
        return total.to(self.buffers.dtype)

    def wrong(self, role: int, want: torch.Tensor) -> torch.Tensor:
        """Elements of `role` that differ from `want` on some rank."""
        return sum((self.buffers[role].index_select(0, i) != want).sum() for i in self.index)


class Chain:
    """CHAIN random calls on one communicator, their tensors, and the graph that draws inputs, calls and compares."""

    def __init__(self, setting: "Setting"):
        pick, world, dtype, comm = setting.pick, setting.world, setting.dtype, setting.comm
        kinds = [pick(5) for _ in range(CHAIN)]
        sums = Packed(world, [(setting.elements(),) for k in kinds if k > 1], dtype, roles=2)
        shapes = []
        for _ in range(kinds.count(1)):
            hidden = 1 + pick(7168)
            shapes.append((1 + pick(min(9, MAX_BYTES // (-(-hidden * dtype.itemsize // 16) * 16))), hidden))
        norms = Packed(world, shapes, dtype, roles=3)
        lengths = [1 + pick(3000) for _ in range(kinds.count(0))]
        gathers = Packed(world, [(n,) for n in lengths], dtype, roles=1)
        gathered = [torch.zeros(world, world, n, device="cuda", dtype=dtype) for n in lengths]
        weight = torch.ones(7168, device="cuda", dtype=dtype)
        limits, forced = [pick(2) * comm.max_bytes for _ in kinds], [FORCED[pick(len(FORCED))] for _ in kinds]
        stalls = torch.zeros(CHAIN, world, 16, dtype=torch.int32, device="cuda")
        self.keep = (sums, norms, gathers, gathered, weight, stalls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for packed in (sums, norms, gathers):
                packed.buffers[0].normal_()
            norms.buffers[1].fill_(0.5)
            if setting.stalls:
                stalls[..., 0] = STALL
                for word, most in ((1, world), (2, 2000), (3, MOST_STALL)):
                    stalls[..., word].random_(0, most)
            at = [0, 0, 0]
            for call, kind in enumerate(kinds):
                comm._handle.set_one_shot_bytes(limits[call])
                comm._handle.set_forced(forced[call])
                if setting.stalls:
                    comm.hooks.copy_(stalls[call])
                which = min(kind, 2)
                i = at[which]
                at[which] += 1
                if kind == 0:
                    all_gather_small(gathers.of[0][i], comm, gathered[i])
                elif kind == 1:
                    x, residual, out = (role[i] for role in norms.of)
                    all_reduce_rms_norm(x, residual, weight[:x.shape[-1]], comm, out=out)
                else:
                    all_reduce(sums.of[0][i], comm, sums.of[1][i])
            wrong = sums.wrong(1, sums.fold())
            wrong += norms.wrong(1, (0.5 + norms.fold().float()).to(dtype)) + norms.wrong(2, norms.buffers[2].index_select(0, norms.index[0]))
            for x, out in zip(gathers.of[0], gathered):
                wrong += (out != x).sum()
            setting.wrong += wrong


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
        self.chains = [Chain(self) for _ in range(2)]

    def elements(self) -> int:
        most = MAX_BYTES // self.dtype.itemsize >> (2 if self.stalls else 0)
        if self.pick(3) == 0:  # around a boundary: a vector, a slice, a block
            return max(1, min(most, 8 * self.world * (1 + self.pick(64)) + self.pick(17) - 8))
        return 1 + self.pick(most >> self.pick(7))

    def run(self, calls: int, until: float) -> int:
        """Makes `calls` calls, fewer if the time is over; how many."""
        for i in range(-(-calls // CHAIN)):
            self.chains[i % 2].graph.replay()
            if i % 20 == 19:
                torch.cuda.synchronize()
                if time.time() > until:
                    break
        torch.cuda.synchronize()
        self.comm.check()
        return (i + 1) * CHAIN


def main(calls: int, seed: int = 0, seconds: float = 1e9) -> int:
    generator = torch.Generator().manual_seed(seed)
    torch.cuda.manual_seed(seed)
    start, wrong, refused = time.time(), 0, 0
    done = dict.fromkeys(("plain", "with stalls"), 0)
    order = sorted(range(SETTINGS), key=lambda n: (n % 2 == 0, -(n % 7)))  # slow ones first: what their time does not suffice for, the others make
    for at, number in enumerate(order):
        setting, begun = None, time.time()
        share = calls // (5 * SETTINGS // 2) if number % 2 else -(-(calls - sum(done.values())) // (SETTINGS - at))  # a fifth with stalls
        try:
            setting = Setting(lambda n: int(torch.randint(0, n, (), generator=generator)), number)
            made_at = time.time()
            made = setting.run(max(share, 1), start + seconds * (at + 1) / SETTINGS)
        except RuntimeError as error:
            if setting is not None:  # a wrong or lost call; what a launch refused is named and does not end the others
                print(f"setting {number}: W = {setting.world}, {setting.dtype}, {setting.comm.transport}, stalls {setting.stalls}")
                raise
            print(f"setting {number}: refused: {str(error).splitlines()[0]}", flush=True)
            refused += 1
            continue
        done["with stalls" if setting.stalls else "plain"] += made
        wrong += int(setting.wrong)
        print(f"setting {number}: W = {setting.world}, {setting.dtype}, {setting.comm.transport}, stalls {setting.stalls}: {made} calls, "
              f"capture {made_at - begun:.2f} s, {(time.time() - made_at) / made * 1e6:.1f} us a call, wrong elements {int(setting.wrong)}", flush=True)
        del setting
    print(f"{sum(done.values())} calls in {time.time() - start:.0f} s ({done}), seed {seed}, wrong elements {wrong}, {refused} settings refused")
    return int(wrong != 0 or refused != 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
