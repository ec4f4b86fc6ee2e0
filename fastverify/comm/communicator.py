"""Communicator: the group, the memory and the handle behind all_reduce, all_reduce_rms_norm and all_gather_small."""

from typing import Optional

import torch
import torch.distributed as dist

from .slabs import call_state, host_slabs, peer_slabs, wait_until_idle
from .topology import _control

DEADLINE_SECONDS = 10.0
OVERLAP_ROWS = 256  # from here on a row-parallel linear is cut in chunks whose sums overlap the next chunk's product
BLOCKS = 32  # per rank: enough to fill a link, few enough to be resident beside anything else
_MISSING_MASK, _STATUS_WORDS = 5, 8
_FAILURE, _FAILED_RANK, _FAILED_EPOCH, _FAILED_STAGE = 0, 1, 3, 4
BACKENDS = ("auto", "peer", "host")


class CommunicatorError(RuntimeError):
    """A collective did not complete: ranks are missing or lost. The communicator must be made again."""


class Communicator:
    """Collectives of one process group on one device.

    group: torch.distributed process group (default: the default group); only set-up goes through it, over a gloo group
        of its own. device: where tensors live. On the CPU the group itself moves the data and the op folds it, so that
        every device has one meaning of the sum.
    max_bytes: the largest input of one rank; sizes the memory (6 W max_bytes on the GPU).
    backend, on CUDA: "peer" (GPU memory that peers write, through NVLink or PCIe), "host" (mailboxes in /dev/shm, for
        machines without peer access), "auto": peer where every pair proves it (fastverify.comm.peer_check), else host.
    deadline: seconds a call waits for its peers before it gives up on all ranks.
    one_shot_bytes: inputs up to here take one hop (W - 1 copies), larger ones two; None: a rule per W.

    One communicator serves one stream and one graph's replays at a time: a call on a second stream is refused.
    Use as a context manager or call close() on every rank. `Communicator.make_virtual(world, device)` makes `world` ranks
    inside this process, for tests and for counting traffic.
    """

    def __init__(self, group=None, device: "torch.device | str" = "cpu", max_bytes: int = 1 << 20, *, backend: str = "auto",
                 deadline: float = DEADLINE_SECONDS, one_shot_bytes: Optional[int] = None, blocks: int = BLOCKS):
        self.device = torch.device(device)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Communicator: torch.distributed must be initialised; got no process group. "
                               "Fix: torch.distributed.init_process_group(...), or Communicator.make_virtual for one process.")
        if backend not in BACKENDS:
            raise ValueError(f"Communicator: backend must be {'|'.join(BACKENDS)}; got {backend!r}. Fix: leave it at \"auto\".")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.virtual, self.gathers = False, self.device.type == "cpu"
        self._stream, self._side, self._memory, self.overlap_rows = None, None, [], OVERLAP_ROWS
        if self.gathers:
            self.reason = "CPU tensors go through the process group"
            self._open("gathered", -1, max_bytes, one_shot_bytes, deadline, [], blocks)
            return
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._control_group = dist.new_group(dist.get_process_group_ranks(group or dist.group.WORLD), backend="gloo")
        transport, self.reason = self._choose(backend)
        with torch.cuda.device(self.device):
            torch.zeros(1, device=self.device)  # the context that the control plane uses
            self._memory, slabs = (peer_slabs if transport == "peer" else host_slabs)(self, max_bytes)
            self.state = call_state(1, self.device)
            self.status = torch.zeros(1, _STATUS_WORDS, dtype=torch.int32, pin_memory=True)
            wait_until_idle(self.device)
        ranks = [(slabs, self.state.data_ptr(), self.status.data_ptr(), 0)]
        self._open(transport, self.device.index, max_bytes, one_shot_bytes, deadline, ranks, blocks)
        dist.barrier(self._control_group)  # every slab is mapped and clean before the first call

    def _choose(self, backend: str) -> tuple:
        if backend != "auto":
            return backend, f'backend="{backend}" was asked for'
        from .peer_check import peer_verdict
        reasons = self._exchange(peer_verdict(self.device, self._exchange(_device_key(self.device)), self.rank))
        bad = [f"rank {r}: {text}" for r, text in enumerate(reasons) if text]
        return ("host", "; ".join(bad)) if bad else ("peer", "every pair of GPUs proved peer access")

    def _exchange(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self._control_group)
        return values

    @classmethod
    def make_virtual(cls, world: int, device: "torch.device | str" = "cuda", max_bytes: int = 1 << 20, *,
                     transport: str = "peer", deadline: float = DEADLINE_SECONDS, one_shot_bytes: Optional[int] = None,
                     blocks: int = BLOCKS, hooks: bool = False, epoch: int = 1, emulated: bool = False) -> "Communicator":
        """`world` ranks on one device in one launch; tensors get a leading [world].

        transport "peer": device memory, "host": pinned host memory. hooks: words for injected faults and traffic counters
        (self.hooks int32 [world, 16]). epoch: of the first call. emulated: CPU memory for the kernels' emulator.
        """
        self = cls.__new__(cls)
        self.device, self.group, self.reason = torch.device(device), None, "virtual ranks"
        self.rank, self.world, self.virtual, self.gathers = 0, world, True, False
        self._stream, self._side, self._memory, self.overlap_rows = None, None, [], OVERLAP_ROWS
        control = _control()
        size = control.slab_bytes(world, max_bytes)
        memory = "cpu" if emulated or transport == "host" else self.device
        pin = transport == "host" and not emulated
        self.slabs = torch.zeros(world, size, dtype=torch.uint8, device=memory, pin_memory=pin)
        self.slabs[:, control.SLAB_HEADER:control.gather_offset(world, max_bytes)] = 0xFF
        self.state = call_state(world, "cpu" if emulated else self.device, epoch)
        self.status = torch.zeros(world, _STATUS_WORDS, dtype=torch.int32, pin_memory=not emulated)
        self.hooks = torch.zeros(world, 16, dtype=torch.int32, device=self.state.device) if hooks else None
        bases = [self.slabs[r].data_ptr() for r in range(world)]
        ranks = [(bases, self.state[r].data_ptr(), self.status[r].data_ptr(), self.hooks[r].data_ptr() if hooks else 0)
                 for r in range(world)]
        index = -1 if emulated else torch.empty(0, device=self.device).device.index
        self._open(transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks)
        return self

    def _open(self, transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks) -> None:
        self.transport, self.max_bytes = transport, max_bytes
        self.one_shot_bytes = default_one_shot_bytes(self.world, max_bytes) if one_shot_bytes is None else one_shot_bytes
        self._handle = _control().Handle(
            world=self.world, rank=self.rank, local_ranks=self.world if self.virtual else 1, transport=transport,
            device=index, blocks=blocks, max_bytes=max_bytes, one_shot_bytes=self.one_shot_bytes,
            deadline_ns=int(deadline * 1e9), ranks=ranks)
        self.handle = self._handle.address

    def claim_stream(self) -> None:
        """Refuses a call on another stream than the first one's: two streams would mix their messages. Capture is free."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = stream
        if stream not in (self._stream, self._side):
            raise RuntimeError("Communicator: all calls must be on one stream; got a second stream. Fix: make one Communicator "
                               "per stream, or call comm.move_stream() after both streams are idle.")

    def side_stream(self) -> "torch.cuda.Stream":
        """The stream of overlapped chunks. It joins the caller's stream before and after, so the calls stay in order."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        return self._side

    def move_stream(self) -> None:
        """The next call may be on another stream; the caller has made sure that the old one is idle."""
        self._stream = None

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

    def gather_rows(self, words: torch.Tensor) -> torch.Tensor:
        """words [R, K] of every rank -> [world, R, K], in as many small gathers as their size takes."""
        from .all_gather_small import all_gather_small
        rows = max(1, _control().GATHER_BYTES // max(1, words.shape[1] * words.element_size()))
        if words.shape[0] <= rows:
            return all_gather_small(words, self)
        return torch.cat([all_gather_small(part, self) for part in words.split(rows)], dim=1)

    def from_first(self, value):
        """What rank 0 says: for choices that depend on a clock. A host round trip; not inside a captured step."""
        box = [value]
        group = self.group if self.gathers else self._control_group
        dist.broadcast_object_list(box, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
        return box[0]

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
        """Later calls are refused in words. Collective on CUDA: peers may still be writing until all have come."""
        self._handle.close()
        if self._memory:
            wait_until_idle(self.device)
            try:
                dist.barrier(self._control_group)
            except RuntimeError:
                pass  # a peer is gone: nobody writes any more
            self._memory = []

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _device_key(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def default_one_shot_bytes(world: int, max_bytes: int) -> int:
    """Where one-shot stops paying when nothing was measured: research on PCIe Gen5 x16 (docs/performance.md)."""
    return {1: max_bytes, 2: max_bytes, 3: 32 << 10, 4: 24 << 10}.get(world, 8 << 10)
