"""The arithmetic of overlapping intervals in benchmarks/comm/overlap.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "comm"))
overlap = pytest.importorskip("overlap")


def test_union_and_common():
    a = overlap.union([[5, 6], [0, 2], [1, 3], [6, 7]])
    assert a == [[0, 3], [5, 7]] and overlap.length(a) == 5
    assert overlap.common(a, [[2, 6]]) == 2 and overlap.common(a, []) == 0 and overlap.common(a, a) == 5


def test_share_of_the_shorter_kind():
    events = [("nvjet_gemm", 0, 10), ("all_reduce_kernel<bf16>", 8, 28), ("nvjet_gemm", 10, 20), ("copy", 0, 100)]
    assert overlap.overlap(events) == dict(sum_us=20, product_us=20, both_us=12, share=0.6)
    assert overlap.overlap(events[:1])["share"] == 0.0, "nothing to overlap with"
