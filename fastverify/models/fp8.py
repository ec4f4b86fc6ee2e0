"""Weights in float8_e4m3fn with a scale per row, products by torch's scaled matrix product: half the bytes of bfloat16.

Activations are quantised row by row on the way in, fused with what stands before the product. Embedding, norms and head stay as they are.
The values differ from bfloat16's by the rounding to three bits of mantissa: a different model, close to the first.
"""

from typing import Optional

import torch

FEW_ROWS = 16    # torch's product takes as long for one row as for 128
LARGEST = 448.0  # of float8_e4m3fn


class Fp8Weight:
    """A weight [N, K] as float8_e4m3fn `data` and float32 `scale` [1, N]: weight[n] = data[n] * scale[n]."""

    def __init__(self, weight: torch.Tensor) -> None:
        largest = weight.float().abs().amax(1, keepdim=True).clamp_(min=1e-12)
        self.data = (weight.float() * (LARGEST / largest)).to(torch.float8_e4m3fn)
        self.scale = (largest / LARGEST).t().contiguous()
        self.shape, self.dtype = weight.shape, weight.dtype

    def numel(self) -> int:
        return self.data.numel()

    def element_size(self) -> int:
        return 1

    def product(self, x: "torch.Tensor | tuple", bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [R, K] (or its (values, scales) of `quantised`) @ weight.T + bias, in the weight's old dtype."""
        values, scale = quantised(x) if isinstance(x, torch.Tensor) else x
        if values.shape[0] <= FEW_ROWS and _fused(values):
            from .fp8_triton import few_rows_product
            y = few_rows_product(values, scale, self.data, self.scale, self.dtype)
        elif values.is_cuda:
            y = torch._scaled_mm(values, self.data.t(), scale_a=scale, scale_b=self.scale, out_dtype=self.dtype)
        else:
            y = ((values.float() @ self.data.float().t()) * scale * self.scale).to(self.dtype)
        return y if bias is None else y.add_(bias)


def _fused(x: torch.Tensor) -> bool:
    from .linear import fused
    return fused(x)


def quantised(x: torch.Tensor) -> tuple:
    """x [R, K] -> (float8_e4m3fn [R, K], float32 [R, 1]): x = values * scales, rounded."""
    if _fused(x):
        from .fp8_triton import quantise
        return quantise(x)
    scale = x.float().abs().amax(1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def rms_norm_quantised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple:
    """quantised(RMSNorm(x) * weight), without rounding in between."""
    if _fused(x):
        from .fp8_triton import rms_norm_quantise
        return rms_norm_quantise(x, weight, eps)
    return quantised(torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight.float(), eps))


def silu_mul_quantised(gate_up: torch.Tensor) -> tuple:
    """quantised(silu(first half) * second half) of [R, 2 I]."""
    if _fused(gate_up):
        from .fp8_triton import silu_mul_quantise
        return silu_mul_quantise(gate_up)
    gate, up = gate_up.float().chunk(2, dim=1)
    return quantised(torch.nn.functional.silu(gate) * up)


def check_device(device: torch.device) -> None:
    """Errors: ValueError for a GPU whose tensor cores have no float8."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ValueError(f"to_fp8: the GPU must have float8 products (sm_89 or later); got sm_{major}{minor}. Fix: leave out --weights fp8.")


def to_fp8(target):
    """The same LlamaModel, the matrices of its layers replaced by Fp8Weight. Returns it.

    Errors: ValueError for a split target, a GPU without float8 products (before sm_89), or sizes that are no multiples of 16
    (torch's product asks for them).
    """
    check_device(target.device)
    if target.comm is not None:
        raise ValueError("to_fp8: the target must be whole; got one rank of a split one. Fix: load it without tensor parallelism.")
    for layer in target.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            weight = getattr(layer, name)
            if weight.shape[0] % 16 or weight.shape[1] % 16:
                raise ValueError(f"to_fp8: {name} must have sizes that 16 divides; got {list(weight.shape)}. Fix: stay in bfloat16.")
            setattr(layer, name, Fp8Weight(weight))
    return target
