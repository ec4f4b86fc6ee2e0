"""mla_tree_attention: float64 oracle on random trees over a latent cache, splits, poison, empty rows, arguments."""

import math

import pytest
import torch

from cases import attention_case, cumulative
from conftest import BACKENDS, need_kernel, positional, run_op
from fastverify import _ops
from fastverify.attention.mla_tree_attention import mla_tree_attention
from fastverify.attention.workspace import COUNTER_BYTES, mla_workspace_bytes

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KERNELS = [b for b in BACKENDS if b in ("cuda", "emulated")]


def mla_case(rng, counts, prefixes, page_size=16, heads=4, dim=40, out_dim=32, dtype=torch.float32, cache_dtype=None, **more) -> dict:
    """Keyword arguments of mla_tree_attention, from tree_attention's case with one kv head."""
    case = attention_case(rng, counts, prefixes, page_size, heads, 1, dim, dtype, cache_dtype, **more)
    keep = ("q", "mask", "cu_nodes", "prefix_len", "page_table", "lse", "row_base", "scale", "parents")
    out = torch.full((len(case["q"]), heads, out_dim), float("nan")).to(dtype)
    return {**{k: case[k] for k in keep}, "kv_cache": case["k_cache"].squeeze(2), "out": out}


def run(backend: str, case: dict, **over) -> dict:
    return run_op(backend, "mla_tree_attention", **{k: v for k, v in {**case, **over}.items() if k != "parents"})


def compare(backend: str, case: dict, **over) -> dict:
    got, want = run(backend, case, **over), run("reference", case)
    error = (got["out"].double() - want["out"].double()).abs() / (1 + want["out"].double().abs())
    assert not got["out"].isnan().any() and (error <= TOLERANCE[case["q"].dtype]).all(), error.max()
    assert torch.equal(got["lse"].isneginf(), want["lse"].isneginf())
    assert torch.allclose(got["lse"], want["lse"], rtol=1e-5, atol=1e-4)
    return got


def workspace(case: dict) -> torch.Tensor:
    rows, heads = case["q"].shape[:2]
    sms = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
    space = torch.full((mla_workspace_bytes(rows, len(case["prefix_len"]), heads, case["out"].shape[2], sms),), 255, dtype=torch.uint8)
    space[:COUNTER_BYTES] = 0
    return space


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 17])
def test_equals_oracle(backend, rng, dtype, page_size):
    need_kernel(backend, "mla_tree_attention")
    compare(backend, mla_case(rng, [5, 0, 3], [70, 9, 0], page_size, 4, 40, 32, dtype))
    compare(backend, mla_case(rng, [9], [130], page_size, 3, 24, 24, dtype, chain=True))
    compare(backend, mla_case(rng, [6], [33], page_size, 2, 40, 8, dtype, row_base=7, spare_words=1))


def test_equals_tree_attention_with_one_kv_head(rng):
    case = attention_case(rng, [7, 2], [90, 11], 16, 4, 1, 48)
    wide = run_op("cpu", "tree_attention", **{k: v for k, v in case.items() if k != "parents"}, )
    keep = ("q", "mask", "cu_nodes", "prefix_len", "page_table", "lse", "row_base", "scale")
    got = run_op("cpu", "mla_tree_attention", **{k: case[k] for k in keep}, kv_cache=case["k_cache"].squeeze(2),
                 out=torch.full((len(case["q"]), 4, 32), float("nan")))
    same_v = run_op("cpu", "tree_attention", **{**{k: v for k, v in case.items() if k != "parents"}, "v_cache": case["k_cache"]})
    assert torch.equal(got["out"], same_v["out"][..., :32]) and torch.equal(got["lse"], wide["lse"])


def test_nan_beyond_the_lengths_and_in_padding_is_not_seen(backend, rng):
    """mla_case poisons them; a row's result does not depend on its neighbours in the batch."""
    need_kernel(backend, "mla_tree_attention")
    case = mla_case(rng, [4, 6], [20, 65])
    both = compare(backend, case)
    alone = run(backend, {**case, "cu_nodes": cumulative([4, 0])})
    assert torch.allclose(alone["out"][:4], both["out"][:4], atol=1e-6)
    assert (alone["out"][4:] == 0).all() and alone["lse"][4:].isneginf().all()


