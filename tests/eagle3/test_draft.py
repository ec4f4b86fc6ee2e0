"""The draft network and the tree driver as tensors, against a naive recomputation without cache or mask."""

import json

import pytest
import torch
from draft_oracle import GOLDEN, NaiveDraft, Run, close, draft, golden, target_config  # noqa: F401
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.grow import GrowBuffers, draft_tree, extend
from fastverify.models.batch import ForwardBatch


@pytest.fixture(scope="module")
def naive(golden) -> NaiveDraft:
    return NaiveDraft.load(GOLDEN / "draft", golden["embed"])


def pairs(rng, count: int, vocab: int = 512, width: int = 192) -> tuple:
    return torch.randint(0, vocab, (count,), generator=rng).tolist(), torch.randn(count, width, generator=rng)


def check_extend(draft, naive, rng, vocab: int = 512, width: int = 192):
    """Ragged batch with an inactive request, in two chunks: outputs, logits, last rows, K and V of every layer."""
    active, counts = [1, 0, 1, 1], [7, 3, 1, 12]
    texts = [pairs(rng, n, vocab, width) for n in counts]
    run = Run(draft, 4, 16, rng, active=active)
    cut = [5, 0, 1, 4]
    run.extend([t[:c] for (t, _), c in zip(texts, cut)], [a[:c] for (_, a), c in zip(texts, cut)])
    first = run.rows
    last = run.extend([t[c:] for (t, _), c in zip(texts, cut)], [a[c:] for (_, a), c in zip(texts, cut)])
    assert run.prefix.tolist() == [7, 0, 1, 12]
    for b in (0, 2, 3):
        tokens, aux = texts[b]
        want = naive.chain(aux, tokens)
        assert close(torch.cat([first[b], run.rows[b]]), want)
        assert close(draft.logits(torch.cat([first[b], run.rows[b]])), naive.logits(want))
        for layer in range(naive.layers):
            k, v = run.kv(b, counts[b], layer)
            assert close(k, torch.stack(naive.keys[layer])) and close(v, torch.stack(naive.values[layer]))
    assert close(last[0], naive.chain(texts[0][1], texts[0][0])[-1]) and close(last[2], naive.chain(texts[3][1], texts[3][0])[-1])


def test_extend(draft, naive, rng):
    check_extend(draft, naive, rng)


def check_levels(draft, naive, run, texts: list, k: int, levels: int, num_nodes: int) -> bool:
    """Grows a tree for every active request; each forward row is the end of its own root path, run alone by the oracle.

    Also: candidates are the best k of every row, pool scores their path's log-probability, every beam the best k of its level,
    and the verify tree the best of the pool. -> whether some beam node's parent sat in another row (a swap)."""
    last = run.extend([t for t, _ in texts], [a for _, a in texts])
    roots = [t[-1] for t, _ in texts]
    tree = run.tree(last, roots, k, levels, num_nodes)
    state, swapped = run.buffers.state, False
    assert len(run.calls) == levels - 1
    for rank, b in enumerate(i for i, a in enumerate(run.active.tolist()) if a):
        tokens, aux = texts[b]
        scores, ids, parents = (x[b].tolist() for x in (state.pool_scores, state.pool_tokens, state.pool_parents))
        paths = []
        for token, parent in zip(ids, parents):
            paths.append((paths[parent] if parent >= 0 else []) + [token])
        beam, start, rows = [-1], 0, slice(rank * k, rank * k + k)
        for level in range(levels):
            if level:
                batch, h2 = run.calls[level - 1]
                assert batch.tokens[rows].tolist() == [ids[i] for i in beam]
                assert batch.positions[rows].tolist() == [len(tokens) + level - 1] * k
            for i, node in enumerate(beam):
                want = naive.chain(aux, tokens + (paths[node] if level else []))[-1]
                assert close(h2[rows][i] if level else last[rank], want), f"request {b}, level {level}, beam node {i}"
                candidates = range(start + i * k, start + i * k + k)
                assert [parents[c] for c in candidates] == [node] * k
                law = naive.log_probs(want)
                assert len({ids[c] for c in candidates}) == k and close(law[[ids[c] for c in candidates]], law.topk(k).values)
                base = scores[node] if level else 0.0
                assert close(torch.tensor([scores[c] for c in candidates]), base + law.topk(k).values)
            here = range(start, start + len(beam) * k)
            start = here.stop
            previous, beam = beam, sorted(here, key=lambda c: -scores[c])[:k]
            swapped |= level > 0 and [previous.index(parents[c]) for c in beam] != list(range(k))
        assert start == len(scores)
        check_tree(tree, b, roots[b], len(tokens), scores, ids, parents, num_nodes)
    assert not tree.flags.any()
    return swapped


