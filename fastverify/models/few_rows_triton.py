"""Products of at most 16 rows with the weights of a large model, in Triton: what stands between two products rides on them.

An RMSNorm is cut in two: its weight goes onto the rows when they are written (`scaled`), its factor onto the sums of the product that
reads them, from sums of squares that the programs of the launch before left one by one (`squares`, folded in their order).

A launch may start while the one before it ends (OVERLAP): until that has ended it reads nothing but weights, which it asks into the L2.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None

ROWS = 16       # of x: one tile
WIDE = 64       # weight rows of a program
DEEP = 128      # of K at a time
STAGES = 6
OVERLAP = gdc_wait is not None  # programmatic dependent launch
AHEAD = 8       # lines of 128 bytes of every weight row that a launch asks for before it waits: a power of two


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(x, weight, out, squares_in, parts, scale_next, scaled, squares, rows, outer, inner: tl.constexpr, eps, FACTOR: tl.constexpr, ADD: tl.constexpr,
                    SILU: tl.constexpr, NEXT: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    STAGES: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr):
    # SILU: half of a program's weight rows are of the first half of the matrix, half of the second
    i, r, k = tl.arange(0, BN), tl.arange(0, BR), tl.arange(0, BK)
    if SILU:
        half: tl.constexpr = BN // 2
        n = tl.program_id(0) * half + i % half + (i // half) * (outer // 2)
    else:
        n = tl.program_id(0) * BN + i
    w_at = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    x_at = x + r[None, :] * inner + k[:, None]
    if OVERLAP:
        gdc_launch_dependents()  # every launch waits for the whole one before it, so the next may write what this one's predecessor read
        line = (weight + n.to(tl.int64)[:, None] * inner + (tl.arange(0, AHEAD) * 64)[None, :]).to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)
        gdc_wait()
    if FACTOR:  # what stands after the sums is on its way during them
        p = tl.arange(0, PARTS)
        sums = tl.load(squares_in + p[:, None] * BR + r[None, :], mask=p[:, None] < parts, other=0.0, cache_modifier=".cg")  # not what an L1 may still hold
    at = out + r[None, :] * outer + n[:, None]
    if ADD:
        old = tl.load(at, mask=r[None, :] < rows, other=0.0, cache_modifier=".cg")
    if NEXT:
        scale = tl.load(scale_next + n)
    acc = tl.zeros((BN, BR), tl.float32)
    for j in tl.range(0, inner, BK, num_stages=STAGES):
        w = tl.load(w_at + j, eviction_policy="evict_first")
        v = tl.load(x_at + j, mask=r[None, :] < rows, other=0.0)
        acc = tl.dot(w, v, acc)
    if FACTOR:
        acc = acc * (1.0 / tl.sqrt(tl.sum(sums, 0) / inner + eps))[None, :]
    if SILU:
        gate, up = acc.reshape(2, BN // 2, BR).permute(1, 2, 0).split()
        y = gate / (1.0 + tl.exp(-gate)) * up
        m = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(out + r[None, :] * (outer // 2) + m[:, None], y.to(out.dtype.element_ty), mask=r[None, :] < rows)
    else:
        if ADD:
            acc = acc + old.to(tl.float32)
        y = acc.to(out.dtype.element_ty)
        tl.store(at, y, mask=r[None, :] < rows)
        if NEXT:
            h = y.to(tl.float32)
            tl.store(scaled + r[None, :] * outer + n[:, None], (h * scale[:, None].to(tl.float32)).to(scaled.dtype.element_ty),
                     mask=r[None, :] < rows)
            tl.store(squares + tl.program_id(0) * BR + r, tl.sum(h * h, 0))


@triton.jit
def _scale_kernel(x, scale, scaled, squares, columns, BR: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < columns
    h = tl.load(x + row * columns + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * columns + i, (h * s).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(h * h, 0))


class DeferredNorm:
    """Rows before an RMSNorm: h * norm [R, H] rounded, and sums of squares of h in `parts` pieces, float32 [pieces, 16]."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor) -> None:
        self.scaled = torch.empty(rows, columns, dtype=like.dtype, device=like.device)
        self.squares = torch.empty(columns // WIDE, ROWS, dtype=torch.float32, device=like.device)
        self.parts = self.squares.shape[0]

    def of(self, h: torch.Tensor, norm: torch.Tensor) -> "DeferredNorm":
        """Filled from h [R, H] itself, one launch."""
        columns = h.shape[1]
        _scale_kernel[(h.shape[0],)](h, norm, self.scaled, self.squares, columns, BR=ROWS, BLOCK=triton.next_power_of_2(columns), num_warps=8)
        self.parts = 1
        return self


def fits(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether `product` takes these: at most 16 rows of bfloat16 (they are rounded before the RMSNorm's factor: float16 could overflow), sizes
    that its tiles divide, shared memory for its stages."""
    return (torch.cuda.get_device_capability(x.device)[0] in (9, 10) and x.dtype is torch.bfloat16 and 0 < x.shape[0] <= ROWS and x.is_contiguous()
            and all(w.dtype is x.dtype and w.is_contiguous() and w.shape[0] % WIDE == 0 and w.shape[1] % DEEP == 0 for w in weights))


def product(x: "torch.Tensor | DeferredNorm", weight: torch.Tensor, *, out: Optional[torch.Tensor] = None, add: bool = False, silu: bool = False,
            eps: float = 0.0, then: Optional[DeferredNorm] = None, norm: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x [R, K] @ weight [N, K].T, fp32 sums, rounded once.

    x: DeferredNorm: RMSNorm of it. add: out += product. silu: out [R, N/2] = silu(first half) * second half. then, norm: `then` becomes what
    the next RMSNorm with `norm` needs of out.
    """
    normed = x if isinstance(x, DeferredNorm) else None
    rows = x if normed is None else x.scaled
    outer, inner = weight.shape
    if out is None:
        if add:
            raise RuntimeError("product: out must be given with add=True, which adds to it; got None. Fix: pass the residual as out, or add=False.")
        out = torch.empty(rows.shape[0], outer // 2 if silu else outer, dtype=rows.dtype, device=rows.device)
    if then is not None:
        then.parts = outer // WIDE
    parts, overlap = 1 if normed is None else normed.parts, OVERLAP and rows.is_cuda  # not in the interpreter
    _product_kernel[(outer // WIDE,)](
        rows, weight, out, rows if normed is None else normed.squares, parts, weight if norm is None else norm, out if then is None else then.scaled,
        out if then is None else then.squares, rows.shape[0], outer, inner, eps, FACTOR=normed is not None, ADD=add, SILU=silu, NEXT=then is not None,
        PARTS=triton.next_power_of_2(parts), BR=ROWS, BN=WIDE, BK=DEEP, STAGES=STAGES, OVERLAP=overlap, AHEAD=AHEAD, num_warps=4,
        **(dict(launch_pdl=True) if overlap else {}))
    return out
