"""verify_tree: logits -> accepted path and emitted tokens, every sampling processor fused, one launch."""

from typing import NamedTuple, Optional

import torch

from .. import _ops
from .rule import Rule


class Sampling(NamedTuple):
    """Per-request sampling parameters, device tensors of length B.

    temperature float32 (0 = greedy), top_k int32 (<= 0: off), top_p float32 (1: off), min_p float32 (0: off),
    seed int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor

    @classmethod
    def make(cls, batch: int, device="cpu", temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
             min_p: float = 0.0, seed: int = 0) -> "Sampling":
        """The same parameters for every request; request b gets seed + b."""
        full = lambda v, dtype: torch.full((batch,), v, dtype=dtype, device=device)  # noqa: E731
        return cls(full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float32),
                   full(min_p, torch.float32), torch.arange(batch, dtype=torch.int64, device=device) + seed)


class Verified(NamedTuple):
    """Outputs of one verify.

    out_tokens      int64 [B, D]  emitted tokens, clipped by stop ids and budget, then -1
    num_tokens_out  int32 [B]     how many of them
    path            int32 [B, D]  accepted nodes, root first, NOT clipped, then -1: num_drafts_accepted + 1 entries
    next_root       int64 [B]     last emitted token (untouched where nothing was emitted)
    flags           int32 [B]     fastverify.Flag bits
    logprobs        float32 [B, D] or None: of the raw logits, for the emitted tokens
    """

    out_tokens: torch.Tensor
    num_tokens_out: torch.Tensor
    path: torch.Tensor
    next_root: torch.Tensor
    flags: torch.Tensor
    logprobs: Optional[torch.Tensor] = None

    @classmethod
    def empty(cls, batch: int, max_path: int, device="cpu", logprobs: bool = False) -> "Verified":
        i32 = lambda *s: torch.full(s, -1, dtype=torch.int32, device=device)  # noqa: E731
        return cls(torch.full((batch, max_path), -1, dtype=torch.int64, device=device), i32(batch), i32(batch, max_path),
                   torch.full((batch,), -1, dtype=torch.int64, device=device), i32(batch),
                   torch.zeros(batch, max_path, dtype=torch.float32, device=device) if logprobs else None)


_op = None
_BLOCKS = 256  # csrc/algo/verify_plan.h kTeamBlocks


def verify_tree_workspace_bytes() -> int:
    """Bytes of verify_tree's workspace, whatever the batch, the trees, the vocabulary and the device."""
    return 128 + 32 * 28 * 2 * _BLOCKS + 16 * 16 * _BLOCKS + 16 * 4 * _BLOCKS * 128 + 8 * 3 * 1024 * _BLOCKS // 2


def verify_tree_workspace(device: "torch.device | str" = "cuda") -> torch.Tensor:
    """Workspace for verify_tree: uint8, zero. Made once and used by one stream; calls of any shape may share it."""
    return torch.zeros(verify_tree_workspace_bytes(), dtype=torch.uint8, device=device)


def verify_tree(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor,
                prefix_len: torch.Tensor, active: torch.Tensor, remaining: torch.Tensor, sampling: Sampling, *,
                max_path: Optional[int] = None, stop_ids: Optional[torch.Tensor] = None,
                bias: Optional[torch.Tensor] = None, bitmask: Optional[torch.Tensor] = None,
                penalties: Optional[torch.Tensor] = None, counts: Optional[torch.Tensor] = None,
                vocab_size: Optional[int] = None, rule: Rule = Rule.SAMPLE_MATCH, logprobs: bool = False,
                out: Optional[Verified] = None, workspace: Optional[torch.Tensor] = None) -> Verified:
    """Walks every request's drafted tree with the target's own tokens; returns what is emitted.

    At each visited node the target's token is drawn with Gumbel noise keyed by (seed, absolute position, id), and the walk
    goes on to the child that carries it: the emitted text is what plain decoding with that seed emits, for any tree
    (lossless: docs/algorithm.md). The token at absolute position t = prefix_len + depth + 1 uses the noise of t.

    Args (all on one device; nothing is read on the host):
        logits      float32|float16|bfloat16 [R, >= vocab_size], row stride free, one row per node
        tokens      int32|int64 [R]; parents int32 [R] (-1 for node 0 of each request, else an earlier node)
        cu_nodes    int32 [B+1]; prefix_len int32 [B]; active int32 [B] (0: the request is left alone)
        remaining   int32 [B] (in/out): tokens each request may still emit
        sampling    Sampling of [B]
        stop_ids    int32|int64 [S]; bias float32 [B, vocab]; bitmask int32 [R, ceil(vocab/32)], bit 1 = allowed
        penalties   float32 [B, 3] repetition, frequency, presence; counts int32 [B, vocab] (in/out) of emitted tokens,
                    the root included; drafted ancestors of a node are counted on top of it
        out         a Verified to write into (else allocated with max_path columns, default number of rows, at least 1)
        workspace   verify_tree_workspace(), one per stream (GPU only): through it the blocks that share a request agree.
                    Made per call if missing; the op itself, called without one, works with one block per request
    Order of processors: penalties, bias, bitmask, temperature, top-k, top-p, min-p; ties at a cut are kept.
    A malformed tree, an id outside the vocabulary, NaN rows: flags, with a defined result; never a hang.
    Errors: RuntimeError "verify_tree: argument must be ...". Cost: logits of the accepted path read once (GPU: of all rows
    where they are few and a workspace is given; csrc/algo/verify_plan.h), one launch.
    Graph-safe: yes. Inference only.
    Source: Gumbel-max (Maddison et al. 2014); rule and proof: docs/algorithm.md.
    """
    global _op
    if _op is None:
        _op = _ops.get("verify_tree")
    if logits.device.type != "cpu":
        _ops.require_kernel("verify_tree", logits.device)
    if out is None:
        out = Verified.empty(cu_nodes.numel() - 1, min(max_path or max(1, logits.shape[0]), 1024), logits.device, logprobs)
    if workspace is None and logits.device.type == "cuda":
        workspace = verify_tree_workspace(logits.device)
    _op(logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, sampling.temperature, sampling.top_k,
        sampling.top_p, sampling.min_p, sampling.seed, bias, bitmask, penalties, counts, out.out_tokens,
        out.num_tokens_out, out.path, out.next_root, out.flags, out.logprobs, workspace,
        logits.shape[1] if vocab_size is None else vocab_size, int(rule))
    return out
