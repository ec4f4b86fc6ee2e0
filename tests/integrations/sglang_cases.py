"""Random inputs of SGLang's tree ops, ragged inside their [B, N] shapes. Used by the tests and by the comparison with sglang-kernel."""

import torch


def randint(low: int, high: int, rng, size=()) -> torch.Tensor:
    return torch.randint(low, high, size, generator=rng)


def random_links(nodes: int, used: int, rng) -> tuple:
    """(first child, next sibling) lists of a random tree on the first `used` nodes, siblings in random order, -1 none."""
    first, sibling = [-1] * nodes, [-1] * nodes
    order = [0] + (torch.randperm(used - 1, generator=rng) + 1).tolist() if used > 1 else [0]
    for at, node in enumerate(order[1:], 1):
        parent = order[int(randint(max(0, at - 6), at, rng))]
        sibling[node], first[parent] = first[parent], node
    return first, sibling


def tree_inputs(rng, batch: int, nodes: int, levels: int, vocab: int, ids=torch.int64) -> dict:
    """The seven arguments that both verifications share. Requests use 1..N nodes; outputs are poisoned with -7 (accept_index: -1)."""
    links = [random_links(nodes, int(randint(1, nodes + 1, rng)), rng) for _ in range(batch)]
    return dict(
        predicts=torch.full((batch * nodes + 1,), -7, dtype=torch.int32),
        accept_index=torch.full((batch, levels), -1, dtype=torch.int32),
        accept_token_num=torch.full((batch,), -7, dtype=torch.int32),
        candidates=randint(0, vocab, rng, (batch, nodes)).to(ids),
        retrive_index=torch.arange(batch * nodes).view(batch, nodes).to(ids),
        retrive_next_token=torch.tensor([f for f, _ in links]).to(ids),
        retrive_next_sibling=torch.tensor([s for _, s in links]).to(ids))


def greedy_case(rng, batch=3, nodes=8, levels=5, vocab=4, ids=torch.int64) -> dict:
    """A small vocabulary lets walks go deep and gives duplicate siblings."""
    return tree_inputs(rng, batch, nodes, levels, vocab, ids) | dict(target_predict=randint(0, vocab, rng, (batch, nodes)).to(ids))


def sampling_case(rng, batch=3, nodes=8, levels=5, vocab=64, scale=3.0, hot=0.7, draft="zeros", single=1.0, acc=1.0,
                  grid=False, ids=torch.int64) -> dict:
    """Softmax rows; a node carries one of its row's best tokens with chance `hot`, so that coins decide at every level.

    grid: probabilities and coins are multiples of 1/64: coins equal cumulative masses often.
    """
    case = tree_inputs(rng, batch, nodes, levels, vocab, ids)
    probs = torch.softmax(torch.randn(batch, nodes, vocab, generator=rng) * scale, -1)
    coins, last = torch.rand(batch, nodes, generator=rng), torch.rand(batch, generator=rng)
    if grid:
        probs = (probs * 64).round() / 64
        coins, last = randint(1, 64, rng, (batch, nodes)) / 64, randint(0, 64, rng, (batch,)) / 64
    best = probs.topk(min(3, vocab)).indices
    for b in range(batch):
        first, sibling = case["retrive_next_token"][b].tolist(), case["retrive_next_sibling"][b].tolist()
        for node in range(nodes):
            child, rank = first[node], 0
            while child > 0:
                if float(torch.rand((), generator=rng)) < hot:
                    case["candidates"][b, child] = best[b, node, rank % best.shape[-1]]
                child, rank = sibling[child], rank + 1
    draft_probs = {"none": None, "zeros": torch.zeros_like(probs), "random": probs.roll(1, -1) * 0.5}[draft]
    return case | dict(uniform_samples=coins, uniform_samples_for_final_sampling=last, target_probs=probs,
                       draft_probs=draft_probs, threshold_single=single, threshold_acc=acc)


def build_case(rng, batch=3, nodes=8, topk=4, depth=3, mode=0, longest=9) -> dict:
    """Candidates as SGLang's drafting leaves them: topk of the root, then topk children of each of topk beam nodes per level."""
    pool = topk + (depth - 1) * topk * topk
    nodes = min(nodes, pool + 1)
    listed = torch.full((batch, topk * (depth - 1) + 1), -1)
    chosen = torch.zeros(batch, nodes - 1, dtype=torch.int64)
    for b in range(batch):
        parent, level = {i: -1 for i in range(topk)}, list(range(topk))
        for d in range(1, depth):
            beam = sorted(level[i] for i in torch.randperm(len(level), generator=rng)[:topk].tolist())
            start, level = topk + (d - 1) * topk * topk, []
            for j, node in enumerate(beam):
                row = topk * (d - 1) + 1 + j
                listed[b, row] = node
                for c in range(topk):
                    index = start + j * topk + c
                    parent[index] = node
                    level.append(index)
        selected, open_set = set(), [i for i in range(topk)]
        while len(selected) < nodes - 1:
            pick = open_set.pop(int(randint(0, len(open_set), rng)))
            selected.add(pick)
            open_set += [i for i, p in parent.items() if p == pick]
        chosen[b] = torch.tensor(sorted(selected))
    lengths = randint(0, longest + 1, rng, (batch,))
    if mode >= 2:
        size = 8 if mode == 3 else 4 if nodes > 16 else 2 if nodes > 8 else 1
        kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}[size]
        mask = torch.zeros(batch * nodes, dtype=kind)
    else:
        mask = torch.ones(nodes * int(lengths.sum()) * (mode == 0) + batch * nodes * nodes, dtype=torch.bool)
    links = {k: torch.full((batch, nodes), -1) for k in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    return dict(parent_list=listed, selected_index=chosen, verified_seq_len=lengths, tree_mask=mask,
                positions=torch.full((batch * nodes,), -7), **links, topk=topk, depth=depth, draft_token_num=nodes,
                tree_mask_mode=mode)


def mask_case(rng, batch=3, nodes=8, longest=9) -> dict:
    """Ancestor masks of random trees, parents before children."""
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for b in range(batch):
        for i in range(nodes):
            if i:
                mask[b, i] = mask[b, int(randint(0, i, rng))]
            mask[b, i, i] = True
    links = {k: torch.full((batch, nodes), -7) for k in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    return dict(tree_mask=mask.flatten(), verified_seq_len=randint(0, longest + 1, rng, (batch,)),
                positions=torch.full((batch * nodes,), -7), **links, batch_size=batch, draft_token_num=nodes)
