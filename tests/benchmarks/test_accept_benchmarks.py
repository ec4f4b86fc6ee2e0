"""benchmarks/accept: the planted trees are accepted as planted, the peers' pipelines draw from the same law, every script runs here."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastverify as fv
from fastverify import _ops

HERE = Path(__file__).resolve()
FOLDER = next((p / "benchmarks/accept" for p in HERE.parents if (p / "benchmarks/accept/trees.py").exists()), None)
if FOLDER is None:
    pytest.skip("benchmarks/ is not beside these tests", allow_module_level=True)


@pytest.fixture
def modules(monkeypatch):
    """trees and peers, imported the way the scripts import them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers
    import trees
    yield trees, peers
    for name in ("trees", "peers"):
        sys.modules.pop(name)


def grove(trees, law: str, batch: int = 3, nodes: int = 12, vocab: int = 300, count: int = 2):
    rng = torch.Generator().manual_seed(1)
    sets = [(torch.randn(batch * nodes, vocab, generator=rng) * 2).bfloat16() for _ in range(count)]
    return trees.Grove(_ops.get("verify_tree"), sets, batch, nodes, law, lambda: None)


@pytest.mark.parametrize("law", ["greedy", "temperature", "top-k+top-p"])
def test_planted_trees_are_accepted_as_planted(modules, law):
    trees, _ = modules
    g = grove(trees, law)
    for accepted in (0, 3, 7):
        for b in g.plant(accepted):
            _ops.get("verify_tree")(*b.arguments(None))
            assert (b.out.num_tokens_out == accepted + 1).all()
            assert b.out.path.tolist() == [[*range(accepted + 1)] + [-1] * (7 - accepted)] * 3
            assert trees.matches_cpu(b)
            b.out.out_tokens[0, 0] += 1
            assert not trees.matches_cpu(b)


def test_tree_shapes(modules):
    trees, _ = modules
    for nodes in (1, 2, 3, 8, 16, 64):
        parents = trees.tree_parents(nodes)
        assert parents[0] == -1 and all(0 <= p < i for i, p in enumerate(parents[1:], 1)) and len(parents) == nodes
        first, sibling = trees.links(parents)
        for node in range(nodes):
            kids, at = [], first[node]
            while at >= 0:
                kids.append(at)
                at = sibling[at]
            assert kids == [i for i in range(1, nodes) if parents[i] == node]


def test_torch_pipeline_walks_the_same_greedy_path(modules):
    trees, peers = modules
    for accepted in (0, 2, 7):
        for b in grove(trees, "greedy").plant(accepted):
            plain = peers.TorchPipeline(b, "greedy")
            plain()
            _ops.get("verify_tree")(*b.arguments(None))
            assert torch.equal(plain.emitted(), b.out.out_tokens)


@pytest.mark.parametrize("law", ["temperature", "top-k+top-p"])
def test_torch_pipeline_has_the_law_of_verify_tree(modules, law):
    """First token of 8,000 equal rows: total variation between the two empirical laws is what two samples of one law have."""
    trees, peers = modules
    n, row = 8000, (torch.randn(1, 60, generator=torch.Generator().manual_seed(2)) * 2).bfloat16()
    g = trees.Grove(_ops.get("verify_tree"), [row.expand(n * 2, 60).contiguous()], n, 2, law, lambda: None)
    (b,) = g.plant(0)
    torch.manual_seed(0)
    plain = peers.TorchPipeline(b, law)
    plain()
    _ops.get("verify_tree")(*b.arguments(None))
    a, c = (torch.bincount(x[:, 0], minlength=60) / n for x in (plain.emitted(), b.out.out_tokens))
    assert 0.5 * float((a - c).abs().sum()) < 0.06
    if law != "temperature":
        assert 1 < int((c > 0).sum()) < 50 and float(a[c == 0].sum()) < 0.002 and float(c[a == 0].sum()) < 0.002, "the same nucleus"


@pytest.mark.parametrize("law", ["greedy", "temperature"])
def test_sglang_pipeline_accepts_what_was_planted(modules, law):
    """With our drop-in in its place the pipeline runs without sglang-kernel."""
    trees, peers = modules
    for accepted in (0, 3, 7):
        for b in grove(trees, law).plant(accepted):
            run = peers.SglangPipeline(b, law, None, ours=True)
            run()
            assert (run.accepted() == accepted).all()


def test_saved_logits_come_back(modules, tmp_path):
    trees, _ = modules
    rows = torch.randn(5, 40).bfloat16()
    path = tmp_path / "x.xz"
    path.write_bytes(lzma.compress(rows.view(torch.uint8).view(-1, 2).T.contiguous().numpy().tobytes()))
    assert torch.equal(trees.real_rows(path, 40), rows)


@pytest.mark.parametrize("script,extra", [("bench_verify_tree.py", ["--shape", "2,6,200", "--law", "greedy,top-k+top-p"]),
                                          ("bench_lm_head_verify_tree.py", ["--head", "32,200", "--law", "temperature"]),
                                          ("bench_sglang.py", [])])
def test_every_script_runs_and_all_results_are_right(script, extra, tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(FOLDER / script), "--device", "cpu", "--repeats", "2", "--out", str(tmp_path), *extra]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    measured = [r for r in rows if r["median_us"] is not None]
    assert len(measured) >= 6 and all(r["correct"] in (True, None) for r in measured)
    assert {r["note"] for r in rows if r["median_us"] is None} <= {"not installed"}


def test_save_logits_of_a_tiny_model(modules):
    """The recorder keeps rows of decode steps and puts the target's method back."""
    import save_logits
    target = fv.load_target(HERE.parents[1] / "data/golden/target")

    class Tokenizer:
        def apply_chat_template(self, messages):
            return [1, 2, 3 + len(messages[0]["content"]) % 5]

    rows = save_logits.rows_of_answers(target, Tokenizer(), ["one", "other"], 2)
    assert rows.shape == (4, target.config.vocab_size) and rows.dtype == torch.bfloat16
    assert "logits" not in vars(target)
