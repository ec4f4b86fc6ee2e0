"""The draft and its trees against numbers of the public EAGLE implementation, and every wiring mutation against them."""

import pytest
import torch
from draft_oracle import DATA, GOLDEN, Run, close, draft, golden, target_config  # noqa: F401
from safetensors.torch import load_file

from fastverify.eagle3 import grow
from fastverify.eagle3.checkpoint import load_draft
from fastverify.models.batch import ForwardBatch
from fastverify.models.load import load_target
from fastverify.tree import Prepared, prepare_tree

EAGLE_TREES = [(1, 4, 6), (6, 4, 20), (10, 5, 60), (4, 2, 8)]  # (k, depth, total); depth d means d + 1 levels


def golden_aux(golden: dict, layers: tuple) -> torch.Tensor:
    return torch.cat([golden["target_hidden"][i] for i in layers], dim=1)


def eagle_differences(draft, golden: dict, rng, shape: tuple, aux: torch.Tensor, shift: int = 1) -> set:
    """Both rounds of one golden tree through the driver -> the stages that differ: extend, levels, tree."""
    k, depth, total = shape
    ids, rows = golden["ids"].tolist(), [len(golden["ids"]) - 5, len(golden["ids"]) - 1]
    run, wrong, start = Run(draft, 1, 90, rng), set(), 0
    for number, end in enumerate(rows):
        name = f"{k}_{depth}_{total}.{number}."
        last = run.extend([ids[start + shift:end + shift]], [aux[start:end]])
        if name + "extend_hidden" in golden:
            logits = draft.logits(run.rows[0])
            same = close(run.rows[0], golden[name + "extend_hidden"]) and close(logits, golden[name + "extend_logits"])
        else:
            same = name + "last_hidden" not in golden or close(last[0], golden[name + "last_hidden"])
        if not same:
            wrong.add("extend")
        tree = run.tree(last, [ids[end]], k, depth + 1, total)
        if name + "level_hidden" in golden:
            tokens, positions = (torch.stack([getattr(b, f) for b, _ in run.calls]) for f in ("tokens", "positions"))
            if not (torch.equal(tokens, golden[name + "level_tokens"])
                    and torch.equal(positions, golden[name + "level_positions"])
                    and close(torch.stack([h for _, h in run.calls]), golden[name + "level_hidden"])):
                wrong.add("levels")
        bits = torch.tensor([[int(m) >> j & 1 for j in range(total)] for m in tree.mask[:, 0]], dtype=torch.bool)
        if not (torch.equal(tree.tokens, golden[name + "tokens"]) and torch.equal(tree.parents, golden[name + "parents"])
                and torch.equal(tree.positions, end + golden[name + "positions"]) and torch.equal(bits, golden[name + "mask"])):
            wrong.add("tree")
        start = end
    return wrong


@pytest.mark.parametrize("shape", EAGLE_TREES, ids=str)
def test_eagle_goldens(draft, golden, rng, shape):
    """Draft hidden states, logits and trees are EAGLE's, in the first round and after acceptance."""
    assert draft.config.aux_layers == (2, 4, 5)
    assert eagle_differences(draft, golden, rng, shape, golden_aux(golden, draft.config.aux_layers)) == set()


@pytest.fixture(scope="module")
def trained() -> tuple:
    """(draft, target) of the trained pair: the draft shares the target's embedding."""
    target = load_target(DATA / "golden/target")
    draft = load_draft(DATA / "golden/draft", target)
    assert draft.embed is target.embed_weight
    return draft, target


def prefill(target, tokens: list, aux_layers: tuple) -> torch.Tensor:
    """aux [n, A*Ht] of one text through the target's own cache."""
    n = len(tokens)
    table, zero = torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    cache, cu = target.make_cache(4, 16), torch.tensor([0, n], dtype=torch.int32)
    p = Prepared(positions=torch.zeros(n, dtype=torch.int32), slots=torch.zeros(n, dtype=torch.int64))
    prepare_tree(None, cu, zero, table, 16, p)
    return target.forward(ForwardBatch(torch.tensor(tokens), p.positions, p.slots, cu, zero, table), cache, aux_layers)[1]


@pytest.mark.parametrize("shape", EAGLE_TREES, ids=str)
def test_eagle_goldens_of_the_trained_pair(trained, rng, shape):
    """The same from token ids alone: our target's features, our draft, our tree."""
    draft, target = trained
    golden = load_file(GOLDEN / "trained.safetensors")
    aux = prefill(target, golden["ids"][:-1].tolist(), draft.config.aux_layers)
    assert close(aux, golden["aux"])
    assert eagle_differences(draft, golden, rng, shape, aux) == set()


def test_the_trainers_numbers(trained, rng):
    """Hidden states and logits over true pairs equal those of the network that was trained."""
    draft, _ = trained
    reference = load_file(DATA / "golden/reference.safetensors")
    for row in range(2):
        ids, aux = reference["ids"][row].tolist(), reference["aux"][row]
        run = Run(draft, 1, 40, rng)
        run.extend([ids[1:25]], [aux[:24]])
        assert close(run.rows[0], reference["h2.0"][row, :24])
        assert close(draft.logits(run.rows[0]), reference["draft_logits.0"][row, :24])


# ---- every wiring mutation must be seen ---------------------------------------------------------------------------------


