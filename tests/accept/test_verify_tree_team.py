"""verify_tree by teams of blocks that agree through the workspace, against the CPU kernel bit for bit: on the GPU, and on the emulator
with few multiprocessors. One workspace serves all shapes of a stream."""

import pytest
import torch

from cases import verify_case
from conftest import EMULATED, run_op
from fastverify import verify_tree_workspace

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not EMULATED.exists(), reason="needs a GPU or the emulator")
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.fixture
def check(monkeypatch):
    """check(case, multiprocessors): the same outputs as the CPU kernel; the second call of a test uses the same workspace again."""
    spaces = {}

    def same(case: dict, sms: int = 4) -> dict:
        monkeypatch.setenv("FV_EMULATED_DEVICE", f"90:{sms}")
        backend = "cuda" if GPU else "emulated"
        if backend not in spaces:
            spaces[backend] = verify_tree_workspace("cuda" if GPU else "cpu")
        want = run_op("cpu", "verify_tree", **case)
        got = run_op(backend, "verify_tree", **{**case, "workspace": spaces[backend]})
        for name, value in want.items():
            a, b = (t.view(torch.int32) if t.dtype == torch.float32 else t for t in (got[name].cpu(), value))
            assert torch.equal(a, b), (name, got[name], value)
        return want
    return same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature,filters,extras", [(0.0, False, False), (0.9, False, False), (0.8, True, False), (0.9, True, True)])
def test_shapes_one_after_the_other(check, rng, dtype, temperature, filters, extras):
    for batch, nodes, vocab, sms in ((1, 6, 2056, 4), (2, 5, 1500, 5), (1, 1, 3000, 3), (1, 40, 1111, 2)):
        check(verify_case(rng, batch=batch, nodes=nodes, vocab=vocab, dtype=dtype, temperature=temperature, filters=filters, extras=extras,
                          agree=0.9, logprobs=batch == 2, pad=8 * (nodes % 2)), sms)


@pytest.mark.parametrize("top_k,top_p,min_p", [(0, 0.9, 0.0), (0, 0.3, 0.0), (400, 1.0, 0.0), (300, 0.8, 0.1), (50, 0.95, 0.0), (1, 1.0, 0.0),
                                               (0, 1.0, 0.2), (0, 0.0, 0.0), (200, 1.0, 0.0)])
@pytest.mark.parametrize("kind", ["normal", "ties", "one value", "sorted", "wide"])
def test_filters_alone_and_together(check, rng, top_k, top_p, min_p, kind):
    """Sorted: all large logits in a few blocks. Ties: more equal values at the cut than the lists hold."""
    for dtype in DTYPES[:2]:
        case = verify_case(rng, batch=1, nodes=3, vocab=2600, dtype=torch.float32, temperature=0.8, agree=1.0, fixed_nodes=True, logprobs=False)
        x = case["logits"]
        if kind == "ties":
            x.copy_((x * 2).round() / 2)
        elif kind == "one value":
            x.fill_(-0.5)
        elif kind == "sorted":
            x.copy_(x.sort(1, descending=True).values)
        elif kind == "wide":
            x.mul_(40.0)
        case["logits"] = x.to(dtype)
        case["top_k"].fill_(top_k)
        case["top_p"].fill_(top_p)
        case["min_p"].fill_(min_p)
        case["active"].fill_(1)
        check(case, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 0.01])
def test_logits_that_overflow_when_divided(check, rng, temperature):
    """logit / T below -3.4e38 counts as -3.4e38, not as excluded: among such entries the lowest id wins."""
    case = verify_case(rng, batch=1, nodes=2, vocab=700, dtype=torch.float32, temperature=temperature, agree=1.0, fixed_nodes=True, logprobs=False)
    case["active"].fill_(1)
    case["logits"].fill_(-3.0e38)
    case["logits"][:, :5] = float("-inf")
    out = check(case, 2)
    assert out["num_tokens_out"].item() >= 1 and out["out_tokens"][0, 0].item() == 5
    case["logits"][:, 9] = -3.3e38
    case["logits"][:, 100:] = float("-inf")
    check(case, 2)
    case["logits"][:, 50] = 3.0e38
    check(case, 2)


@pytest.mark.parametrize("kind", ["-inf", "nan", "inf"])
def test_bad_rows(check, rng, kind):
    for temperature, filters in ((0.0, False), (1.0, False), (0.7, True)):
        case = verify_case(rng, batch=2, nodes=4, vocab=1900, temperature=temperature, filters=filters, agree=0.9)
        x = case["logits"]
        x[torch.rand(x.shape, generator=rng) < 1e-3] = float(kind)
        x[1] = float(kind)
        check(case)
