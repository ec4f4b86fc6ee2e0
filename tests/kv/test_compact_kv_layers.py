"""compact_kv_layers: lists of per-layer caches give what one slab gives; errors; schema."""

import pytest
import torch

from conftest import mutable_names, positional, run_op
from fastverify import _ops, compact_kv, compact_kv_layers
from test_compact_kv import base_case, bits, compact_case

OP = "compact_kv_layers"


def as_layers(case: dict) -> dict:
    case = dict(case)
    k, v = case.pop("k_cache"), case.pop("v_cache")
    return dict(k_caches=list(k), v_caches=[] if v is None else list(v), **case)


def same_as_slab(backend: str, case: dict) -> None:
    want = run_op("reference", "compact_kv", **case)
    for where in (backend, "reference"):
        got = run_op(where, OP, **as_layers(case))
        for name, value in got.items():
            slab = want.get(name.replace("_caches", "_cache"))
            assert torch.equal(bits(torch.stack(value) if isinstance(value, list) else value), bits(slab)) if len(value) else slab is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_equals_the_slab(backend, rng, dtype, page_size):
    same_as_slab(backend, compact_case(rng, [9, 0, 14], [5, 3, 40], page_size, layers=4, dtype=dtype))
    same_as_slab(backend, compact_case(rng, [9, 30], [5, 3], page_size, layers=1, row=(24,), dtype=dtype, v_cache=False, aux=0))


def test_the_most_layers_and_one_too_many(backend, rng):
    case = compact_case(rng, [6], [3], 4, layers=128, row=(4,))
    same_as_slab(backend, case)
    case = as_layers(compact_case(rng, [6], [3], 4, layers=129, row=(4,)))
    with pytest.raises(RuntimeError, match=r"k_caches must be 1\.\.128 layers; got 129\. Fix: "):
        run_op(backend, OP, **case)


def test_strided_layers_and_different_rows(rng):
    """Layers as slices of one allocation, K and V of different width (a latent cache split in two)."""
    case = compact_case(rng, [12, 7], [9, 33], row=(24,), aux=0)
    want = run_op("cpu", "compact_kv", **case)
    layers = list(case["k_cache"].clone())
    split = {**as_layers(case), "k_caches": [t[..., :16] for t in layers], "v_caches": [t[..., 16:] for t in layers]}
    _ops.get(OP)(*positional(OP, **split))
    assert torch.equal(bits(torch.stack(layers)), bits(want["k_cache"]))


def test_public_functions_take_lists(rng):
    case = compact_case(rng, [6, 6], [5, 20])
    want = run_op("cpu", "compact_kv", **case)
    rest = [case[n] for n in ("path", "num_tokens_out", "prefix_len", "page_table")]
    for f in (compact_kv, compact_kv_layers):
        k, v = [t.clone() for t in case["k_cache"]], tuple(t.clone() for t in case["v_cache"])
        aux_out, cu_out = f(k, v, *rest, cu_nodes=case["cu_nodes"], aux=case["aux"])
        assert torch.equal(bits(torch.stack(k)), bits(want["k_cache"])) and torch.equal(bits(torch.stack(v)), bits(want["v_cache"]))
        assert torch.equal(aux_out, want["aux_out"]) and torch.equal(cu_out, want["cu_out"])
        k = [t.clone() for t in case["k_cache"]]
        assert f(k, None, *rest) == (None, None)
        assert torch.equal(bits(torch.stack(k)), bits(want["k_cache"]))


def lists(name: str, change) -> dict:
    layers = list(base_case()["k_cache"].clone())
    return {name: change(layers)}


BAD = [
    (dict(k_caches=[]), "k_caches must be 1..128 layers; got 0. Fix: "),
    (lists("v_caches", lambda t: t[:2]), "v_caches must be as many layers as k_caches, or none; got 2 beside 3. Fix: "),
    (lists("k_caches", lambda t: [torch.zeros(9), *t[1:]]),
     "k_caches must hold layers .pages, page_size, .... like those of k_caches; got float32 .9. on cpu. Fix: "),
    (lists("v_caches", lambda t: [x[:8] for x in t]), "v_caches must hold layers .pages, page_size, .... like those of k_caches; got float32 .8, 4, 2, 8."),
    (lists("k_caches", lambda t: [*t[:2], t[2].half()]),
     "k_caches must hold layers of one shape, dtype, strides and device; got float32 .9, 4, 2, 8. on cpu and at layer 2 float16"),
    (lists("v_caches", lambda t: [t[0], t[1].transpose(0, 1).contiguous().transpose(0, 1), t[2]]), "v_caches must hold layers of one shape, .* at layer 1 "),
    (lists("k_caches", lambda t: [x.transpose(2, 3).contiguous().transpose(2, 3) for x in t]),
     "k_caches must be dense in the dimensions past page_size; got .* Fix: allocate the cache as .pages, page_size, "),
    (dict(path=torch.zeros(2, 6, dtype=torch.int64)), "path must be int32 .any, any. on cpu; got int64 .2, 6."),
    (dict(aux=None), "aux and aux_out must be given together; got only aux_out. Fix: "),
]


@pytest.mark.parametrize("over,message", BAD)
def test_bad_arguments_raise_before_anything_moves(over, message):
    case = {**as_layers(base_case()), **over}
    before = [t.clone() for t in case["k_caches"]]
    with pytest.raises(RuntimeError, match=f"{OP}: {message}"):
        _ops.get(OP)(*positional(OP, **case))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(case["k_caches"], before))


def test_opcheck(rng):
    case = as_layers(compact_case(rng, [6, 0, 5], [5, 3, 2], 4, dtype=torch.int8, aux=3))
    case["aux_out"].zero_()
    torch.library.opcheck(_ops.get(OP), positional(OP, **case))
    assert mutable_names(OP) == ["k_caches", "v_caches", "aux_out", "cu_out"]
