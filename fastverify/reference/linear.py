"""Oracle of the linear stage, float64 where nothing is rounded on the way."""

import torch
import torch.nn.functional as F

from .attention import rope_append

__all__ = ["skinny_linear", "skinny_qkv"]


def product(x, weight, bias, norm, eps) -> torch.Tensor:
    """float64 [R, N]; the normed x is rounded to its dtype first."""
    a = x.double()
    if norm is not None:
        a = (a * torch.rsqrt(a.square().mean(1, keepdim=True) + eps) * norm.double()).to(x.dtype).double()
    y = a @ weight.double().T
    return y if bias is None else y + bias.double()


def skinny_linear(x, weight, bias, norm, out, eps, kind, copy=None) -> None:
    y = product(x, weight, bias, norm, eps)
    if kind == 2:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    out.copy_(y + out.double() if kind == 1 else y)
    if copy is not None:
        copy.copy_(out)


def skinny_qkv(x, weight, bias, norm, positions, slots, cos_sin, q, k_cache, v_cache, eps, settled=False) -> None:
    rows, heads, d = q.shape
    kv = k_cache.shape[2]
    qkv = product(x, weight, bias, norm, eps).to(x.dtype).view(rows, -1, d)
    new, k, v = (t.clone() for t in qkv.split((heads, kv, kv), dim=1))
    rope_append(new, k, v, positions, slots, cos_sin, None, None, None, None, k_cache, v_cache, eps, 0)
    q[slots >= 0] = new[slots >= 0]
