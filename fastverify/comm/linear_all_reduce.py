"""linear_all_reduce: a row-parallel linear whose sum over ranks overlaps the product, piece by piece."""

from typing import Optional

import torch

from ..models.linear import linear
from .all_reduce import all_reduce
from .all_reduce_columns import all_reduce_columns
from .communicator import MOST_PIECES

ONE_PIECE = ("rows", 1)
KINDS = ("rows", "columns", "growing", "resident")
RESIDENT = ("peer", "host", "gathered")  # transports of all_reduce_columns
GRAIN = 128  # columns: growing pieces are whole tiles of a product


def split_for(rows: int, n: int, measured: list, overlap_rows: int) -> tuple:
    """(kind, pieces) for `rows` rows of n outputs. measured: ascending (rows, kind, pieces) of the tuner; the last entry that is
    not above `rows` decides. Without one: below overlap_rows one piece, else four pieces of columns (or of rows). Pure."""
    if measured:
        kind, pieces = ONE_PIECE
        for r, a, b in measured:
            if r <= rows:
                kind, pieces = a, b
        return kind, pieces
    if rows < overlap_rows:
        return ONE_PIECE
    return ("columns", 4) if n % 64 == 0 else ("rows", max(1, min(4, rows // 128)))


def column_widths(n: int, kind: str, pieces: int) -> list:
    """Columns of each piece. "columns": equal. "growing": each twice the one before, in whole GRAINs, so that little is exposed
    before the first sum and every sum covers the next product. Pure."""
    if kind == "columns":
        return [n // pieces] * pieces
    units, whole = n // GRAIN, (1 << pieces) - 1
    widths = [max(1, round(units * (1 << i) / whole)) * GRAIN for i in range(pieces - 1)]
    return [*widths, n - sum(widths)]


def shape_name(n: int, k: int, dtype: torch.dtype) -> str:
    return f"{n},{k},{str(dtype).removeprefix('torch.')}"


def cut(rows: int, weight: torch.Tensor, comm, split: Optional[tuple] = None) -> tuple:
    """(kind, pieces) for a linear of this weight on this communicator: `split`, else the tuner's or the rule's; more pieces where
    one would be larger than a sum may be."""
    n = weight.shape[0]
    if n == 0:
        raise ValueError(f"linear_all_reduce: weight must have at least one row; got {list(weight.shape)}. Fix: pass weight [N, K / W].")
    measured = comm.splits.get(shape_name(n, weight.shape[1], weight.dtype)) if comm.splits else None
    kind, pieces = split or split_for(rows, n, measured or [], comm.overlap_rows)
    if kind not in KINDS or not fits(n, weight.element_size(), kind, pieces):
        raise ValueError(f"linear_all_reduce: split must be (\"rows\"|\"columns\"|\"growing\"|\"resident\", pieces) that the columns can be "
                         f"cut into; got {(kind, pieces)} for {n} columns. Fix: leave it out.")
    if kind == "resident" and (comm.transport not in RESIDENT or rows * n * weight.element_size() > comm.max_bytes):
        kind, pieces = ONE_PIECE
    largest = max(1, comm.largest_bytes // (n * weight.element_size()))  # rows of one sum
    share = -(-rows // pieces) if kind != "growing" else -(-rows * max(column_widths(n, kind, pieces)) // n)
    if share > largest:
        kind, pieces = "rows", -(-rows // largest)
    return kind, pieces


def fits(n: int, itemsize: int, kind: str, pieces: int) -> bool:
    """Whether n columns can be cut so. Pure."""
    if kind == "growing":
        return 1 <= pieces <= 6 and n >= GRAIN << pieces
    if kind == "resident":  # whole 16-byte vectors
        return 1 <= pieces <= MOST_PIECES and n % pieces == 0 and n // pieces * itemsize % 16 == 0
    return pieces >= 1 and (kind == "rows" or n % pieces == 0)


def overlaps(rows: int, weight: torch.Tensor, comm) -> bool:
    """Whether a row-parallel layer should call linear_all_reduce for so many rows (else all_reduce_rms_norm). Pure in shapes."""
    return cut(rows, weight, comm) != ONE_PIECE


def linear_all_reduce(x: torch.Tensor, weight: torch.Tensor, comm, bias: Optional[torch.Tensor] = None, *,
                      split: Optional[tuple] = None, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Sum over ranks of x @ weight.T (+ bias): what a row-parallel layer owes the residual stream.

    x [R, K / W] and weight [N, K / W] of this rank; bias [N] on one rank only (it is summed). residual [R, N]: the sum is added to
        it, in place, and it is returned. split: ("columns"|"growing"|"rows"|"resident", pieces), None: what the tuner found for (N, K / W), else
        a rule.
    Returns [R, N], the same bits on every rank for equal splits.

    On CUDA each piece's sum runs on the communicator's side stream while the next piece's product runs on the current one; both
    are joined before it returns, so it can be captured. Pieces of columns read each weight once and are best up to some hundred
    rows; pieces of rows need no copy at the end; "resident" has one kernel for all sums, which runs beside the products and sends equal pieces
    of columns as they are done (all_reduce_columns). With few rows one piece is best: a skinny product ends in one wave and leaves
    nothing to overlap (docs/performance.md). Pieces larger than comm.max_bytes are cut further unless NCCL takes them.
    Errors: those of all_reduce; ValueError for a split that does not fit. Cost: two launches more per piece.
    """
    rows, n = x.shape[0], weight.shape[0]
    kind, pieces = cut(rows, weight, comm, split)
    if kind == "resident":
        return _resident(x, weight, comm, bias, pieces, residual)
    if kind != "rows" and pieces > 1:
        return _by_columns(x, weight, comm, bias, column_widths(n, kind, pieces), residual)
    step = -(-rows // pieces) if rows else 1
    if step >= rows:
        y = linear(x, weight, bias)
        all_reduce(y, comm, out=y)
        return y if residual is None else residual.add_(y)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    parts = [(lambda part=part: linear(part, weight, bias)) for part in x.split(step)]
    overlapped(parts, list(out.split(step)), comm)
    return out if residual is None else residual.add_(out)


def _by_columns(x, weight, comm, bias, widths: list, residual) -> torch.Tensor:
    rows, n = x.shape[0], weight.shape[0]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    flat = torch.empty(rows * n, dtype=x.dtype, device=x.device)
    ends = [sum(widths[:i + 1]) for i in range(len(widths))]
    sums = [flat[rows * (end - w):rows * end].view(rows, w) for w, end in zip(widths, ends)]

    def put(i: int) -> None:  # while the next sums travel
        columns = out[:, ends[i] - widths[i]:ends[i]]
        columns.copy_(sums[i]) if residual is None else columns.add_(sums[i])
    parts = [(lambda a=end - w, b=end: linear(x, weight[a:b], None if bias is None else bias[a:b])) for w, end in zip(widths, ends)]
    overlapped(parts, sums, comm, put)
    return out


def _resident(x, weight, comm, bias, pieces: int, residual) -> torch.Tensor:
    """One kernel for all sums, launched before the products (product_groups): it sends a piece as soon as its product has ended."""
    rows, n = x.shape[0], weight.shape[0]
    width = n // pieces
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    parts = torch.empty(pieces, rows, width, dtype=x.dtype, device=x.device)

    def products() -> None:
        first = 0
        for count in product_groups(pieces):
            end = first + count
            columns = slice(first * width, end * width)
            product(x, weight[columns], None if bias is None else bias[columns], parts[first:end])
            comm.mark(first, count)
            first = end

    def sums() -> None:
        all_reduce_columns(parts, comm, out, ready=True, add=residual is not None)
    if not x.is_cuda:
        products()
        sums()
        return out
    main, side = torch.cuda.current_stream(x.device), comm.side_stream()
    side.wait_stream(main)  # earlier calls of this communicator come first
    captured = torch.cuda.is_current_stream_capturing()
    if not captured:  # a product's first launch may load its code, which waits for kernels that run: so not for the one that waits for it
        products()
    with torch.cuda.stream(side):
        sums()
    if captured:
        products()
    main.wait_stream(side)
    return out


def product_groups(pieces: int) -> list:
    """Pieces that one product makes: 1, 1, 2, 4, ..., the last what is left. The wire waits for the first only, and larger products are
    faster per piece. Pure."""
    counts, left = [], pieces
    while left:
        counts.append(min(left, max(1, sum(counts))))
        left -= counts[-1]
    return counts


def product(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], out: torch.Tensor) -> None:
    """x [R, K] @ weight.T [K, pieces * width] (+ bias) -> out [pieces, R, width], one launch."""
    pieces, rows, width = out.shape
    if pieces == 1:
        if bias is None:
            torch.mm(x, weight.t(), out=out[0])
        else:
            torch.addmm(bias, x, weight.t(), out=out[0])
        return
    xs, ws = x.expand(pieces, *x.shape), weight.view(pieces, width, -1).transpose(1, 2)
    if bias is None:
        torch.bmm(xs, ws, out=out)
    else:
        torch.baddbmm(bias.view(pieces, 1, width), xs, ws, out=out)


def sum_beside(y: torch.Tensor, comm, out: torch.Tensor) -> None:
    """out = sum over ranks of y [rows, width], the bits of all_reduce, beside a product: all_reduce_columns where it can, for every thread of
    all_reduce asks over the link for what is late, and that slows down what else the GPU does."""
    whole = y.shape[1] * y.element_size() % 16 == 0 and y.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    own = comm.transport in ("peer", "host") and comm.wire == "exact" and comm.handle_for(y.nbytes) == comm.handle
    if whole and own and not comm.islands and y.nbytes <= (comm.max_bytes if comm.world <= 2 else comm.one_shot_bytes):  # it is one-shot
        all_reduce_columns(y.view(1, *y.shape), comm, out)
    else:
        all_reduce(y, comm, out=out)


def overlapped(parts: list, sums: list, comm, then=None) -> None:
    """sums[i] = sum over ranks of parts[i](), each sum beside the next product; then(i) on the current stream when sums[i] is there."""
    if not sums[0].is_cuda:
        for i, (part, to) in enumerate(zip(parts, sums)):
            all_reduce(part(), comm, out=to)
            if then is not None:
                then(i)
        return
    main, side = torch.cuda.current_stream(sums[0].device), comm.side_stream()
    side.wait_stream(main)  # earlier calls of this communicator come first
    kept, done = [], []     # products live until the streams have joined
    for part, to in zip(parts, sums):
        y = part()
        kept.append(y)
        ready, summed = torch.cuda.Event(), torch.cuda.Event()
        ready.record(main)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            sum_beside(y, comm, to)
            summed.record(side)
        done.append(summed)
    for i, summed in enumerate(done):
        main.wait_event(summed)
        if then is not None:
            then(i)

