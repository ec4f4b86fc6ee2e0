"""One decode cycle on device state: draft -> tree -> target forward -> accept -> compact -> next inputs -> extend.

Nothing in it is read on the host and every buffer is made beforehand, so that a cycle can be captured as one CUDA graph; on
CPU tensors, or uncaptured, the same lines run eagerly. The host decides which shape runs and reads tokens from the ring
(graph_loop.py). decode.py is the same algorithm with the host in the middle of it.
"""

from dataclasses import dataclass
from typing import Callable, Optional

import torch

from ..accept.verify_tree import Sampling, verify_tree
from ..kv.compact_kv import compact_kv
from ..kv.next_inputs import Pairs, next_inputs
from ..models.batch import ForwardBatch, KVCache
from ..plan import VerifyPlan
from ..tree.build_tree import build_tree
from ..tree.prepare_tree import Prepared, prepare_tree
from . import grow
from .requests import Requests
from .ring import Ring
from .shapes import Shape
from .sharded import accept_sharded

PAIRS = 128  # true pairs of plain cycles that a request collects before the draft runs over them
STOP_IDS = 16


@dataclass
class LoopState:
    """Device state of `batch` slots; a slot holds one request, or none (active 0).

    requests     Requests; in an EAGLE-3 loop draft_len + pairs.count = prefix_len between cycles
    last_hidden  [B, H] h2 of each request's last true pair, by slot
    pair_aux     [B*P + 1, A] features of the pairs that the draft has not seen; pair_tokens, pair_count: their tokens
    """

    requests: Requests
    cache: KVCache
    draft_cache: Optional[KVCache]
    last_hidden: Optional[torch.Tensor]
    pair_aux: Optional[torch.Tensor]
    pair_tokens: Optional[torch.Tensor]
    pair_count: Optional[torch.Tensor]
    ring: Ring

    @classmethod
    def make(cls, target, draft, batch: int, num_pages: int, page_size: int, columns: int, max_path: int) -> "LoopState":
        """`columns`: page-table entries per request; draft: Eagle3Draft or None."""
        device = target.device
        z = lambda: torch.zeros(batch, dtype=torch.int32, device=device)  # noqa: E731
        stops = torch.full((STOP_IDS,), -1, dtype=torch.int64, device=device)
        requests = Requests(z(), z(), z(), z(), z(), torch.zeros(batch, columns, dtype=torch.int32, device=device),
                            Sampling.make(batch, device), stops)
        pairs = (None,) * 4
        if draft is not None:
            width = len(draft.config.aux_layers) * target.config.hidden_size
            pairs = (torch.zeros(batch, draft.config.hidden_size, dtype=draft.dtype, device=device),
                     torch.zeros(batch * PAIRS + 1, width, dtype=target.dtype, device=device),
                     torch.zeros(batch * PAIRS + 1, dtype=torch.int32, device=device), z())
        return cls(requests, target.make_cache(num_pages, page_size), draft.make_cache(num_pages, page_size) if draft else None,
                   *pairs, Ring(batch, max_path, device, slots=16 + batch))  # a record per admitted request, and cycles

    def tensors(self) -> list:
        """Everything a cycle changes, the caches aside."""
        r = self.requests
        own = [r.root, r.prefix_len, r.draft_len, r.active, r.remaining, r.page_table, r.counts, self.last_hidden, self.pair_count,
               self.pair_aux, self.pair_tokens, self.ring.sequence, *r.sampling]
        return [t for t in own if t is not None]