def check_tree(tree, b, root, prefix, scores, ids, parents, num_nodes):
    """Rows of request b: the root, then the best num_nodes - 1 pool entries in pool order."""
    chosen = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[: num_nodes - 1])
    rows = slice(int(tree.cu_nodes[b]), int(tree.cu_nodes[b + 1]))
    assert tree.tokens[rows].tolist() == [root] + [ids[i] for i in chosen]
    want, depth = [-1], [0]
    for i in chosen:
        want.append(0 if parents[i] < 0 else 1 + chosen.index(parents[i]))
        depth.append(1 + depth[want[-1]])
    assert tree.parents[rows].tolist() == want and tree.depth[rows].tolist() == depth
    assert tree.positions[rows].tolist() == [prefix + d for d in depth]


@pytest.mark.parametrize("k, levels, num_nodes", [(1, 4, 5), (3, 4, 14), (4, 3, 37), (5, 2, 8), (2, 1, 3), (10, 8, 60)])
def test_levels_against_every_path_as_its_own_chain(draft, naive, rng, k, levels, num_nodes):
    """Ragged batch with an inactive request; (10, 8, 60) is EAGLE's default and fills two mask words."""
    run = Run(draft, 3, 9 + k * levels, rng, active=[1, 0, 1])
    swapped = check_levels(draft, naive, run, [pairs(rng, n) for n in (9, 4, 6)], k, levels, num_nodes)
    assert swapped or k == 1 or levels < 3, "these inputs swap no beam: the case would not see a wrong parent"


def test_accepted_pairs_replace_drafted_kv(draft, rng):
    """After a tree, the extend over a+1 true pairs leaves the draft cache as if nothing had been drafted."""
    tokens, aux = pairs(rng, 12)
    run = Run(draft, 1, 40, rng)
    last = run.extend([tokens[:8]], [aux[:8]])
    run.tree(last, [tokens[7]], 4, 4, 20)
    last = run.extend([tokens[8:]], [aux[8:]])
    fresh = Run(draft, 1, 40, rng, page_size=7)
    want = fresh.extend([tokens], [aux])
    assert close(last, want, 1e-5)
    for a, b in zip(run.kv(0, 12), fresh.kv(0, 12)):
        assert close(a, b, 1e-5)


def test_not_rewriting_the_accepted_pairs_is_seen(draft, golden, rng):
    """Keeping drafted K/V of the accepted tokens (instead of one extend over true pairs) changes the next round's logits."""
    tokens, aux = pairs(rng, 9)
    run = Run(draft, 1, 40, rng)
    last = run.extend([tokens[:6]], [aux[:6]])
    tree = run.tree(last, [tokens[5]], 1, 4, 5)
    drafted = tree.tokens[1:4].tolist()
    run.prefix = run.prefix + 3
    stale = run.extend([tokens[:1]], [aux[8:]])
    fresh = Run(draft, 1, 40, rng)
    want = fresh.extend([tokens[:6] + drafted + tokens[:1]], [aux[[0, 1, 2, 3, 4, 5, 6, 7, 8, 8]]])
    assert not close(stale, want, 1e-3)


def test_batch_and_order_do_not_matter(draft, rng):
    """A request's tree is the same alone, in a batch, and with an inactive neighbour."""
    texts = [pairs(rng, n) for n in (5, 8, 3)]
    def trees(active: list, order: list) -> dict:
        run = Run(draft, len(order), 40, rng, active=active)
        last = run.extend([texts[i][0] for i in order], [texts[i][1] for i in order])
        t = run.tree(last, [texts[i][0][-1] for i in order], 4, 4, 12)
        cu = t.cu_nodes.tolist()
        return {i: [x[cu[n]:cu[n + 1]].tolist() for x in (t.tokens, t.parents, t.positions, t.mask)]
                for n, i in enumerate(order) if active[n]}
    together = trees([1, 1, 1], [0, 1, 2])
    assert trees([1, 0, 1], [2, 1, 0]) == {i: together[i] for i in (2, 0)}
    assert all(trees([1], [i])[i] == together[i] for i in range(3))


def variant(tmp_path, golden, config: dict, change=lambda w: None, target: dict = None) -> tuple:
    """(draft, oracle) of the random draft with another config and changed tensors."""
    w = load_file(GOLDEN / "draft/model.safetensors")
    w = {k: v.float() if v.is_floating_point() else v for k, v in w.items()}
    change(w)
    c = {**json.loads((GOLDEN / "draft/config.json").read_text()), **config}
    (tmp_path / "config.json").write_text(json.dumps(c))
    save_file(w, tmp_path / "model.safetensors")
    draft = load_draft(tmp_path, target or target_config())
    if draft.embed is None:
        draft.embed = golden["embed"].float()
    return draft, NaiveDraft(w, c, golden["embed"])


def _norms(*names):
    def change(w):
        g = torch.Generator().manual_seed(3)
        for name, size in names:
            w[name + ".weight"] = 0.5 + torch.rand(size, generator=g)
    return change


