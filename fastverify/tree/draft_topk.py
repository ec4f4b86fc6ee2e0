"""draft_topk: the k best children of every draft row as log-probabilities."""

from typing import NamedTuple, Optional

import torch

from .. import _ops


class Coupling(NamedTuple):
    """What ties draft rows to the noise of verify_tree's rule sample_match; device tensors of B requests, read only.

    temperature  float32 [B] of the requests; 0, NaN or out of range: that request's rows are not coupled
    seed         int64 [B]; prefix_len int32 [B] of the target (verify_tree's); active int32 [B]
    sharpness    values are log_softmax(sharpness * score); 1 = what a draft as far from its target as the noise is wide deserves
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    prefix_len: torch.Tensor
    active: torch.Tensor
    sharpness: float = 1.0


def draft_topk(logits: torch.Tensor, k: Optional[int] = None, d2t: Optional[torch.Tensor] = None,
               cu_nodes: Optional[torch.Tensor] = None, values: Optional[torch.Tensor] = None,
               tokens: Optional[torch.Tensor] = None, coupling: Optional[Coupling] = None, level: int = 0) -> tuple:
    """Top k of log_softmax(logits) per row, descending; equal logits: lower draft id first.

    logits    float32|float16|bfloat16 [R, Vd], any row stride; NaN, +inf and -inf count as -inf
    k         1 <= k <= min(64, Vd); may be left out when `values` or `tokens` is given
    d2t       int64 [Vd] offsets: target id = draft id + d2t[draft id]; None: draft ids are target ids
    cu_nodes  int32 [B+1]: rows >= cu_nodes[B] are padding (values 0, tokens 0); None: all rows count
    values    float32 [R, k], written: x - max - log(sum of exp(x - max)) in the exact arithmetic of
              csrc/algo/numeric.h, so CPU and GPU agree bit for bit; -inf entries keep value -inf and their id
    tokens    int32 [R, k], written: ids of the target vocabulary
    coupling  x is then logit / T + the noise verify_tree adds to that target id one position behind the row, at prefix_len +
              level + 1: the draft tends to choose what the target will. R = B * m; the m rows of the r-th active request come
              r-th, rows beyond are padding. Never with another rule than sample_match (greedy requests are left alone)
    level     draft level of the rows (0: children of the root)

    Returns (values, tokens); allocates those not given. Errors: RuntimeError on a wrong shape, dtype or device.
    Cost: reads R * Vd logits once. Graph-safe when both outputs are given. Source: csrc/tree/draft_topk.cpp, .cu.
    """
    if values is None:
        if k is None and tokens is None:
            raise RuntimeError("draft_topk: k must be given where values and tokens are not; got None. Fix: pass k.")
        width = k if tokens is None else tokens.size(1)
        values = torch.empty(logits.size(0), width, dtype=torch.float32, device=logits.device)
    if tokens is None:
        tokens = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    _ops.require_kernel("draft_topk", logits.device)
    c = coupling or (None, None, None, None, 1.0)
    _ops.get("draft_topk")(logits, d2t, cu_nodes, *c[:4], values, tokens, level, c[4])
    return values, tokens
