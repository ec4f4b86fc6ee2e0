"""lm_head_verify_tree: the float64 product and walk, and equality with verify_tree on the same logits."""

import pytest
import torch

from cases import verify_case
from conftest import positional, run_op
import fastverify as fv
from fastverify import _ops
from fastverify import verify_tree_workspace_bytes
from fastverify.accept.lm_head_verify_tree import lm_head_verify_tree_workspace_bytes, workspace_logits
from fastverify.reference.accept import verify_margin


def run_head(backend, **case) -> dict:
    """run_op with the workspace that the CUDA kernels need; its zeroed part must be zero again afterwards."""
    if backend in ("reference", "cpu"):
        return run_op(backend, "lm_head_verify_tree", **case)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if backend == "cuda" else 132
    size, zeroed, logits = lm_head_verify_tree_workspace_bytes(case["hidden"].shape[0], case["vocab_size"], sms)
    workspace = torch.full((size + 64,), 0xff, dtype=torch.uint8)  # NaN wherever it is read before it is written
    workspace[:zeroed] = 0
    got = run_op(backend, "lm_head_verify_tree", **{**case, "workspace": workspace})
    after = got.pop("workspace")
    assert not after[verify_tree_workspace_bytes():zeroed].any() and (after[size:] == 0xff).all()
    filters = (case["top_k"] > 0) | (case["top_p"] < 1) | (case["min_p"] > 0)
    if case.get("logprobs") is None and not filters.any() and (case["cu_nodes"].diff() >= 0).all():
        assert (after[logits:] == 0xff).all(), "no logit is written"
    return got


def head_case(rng, h: int = 24, dtype=torch.float32, weight_dtype=None, **kw) -> dict:
    case = verify_case(rng, dtype=torch.float32, **kw)
    rows, vocab = case.pop("logits").shape[0], case["vocab_size"]
    hidden = torch.randn(rows, h, generator=rng)
    weight = torch.randn(vocab + 3, h, generator=rng) / h**0.5 * 2.5
    hidden[int(case["cu_nodes"][-1]):] = float("nan")  # padding rows are never read
    case["hidden"], case["weight"] = hidden.to(dtype), weight.to(weight_dtype or dtype)
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature,filters,extras,logprobs", [(0.0, False, False, False), (0.9, False, True, False),
                                                                (0.8, True, True, False), (0.9, False, False, True)])
def test_equals_oracle(backend, rng, dtype, temperature, filters, extras, logprobs):
    close = total = 0
    for i in range(25):
        case = head_case(rng, h=[16, 24, 100, 576][i % 4], dtype=dtype, batch=1 + i % 4, nodes=1 + i % 9,
                         vocab=[7, 255, 256, 777][i % 4], temperature=temperature, filters=filters, extras=extras,
                         logprobs=logprobs, agree=0.0)
        want = {k: v.clone() for k, v in case.items() if isinstance(v, torch.Tensor)}
        merged = {**case, **want, "logits": case["hidden"].double() @ case["weight"].double().T}
        margins = torch.tensor(verify_margin(*positional("verify_tree", **{k: v for k, v in merged.items() if k not in ("hidden", "weight")})))
        got = run_head(backend, **case)
        clear = margins > 1e-4
        close, total = close + int((~clear).sum()), total + len(clear)
        for name, value in got.items():
            assert torch.allclose(value[clear].double(), want[name][clear].double(), rtol=1e-4, atol=1e-4), name
    assert close <= 0.1 * total


def test_deep_walks_equal_verify_tree_on_exact_logits(backend, rng):
    """Small-integer operands make the product exact, so tokens must equal verify_tree's bit for bit."""
    for i in range(30):
        case = head_case(rng, h=16, batch=4, nodes=9, vocab=300, temperature=[0.0, 0.9][i % 2], filters=i % 3 == 0)
        case["hidden"] = torch.randint(-3, 4, case["hidden"].shape, generator=rng).float()
        case["weight"] = torch.randint(-3, 4, case["weight"].shape, generator=rng).float() / 4
        logits = case["hidden"] @ case["weight"].T
        base = 0
        for lo, hi in zip(case["cu_nodes"].tolist(), case["cu_nodes"].tolist()[1:]):
            for r in range(lo + 1, hi):  # children that the target likes
                case["tokens"][r] = logits[lo + int(case["parents"][r]), :300].topk(3).indices[r % 3]
            base = hi
        assert base <= logits.shape[0]
        rest = {k: v for k, v in case.items() if k not in ("hidden", "weight")}
        want = run_op(backend, "verify_tree", logits=logits, **rest)
        got = run_head(backend, **case)
        for name in want:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_those_of_the_kernels_own_logits(backend, rng, dtype):
    """logprobs send every row through memory: verify_tree on what lies there gives the tokens of the way through keys."""
    if backend == "cpu":
        pytest.skip("the CPU op keeps no logits")
    sms = torch.cuda.get_device_properties(0).multi_processor_count if backend == "cuda" else 132
    for i in range(12):
        vocab, nodes = [63, 300, 1025][i % 3], [3, 8, 20, 40][i % 4]
        case = head_case(rng, h=[64, 72, 136][i % 3], dtype=dtype, batch=2, nodes=nodes, vocab=vocab, temperature=[0.9, 0.0][i % 2],
                         filters=i % 4 == 3, extras=i % 5 == 4, agree=0.0)
        rows = case["hidden"].shape[0]
        size, zeroed, _ = lm_head_verify_tree_workspace_bytes(rows, vocab, sms)
        workspace = torch.full((size,), 0xff, dtype=torch.uint8)
        workspace[:zeroed] = 0
        spilled = run_op(backend, "lm_head_verify_tree", **{**case, "workspace": workspace})
        logits = workspace_logits(spilled.pop("workspace"), rows, vocab, sms)
        live = int(case["cu_nodes"][-1])
        assert logits[:live].isfinite().all() and logits[live:].isnan().all(), "padding rows are not written"
        want = run_op("cpu", "verify_tree", logits=logits, **{k: v for k, v in case.items() if k not in ("hidden", "weight")})
        keyed = run_head(backend, **{**case, "logprobs": None})
        for name in want:
            assert torch.equal(spilled[name], want[name]), name
            assert name == "logprobs" or torch.equal(keyed[name], want[name]), name


