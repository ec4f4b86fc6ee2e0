"""What surrounds the ranks: allocator, /dev/shm, CUDA_VISIBLE_DEVICES, order of first calls, IPC namespaces. Each a clear outcome."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

from fastverify import _ops
from fastverify.comm.topology import _control

needs_control = pytest.mark.skipif(not _ops.build_info().get("comm"), reason="this build has no _comm (no pybind11)")


@needs_control
def test_a_full_shm_is_an_error_now_not_a_crash_later():
    free = shutil.disk_usage("/dev/shm").free
    name = f"/fastverify-test-{os.getpid()}"
    with pytest.raises(RuntimeError, match=r"reserving \d+ bytes in /dev/shm must succeed; got .*\. Fix: mount a larger /dev/shm "
                                           r"\(docker --shm-size\) or lower max_bytes"):
        _control().HostRegion(name, free + (64 << 20), create=True)
    assert not Path("/dev/shm", name[1:]).exists(), "nothing is left behind"


@needs_control
def test_a_mailbox_of_another_namespace_is_an_error_in_words():
    with pytest.raises(RuntimeError, match=r"shm_open of /fastverify-nobody must succeed; .* Fix: start all ranks in one IPC namespace"):
        _control().HostRegion("/fastverify-nobody", 4096, create=False)


# ---- two ranks, on a GPU each where there are two, else on one card (in turns of milliseconds without MPS) -------------------------

def ranks(backend: str, what: str, env: tuple = ({}, {}), wrap: tuple = ("", "")) -> list:
    """What each of two ranks says. env, wrap: per rank; wrap is a shell prefix that ends in `exec "$@"`."""
    port = str(free_port())
    started = []
    for r in range(2):
        command = [sys.executable, str(Path(__file__).with_name("rank_main.py")), str(r), "2", port, backend, what]
        if wrap[r]:
            command = ["unshare", *wrap[r].split("|")[0].split(), "sh", "-c", wrap[r].split("|")[1] + ' exec "$@"', "sh", *command]
        path = os.pathsep.join(p for p in sys.path if p)
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **env[r]}, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))
    said = []
    for p in started:
        out, err = p.communicate(timeout=120)
        line = [x for x in out.splitlines() if x.startswith("SAID")]
        assert line, err[-2000:]
        said.append(json.loads(line[0][4:]))
    return said


def may_unshare(flags: str, then: str = "true") -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", *flags.split(), "sh", "-c", then], capture_output=True).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "host", pytest.param("nccl", marks=pytest.mark.gpu2)])
def test_expandable_segments(backend):
    """The memory of a communicator is never torch's, so its allocator may map as it likes."""
    env = dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert [s.get("right") for s in ranks(backend, "plain", (env, env))] == [True, True]


@pytest.mark.gpu2
@pytest.mark.parametrize("first, second, transport", [("0,1", "1,0", "peer"), ("1,0", "0,1", "peer"), ("0", "1", "host")])
def test_visible_devices(first, second, transport):
    """Ranks that number the GPUs differently; ranks that see only their own GPU cannot prove peer access and take the mailbox."""
    said = ranks("auto", "first-device", (dict(CUDA_VISIBLE_DEVICES=first), dict(CUDA_VISIBLE_DEVICES=second)))
    assert [s.get("right") for s in said] == [True, True], said
    assert {s["transport"] for s in said} <= {transport, "host"} and len({s["uuid"] for s in said}) == 2
    if transport == "host":
        assert "is not visible to this process (CUDA_VISIBLE_DEVICES)" in said[0]["reason"]


@pytest.mark.gpu
def test_one_card_by_two_names():
    """Both ranks on one GPU, which one of them knows by its number (or as this process was told) and the other by its UUID."""
    import torch
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    said = ranks("auto", "first-device", (dict(CUDA_VISIBLE_DEVICES=number), dict(CUDA_VISIBLE_DEVICES=uuid)))
    assert [s.get("right") for s in said] == [True, True] and len({s["uuid"] for s in said}) == 1, said


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "host"])
def test_orders_of_first_call(backend):
    """Two communicators on two streams may be called in any order. On one stream that is a circle: it ends at the deadline, with the
    ranks named, or well where the second launch may overlap the first (sm_90 and newer)."""
    for said in ranks(backend, "orders"):
        assert said["sums"] == 3.0 and said["seconds"] < 20
        assert said["circle"] == "" or "did not come" in said["circle"] or "gave up first" in said["circle"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend, what", [("host", "/dev/shm must succeed"), ("auto", "")])
def test_full_shm(backend, what):
    """One rank with 64 KiB of /dev/shm: "host" fails on every rank in the same words, "auto" takes another way."""
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm;"
    if not may_unshare("-m", mount):
        pytest.skip("this process may not make a mount namespace")
    said = ranks(backend, "plain", wrap=("", f"-m|{mount}"))
    if what:
        assert said[0]["error"] == said[1]["error"] and "rank 1: " in said[0]["error"] and what in said[0]["error"], said
    else:
        assert [s.get("right") for s in said] == [True, True], said


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "host", "auto"])
def test_ranks_in_two_namespaces(backend):
    """Each rank with an IPC namespace and a /dev/shm of its own, as containers without --ipc=host have: it works or every rank is told."""
    mount = "mount -t tmpfs tmpfs /dev/shm;"
    if not may_unshare("-m -i", mount):
        pytest.skip("this process may not make namespaces")
    said = ranks(backend, "plain", wrap=(f"-m -i|{mount}", f"-m -i|{mount}"))
    print(backend, said)
    if backend == "host":
        assert "start all ranks in one IPC namespace" in said[0]["error"] and said[0]["error"] == said[1]["error"]
    else:
        assert all(s.get("right") or "Fix: " in s.get("error", "") for s in said), said
        assert backend == "peer" or all(s.get("right") for s in said), said
