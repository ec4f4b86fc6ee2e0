"""The forms that round on their own: islands and the fp8 wire; and that no launch choice changes a bit."""

import re

import pytest
import torch
from comm_cases import DTYPES, KERNELS, fold, virtual
from conftest import run_op

from fastverify.comm.communicator import check_forms
from fastverify.comm.topology import _control


def all_reduce(backend: str, comm, x: torch.Tensor) -> torch.Tensor:
    got = run_op(backend, "all_reduce", x=x, out=torch.full_like(x, float("nan")), comm=comm.handle)["out"]
    comm.check()
    return got.cpu()


def islands(x: torch.Tensor) -> torch.Tensor:
    half = len(x) // 2
    return (fold(x[:half]).float() + fold(x[half:]).float()).to(x.dtype)


@pytest.mark.parametrize("world", [4, 6, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_islands(rng, backend, world):
    """Each island's sum is rounded once before it crosses; all ranks get the same bits; sizes around every slice."""
    comm = virtual(backend, world, one_shot_bytes=64)
    comm._handle.set_island_bytes(256)
    for dtype in DTYPES:
        for n in (1, 9, 120, 64 * world - 1, 64 * world, 64 * world + 9, 2048 + 8 * world):
            x = torch.randn(world, n, generator=rng).to(dtype)
            want = islands(x) if n * dtype.itemsize > 256 else fold(x)
            assert torch.equal(all_reduce(backend, comm, x), want.expand_as(x)), (dtype, n)


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_island_traffic(rng, backend, world):
    """S bytes in all cross from one island to the other: one S / (W/2) slice from each rank to its partner."""
    comm = virtual(backend, world, hooks=True)
    comm._handle.set_island_bytes(0)
    half, n = world // 2, 256 * world
    x = torch.randn(world, n, generator=rng)
    all_reduce(backend, comm, x)
    sent, slice_bytes = comm.hooks[:, 8:8 + world].cpu(), 4 * n // half
    partner = torch.eye(world, dtype=torch.int32).roll(half, 1)
    inside = torch.block_diag(*[torch.ones(half, half, dtype=torch.int32)] * 2) - torch.eye(world, dtype=torch.int32)
    assert torch.equal(sent, slice_bytes * (partner + 2 * inside))
    assert int(sent[:half, half:].sum()) == 4 * n


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("backend", KERNELS)
def test_islands_in_the_norm(rng, backend, rows):
    comm = virtual(backend, 4)
    comm._handle.set_island_bytes(0)
    x = torch.randn(4, rows, 1000, generator=rng).bfloat16()
    residual = torch.randn(rows, 1000, generator=rng).bfloat16()
    got = run_op(backend, "all_reduce_rms_norm", x=x, residual=residual.expand(4, -1, -1).contiguous(),
                 weight=torch.ones(1000).bfloat16(), out=torch.zeros_like(x), comm=comm.handle, eps=1e-6)
    want = (residual.float() + islands(x.flatten(1)).view(rows, 1000).float()).bfloat16()
    assert torch.equal(got["residual"].cpu(), want.expand(4, -1, -1))


def image(x: torch.Tensor) -> torch.Tensor:
    """fp32 values as they arrive: e4m3 with a power-of-two scale per 128, largest / scale in (224, 448]."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % 128)).unflatten(-1, (-1, 128))
    finite = padded.isfinite()
    largest = torch.where(finite, padded, 0).abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    exponent = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    scale = torch.where(largest == 0, 1.0, torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126)))
    codes = torch.where(finite, padded / scale, float("nan")).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)[..., :n]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_fp8_wire(rng, backend, world):
    """Bit for bit the stated images; all ranks equal; the error within what e4m3 promises."""
    comm = virtual(backend, world)
    comm._handle.set_fp8_bytes(0)
    for dtype in DTYPES:
        for n in (1, 15, 17, 128, 511, 512, 513, 512 * world + 40, 5000):
            x = (torch.randn(world, n, generator=rng) * torch.randn(n, generator=rng).exp()).to(dtype)
            x[0, n // 2] = 0
            parts = image(x.float())
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            for limit, want in ((comm.max_bytes, total.to(dtype)), (0, image(total).to(dtype))):
                comm._handle.set_one_shot_bytes(limit)
                assert torch.equal(all_reduce(backend, comm, x), want.expand_as(x)), (dtype, n, limit)
            bound = (x.double().abs() / 16).sum(0) + world * 448 * 2.0**-9 / 224 * x.double().abs().amax()
            assert ((total - x.double().sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("backend", KERNELS)
def test_fp8_payloads(rng, backend):
    """What is not finite arrives as NaN and harms no neighbour; tiny groups keep a scale; both zeros are zero."""
    comm = virtual(backend, 2)
    comm._handle.set_fp8_bytes(0)
    x = torch.zeros(2, 1024)
    x[0, 0], x[0, 1], x[1, 2], x[0, 3] = float("inf"), float("nan"), float("-inf"), -0.0
    x[:, 512:640] = 1e-38 * torch.rand(2, 128, generator=rng)
    x[:, 640:768] = 3e38 * torch.rand(2, 128, generator=rng) * torch.tensor([[1.0], [-1.0]])
    got = all_reduce(backend, comm, x)
    want = image(x)[0] + image(x)[1]
    assert got[0, :3].isnan().all() and got[:, 3:].isfinite().all()
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0).expand_as(got))


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("backend", KERNELS)
def test_fp8_traffic(rng, backend, world):
    """132 bytes per 128 values: 0.516 of bf16."""
    comm = virtual(backend, world, hooks=True)
    comm._handle.set_fp8_bytes(0)
    n, others = 512 * world * 2, 1 - torch.eye(world, dtype=torch.int32)
    x, wire = torch.randn(world, n, generator=rng).bfloat16(), n * 132 // 128
    comm._handle.set_one_shot_bytes(comm.max_bytes)
    all_reduce(backend, comm, x)
    sent = comm.hooks[:, 8:8 + world].clone()
    assert torch.equal(sent.cpu(), wire * others)
    comm._handle.set_one_shot_bytes(0)
    all_reduce(backend, comm, x)
    assert torch.equal((comm.hooks[:, 8:8 + world] - sent).cpu(), 2 * wire // world * others)


@pytest.mark.skipif("emulated" not in KERNELS, reason="needs the emulator, whose device can be chosen")
@pytest.mark.parametrize("device", ["80:108", "89:142", "90:132", "100:148", "120:188"])
def test_no_launch_choice_changes_a_bit(rng, monkeypatch, device):
    """Blocks, clusters and rows per block differ between devices and calls; the results of one row do not."""
    monkeypatch.setenv("FV_EMULATED_DEVICE", device)
    x = torch.randn(1, 9, 7168, generator=rng).bfloat16()
    residual, weight = torch.randn(9, 7168, generator=rng).bfloat16(), torch.randn(7168, generator=rng).bfloat16()
    first = {}
    for blocks in (1, 8, 64):
        comm = virtual("emulated", 1, blocks=blocks, max_bytes=1 << 18)
        for rows in (1, 9):
            got = run_op("emulated", "all_reduce_rms_norm", x=x[0, :rows], residual=residual[:rows], weight=weight,
                         out=torch.zeros(rows, 7168).bfloat16(), comm=comm.handle, eps=1e-6)
            first.setdefault("out", got["out"][:1])
            assert torch.equal(got["out"][:1], first["out"]), (blocks, rows)
    norm = (residual[:1].float() + x[0, :1].float()).bfloat16().float()
    want = norm * torch.rsqrt(norm.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    assert torch.allclose(first["out"].float(), want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("wire, islands, deterministic, text", [
    ("int8", False, False, "wire must be exact|fp8; got 'int8'"), ("fp8", False, True, "deterministic=True must be with wire="),
    ("exact", True, True, "deterministic=True must be with wire=")])
def test_forms_that_are_refused(wire, islands, deterministic, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        check_forms(wire, islands, deterministic)
    check_forms("fp8", True, False), check_forms("exact", False, True)


def test_limits_of_the_forms():
    handle = _control().Handle(world=2, rank=0, local_ranks=1, transport="gathered", device=-1, blocks=1, max_bytes=64,
                               one_shot_bytes=0, deadline_ns=0, ranks=[])
    with pytest.raises(ValueError, match="blocks must be in 1..256; got 257"):
        handle.set_blocks(257)