@pytest.mark.parametrize("rows,h", [(0, 16), (7, 0)])
def test_no_rows_and_no_columns(backend, rng, rows, h):
    """No rows: every active request has a bad tree. No columns: all logits are 0, so the lowest id wins."""
    case = head_case(rng, h=16, dtype=torch.bfloat16, batch=2, nodes=3, vocab=40, logprobs=False, fixed_nodes=True)
    case["active"].fill_(1)
    case["remaining"].fill_(9)
    case.update(hidden=case["hidden"][:rows, :h].contiguous(), weight=case["weight"][:, :h].contiguous(), stop_ids=None,
                tokens=case["tokens"][:rows], parents=case["parents"][:rows])
    if rows == 0:
        case["cu_nodes"] = torch.zeros(3, dtype=torch.int32)
    got = run_head(backend, **case)
    if rows == 0:
        assert (got["flags"] & 4).all() and not got["num_tokens_out"].any()
    else:
        assert (got["out_tokens"][:, 0] == 0).all()


def test_mixed_weight_dtype_and_stride(backend, rng):
    case = head_case(rng, h=32, batch=2, nodes=4, vocab=90, weight_dtype=torch.bfloat16)
    wide = torch.full((93, 40), float("nan"), dtype=torch.bfloat16)
    wide[:, :32] = case["weight"]
    a = run_head(backend, **case)
    b = run_head(backend, **{**case, "weight": wide[:, :32]})
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_rows_shared_by_two_requests_do_not_mix(backend, rng):
    """A cu_nodes that steps back makes one request bad; those before it still get the tokens of verify_tree."""
    deep = 0
    for _ in range(30):
        case = head_case(rng, h=16, batch=3, nodes=4, vocab=60, temperature=0.9, fixed_nodes=True)
        case["hidden"] = torch.randint(-3, 4, case["hidden"].shape, generator=rng).float()
        case["weight"] = torch.randint(-3, 4, case["weight"].shape, generator=rng).float() / 4
        case["active"].fill_(1)
        logits = case["hidden"] @ case["weight"].T
        case["tokens"][1:4] = logits[0, :60].topk(3).indices
        case["parents"][:4] = torch.tensor([-1, 0, 0, 0])
        case.update(cu_nodes=torch.tensor([0, 4, 1, 4], dtype=torch.int32), logprobs=None, temperature=torch.full((3,), 0.9))
        rest = {k: v for k, v in case.items() if k not in ("hidden", "weight")}
        want = run_op(backend, "verify_tree", logits=logits, **rest)
        deep += int(want["path"][0, 1]) == 1  # row 1 is node 1 of request 0 and the root of request 2
        got = run_head(backend, **case)
        assert got["flags"][1] & 4
        for name in want:
            assert torch.equal(got[name], want[name]), name
    assert deep > 3


@pytest.mark.parametrize("over,message", [
    (dict(weight=torch.zeros(14, 23)), r"lm_head_verify_tree: weight must be .* \[any, 24\] on cpu; got float32 \[14, 23\]"),
    (dict(vocab_size=15), "lm_head_verify_tree: vocab_size must be at most the weight's 14 rows; got 15. Fix: "),
    (dict(hidden=torch.zeros(9, 24, dtype=torch.float64)), "lm_head_verify_tree: hidden must be .* got float64"),
])
def test_bad_arguments_raise_in_words(rng, over, message):
    case = head_case(rng, batch=2, nodes=4, vocab=11, fixed_nodes=True)
    with pytest.raises(RuntimeError, match=message):
        _ops.get("lm_head_verify_tree")(*positional("lm_head_verify_tree", **{**case, **over}))


def test_opcheck(rng):
    case = head_case(rng, batch=2, nodes=3, vocab=20, temperature=0.9, extras=True)
    torch.library.opcheck(_ops.get("lm_head_verify_tree"), positional("lm_head_verify_tree", **case))


def test_an_empty_batch_gives_empty_results():
    i32 = dict(dtype=torch.int32)
    none = torch.zeros(0, **i32)
    for kw in ({}, dict(max_path=4), dict(logprobs=True)):
        out = fv.lm_head_verify_tree(torch.zeros(0, 16), torch.zeros(8, 16), none, none, torch.zeros(1, **i32), none, none, none.clone(),
                                     fv.Sampling.make(0), **kw)
        assert out.out_tokens.shape == out.path.shape == (0, kw.get("max_path", 1)) and out.flags.shape == (0,)
