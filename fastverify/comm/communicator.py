"""Communicator: the group, the memory and the handle behind all_reduce, all_reduce_rms_norm and all_gather_small."""

import uuid
from datetime import timedelta
from typing import Callable, Optional

import torch
import torch.distributed as dist

from .._checks import describe
from .missing import lost_call
from .nccl import END_SECONDS, open_nccl, wait_or_abort
from .slabs import call_state, host_slabs, peer_slabs, wait_until_idle
from .topology import _control

DEADLINE_SECONDS = 10.0
SETUP_SECONDS = 120.0  # of one step of set-up: a rank that does not come to it is an error on the others
# From so many rows on a row-parallel linear is cut where nothing was measured (docs/communication.md): NCCL's blocks slow the product
# down by what the overlap gains, and over NVLink every cut costs more than it hides.
OVERLAP_ROWS = {"gathered": 256, "host": 1024, "peer": 1 << 30, "nccl": 1 << 30}
BLOCKS = 64  # at most, per rank: enough to fill a link, few enough to be resident beside anything else
FP8_BYTES = 64 << 10     # wire="fp8": up to here coding costs what it saves (docs/performance.md)
ISLAND_BYTES = 32 << 10  # islands=True: up to here a third hop costs what the link between saves
MOST_PIECES = 32  # of an all_reduce_columns that waits for them
_LOST_WORDS = ("connection", "closed", "timed out", "timeout", "reset by peer", "refused", "broken pipe")  # of gloo's errors
BACKENDS = ("auto", "peer", "host", "nccl")


class CommunicatorError(RuntimeError):
    """A collective did not complete: ranks are missing or lost. The communicator must be made again."""


