"""Oracle of the acceptance stage: float64, row by row, written from the definitions (docs/algorithm.md).

Because the ops compute in float32, a float64 result may differ where two candidates are closer than rounding;
`verify_margin` gives, per request, the smallest such distance met on its path.
"""

import math

import numpy as np
import torch

from .noise import gumbel

__all__ = ["verify_tree", "lm_head_verify_tree", "verify_tree_partials", "verify_tree_combine"]

STOP, BUDGET, BAD_TREE, BAD_TOKEN, BAD_ROW, EMPTY_ROW, PATH_FULL, BAD_PARAM = (1 << i for i in range(8))
MAX_NODES = 1024


def _params(b, temperature, top_k, top_p, min_p, penalties, rule, vocab):
    """Validated (T, k, p, m, (rep, freq, pres)), and whether something was replaced."""
    f32max = torch.finfo(torch.float32).max
    t, k, p, m = float(temperature[b]), int(top_k[b]), float(top_p[b]), float(min_p[b])
    bad = False
    if not 0 <= t <= f32max:
        t, bad = 0.0, True
    if not 0 <= p <= 1:
        p, bad = 1.0, True
    if not 0 <= m <= 1:
        m, bad = 0.0, True
    pen = (1.0, 0.0, 0.0)
    if penalties is not None:
        rep, freq, pres = (float(v) for v in penalties[b])
        if not 0 < rep <= f32max:
            rep, bad = 1.0, True
        if not abs(freq) <= f32max:
            freq, bad = 0.0, True
        if not abs(pres) <= f32max:
            pres, bad = 0.0, True
        pen = (rep, freq, pres)
    if rule == 0:
        t = 0.0
    if k <= 0 or k >= vocab:
        k = 0
    return t, k, p, m, pen, bad


def process(row, ancestors, counts, bias, bits, pen, use_penalties):
    """Raw float64 row [V] -> (processed row with excluded = -inf, whether a NaN or +inf was met)."""
    x = row.copy()
    if use_penalties:
        c = (counts.astype(np.int64) if counts is not None else np.zeros(len(x), dtype=np.int64))
        for a in ancestors:
            if 0 <= a < len(x):
                c[a] += 1
        rep, freq, pres = pen
        hit = np.where(x > 0, x / rep, x * rep) - freq * c - pres
        x = np.where(c > 0, hit, x)
    if bias is not None:
        x = x + bias
    if bits is not None:
        x = np.where(bits, x, -np.inf)
    bad = np.isnan(x) | (x == np.inf)
    return np.where(bad, -np.inf, x), bool(bad.any())


def keep_set(z, k, p, m):
    """Filters on scaled scores z: boolean keep mask, and the smallest distance of an entry to a cut."""
    keep, margin = z > -np.inf, math.inf
    if k > 0 and keep.sum() > k:
        cut = np.sort(z[keep])[::-1][k - 1]
        below = z[keep & (z < cut)]
        margin = min(margin, float(cut - below.max()) if len(below) else math.inf)
        keep &= z >= cut
    zmax = z[keep].max()
    mass = np.where(keep, np.exp(np.where(keep, z - zmax, 0.0)), 0.0)
    if p < 1:
        order = np.argsort(-np.where(keep, z, -np.inf), kind="stable")[: int(keep.sum())]
        zs, ms, total = z[order], mass[order], mass.sum()
        starts = np.concatenate([[0], np.nonzero(np.diff(zs))[0] + 1])  # first index of each group of equal values
        above = np.concatenate([[0.0], np.cumsum(ms)])[starts] / total  # mass of strictly larger entries
        kept_groups = above < max(p, 1e-300)
        kept_groups[0] = True
        margin = min(margin, float(np.abs(above[1:] - p).min()) if len(above) > 1 else math.inf)
        keep &= z >= zs[starts[np.nonzero(kept_groups)[0].max()]]
    if m > 0:
        rel = np.exp(z - zmax)
        margin = min(margin, float(np.abs(rel[keep] - m).min()))
        keep &= rel >= m
    return keep, margin


