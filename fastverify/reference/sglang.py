"""Oracle of SGLang's tree ops: plain Python walks on lists, sums as float32 tensors in the order sglang-kernel 0.4.4 adds in."""

from typing import Optional

import torch

__all__ = ["sgl_verify_tree_greedy", "sgl_tree_speculative_sampling_target_only", "sgl_build_tree_kernel_efficient",
           "sgl_reconstruct_indices_from_tree_mask"]

LANES = 1024


def walk(nodes: int, levels: int, flat: list, slots: int, first: list, sibling: list, start, accepts) -> tuple:
    """(path of nodes, its flat ids). start(node) before its children are looked at, accepts(node, child) for each in link
    order. Links that leave the tree or lead to the root end a list; after `nodes` visits every walk ends."""
    link = lambda raw: raw if 0 < raw < nodes else 0  # noqa: E731
    inside = lambda i: 0 <= flat[i] < slots  # noqa: E731
    path, flats, left = [0], [flat[0] if inside(0) else -1], nodes
    while len(path) < levels and flats[-1] >= 0:
        node = path[-1]
        start(node)
        child = link(first[node])
        while child and left > 0 and not accepts(node, child):
            child, left = link(sibling[child]), left - 1
        if not child or left <= 0 or not inside(child):
            break
        path.append(child)
        flats.append(flat[child])
        left -= 1
    return path, flats


def sgl_verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
                           retrive_next_sibling, target_predict) -> None:
    """SGLang's greedy verification: the first child that carries the parent's argmax is accepted."""
    batch, nodes = candidates.shape
    argmax, slots = target_predict.flatten().tolist(), candidates.numel()
    for b in range(batch):
        tokens, flat = candidates[b].tolist(), retrive_index[b].tolist()
        accepts = lambda node, c: tokens[c] == argmax[flat[node]] >= 0  # noqa: B023,E731
        path, flats = walk(nodes, accept_index.shape[1], flat, slots, retrive_next_token[b].tolist(),
                           retrive_next_sibling[b].tolist(), lambda node: None, accepts)
        for k, f in enumerate(flats):
            accept_index[b, k] = f
            if f >= 0:
                predicts[f] = argmax[f]
        accept_token_num[b] = len(path) - 1


# ---- target-only sampling ----------------------------------------------------------------------------------------------