def _swap_halves(d):
    qkv = d.layers[0].qkv
    d.layers[0].qkv = torch.cat([qkv[:, 64:], qkv[:, :64]], dim=1)


def _no_hidden_norm(d):
    d.layers[0].hidden_norm = torch.ones(64)


def _normed_residual(d):
    d.config.norm_before_residual = True


def _no_input_norm(d):
    d.layers[0].input_norm = torch.ones(64)


def _no_final_norm_weight(d):
    d.norm = torch.ones(64)


def _zero_d2t(d):
    d.d2t = torch.zeros(480, dtype=torch.int64)


def _other_theta(d):
    d.cos_sin = type(d.config.rope)(100000.0).cos_sin(16, 2048)


WEIGHT_MUTATIONS = {
    "q/k/v halves swapped": (_swap_halves, {"extend", "levels", "tree"}),
    "hidden_norm missing": (_no_hidden_norm, {"extend", "levels", "tree"}),
    "input_layernorm missing": (_no_input_norm, {"extend", "levels", "tree"}),
    "final norm missing": (_no_final_norm_weight, {"extend", "levels", "tree"}),
    "residual is the normed h": (_normed_residual, {"extend", "levels", "tree"}),
    "rope theta of the target": (_other_theta, {"extend", "levels", "tree"}),
    "d2t zero": (_zero_d2t, {"levels", "tree"}),
}
AUX_MUTATIONS = {"ids + 1": (3, 5, 6), "ids - 1": (1, 3, 4), "last three": (5, 6, 7), "reversed": (5, 4, 2),
                 "one twice": (2, 4, 4)}


@pytest.mark.parametrize("name", WEIGHT_MUTATIONS)
def test_mutated_wiring_is_seen(draft, golden, rng, name):
    change, stages = WEIGHT_MUTATIONS[name]
    change(draft)
    assert eagle_differences(draft, golden, rng, (6, 4, 20), golden_aux(golden, (2, 4, 5))) == stages


@pytest.mark.parametrize("name", AUX_MUTATIONS)
def test_mutated_aux_is_seen(draft, golden, rng, name):
    got = eagle_differences(draft, golden, rng, (6, 4, 20), golden_aux(golden, AUX_MUTATIONS[name]))
    assert got == {"extend", "levels", "tree"}


@pytest.mark.parametrize("shift", [0, -1])
def test_token_and_feature_off_by_one_is_seen(draft, golden, rng, shift):
    ids = golden["ids"].roll(1) if shift < 0 else golden["ids"]
    got = eagle_differences(draft, {**golden, "ids": ids}, rng, (6, 4, 20), golden_aux(golden, (2, 4, 5)), shift=max(shift, 0))
    assert "extend" in got and "levels" in got


def mutate_grow_tree(monkeypatch, draft, change):
    """Lets `change(draft, state, before, hidden, prefix_len, level)` falsify every beam that grow_tree makes."""
    real = grow.grow_tree

    def wrong(values, tokens, hidden, prefix_len, active, state, level):
        before = {f: getattr(state, f).clone() for f in state._fields}
        real(values, tokens, hidden, prefix_len, active, state, level)
        change(draft, state, before, hidden, prefix_len, level)
        return state
    monkeypatch.setattr(grow, "grow_tree", wrong)


def _positions_late(draft, state, before, hidden, prefix_len, level):
    state.next_positions.add_(1)


def _positions_frozen(draft, state, before, hidden, prefix_len, level):
    state.next_positions.copy_(prefix_len.expand_as(state.next_positions))


def _hidden_not_gathered(draft, state, before, hidden, prefix_len, level):
    if level:
        state.next_hidden.copy_(hidden)


def _mask_not_gathered(draft, state, before, hidden, prefix_len, level):
    if level:
        k = state.mask.shape[0]
        state.mask.copy_(before["mask"] | (1 << (level * k + torch.arange(k)))[:, None])


def _siblings_seen(draft, state, before, hidden, prefix_len, level):
    state.mask.copy_(state.mask | (((1 << state.mask.shape[0]) - 1) << (level * state.mask.shape[0])))


def _normed_fed_back(draft, state, before, hidden, prefix_len, level):
    state.next_hidden.copy_(torch.nn.functional.rms_norm(state.next_hidden, (64,), draft.norm, 1e-5))


GROW_MUTATIONS = {"positions + 1": _positions_late, "positions frozen": _positions_frozen,
                  "parent hidden not gathered": _hidden_not_gathered, "mask not gathered": _mask_not_gathered,
                  "siblings see each other": _siblings_seen, "norm(h2) fed back": _normed_fed_back}


@pytest.mark.parametrize("name", GROW_MUTATIONS)
def test_mutated_growth_is_seen(draft, golden, rng, monkeypatch, name):
    mutate_grow_tree(monkeypatch, draft, GROW_MUTATIONS[name])
    got = eagle_differences(draft, golden, rng, (6, 4, 20), golden_aux(golden, (2, 4, 5)))
    assert "levels" in got and "extend" not in got


def test_no_mutation_no_difference(draft, golden, rng, monkeypatch):
    mutate_grow_tree(monkeypatch, draft, lambda *a: None)
    assert eagle_differences(draft, golden, rng, (6, 4, 20), golden_aux(golden, (2, 4, 5))) == set()
