"""build_tree in Triton: one launch chooses per request, one writes the rows. Equal to the CPU op."""

import torch
import triton
import triton.language as tl

from .. import _checks as check
from .._triton_numeric import EXACT, MINUS_INF, ordered
from .grow_tree_triton import _own_bit

_OP = "build_tree"
BAD_TREE = tl.constexpr(4)
BAD_TOKEN = tl.constexpr(8)


@triton.jit(do_not_specialize=["M", "N", "vocab"])
def _choose(
        pool_scores, pool_tokens, pool_parents, root_tokens, active,
        packed,   # int64 [B, M] scratch: ordered effective score | next ancestor + 1
        node_of,  # int32 [B, M] scratch: node of a pool entry, 0: not chosen
        entry,    # int32 [B, N] out: pool entry of node i >= 1
        parent,   # int32 [B, N] out: node's parent
        counts,   # int32 [B] out: nodes
        flags,    # int32 [B] out
        M, N, vocab, TILE: tl.constexpr):
    b = tl.program_id(0)
    lane = tl.arange(0, TILE)
    flag = 0
    nodes = 0
    if tl.load(active + b) != 0:
        pool = b.to(tl.int64) * M
        # 1. scores and parents; effective score = minimum over the ancestors, by pointer jumping. A pair is one 64-bit word:
        # whatever mixture of old and new words a round reads, each describes a whole stretch of the path.
        pending = 0
        for first in range(0, M, TILE):
            i = first + lane
            s = tl.load(pool_scores + pool + i, i < M, other=0.0)
            p = tl.load(pool_parents + pool + i, i < M, other=-1)
            bad = (p < -1) | (p >= i)
            flag |= tl.where(tl.max((bad & (i < M)).to(tl.int32), 0) != 0, BAD_TREE, 0)
            s = tl.where(bad | (s != s), -float("inf"), s)
            p = tl.where(bad, -1, p)
            order = ordered(tl.where(s < 0.0, s, 0.0))
            tl.store(packed + pool + i, (order.to(tl.int64) << 32) | (p + 1).to(tl.int64), i < M)
            pending = tl.maximum(pending, tl.max(tl.where(i < M, p + 1, 0), 0))
        tl.debug_barrier()
        while pending > 0:
            pending = pending * 0
            for first in range(0, M, TILE):
                i = first + lane
                word = tl.load(packed + pool + i, i < M, other=0)
                up = (word & 0xFFFFFFFF) - 1
                above = tl.load(packed + pool + up, (i < M) & (up >= 0), other=0)
                new = (tl.minimum(word >> 32, above >> 32) << 32) | (above & 0xFFFFFFFF)
                tl.store(packed + pool + i, new, (i < M) & (up >= 0))
                left = tl.where((i < M) & (up >= 0), (above & 0xFFFFFFFF).to(tl.int32), 0)
                pending = tl.maximum(pending, tl.max(left, 0))
            tl.debug_barrier()
        # 2. the n-th best score, two bits a step
        alive = 0
        for first in range(0, M, TILE):
            order = (tl.load(packed + pool + first + lane, first + lane < M, other=MINUS_INF << 32) >> 32).to(tl.int32)
            alive += tl.sum((order > MINUS_INF).to(tl.int32), 0)
        n = tl.minimum(N - 1, alive)
        prefix = tl.full((), 0, tl.uint32)
        one = tl.full((), 1 << 30, tl.uint32)
        for _step in range(16):
            sums = tl.full((), 0, tl.int64)
            for first in range(0, M, TILE):
                order = (tl.load(packed + pool + first + lane, first + lane < M, other=MINUS_INF << 32) >> 32).to(tl.int32)
                u = order.to(tl.uint32, bitcast=True) ^ 0x80000000
                u = tl.where(order > MINUS_INF, u, 0)
                ge = (u >= prefix + one).to(tl.int64) + ((u >= prefix + 2 * one).to(tl.int64) << 20)
                sums += tl.sum(ge + ((u >= prefix + 3 * one).to(tl.int64) << 40), 0)
            digit = ((sums & 0xFFFFF) >= n).to(tl.uint32) + (((sums >> 20) & 0xFFFFF) >= n).to(tl.uint32)
            prefix += (digit + ((sums >> 40) >= n).to(tl.uint32)) * one
            one = one >> 2
        cut = (prefix ^ 0x80000000).to(tl.int32, bitcast=True)
        better = 0
        for first in range(0, M, TILE):
            order = (tl.load(packed + pool + first + lane, first + lane < M, other=MINUS_INF << 32) >> 32).to(tl.int32)
            better += tl.sum((order > cut).to(tl.int32), 0)
        # 3. node numbers in pool order; equal scores: the lower index
        ties = 0
        taken = 0
        for first in range(0, M, TILE):
            i = first + lane
            order = (tl.load(packed + pool + i, i < M, other=MINUS_INF << 32) >> 32).to(tl.int32)
            tie = (order == cut).to(tl.int32)
            place = ties + tl.cumsum(tie, 0)
            take = (n > 0) & (i < M) & ((order > cut) | ((order == cut) & (place <= n - better)))
            node = taken + tl.cumsum(take.to(tl.int32), 0)
            tl.store(node_of + pool + i, tl.where(take, node, 0), i < M)
            ties += tl.sum(tie, 0)
            taken += tl.sum(take.to(tl.int32), 0)
        tl.debug_barrier()
        for first in range(0, M, TILE):
            i = first + lane
            node = tl.load(node_of + pool + i, i < M, other=0)
            p = tl.load(pool_parents + pool + i, node > 0, other=-1)
            up = tl.load(node_of + pool + p, (node > 0) & (p >= 0), other=0)
            tl.store(entry + b * N + node, i, node > 0)
            tl.store(parent + b * N + node, up, node > 0)
            token = tl.load(pool_tokens + pool + i, node > 0, other=0)
            wrong = (node > 0) & ((token < 0) | (token >= vocab))
            flag |= tl.where(tl.max(wrong.to(tl.int32), 0) != 0, BAD_TOKEN, 0)
        root = tl.load(root_tokens + b)
        flag |= tl.where((root < 0) | (root >= vocab), BAD_TOKEN, 0)
        nodes = taken + 1
    tl.store(counts + b, nodes)
    tl.store(flags + b, flag)


