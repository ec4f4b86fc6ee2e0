"""Products of few rows with large weights in Triton: norms, residuals and SiLU-mul on the way; a network through them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED, TRITON

from fastverify.models.dummy import dummy_target
from fastverify.models.linear import few_rows

pytestmark = pytest.mark.skipif(not TRITON, reason="needs a GPU with Triton, or TRITON_INTERPRET=1")
DEVICE, BF16 = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def measured_on():
    if not INTERPRETED and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("used on sm_90 and sm_100")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("hidden,inner", [(256, 384)] if INTERPRETED else [(4096, 6400), (2176, 14336)])
def test_a_chain_of_products(rows, hidden, inner):
    """norm -> gate/up with SiLU-mul -> down onto the residual -> norm -> product: each within bfloat16's rounding of inputs and result."""
    from fastverify.models.few_rows_triton import DeferredNorm, product
    torch.manual_seed(rows)
    x, first, second = draw(rows, hidden).to(BF16), (1 + 0.1 * draw(hidden)).to(BF16), (1 + 0.1 * draw(hidden)).to(BF16)
    gate_up, down = (draw(2 * inner, hidden) / hidden**0.5).to(BF16), (draw(hidden, inner) / inner**0.5).to(BF16)
    h, after = x.clone(), DeferredNorm(rows, hidden, x)
    act = product(DeferredNorm(rows, hidden, x).of(h, first), gate_up, silu=True, eps=1e-5)
    gate, up = (F.rms_norm(x.float(), (hidden,), first.float(), 1e-5) @ gate_up.float().t()).chunk(2, dim=1)
    torch.testing.assert_close(act.float(), F.silu(gate) * up, rtol=2e-2, atol=3e-2)
    product(act, down, out=h, add=True, then=after, norm=second)
    torch.testing.assert_close(h.float(), x.float() + act.float() @ down.float().t(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(after.squares[:after.parts, :rows].sum(0), h.float().square().sum(1), rtol=1e-4, atol=1e-2)
    y = product(after, gate_up, eps=1e-5).float()
    torch.testing.assert_close(y, F.rms_norm(h.float(), (hidden,), second.float(), 1e-5) @ gate_up.float().t(), rtol=2e-2, atol=4e-2)
    assert torch.equal(product(after, gate_up, eps=1e-5).float(), y)
    fewer = DeferredNorm(1, hidden, x)
    fewer.scaled.copy_(after.scaled[:1])
    fewer.squares.copy_(after.squares)
    fewer.parts = after.parts
    assert torch.equal(product(fewer, gate_up, eps=1e-5).float(), y[:1])  # a row does not depend on how many there are


def test_add_needs_what_it_adds_to():
    from fastverify.models.few_rows_triton import product
    with pytest.raises(RuntimeError, match="^product: out must be given with add=True, which adds to it; got None. Fix: "):
        product(draw(1, 256).to(BF16), draw(256, 256).to(BF16), add=True)


@pytest.mark.gpu
def test_a_network(monkeypatch):
    """Against the same network without these products, in bfloat16."""
    from fastverify.eagle3.graph_loop import GraphLoop
    from fastverify.eagle3.shapes import OFF
    target = dummy_target("llama-3-8b", BF16, "cuda", num_layers=2)
    h = draw(5, 4096).to(BF16)
    assert few_rows(h, target.layers[0].qkv) and not few_rows(draw(17, 4096).to(BF16), target.layers[0].qkv)
    found = []
    for used in (True, False):
        if not used:
            monkeypatch.setattr("fastverify.models.llama.few_rows", lambda *_: False)
        seen: list = []
        loop = GraphLoop(target, shapes=(OFF,), max_length=128, stop_ids=[], capture=False, hook=lambda logits, plan: seen.append(logits.float()))  # noqa: B023
        job = loop.submit(list(range(5, 25)), 3)
        for _ in loop.run():
            pass
        assert len(job.tokens) == 3
        found.append(seen[0])
    assert float((found[0] - found[1]).abs().max()) < 0.2 * float(found[1].std()) and not torch.equal(*found)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs test_a_network")
@pytest.mark.parametrize("aux", [(), (0, 1, 3), (2, 2)])
def test_a_small_network(monkeypatch, aux):
    """Every wire of the six-launch form, in float32: hidden rows, the draft's features, K and V."""
    from tiny_models import Requests

    from fastverify.models import dummy
    small = replace(dummy.CONFIGS["tiny"], num_layers=3, hidden_size=128, intermediate_size=256, head_dim=32)
    monkeypatch.setitem(dummy.CONFIGS, "small", small)
    target = dummy_target("small", torch.float32)
    for i, w in enumerate(target.layers):
        w.input_norm.mul_(1 + 0.1 * i), w.post_norm.mul_(1.3 - 0.1 * i)
    found = []
    for used in (True, False):
        monkeypatch.setattr("fastverify.models.llama.few_rows", lambda *_, used=used: used)
        requests = Requests(target, 1, torch.Generator().manual_seed(0))
        batch = requests.batch([[5, 9, 11, 300, 2]], [[0, 1, 2, 3, 4]])
        hidden, features = target.forward(batch, requests.cache, aux)
        found.append([target.logits(hidden), requests.cache.k.nan_to_num(), requests.cache.v.nan_to_num()] + ([features] if aux else []))
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
