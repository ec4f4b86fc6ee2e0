"""draft_topk in Triton: one program per row, one launch; values and ids equal the CPU op's bit for bit.

Lane j of a tile keeps the best key of the entries j, j + TILE, ...; the best of all lanes is taken k times, and its lane
looks its next best entry up in its own column.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from .. import _checks as check
from .._triton_numeric import EXACT, MAX, NO_KEY, log_mass, make_key, mass, unordered

_OP = "draft_topk"


@triton.jit
def _load(row, ids, inside):
    """Logits as float32; NaN and infinities count as -inf."""
    x = tl.load(row + ids, inside, other=-float("inf")).to(tl.float32)
    return tl.where((x <= MAX) & (x >= -MAX), x + 0.0, -float("inf"))


@triton.jit(do_not_specialize=["batch", "rows", "k"])
def _topk(
        logits, row_stride, d2t, cu_nodes, batch, rows, n,
        values,  # f32 [R, k] out
        tokens,  # i32 [R, k] out
        k, TILE: tl.constexpr, COLUMN: tl.constexpr):
    r = tl.program_id(0)
    valid = rows
    if cu_nodes is not None:
        valid = tl.minimum(tl.load(cu_nodes + batch), rows)
    if r >= valid:
        for j in range(0, k):
            tl.store(values + r * k + j, 0.0)
            tl.store(tokens + r * k + j, 0)
    else:
        row = logits + r.to(tl.int64) * row_stride
        lane = tl.arange(0, TILE)
        best = tl.full((TILE,), NO_KEY, tl.int64)
        for first in range(0, n, TILE):
            ids = first + lane
            key = make_key(_load(row, ids, ids < n), ids)
            best = tl.maximum(best, tl.where(ids < n, key, NO_KEY))
        top = unordered((tl.max(best, 0) >> 32).to(tl.int32))
        total = tl.zeros((TILE,), tl.int64)
        if top > -float("inf"):
            for first in range(0, n, TILE):
                ids = first + lane
                x = _load(row, ids, ids < n)
                total += tl.where(x > -float("inf"), mass(x, top), 0)
        log_sum = log_mass(tl.sum(total, 0))
        column = tl.arange(0, COLUMN)
        for j in range(0, k):
            key = tl.max(best, 0)
            id = (0xFFFFF - (key & 0xFFFFF)).to(tl.int32)
            x = unordered((key >> 32).to(tl.int32))
            # a row without a finite entry: top and x are -inf, and so is the value
            tl.store(values + r * k + j, tl.where(top > -float("inf"), (x - top) - log_sum, -float("inf")))
            token = id.to(tl.int64)
            if d2t is not None:
                token += tl.load(d2t + id)
            tl.store(tokens + r * k + j, token.to(tl.int32))
            ids = id % TILE + column * TILE
            rest = make_key(_load(row, ids, ids < n), ids)
            rest = tl.max(tl.where((ids < n) & (rest < key), rest, NO_KEY), 0)
            best = tl.where(lane == id % TILE, rest, best)


def check_arguments(logits, d2t, cu_nodes, values, tokens) -> None:
    """The checks of csrc/tree/draft_topk.cpp, in their order."""
    check.tensor(_OP, "logits", logits, check.FLOATS, (None, None), logits, rows_free=True)
    rows, n = logits.shape
    check.that(n <= check.MAX_VOCAB, _OP, f"logits must be at most {check.MAX_VOCAB} entries wide; got "
               f"{check.describe(logits)}. Fix: pass one vocabulary row per node.")
    check.tensor(_OP, "values", values, check.F32, (rows, None), logits)
    k, limit = values.shape[1], min(n, check.MAX_BEAM)
    check.that(1 <= k <= limit, _OP, f"values must be 1..{limit} candidates wide (at most the draft vocabulary and "
               f"{check.MAX_BEAM}); got {check.describe(values)}. Fix: choose k in that range.")
    check.tensor(_OP, "tokens", tokens, check.I32, (rows, k), logits)
    check.optional(_OP, "d2t", d2t, check.I64, (n,), logits)
    check.optional(_OP, "cu_nodes", cu_nodes, check.I32, (None,), logits)
    check.that(cu_nodes is None or cu_nodes.shape[0] >= 1, _OP, f"cu_nodes must be int32 [B+1]; got "
               f"{'' if cu_nodes is None else check.describe(cu_nodes)}. Fix: pass prefix sums that start with 0, or None.")


def draft_topk(logits: torch.Tensor, d2t: Optional[torch.Tensor], cu_nodes: Optional[torch.Tensor], values: torch.Tensor,
               tokens: torch.Tensor) -> None:
    """The schema of csrc/ops.cpp."""
    check_arguments(logits, d2t, cu_nodes, values, tokens)
    (rows, n), k = logits.shape, values.shape[1]
    if rows == 0:
        return
    tile = min(4096, triton.next_power_of_2(n))
    _topk[(rows,)](logits, logits.stride(0), d2t, cu_nodes, 0 if cu_nodes is None else cu_nodes.shape[0] - 1, rows, n, values,
                   tokens, k, TILE=tile, COLUMN=triton.next_power_of_2(triton.cdiv(n, tile)), num_warps=8, **EXACT)
