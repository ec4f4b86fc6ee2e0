"""The memory of a GPU communicator: made once before the first call, given back after the last. Nothing of it is on the step path.

Every step that may fail on one rank is taken by all ranks together: either all go on or all raise the same words.
"""

import os
import uuid

import torch
import torch.distributed as dist

from .topology import _control


def wait_until_idle(device: torch.device) -> None:
    """Set-up and close only: what was written must be there, and nobody may still be writing."""
    torch.cuda.synchronize(device)


def call_state(ranks: int, device, epoch: int = 1) -> torch.Tensor:
    """int32 [ranks, words]: what the kernels of each rank keep between calls (csrc/comm/fv_comm.h), before call `epoch`."""
    control = _control()
    state = torch.zeros(ranks, control.STATE_WORDS, dtype=torch.int32, device=device)
    state[:, :control.EPOCH_WORDS] = epoch if epoch < 1 << 31 else epoch - (1 << 32)
    return state


def peer_slabs(comm, max_bytes: int) -> tuple:
    """(owners, addresses by rank): this rank's slab in GPU memory and those of its peers, mapped through CUDA IPC."""
    control = _control()
    size, first = control.slab_bytes(comm.world, max_bytes), control.gather_offset(comm.world, max_bytes)

    def make() -> tuple:
        slab = control.DeviceSlab(size)
        slab.fill(0, size, 0)
        slab.fill(control.SLAB_HEADER, first - control.SLAB_HEADER, 0xFF)  # slots wait for words that are not all ones
        return slab, slab.ipc_handle()
    own, handle = comm._together("making a slab", make)
    handles = comm._exchange(handle)
    peers = comm._together("mapping the slabs of the peers",
                           lambda: [own if r == comm.rank else control.PeerSlab(h) for r, h in enumerate(handles)])
    return peers, [p.address for p in peers]


def host_slabs(comm, max_bytes: int) -> tuple:
    """(owners, device addresses by rank): one mailbox per reader in /dev/shm, mapped by every rank's GPU."""
    control = _control()
    size = control.slab_bytes(comm.world, max_bytes)
    name = f"/fastverify-{os.getpid()}-{uuid.uuid4().hex[:12]}"

    def make():
        region = control.HostRegion(name, size, create=True)
        region.fill(control.SLAB_HEADER, control.gather_offset(comm.world, max_bytes) - control.SLAB_HEADER, 0xFF)  # empty slots
        return region
    own = comm._together("making a mailbox", make)
    names = comm._exchange(own.name)
    regions = comm._together("mapping the mailboxes of the peers",
                             lambda: [own if r == comm.rank else control.HostRegion(n, size, create=False)
                                      for r, n in enumerate(names)])
    own.unlink()  # the mappings keep it; nothing stays behind when a process dies
    for turn in range(comm.world):  # registering the same pages from two processes at once sometimes fails
        comm._together("registering the mailboxes", lambda: [r.register_cuda() for r in regions] if turn == comm.rank else None)
    return regions, [r.device_address for r in regions]
