"""Virtual ranks under random sizes, dtypes, forms and delays, checked every call: python soak_virtual.py SECONDS [SEED]."""

import sys
import time

import torch

from fastverify import Communicator, all_gather_small, all_reduce, all_reduce_rms_norm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main(seconds: float, seed: int) -> int:
    g = torch.Generator(device="cuda").manual_seed(seed)
    cpu = torch.Generator().manual_seed(seed)
    calls, wrong = 0, torch.zeros((), dtype=torch.int64, device="cuda")
    start = time.time()
    while time.time() - start < seconds:
        world = int(torch.randint(2, 9, (), generator=cpu))
        transport = "peer" if torch.rand((), generator=cpu) < 0.7 else "host"
        epoch = [1, (1 << 31) - 50, (1 << 32) - 50][int(torch.randint(0, 3, (), generator=cpu))]
        comm = Communicator.make_virtual(world, "cuda", 1 << 17, transport=transport, epoch=epoch)
        for _ in range(400):
            dtype = DTYPES[int(torch.randint(0, 3, (), generator=cpu))]
            n = int(torch.randint(1, (1 << 17) // dtype.itemsize + 1, (), generator=cpu))
            if torch.rand((), generator=cpu) < 0.5:
                n = max(1, min((1 << 17) // dtype.itemsize, 64 * world * int(torch.randint(1, 20, (), generator=cpu)) + int(torch.randint(-8, 9, (), generator=cpu))))
            comm._handle.set_one_shot_bytes(0 if torch.rand((), generator=cpu) < 0.5 else comm.max_bytes)
            kind = int(torch.randint(0, 4, (), generator=cpu))
            if kind == 0:
                x = torch.randint(-128, 127, (world, min(n, 60000)), device="cuda", generator=g, dtype=torch.int8)
                wrong += (all_gather_small(x, comm) != x.unsqueeze(0)).sum()
            elif kind == 1:
                h = 8 * int(torch.randint(1, 900, (), generator=cpu))
                rows = max(1, min(5, (1 << 17) // dtype.itemsize // h))
                x = torch.randn(world, rows, h, device="cuda", generator=g).to(dtype)
                r = torch.randn(1, rows, h, device="cuda", generator=g).to(dtype).expand(world, -1, -1).contiguous()
                total = x[0].float()
                for part in x[1:]:
                    total = total + part.float()
                want = (r[0].float() + total.to(dtype).float()).to(dtype)
                out = all_reduce_rms_norm(x, r, torch.ones(h, device="cuda", dtype=dtype), comm)
                wrong += (r != want).sum() + (out != out[:1]).sum()
            else:
                x = torch.randn(world, n, device="cuda", generator=g).to(dtype)
                total = x[0].float()
                for part in x[1:]:
                    total = total + part.float()
                wrong += (all_reduce(x, comm) != total.to(dtype)).sum()
            calls += 1
        torch.cuda.synchronize()
        comm.check()
    print(f"{calls} calls in {time.time() - start:.0f} s, wrong elements {int(wrong)}")
    return int(int(wrong) != 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
