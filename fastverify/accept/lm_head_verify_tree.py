"""lm_head_verify_tree: hidden states x LM head -> accepted path and emitted tokens, without logits in memory."""

from typing import Optional

import torch

from .. import _ops
from .rule import Rule
from .verify_tree import Sampling, Verified

_op = None


def head_workspace_bytes(rows: int, vocab_size: int, sms: int) -> tuple:
    """(bytes, of which zeroed) of the CUDA op's workspace; csrc/algo/head_plan.h says what lies where."""
    align = lambda n: -(-n // 256) * 256  # noqa: E731
    tile = next((n for n in (8, 16, 32) if rows <= n), 64)
    chunks = -(-rows // tile)
    zeroed = align(align(align(8 * rows) + 4 * rows) + 4 * chunks * -(-vocab_size // 128))
    logits = align(zeroed + 2 * 4 * tile * 128 * max(2 * sms, chunks))
    return align(logits + 4 * rows * (-(-vocab_size // 4) * 4)), zeroed


def head_workspace(rows: int, vocab_size: int, device: "torch.device | str") -> torch.Tensor:
    """uint8 workspace of lm_head_verify_tree for at most `rows` node rows on a CUDA device.

    It holds f32 logits [rows, vocab_size] for requests with filters; without filters they are never touched. Make it once:
    every call leaves it ready for the next one.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    size, zeroed = head_workspace_bytes(rows, vocab_size, sms)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    workspace[:zeroed].zero_()
    return workspace


def lm_head_verify_tree(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor,
                        cu_nodes: torch.Tensor, prefix_len: torch.Tensor, active: torch.Tensor, remaining: torch.Tensor,
                        sampling: Sampling, *, max_path: Optional[int] = None, stop_ids: Optional[torch.Tensor] = None,
                        bias: Optional[torch.Tensor] = None, bitmask: Optional[torch.Tensor] = None,
                        penalties: Optional[torch.Tensor] = None, counts: Optional[torch.Tensor] = None,
                        vocab_size: Optional[int] = None, rule: Rule = Rule.SAMPLE_MATCH, logprobs: bool = False,
                        out: Optional[Verified] = None, workspace: Optional[torch.Tensor] = None) -> Verified:
    """verify_tree with the LM-head product inside; everything but the first two arguments is verify_tree's.

    Args:
        hidden  float32|float16|bfloat16 [R, H], after the final norm, row stride free
        weight  float32|float16|bfloat16 [>= vocab_size, H], row stride free
    Products accumulate in float32. Without filters and logprobs each vocabulary tile leaves one 64-bit key per row and no
    logit reaches memory; with them the visited rows are computed one at a time in scratch.
    Logits differ from another GEMM's in rounding, so tokens are those of verify_tree wherever the margin exceeds it.
    Cost: weight read once (tiles) or once per visited row (filters, logprobs). Graph-safe: yes. Inference only.
    Errors: RuntimeError "lm_head_verify_tree: argument must be ...".
    """
    global _op
    if _op is None:
        _op = _ops.get("lm_head_verify_tree")
    if hidden.device.type != "cpu":
        _ops.require_kernel("lm_head_verify_tree", hidden.device)
        if workspace is None:
            workspace = head_workspace(hidden.shape[0], vocab_size or weight.shape[0], hidden.device)
    if out is None:
        out = Verified.empty(cu_nodes.numel() - 1, min(max_path or hidden.shape[0], 1024), hidden.device, logprobs)
    _op(hidden, weight, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, sampling.temperature,
        sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, bias, bitmask, penalties, counts, out.out_tokens,
        out.num_tokens_out, out.path, out.next_root, out.flags, out.logprobs, workspace,
        weight.shape[0] if vocab_size is None else vocab_size, int(rule))
    return out
