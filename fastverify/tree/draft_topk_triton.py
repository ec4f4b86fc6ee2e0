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
from ..accept.verify_row_triton import noise_of_ids, seed_words

_OP = "draft_topk"


@triton.jit
def _load(row, ids, inside):
    """Logits as float32; NaN and infinities count as -inf."""
    x = tl.load(row + ids, inside, other=-float("inf")).to(tl.float32)
    return tl.where((x <= MAX) & (x >= -MAX), x + 0.0, -float("inf"))


@triton.jit
def _active_request(active, batch, rank):
    """The rank-th request that is active; -1 if there are fewer."""
    found = -1
    for b in range(0, batch):
        on = tl.load(active + b) != 0
        found = tl.where(on & (rank == 0) & (found < 0), b, found)
        rank -= on.to(tl.int32)
    return found


@triton.jit
def _scores(row, ids, inside, d2t, temperature, position, seed_lo, seed_hi, COUPLED: tl.constexpr):
    """What entries are ranked by: logits, or coupled scores (csrc/algo/coupling.h)."""
    x = _load(row, ids, inside)
    if COUPLED:
        if temperature > 0.0:
            token = ids
            if d2t is not None:
                token += tl.load(d2t + ids, inside, other=0).to(tl.int32)
            q = tl.div_rn(x, tl.zeros_like(x) + temperature)
            q = tl.where(q > MAX, MAX, tl.where(q < -MAX, -MAX, q)) + 0.0
            z = tl.where(x < -MAX, -float("inf"), q)
            x = z + noise_of_ids(token, position, seed_lo, seed_hi) + 0.0
    return x


@triton.jit(do_not_specialize=["last", "rows", "k", "batch", "each", "level", "sharpness"])
def _topk(
        logits, row_stride, d2t, cu_nodes, last, rows, n,
        temperatures, seeds, prefix_len, active, batch, each, level, sharpness,  # coupled: [batch], `each` rows per request
        values,  # f32 [R, k] out
        tokens,  # i32 [R, k] out
        k, TILE: tl.constexpr, COLUMN: tl.constexpr, COUPLED: tl.constexpr):
    r = tl.program_id(0)
    valid = rows
    if cu_nodes is not None:
        valid = tl.minimum(tl.load(cu_nodes + last), rows)
    temperature = 0.0
    position = 0
    seed_lo = tl.zeros((), tl.uint32)
    seed_hi = tl.zeros((), tl.uint32)
    if COUPLED:
        b = _active_request(active, batch, r // each)
        valid = tl.where(b < 0, 0, valid)
        b = tl.maximum(b, 0)
        asked = tl.load(temperatures + b)
        temperature = tl.where((asked > 0.0) & (asked <= MAX), asked, 0.0)
        position = tl.load(prefix_len + b) + level + 1
        seed_lo, seed_hi = seed_words(b, seeds)
        sharpness = tl.where(temperature > 0.0, sharpness, 1.0)
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
            x = _scores(row, ids, ids < n, d2t, temperature, position, seed_lo, seed_hi, COUPLED)
            key = make_key(x, ids)
            best = tl.maximum(best, tl.where(ids < n, key, NO_KEY))
        top = unordered((tl.max(best, 0) >> 32).to(tl.int32))
        total = tl.zeros((TILE,), tl.int64)
        if top > -float("inf"):
            for first in range(0, n, TILE):
                ids = first + lane
                x = _scores(row, ids, ids < n, d2t, temperature, position, seed_lo, seed_hi, COUPLED)
                if COUPLED:
                    x = (x - top) * sharpness
                    total += tl.where(x > -float("inf"), mass(x, 0.0), 0)
                else:
                    total += tl.where(x > -float("inf"), mass(x, top), 0)
        log_sum = log_mass(tl.sum(total, 0))
        column = tl.arange(0, COLUMN)
        for j in range(0, k):
            key = tl.max(best, 0)
            id = (0xFFFFF - (key & 0xFFFFF)).to(tl.int32)
            x = unordered((key >> 32).to(tl.int32))
            gap = x - top
            if COUPLED:
                gap = gap * sharpness
            # a row without a finite entry: top and x are -inf, and so is the value
            tl.store(values + r * k + j, tl.where(top > -float("inf"), gap - log_sum, -float("inf")))
            token = id.to(tl.int64)
            if d2t is not None:
                token += tl.load(d2t + id)
            tl.store(tokens + r * k + j, token.to(tl.int32))
            ids = id % TILE + column * TILE
            x = _scores(row, ids, ids < n, d2t, temperature, position, seed_lo, seed_hi, COUPLED)
            rest = make_key(x, ids)
            rest = tl.max(tl.where((ids < n) & (rest < key), rest, NO_KEY), 0)
            best = tl.where(lane == id % TILE, rest, best)


def check_arguments(logits, d2t, cu_nodes, temperature, seed, prefix_len, active, values, tokens, level=0, sharpness=1.0) -> None:
    """The checks of csrc/tree/tree_args.h, in their order."""
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
    others = [t is not None for t in (seed, prefix_len, active)]
    if temperature is None:
        check.that(not any(others), _OP, "seed, prefix_len and active must be given with temperature, or not at all; got no "
                   "temperature. Fix: pass all four for coupled rows, none otherwise.")
        return
    check.that(all(others), _OP, "temperature must come with seed, prefix_len and active; got it without. "
               "Fix: pass all four for coupled rows, none otherwise.")
    check.tensor(_OP, "temperature", temperature, check.F32, (None,), logits)
    batch = temperature.shape[0]
    check.tensor(_OP, "seed", seed, check.I64, (batch,), logits)
    check.tensor(_OP, "prefix_len", prefix_len, check.I32, (batch,), logits)
    check.tensor(_OP, "active", active, check.I32, (batch,), logits)
    check.that(rows % batch == 0 if batch else rows == 0, _OP, f"logits must be a multiple of the batch of {batch} rows; got "
               f"{rows}. Fix: pass one row per request at level 0 and k rows later.")
    check.that(0 <= level < 1024, _OP, f"level must be in 0..1023; got {level}. Fix: count draft levels from 0.")
    check.that(0 < sharpness <= 64, _OP, f"sharpness must be above 0 and at most 64; got {sharpness:g}. Fix: leave it out.")


def draft_topk(logits: torch.Tensor, d2t: Optional[torch.Tensor], cu_nodes: Optional[torch.Tensor],
               temperature: Optional[torch.Tensor], seed: Optional[torch.Tensor], prefix_len: Optional[torch.Tensor],
               active: Optional[torch.Tensor], values: torch.Tensor, tokens: torch.Tensor, level: int = 0,
               sharpness: float = 1.0) -> None:
    """The schema of csrc/ops.cpp."""
    check_arguments(logits, d2t, cu_nodes, temperature, seed, prefix_len, active, values, tokens, level, sharpness)
    (rows, n), k = logits.shape, values.shape[1]
    if rows == 0:
        return
    tile = min(4096, triton.next_power_of_2(n))
    batch = 0 if temperature is None else temperature.shape[0]
    _topk[(rows,)](logits, logits.stride(0), d2t, cu_nodes, 0 if cu_nodes is None else cu_nodes.shape[0] - 1, rows, n,
                   temperature, seed, prefix_len, active, batch, rows // max(batch, 1), level, sharpness, values, tokens, k,
                   TILE=tile, COLUMN=triton.next_power_of_2(triton.cdiv(n, tile)), COUPLED=temperature is not None, num_warps=8,
                   **EXACT)
