"""Random weights by config, the acceptance imposed on them, and what every output of them says."""

import json

import pytest
import torch

from fastverify.cli.main import main
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape
from fastverify.models.config import LoadError
from fastverify.models.dummy import CONFIGS, ImposedAcceptance, dummy_config, dummy_draft, dummy_target, label

IDS = ["--token-ids", "3,4,5", "--device", "cpu", "--max-new-tokens", "24"]


def test_names_and_labels():
    assert {"llama-3-8b", "qwen3-32b-tp8-shard", "smollm2-135m"} <= set(CONFIGS)
    assert label("tiny", 0.5) == "tiny: random weights, imposed acceptance 0.5" and label("tiny") == "tiny: random weights"
    with pytest.raises(LoadError, match="the name must be one of llama-3-8b"):
        dummy_config("llama")


def test_weights_are_a_model_of_these_shapes():
    c = dummy_config("llama-3-8b")
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.vocab_size) == (32, 4096, 32, 8, 128256)
    target = dummy_target("tiny", torch.float32, num_layers=3)
    assert len(target.layers) == 3 and target.layers[0].gate_up.shape == (192, 64)
    assert torch.equal(target.layers[2].o, dummy_target("tiny", torch.float32).layers[2].o), "a seed gives the same weights"


@pytest.mark.parametrize("rate,shape", [(0.0, "chain-3"), (1.0, "chain-3"), (0.7, "chain-3"), (0.5, "chain-2")])
def test_imposed_acceptance_is_the_rate_of_first_children(rate, shape):
    target = dummy_target("tiny", torch.float32)
    torch.manual_seed(1)
    loop = GraphLoop(target, dummy_draft(target), shapes=(parse_shape(shape),), max_length=1024, stop_ids=[], hook=ImposedAcceptance(rate))
    loop.submit([1, 2, 3], 600)
    for _ in loop.run():
        pass
    levels = loop.shapes[0].levels
    want = 1 + sum(rate**d for d in range(1, levels + 1))
    free = 0.25 if rate < 1 else 0.0  # what random weights agree on by themselves comes on top
    assert want - 0.2 <= loop.stats.tau <= want + 0.2 + free


def test_the_command_says_so(capsys):
    assert main(["generate", "--dummy", "tiny", "--tree", "chain-3", "--acceptance", "1", *IDS]) == 0
    said = capsys.readouterr()
    assert "tiny: random weights, imposed acceptance 1: times only, the text means nothing" in said.err and len(said.out.split()) == 24
    assert "tau 3." in said.err or "tau 4" in said.err
    assert main(["generate", "--dummy", "tiny", "--tree", "off", "--json", *IDS]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "tiny: random weights"


@pytest.mark.parametrize("args,why", [
    (["--dummy", "tiny", "--target", "x", *IDS], "--dummy must go without a model"),
    (["--dummy", "tiny", "--draft", "x", *IDS], "--dummy must go without a model"),
    (["--dummy", "other", *IDS], "the name must be one of"),
    (["--dummy", "tiny", "--device", "cpu", "hello"], "--dummy must have token ids"),
    (["--acceptance", "0.5", *IDS], "go with --dummy"),
    (["--dummy", "tiny", "--acceptance", "2", *IDS], "acceptance must be in")])
def test_what_cannot_be_meant(capsys, args, why):
    assert main(["generate", *args]) == 2
    assert why in capsys.readouterr().err
