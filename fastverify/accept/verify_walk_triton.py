"""The walk of verify_tree in Triton (csrc/accept/verify_args.h, walk_request), and log-probabilities of what it emitted."""

import triton
import triton.language as tl

from .._triton_numeric import MAX, MINUS_INF, NO_KEY, log_mass, mass, ordered, unordered
from .verify_row_triton import BAD_KEY, BAD_TREE, request_of_row, resolve

STOP = tl.constexpr(1)
BUDGET = tl.constexpr(2)
BAD_TOKEN = tl.constexpr(8)
BAD_ROW = tl.constexpr(16)
EMPTY_ROW = tl.constexpr(32)
PATH_FULL = tl.constexpr(64)


@triton.jit(do_not_specialize=["D", "R", "B", "SPLITS", "STOPS"])
def _walk(
        tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed, penalties,
        keys,  # int64 [R, SPLITS], the row's at split 0
        remaining, stop_ids, counts, out_tokens, num_tokens_out, path, next_root, flags, logprobs,
        D, DP: tl.constexpr, NP: tl.constexpr, SPLITS, STOPS, STOPS_PADDED: tl.constexpr,
        V, R, B, BP: tl.constexpr, RULE: tl.constexpr):
    b = tl.program_id(0)
    column = tl.arange(0, DP)
    row_path = tl.full((DP,), -1, tl.int32)
    row_tokens = tl.full((DP,), -1, tl.int64)
    kept = 0
    flag = 0
    if tl.load(active + b) != 0:
        _T, _K, _P, _M, flag = resolve(b, temperature, top_k, top_p, min_p, penalties, V, RULE)
        begin = tl.load(cu_nodes + b)
        n = tl.load(cu_nodes + b + 1) - begin
        if (begin < 0) | (n <= 0) | (begin + n > R) | (n > 1024):
            flag |= BAD_TREE
            begin = begin * 0
            n = n * 0
        elif request_of_row(begin, cu_nodes, R, B, BP) != b:  # rows of two requests overlap: the first one has them
            flag |= BAD_TREE
            n = n * 0
        at = tl.arange(0, NP)
        parent = tl.load(parents + begin + at, at < n, other=-1)
        token = tl.load(tokens + begin + at, at < n, other=0).to(tl.int64)
        wrong = (at < n) & tl.where(at == 0, parent != -1, (parent < 0) | (parent >= at))
        if tl.max(wrong.to(tl.int32), 0) != 0:
            flag |= BAD_TREE
            n = tl.minimum(n, 1)
        outside = (at > 0) & (at < n) & ((token < 0) | (token >= V))
        flag |= tl.where(tl.max(outside.to(tl.int32), 0) != 0, BAD_TOKEN, 0)

        budget = tl.load(remaining + b)
        row_keys = tl.load(keys + (begin + at).to(tl.int64) * SPLITS, at < n, other=NO_KEY)
        stopped = 0
        root = tl.full((), -1, tl.int64)
        visited = 0
        node = tl.where(n > 0, 0, -1)
        while (node >= 0) & (visited < D):
            row_path = tl.where(column == visited, node, row_path)
            raw = tl.max(tl.where(at == node, row_keys, NO_KEY), 0)
            is_bad = (raw & BAD_KEY) != 0
            key = raw & ~BAD_KEY
            visited += 1
            flag |= tl.where(is_bad, BAD_ROW, 0)
            if key == NO_KEY:
                flag |= EMPTY_ROW
                node = node * 0 - 1
            else:
                emitted = 0xFFFFF - (key & 0xFFFFF)
                if (stopped == 0) & (kept < budget):
                    row_tokens = tl.where(column == kept, emitted, row_tokens)
                    kept += 1
                    root = emitted
                    if counts is not None:
                        tl.atomic_add(counts + b.to(tl.int64) * V + emitted, 1)
                    if stop_ids is not None:
                        stop_at = tl.arange(0, STOPS_PADDED)
                        stop = tl.load(stop_ids + stop_at, stop_at < STOPS, other=-1).to(tl.int64)
                        if tl.max(((stop_at < STOPS) & (stop == emitted)).to(tl.int32), 0) != 0:
                            flag |= STOP
                            stopped = stopped * 0 + 1
                child = tl.min(tl.where((at > node) & (at < n) & (parent == node) & (token == emitted), at, NP), 0)
                node = tl.where(is_bad | (child >= NP), -1, child)
                flag |= tl.where((node >= 0) & (visited == D), PATH_FULL, 0)
        flag |= tl.where(budget - kept <= 0, BUDGET, 0)
        tl.store(remaining + b, budget - kept)
        if kept > 0:
            tl.store(next_root + b, root.to(next_root.dtype.element_ty))
    tl.store(num_tokens_out + b, kept)
    tl.store(flags + b, flag)
    at_row = b.to(tl.int64) * D + column
    tl.store(path + at_row, row_path, column < D)
    tl.store(out_tokens + at_row, row_tokens.to(out_tokens.dtype.element_ty), column < D)
    if logprobs is not None:
        tl.store(logprobs + at_row, tl.zeros((DP,), tl.float32), column < D)


@triton.jit(do_not_specialize=["D"])
def _logprobs(
        logits, row_stride, cu_nodes, out_tokens, num_tokens_out, path,
        logprobs,  # f32 [B, D] out, for emitted tokens: of the raw logits
        V, D, TILE: tl.constexpr):
    b = tl.program_id(0)
    i = tl.program_id(1)
    if i < tl.load(num_tokens_out + b):
        at = b.to(tl.int64) * D + i
        row = tl.load(cu_nodes + b) + tl.load(path + at)
        base = logits + row.to(tl.int64) * row_stride
        tops = tl.full((TILE,), MINUS_INF, tl.int32)
        for first in range(0, V, TILE):
            ids = first + tl.arange(0, TILE)
            x = tl.load(base + ids, ids < V, other=-float("inf")).to(tl.float32)
            tops = tl.maximum(tops, tl.where(x <= MAX, ordered(tl.where(x <= MAX, x, 0.0)), MINUS_INF))
        top = unordered(tl.max(tops, 0))
        total = tl.zeros((TILE,), tl.int64)
        for first in range(0, V, TILE):
            ids = first + tl.arange(0, TILE)
            x = tl.load(base + ids, ids < V, other=-float("inf")).to(tl.float32)
            finite = (x <= MAX) & (x >= -MAX)
            total += tl.where(finite, mass(tl.where(finite, x, top), top), 0)
        x = tl.load(base + tl.load(out_tokens + at)).to(tl.float32)
        tl.store(logprobs + at, x - top - log_mass(tl.sum(total, 0)))
