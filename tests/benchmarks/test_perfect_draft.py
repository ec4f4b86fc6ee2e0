"""benchmarks/loop/perfect_draft.py: tau of chains that the target itself drafts."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("perfect_draft", ROOT / "benchmarks" / "loop" / "perfect_draft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tau_counts_tokens_in_a_row(script):
    drafted = torch.tensor([True, True, False, True, True, True])
    # depth 3, by hand: starts 0..3 see TTF, TFT, FTT, TTT: 1 + 2, 1 + 1, 1 + 0, 1 + 3
    assert script.tau(drafted, 3) == (3 + 2 + 1 + 4, 4)
    assert script.tau(drafted[:2], 3) == (0, 0)


def test_greedy_text_is_its_own_draft(script):
    class Teacher:  # logits of a cycle: the next id is the last one + 1
        def __call__(self, row, pos, mask):
            return torch.nn.functional.one_hot((row + 1) % 8, 8).float(), None

        def logits(self, hidden):
            return 9 * hidden

    cycle = [(2, [0, 1, 2, 3, 4, 5, 6, 7, 0])]
    row = script.measure(Teacher(), cycle, 0.8)
    assert row["k1 d3"] == 4 and row["k1 d5"] == 6
    broken = script.measure(Teacher(), [(2, [0, 1, 2, 3, 4, 6, 7, 0, 1])], 0.8)  # 6 was not the argmax
    assert broken["k1 d3"] < 4 and 1 / 8 < broken["largest"] < 1
