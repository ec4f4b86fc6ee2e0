"""NCCL connects while a communicator is made, under watch: one rank that fails or hangs there is an error on all, never a wait for ever."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port

from fastverify import Communicator, CommunicatorError, _ops
from fastverify.comm import nccl
from fastverify.comm.topology import _control

pytestmark = pytest.mark.skipif(not _ops.build_info().get("comm"), reason="this build has no _comm (no pybind11)")
compiler = shutil.which("cc") or shutil.which("gcc")
MEMORY = 1 << 20


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> str:
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("stub") / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(Path(__file__).with_name("stub_nccl.c")), "-o", str(path)], check=True)
    return str(path)


# ---- one process: NcclComm over a library whose calls work, fail or hang -----------------------------------------------------

def started(stub: str, monkeypatch, does: str, memory: torch.Tensor, **options):
    monkeypatch.setenv("STUB_NCCL", does)
    comm = _control().NcclComm(stub, 2, 1, b"\1" * 128, seconds=5.0, **options)
    assert comm.connect_state() == ""
    comm.start_connect(memory.data_ptr(), memory.nbytes, 0)
    return comm


def state(comm, seconds: float = 5.0) -> str:
    end = time.monotonic() + seconds
    while not (said := comm.connect_state()) and time.monotonic() < end:
        time.sleep(0.002)
    return said


def test_calls_that_work(stub, monkeypatch):
    memory = torch.ones(MEMORY // 4)
    comm = started(stub, monkeypatch, "works", memory)
    assert state(comm) == "done" and int(memory.count_nonzero()) == 0, "the largest sum is over all of the memory"
    assert comm.async_error() == "" and comm.close(5.0)
    with pytest.raises(RuntimeError, match="NCCL must be open to connect; got one that was closed. Fix: "):
        comm.start_connect(memory.data_ptr(), memory.nbytes, 0)


@pytest.mark.parametrize("does, options", [("fails", {}), ("fails later", dict(blocking=0))])
def test_a_call_that_fails_says_why(stub, monkeypatch, does, options):
    memory = torch.zeros(MEMORY // 4)
    comm = started(stub, monkeypatch, does, memory, **options)
    assert state(comm) == ("Communicator: ncclAllReduce must succeed; got NCCL error 2 (unhandled system error: No space left on device). "
                           "Fix: set NCCL_DEBUG=WARN and look at what it says.")
    assert comm.abort(5.0) and comm.abort(5.0) and comm.close(5.0), "ended once"


@pytest.mark.parametrize("does, options", [("hangs", {}), ("hangs later", dict(blocking=0))])
@pytest.mark.parametrize("how", ["abort", "close", "destructor"])
def test_a_call_that_hangs_is_aborted(stub, monkeypatch, does, options, how):
    memory = torch.zeros(MEMORY // 4)
    comm = started(stub, monkeypatch, does, memory, **options)
    assert state(comm, 0.1) == ""
    start = time.monotonic()
    if how == "destructor":
        del comm
    else:
        assert getattr(comm, how)(5.0)
        assert "must succeed; got NCCL error 3" in (said := state(comm)) or "got an abort. Fix: " in said
    assert time.monotonic() - start < 2
    time.sleep(0.05)  # a call after the abort would end this process


# ---- two ranks ---------------------------------------------------------------------------------------------------------------

class Fake:
    """What connect() asks of a NcclComm. says: of connect_state(); "" never ends but by abort()."""

    def __init__(self, says: str, start=lambda: None) -> None:
        self.says, self.start, self.aborted = says, start, False

    def start_connect(self, buffer: int, bytes: int, stream: int) -> None:
        assert buffer and bytes == nccl.CONNECT_BYTES
        self.start()

    def connect_state(self) -> str:
        return "aborted" if self.aborted and not self.says else self.says

    def abort(self, seconds: float) -> bool:
        self.aborted = True
        return True


def _no_memory() -> None:
    raise RuntimeError("no memory")


def _leave() -> None:
    os._exit(0)


def _join(rank: int, port: int) -> Communicator:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    nccl.connect_memory = lambda device: (SimpleNamespace(cuda_stream=0, query=lambda: True), torch.zeros(nccl.CONNECT_BYTES // 4))
    comm = Communicator()
    comm.name = "named"
    return comm


CASES = {  # what each rank's NCCL does, seconds to open in, what every rank is told ("": nothing, it works)
    "works": (Fake("done"), Fake("done"), 60.0, ""),
    "fails": (Fake(""), Fake("No space left"), 60.0, "Communicator: connecting NCCL must succeed on every rank; got rank 1: No space left"),
    "fails on both": (Fake("mine"), Fake("mine too"), 60.0, "rank"),
    "fails at a rank whose peer is done": (Fake("done"), Fake("No space left"), 60.0, "on every rank; got rank 1: No space left"),
    "cannot start": (Fake(""), Fake("", _no_memory), 60.0, "on every rank; got rank 1: no memory"),
    "never ends": (Fake("done"), Fake(""), 1.0, "all 2 ranks must connect NCCL within 1 s; got rank(s) [1] still at it. Fix: "),
    "never ends on both": (Fake(""), Fake(""), 1.0, "within 1 s; got rank(s) [0, 1] still at it. Fix: "),
    "is queued and never ends": (Fake("done"), Fake("done"), 1.0, "within 1 s; got calls that do not end. Fix: "),
}


def _cases(rank: int, port: int, library: str) -> None:
    comm = _join(rank, port)
    memory = nccl.connect_memory
    for case, (*fakes, seconds, wanted) in CASES.items():
        comm.name, nccl.OPEN_SECONDS, fake = case, seconds, fakes[rank]
        idle = "queued" not in case or rank == 0
        nccl.connect_memory = lambda device: (SimpleNamespace(cuda_stream=0, query=lambda: idle), memory(device)[1])
        start, told = time.monotonic(), ""
        try:
            nccl.connect(comm, fake)
        except CommunicatorError as error:
            told = str(error)
        assert wanted in told and bool(told) == bool(wanted) == fake.aborted, (case, told)
        assert time.monotonic() - start < 10, case
        assert len(set(comm._exchange(told))) == 1, "every rank is told the same"
    nccl.connect_memory, nccl.OPEN_SECONDS = memory, 60.0
    if library:
        os.environ.update(FASTVERIFY_NCCL_LIB=library, STUB_NCCL=("hangs", "fails")[rank])
        comm.name = "optional"
        comm._open_nccl(None, 10.0, 1, needed=False)
        assert comm.nccl is None and comm._nccl_handle is None
        comm.name = "needed"
        with pytest.raises(CommunicatorError, match="connecting NCCL must succeed on every rank; got rank 1: .*No space left on device"):
            comm._open_nccl({}, 10.0, 1, needed=True)
        os.environ.update(STUB_NCCL="works")
        comm.name = "works after all"
        found, opened = nccl.open_nccl(comm, None)
        assert found["version"] == "2.28.9" and opened.connect_state() == "done" and opened.close(5.0)
    dist.barrier()
    dist.destroy_process_group()


def test_every_rank_is_told_the_same(stub):
    mp.spawn(_cases, (free_port(), stub), nprocs=2)


def _lost(rank: int, port: int, which: int) -> None:
    comm = _join(rank, port)
    nccl.OPEN_SECONDS, fake, start = 1.0, Fake("", _leave if rank == which else lambda: None), time.monotonic()
    with pytest.raises(CommunicatorError, match="all 2 ranks must take part in connecting NCCL; got .* Fix: "):
        nccl.connect(comm, fake)
    assert fake.aborted and time.monotonic() - start < 20
    os._exit(0)


@pytest.mark.parametrize("which", [1, 0])
def test_a_rank_that_dies_meanwhile_is_an_error(which):
    """Rank 0 takes the store with it."""
    mp.spawn(_lost, (free_port(), which), nprocs=2)