def _tree(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (32) as a balanced tree of neighbours."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _tree_exclusive(x: torch.Tensor) -> torch.Tensor:
    """Exclusive prefix sums over the last dimension, a power of two: a prefix is that of the pair's left end, plus the left."""
    if x.shape[-1] == 1:
        return torch.zeros_like(x)
    left, right = x[..., 0::2], x[..., 1::2]
    pairs = _tree_exclusive(left + right)
    return torch.stack([pairs, left + pairs], dim=-1).flatten(-2)


def draw(residual: torch.Tensor, coin: float) -> Optional[int]:
    """Inverse CDF of float32 [V] masses at `coin`; None when there is no mass."""
    vocab = residual.numel()
    vec = next(v for v in (4, 2, 1) if vocab % v == 0)
    size = LANES * vec
    chunks = -(-vocab // size)
    x = torch.zeros(chunks * size).index_copy(0, torch.arange(vocab), residual).view(chunks, 32, 32, vec)
    items = (x[..., 0] + x[..., 1]) + (x[..., 2] + x[..., 3]) if vec == 4 else x[..., 0] + x[..., 1] if vec == 2 else x[..., 0]
    warps = _tree(items)
    sums = warps[:, 0]
    for w in range(1, 32):
        sums = sums + warps[:, w]
    total = torch.zeros(())
    for s in sums:
        total = total + s
    u, before, pick = torch.tensor(coin) * total, torch.zeros(()), None
    for c, s in enumerate(sums):
        if before + s > u:
            pick = (c, before, u)
            break
        if s > 0:
            pick = (c, before, torch.tensor(float("inf")))
        before = before + s
    if pick is None:
        return None
    c, before, u = pick
    data = x[c, ..., 0:1]
    for k in range(1, vec):
        data = torch.cat([data, data[..., -1:] + x[c, ..., k:k + 1]], dim=-1)
    lanes = data[..., -1]
    base = _tree_exclusive(_tree(lanes))[:, None] + _tree_exclusive(lanes)
    alive = (x[c] > 0).flatten()
    above = (((base[..., None] + data) + before) > u).flatten() & alive
    hits = above.nonzero() if bool(above.any()) else alive.nonzero()[-1:]
    return c * size + int(hits[0])


def sgl_tree_speculative_sampling_target_only(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
        uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, threshold_acc) -> None:
    """SGLang's sampling verification: one coin per visited node against the cumulative mass of its children."""
    batch, nodes = candidates.shape
    vocab, levels = target_probs.shape[2], accept_index.shape[1]
    f32 = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    inverse, single = 1 / torch.maximum(f32(threshold_acc), f32(1e-9)), f32(threshold_single)
    for b in range(batch):
        tokens, flat = candidates[b].tolist(), retrive_index[b].tolist()
        refused, mass = {}, f32(0.0)

        def start(node):
            refused.clear()
            mass.zero_()

        def accepts(node, c):
            inside = 0 <= tokens[c] < vocab
            p = target_probs[b, node, tokens[c]].clone() if inside else f32(0.0)
            mass.add_(p)
            if (uniform_samples[b, node] <= mass * inverse and mass > 0) or p >= single:
                return True
            if inside:
                refused.pop(tokens[c], None)
                refused[tokens[c]] = p
                if draft_probs is not None:
                    draft_probs[b, node, tokens[c]] = p
            return False

        path, flats = walk(nodes, levels, flat, candidates.numel(), retrive_next_token[b].tolist(),
                           retrive_next_sibling[b].tolist(), start, accepts)
        last, whole = path[-1], len(path) == levels
        for k, f in enumerate(flats):
            accept_index[b, k] = f
            if k:
                predicts[flats[k - 1]] = tokens[path[k]]
        accept_token_num[b] = len(path) - 1
        if flats[-1] < 0:
            continue
        q = target_probs[b, last]
        p = torch.zeros(vocab) if draft_probs is None or whole else draft_probs[b, last].clone()
        left = torch.where(q - p > 0, q - p, torch.zeros(()))
        if not whole:
            left[list(refused)] = 0.0
        token = draw(left, float(uniform_samples_for_final_sampling[b]))
        if token is None:
            massive = [t for t, p in refused.items() if p > 0]
            token = massive[-1] if massive and not whole else vocab - 1
        predicts[flats[-1]] = token


# ---- trees -------------------------------------------------------------------------------------------------------------

def _write_links(b: int, parents: list, positions, retrive_index, retrive_next_token, retrive_next_sibling) -> None:
    n = len(parents)
    for i in range(n):
        retrive_index[b, i] = b * n + i
        kids = [j for j in range(n) if parents[j] == i]
        retrive_next_token[b, i] = kids[0] if kids else -1
        if i == 0 or parents[i] < 0:
            retrive_next_sibling[b, i] = -1
        for a, c in zip(kids, kids[1:] + [-1]):
            retrive_next_sibling[b, a] = c


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def sgl_build_tree_kernel_efficient(parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index,
                                    retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num,
                                    tree_mask_mode) -> None:
    """SGLang's candidate list -> mask, positions and links. Node i is selected_index[i-1]; an ancestor that was not selected
    ends the chain: the node sees what was found and the root, and no link leads to it."""
    n, lengths = draft_token_num, verified_seq_len.tolist()
    flat = tree_mask.view(torch.uint8).flatten() if tree_mask_mode < 2 else tree_mask.flatten().view(torch.uint8)
    fitting = [length if 0 <= length <= flat.numel() else flat.numel() + 1 for length in lengths]
    for b, length in enumerate(lengths):
        chosen, listed = selected_index[b].tolist(), parent_list[b].tolist()

        def parent(i):
            row = chosen[i - 1] // topk
            if row <= 0:
                return 0 if row == 0 else -2
            wanted = listed[row] if row < len(listed) else None
            return chosen.index(wanted) + 1 if wanted in chosen and chosen.index(wanted) + 1 != i else -2

        parents = [-1] + [parent(i) for i in range(1, n)]
        _write_links(b, parents, positions, retrive_index, retrive_next_token, retrive_next_sibling)
        for i in range(n):
            seen, at = [], i
            while at > 0 and len(seen) < n:
                seen.append(at)
                at = parents[at]
            positions[b * n + i] = _int64(length + len(set(seen)))
            row = [int(j == 0 or j in seen) for j in range(n)]
            if tree_mask_mode >= 2:
                size = 8 if tree_mask_mode == 3 else 4 if n > 16 else 2 if n > 8 else 1
                bits = sum(v << j for j, v in enumerate(row))
                row = list(bits.to_bytes(size, "little"))
                start = (b * n + i) * size
            elif tree_mask_mode == 0:
                start = n * (sum(fitting[:b]) + n * b) + (fitting[b] + n) * i + fitting[b]
            else:
                start = n * (n * b + i)
            if start >= 0 and start + len(row) <= flat.numel():
                flat[start:start + len(row)] = torch.tensor(row, dtype=torch.uint8)


def sgl_reconstruct_indices_from_tree_mask(tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token,
                                           retrive_next_sibling, batch_size, draft_token_num) -> None:
    """Ancestor masks -> positions and links; a node's parent is its highest ancestor below itself."""
    n = draft_token_num
    rows = tree_mask.view(batch_size, n, n).tolist()
    for b in range(batch_size):
        above = [[j for j in range(i) if rows[b][i][j]] for i in range(n)]
        _write_links(b, [a[-1] if a else -1 for a in above], positions, retrive_index, retrive_next_token, retrive_next_sibling)
        for i in range(n):
            positions[b * n + i] = _int64(int(verified_seq_len[b]) + len(above[i]))
