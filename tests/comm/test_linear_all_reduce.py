"""How a row-parallel linear is cut (pure); its values over gloo are in test_gloo.py, over GPUs in test_nccl.py."""

from types import SimpleNamespace

import pytest
import torch

from fastverify.comm.linear_all_reduce import ONE_PIECE, column_widths, cut, overlaps, product, product_groups, split_for


@pytest.mark.parametrize("rows, n, expected", [
    (1, 7168, ONE_PIECE), (255, 7168, ONE_PIECE), (256, 7168, ("columns", 4)), (4096, 7168, ("columns", 4)),
    (512, 100, ("rows", 4)), (256, 100, ("rows", 2)), (256, 7168 + 1, ("rows", 2))])
def test_the_rule_without_a_measurement(rows, n, expected):
    assert split_for(rows, n, [], 256) == expected


@pytest.mark.parametrize("rows, expected", [(1, ONE_PIECE), (63, ONE_PIECE), (64, ONE_PIECE), (128, ("columns", 2)),
                                            (1000, ("columns", 2)), (1024, ("rows", 4)), (5000, ("rows", 4))])
def test_what_was_measured_decides(rows, expected):
    measured = [(64, "rows", 1), (128, "columns", 2), (1024, "rows", 4)]
    assert split_for(rows, 7168, measured, 8) == expected


def comm(largest: int, **kw) -> SimpleNamespace:
    return SimpleNamespace(splits={}, overlap_rows=256, largest_bytes=largest, **kw)


def test_pieces_fit_what_a_sum_may_hold():
    weight = torch.zeros(64, 8)  # 256 bytes a row of output
    assert cut(100, weight, comm(100 * 256)) == ONE_PIECE
    assert cut(101, weight, comm(100 * 256)) == ("rows", 2)
    assert cut(1000, weight, comm(100 * 256)) == ("rows", 10), "four pieces of columns would be too large"
    assert cut(400, weight, comm(100 * 256)) == ("columns", 4)
    assert cut(10, weight, comm(1)) == ("rows", 10), "never less than a row"


def test_one_kernel_for_all_pieces_where_the_transport_and_the_memory_allow():
    weight = torch.zeros(64, 8)
    for transport, most, expected in (("peer", 1 << 20, ("resident", 4)), ("host", 1 << 20, ("resident", 4)), ("nccl", 1 << 20, ONE_PIECE),
                                      ("host", 9 * 256, ONE_PIECE)):
        assert cut(10, weight, comm(1 << 62, transport=transport, max_bytes=most), ("resident", 4)) == expected


def test_layers_ask_for_the_overlap_only_where_a_cut_pays():
    weight = torch.zeros(64, 8)
    assert [overlaps(r, weight, comm(1 << 62)) for r in (1, 255, 256, 4096)] == [False, False, True, True]


@pytest.mark.parametrize("n, kind, pieces, widths", [
    (7168, "columns", 4, [1792] * 4), (7168, "growing", 3, [1024, 2048, 4096]), (8192, "growing", 3, [1152, 2304, 4736]),
    (7168, "growing", 4, [512, 896, 1920, 3840]), (1000, "growing", 2, [256, 744])])
def test_widths_of_pieces(n, kind, pieces, widths):
    assert column_widths(n, kind, pieces) == widths and sum(widths) == n


@pytest.mark.parametrize("split", [("columns", 3), ("diagonals", 2), ("rows", 0), ("growing", 2), ("growing", 7),
                                   ("resident", 3), ("resident", 32), ("resident", 0)])
def test_splits_that_do_not_fit(split):
    with pytest.raises(ValueError, match="split must be .* Fix: "):
        cut(16, torch.zeros(64, 8), comm(1 << 62), split)


@pytest.mark.parametrize("pieces, groups", [(1, [1]), (2, [1, 1]), (4, [1, 1, 2]), (7, [1, 1, 2, 3]), (8, [1, 1, 2, 4]), (16, [1, 1, 2, 4, 8])])
def test_products_of_a_resident_sum_grow(pieces, groups):
    assert product_groups(pieces) == groups


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_of_several_pieces(rng, pieces, with_bias):
    x, w = torch.randn(5, 16, generator=rng), torch.randn(pieces * 8, 16, generator=rng)
    bias, out = torch.randn(pieces * 8, generator=rng) if with_bias else None, torch.empty(pieces, 5, 8)
    product(x, w, bias, out)
    want = torch.nn.functional.linear(x, w, bias)
    assert torch.allclose(out.transpose(0, 1).flatten(1), want, atol=1e-5)
