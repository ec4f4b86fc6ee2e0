"""The tables of the multi-GPU benchmark: what docs/communication.md shows is what the stored results say."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
ROOT = next((p for p in HERE.parents if (p / "benchmarks/comm/tables.py").exists()), None)
if ROOT is None:
    pytest.skip("benchmarks/ is not beside these tests", allow_module_level=True)
spec = importlib.util.spec_from_file_location("fastverify_comm_tables", ROOT / "benchmarks/comm/tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def row(op, provider, us, shape, correct=True, note=""):
    return dict(op=op, provider=provider, median_us=us, shape=shape, correct=correct, note=note)


def test_the_documentation_shows_the_newest_results():
    path = tables.newest()
    assert path is not None and tables.MARK.search(tables.DOC.read_text())[2] == tables.page(path)


def test_providers_by_size_and_wrong_results_are_marked():
    rows = [row("all_reduce", "a", 3.14, dict(W=2, rows=1)), row("all_reduce", "a", 140.2, dict(W=2, rows=64), correct=False),
            row("all_reduce", "b", None, dict(W=2, rows=1))]
    assert tables.sums(rows, "all_reduce") == ["| all_reduce | 1 rows | 64 rows |", "|---|---|---|", "| a | 3.1 | 140* |", "| b | - | - |"]


def test_the_best_cut_and_the_honest_fall_back():
    def group(m, cut):
        s = dict(M=m, K=9, over="host")
        return [row("linear_all_reduce", p, us, s) for p, us in (("product alone", 40.0), ("sum alone", 100.0), ("product, sum, add", 145.0),
                                                                 ("4 pieces of columns", cut), ("2 pieces of rows", cut + 1))]
    lines = tables.linears(group(256, 120.0) + group(16, 144.0))
    assert lines[2].endswith("| 4 pieces of columns | 120 | 62 % | cut |") and lines[3].endswith("| 4 pieces of columns | 144 | 2 % | one piece |")
