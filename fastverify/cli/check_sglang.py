"""Checks of SGLang's ops against their oracles. Registered by importing it."""

import torch

from .check_cases import SENTINEL, call, check, forest, ints, same

BATCH, NODES, LEVELS, VOCAB, TOPK, DEPTH = 3, 8, 5, 12, 3, 3


def _links(rng) -> dict:
    """Trees of NODES nodes as first-child and next-sibling links."""
    first, sibling = torch.full((BATCH, NODES), -1), torch.full((BATCH, NODES), -1)
    for b in range(BATCH):
        parents = forest([NODES], rng, roots=1).tolist()
        for i in range(NODES - 1, 0, -1):
            sibling[b, i], first[b, parents[i]] = first[b, parents[i]].clone(), i
    return dict(retrive_index=torch.arange(BATCH * NODES).view(BATCH, NODES), retrive_next_token=first, retrive_next_sibling=sibling)


def _accepted(rng) -> dict:
    return dict(predicts=torch.full((BATCH * NODES,), SENTINEL, dtype=torch.int32),
                accept_index=torch.full((BATCH, LEVELS), -1, dtype=torch.int32),
                accept_token_num=torch.full((BATCH,), SENTINEL, dtype=torch.int32),
                candidates=ints(0, VOCAB, rng, BATCH, NODES).long(), **_links(rng))


def _compare(op: str, device: str, case: dict) -> int:
    same(call(op, device, case), call(op, "reference", case))
    return 1


@check("sgl_verify_tree_greedy")
def verify_tree_greedy(device: str, rng) -> int:
    return _compare("sgl_verify_tree_greedy", device, _accepted(rng) | dict(target_predict=ints(0, VOCAB, rng, BATCH, NODES).long()))


@check("sgl_tree_speculative_sampling_target_only")
def tree_speculative_sampling_target_only(device: str, rng) -> int:
    probs = torch.softmax(2 * torch.randn(BATCH, NODES, VOCAB, generator=rng), -1)
    return _compare("sgl_tree_speculative_sampling_target_only", device, _accepted(rng) | dict(
        uniform_samples=torch.rand(BATCH, NODES, generator=rng), uniform_samples_for_final_sampling=torch.rand(BATCH, generator=rng),
        target_probs=probs, draft_probs=torch.zeros_like(probs), threshold_single=1.0, threshold_acc=1.0))


@check("sgl_build_tree_kernel_efficient")
def build_tree_kernel_efficient(device: str, rng) -> int:
    """All TOPK roots, then children of the first beam nodes: a closed choice."""
    parents = torch.full((BATCH, TOPK * (DEPTH - 1) + 1), -1)
    parents[:, 1:] = torch.arange(TOPK * (DEPTH - 1))
    chosen = torch.arange(NODES - 1).expand(BATCH, -1).contiguous()
    links = {k: torch.full((BATCH, NODES), -1) for k in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    return _compare("sgl_build_tree_kernel_efficient", device, dict(
        parent_list=parents, selected_index=chosen, verified_seq_len=ints(0, 9, rng, BATCH).long(),
        tree_mask=torch.full((BATCH * NODES,), SENTINEL), positions=torch.full((BATCH * NODES,), SENTINEL), **links,
        topk=TOPK, depth=DEPTH, draft_token_num=NODES, tree_mask_mode=3))


@check("sgl_reconstruct_indices_from_tree_mask")
def reconstruct_indices_from_tree_mask(device: str, rng) -> int:
    mask = torch.zeros(BATCH, NODES, NODES, dtype=torch.bool)
    for b in range(BATCH):
        for i, parent in enumerate(forest([NODES], rng, roots=1).tolist()):
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    out = {k: torch.full((BATCH, NODES), SENTINEL) for k in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    return _compare("sgl_reconstruct_indices_from_tree_mask", device, dict(
        tree_mask=mask.flatten(), verified_seq_len=ints(0, 9, rng, BATCH).long(),
        positions=torch.full((BATCH * NODES,), SENTINEL), **out, batch_size=BATCH, draft_token_num=NODES))
