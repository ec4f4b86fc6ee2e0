"""rope_append in Triton: the portable back end, the same contract as the C++ kernels (see rope_append.py).

A program takes one row and a block of heads of q, k or v. Every operation is a single IEEE one (no fused multiply-add),
so without a norm the results have the bits of the CPU op; the norm sums in another order: within one rounding step.
Rows with a negative slot, or a slot or position out of range, are left alone. Cost: one launch.
"""

import torch
import triton
import triton.language as tl

from .. import _checks as check

OP = "rope_append"
CACHES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@triton.jit
def to_e4m3(x):
    """float32 -> fp8 e4m3 bits: nearest even, saturates at 448, NaN stays NaN. csrc/algo/convert.h, line by line."""
    u = x.to(tl.uint32, bitcast=True)
    a = u & 0x7FFFFFFF
    sign = (u >> 24) & 0x80
    subnormal = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    normal = (a - 0x3C000000 + 0x7FFFF + ((a >> 20) & 1)) >> 20
    large = tl.where(a > 0x7F800000, 0x7F, 0x7E)
    return (sign | tl.where(a < 0x3C800000, subnormal, tl.where(a < 0x43E00000, normal, large))).to(tl.uint8)


@triton.jit
def put(at, x, mask, E4M3: tl.constexpr):
    if E4M3:
        tl.store(at, to_e4m3(x), mask=mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def norm_scale(a, b, c, eps, HEAD_DIM: tl.constexpr):
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, HEAD_DIM * 1.0) + eps))[:, None]


