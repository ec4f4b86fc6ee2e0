"""SGLang's tree ops on fastverify's kernels: the same names, argument order, dtypes and fills as sgl_kernel's.

    import fastverify.integrations.sglang as fv_sglang
    fv_sglang.install()       # replaces the functions in sgl_kernel (and where other modules imported them); uninstall() undoes it

Equal to sglang-kernel 0.4.4 bit for bit on valid inputs, except where that one is wrong: a coin of exactly 0 does not accept a
child without mass, and where rounding leaves no entry above the final coin the last entry with mass is emitted instead of
token V-1. Links and ids out of range end a walk instead of reading past a buffer. Differences and versions: docs/integrations.md.
"""

import inspect
import sys
from typing import Optional

import torch

from .. import _ops

__all__ = ["verify_tree_greedy", "tree_speculative_sampling_target_only", "build_tree_kernel_efficient",
           "reconstruct_indices_from_tree_mask", "install", "uninstall"]


def verify_tree_greedy(predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
                       candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
                       retrive_next_sibling: torch.Tensor, target_predict: torch.Tensor, cuda_stream: int = 0) -> None:
    """Walks each request's tree: the first child that carries its parent's argmax is accepted.

    predicts          int32 [>= B*N] (out): the argmax, at the flat slot of every node on the path; other slots stay
    accept_index      int32 [B, S] (out): flat ids of the path, root first; the rest stays (the caller fills -1)
    accept_token_num  int32 [B] (out): accepted drafts, root and bonus token excluded
    candidates        int64|int32 [B, N], 1 <= N <= 1024; retrive_index [B, N] flat ids b*N+i (read as data)
    retrive_next_token, retrive_next_sibling  [B, N] first child and next sibling, local, -1: none
    target_predict    int64|int32 [B, N]: argmax of every row, read by flat id
    cuda_stream       ignored: torch's current stream is used
    At most S-1 drafts are accepted. Errors: RuntimeError on a wrong shape, dtype or device. Cost: 40 bytes per node, one
    launch. Graph-safe. Source: sglang-kernel's op of this name.
    """
    _ops.require_kernel("sgl_verify_tree_greedy", candidates.device)
    _ops.get("sgl_verify_tree_greedy")(predicts, accept_index, accept_token_num, candidates, retrive_index,
                                       retrive_next_token, retrive_next_sibling, target_predict)


def tree_speculative_sampling_target_only(
        predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
        retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor,
        uniform_samples: torch.Tensor, uniform_samples_for_final_sampling: torch.Tensor, target_probs: torch.Tensor,
        draft_probs: Optional[torch.Tensor] = None, threshold_single: float = 1.0, threshold_acc: float = 1.0,
        deterministic: bool = True) -> None:
    """Walks each request's tree with one coin per visited node, then draws the last token from what the refused children left.

    A child is accepted when the coin is at most the mass of the siblings so far over threshold_acc, or its own probability
    reaches threshold_single. The last token is the inverse CDF of relu(target - draft) at the final coin, without the draft
    term when S-1 drafts were accepted. Equal coins give equal tokens: sums are added in SGLang's order.

    The first seven arguments are those of verify_tree_greedy.
    uniform_samples  float32 [B, N] in [0, 1), read at the local index of visited nodes
    uniform_samples_for_final_sampling  float32 [B] in [0, 1)
    target_probs     float32 [B, N, V], V <= 2**20
    draft_probs      float32 [B, N, V] zeros (in/out: refused children get their target probability), or None: saves 2/3 of
                     the memory that SGLang needs and one row of reads
    threshold_single, threshold_acc  in [0, 1]; 1.0 is the exact rule
    deterministic    ignored: every run gives the same tokens
    Errors: RuntimeError. Cost: 4*V bytes per request (8*V with draft_probs), one launch. Graph-safe.
    Source: sglang-kernel's op of this name.
    """
    _ops.require_kernel("sgl_tree_speculative_sampling_target_only", candidates.device)
    _ops.get("sgl_tree_speculative_sampling_target_only")(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
        uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, threshold_acc)