@triton.jit(do_not_specialize=["M", "N", "W", "B", "R", "vocab"])
def _write(
        pool_tokens, root_tokens, prefix_len, entry, parent, counts, tokens, parents, mask, depth, positions, cu_nodes,
        M, N, W, B, R, vocab, BP: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr):
    b = tl.program_id(0)
    at = tl.arange(0, BP)
    nodes = tl.load(counts + at, at < B, other=0)
    base = tl.sum(tl.where(at < b, nodes, 0), 0)
    count = tl.load(counts + b)
    if tl.program_id(1) == 0:
        tl.store(cu_nodes + b + 1, base + count)
        if b == 0:
            tl.store(cu_nodes, 0)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = i < count
    source = tl.load(entry + b * N + i, real & (i > 0), other=0)
    token = tl.load(pool_tokens + b.to(tl.int64) * M + source, real & (i > 0), other=0).to(tl.int64)
    token = tl.where(i == 0, tl.load(root_tokens + b).to(tl.int64), token)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    up = tl.load(parent + b * N + i, real & (i > 0), other=-1)
    words = tl.arange(0, WP)[None, :]
    bits = _own_bit(words, i[:, None])
    level = tl.zeros((ROWS,), tl.int32)
    above = up
    while tl.max(above, 0) >= 0:
        bits |= tl.where((above >= 0)[:, None], _own_bit(words, above[:, None]), 0)
        level += (above >= 0).to(tl.int32)
        above = tl.load(parent + b * N + above, above > 0, other=-1)
    row = base + i
    tl.store(tokens + row, token.to(tokens.dtype.element_ty), real)
    tl.store(parents + row, up, real)
    tl.store(depth + row, level, real)
    tl.store(positions + row, tl.load(prefix_len + b) + level, real)
    tl.store(mask + row.to(tl.int64)[:, None] * W + words, bits, real[:, None] & (words < W))
    # padding rows, shared out among all programs
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(0) * tl.num_programs(1) * ROWS
    for first in range(tl.sum(nodes, 0) + program * ROWS, R, step):
        row = first + tl.arange(0, ROWS)
        tl.store(tokens + row, tl.zeros((ROWS,), tokens.dtype.element_ty), row < R)
        tl.store(parents + row, -1, row < R)
        tl.store(depth + row, 0, row < R)
        tl.store(positions + row, 0, row < R)
        tl.store(mask + row.to(tl.int64)[:, None] * W + words, tl.zeros((ROWS, WP), tl.int64), (row < R)[:, None] & (words < W))


