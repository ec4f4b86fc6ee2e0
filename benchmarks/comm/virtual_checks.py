"""What virtual ranks must show, on a GPU in one run of about a minute; prints how much of each was compared.

    python benchmarks/comm/virtual_checks.py [--json FILE] [--replays 10000] [--only NAME,...]

W = 2..8 ranks in one launch, peer memory and host mailboxes, every dtype. Each line compares every element of every call:

    sums        both forms, sizes 16 bytes around every internal boundary: bits of all ranks, error against float64
    norms       all_reduce_rms_norm: rows and widths, every number of blocks per row, both kernels: bits, error against float64
    payloads    NaN of every code, infinities, denormals, both zeros: the bits that the sum in rank order has
    traffic     bytes per ordered pair of ranks: one-shot S, two-shot 2 S / W, islands
    epochs      call numbers preset near 2^31 and 2^32, sums and gathers mixed
    replays     two graphs that take turns on one communicator, new input for every replay
    faults      stalled and torn words do no harm; a dropped one ends in an error that names the rank, NaN in the output; a repeated
                one is absorbed, or is found in the slots (where the next but two calls would have taken it)

Random sizes, delays and numbers of blocks over 10^6 calls: soak_virtual.py.
"""

import argparse
import json
import sys
import time

import torch

from fastverify import Communicator, CommunicatorError, all_gather_small, all_reduce, all_reduce_rms_norm
from fastverify.comm.topology import _control

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRANSPORTS, WORLDS, EPS = ("peer", "host"), range(2, 9), 1e-6
STALL, DROP, DUPLICATE, TORN = 1, 2, 3, 4
NO_REGISTERS = 1 << 9


def fold(x: torch.Tensor) -> torch.Tensor:
    """The sum as the contract rounds it: fp32 in rank order, once to the dtype."""
    total = x[0].float()
    for part in x[1:]:
        total = total + part.float()
    return total.to(x.dtype)


