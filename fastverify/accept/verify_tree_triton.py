"""verify_tree in Triton: every row in parallel, then one program per request walks. Tokens equal the CPU op's bit for bit.

Launches: _scan (rows x splits: processors, best key of unfiltered rows, maximum of every 64 entries), _masses (rows x splits,
works for top-p without top-k only), _filter (row: exact cuts), _walk (request), _logprobs (request x depth, when asked for).
A row belongs to the first request that claims it: where malformed cu_nodes overlap, the others emit nothing (BAD_TREE).
Scratch of R * (V / 8 + 16384) bytes or so is taken from torch's allocator; nothing is read on the host.
"""

from typing import Optional

import torch
import triton

from .. import _checks as check
from .._triton_numeric import EXACT
from .verify_filter_triton import _filter
from .verify_scan_triton import _masses, _scan
from .verify_walk_triton import _logprobs, _walk

GROUP = 64        # entries with one maximum
CANDIDATES = 2048  # of one row, kept for the exact cuts; rows with more go over their blocks again and again
FEW = 256  # candidates that are compared each with each
MARKS = 16  # of verify_scan_triton
MAX_SPLITS = 64
_OP = "verify_tree"


def check_arguments(logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k, top_p,
                    min_p, seed, bias, bitmask, penalties, counts, out_tokens, num_tokens_out, path, next_root, flags, logprobs,
                    workspace, vocab_size: int, rule: int) -> None:
    """The checks of csrc/accept/verify_tree.cpp and verify_args.cpp, in their order."""
    t, some = check.tensor, check.optional
    t(_OP, "logits", logits, check.FLOATS, (None, None), logits, rows_free=True)
    check.that(vocab_size <= logits.shape[1], _OP, f"vocab_size must be at most the row width {logits.shape[1]}; "
               f"got {vocab_size}. Fix: pass the unpadded vocabulary size.")
    rows = logits.shape[0]
    check.that(cu_nodes.dim() == 1 and cu_nodes.shape[0] >= 1, _OP, f"cu_nodes must be int32 [batch + 1]; got "
               f"{check.describe(cu_nodes)}. Fix: pass the row offsets of every request, beginning with 0.")
    batch = cu_nodes.shape[0] - 1
    t(_OP, "cu_nodes", cu_nodes, check.I32, (batch + 1,), logits)
    t(_OP, "tokens", tokens, check.IDS, (rows,), logits)
    t(_OP, "parents", parents, check.I32, (rows,), logits)
    for name, value, kinds in (("prefix_len", prefix_len, check.I32), ("active", active, check.I32),
                               ("temperature", temperature, check.F32), ("top_k", top_k, check.I32),
                               ("top_p", top_p, check.F32), ("min_p", min_p, check.F32), ("seed", seed, check.I64)):
        t(_OP, name, value, kinds, (batch,), logits)
    some(_OP, "penalties", penalties, check.F32, (batch, 3), logits)
    check.that(1 <= vocab_size <= check.MAX_VOCAB, _OP, f"vocab_size must be in [1, {check.MAX_VOCAB}]; got {vocab_size}. "
               "Fix: pass the number of ids of the target's vocabulary.")
    check.that(rule in (0, 1), _OP, f"rule must be 0 (greedy) or 1 (sample_match); got {rule}. Fix: use fastverify.Rule.")
    some(_OP, "bias", bias, check.F32, (batch, vocab_size), logits)
    some(_OP, "bitmask", bitmask, check.I32, (rows, (vocab_size + 31) // 32), logits)
    some(_OP, "counts", counts, check.I32, (batch, vocab_size), logits)
    check.that(penalties is None or counts is not None, _OP, "counts must be given with penalties; got None. Fix: pass int32 "
               "[batch, vocab] counts of the tokens emitted so far (root included).")
    t(_OP, "remaining", remaining, check.I32, (batch,), logits)
    some(_OP, "stop_ids", stop_ids, check.IDS, (None,), logits)
    t(_OP, "out_tokens", out_tokens, check.IDS, (batch, None), logits)
    depth = out_tokens.shape[1]
    check.that(1 <= depth <= check.MAX_NODES, _OP, f"out_tokens must have 1 to {check.MAX_NODES} columns; got {depth}. "
               "Fix: allocate [batch, greatest depth + 1].")
    t(_OP, "num_tokens_out", num_tokens_out, check.I32, (batch,), logits)
    t(_OP, "path", path, check.I32, (batch, depth), logits)
    t(_OP, "next_root", next_root, check.IDS, (batch,), logits)
    t(_OP, "flags", flags, check.I32, (batch,), logits)
    some(_OP, "logprobs", logprobs, check.F32, (batch, depth), logits)


def launch_shape(rows: int, vocab: int, multiprocessors: int) -> tuple:
    """(entries per tile, splits of a row, entries per split): two programs of whole tiles per multiprocessor."""
    tile = 1024 if vocab <= 1024 else 4096
    tiles = triton.cdiv(vocab, tile)
    splits = max(1, min(tiles, 2 * multiprocessors // max(rows, 1), MAX_SPLITS))
    span = triton.cdiv(tiles, splits) * tile
    return tile, triton.cdiv(vocab, span), span


def verify_tree(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor,
                prefix_len: torch.Tensor, active: torch.Tensor, remaining: torch.Tensor, stop_ids: Optional[torch.Tensor],
                temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
                seed: torch.Tensor, bias: Optional[torch.Tensor], bitmask: Optional[torch.Tensor],
                penalties: Optional[torch.Tensor], counts: Optional[torch.Tensor], out_tokens: torch.Tensor,
                num_tokens_out: torch.Tensor, path: torch.Tensor, next_root: torch.Tensor, flags: torch.Tensor,
                logprobs: Optional[torch.Tensor], workspace: Optional[torch.Tensor], vocab_size: int, rule: int) -> None:
    """The schema of csrc/ops.cpp; `workspace` belongs to the compiled kernel and is not used."""
    check_arguments(logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k, top_p,
                    min_p, seed, bias, bitmask, penalties, counts, out_tokens, num_tokens_out, path, next_root, flags,
                    logprobs, workspace, vocab_size, rule)
    rows, batch, depth = logits.shape[0], cu_nodes.shape[0] - 1, out_tokens.shape[1]
    if batch == 0:
        return
    cuda = logits.is_cuda
    sms = torch.cuda.get_device_properties(logits.device).multi_processor_count if cuda else 1
    tile, splits, span = launch_shape(rows, vocab_size, sms)
    groups = triton.cdiv(vocab_size, GROUP)
    pow2 = lambda n, least: max(least, triton.next_power_of_2(n))  # noqa: E731  (few sizes: each is a compilation)
    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device=logits.device)  # noqa: E731
    keys = new(rows, splits, dtype=torch.int64)
    params = (temperature, top_k, top_p, min_p, seed, penalties)
    request = (tokens, parents, cu_nodes, prefix_len, active)
    shape = dict(V=vocab_size, R=rows, B=batch, BP=pow2(batch, 32), RULE=rule)
    if rows:
        maxima, masses, listed = new(rows, groups), new(rows, splits, dtype=torch.int64), new(rows, groups)
        marks = new(rows, splits, MARKS, dtype=torch.int64)
        found, found_ids = new(rows, CANDIDATES), new(rows, CANDIDATES)
        extras = (bias, bitmask, counts)
        row = dict(shape, GROUP=GROUP, GROUPS=groups, SPLITS=splits)
        _scan[(rows, splits)](logits, logits.stride(0), *request, *params, *extras, keys, maxima, span, TILE=tile,
                              **row, num_warps=8, **EXACT)
        groups_padded = pow2(groups, 64)
        _masses[(rows, splits)](logits, logits.stride(0), *request, *params, *extras, maxima, masses, marks, span, TILE=tile,
                                **row, GROUPS_PADDED=groups_padded, num_warps=8, **EXACT)
        _filter[(rows,)](logits, logits.stride(0), *request, *params, *extras, keys, maxima, masses, marks, listed, found,
                         found_ids, **row, GROUPS_PADDED=groups_padded, SPLITS_PADDED=MAX_SPLITS,
                         CAP=CANDIDATES, FEW=FEW, BLOCKS=32, num_warps=8, **EXACT)
    nodes = pow2(min(rows, check.MAX_NODES), 64)
    stops = 0 if stop_ids is None else stop_ids.shape[0]
    _walk[(batch,)](*request, *params, keys, remaining, stop_ids, counts, out_tokens, num_tokens_out, path, next_root, flags,
                    logprobs, D=depth, DP=pow2(depth, 16), NP=nodes, SPLITS=splits, STOPS=stops,
                    STOPS_PADDED=pow2(stops, 16), **shape, num_warps=4, **EXACT)
    if logprobs is not None and rows:
        _logprobs[(batch, depth)](logits, logits.stride(0), cu_nodes, out_tokens, num_tokens_out, path, logprobs, V=vocab_size,
                                  D=depth, TILE=tile, num_warps=8, **EXACT)
