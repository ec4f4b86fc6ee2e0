"""Oracle of the attention stage: rope_append, tree_attention and mla_tree_attention in float64, one row at a time."""

import math

import torch

__all__ = ["mla_tree_attention", "rope_append", "tree_attention"]

FP8_MAX = 448.0  # largest finite float8_e4m3fn; appended values saturate there


def _scale(scale, heads: int) -> torch.Tensor:
    """None | [1] | [Hkv] -> float64 [Hkv, 1]."""
    if scale is None:
        return torch.ones(heads, 1, dtype=torch.float64)
    return scale.double().expand(heads).reshape(heads, 1)


def _norm(x, weight, eps: float):
    """RMSNorm over the last dimension; weight None leaves x alone."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def _rotate(x, cos_sin, style: int):
    """RoPE on the first len(cos_sin) dims of x [heads, D]; style 0 pairs (i, i + rot/2), style 1 pairs (2i, 2i+1)."""
    rot = cos_sin.numel()
    cos, sin = cos_sin.double().chunk(2)
    out = x.clone()
    if style == 0:
        a, b = x[:, : rot // 2], x[:, rot // 2 : rot]
        out[:, : rot // 2], out[:, rot // 2 : rot] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[:, 0:rot:2], x[:, 1:rot:2]
        out[:, 0:rot:2], out[:, 1:rot:2] = a * cos - b * sin, b * cos + a * sin
    return out


def _to_cache(x, dtype):
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def rope_append(q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, eps,
                rotary_style) -> None:
    """q [R,Hq,D] is rotated in place; rotated k and plain v go to slots of k_cache, v_cache. See csrc/ops.cpp."""
    page_size, heads = k_cache.shape[1], k.shape[1]
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
        if slot < 0:
            continue
        table = cos_sin[position]
        q[row] = _rotate(_norm(q[row].double(), q_norm, eps), table, rotary_style).to(q.dtype)
        new_k = _rotate(_norm(k[row].double(), k_norm, eps), table, rotary_style) / _scale(k_scale, heads)
        new_v = v[row].double() / _scale(v_scale, heads)
        k_cache[slot // page_size, slot % page_size] = _to_cache(new_k, k_cache.dtype)
        v_cache[slot // page_size, slot % page_size] = _to_cache(new_v, v_cache.dtype)


def visible_columns(mask, row: int, index: int, columns: int) -> list:
    """Forest columns that flat row `row` sees, ascending: the set bits below `columns`; mask None: 0..index."""
    if mask is None:
        return list(range(index + 1))
    words = [w & (2**64 - 1) for w in mask[row].tolist()]
    return [j for j in range(min(columns, 64 * len(words))) if words[j // 64] >> (j % 64) & 1]


def tree_attention(q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, schedule, sinks, k_scale, v_scale,
                   out, lse, workspace, row_base, scale, window, softcap, exact=False, settled=False) -> None:
    """Every row on its own: gather its visible keys in position order, then softmax(q k) v. See csrc/ops.cpp."""
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // kv_heads
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    cu = cu_nodes.tolist()
    for b, prefix in enumerate(prefix_len.tolist()):
        rows = cu[b + 1] - cu[b]
        for i in range(rows):
            row = cu[b] + i
            columns = visible_columns(mask, row, row_base + i, row_base + rows)
            cells = list(range(prefix)) + [prefix + j for j in columns]  # cache positions, in order of key position
            if window > 0:
                cells = cells[max(0, len(cells) - window):]  # key position = rank; the query is at the last rank
            if not cells:
                continue
            pos = torch.tensor(cells)
            page, slot = page_table[b][pos // page_size].long(), pos % page_size
            keys = k_cache[page, slot].double() * _scale(k_scale, kv_heads)      # [keys, Hkv, D]
            values = v_cache[page, slot].double() * _scale(v_scale, kv_heads)
            query = q[row].double().view(kv_heads, group, -1)
            s = torch.einsum("hgd,khd->hgk", query, keys).flatten(0, 1) * scale
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            total = s.logsumexp(-1)
            if lse is not None:
                lse[row] = total.float()
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            p = torch.where(s == -math.inf, 0.0, (s - total[:, None]).exp())
            out[row] = torch.einsum("hgk,khd->hgd", p.view(kv_heads, group, -1), values).flatten(0, 1).to(out.dtype)


def mla_tree_attention(q, kv_cache, mask, cu_nodes, prefix_len, page_table, out, lse, workspace, row_base, scale) -> None:
    """tree_attention with one kv head, whose value is the first dims of its key. See csrc/ops.cpp."""
    keys = kv_cache.unsqueeze(2)
    values = torch.zeros_like(keys)
    values[..., : out.shape[2]] = keys[..., : out.shape[2]]
    wide = torch.zeros(q.shape, dtype=out.dtype)
    tree_attention(q, keys, values, mask, cu_nodes, prefix_len, page_table, None, None, None, None, wide, lse, None, row_base, scale,
                   0, 0.0)
    out.copy_(wide[..., : out.shape[2]])
