"""The memory of a GPU communicator: made once before the first call, given back after the last. Nothing of it is on the step path."""

import os
import uuid

import torch
import torch.distributed as dist

from .topology import _control


def wait_until_idle(device: torch.device) -> None:
    """Set-up and close only: what was written must be there, and nobody may still be writing."""
    torch.cuda.synchronize(device)


def peer_slabs(comm, max_bytes: int) -> tuple:
    """(owners, addresses by rank): this rank's slab in GPU memory and those of its peers, mapped through CUDA IPC."""
    control = _control()
    own = control.DeviceSlab(control.slab_bytes(comm.world, max_bytes, "peer"))
    first = control.gather_offset(comm.world, max_bytes, "peer")
    own.fill(0, control.slab_bytes(comm.world, max_bytes, "peer"), 0)
    own.fill(control.SLAB_HEADER, first - control.SLAB_HEADER, 0xFF)  # slots wait for words that are not all ones
    handles = comm._exchange(own.ipc_handle())
    peers = [own if r == comm.rank else control.PeerSlab(h) for r, h in enumerate(handles)]
    return peers, [p.address for p in peers]


def host_slabs(comm, max_bytes: int) -> tuple:
    """(owners, device addresses by rank): one mailbox per reader in /dev/shm, mapped by every rank's GPU."""
    control = _control()
    size = control.slab_bytes(comm.world, max_bytes, "host")
    own = control.HostRegion(f"/fastverify-{os.getpid()}-{uuid.uuid4().hex[:12]}", size, create=True)
    names = comm._exchange(own.name)
    regions = [own if r == comm.rank else control.HostRegion(n, size, create=False) for r, n in enumerate(names)]
    dist.barrier(comm._control_group)
    own.unlink()  # the mappings keep it; nothing stays behind when a process dies
    for turn in range(comm.world):  # registering the same pages from two processes at once sometimes fails
        if turn == comm.rank:
            for region in regions:
                region.register_cuda()
        dist.barrier(comm._control_group)
    return regions, [r.device_address for r in regions]