def build_tree_kernel_efficient(
        parent_list: torch.Tensor, selected_index: torch.Tensor, verified_seq_len: torch.Tensor, tree_mask: torch.Tensor,
        positions: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
        retrive_next_sibling: torch.Tensor, topk: int, depth: int, draft_token_num: int, tree_mask_mode: int) -> None:
    """Candidates that were selected -> attention mask, positions and links of the verify tree.

    parent_list      int64 [B, topk*(depth-1)+1]; selected_index int64 [B, N-1], N = draft_token_num <= 1024
    verified_seq_len int64 [B]
    tree_mask        (out) mode 0: bool, N*sum(len) + B*N*N, request after request, rows of len + N columns, of which the last N
                     are written (the caller fills True); 1: bool [B, N, N]; 2: bits in 1, 2 or 4 bytes per row for N <= 8, 16, 32;
                     3 (not in SGLang): bits in 8 bytes, N <= 64
    positions        int64 [B*N] (out); retrive_index, retrive_next_token, retrive_next_sibling int64 [B, N] (out, every entry)
    A node whose parent was not selected sees itself and the root and no link leads to it. Errors: RuntimeError.
    Cost: N*N bytes and 40 per node, one launch. Graph-safe. Source: sglang-kernel's op of this name.
    """
    _ops.require_kernel("sgl_build_tree_kernel_efficient", parent_list.device)
    _ops.get("sgl_build_tree_kernel_efficient")(
        parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
        retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode)


def reconstruct_indices_from_tree_mask(
        tree_mask: torch.Tensor, verified_seq_len: torch.Tensor, positions: torch.Tensor, retrive_index: torch.Tensor,
        retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor, batch_size: int, draft_token_num: int) -> None:
    """Ancestor masks (bool [B*N*N], ones at ancestors and self, parents before children) -> positions int64 [B*N] and links
    int64 [B, N] (all written). verified_seq_len int64 [B]. Errors: RuntimeError. Cost: N*N bytes, one launch. Graph-safe.
    Source: sglang-kernel's op of this name.
    """
    _ops.require_kernel("sgl_reconstruct_indices_from_tree_mask", verified_seq_len.device)
    _ops.get("sgl_reconstruct_indices_from_tree_mask")(
        tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch_size,
        draft_token_num)


# ---- replacing sgl_kernel's functions ------------------------------------------------------------------------------------

REPLACED = (verify_tree_greedy, tree_speculative_sampling_target_only, build_tree_kernel_efficient,
            reconstruct_indices_from_tree_mask)
_originals: dict = {}  # (module name, attribute) -> the function that was there


def _same_arguments(theirs, ours) -> bool:
    """Whether a call written for `theirs` means the same for `ours`: the same names first, and no more than ours has."""
    try:
        wanted, have = list(inspect.signature(theirs).parameters), list(inspect.signature(ours).parameters)
    except (TypeError, ValueError):
        return False
    return have[:len(wanted)] == wanted


def install(dry_run: bool = False) -> list:
    """Puts fastverify's functions in place of sgl_kernel's; returns a line for each function and what was done.

    A module that did `from sgl_kernel import verify_tree_greedy` before gets the new function too. A function whose arguments
    differ from the tested ones is left alone. Calling it twice changes nothing. dry_run: only says what it would do.
    Raises RuntimeError where sgl_kernel cannot be imported.
    """
    try:
        import sgl_kernel  # noqa: F401
    except ImportError as error:
        raise RuntimeError("install: sgl_kernel must be importable; got none in this environment. "
                           "Fix: pip install sglang-kernel, or call the functions of this module directly.") from error
    lines = []
    for ours in REPLACED:
        name = ours.__name__
        theirs = getattr(sgl_kernel, name, None)
        if theirs is ours:
            lines.append(f"{name}: already fastverify's")
            continue
        if theirs is None or not _same_arguments(theirs, ours):
            lines.append(f"{name}: left alone ({'not in this sgl_kernel' if theirs is None else 'its arguments are others than tested'})")
            continue
        holders = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is theirs]
        if not dry_run:
            for module in holders:
                _originals[module.__name__, name] = theirs
                setattr(module, name, ours)
        lines.append(f"{name}: {'would be replaced' if dry_run else 'replaced'} in {', '.join(sorted(m.__name__ for m in holders))}")
    return lines


def uninstall() -> None:
    """Puts back what install() replaced."""
    while _originals:
        (module, name), theirs = _originals.popitem()
        if module in sys.modules:
            setattr(sys.modules[module], name, theirs)