def check_arguments(pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, tokens, parents, mask, depth, positions,
           cu_nodes, flags, num_nodes, vocab_size) -> None:
    """The checks of csrc/tree/build_tree.cpp, in their order."""
    t = lambda name, value, kinds, shape: check.tensor(_OP, name, value, kinds, shape, pool_scores)  # noqa: E731
    t("pool_scores", pool_scores, check.F32, (None, None))
    batch, pool = pool_scores.shape
    t("pool_tokens", pool_tokens, check.IDS, (batch, pool))
    t("pool_parents", pool_parents, check.I32, (batch, pool))
    t("root_tokens", root_tokens, check.IDS, (batch,))
    t("prefix_len", prefix_len, check.I32, (batch,))
    t("active", active, check.I32, (batch,))
    t("tokens", tokens, check.IDS, (None,))
    rows = tokens.shape[0]
    t("parents", parents, check.I32, (rows,))
    t("mask", mask, check.I64, (rows, None))
    t("depth", depth, check.I32, (rows,))
    t("positions", positions, check.I32, (rows,))
    t("cu_nodes", cu_nodes, check.I32, (batch + 1,))
    t("flags", flags, check.I32, (batch,))
    check.that(1 <= num_nodes <= check.MAX_NODES, _OP, f"num_nodes must be in 1..{check.MAX_NODES}; got {num_nodes}. "
               "Fix: pass the number of verify nodes per request, the root included.")
    check.that(1 <= vocab_size <= check.MAX_VOCAB, _OP, f"vocab_size must be in 1..{check.MAX_VOCAB}; got {vocab_size}. "
               "Fix: pass the target's vocabulary size.")
    check.that(rows >= batch * num_nodes, _OP, f"tokens must be at least B*num_nodes = {batch * num_nodes} rows; got {rows}. "
               "Fix: allocate the outputs with B*num_nodes rows.")
    words = mask.shape[1]
    check.that(words <= check.MAX_MASK_WORDS and 64 * words >= num_nodes, _OP, f"mask must be {(num_nodes + 63) // 64}.."
               f"{check.MAX_MASK_WORDS} words wide for {num_nodes} nodes; got {words}. "
               "Fix: allocate ceil(num_nodes/64) words per row.")


def build_tree(pool_scores: torch.Tensor, pool_tokens: torch.Tensor, pool_parents: torch.Tensor, root_tokens: torch.Tensor,
               prefix_len: torch.Tensor, active: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor,
               mask: torch.Tensor, depth: torch.Tensor, positions: torch.Tensor, cu_nodes: torch.Tensor,
               flags: torch.Tensor, num_nodes: int, vocab_size: int) -> None:
    """The schema of csrc/ops.cpp."""
    check_arguments(pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, tokens, parents, mask, depth, positions,
           cu_nodes, flags, num_nodes, vocab_size)
    (batch, pool), rows, words = pool_scores.shape, tokens.shape[0], mask.shape[1]
    if batch == 0:  # padding only
        for t, fill in ((tokens, 0), (parents, -1), (mask, 0), (depth, 0), (positions, 0), (cu_nodes, 0)):
            t.fill_(fill)
        return
    pow2 = triton.next_power_of_2
    i32 = lambda *shape: torch.empty(shape, dtype=torch.int32, device=tokens.device)  # noqa: E731
    packed = torch.empty(batch, pool, dtype=torch.int64, device=tokens.device)
    node_of, entry, parent, counts = i32(batch, pool), i32(batch, num_nodes), i32(batch, num_nodes), i32(batch)
    _choose[(batch,)](pool_scores, pool_tokens, pool_parents, root_tokens, active, packed, node_of, entry, parent, counts,
                      flags, pool, num_nodes, vocab_size, TILE=min(2048, pow2(max(pool, 1))), num_warps=8, **EXACT)
    tile = min(64, pow2(num_nodes))
    _write[(batch, triton.cdiv(num_nodes, tile))](
        pool_tokens, root_tokens, prefix_len, entry, parent, counts, tokens, parents, mask, depth, positions, cu_nodes, pool,
        num_nodes, words, batch, rows, vocab_size, BP=max(32, pow2(batch)), WP=pow2(words), ROWS=tile, num_warps=4)
