"""probe: the op to copy. What is tested here about streams and captures holds for every CUDA op, by the same code."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import need_kernel, positional, run_op

from fastverify import _ops


@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 70_000])
def test_against_the_oracle(backend, rng, n):
    x = torch.randn(n, generator=rng)
    out = torch.full((n,), float("nan"))
    got = run_op(backend, "probe", x=x, out=out)["out"]
    assert torch.equal(got, run_op("reference", "probe", x=x, out=out)["out"])


def test_special_values(backend):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38])
    got = run_op(backend, "probe", x=x, out=torch.zeros(5))["out"]
    assert torch.equal(got, x + 1) or (got[0].isnan() and torch.equal(got[1:], x[1:] + 1))


def test_neighbours_are_not_touched(backend):
    need_kernel(backend, "probe")
    device = "cuda" if backend == "cuda" else "cpu"
    buffer = torch.full((64,), -7.0, device=device)
    _ops.get("probe")(torch.ones(30, device=device), buffer[17:47])
    assert torch.equal(buffer.cpu(), torch.tensor([-7.0] * 17 + [2.0] * 30 + [-7.0] * 17))


def test_opcheck(backend, rng):
    need_kernel(backend, "probe")
    device = "cuda" if backend == "cuda" else "cpu"
    x = torch.randn(9, generator=rng).to(device)
    torch.library.opcheck(_ops.get("probe"), positional("probe", x=x, out=torch.empty_like(x)))


BAD = {
    "dtype of x": (torch.zeros(4, dtype=torch.float64), torch.zeros(4),
                   "probe: x must be float32 [any] on cpu; got float64 [4] on cpu. Fix: cast with .to(dtype)."),
    "rank of x": (torch.zeros(2, 2), torch.zeros(4),
                  "probe: x must be float32 [any] on cpu; got float32 [2, 2] on cpu. Fix: pass that shape."),
    "size of out": (torch.zeros(4), torch.zeros(5),
                    "probe: out must be float32 [4] on cpu; got float32 [5] on cpu. Fix: pass that shape."),
    "dtype of out": (torch.zeros(4), torch.zeros(4, dtype=torch.int32),
                     "probe: out must be float32 [4] on cpu; got int32 [4] on cpu. Fix: cast with .to(dtype)."),
    "strides of x": (torch.zeros(8)[::2], torch.zeros(4),
                     "probe: x must be contiguous; got float32 [4] on cpu with other strides. "
                     "Fix: call .contiguous() once, outside the loop."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument(case):
    x, out, message = BAD[case]
    with pytest.raises(RuntimeError) as error:
        _ops.get("probe")(x, out)
    assert str(error.value).splitlines()[0] == message


@pytest.fixture
def cuda_kernel():
    need_kernel("cuda", "probe")


# ---- on a GPU: streams, devices, captures ---------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_kernel")
def test_runs_on_torchs_current_stream():
    """The side stream is kept busy before x is set there: a launch on any other stream would read the old x."""
    x, out = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(5.0)
        _ops.get("probe")(x, out)
    assert not stream.query(), "the op must not wait for the device"
    stream.synchronize()
    assert out.eq(6.0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_kernel")
def test_captured_and_replayed_with_new_contents():
    x, out = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    _ops.get("probe")(x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ops.get("probe")(x, out)
    for value in (1.0, 2.0, -3.0):
        x.fill_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert out.eq(value + 1).all()


FIRST_IN_CAPTURE = """
import torch
from fastverify import _ops
x, out = torch.full((64,), 3.0, device="cuda"), torch.zeros(64, device="cuda")
_ops.get("probe")(x[:1], out[:1])  # the warm-up of a plan: loads the library's code
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    _ops.get("probe")(x, out)
out.zero_()
graph.replay()
torch.cuda.synchronize()
assert out.eq(4.0).all()
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_kernel")
def test_fresh_process_may_capture_right_after_the_warm_up():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", FIRST_IN_CAPTURE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu2
@pytest.mark.usefixtures("cuda_kernel")
def test_runs_on_the_tensors_device_not_on_the_current_one():
    x, out = torch.full((300,), 2.0, device="cuda:1"), torch.zeros(300, device="cuda:1")
    torch.cuda.set_device(0)
    _ops.get("probe")(x, out)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert out.eq(3.0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_kernel")
def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match=r"^probe: out must be float32 \[4\] on cuda:0; got float32 \[4\] on cpu\."):
        _ops.get("probe")(torch.zeros(4, device="cuda:0"), torch.zeros(4))