@triton.jit
def append_head(x, row_at, head_step, out, out_at, out_step, heads, head0, weight, scale, scale_step, cs, eps,
                NORM: tl.constexpr, ROTATE: tl.constexpr, SCALE: tl.constexpr, E4M3: tl.constexpr, STYLE: tl.constexpr,
                HEAD_DIM: tl.constexpr, ROT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Heads head0.. of one row: pairs (a, b) that rotate, and the rest c."""
    half: tl.constexpr = ROT // 2
    i, j = tl.arange(0, BLOCK_P), ROT + tl.arange(0, BLOCK_C)
    if STYLE == 0:
        low, high = i, i + half
    else:
        low, high = 2 * i, 2 * i + 1
    head = head0 + tl.arange(0, BLOCK_H)
    ok, ok_rest = (head < heads)[:, None] & (i < half)[None, :], (head < heads)[:, None] & (j < HEAD_DIM)[None, :]
    at = x + row_at + head[:, None] * head_step
    a = tl.load(at + low[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(at + high[None, :], mask=ok, other=0.0).to(tl.float32)
    c = tl.load(at + j[None, :], mask=ok_rest, other=0.0).to(tl.float32)
    if NORM:
        r = norm_scale(a, b, c, eps, HEAD_DIM)
        a = a * r * tl.load(weight + low, mask=i < half, other=0.0).to(tl.float32)[None, :]
        b = b * r * tl.load(weight + high, mask=i < half, other=0.0).to(tl.float32)[None, :]
        c = c * r * tl.load(weight + j, mask=j < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if ROTATE:
        cos = tl.load(cs + i, mask=i < half, other=0.0)[None, :]
        sin = tl.load(cs + half + i, mask=i < half, other=0.0)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    if SCALE:
        s = tl.load(scale + head * scale_step, mask=head < heads, other=1.0)[:, None]
        a, b = tl.div_rn(a, tl.broadcast_to(s, a.shape)), tl.div_rn(b, tl.broadcast_to(s, b.shape))
        c = tl.div_rn(c, tl.broadcast_to(s, c.shape))
    tl.debug_barrier()  # q is changed in place
    to = out + out_at + head[:, None] * out_step
    put(to + low[None, :], a, ok, E4M3)
    put(to + high[None, :], b, ok, E4M3)
    put(to + j[None, :], c, ok_rest, E4M3)


@triton.jit
def rope_append_kernel(q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, max_positions,
                       capacity, q_heads, kv_heads, eps, q_row, q_head, k_row, k_head, v_row, v_head, kc_page, kc_slot,
                       kc_head, vc_page, vc_slot, vc_head, k_scale_step, v_scale_step,
                       Q_NORM: tl.constexpr, K_NORM: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
                       E4M3: tl.constexpr, STYLE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
                       ROT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (slot >= capacity) | (position < 0) | (position >= max_positions):
        return
    cs = cos_sin + position.to(tl.int64) * ROT
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    q_blocks, kv_blocks = tl.cdiv(q_heads, BLOCK_H), tl.cdiv(kv_heads, BLOCK_H)
    if block < q_blocks:
        append_head(q, row * q_row, q_head, q, row * q_row, q_head, q_heads, block * BLOCK_H, q_norm, k_scale, 0, cs, eps,
                    Q_NORM, True, False, False, STYLE, HEAD_DIM, ROT, BLOCK_H, BLOCK_P, BLOCK_C)
    elif block < q_blocks + kv_blocks:
        append_head(k, row * k_row, k_head, k_cache, page * kc_page + offset * kc_slot, kc_head, kv_heads,
                    (block - q_blocks) * BLOCK_H, k_norm, k_scale, k_scale_step, cs, eps,
                    K_NORM, True, K_SCALE, E4M3, STYLE, HEAD_DIM, ROT, BLOCK_H, BLOCK_P, BLOCK_C)
    else:
        append_head(v, row * v_row, v_head, v_cache, page * vc_page + offset * vc_slot, vc_head, kv_heads,
                    (block - q_blocks - kv_blocks) * BLOCK_H, k_norm, v_scale, v_scale_step, cs, eps,
                    False, False, V_SCALE, E4M3, STYLE, HEAD_DIM, ROT, BLOCK_H, BLOCK_P, BLOCK_C)


def head_scale(op, name, scale, kv_heads, like) -> int:
    """Checks a float32 [1] or [Hkv] scale; returns its step per head."""
    if scale is None:
        return 0
    check.tensor(op, name, scale, check.F32, (1 if scale.dim() == 1 and scale.shape[0] == 1 else kv_heads,), like)
    return int(scale.shape[0] > 1)


def rope_append(q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, eps, rotary_style):
    """The schema's positional arguments (csrc/ops.cpp)."""
    floats = ("float32", "bfloat16", "float16")
    check.output(OP, "q", q, floats, (None, None, None), q)
    rows, q_heads, d = q.shape
    check.that(1 <= d <= 1024, OP, f"head_dim must be in [1, 1024]; got {check.describe(q)}. Fix: pass q [R, Hq, D].")
    same = (check.dtype_name(q.dtype),)
    check.tensor(OP, "k", k, same, (rows, None, d), q, True)
    kv_heads = k.shape[1]
    check.tensor(OP, "v", v, same, (rows, kv_heads, d), q, True)
    check.tensor(OP, "positions", positions, check.I32, (rows,), q)
    check.tensor(OP, "slots", slots, check.I64, (rows,), q)
    check.tensor(OP, "cos_sin", cos_sin, check.F32, (None, None), q)
    max_positions, rot = cos_sin.shape
    check.that(rot % 2 == 0 and rot <= d, OP, f"cos_sin must have an even width of at most {d}; got {check.describe(cos_sin)}. "
               "Fix: pass rot/2 cosines then rot/2 sines, rot <= head_dim.")
    check.output(OP, "k_cache", k_cache, CACHES, (None, None, kv_heads, d), q)
    page_size = k_cache.shape[1]
    check.output(OP, "v_cache", v_cache, (check.dtype_name(k_cache.dtype),), (k_cache.shape[0], page_size, kv_heads, d), q)
    check.that(rotary_style in (0, 1), OP, f"rotary_style must be 0 (neox) or 1 (gptj); got {rotary_style}. Fix: pass one of the two.")
    check.that(eps >= 0, OP, f"eps must be >= 0; got {eps:g}. Fix: pass the model's rms_norm_eps.")
    check.optional(OP, "q_norm", q_norm, floats, (d,), q)
    check.optional(OP, "k_norm", k_norm, floats, (d,), q)
    k_step, v_step = (head_scale(OP, n, s, kv_heads, q) for n, s in (("k_scale", k_scale), ("v_scale", v_scale)))
    if rows * (q_heads + kv_heads) == 0:
        return
    e4m3 = k_cache.dtype == torch.float8_e4m3fn
    caches = [c.view(torch.uint8) if e4m3 else c for c in (k_cache, v_cache)]
    block_p, block_c = triton.next_power_of_2(max(rot // 2, 1)), triton.next_power_of_2(max(d - rot, 1))
    fits = max(1, min(8, 1024 // (2 * block_p + block_c)))
    block_h = min(triton.next_power_of_2(max(q_heads, kv_heads)), triton.next_power_of_2(fits + 1) // 2)
    grid = (rows, triton.cdiv(q_heads, block_h) + 2 * triton.cdiv(kv_heads, block_h))
    rope_append_kernel[grid](
        q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, *caches, max_positions,
        k_cache.shape[0] * page_size, q_heads, kv_heads, eps, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], k_step, v_step, Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None, K_SCALE=k_scale is not None, V_SCALE=v_scale is not None, E4M3=e4m3, STYLE=rotary_style,
        PAGE_SIZE=max(page_size, 1), HEAD_DIM=d, ROT=rot, BLOCK_H=block_h, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        enable_fp_fusion=False)
