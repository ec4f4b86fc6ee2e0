"""The network against transformers on random weights: whole, in chunks, token by token, as trees, and its aux states."""

from dataclasses import replace

import pytest
import torch
from cases import random_parents
from tiny_models import FAMILIES, Requests, hf_logits, hf_streams, make_hf, path_of, random_tokens

from fastverify.models.load import load_target

TOLERANCE = 1e-4  # float32, max abs logit difference


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
    """(transformers model, ours), the second loaded from what the first one saved."""
    hf = make_hf(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    return hf, load_target(folder)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and b.abs().max() > 0.3
    return (a - b).abs().max().item()


def test_one_forward(pair, rng):
    hf, ours = pair
    prompts = [random_tokens(n, rng) for n in (41, 1, 23)]
    logits, aux = Requests(ours, 3, rng).chain(prompts)
    assert aux is None
    assert difference(logits, torch.cat([hf_logits(hf, p) for p in prompts])) <= TOLERANCE


def test_chunked_prefill_then_token_by_token(pair, rng):
    hf, ours = pair
    texts = [random_tokens(n, rng) for n in (30, 19)]
    requests, got, at = Requests(ours, 2, rng), [[], []], [0, 0]
    for step in [(11, 5), (9, 0), (2, 7)] + [(1, 1)] * 6 + [(1, 1)] + [(1, 0)]:
        parts = [t[i : i + n] for t, i, n in zip(texts, at, step)]
        logits, _ = requests.chain(parts)
        for b, part in enumerate(logits.split(list(step))):
            got[b].append(part)
        at = [i + n for i, n in zip(at, step)]
    assert at == [30, 19]
    for text, parts in zip(texts, got):
        assert difference(torch.cat(parts), hf_logits(hf, text)) <= TOLERANCE


def test_tree_rows_equal_their_paths(pair, rng):
    hf, ours = pair
    prompts = [random_tokens(n, rng) for n in (17, 4)]
    requests = Requests(ours, 2, rng)
    requests.chain(prompts)
    parents = [random_parents(12, rng), random_parents(5, rng)]
    tokens = [random_tokens(len(p), rng) for p in parents]
    rows = iter(requests.tree(tokens, parents))
    for prompt, ids, tree in zip(prompts, tokens, parents):
        for node in range(len(tree)):
            path = prompt + [ids[i] for i in path_of(tree, node)]
            assert difference(next(rows), hf_logits(hf, path)[-1]) <= TOLERANCE


def test_aux_states(pair, rng):
    hf, ours = pair
    prompts = [random_tokens(n, rng) for n in (12, 7)]
    layers, h = (2, 0, 3, 1), ours.config.hidden_size
    logits, aux = Requests(ours, 2, rng).chain(prompts, aux_layers=layers)
    assert aux.shape == (19, 4 * h)
    streams = [hf_streams(hf, p) for p in prompts]
    for slot, layer in enumerate(layers):
        want = torch.cat([s[layer] for s in streams])
        assert difference(aux[:, slot * h : (slot + 1) * h], want) <= TOLERANCE
    assert torch.equal(logits, Requests(ours, 2, rng).chain(prompts)[0])  # asking for aux changes nothing


def test_tree_of_more_than_64_nodes(rng, tmp_path):
    hf = make_hf("llama3")
    hf.save_pretrained(tmp_path)
    requests = Requests(load_target(tmp_path), 1, rng)
    prompt = random_tokens(9, rng)
    requests.chain([prompt])
    parents = random_parents(70, rng)
    ids = random_tokens(70, rng)
    rows = requests.tree([ids], [parents])
    for node in range(60, 70):
        path = prompt + [ids[i] for i in path_of(parents, node)]
        assert difference(rows[node], hf_logits(hf, path)[-1]) <= TOLERANCE


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    make_hf("llama2").save_pretrained(folder)
    return folder


def test_padding_rows_change_nothing(small, rng):
    model, prompts = load_target(small), [random_tokens(6, rng), random_tokens(3, rng)]
    state = rng.get_state()
    plain = Requests(model, 2, rng)
    want, _ = plain.chain(prompts)
    rng.set_state(state)  # the same page tables again
    padded = Requests(model, 2, rng)
    got, aux = padded.chain(prompts, aux_layers=(1,), padding=5)
    assert difference(got[:9], want) <= 1e-5 and got[9:].isfinite().all() and aux.shape[0] == 14
    for a, b in ((plain.cache.k, padded.cache.k), (plain.cache.v, padded.cache.v)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0, equal_nan=True)  # the same slots written, no other
        assert a.isnan().any() and a.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(small, rng, dtype):
    prompt = [random_tokens(20, rng)]
    want, _ = Requests(load_target(small), 1, rng).chain(prompt)
    model = load_target(small, dtype=dtype)
    requests = Requests(model, 1, rng)
    got, aux = requests.chain(prompt, aux_layers=(1,))
    assert got.dtype == aux.dtype == requests.cache.k.dtype == dtype
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()


def test_weights_are_merged_and_tied(tmp_path):
    hf = make_hf("smollm2")
    hf.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    state, p = hf.state_dict(), "model.layers.1."
    assert ours.lm_head_weight is ours.embed_weight
    assert torch.equal(ours.embed_weight, state["model.embed_tokens.weight"])
    assert torch.equal(ours.layers[1].qkv, torch.cat([state[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"]))
    assert torch.equal(ours.layers[1].gate_up, torch.cat([state[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up")]))


@pytest.mark.parametrize("layer", [-1, 4])
def test_aux_layer_out_of_range(small, rng, layer):
    with pytest.raises(ValueError, match=rf"^forward: aux_layers must be in 0\.\.3; got \(1, {layer}\)\. Fix: "):
        Requests(load_target(small), 1, rng).chain([[5]], aux_layers=(1, layer))


def test_two_forwards_are_equal_bit_for_bit(small, rng):
    model, prompt = load_target(small), [random_tokens(33, rng)]
    first = Requests(model, 1, rng).chain(prompt, aux_layers=(0, 3))
    second = Requests(model, 1, rng).chain(prompt, aux_layers=(0, 3))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_aux_states_cost_no_launch_where_launches_count():
    """The products of the five-launch form write the draft's features themselves: no copy per layer that the draft reads."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fastverify.models.dummy import dummy_target

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    model, found = dummy_target("tiny", torch.float32), {}
    for layers in ((), (2, 3, 4), (0, 7, 2, 2)):
        requests = Requests(model, 1, torch.Generator().manual_seed(0))
        batch = requests.batch([[5, 9, 11]], [[0, 1, 2]])
        with Ops() as ops:
            found[layers] = model.forward(replace(batch, exact=True), requests.cache, layers)
        assert ops.names.count("aten::copy_") == {(): 0, (2, 3, 4): 0, (0, 7, 2, 2): 2}[layers]  # before the first layer; the second of two
    assert torch.equal(found[()][0], found[(2, 3, 4)][0])
    first, second = found[(2, 3, 4)][1], found[(0, 7, 2, 2)][1]
    h = model.config.hidden_size
    assert torch.equal(first[:, :h], second[:, 2 * h:3 * h]) and torch.equal(second[:, 2 * h:3 * h], second[:, 3 * h:])
    _, want = model.forward(batch, Requests(model, 1, torch.Generator().manual_seed(0)).cache, (2, 3, 4))
    torch.testing.assert_close(first, want, rtol=1e-3, atol=1e-4)
