"""Communicator: the group, the memory and the handle behind all_reduce, all_reduce_rms_norm and all_gather_small."""

from typing import Optional

import torch
import torch.distributed as dist

from .topology import _control

DEADLINE_SECONDS = 10.0
BLOCKS = 16  # per rank: enough to fill a link, few enough to be resident beside anything else
_EPOCH, _MISSING_MASK, _STATE_WORDS = 0, 5, 8
_FAILURE, _FAILED_RANK, _FAILED_EPOCH, _FAILED_STAGE = 0, 1, 3, 4


class CommunicatorError(RuntimeError):
    """A collective did not complete: ranks are missing or lost. The communicator must be made again."""


class Communicator:
    """Collectives of one process group on one device.

    group: torch.distributed process group (default: the default group). device: where tensors live; on the CPU the group
        itself (gloo) moves the data and the op folds it, so that every device has one meaning of the sum.
    max_bytes: the largest input of one rank; sizes the memory. deadline: seconds a call waits for its peers.
    one_shot_bytes: inputs up to here take one hop (W - 1 copies), larger ones two; None: the built-in rule per W.

    One communicator serves one stream and one graph's replays at a time. Use as a context manager or call close().
    `Communicator.virtual(world, device)` makes `world` ranks inside this process for tests and models of traffic.
    """

    def __init__(self, group=None, device: "torch.device | str" = "cpu", max_bytes: int = 1 << 20, *,
                 deadline: float = DEADLINE_SECONDS, one_shot_bytes: Optional[int] = None):
        self.device = torch.device(device)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Communicator: torch.distributed must be initialised; got no process group. "
                               "Fix: torch.distributed.init_process_group(...), or Communicator.virtual for one process.")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.virtual = False
        if self.device.type != "cpu":
            raise RuntimeError(f"Communicator: device must be cpu; got {self.device}. Fix: use torch.distributed's NCCL "
                               "for GPU tensors until a GPU transport is built in.")
        self.gathers = True
        self._open("gathered", -1, max_bytes, one_shot_bytes, deadline, [])

    @classmethod
    def virtual(cls, world: int, device: "torch.device | str" = "cuda", max_bytes: int = 1 << 20, *,
                transport: str = "peer", deadline: float = DEADLINE_SECONDS, one_shot_bytes: Optional[int] = None,
                blocks: int = BLOCKS, hooks: bool = False, epoch: int = 1, emulated: bool = False) -> "Communicator":
        """`world` ranks on one device in one launch; tensors get a leading [world].

        transport "peer": device memory, "host": pinned host memory. hooks: words for injected faults and traffic counters
        (self.hooks int32 [world, 16]). epoch: of the first call. emulated: CPU memory for the kernels' emulator.
        """
        self = cls.__new__(cls)
        self.device, self.group = torch.device(device), None
        self.rank, self.world, self.virtual, self.gathers = 0, world, True, False
        control = _control()
        size = control.slab_bytes(world, max_bytes, transport)
        memory = "cpu" if emulated or transport == "host" else self.device
        pin = transport == "host" and not emulated
        self.slabs = torch.zeros(world, size, dtype=torch.uint8, device=memory, pin_memory=pin)
        if transport == "peer":  # slots wait for words that are not all ones
            self.slabs[:, control.SLAB_HEADER:control.gather_offset(world, max_bytes, transport)] = 0xFF
        self.state = torch.zeros(world, _STATE_WORDS, dtype=torch.int32, device="cpu" if emulated else self.device)
        self.state[:, _EPOCH] = epoch if epoch < 1 << 31 else epoch - (1 << 32)
        self.status = torch.zeros(world, _STATE_WORDS, dtype=torch.int32, pin_memory=not emulated)
        self.hooks = torch.zeros(world, 16, dtype=torch.int32, device=self.state.device) if hooks else None
        bases = [self.slabs[r].data_ptr() for r in range(world)]
        ranks = [(bases, self.state[r].data_ptr(), self.status[r].data_ptr(), self.hooks[r].data_ptr() if hooks else 0)
                 for r in range(world)]
        index = -1 if emulated else torch.empty(0, device=self.device).device.index
        self._open(transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks)
        return self

    def _open(self, transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks=BLOCKS) -> None:
        self.transport, self.max_bytes = transport, max_bytes
        self.one_shot_bytes = default_one_shot_bytes(self.world, max_bytes) if one_shot_bytes is None else one_shot_bytes
        self._handle = _control().Handle(
            world=self.world, rank=self.rank, local_ranks=self.world if self.virtual else 1, transport=transport,
            device=index, blocks=blocks, max_bytes=max_bytes, one_shot_bytes=self.one_shot_bytes,
            deadline_ns=int(deadline * 1e9), ranks=ranks)
        self.handle = self._handle.address

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [world, *x.shape], through the process group. CPU only."""
        gathered = x.new_empty((self.world, *x.shape))
        try:
            dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=self.group)
        except RuntimeError as exc:
            raise CommunicatorError(
                f"Communicator: all {self.world} ranks must take part; got {exc}. Fix: look at the ranks that left or hang, "
                "then make the process group and the communicator again.") from exc
        return gathered

    def check(self) -> None:
        """Raises CommunicatorError if a call has given up, naming the ranks. Waits for nothing; call it after a sync."""
        if self.gathers:
            return
        failed = [w for w in ([int(v) for v in row] for row in self.status) if w[_FAILURE]]
        if not failed:
            return
        # The root: the earliest call, and in it whoever waited for an input; waiting for an owner's result is a consequence.
        first = min(failed, key=lambda w: (w[_FAILED_EPOCH] & 0xFFFFFFFF, not w[_MISSING_MASK], w[_FAILED_STAGE], w[_FAILURE]))
        missing = [p for p in range(self.world) if first[_MISSING_MASK] >> p & 1]
        who = f"rank(s) {missing} did not come" if missing else "a peer gave up first"
        raise CommunicatorError(
            f"Communicator: every rank must reach call {first[_FAILED_EPOCH] & 0xffffffff} within the deadline; got: {who} "
            f"(seen by rank {first[_FAILED_RANK]}). Fix: look at those ranks, then make the communicator again.")

    def close(self) -> None:
        """Later calls are refused in words."""
        self._handle.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def default_one_shot_bytes(world: int, max_bytes: int) -> int:
    """Where one-shot stops paying when nothing was measured: research on PCIe Gen5 x16 (docs/performance.md)."""
    return {1: max_bytes, 2: max_bytes, 3: 32 << 10, 4: 24 << 10}.get(world, 8 << 10)