def pick(x, params, noise):
    """Processed float64 row and noise -> (token or None, margin)."""
    t, k, p, m = params[:4]
    if not (x > -np.inf).any():
        return None, math.inf
    if t == 0:
        score, margin = x, math.inf
    else:
        f32 = np.float64(np.finfo(np.float32).max)
        z = np.where(x > -np.inf, np.clip(np.where(x > -np.inf, x, 0.0) / t, -f32, f32), -np.inf)
        keep, margin = keep_set(z, k, p, m)
        score = np.where(keep, z + noise, -np.inf)
    best = int(np.argmax(score))
    rest = np.delete(score, best)
    if len(rest) and rest.max() > -np.inf:
        gap = float(score[best] - rest.max())
        if not (t == 0 and gap == 0):  # equal logits at T = 0 are equal in every precision: the lowest id, no doubt
            margin = min(margin, gap / max(1.0, abs(score[best]) * 0.1))
    return best, margin


def logprob(row, token):
    """log softmax of the raw row at token, over its finite entries."""
    x = row[np.isfinite(row)]
    top = x.max()
    return float(row[token] - top - np.log(np.exp(x - top).sum()))


def _unpack_bits(words, vocab):
    return np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[:vocab].astype(bool)


def _verify(row_of, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, params_of, counts, counts_offset,
            out_tokens, num_tokens_out, path, next_root, flags, logprobs, vocab_size, rows):
    """The walk of every request. row_of(b, row, drafted tokens above it, position, params) gives
    (processed row, noise row, whether it is bad, raw row). Returns margins [B]."""
    batch, depth_cap = out_tokens.shape
    margins = [math.inf] * batch
    stops = set() if stop_ids is None else set(stop_ids.tolist())
    for b in range(batch):
        out_tokens[b], path[b], num_tokens_out[b], flags[b] = -1, -1, 0, 0
        if logprobs is not None:
            logprobs[b] = 0
        if not active[b]:
            continue
        params = params_of(b)
        flag = BAD_PARAM if params[5] else 0
        lo, hi = int(cu_nodes[b]), int(cu_nodes[b + 1])
        n = hi - lo
        if lo < 0 or n <= 0 or hi > rows or n > MAX_NODES:
            n, flag = 0, flag | BAD_TREE
        par = parents[lo:lo + n].tolist() if n else []
        if n and (par[0] != -1 or any(not 0 <= q < i for i, q in enumerate(par) if i)):
            n, flag = 1, flag | BAD_TREE
        tok = tokens[lo:lo + n].tolist() if n else []
        if any(not 0 <= t < vocab_size for t in tok[1:]):
            flag |= BAD_TOKEN
        emitted, lps, visited, node = [], [], [], 0 if n else None
        while node is not None:
            visited.append(node)
            x, noise, bad, raw = row_of(b, lo + node, emitted, int(prefix_len[b]) + len(visited), params)
            token, margin = pick(x, params, noise)
            margins[b] = min(margins[b], margin)
            flag |= BAD_ROW if bad else 0
            if token is None:
                flag |= EMPTY_ROW
                break
            emitted.append(token)
            lps.append(logprob(raw, token) if logprobs is not None else 0.0)
            if bad:
                break
            node = next((j for j in range(node + 1, n) if par[j] == node and tok[j] == token), None)
            if node is not None and len(visited) == depth_cap:
                flag |= PATH_FULL
                node = None
        kept = emitted[: max(0, int(remaining[b]))]
        for i, t in enumerate(kept):
            if t in stops:
                kept, flag = kept[: i + 1], flag | STOP
                break
        remaining[b] -= len(kept)
        if remaining[b] <= 0:
            flag |= BUDGET
        for i, t in enumerate(kept):
            out_tokens[b, i] = t
            if logprobs is not None:
                logprobs[b, i] = lps[i]
            if counts is not None and 0 <= t - counts_offset < counts.shape[1]:
                counts[b, t - counts_offset] += 1
        path[b, : len(visited)] = torch.tensor(visited, dtype=path.dtype)
        num_tokens_out[b], flags[b] = len(kept), flag
        if kept:
            next_root[b] = kept[-1]
    return margins


