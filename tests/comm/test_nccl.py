"""NCCL of our own: the library found and its config layout without a GPU; communicators over two GPUs."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comm_cases import fold
from ports import free_port
from rank_pool import spawn

from fastverify import Communicator, CommunicatorError, _ops, all_gather_small, all_reduce, all_reduce_rms_norm, linear_all_reduce
from fastverify.comm import nccl, topology
from fastverify.comm.topology import _control

pytestmark = pytest.mark.skipif(not _ops.build_info().get("comm"), reason="this build has no _comm (no pybind11)")
compiler = shutil.which("cc") or shutil.which("gcc")


def library() -> dict:
    found = topology.nccl_library()
    if found["path"] is None:
        pytest.skip("no NCCL: pip install nvidia-nccl-cu12")
    return found


def test_the_library_loads_and_says_its_version():
    found = library()
    major, minor, _ = map(int, found["version"].split("."))
    assert (major, minor) >= (2, 14)
    assert len(_control().nccl_unique_id(found["path"])) == 128


@pytest.mark.skipif(compiler is None, reason="no C compiler")
def test_config_layout_is_that_of_its_header(tmp_path):
    """Every field that is passed lies where nccl.h has it; a library reads no more than both know."""
    header = Path(library()["path"]).parents[1] / "include" / "nccl.h"
    if not header.exists():
        pytest.skip("this NCCL comes without its header")
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (tmp_path / name).write_text("typedef void *cudaStream_t, *cudaEvent_t;\n" if name == "cuda_runtime.h" else "")
    layout = _control().nccl_config_layout()
    ours, version = layout.pop("sizeof")
    lines = "".join(f'printf("{f} %zu %zu\\n", offsetof(ncclConfig_t, {f}), sizeof(((ncclConfig_t*)0)->{f}));' for f in layout)
    (tmp_path / "x.c").write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{ {lines} ncclConfig_t c = NCCL_CONFIG_INITIALIZER;'
        'printf("whole %zu %u\\nundefined %d %u\\n", sizeof c, c.version, c.minCTAs, c.magic); return 0; }')
    subprocess.run([compiler, "-I", str(tmp_path), str(tmp_path / "x.c"), "-o", str(tmp_path / "x")], check=True)
    said = dict((w[0], (int(w[1]), int(w[2]))) for w in
                (line.split() for line in subprocess.run([tmp_path / "x"], check=True, capture_output=True, text=True).stdout.splitlines()))
    assert said.pop("undefined") == (-(1 << 31), 0xCAFEBEEF)
    whole, newest = said.pop("whole")
    assert said == layout and ours <= whole and version <= newest


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_opening_is_an_error_in_words():
    with pytest.raises(RuntimeError, match="^Communicator: ncclCommInitRankConfig must succeed; got NCCL error .* Fix: "):
        _control().NcclComm(library()["path"], 1, 0, b"\0" * 128, seconds=20.0)


def test_a_library_that_is_no_nccl():
    with pytest.raises(RuntimeError, match="NCCL must load from /nowhere/libnccl.so; got .* Fix: "):
        _control().nccl_unique_id("/nowhere/libnccl.so")
    with pytest.raises(RuntimeError, match="NCCL must be 2.14 or newer; got .* Fix: "):
        _control().nccl_unique_id("libc.so.6")


@pytest.mark.parametrize("options, said", [
    ({"maxCTA": 3}, "nccl must hold only blocking, .* got 'maxCTA'"), ({"min_ctas": 9, "max_ctas": 8}, "got 9 and 8"),
    ({"max_ctas": 0}, "got 1 and 0"), ({"cga_cluster_size": 9}, "in 0..8; got 9")])
def test_options_are_checked(options, said):
    with pytest.raises(ValueError, match=f"{said}.* Fix: "):
        nccl.nccl_config(options)


def test_options_pass():
    assert nccl.nccl_config(None) == {} and nccl.nccl_config({"max_ctas": 8}) == {"max_ctas": 8}


# ---- over GPUs ---------------------------------------------------------------------------------------------------------------

def _join(rank: int, world: int, port: int, body, args: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    device = torch.device("cuda", rank if torch.cuda.device_count() >= world else 0)
    torch.cuda.set_device(device)
    body(rank, world, device, *args)
    dist.barrier()
    dist.destroy_process_group()


def _agree(rank, world, device, options) -> None:
    with Communicator(device=device, backend="nccl", nccl=options, max_bytes=1 << 20) as comm:
        assert comm.transport == "nccl" and comm.nccl.version == comm.nccl_library["version"]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            parts = [torch.randn(5, 1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
            x, want = parts[rank].to(device), fold(torch.stack(parts))
            got = all_reduce(x, comm).cpu()
            assert torch.equal(got, want) if world == 2 else torch.allclose(got, want, rtol=2e-2, atol=2e-2)
            assert torch.equal(all_gather_small(x, comm).cpu(), torch.stack(parts))
            residual, weight = torch.ones(5, 1000, dtype=dtype, device=device), torch.full((1000,), 2.0, dtype=dtype, device=device)
            out = all_reduce_rms_norm(x, residual, weight, comm, 1e-5)
            r = (1 + got.float()).to(dtype)
            assert torch.equal(residual.cpu(), r)
            exact = r.double() * torch.rsqrt(r.double().square().mean(-1, keepdim=True) + 1e-5) * 2
            assert torch.allclose(out.cpu().double(), exact, rtol=2.0**-7 if dtype != torch.float32 else 1e-6, atol=1e-6)
        big = torch.full((3 << 20,), float(rank + 1), device=device)
        assert torch.equal(all_reduce(big, comm), torch.full_like(big, world * (world + 1) / 2)), "no max_bytes for NCCL"
        comm.check()


@pytest.mark.parametrize("options", [None, dict(min_ctas=1, max_ctas=4, cga_cluster_size=2), dict(blocking=0)])
@pytest.mark.gpu2
def test_ranks_agree(options):
    spawn(_agree, options)


def _capture(rank, world, device) -> None:
    comm = Communicator(device=device, backend="nccl")
    x = torch.zeros(4, 7168, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    w, a = torch.randn(512, 256, device=device), torch.randn(600, 256, device=device)
    whole = linear_all_reduce(a, w, comm, split=("rows", 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):
            all_reduce(x, comm, out=out)
        cut = linear_all_reduce(a, w, comm, split=("columns", 4))
    for i in range(200):
        x.fill_(i + rank)
        graph.replay()
        if i % 50 == 0:
            assert torch.equal(out.cpu(), torch.full((4, 7168), 2 * i + 1).bfloat16())
            assert torch.allclose(cut, whole, rtol=1e-4, atol=1e-3)
    comm.wait()
    start = time.monotonic()
    del graph
    comm.close()
    assert time.monotonic() - start < 20
    with pytest.raises(RuntimeError, match="must be the handle of a Communicator"):
        all_reduce(x, comm)


@pytest.mark.gpu2
def test_capture_and_close():
    spawn(_capture)


def _windows(rank, world, device) -> None:
    with Communicator(device=device, backend="nccl") as comm:
        x, registered = nccl.window_tensor(comm, (8, 7168), torch.bfloat16)
        for i in range(3):
            x.fill_(rank + i)
            assert torch.equal(all_reduce(x, comm, out=x).cpu(), torch.full((8, 7168), 1 + 2 * i).bfloat16())
        if rank == 0:
            print(f"NCCL {comm.nccl.version}: window registered: {registered}")
        comm.wait()
        del x


@pytest.mark.gpu2
def test_window_registration():
    spawn(_windows)


def _lost(rank, world, device) -> None:
    comm = Communicator(device=device, backend="nccl")
    x = torch.ones(1000, device=device)
    all_reduce(x, comm)
    comm.wait()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    all_reduce(x, comm)
    try:
        comm.wait(seconds=2.0)
    except CommunicatorError as error:
        assert "must end within 2 s; got: rank(s) [1] did not come" in str(error) and time.monotonic() - start < 15
        assert torch.ones(1, device=device).item() == 1.0, "the GPU is usable afterwards"
        os._exit(7)
    os._exit(8)


@pytest.mark.gpu2
def test_a_lost_peer_is_aborted_without_a_hang():
    context = mp.get_context("spawn")
    port = free_port()
    ranks = [context.Process(target=_join, args=(r, 2, port, _lost, ())) for r in range(2)]
    for p in ranks:
        p.start()
    ranks[0].join(90)
    assert ranks[0].exitcode == 7
    ranks[1].join(10)


def _beside(rank, world, device, backend) -> None:
    """Own kernels below the crossover, NCCL above it and above max_bytes; one graph holds both."""
    with Communicator(device=device, backend=backend, nccl={}, max_bytes=1 << 16) as comm:
        comm.nccl_bytes = 1 << 14
        assert comm.handle_for((1 << 14) - 1) == comm.handle != comm.handle_for(1 << 14)
        small, large = torch.full((1000,), 1.0, device=device), torch.full((1 << 18,), 2.0, device=device)
        all_reduce(small, comm), all_reduce(large, comm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            a, b = all_reduce(small, comm), all_reduce(large, comm)
        for _ in range(50):
            graph.replay()
        assert a.unique().tolist() == [2.0] and b.unique().tolist() == [4.0]
        comm.wait()
        del graph


@pytest.mark.parametrize("backend", ["peer", "host"])
@pytest.mark.gpu2
def test_nccl_beside_own_kernels(backend):
    spawn(_beside, backend)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-s"]))