def _biases(w):
    g = torch.Generator().manual_seed(4)
    for name in "qkvo":
        rows = w[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        w[f"midlayer.self_attn.{name}_proj.bias"] = torch.randn(rows, generator=g)


def _second_layer(w):
    g = torch.Generator().manual_seed(5)
    for name in list(w):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            x = w[name]
            x = x[:, 64:] if x.dim() == 2 and x.shape[1] == 128 else x
            w[name.replace("midlayer.", "layers.1.")] = (x * (0.8 + 0.4 * torch.rand(x.shape, generator=g))).contiguous()


VARIANTS = {
    "norm_before_residual": ({"norm_before_residual": True}, lambda w: None),
    "norm_output": ({"norm_output": True}, lambda w: None),
    "fc_norm and norm_output": ({"fc_norm": True, "norm_output": True}, _norms(*((f"fc_norm.{i}", 64) for i in range(3)))),
    "norm_before_fc": ({"eagle_config": {"norm_before_fc": True}}, _norms(("input_norm", 192))),
    "q/k norm": ({}, _norms(("midlayer.self_attn.q_norm", 16), ("midlayer.self_attn.k_norm", 16))),
    "biases": ({"attention_bias": True}, _biases),
    "two layers": ({"num_hidden_layers": 40}, _second_layer),
    "theta": ({"rope_theta": 500.0}, lambda w: None),
    "gelu": ({"hidden_act": "gelu"}, lambda w: None),
    "gelu_pytorch_tanh": ({"hidden_act": "gelu_pytorch_tanh"}, lambda w: None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, golden, rng, name):
    """Every wiring flag against the oracle, extend and tree; and it differs from the plain wiring."""
    draft, naive = variant(tmp_path, golden, *VARIANTS[name])
    check_extend(draft, naive, rng)
    tokens, aux = pairs(rng, 6)
    check_levels(draft, naive, Run(draft, 1, 40, rng), [(tokens, aux)], 3, 3, 10)
    plain, longer = NaiveDraft.load(GOLDEN / "draft", golden["embed"]), tokens + tokens[:1]
    assert not close(plain.logits(plain.chain(aux, longer)), naive.logits(naive.chain(aux, longer)), 1e-2)


def test_own_embedding_of_another_width(tmp_path, golden, rng):
    """Draft H 64 on a target of width 80: fc reads 3*80, the embedding is the draft's own."""
    def change(w):
        g = torch.Generator().manual_seed(6)
        w["fc.weight"] = torch.randn(64, 240, generator=g) * 0.08
        w["embed_tokens.weight"] = torch.randn(512, 64, generator=g)
    draft, naive = variant(tmp_path, golden, {"target_hidden_size": 80}, change, target_config(hidden_size=80))
    check_extend(draft, naive, rng, width=240)


def test_bf16_follows_fp32(golden, rng):
    """In bf16 the draft stays within bf16 rounding of the oracle: dtypes of fuse, forward, logits and cache are its own."""
    draft = load_draft(GOLDEN / "draft", target_config(), dtype=torch.bfloat16)
    draft.embed = golden["embed"].float()
    naive = NaiveDraft.load(GOLDEN / "draft", golden["embed"])
    tokens, aux = pairs(rng, 8)
    run = Run(draft, 1, 40, rng)
    last = run.extend([tokens], [aux])
    assert last.dtype == draft.logits(last).dtype == run.cache.k.dtype == torch.bfloat16
    got, want = draft.logits(run.rows[0]).double(), naive.logits(naive.chain(aux, tokens))
    assert float((got - want).abs().mean()) < 0.05 * float(want.std())


def test_no_value_is_read_on_the_host(draft):
    """Extend, growth and tree run on tensors without data; reading a value of one raises (the last lines show it)."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        def i32(*shape):
            return torch.zeros(shape, dtype=torch.int32)
        cache, buffers = draft.make_cache(10, 4), GrowBuffers.empty(draft, 2, 3, 3, 8)
        batch = ForwardBatch(i32(7), i32(7), torch.zeros(7, dtype=torch.int64), i32(3), i32(2), i32(2, 4))
        last = extend(draft, cache, batch, torch.zeros(7, 192), i32(2))
        tree = draft_tree(draft, cache, last, i32(2), i32(2), i32(2), i32(2, 4), buffers, 3, 8, 512)
        assert tree.tokens.shape == (16,) and tree.mask.shape == (16, 1)
        with pytest.raises(DataDependentOutputException):
            tree.tokens[0].item()


def test_forward_without_an_embedding(rng):
    draft = load_draft(GOLDEN / "draft", target_config())
    with pytest.raises(ValueError, match="the draft must have an embedding; got none .* Fix: load it for the target model"):
        Run(draft, 1, 8, rng).extend([[1, 2]], [torch.zeros(2, 192)])


def test_hidden_rows_are_left_alone(draft, rng):
    """forward does not write its input, so that the beam's gathered rows can be read twice."""
    tokens, aux = pairs(rng, 4)
    run = Run(draft, 1, 8, rng)
    run.extend([tokens], [aux])
    batch, _ = run.calls[0]
    hidden = torch.randn(6, 64, generator=rng)
    copy = hidden.clone()
    draft.forward(batch, hidden, run.cache)
    assert torch.equal(hidden, copy)
