"""Weights on their way into the L2 while something that leaves the memory idle runs (attention, norms): a branch of the captured graph."""

import torch
import triton
import triton.language as tl

_PIECE = 4096  # bytes of one instruction; 32 of them per program


@triton.jit
def _pull_kernel(start, pieces, PIECE: tl.constexpr):
    i = tl.minimum(tl.program_id(0) * 32 + tl.arange(0, 32), pieces - 1).to(tl.int64)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], 4096; mov.b32 $0, 0;", "=r,l", [start + i * PIECE], dtype=tl.int32,
                              is_pure=False, pack=1)


class Puller:
    """Pulls pieces of weights into the L2 on a stream of its own (sm_90 and newer). Nothing waits for it but join()."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def pull(self, *parts: tuple) -> None:
        """parts: (contiguous tensor, bytes): that many from its start, whole pieces of 4 KiB. Starts when what was launched has ended."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for tensor, count in parts:
                pieces = min(count, tensor.numel() * tensor.element_size()) // _PIECE
                if pieces > 0:
                    _pull_kernel[(triton.cdiv(pieces, 32),)](tensor.data_ptr(), pieces, PIECE=_PIECE, num_warps=1)

    def join(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