def test_the_function_allocates_and_returns_out(rng):
    case = mla_case(rng, [3], [20])
    out = mla_tree_attention(case["q"], case["kv_cache"], case["cu_nodes"], case["prefix_len"], case["page_table"], case["scale"],
                             mask=case["mask"], out_dim=32)
    assert torch.equal(out, run("cpu", case)["out"])


BAD = [
    (lambda c: dict(q=c["q"].double()), "mla_tree_attention: q must be float32|bfloat16|float16 [any, any, any] on cpu; got float64 [13, 4, 40] on cpu. "
                                        "Fix: cast with .to(dtype)."),
    (lambda c: dict(kv_cache=c["kv_cache"][..., :39]), "mla_tree_attention: kv_cache must be float32|bfloat16|float16 [any, any, 40] on cpu; got float32 "
                                                       "[PAGES, 16, 39] on cpu. Fix: pass that shape."),
    (lambda c: dict(out=torch.zeros(13, 4, 41)), "mla_tree_attention: out must have 1 to 40 dims, the first of a latent row; got float32 [13, 4, 41] on cpu. "
                                                 "Fix: pass out [R, H, kv_lora_rank]."),
    (lambda c: dict(scale=math.inf), "mla_tree_attention: scale must be finite; got inf. Fix: pass the softmax scale of the model (of its full head, not of the "
                                     "latent row)."),
    (lambda c: dict(row_base=-1), "mla_tree_attention: row_base must be >= 0; got -1. Fix: pass the forest column of each request's first row."),
    (lambda c: dict(row_base=2**63 - 2), "mla_tree_attention: row_base must be at most 2147483634 with 13 rows; got 9223372036854775806. Fix: pass the "
                                         "forest column of each request's first row."),
    (lambda c: dict(scale=1e300), "mla_tree_attention: scale must be at most 2e+38 (float32); got 1e+300. Fix: pass the softmax scale of the model (of its "
                                  "full head, not of the latent row)."),
    (lambda c: dict(out=torch.zeros(1, 4, 32).expand(13, 4, 32)), "mla_tree_attention: out must have memory of its own for every element; got float32 "
     "[13, 4, 32] on cpu with strides that overlap. Fix: pass a tensor of its own, not an expanded one."),
    (lambda c: dict(cu_nodes=c["cu_nodes"][:-1]), "mla_tree_attention: cu_nodes must be int32 [3] on cpu; got int32 [2] on cpu. Fix: pass that shape."),
    (lambda c: dict(prefix_len=torch.tensor([20, 2000], dtype=torch.int32)), None),
    (lambda c: dict(mask=c["mask"][:, :0]), None),
]


@pytest.mark.parametrize("change,message", BAD)
def test_bad_arguments(rng, change, message):
    case = mla_case(rng, [4, 6], [20, 65])
    with pytest.raises(RuntimeError) as error:
        _ops.get("mla_tree_attention")(*positional("mla_tree_attention", **{k: v for k, v in case.items() if k != "parents"} | change(case)))
    text = str(error.value).splitlines()[0]
    if message is None:
        assert text.startswith("mla_tree_attention: ") and " must " in text and " Fix: " in text
    else:
        assert text == message.replace("PAGES", str(len(case["kv_cache"])))


def test_opcheck(rng):
    case = mla_case(rng, [4, 6], [20, 65])
    args = positional("mla_tree_attention", **{k: v for k, v in case.items() if k != "parents"})
    torch.library.opcheck(torch.ops.fastverify.mla_tree_attention.default, args)


@pytest.mark.skipif(not KERNELS, reason="needs a CUDA GPU or the emulator")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device", ["90:2", "90:5", "100:4", "80:3", "120:3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles(kernel, rng, monkeypatch, device, dtype):
    """512 + 64 dims: every tile shape, few and many rows, sequences split and merged in both ways; counters reset."""
    monkeypatch.setenv("FV_EMULATED_DEVICE", device)
    shapes = [([2], [100], 8), ([14, 0, 13], [70, 5, 129], 8), ([3, 3], [0, 300], 16)]
    for counts, prefixes, heads in shapes[: 3 if kernel == "cuda" else 1 + (dtype == torch.float16)]:
        case = mla_case(rng, counts, prefixes, 16, heads, 576, 512, dtype, chain=heads == 16)
        got = compare(kernel, case, workspace=workspace(case))
        assert not got["workspace"][:COUNTER_BYTES].any()
        again = run(kernel, case, workspace=workspace(case))
        assert torch.equal(again["out"], got["out"]) and torch.equal(again["lse"], got["lse"])