class Tally:
    """Counts on the device; one read at the end of a check."""

    def __init__(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.calls = self.elements = self.cases = 0
        self.worst = torch.zeros((), dtype=torch.float64, device="cuda")

    def equal(self, got: torch.Tensor, want: torch.Tensor) -> None:
        self.wrong += (got != want).sum()
        self.elements += got.numel()

    def near(self, got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
        """|got - exact| <= bound; remembers the largest share of it."""
        share = (got.double() - exact).abs() / bound
        self.worst = torch.maximum(self.worst, share.max())
        self.wrong += (share > 1).sum() + got.isnan().sum()
        self.elements += got.numel()


def virtual(world: int, transport: str, **kwargs) -> Communicator:
    kwargs.setdefault("max_bytes", 1 << 16)
    return Communicator.make_virtual(world, "cuda", transport=transport, **kwargs)


def sums(t: Tally, _) -> None:
    for world in WORLDS:
        for transport in TRANSPORTS:
            for blocks in (2, 16):
                comm = virtual(world, transport, blocks=blocks)
                edges = [16 * v for v in (8, 128, 256, 512, 1024, 2048, 8 * world, 256 * world, 1024 * world)] + [comm.max_bytes]
                sizes = sorted({e + d for e in edges for d in (-16, 0, 16) if 16 <= e + d <= comm.max_bytes})
                for dtype in DTYPES:
                    unit = torch.finfo(dtype).eps / 2
                    for size in sizes:
                        n = size // dtype.itemsize - (size // 16 % 3 == 0)  # some ends are not whole vectors
                        x = torch.randn(world, n, device="cuda").to(dtype)
                        want, exact, most = fold(x), x.double().sum(0), x.double().abs().sum(0)
                        for limit in (0, comm.max_bytes):
                            comm.set_one_shot_bytes(limit)
                            out = torch.full_like(x, float("nan"))
                            all_reduce(x, comm, out)
                            t.equal(out, want)
                            t.calls += 1
                        t.near(out[0], exact, unit * exact.abs() + world * 2.0**-24 * most * (1 + unit) + 1e-7)
                        t.cases += 1
                comm.check()


def norms(t: Tally, _) -> None:
    near = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    for world in WORLDS:
        for transport in TRANSPORTS:
            comm = virtual(world, transport, max_bytes=1 << 17)
            for dtype in DTYPES:
                for rows, hidden in ((1, 7168), (4, 7168), (3, 4096), (9, 1000), (2, 2880), (33, 257), (5, 8), (70, 512)):
                    if rows * hidden * dtype.itemsize > comm.max_bytes:
                        continue
                    x = torch.randn(world, rows, hidden, device="cuda").to(dtype)
                    before = (3 * torch.randn(rows, hidden, device="cuda")).to(dtype)
                    weight = (1 + 0.1 * torch.randn(hidden, device="cuda")).to(dtype)
                    new = (before.float() + fold(x).float()).to(dtype)
                    r = new.double()
                    norm = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS) * weight.double()
                    first = None
                    for limit in (0, comm.max_bytes):
                        comm.set_one_shot_bytes(limit)
                        for forced in (0, 1, 2, 4, NO_REGISTERS, NO_REGISTERS | 2, NO_REGISTERS | 4):
                            comm._handle.set_forced(forced)
                            residual, out = before.expand_as(x).contiguous(), torch.full_like(x, float("nan"))
                            all_reduce_rms_norm(x, residual, weight, comm, EPS, out=out)
                            first = out[:1].clone() if first is None else first
                            t.equal(residual, new)
                            t.equal(out, first)  # the same bits on all ranks and from every choice
                            t.calls += 1
                    t.near(first[0], norm, near[dtype] * (norm.abs() + 1e-3))
                    t.cases += 1
            comm.check()


def payloads(t: Tally, _) -> None:
    for world in WORLDS:
        for transport in TRANSPORTS:
            comm = virtual(world, transport)
            for dtype in DTYPES:
                bits, top = (torch.int32, 31) if dtype == torch.float32 else (torch.int16, 15)
                special = torch.tensor([-1, 0, 1, -(1 << top), (1 << (top - 9)) - 3, -(1 << top) + 5], dtype=bits, device="cuda")
                x = torch.randn(world, 4096, device="cuda").to(dtype)
                flat = x.view(bits)
                where = torch.rand(x.shape, device="cuda") < 0.4
                flat[where] = special[torch.randint(0, len(special), (int(where.sum()),), device="cuda")]
                x[0, :8], x[1, 8:16] = float("inf"), float("-inf")
                want = fold(x)
                keep = ~want.isnan()
                for limit in (0, comm.max_bytes):
                    comm.set_one_shot_bytes(limit)
                    out = torch.zeros_like(x)
                    all_reduce(x, comm, out)
                    t.equal(out.isnan(), want.isnan().expand_as(out))
                    t.equal(out[:, keep].view(bits), want[keep].view(bits).expand(world, -1))  # signs of zeros included
                    t.calls += 1
                t.cases += 1
            comm.check()


def traffic(t: Tally, say) -> None:
    for world in WORLDS:
        comm = virtual(world, "peer", hooks=True)
        size = 64 * 16 * world
        x = torch.randn(world, size // 2, device="cuda").bfloat16()
        others = 1 - torch.eye(world, dtype=torch.int32, device="cuda")
        for limit, per_pair in ((comm.max_bytes, size), (0, 2 * size // world)):
            comm.set_one_shot_bytes(limit)
            before = comm.hooks[:, 8:8 + world].clone()
            all_reduce(x, comm)
            sent = comm.hooks[:, 8:8 + world] - before
            t.equal(sent, per_pair * others)
            t.calls += 1
            if world == 8:
                say(f"W = 8, S = {size}: {'one' if limit else 'two'}-shot {int(sent[0, 1])} bytes per link, {int(sent[0].sum()) / size:g} S out of a rank")
        t.cases += 1
        comm.check()


def epochs(t: Tally, _) -> None:
    for world in WORLDS:
        for transport in TRANSPORTS:
            for epoch in (1, (1 << 20) - 5, (1 << 31) - 30, (1 << 32) - 30):
                comm = virtual(world, transport, epoch=epoch)
                for call in range(60):
                    if call % 4 == 3:
                        x = torch.randint(-(2**62), 2**62, (world, 40 + call), device="cuda")
                        t.equal(all_gather_small(x, comm), x.expand(world, *x.shape))
                    else:
                        x = torch.randn(world, 100 + 50 * call, device="cuda")
                        comm.set_one_shot_bytes(0 if call % 2 else comm.max_bytes)
                        t.equal(all_reduce(x, comm), fold(x))
                    t.calls += 1
                after = (epoch + 60) % (1 << 32) + (epoch + 60 >= 1 << 32)  # one step a call, never 0
                t.equal(comm.state[:, 0].to(torch.int64) & 0xFFFFFFFF, torch.full((world,), after, dtype=torch.int64, device="cuda"))
                comm.check()
                t.cases += 1


def replays(t: Tally, say) -> None:
    for transport in TRANSPORTS:
        comm = virtual(4, transport)
        graphs, inputs = [], [torch.zeros(4, 300, device="cuda"), torch.zeros(4, 9000, device="cuda")]
        for x, limit in zip(inputs, (comm.max_bytes, 0)):
            comm.set_one_shot_bytes(limit)
            out = torch.zeros_like(x)
            all_reduce(x, comm, out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x.normal_()
                for _ in range(4):
                    all_reduce(x, comm, out=out)
                t.wrong += (out != x[0] + x[1] + x[2] + x[3]).sum()
            graphs.append(graph)
        order = torch.randint(0, 2, (say.replays,), generator=torch.Generator().manual_seed(1)).tolist()
        for i, which in enumerate(order):
            graphs[which].replay()
            t.elements += inputs[which].numel()
            if i % 100 == 0:  # an eager call between them
                x = torch.randn(4, 500, device="cuda")
                t.equal(all_reduce(x, comm), fold(x))
                t.calls += 1
        t.calls += 4 * len(order)
        t.cases += len(order)
        torch.cuda.synchronize()
        comm.check()


def stray(comm: Communicator) -> int:
    """Words of the slots that are not empty between calls."""
    control = _control()
    slots = comm.slabs[:, control.SLAB_HEADER:control.gather_offset(comm.world, comm.max_bytes)]
    return int((slots != 0xFF).sum())


def faults(t: Tally, say) -> None:
    found = dict.fromkeys(("stalls", "torn", "dropped, named", "repeated, absorbed", "repeated, found in the slots"), 0)
    for world in (2, 3, 8):
        for transport in TRANSPORTS:
            for limit in (0, 1 << 16):
                for fault in (STALL, TORN, DUPLICATE, DROP):
                    comm = virtual(world, transport, hooks=True, one_shot_bytes=limit, deadline=0.3 if fault == DROP else 10.0)
                    sender, reader = world - 1, 0
                    comm.hooks[sender, :4] = torch.tensor([fault, reader, 3, 100_000])
                    calls = 1 if fault in (DROP, DUPLICATE) else 4
                    for _ in range(calls):
                        x = torch.randn(world, 700 * world, device="cuda")
                        out = torch.zeros_like(x)
                        all_reduce(x, comm, out)
                        t.calls += 1
                        if fault != DROP:
                            t.equal(out, fold(x))
                    torch.cuda.synchronize()
                    t.cases += 1
                    if fault == DROP:
                        t.wrong += int(not out[reader].isnan().any())
                        try:
                            comm.check()
                            t.wrong += 1
                        except CommunicatorError as error:
                            named = f"rank(s) [{sender}] did not come (seen by rank {reader})" in str(error)
                            t.wrong += int(not named)
                            found["dropped, named"] += named
                        again = all_reduce(x, comm)
                        t.wrong += (~again[reader].isnan()).sum()  # a lost communicator gives NaN at once
                        continue
                    comm.check()
                    if fault == DUPLICATE:
                        found["repeated, found in the slots" if stray(comm) else "repeated, absorbed"] += 1
                    else:
                        t.wrong += stray(comm)
                        found["stalls" if fault == STALL else "torn"] += 1
    say("; ".join(f"{name}: {count}" for name, count in found.items()))


CHECKS = dict(sums=sums, norms=norms, payloads=payloads, traffic=traffic, epochs=epochs, replays=replays, faults=faults)


def main(args) -> int:
    def say(text: str) -> None:
        notes.append(text)
    say.replays = args.replays
    torch.manual_seed(args.seed)
    rows, bad = [], 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}: python {' '.join(sys.argv)}")
    for name in args.only.split(",") if args.only else CHECKS:
        t, notes, start = Tally(), [], time.time()
        CHECKS[name](t, say)
        torch.cuda.synchronize()
        row = dict(check=name, cases=t.cases, calls=t.calls, elements=t.elements, wrong=int(t.wrong), worst_of_bound=round(float(t.worst), 3),
                   seconds=round(time.time() - start, 1), notes=notes)
        bad += row["wrong"]
        rows.append(row)
        print("  ".join(f"{k} {v}" for k, v in row.items() if v not in ([], 0.0) or k == "wrong"), flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, date=time.strftime("%Y-%m-%dT%H:%M"),
                           command=" ".join(sys.argv), checks=rows), f, indent=1)
    return int(bad != 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--only")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(parser.parse_args()))