class Cycle:
    """The cycle of one shape over the first `batch` slots. `processors`: penalties and bias are applied.

    hook  hook(logits [R, V], plan) may change the logits before acceptance (imposed acceptance of timing runs)
    coupled sampled requests are drafted with the noise of their own tokens (docs/algorithm.md)
    exact the target's logits of a node do not depend on the tree and the batch around it: see docs/decode_loop.md
    """

    def __init__(self, target, draft, state: LoopState, shape: Shape, batch: int, *, processors: bool = False,
                 hook: Optional[Callable] = None, exact: bool = False, coupled: bool = True) -> None:
        self.target, self.draft, self.shape, self.state, self.hook, self.exact = target, draft, shape, state, hook, exact
        self.coupled = coupled
        self.aux_layers = tuple(draft.config.aux_layers) if draft is not None else ()
        grown = shape.speculative
        self.plan = VerifyPlan(batch, shape.nodes, min(shape.nodes, shape.levels + 1) if grown else 1,
                               len(self.aux_layers) * target.config.hidden_size if grown else 0, target.dtype, target.device,
                               draft=draft if grown else None, k=shape.k, levels=shape.levels)
        self.batch, self.page_size = batch, state.cache.page_size
        self.req = state.requests.first(batch, processors)
        self.pairs = None
        if draft is not None and not grown:
            slots = torch.full((batch,), batch * PAIRS, dtype=torch.int64, device=target.device)
            self.pairs = Pairs(state.pair_tokens[:batch * PAIRS + 1], state.pair_count[:batch], slots)

    @torch.inference_mode()
    def run(self) -> None:
        """One cycle; the record of it goes to the ring."""
        logits, aux = self.verify_inputs()
        self.accept(logits, aux)

    @torch.inference_mode()
    def verify_inputs(self) -> tuple:
        """Draft, tree and target forward: (logits [R, V], aux). The tree is plan.tree."""
        req, plan = self.req, self.plan
        if self.shape.speculative:
            grow.draft_tree(self.draft, self.state.draft_cache, self._ranked(), req.root, req.prefix_len, req.active,
                            req.page_table, plan.grow, self.shape.levels, self.shape.nodes, self.target.config.vocab_size,
                            req.coupling() if self.coupled else None)
        else:
            build_tree(*plan.no_pool, req.root, req.prefix_len, req.active, 1, self.target.config.vocab_size, plan.tree)
        return target_forward(self.target, self.state.cache, plan, req, self.page_size, self.aux_layers, self.exact)

    @torch.inference_mode()
    def accept(self, logits: torch.Tensor, aux: Optional[torch.Tensor], bitmask: Optional[torch.Tensor] = None) -> None:
        """Acceptance, compaction, the next cycle's inputs and the draft's extend."""
        req, plan, grown = self.req, self.plan, self.shape.speculative
        if self.hook is not None:
            self.hook(logits, plan)
        accept(self.target, logits, plan, req, bitmask)
        if grown:
            compact_kv(self.state.cache.k, self.state.cache.v, plan.out.path, plan.out.num_tokens_out, req.prefix_len,
                       req.page_table, cu_nodes=plan.tree.cu_nodes, aux=aux, aux_out=plan.aux_out, cu_out=plan.cu_out)
        next_inputs(plan.out, plan.tree, req.active, req.prefix_len, req.root, next_tokens=plan.next_tokens if grown else None,
                    pairs=self.pairs, ring=self.state.ring)
        if grown:
            self._extend()
        elif self.pairs is not None:
            self.state.pair_aux[:self.batch * PAIRS + 1].index_copy_(0, self.pairs.slots, aux)

    def _ranked(self) -> torch.Tensor:
        """last_hidden with the active requests first, as grow_tree wants its rows."""
        hidden = self.state.last_hidden[:self.batch]
        if self.batch == 1:
            return hidden
        place = torch.searchsorted(self.req.active.cumsum(0), self.plan.ranks)
        return hidden.index_select(0, place.clamp_(max=self.batch - 1))

    def _extend(self) -> None:
        """Emitted tokens and the target's features of their rows are the draft's new true pairs."""
        plan, req = self.plan, self.req
        h2 = extend(self.draft, self.state.draft_cache, plan.next_tokens[:-1], plan.aux_out, plan.cu_out, req, plan.extend,
                    self.page_size)
        last = (plan.cu_out[1:] - 1).clamp_(min=0)  # rows of inactive requests mean nothing
        torch.index_select(h2, 0, last, out=self.state.last_hidden[:self.batch])
        req.draft_len.copy_(req.prefix_len)