class Communicator:
    """Collectives of one process group on one device.

    group: torch.distributed process group (default: the default group); only set-up goes through it, over a gloo group
        of its own. device: where tensors live. On the CPU the group itself moves the data and the op folds it, so that
        every device has one meaning of the sum. There a call waits as long as the group's timeout says (init_process_group), not
        `deadline`, and gloo aborts the process where ranks call with different sizes: debug=True names such a call instead.
    max_bytes: the largest input of one rank; sizes the memory (6 W max_bytes on the GPU).
    backend, on CUDA: "peer" (GPU memory that peers write, through NVLink or PCIe), "host" (mailboxes in /dev/shm, for
        machines without peer access), "nccl" (NCCL alone, a communicator of our own), "auto": peer where every pair proves
        it (fastverify.comm.peer_check), else host, else NCCL; beside it NCCL, where there is one, for inputs above a
        measured crossover and above max_bytes.
    deadline: seconds a call waits for its peers before it gives up on all ranks; the last eighth of it, 0.1 to 1 s, is for hearing
        who else gives up. NCCL itself waits for ever: wait(). Not on the CPU.
    one_shot_bytes: inputs up to here take one hop (W - 1 copies), larger ones two; None: measured ("auto") or a rule per W.
    nccl: options of ncclConfig_t (fastverify.comm.nccl.nccl_config); given, NCCL stands beside "peer" and "host" too.
    deterministic: NCCL is used only where the backend is "nccl": its sums are equal on all ranks but may round elsewhere
        than ours (at W = 2 they are the same).
    wire: "exact", or "fp8": LOSSY. Inputs above FP8_BYTES travel as e4m3 with a scale per 128 values, 0.52 of the bytes of
        bf16; each value is off by up to 1/16 of itself. For slow links and many rows, never chosen by itself.
    islands: True where ranks [0, W/2) and [W/2, W) each sit behind a switch or socket of their own: inputs above ISLAND_BYTES
        are summed inside first and S bytes in all cross the link between, instead of 4 S (W = 8). The sum of an island is
        rounded before it crosses, so results differ from the other forms' in the last bit; refused with deterministic=True.
    debug: every call that is not captured first compares op, shape and dtype of all ranks on the host (slow, synchronous) and
        raises CommunicatorError on every rank with who called what, instead of a wrong sum or a wait until the deadline.

    One communicator serves one stream and one graph's replays at a time: a call on a second stream is refused.
    Use as a context manager or call close() on every rank. `Communicator.make_virtual(world, device)` makes `world` ranks
    inside this process, for tests and for counting traffic.
    """

    def __init__(self, group=None, device: "torch.device | str" = "cpu", max_bytes: int = 1 << 20, *, backend: str = "auto",
                 deadline: float = DEADLINE_SECONDS, one_shot_bytes: Optional[int] = None, blocks: int = BLOCKS,
                 nccl: Optional[dict] = None, deterministic: bool = False, debug: bool = False, wire: str = "exact",
                 islands: bool = False):
        self.device = torch.device(device)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Communicator: torch.distributed must be initialised; got no process group. "
                               "Fix: torch.distributed.init_process_group(...), or Communicator.make_virtual for one process.")
        if backend not in BACKENDS:
            raise ValueError(f"Communicator: backend must be {'|'.join(BACKENDS)}; got {backend!r}. Fix: leave it at \"auto\".")
        check_forms(wire, islands, deterministic)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"Communicator: device must be cpu|cuda; got {self.device}. Fix: pass the device that the tensors live on.")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.virtual, self.gathers = False, self.device.type == "cpu"
        self._reset()
        self.debug, self.wire, self.islands = debug, wire, islands
        if self.gathers:
            self.reason = "CPU tensors go through the process group"
            self._open("gathered", -1, max_bytes, one_shot_bytes, deadline, [], blocks)
            return
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._control_group = dist.new_group(dist.get_process_group_ranks(group or dist.group.WORLD), backend="gloo",
                                             timeout=timedelta(seconds=SETUP_SECONDS))
        self.name = self._exchange(f"fastverify-{uuid.uuid4().hex[:12]}")[0]
        self.deterministic = deterministic
        with torch.cuda.device(self.device):
            torch.zeros(1, device=self.device)  # the context that the control plane uses
            self.state = call_state(1, self.device)
            self.status = torch.zeros(1, _control().STATUS_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
            self.ready, self._no_pieces = torch.zeros(2, MOST_PIECES, dtype=torch.int32, device=self.device).unbind()
            transport, slabs, self.reason = self._connect(backend, max_bytes)
            if transport == "nccl" or nccl is not None or (backend == "auto" and not deterministic):
                self._open_nccl(nccl, deadline, blocks, needed=transport == "nccl" or nccl is not None)
            wait_until_idle(self.device)
        if transport == "nccl":
            self._handle, self.transport, self.max_bytes, self.nccl_bytes = self._nccl_handle, "nccl", max_bytes, 0
            self.handle, self.one_shot_bytes, self.overlap_rows = self._handle.address, 0, OVERLAP_ROWS["nccl"]
        else:
            ranks = [(slabs, self.state.data_ptr(), self.status.data_ptr(), 0)]
            self._open(transport, self.device.index, max_bytes, one_shot_bytes, deadline, ranks, blocks)
            self.nccl_bytes = max_bytes + 1 if self.nccl is not None else None
        dist.barrier(self._control_group)  # every slab is mapped and clean before the first call
        if backend == "auto":
            from .tuner import tune
            tune(self, one_shot_bytes is None)

    def _reset(self) -> None:
        self._stream, self._side, self._memory, self.overlap_rows = None, None, [], OVERLAP_ROWS["gathered"]
        self.nccl, self._nccl_handle, self.nccl_library, self.nccl_bytes, self.splits = None, None, None, None, {}
        self.tuned, self.debug, self.closed = "nothing was measured", False, False
        self._control_group, self._lost, self.wire, self.islands = None, False, "exact", False

    def _connect(self, backend: str, max_bytes: int) -> tuple:
        """(transport, addresses, why) of the first way that works on every rank."""
        makers = {"peer": peer_slabs, "host": host_slabs, "nccl": lambda *_: ([], [])}
        if backend != "auto":
            self._memory, slabs = makers[backend](self, max_bytes)
            return backend, slabs, f'backend="{backend}" was asked for'
        from .peer_check import peer_verdict
        keys = self._exchange(_device_key(self.device))
        verdicts = self._exchange(peer_verdict(self.device, keys, self.rank))
        said = [f"rank {r}: {text}" for r, text in enumerate(verdicts) if text]
        for transport in ("host", "nccl") if said else ("peer", "host", "nccl"):
            try:
                self._memory, slabs = makers[transport](self, max_bytes)
            except CommunicatorError as exc:  # on every rank alike
                said.append(str(exc))
                continue
            return transport, slabs, "; ".join(said) or "every pair of GPUs proved peer access"
        raise AssertionError("the last way makes nothing that could fail")

    def _open_nccl(self, options: Optional[dict], deadline: float, blocks: int, needed: bool) -> None:
        try:
            self.nccl_library, self.nccl = open_nccl(self, options)
        except RuntimeError:
            if needed:
                raise
            return  # large messages are then cut or refused, as max_bytes says
        self._nccl_handle = _control().Handle(
            world=self.world, rank=self.rank, local_ranks=1, transport="nccl", device=self.device.index, blocks=blocks,
            max_bytes=1 << 62, one_shot_bytes=0, deadline_ns=int(deadline * 1e9), ranks=[], nccl=self.nccl)

    def _together(self, what: str, make: Callable):
        """make() on every rank; where it fails on any, all raise CommunicatorError in the same words. Set-up only."""
        value, error = None, ""
        try:
            value = make()
        except (RuntimeError, OSError, MemoryError) as exc:
            error = str(exc) or type(exc).__name__
        try:
            errors = self._exchange(error)
        except RuntimeError as exc:
            raise CommunicatorError(f"Communicator: all {self.world} ranks must take part in {what}; got {exc}. "
                                    "Fix: look at the ranks that left or hang, then make the communicator again.") from exc
        bad = [f"rank {r}: {text}" for r, text in enumerate(errors) if text]
        if bad:
            raise CommunicatorError(f"Communicator: {what} must succeed on every rank; got {'; '.join(bad)}")
        return value

    def handle_for(self, nbytes: int) -> int:
        """What an op is given for an input of nbytes: NCCL's handle from the crossover on, else that of the own kernels."""
        if self.nccl_bytes is not None and nbytes >= self.nccl_bytes:
            return self._nccl_handle.address
        return self.handle

    def _exchange(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.group if self.gathers else self._control_group)
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
        self._reset()
        control = _control()
        size = control.slab_bytes(world, max_bytes)
        memory = "cpu" if emulated or transport == "host" else self.device
        pin = transport == "host" and not emulated
        self.slabs = torch.zeros(world, size, dtype=torch.uint8, device=memory, pin_memory=pin)
        self.slabs[:, control.SLAB_HEADER:control.gather_offset(world, max_bytes)] = 0xFF
        self.state = call_state(world, "cpu" if emulated else self.device, epoch)
        self.status = torch.zeros(world, control.STATUS_WORDS, dtype=torch.int32, device="cpu", pin_memory=not emulated)
        self.ready, self._no_pieces = torch.zeros(2, MOST_PIECES, dtype=torch.int32, device=self.state.device).unbind()
        self.hooks = torch.zeros(world, 16, dtype=torch.int32, device=self.state.device) if hooks else None
        bases = [self.slabs[r].data_ptr() for r in range(world)]
        ranks = [(bases, self.state[r].data_ptr(), self.status[r].data_ptr(), self.hooks[r].data_ptr() if hooks else 0)
                 for r in range(world)]
        index = -1 if emulated else torch.empty(0, device=self.device).device.index
        self._open(transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks)
        return self

    def _open(self, transport, index, max_bytes, one_shot_bytes, deadline, ranks, blocks) -> None:
        self.transport, self.max_bytes, self.overlap_rows = transport, max_bytes, OVERLAP_ROWS[transport]
        self.one_shot_bytes = default_one_shot_bytes(self.world, max_bytes) if one_shot_bytes is None else one_shot_bytes
        self._handle = _control().Handle(
            world=self.world, rank=self.rank, local_ranks=self.world if self.virtual else 1, transport=transport,
            device=index, blocks=blocks, max_bytes=max_bytes, one_shot_bytes=self.one_shot_bytes,
            deadline_ns=int(deadline * 1e9), ranks=ranks)
        self.handle = self._handle.address
        if self.wire == "fp8":
            self._handle.set_fp8_bytes(FP8_BYTES)
        if self.islands:
            self._handle.set_island_bytes(ISLAND_BYTES)

    @property
    def largest_bytes(self) -> int:
        """The largest input of one call: max_bytes, or what NCCL takes."""
        return self.max_bytes if self.nccl is None else 1 << 62

    def set_one_shot_bytes(self, nbytes: int) -> None:
        """Inputs up to here go one-shot. The same on every rank; captured graphs keep what they were captured with."""
        self.one_shot_bytes = nbytes
        self._handle.set_one_shot_bytes(nbytes)

    def begin(self, op: str, x: torch.Tensor) -> None:
        """Before every call: the checks that only the host can make."""
        if self.closed:
            raise RuntimeError(f"{op}: comm must be the handle of a Communicator that is open; got one that was closed. Fix: make a new one.")
        if self.debug and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            said = self._exchange(f"{op} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
            if len(set(said)) > 1:
                calls = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said))
                raise CommunicatorError(f"{op}: all ranks must make the same call; got {calls}. Fix: look at the ranks that differ.")
        if not self.gathers:
            self.claim_stream()

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

    def mark(self, piece: int, count: int = 1) -> None:
        """What was put on the current stream before is pieces [piece, piece + count) of the all_reduce_columns that waits for them (or
        will): one tiny launch that writes the number of that call."""
        if not self.gathers:
            torch.add(self._no_pieces[:count], self.state[0, :1], out=self.ready[piece:piece + count])

    def move_stream(self) -> None:
        """The next call may be on another stream; the caller has made sure that the old one is idle."""
        self._stream = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [world, *x.shape], through the process group, as bytes: it knows few dtypes. CPU only."""
        if not x.is_cpu:
            raise RuntimeError(f"Communicator: x must be on cpu, the device of the communicator; got {describe(x)}. "
                               "Fix: make the Communicator for the device of x.")
        sent = x.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        gathered = sent.new_empty((self.world, sent.numel()))
        try:
            dist.all_gather(list(gathered.unbind(0)), sent, group=self.group)
        except (RuntimeError, ValueError) as exc:
            if any(word in str(exc).lower() for word in _LOST_WORDS):
                raise CommunicatorError(
                    f"Communicator: all {self.world} ranks must take part; got {exc}. Fix: look at the ranks that left or hang, "
                    "then make the process group and the communicator again.") from exc
            raise CommunicatorError(f"Communicator: the process group must gather CPU tensors; got {exc}. Fix: make it with the backend "
                                    "gloo, then the communicator again.") from exc
        return gathered.view(-1).view(x.dtype).view(self.world, *x.shape)

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
        error = self.nccl.async_error() if self.nccl is not None else ""
        if error:
            raise CommunicatorError(f"Communicator: NCCL must run without an error; got {error}. Fix: look at the other ranks, then "
                                    "make the communicator again.")
        lost = next((lost_call([int(v) for v in row], self.world) for row in self.status if int(row[0])), None)  # word 0: it has given up
        if lost is None:
            return
        self._lost = True
        who = f"rank(s) {lost.ranks} did not come" if lost.ranks else "a peer gave up first"
        raise CommunicatorError(
            f"Communicator: every rank must reach call {lost.call} within the deadline; got: {who} (seen by rank {lost.seen_by}). Fix: look at those ranks, then make the communicator again.")

    def wait(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Waits on the host until the current stream's work is done, then check(). NCCL waits for a lost peer for ever: after
        `seconds` its kernels are aborted, and CommunicatorError names the ranks that do not answer. Outside captured steps."""
        missing = wait_or_abort(self, seconds)
        if missing is not None:
            if self.nccl is not None:
                self._nccl_handle.close()
            who = f"rank(s) {missing} did not come" if missing else "all ranks answer but the work did not end"
            raise CommunicatorError(f"Communicator: the work must end within {seconds:g} s; got: {who}. "
                                    "Fix: look at those ranks, then make the communicator again.")
        self.check()

    def close(self) -> None:
        """Later calls are refused in words. Collective on CUDA: peers may still be writing until all have come. Graphs that
        captured NCCL calls keep it from closing in order: drop them first, else it is left behind after some seconds."""
        self.closed = True
        self._handle.close()
        if self.nccl is not None:
            wait_until_idle(self.device)
            self._nccl_handle.close()
            self.nccl.close(END_SECONDS)
            self.nccl = None
        if self._memory:
            wait_until_idle(self.device)
            try:
                if not self._lost:  # else nobody writes any more, and some would not come
                    dist.barrier(self._control_group)
            except RuntimeError:
                pass  # a peer is gone
            self._memory = []
        if self._control_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._control_group)
            self._control_group = None

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _device_key(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def check_forms(wire: str, islands: bool, deterministic: bool) -> None:
    if wire not in ("exact", "fp8"):
        raise ValueError(f'Communicator: wire must be exact|fp8; got {wire!r}. Fix: leave it at "exact".')
    if deterministic and (islands or wire != "exact"):
        raise ValueError(f"Communicator: deterministic=True must be with wire=\"exact\" and islands=False, whose bits do not depend on "
                         f"the size; got wire={wire!r}, islands={islands}. Fix: choose one.")


def default_one_shot_bytes(world: int, max_bytes: int) -> int:
    """Where one-shot stops paying when nothing was measured: research on PCIe Gen5 x16 (docs/performance.md)."""
    return {1: max_bytes, 2: max_bytes, 3: 32 << 10, 4: 24 << 10}.get(world, 8 << 10)
