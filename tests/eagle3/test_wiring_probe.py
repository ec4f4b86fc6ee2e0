"""inspect --probe names what shapes cannot show: every wrong wiring of the golden draft, and nothing for the right one."""

import json

import pytest
import torch
from golden_drafts import GOLDEN, command, config, ids_of, other_ids, tensors, with_map, write  # noqa: F401

from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.wiring_probe import _drafted, probe_wiring, variants
from fastverify.models.load import load_target

TARGET = GOLDEN / "target"
PROMPTS = torch.randint(0, 512, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET)


def swap_halves(t: dict, c: dict) -> None:
    for x in "qkv":
        name = f"midlayer.self_attn.{x}_proj.weight"
        t[name] = t[name].roll(64, 1)


def chunks_reversed(t: dict, c: dict) -> None:
    t["fc.weight"] = torch.cat(t["fc.weight"].split(64, 1)[::-1], 1)


def aux(ids: list, convention: str):
    return lambda t, c: c.__setitem__("eagle_config", {"eagle_aux_hidden_state_layer_ids": ids, "aux_convention": convention})


WRONG = {  # what the file says wrongly -> what the probe must name
    "norm_before_residual": (lambda t, c: c.__setitem__("norm_before_residual", True), "norm_before_residual=False predicts"),
    "norm_output": (lambda t, c: c.__setitem__("norm_output", True), "norm_output=False predicts"),
    "swapped concat": (swap_halves, "q/k/v reading (hidden, embedding) predicts"),
    "aux ids one too low": (aux([1, 3, 4], "input"), "aux layers one layer later: before (2, 4, 5) predicts"),
    "aux ids one too high": (aux([2, 4, 5], "output"), "aux layers one layer earlier: before (2, 4, 5) predicts"),
    "fc in reverse order": (chunks_reversed, "aux layers in reverse order predicts"),
    "theta": (lambda t, c: c.__setitem__("rope_theta", 3.0), "rope_theta=100000 predicts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_wirings_are_named(name, target, tmp_path):
    change, message = WRONG[name]
    t, c = tensors(), config()
    change(t, c)
    facts, found = probe_wiring(target, load_draft(write(tmp_path / "d", t, c), target), PROMPTS)
    wrong = [f.text for f in found if f.topic == "wiring" and f.level == "wrong"]
    assert wrong and any(message in text and " nats a token. " in text for text in wrong), wrong
    best = min(facts["variants"], key=lambda v: facts["variants"][v]["nats"])
    assert best.startswith(message.removesuffix(" predicts"))


def test_the_right_wiring_is_left_alone(target):
    facts, found = probe_wiring(target, load_draft(GOLDEN / "draft", target), PROMPTS)
    assert [(f.level, f.topic) for f in found][-1] == ("ok", "wiring") and not [f for f in found if f.level == "wrong"]
    assert facts["positions"] > 300 and facts["agreement"][0] > 0.35
    assert len(facts["variants"]) == len(variants(load_draft(GOLDEN / "draft", target), 8, 100000.0)) == 7


def test_another_map_is_wired_wrongly(target, tmp_path):
    draft = load_draft(write(tmp_path / "d", with_map(tensors(), other_ids())), target)
    _, found = probe_wiring(target, draft, PROMPTS)
    assert found[0].level == "wrong" and "it is wired wrongly, or is the draft of another model" in found[0].text


def test_depth_2_is_a_second_row_of_the_same_chain(target):
    """Sharing pages changes nothing: each pair's second row equals that of a run of its own."""
    draft, ids = load_draft(GOLDEN / "draft", target), torch.tensor(PROMPTS[0] + PROMPTS[1])
    features = torch.randn(12, 192, generator=torch.Generator().manual_seed(1))
    first, second = _drafted(draft, ids, features, 2)
    for i, k in enumerate(range(2, 9)):
        alone = _drafted(draft, ids[: k + 4], features[: k + 4], k)
        torch.testing.assert_close(first[i], alone[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(second[i], alone[1][0], rtol=1e-4, atol=1e-4)
    assert len(first) == len(second) == 7


def test_command(command, tmp_path):  # noqa: F811
    code, text, _ = command("inspect", GOLDEN / "draft", "--target", TARGET, "--probe")
    assert code == 0 and "note   probe: the draft's first choice is the target's in" in text and "ok     wiring: none of 6 other" in text
    c = config() | {"norm_before_residual": True}
    code, text, _ = command("inspect", write(tmp_path / "d", tensors(), c), "--target", TARGET, "--probe", "--json")
    data = json.loads(text)
    assert code == 1 and [f["topic"] for f in data["findings"] if f["level"] == "wrong"] == ["wiring"]
    assert data["probe"]["variants"]["norm_before_residual=False"]["nats"] < data["probe"]["variants"]["as its config says"]["nats"]
    code, text, _ = command("inspect", write(tmp_path / "e", tensors() | {"d2t": ids_of(tensors())}), "--target", TARGET, "--probe")
    assert code == 1 and "note   probe: not run: the draft does not load" in text
    assert "--probe must go with --target" in command("inspect", GOLDEN / "draft", "--probe")[2]
