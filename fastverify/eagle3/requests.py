"""Device state of a batch of requests, and the drafts a plain round leaves to catch up on."""

from dataclasses import dataclass
from typing import Optional

import torch

from ..accept.verify_tree import Sampling
from ..tree import Coupling


@dataclass
class Requests:
    """B requests of one batch; device tensors, changed by the step itself.

    Invariant before every verify: prefix_len = tokens so far - 1; draft_len <= prefix_len true pairs are in the draft cache.
    Pages are reserved for prompt + max_new + the largest tree, so page_table never changes.
    """

    root: torch.Tensor        # int32 [B] last emitted token, not yet in the KV cache
    prefix_len: torch.Tensor  # int32 [B] committed tokens in the target's cache
    draft_len: torch.Tensor   # int32 [B] pairs in the draft's cache
    active: torch.Tensor      # int32 [B]
    remaining: torch.Tensor   # int32 [B]
    page_table: torch.Tensor  # int32 [B, P]
    sampling: Sampling
    stop_ids: Optional[torch.Tensor] = None   # int64 [S]
    bias: Optional[torch.Tensor] = None       # float32 [B, V]
    penalties: Optional[torch.Tensor] = None  # float32 [B, 3]
    counts: Optional[torch.Tensor] = None     # int32 [B, V]

    @classmethod
    def make(cls, prompt_lens: list, max_new_tokens: int, extra_columns: int, page_size: int, sampling: Sampling,
             device="cpu", **kw) -> "Requests":
        batch = len(prompt_lens)
        pages = -(-(max(prompt_lens) + max_new_tokens + extra_columns) // page_size)
        z = lambda: torch.zeros(batch, dtype=torch.int32, device=device)  # noqa: E731
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        return cls(z(), z(), z(), z() + 1, z() + max_new_tokens, table, sampling, **kw)

    def coupling(self) -> Coupling:
        """The noise of these requests' sampled tokens, for drafts that share it."""
        return Coupling(self.sampling.temperature, self.sampling.seed, self.prefix_len, self.active)

    def row(self, b: int) -> "Requests":
        """Views of request b alone."""
        cut = lambda t: None if t is None else t[b:b + 1]  # noqa: E731
        return Requests(cut(self.root), cut(self.prefix_len), cut(self.draft_len), cut(self.active), cut(self.remaining),
                        cut(self.page_table), Sampling(*(cut(t) for t in self.sampling)), self.stop_ids, cut(self.bias),
                        cut(self.penalties), cut(self.counts))

    def first(self, n: int, processors: bool = True) -> "Requests":
        """Views of the first n requests; without penalties, counts and bias unless `processors`."""
        cut = lambda t: None if t is None else t[:n]  # noqa: E731
        extra = (cut(self.bias), cut(self.penalties), cut(self.counts)) if processors else ()
        return Requests(cut(self.root), cut(self.prefix_len), cut(self.draft_len), cut(self.active), cut(self.remaining),
                        cut(self.page_table), Sampling(*(cut(t) for t in self.sampling)), self.stop_ids, *extra)


class Pending:
    """True pairs that plain rounds produced and the draft has not seen; one flush catches up (keeps the draft warm)."""

    def __init__(self) -> None:
        self.rounds: list = []  # (aux [B, A], tokens int32 [B], valid int32 [B]) of each plain round

    def add(self, aux: torch.Tensor, tokens: torch.Tensor, num: torch.Tensor, cu: torch.Tensor) -> None:
        """Rows flat by cu, at most one per request (a plain round)."""
        row = cu[:-1].long().clamp(max=aux.shape[0] - 1)
        self.rounds.append((aux[row], tokens[row], num.clamp(max=1)))

    def flush(self) -> tuple:
        """(aux [N, A], tokens [N], cu int32 [B+1]) of all pending pairs by request, in order; N = rounds * B (padded)."""
        aux = torch.stack([r[0] for r in self.rounds], 1)        # [B, T, A]
        tokens = torch.stack([r[1] for r in self.rounds], 1)
        valid = torch.stack([r[2] for r in self.rounds], 1)
        batch, steps, width = aux.shape
        counts = valid.sum(1)
        cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        place = torch.where(valid > 0, cu[:-1, None] + valid.cumsum(1).int() - 1, batch * steps).flatten().long()
        flat_aux = aux.new_zeros(batch * steps + 1, width)
        flat_aux[place] = aux.reshape(-1, width)
        flat_tokens = tokens.new_zeros(batch * steps + 1)
        flat_tokens[place] = tokens.flatten()
        self.rounds.clear()
        return flat_aux[:-1], flat_tokens[:-1], cu
