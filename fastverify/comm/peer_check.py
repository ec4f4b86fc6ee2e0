"""Does peer access really carry data? Proved with stores and loads of kernels and a byte compare, in a subprocess."""

import json
import subprocess
import sys

import torch

from .. import _ops
from .slabs import call_state
from .topology import _control

SECONDS = 60
_cache: dict = {}


def peer_verdict(device: torch.device, keys: list, rank: int) -> str:
    """"" if every pair (this GPU, another rank's GPU) carries data both ways; else why not. Cached per set of GPUs.

    keys: UUID of every rank's GPU. Ranks that share a GPU need no peer access. GPUs that this process cannot see cannot
    be proved from here and count as failed. The check runs in a process of its own with a deadline: a broken path may
    hang or kill the process that touches it.
    """
    others = sorted({k for k in keys if k != keys[rank]})
    if not others:
        return ""
    key = (keys[rank], *others)
    if key not in _cache:
        _cache[key] = _run(key)
    return _cache[key]


def _run(uuids: tuple) -> str:
    try:
        done = subprocess.run([sys.executable, "-m", "fastverify.comm.peer_check", json.dumps(uuids)], capture_output=True,
                              text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"the peer access check hung for {SECONDS} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return f"the peer access check died (exit {done.returncode}): {done.stderr.strip().splitlines()[-1:]}"
    return json.loads(lines[-1])


def check_pairs(uuids: list) -> str:
    """In the child: the exchange kernel between the first GPU and each other one, random bytes; "" or the reason."""
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    missing = [u for u in uuids if u not in seen]
    if missing:
        return f"GPU {missing[0]} is not visible to this process (CUDA_VISIBLE_DEVICES)"
    for other in uuids[1:]:
        reason = check_pair(seen[uuids[0]], seen[other])
        if reason:
            return f"cuda:{seen[uuids[0]]} and cuda:{seen[other]}: {reason}"
    return ""


def check_pair(a: int, b: int, rounds: int = 8) -> str:
    """Each GPU's kernel stores random bytes into the other's memory; all of them must arrive, in both directions."""
    for one, two in ((a, b), (b, a)):
        if not torch.cuda.can_device_access_peer(one, two):
            return "the driver offers no peer access"
    control, size, n = _control(), 1 << 16, 1 << 16
    devices = [torch.device("cuda", a), torch.device("cuda", b)]
    for d, e in (devices, devices[::-1]):
        torch.ones(1, device=d).to(e)  # torch enables peer access between the two contexts here
    slabs = [torch.zeros(control.slab_bytes(2, size), dtype=torch.uint8, device=d) for d in devices]
    state = [call_state(1, d) for d in devices]
    status = [torch.zeros(control.STATUS_WORDS, dtype=torch.int32, device="cpu", pin_memory=True) for _ in devices]
    handles = []
    for r in (0, 1):
        slabs[r][control.SLAB_HEADER:control.gather_offset(2, size)] = 0xFF
        handles.append(control.Handle(
            world=2, rank=r, local_ranks=1, transport="peer", device=devices[r].index, blocks=8, max_bytes=size, one_shot_bytes=size,
            deadline_ns=5_000_000_000, ranks=[([s.data_ptr() for s in slabs], state[r].data_ptr(), status[r].data_ptr(), 0)]))
    for d in devices:
        torch.cuda.synchronize(d)
    for _ in range(rounds):
        x = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=d) for d in devices]
        out = [torch.zeros(2, n, dtype=torch.uint8, device=d) for d in devices]
        for d in devices:
            torch.cuda.synchronize(d)
        for r in (0, 1):
            _ops.get("all_gather_small")(x[r], out[r], handles[r].address)
        for d in devices:
            torch.cuda.synchronize(d)
        if any(int(s[0]) for s in status):
            return "stores never arrived"
        for r in (0, 1):
            want = torch.stack([v.to(devices[r]) for v in x])
            if not torch.equal(out[r], want):
                return f"{int((out[r] != want).sum())} of {2 * n} bytes arrived wrong"
    return ""


if __name__ == "__main__":
    print(json.dumps(check_pairs(json.loads(sys.argv[1]))))
