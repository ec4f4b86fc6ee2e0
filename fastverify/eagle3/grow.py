"""Drafting with the EAGLE-3 network: extend over true pairs, grow a tree level by level, choose the verify tree.

One phase for a batch of requests, all on the device (no value is read on the host, so the calls can be captured):

    extend       the true pairs behind the draft's cache -> last_hidden [B, H]: h2 of every active request's last pair
    grow_levels  level 0: top k of last_hidden. Level l >= 1: the k beam nodes of level l-1 run as k rows of the forest, at
                 columns (l-1)*k .. l*k-1 of the draft's cache, each seeing the prefix and exactly its ancestors' columns
    draft_tree   grow_levels, then the best num_nodes - 1 pool entries under the root

`levels` draft forwards in all, the extend included, give a tree of depth <= levels. Drafted K/V lie behind prefix_len and
are overwritten by the next extend: after acceptance the true pairs take their place. A chain is k = 1.
"""

from typing import NamedTuple, Optional

import torch

from ..models.batch import ForwardBatch, KVCache
from ..tree import Coupling, DraftState, Prepared, Tree, build_tree, draft_topk, grow_tree, prepare_tree
from .draft import Eagle3Draft


FADE = 0.92  # of a coupled row's sharpness, per level: what the draft says of later tokens is worth less (docs/algorithm.md, "Scores")


class GrowBuffers(NamedTuple):
    """Everything a draft phase writes, allocated once; state and tree hold the results."""

    state: DraftState
    prepared: Prepared     # slots int64 [B*k] and schedule int32 [B+3] of the level that runs
    first: tuple           # draft_topk's (values float32, tokens int32) [B, k] of level 0
    beam: tuple            # the same [B*k, k] of later levels
    tree: Tree

    @classmethod
    def empty(cls, draft: Eagle3Draft, batch: int, k: int, levels: int, num_nodes: int,
              token_dtype: torch.dtype = torch.int32) -> "GrowBuffers":
        """Buffers for `batch` requests, beams of k <= Vd nodes, `levels` levels and verify trees of num_nodes nodes."""
        device = draft.device

        def topk(rows: int) -> tuple:
            return tuple(torch.zeros(rows, k, dtype=t, device=device) for t in (torch.float32, torch.int32))

        return cls(DraftState.empty(batch, k, levels, draft.config.hidden_size, draft.dtype, device),
                   Prepared(slots=torch.zeros(batch * k, dtype=torch.int64, device=device),
                            schedule=torch.zeros(batch + 3, dtype=torch.int32, device=device)),
                   topk(batch), topk(batch * k), Tree.empty(batch, num_nodes, token_dtype, device))


def extend(draft: Eagle3Draft, cache: KVCache, batch: ForwardBatch, aux: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Runs the true pairs of every active request and writes their K and V; batch.mask must be None (a chain).

    batch   tokens: token k+1 of every pair k; rows [cu_nodes[b], cu_nodes[b+1]) continue request b's cache at prefix_len
    aux     [R, A*Ht]: the target's features of position k
    active  int32 [B]
    Returns last_hidden [B, H]: row r is h2 of the last pair of the r-th active request; rows beyond are unspecified.
    """
    h2 = draft.forward(batch, draft.fuse(aux), cache)
    active_first = torch.argsort(active, descending=True, stable=True)
    last = (batch.cu_nodes[1:] - 1).clamp(min=0)
    return h2.index_select(0, last[active_first])


def grow_levels(draft: Eagle3Draft, cache: KVCache, last_hidden: torch.Tensor, prefix_len: torch.Tensor, active: torch.Tensor,
                page_table: torch.Tensor, buffers: GrowBuffers, levels: int, coupling: Optional[Coupling] = None) -> DraftState:
    """Fills the pool of `buffers.state` with `levels` levels of candidates; levels - 1 draft forwards.

    last_hidden  [B, H] of extend
    prefix_len   int32 [B]: pairs in the draft's cache (also the target's committed tokens, which position the verify tree)
    page_table   int32 [B, P]: must reach prefix_len + (levels - 1) * k tokens
    coupling     children are ranked with the noise that the target's tokens will be drawn with (sampled requests); its sharpness
                 is that of level 0, and FADE times as much with every level
    """
    state, k = buffers.state, buffers.first[0].size(1)
    draft_topk(draft.logits(last_hidden), d2t=draft.d2t, values=buffers.first[0], tokens=buffers.first[1], coupling=coupling)
    grow_tree(*buffers.first, last_hidden, prefix_len, active, state, 0)
    for level in range(1, levels):
        row_base = (level - 1) * k
        prepare_tree(None, state.cu_nodes, prefix_len, page_table, cache.page_size, buffers.prepared, row_base)
        batch = ForwardBatch(state.next_tokens, state.next_positions, buffers.prepared.slots, state.cu_nodes, prefix_len,
                             page_table, state.mask, row_base, buffers.prepared.schedule)
        h2 = draft.forward(batch, state.next_hidden, cache)
        draft_topk(draft.logits(h2), d2t=draft.d2t, cu_nodes=state.cu_nodes, values=buffers.beam[0], tokens=buffers.beam[1],
                   coupling=_faded(coupling, level), level=level)
        grow_tree(*buffers.beam, h2, prefix_len, active, state, level)
    return state


def _faded(coupling: Optional[Coupling], level: int) -> Optional[Coupling]:
    return coupling and coupling._replace(sharpness=coupling.sharpness * FADE ** level)


def draft_tree(draft: Eagle3Draft, cache: KVCache, last_hidden: torch.Tensor, root_tokens: torch.Tensor,
               prefix_len: torch.Tensor, active: torch.Tensor, page_table: torch.Tensor, buffers: GrowBuffers, levels: int,
               num_nodes: int, vocab_size: int, coupling: Optional[Coupling] = None) -> Tree:
    """grow_levels, then the verify tree of the root and the num_nodes - 1 best drafted nodes. Returns buffers.tree.

    root_tokens  int32|int64 [B]: the last emitted token of each request, the token of its last pair
    vocab_size   the target's: drafted ids outside it are clamped and flagged
    """
    s = grow_levels(draft, cache, last_hidden, prefix_len, active, page_table, buffers, levels, coupling)
    return build_tree(s.pool_scores, s.pool_tokens, s.pool_parents, root_tokens, prefix_len, active, num_nodes, vocab_size,
                      buffers.tree)