class CatchUp:
    """Runs the draft over the pairs that plain cycles have collected, so that the next cycle may speculate."""

    def __init__(self, draft, state: LoopState, batch: int) -> None:
        rows, device = batch * PAIRS, draft.device
        self.draft, self.state, self.batch, self.req = draft, state, batch, state.requests.first(batch, False)
        i32 = dict(dtype=torch.int32, device=device)
        self.prepared = Prepared(positions=torch.zeros(rows, **i32), schedule=torch.zeros(batch + 3, **i32),
                                 slots=torch.full((rows,), -1, dtype=torch.int64, device=device))
        self.column = torch.arange(PAIRS, **i32)

    @torch.inference_mode()
    def run(self) -> None:
        s, rows = self.state, self.batch * PAIRS
        count = s.pair_count[:self.batch]
        cu = torch.zeros(self.batch + 1, dtype=torch.int32, device=count.device)
        cu[1:] = count.cumsum(0)
        place = torch.where(self.column < count[:, None], cu[:-1, None] + self.column, rows).flatten().long()
        aux = torch.zeros_like(s.pair_aux[:rows + 1]).index_copy_(0, place, s.pair_aux[:rows])
        tokens = torch.zeros_like(s.pair_tokens[:rows + 1]).index_copy_(0, place, s.pair_tokens[:rows])
        h2 = extend(self.draft, s.draft_cache, tokens[:-1], aux[:-1], cu, self.req, self.prepared, s.draft_cache.page_size)
        new = h2.index_select(0, (cu[1:] - 1).clamp_(min=0))
        torch.where(count[:, None] > 0, new, s.last_hidden[:self.batch], out=s.last_hidden[:self.batch])
        self.req.draft_len += count
        count.zero_()


def target_forward(target, cache: KVCache, plan: VerifyPlan, req: Requests, page_size: int, aux_layers: tuple,
                   exact: bool = False) -> tuple:
    """The target over plan.tree: (logits [R, V], aux or None)."""
    t = plan.tree
    prepare_tree(t.parents, t.cu_nodes, req.prefix_len, req.page_table, page_size, plan.prepared)
    hidden, aux = target.forward(
        ForwardBatch(t.tokens, t.positions, plan.prepared.slots, t.cu_nodes, req.prefix_len, req.page_table, t.mask,
                     schedule=plan.prepared.schedule, exact=exact), cache, aux_layers)
    return target.logits(hidden, exact) if exact else target.logits(hidden), aux


def accept(target, logits: torch.Tensor, plan: VerifyPlan, req: Requests, bitmask: Optional[torch.Tensor] = None) -> None:
    """verify_tree of plan.tree into plan.out (over the ranks of a split target); req.remaining and req.counts change."""
    t = plan.tree
    if target.comm is not None:
        accept_sharded(target, logits, t.tokens, t.parents, t.cu_nodes, req, plan.out, filters=target.filters, bitmask=bitmask)
        return
    verify_tree(logits, t.tokens, t.parents, t.cu_nodes, req.prefix_len, req.active, req.remaining, req.sampling,
                stop_ids=req.stop_ids, bias=req.bias, bitmask=bitmask, penalties=req.penalties, counts=req.counts,
                vocab_size=target.config.vocab_size, out=plan.out, workspace=plan.verify_workspace)


def extend(draft, cache: KVCache, tokens: torch.Tensor, aux: torch.Tensor, cu: torch.Tensor, req: Requests, prepared: Prepared,
           page_size: int) -> torch.Tensor:
    """True pairs (flat by cu) behind draft_len through the draft: h2 [R, H]. draft_len is left alone."""
    prepare_tree(None, cu, req.draft_len, req.page_table, page_size, prepared)
    batch = ForwardBatch(tokens, prepared.positions, prepared.slots, cu, req.draft_len, req.page_table, schedule=prepared.schedule)
    return draft.forward(batch, draft.fuse(aux), cache)