def verify_margin(logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k, top_p,
                  min_p, seed, bias, bitmask, penalties, counts, out_tokens, num_tokens_out, path, next_root, flags,
                  logprobs, workspace, vocab_size, rule):
    """Arguments of verify_tree; writes the same outputs and returns margins [B]."""
    rows = logits[:, :vocab_size].double().numpy()
    before = None if counts is None else counts.numpy().copy()

    def row_of(b, row, ancestors, position, params):
        x, bad = process(rows[row], ancestors, None if before is None else before[b],
                         None if bias is None else bias[b].double().numpy(),
                         None if bitmask is None else _unpack_bits(bitmask[row], vocab_size), params[4],
                         penalties is not None)
        return x, gumbel(np.arange(vocab_size), position, int(seed[b])), bad, rows[row]

    return _verify(row_of, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids,
                   lambda b: _params(b, temperature, top_k, top_p, min_p, penalties, rule, vocab_size), counts, 0,
                   out_tokens, num_tokens_out, path, next_root, flags, logprobs, vocab_size, logits.shape[0])


def verify_tree(logits, *args) -> None:
    """Oracle of torch.ops.fastverify.verify_tree (same positional arguments; workspace is ignored)."""
    verify_margin(logits, *args)


def lm_head_verify_tree(hidden, weight, *args) -> None:
    """Oracle of torch.ops.fastverify.lm_head_verify_tree: float64 product, then verify_tree."""
    verify_margin(hidden.double() @ weight.double().T, *args)


def verify_tree_partials(logits, tokens, parents, cu_nodes, prefix_len, active, temperature, top_k, top_p, min_p, seed,
                         bias, bitmask, penalties, counts, state, partials, vocab_offset, vocab_size, round_, num_rounds,
                         rule) -> None:
    """Oracle of one shard's part. The words between partials and combine are private to a back end; the oracle ships
    whole float64 rows in the last round (so it states the answer without any protocol):
    [bad row 1 + bad parameter 2, processed row, noise row, raw row], each of the shard's width; partials [R, 1 + 3 * width]."""
    if round_ != num_rounds - 1:
        return
    width = (partials.shape[1] - 1) // 3
    partials.zero_()
    for b in range(len(prefix_len)):
        lo = int(cu_nodes[b])
        for row in range(lo, int(cu_nodes[b + 1])) if active[b] else ():
            above, node = [], row - lo
            while node > 0:
                above.insert(0, int(tokens[lo + node]) - vocab_offset)
                node = int(parents[lo + node])
            raw = logits[row, :width].double().numpy()
            bits = None if bitmask is None else _unpack_bits(bitmask[row], vocab_size)[vocab_offset:vocab_offset + width]
            params = _params(b, temperature, top_k, top_p, min_p, penalties, rule, vocab_size)
            x, bad = process(raw, above, None if counts is None else counts[b].numpy(),
                             None if bias is None else bias[b].double().numpy(), bits, params[4], penalties is not None)
            noise = gumbel(np.arange(vocab_offset, vocab_offset + width), int(prefix_len[b]) + len(above) + 1, int(seed[b]))
            partials[row] = torch.from_numpy(np.concatenate([[bad + 2.0 * params[5]], x, noise, raw]).view(np.int64))


def verify_tree_combine(partials, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k,
                        top_p, min_p, counts, state, out_tokens, num_tokens_out, path, next_root, flags, logprobs,
                        vocab_offset, vocab_size, round_, num_rounds, rule) -> None:
    """Pairs with verify_tree_partials above (shards of equal width, in rank order)."""
    if round_ != num_rounds - 1:
        return
    world, rows, words = partials.shape
    values = partials.numpy().view(np.float64)
    bad, bad_param = (values[:, :, 0] % 2 == 1).any(0), (values[:, :, 0] >= 2).any(0)
    x, noise, raw = (np.concatenate([values[w, :, 1 + i * (words - 1) // 3:1 + (i + 1) * (words - 1) // 3]
                                     for w in range(world)], axis=1) for i in range(3))

    def params_of(b):
        p = _params(b, temperature, top_k, top_p, min_p, None, rule, vocab_size)
        lo = int(cu_nodes[b])
        return *p[:5], p[5] or (0 <= lo < min(rows, int(cu_nodes[b + 1])) and bool(bad_param[lo]))

    _verify(lambda b, row, *_: (x[row], noise[row], bool(bad[row]), raw[row]), tokens, parents, cu_nodes, prefix_len,
            active, remaining, stop_ids,
            params_of, counts, vocab_offset,
            out_tokens, num_tokens_out, path, next_root, flags, logprobs, vocab_size, rows)
