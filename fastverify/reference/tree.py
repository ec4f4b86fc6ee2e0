"""Oracle of the tree stage: draft_topk, grow_tree, build_tree, prepare_tree. Lists and float64; clear, not fast."""

import math
from bisect import bisect_left
from typing import Optional

import torch

from .noise import gumbel

__all__ = ["draft_topk", "grow_tree", "build_tree", "prepare_tree"]

BAD_TREE = 1 << 2   # kFlagBadTree of csrc/common/types.h
BAD_TOKEN = 1 << 3  # kFlagBadToken
MIN_CHUNK, CHUNK_STEP, TARGET_UNITS = 256, 64, 264  # csrc/algo/schedule.h
MAX_KV = 2**31 - 64


def draft_topk(logits, d2t, cu_nodes, temperature, seed, prefix_len, active, values, tokens, level=0, sharpness=1.0) -> None:
    """Top k log-probabilities of each row, descending; equal logits: lower draft id first. NaN, +inf count as -inf."""
    rows, k = values.shape
    valid = rows if cu_nodes is None else min(max(int(cu_nodes[-1]), 0), rows)
    values.zero_()
    tokens.zero_()
    x = logits.double()
    x = torch.where(torch.isfinite(x), x, -math.inf)
    if temperature is not None:
        requests = [b for b in range(active.numel()) if int(active[b]) != 0]
        each = rows // active.numel() if rows else 0
        valid = min(valid, len(requests) * each)
        ids = torch.arange(x.size(1)) + (0 if d2t is None else d2t.cpu())
        for r in range(valid):
            b = requests[r // each]
            if 0 < float(temperature[b]) < math.inf:
                noise = torch.from_numpy(gumbel(ids.numpy(), int(prefix_len[b]) + level + 1, int(seed[b])))
                x[r] = sharpness * (x[r] / float(temperature[b]) + noise.to(x.device))
    x = x[:valid]
    order = torch.sort(x, dim=1, descending=True, stable=True).indices[:, :k]
    logprobs = torch.log_softmax(x, dim=1).gather(1, order)  # a row of -inf gives NaN: every value is -inf there
    values[:valid] = torch.where(torch.isnan(logprobs), -math.inf, logprobs).float()
    tokens[:valid] = (order if d2t is None else order + d2t[order]).to(torch.int32)


def _not_nan(x: float) -> float:
    return -math.inf if math.isnan(x) else x


def _set_bit(words: torch.Tensor, column: int) -> None:
    """Sets bit `column` of one int64 mask row in place."""
    bit = 1 << (column % 64)
    words[column // 64] |= bit - 2**64 if bit == 2**63 else bit


def grow_tree(values, tokens, hidden, prefix_len, active, cu_nodes, scores, pool_index, mask, pool_scores, pool_tokens,
              pool_parents, next_tokens, next_positions, next_hidden, level) -> None:
    """One draft level: candidates into the pool, the k best of them become the next beam (rows k*rank + i)."""
    k = values.size(1)
    requests = [b for b in range(active.numel()) if int(active[b]) != 0]
    old_scores, old_index, old_mask = scores.clone(), pool_index.clone(), mask.clone()
    for out in (scores, pool_index, mask, next_tokens, next_positions, next_hidden):
        out.zero_()
    if level == 0:
        counts = [k if int(a) != 0 else 0 for a in active]
        cu_nodes.copy_(torch.tensor([0] + counts).cumsum(0))
        for b in requests:
            pool_scores[b], pool_tokens[b], pool_parents[b] = -math.inf, 0, -1
    for rank, b in enumerate(requests):
        candidates = []  # (score float32, pool index, token, input row, old beam row or None)
        if level == 0:
            for j in range(k):
                candidates.append((values[rank, j], j, int(tokens[rank, j]), rank, None))
        else:
            for i in range(k):
                row = rank * k + i
                for j in range(k):
                    index = k + (level - 1) * k * k + i * k + j
                    candidates.append((old_scores[row] + values[row, j], index, int(tokens[row, j]), row, row))
        for score, index, token, _, parent in candidates:
            pool_scores[b, index] = _not_nan(float(score))
            pool_tokens[b, index] = token
            pool_parents[b, index] = -1 if parent is None else old_index[parent]
        if level > 0:
            candidates.sort(key=lambda c: (-_not_nan(float(c[0])), c[1]))
        for i, (score, index, token, source, parent) in enumerate(candidates[:k]):
            row = rank * k + i
            scores[row], pool_index[row] = _not_nan(float(score)), index
            if parent is not None:
                mask[row] = old_mask[parent]
            _set_bit(mask[row], level * k + i)
            next_tokens[row], next_positions[row] = token, int(prefix_len[b]) + level
            next_hidden[row] = hidden[source]


def build_tree(pool_scores, pool_tokens, pool_parents, root_tokens, prefix_len, active, tokens, parents, mask, depth,
               positions, cu_nodes, flags, num_nodes, vocab_size) -> None:
    """The root and the num_nodes - 1 best pool entries of every active request, in pool order."""
    batch, pool_size = pool_scores.shape
    for out in (tokens, mask, depth, positions, flags, cu_nodes):
        out.zero_()
    parents.fill_(-1)
    row = 0
    for b in range(batch):
        if int(active[b]) != 0:
            flag, effective = 0, []
            for i in range(pool_size):
                score, parent = _not_nan(float(pool_scores[b, i])), int(pool_parents[b, i])
                if not -1 <= parent < i:
                    flag, score = flag | BAD_TREE, -math.inf
                elif parent >= 0:
                    score = min(score, effective[parent])
                effective.append(min(score, 0.0))
            best = sorted((i for i in range(pool_size) if effective[i] > -math.inf), key=lambda i: (-effective[i], i))
            chosen = sorted(best[: num_nodes - 1])
            node_of = {-1: 0, **{index: node + 1 for node, index in enumerate(chosen)}}
            nodes = [(int(root_tokens[b]), -1)]
            nodes += [(int(pool_tokens[b, i]), node_of[int(pool_parents[b, i])]) for i in chosen]
            for node, (token, parent) in enumerate(nodes):
                if not 0 <= token < vocab_size:
                    flag, token = flag | BAD_TOKEN, min(max(token, 0), vocab_size - 1)
                tokens[row + node], parents[row + node] = token, parent
                if parent >= 0:
                    mask[row + node] = mask[row + parent]
                    depth[row + node] = depth[row + parent] + 1
                _set_bit(mask[row + node], node)
                positions[row + node] = int(prefix_len[b]) + int(depth[row + node])
            flags[b] = flag
            row += len(nodes)
        cu_nodes[b + 1] = row


def split_schedule(kv_lens: list, target: int = TARGET_UNITS) -> list:
    """[chunk tokens, total units, unit prefix sums]: a unit is one (request, chunk of its KV, tree columns included).

    chunk: the smallest multiple of 64, at least 256, that gives at most max(target, non-empty requests) units (more
    than `target` non-empty requests: one unit each).
    """
    limit = max(target, sum(n > 0 for n in kv_lens))
    chunks = range(MIN_CHUNK, max(kv_lens, default=0) + MIN_CHUNK + CHUNK_STEP, CHUNK_STEP)
    chunk = chunks[bisect_left(chunks, True, key=lambda c: sum(-(-n // c) for n in kv_lens) <= limit)]
    prefix = [0]
    for n in kv_lens:
        prefix.append(prefix[-1] + -(-n // chunk))
    return [chunk, prefix[-1], *prefix]


def prepare_tree(parents, cu_nodes, prefix_len, page_table, mask, depth, positions, slots, first_child, next_sibling,
                 schedule, flags, page_size, row_base) -> None:
    """Mask, depths, positions, slots, child links and the split-KV schedule; only the outputs that are given."""
    batch, pages = page_table.shape
    for out, fill in ((mask, 0), (depth, 0), (positions, 0), (slots, -1), (first_child, -1), (next_sibling, -1)):
        if out is not None:
            out.fill_(fill)
    per_row = [t for t in (parents, mask, depth, positions, slots, first_child, next_sibling) if t is not None]
    rows = per_row[0].size(0) if per_row else None
    cu = [int(c) for c in cu_nodes]
    cu_ok = cu[0] == 0 and all(a <= b for a, b in zip(cu, cu[1:])) and (rows is None or cu[-1] <= rows)
    kv_lens = []
    for b in range(batch):
        start, n, prefix = cu[b], cu[b + 1] - cu[b], int(prefix_len[b])
        if not cu_ok:
            start, n = 0, 0
        kv_lens.append(min(max(prefix, 0) + row_base + n, MAX_KV) if n > 0 else 0)
        flag = 0 if cu_ok else BAD_TREE
        tree = []  # (parent, depth, mask as a Python int) of every node
        for i in range(n if per_row else 0):
            if parents is None:  # a chain continues the columns before row_base
                tree.append((i - 1, row_base + i, (1 << (row_base + i + 1)) - 1 if mask is not None else 0))
                continue
            parent = int(parents[start + i])
            if not -1 <= parent < i:
                flag, parent = flag | BAD_TREE, -1
            up: Optional[tuple] = tree[parent] if parent >= 0 else None
            own = 1 << (row_base + i) if mask is not None else 0
            tree.append((parent, up[1] + 1 if up else 0, (up[2] if up else 0) | own))
        for i, (parent, node_depth, bits) in enumerate(tree):
            row = start + i
            if mask is not None:
                if row_base + i >= 64 * mask.size(1):
                    flag |= BAD_TREE
                for column in range(min(row_base + i + 1, 64 * mask.size(1))):
                    if bits >> column & 1:
                        _set_bit(mask[row], column)
            if depth is not None:
                depth[row] = node_depth
            if positions is not None:
                positions[row] = prefix + node_depth
            if slots is not None:
                at = prefix + row_base + i
                page = int(page_table[b, at // page_size]) if 0 <= at < pages * page_size else -1
                if page < 0:
                    flag |= BAD_TREE
                else:
                    slots[row] = page * page_size + at % page_size
            children = [c for c in range(i + 1, n) if tree[c][0] == i] if first_child is not None else []
            if children:
                first_child[row] = children[0]
            siblings = [c for c in range(i + 1, n) if tree[c][0] == parent] if next_sibling is not None else []
            if siblings and parent >= 0:
                next_sibling[row] = siblings[0]
        if flags is not None:
            flags[b] = flag
    if schedule is not None:
        schedule.copy_(torch.tensor(split_schedule(kv_lens)))
