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


@pytest.mark.parametrize("shape", ["chain-3", "tree-20", "tree-9-k3-d4"])
def test_tree_of_the_target_itself(script, shape):
    """Against the same tree grown from whole sequences, one forward per node and no mask."""
    from fastverify.eagle3.shapes import parse_shape
    from fastverify.eagle3.train_target import load_target
    teacher, shape, prefix = load_target(str(ROOT / "tests/data/golden/target")), parse_shape(shape), [3, 77, 200, 12, 5]

    def log_p(ids: list) -> torch.Tensor:
        with torch.no_grad():
            hidden, _ = teacher(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            return torch.log_softmax(teacher.logits(hidden[0, -1:])[0] / 0.8, -1)

    beam, pool = [(0.0, [])], []
    for _ in range(shape.levels):
        level = [(s + float(log_p(prefix + path)[t]), [*path, t]) for s, path in beam for t in log_p(prefix + path).topk(shape.k).indices.tolist()]
        pool += level
        beam = sorted(level, reverse=True)[:shape.k]
    want = 1 + sum(torch.tensor(s).exp().item() for s, _ in sorted(pool, reverse=True)[:shape.nodes - 1])
    assert script.tree_tau(teacher, prefix, shape, 0.8) == pytest.approx(want, abs=1e-4)
    assert script.measure_tree(teacher, [(3, [*prefix, 9, 9])], shape, 0.8, 2) == pytest.approx(
        (script.tree_tau(teacher, prefix[:4], shape, 0.8) + script.tree_tau(teacher, [*prefix, 9], shape, 0.8)) / 2)
