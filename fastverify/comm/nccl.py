"""NCCL communicators of our own: opened before a communicator's first call, ended after its last."""

import time
from typing import Optional

import torch
import torch.distributed as dist

from .topology import _control, nccl_library

OPTIONS = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "cta_policy")  # of ncclConfig_t; left out: NCCL's choice
OPEN_SECONDS, END_SECONDS, LOST_SECONDS = 60.0, 5.0, 3.0
CONNECT_BYTES = 8 << 20  # of the largest sum: every algorithm that larger ones take is connected by then

_left_behind: list = []  # memory and streams of calls that outlived their abort: NCCL may still write there


def nccl_config(options: Optional[dict]) -> dict:
    """Checked options of ncclConfig_t. blocking=0 is for callers that poll; min_ctas <= max_ctas in 1..64; cga_cluster_size 0..8;
    cta_policy 0 default, 1 efficiency, 2 zero CTAs (copy engines move the data; NCCL >= 2.27)."""
    options = dict(options or {})
    wrong = [k for k in options if k not in OPTIONS]
    if wrong:
        raise ValueError(f"Communicator: nccl must hold only {', '.join(OPTIONS)}; got {wrong[0]!r}. Fix: leave it out.")
    low, high = options.get("min_ctas", 1), options.get("max_ctas", 64)
    if not 1 <= low <= high <= 64:
        raise ValueError(f"Communicator: nccl's CTAs must be 1 <= min_ctas <= max_ctas <= 64; got {low} and {high}. Fix: e.g. max_ctas=8.")
    if not 0 <= options.get("cga_cluster_size", 0) <= 8:
        raise ValueError(f"Communicator: nccl's cga_cluster_size must be in 0..8; got {options['cga_cluster_size']}. Fix: leave it out.")
    return options


def open_nccl(comm, options: Optional[dict]):
    """(library, NcclComm) on every rank, or CommunicatorError on every rank. Collective."""
    control, options = _control(), nccl_config(options)

    def find() -> dict:
        found = nccl_library()
        if found["path"] is None:
            raise RuntimeError("no NCCL (" + "; ".join(found["tried"]) + "). Fix: pip install 'fastverify[nccl]'")
        return found
    found = comm._together("finding NCCL", find)
    versions = comm._exchange(found["version"])
    if len(set(versions)) > 1:
        raise RuntimeError(f"Communicator: all ranks must load the same NCCL; got {', '.join(map(str, versions))}. "
                           "Fix: set FASTVERIFY_NCCL_LIB on every rank.")
    unique_id = comm._together("ncclGetUniqueId", lambda: control.nccl_unique_id(found["path"]) if comm.rank == 0 else b"")
    unique_id = comm._exchange(unique_id)[0]
    nccl = comm._together("opening NCCL", lambda: control.NcclComm(found["path"], comm.world, comm.rank, unique_id,
                                                                   seconds=OPEN_SECONDS, **options))
    connect(comm, nccl)
    return found, nccl


def connect_memory(device: torch.device) -> tuple:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        return stream, torch.zeros(CONNECT_BYTES // 4, device=device)


def connect(comm, nccl) -> None:
    """All connections, or CommunicatorError on every rank and NCCL aborted. NCCL makes them in its first calls, where one rank may fail
    while the others wait for it inside NCCL for ever: so the first calls are made here, watched through the store. Collective."""
    held: list = []

    def start() -> None:
        held.extend(connect_memory(comm.device))
        stream, buffer = held
        nccl.start_connect(buffer.data_ptr(), CONNECT_BYTES, stream.cuda_stream)
    try:
        comm._together("connecting NCCL", lambda: _watch(comm, nccl, start, lambda: held[0].query()))
    except BaseException:
        nccl.abort(END_SECONDS)
        if held and not nccl.connect_state():
            _left_behind.append(held)
        raise


def _watch(comm, nccl, start, idle) -> None:
    """Returns when all ranks have connected, or another one has said that it failed (that one raises); raises where this one did."""
    store, keys = dist.distributed_c10d._get_default_store(), [f"{comm.name}/nccl/{r}" for r in range(comm.world)]
    try:
        start()
    except RuntimeError as exc:
        store.set(keys[comm.rank], str(exc))
        raise
    mine, missing = "", set(range(comm.world))
    end, nap = time.monotonic() + OPEN_SECONDS, 1e-3
    while missing or not idle():
        if not mine and (mine := nccl.connect_state()):
            store.set(keys[comm.rank], mine)
            if mine != "done":
                raise RuntimeError(mine)
        for r in sorted(missing):
            if store.check([keys[r]]):
                if store.get(keys[r]) != b"done":
                    return
                missing.remove(r)
        if time.monotonic() > end:
            why = f"rank(s) {sorted(missing)} still at it" if missing else "calls that do not end"
            store.set(keys[comm.rank], why)
            raise RuntimeError(f"Communicator: all {comm.world} ranks must connect NCCL within {OPEN_SECONDS:g} s; got {why}. "
                               "Fix: see which ranks hang (NCCL_DEBUG=INFO), or use another backend.")
        time.sleep(nap)
        nap = min(nap * 1.5, 0.02)


def window_tensor(comm, shape: tuple, dtype: torch.dtype) -> tuple:
    """(tensor, registered): memory of ncclMemAlloc, registered as a symmetric window where this NCCL has them. Collective."""
    size = torch.Size(shape).numel() * dtype.itemsize
    size = -(-size // 4096) * 4096
    buffer = comm._together("ncclMemAlloc", lambda: _control().NcclBuffer(comm.nccl_library["path"], size))
    registered = all(comm._exchange(comm.nccl.register_window(buffer.address, size)))

    class Memory:
        __cuda_array_interface__ = dict(shape=(size,), typestr="|u1", data=(buffer.address, False), version=3)
        owner = buffer
    raw = torch.as_tensor(Memory(), device=comm.device)
    return raw[:torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape), registered


def wait_or_abort(comm, seconds: float) -> Optional[list]:
    """Waits for the work queued on the current stream. None when it ended in time; else NCCL is aborted and the ranks that
    give no sign of life are returned (every living rank has called this too)."""
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(comm.device))
    end, nap = time.monotonic() + seconds, 20e-6
    while not done.query():
        if time.monotonic() > end:
            break
        time.sleep(nap)
        nap = min(nap * 1.5, 2e-3)
    else:
        return None
    if comm.nccl is not None:
        comm.nccl.abort(END_SECONDS)
    return lost_ranks(comm)


def lost_ranks(comm) -> list:
    """Who does not answer within LOST_SECONDS, asked through the store of torch.distributed."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{comm.name}/alive/{comm.rank}", b"1")
        missing = {r for r in range(comm.world) if r != comm.rank}
        end = time.monotonic() + LOST_SECONDS
        while missing and time.monotonic() < end:
            missing = {r for r in missing if not store.check([f"{comm.name}/alive/{r}"])}
            time.sleep(0.02)
    except RuntimeError:  # its server is gone: rank 0 of the default group runs it
        missing = {0}
    return sorted(missing)
