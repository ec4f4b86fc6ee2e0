"""linear_all_reduce: a row-parallel linear whose sum over ranks overlaps the product, chunk by chunk."""

from typing import Optional

import torch

from ..models.linear import linear
from .all_reduce import all_reduce

MIN_CHUNK_ROWS = 128  # below this the product has no second wave of tiles to hide a sum behind


def chunk_rows(rows: int, overlap_rows: int, chunks: int = 0) -> int:
    """Rows per chunk. chunks 0: two or more pieces of at least MIN_CHUNK_ROWS where rows >= overlap_rows, else one."""
    if chunks == 0:
        chunks = 1 if rows < overlap_rows else max(1, min(4, rows // MIN_CHUNK_ROWS))
    return -(-rows // chunks) if rows else 1


def linear_all_reduce(x: torch.Tensor, weight: torch.Tensor, comm, bias: Optional[torch.Tensor] = None, *,
                      chunks: int = 0) -> torch.Tensor:
    """Sum over ranks of x @ weight.T (+ bias): what a row-parallel layer owes the residual stream.

    x [R, K / W] and weight [N, K / W] of this rank; bias on one rank only (it is summed). chunks: 0 decides by rows.
    Returns [R, N], the same bits on every rank for equal chunking.

    On CUDA each chunk's sum runs on the communicator's side stream while the next chunk's product runs on the current
    one; both are joined before it returns, so it can be captured. With few rows one chunk is best: a skinny product ends
    in one wave and leaves nothing to overlap (docs/performance.md). Chunks larger than comm.max_bytes are cut further.
    Errors: those of all_reduce. Cost: as many launches more as there are chunks.
    """
    rows = x.shape[0]
    step = chunk_rows(rows, comm.overlap_rows, chunks)
    step = max(1, min(step, comm.max_bytes // (weight.shape[0] * x.element_size())))
    if step >= rows:
        y = linear(x, weight, bias)
        return all_reduce(y, comm, out=y)
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    pieces = zip(x.split(step), out.split(step))
    if x.device.type != "cuda":
        for part, to in pieces:
            all_reduce(linear(part, weight, bias), comm, out=to)
        return out
    main, side = torch.cuda.current_stream(x.device), comm.side_stream()
    side.wait_stream(main)  # earlier calls of this communicator come first
    for part, to in pieces:
        y = linear(part, weight, bias)
        done = torch.cuda.Event()
        done.record(main)
        with torch.cuda.stream(side):
            side.wait_event(done)
            all_reduce(y, comm, out=to)
            y.record_stream(side)
    main.wait_stream(side)
    return out
