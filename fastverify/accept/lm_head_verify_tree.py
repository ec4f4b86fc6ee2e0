"""lm_head_verify_tree: hidden states x LM head -> accepted path and emitted tokens, without logits in memory."""

from typing import Optional

import torch

from .. import _ops
from .rule import Rule
from .verify_tree import Sampling, Verified, verify_tree_workspace_bytes

_op = None


def lm_head_verify_tree_workspace_bytes(rows: int, vocab_size: int, sms: int) -> tuple:
    """(bytes, bytes that must be zero at first, offset of the logits): csrc/algo/head_plan.h, mirrored."""
    align = lambda n: -(-n // 256) * 256  # noqa: E731
    tile = next((n for n in (8, 16, 32) if rows <= n), 64)
    chunks = -(-rows // tile)
    keys = align(verify_tree_workspace_bytes())
    zeroed = align(align(align(keys + 8 * rows) + 4 * rows) + 4 * chunks * -(-vocab_size // 128))
    logits = align(zeroed + 2 * 4 * tile * (128 if tile <= 32 else 192) * max(2 * sms, chunks))
    return align(logits + 4 * rows * (-(-vocab_size // 4) * 4)), zeroed, logits


def lm_head_verify_tree_workspace(rows: int, vocab_size: int, device: "torch.device | str") -> torch.Tensor:
    """uint8 workspace of lm_head_verify_tree for at most `rows` node rows on a CUDA device. Make it once; every call
    leaves it ready for the next one. It has room for float32 logits [rows, vocab_size]: those of requests with filters."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    size, zeroed, _ = lm_head_verify_tree_workspace_bytes(rows, vocab_size, sms)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    workspace[:zeroed].zero_()
    return workspace


def lm_head_verify_tree_pays(rows: int, vocab_size: int, filters: bool = False) -> bool:
    """True where the CUDA op was measured to take at most 2 % longer than GEMM + verify_tree, so that the logits it saves (rows x
    vocab_size x 2 bytes written, read and kept) are the reason to choose it: without filters and logprobs up to 32 node rows
    with a large vocabulary. H200, 4096 x 128256 and 7168 x 20480, 8 to 64 rows (docs/performance.md)."""
    return not filters and rows <= 32 and vocab_size >= 65536


def workspace_logits(workspace: torch.Tensor, rows: int, vocab_size: int, sms: int) -> torch.Tensor:
    """float32 [rows, vocab_size] view: the logits that the last call with filters or logprobs has written (for tests)."""
    offset, stride = lm_head_verify_tree_workspace_bytes(rows, vocab_size, sms)[2], -(-vocab_size // 4) * 4
    return workspace[offset:offset + 4 * rows * stride].view(torch.float32).view(rows, stride)[:, :vocab_size]


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
        workspace  CUDA only: lm_head_verify_tree_workspace(...), else one is made per call
    Products accumulate in float32 and are not rounded again. Without filters and logprobs each row leaves the product as one
    64-bit key and no logit reaches memory. A request with filters, and every request under logprobs, has its rows' logits in
    the workspace (CPU: one visited row at a time in scratch). Logits differ from another GEMM's in rounding, so tokens are
    those of verify_tree wherever the margin exceeds it; on one device, shape and build they are the same in every run.
    Tensor cores (CUDA): both operands bf16 or both fp16, H % 8 == 0, rows 16-byte aligned; everything else runs, slowly.
    Cost: CUDA reads the weight once per 64 node rows, 2 launches; CPU once, or per visited row with filters or logprobs.
    Graph-safe: yes. Inference only.
    Errors: RuntimeError "lm_head_verify_tree: argument must be ...".
    """
    global _op
    if _op is None:
        _op = _ops.get("lm_head_verify_tree")
    if hidden.device.type != "cpu":
        _ops.require_kernel("lm_head_verify_tree", hidden.device)
        if workspace is None:
            workspace = lm_head_verify_tree_workspace(hidden.shape[0], vocab_size or weight.shape[0], hidden.device)
    if out is None:
        out = Verified.empty(cu_nodes.numel() - 1, min(max_path or max(1, hidden.shape[0]), 1024), hidden.device, logprobs)
    _op(hidden, weight, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, sampling.temperature,
        sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, bias, bitmask, penalties, counts, out.out_tokens,
        out.num_tokens_out, out.path, out.next_root, out.flags, out.logprobs, workspace,
        weight.shape[0] if vocab_size is None else vocab_size, int(rule))
    return out
