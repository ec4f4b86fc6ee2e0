"""Inputs of the tree benchmarks: pools as real draft phases leave them."""

from typing import NamedTuple

import torch

from fastverify.tree import DraftState, draft_topk, grow_tree


class Pool(NamedTuple):
    """A filled draft phase; parent_list is the same forest in SGLang's encoding."""

    state: DraftState
    prefix_len: torch.Tensor   # int32 [B]
    active: torch.Tensor       # int32 [B], all ones
    parent_list: torch.Tensor  # int64 [B, 1 + (levels-1)*k]


def draft_logits(rows: int, vocab: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    rng = torch.Generator(device).manual_seed(seed)
    return (3.0 * torch.randn(rows, vocab, generator=rng, device=device)).to(dtype)


def drafted_pool(batch: int, k: int, levels: int, device: torch.device, seed: int, hidden: int = 8) -> Pool:
    """`levels` levels of grow_tree on random logits: pools of k + (levels - 1) * k * k entries."""
    state = DraftState.empty(batch, k, levels, hidden, torch.bfloat16, device)
    prefix = torch.full((batch,), 1000, dtype=torch.int32, device=device)
    active = torch.ones(batch, dtype=torch.int32, device=device)
    parents = [torch.full((batch, 1), -1, dtype=torch.int64, device=device)]
    for level in range(levels):
        rows = batch if level == 0 else batch * k
        values, tokens = draft_topk(draft_logits(rows, 4096, torch.float32, device, seed + level), k)
        grow_tree(values, tokens, torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device), prefix, active, state, level)
        if level + 1 < levels:
            parents.append(state.pool_index.view(batch, k).long().clone())
    return Pool(state, prefix, active, torch.cat(parents, 1))
