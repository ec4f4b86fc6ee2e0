"""Checks of the ops that only the loop on the GPU uses: next_inputs, skinny_linear, skinny_qkv."""

import torch

from .check_cases import I32, I64, SENTINEL, call, check, cumulative, ints, same


@check("next_inputs")
def next_inputs(device: str, rng) -> int:
    """The ring only on the CPU: for a GPU it is pinned memory, which the loop's tests look at."""
    for batch, width, pairs in ((1, 4, 0), (5, 3, 0), (33, 1, 2)):
        counts = [int(n) for n in ints(1 if not pairs else 1, 5 if not pairs else 2, rng, batch)]
        num = torch.minimum(ints(0, width + 1, rng, batch), torch.tensor(counts, dtype=I32))
        case = dict(out_tokens=ints(0, 999, rng, batch, width).to(I64), num_tokens_out=num, path=ints(-1, 4, rng, batch, width),
                    next_root=ints(0, 999, rng, batch).to(I64), flags=ints(0, 64, rng, batch), cu_nodes=cumulative(counts),
                    depth=ints(0, 5, rng, sum(counts)), active=ints(0, 2, rng, batch), prefix_len=ints(0, 99, rng, batch),
                    root=torch.full((batch,), SENTINEL, dtype=I32), next_tokens=torch.full((batch * width,), SENTINEL, dtype=I32), first=0)
        if pairs:
            case |= dict(pair_slots=torch.full((sum(counts),), SENTINEL), pair_count=ints(0, pairs + 1, rng, batch),
                         pair_tokens=torch.full((batch * pairs + 1,), SENTINEL, dtype=I32))
        if device == "cpu":
            case |= dict(sequence=torch.tensor([7]), ring=torch.full((3, 4 + batch * (5 + width)), SENTINEL, dtype=I32))
        same(call("next_inputs", device, case), call("next_inputs", "reference", case))
    return 3


def _product(rng, rows: int, inner: int, outer: int) -> dict:
    draw = lambda *s: torch.randn(*s, generator=rng).bfloat16()  # noqa: E731
    return dict(x=draw(rows, inner), weight=draw(outer, inner) / inner**0.5, bias=draw(outer), norm=draw(inner), eps=1e-5)


@check("skinny_linear")
def skinny_linear(device: str, rng) -> int:
    cases = [(rows, kind) for rows in (1, 20, 33) for kind in (0, 1, 2)]
    for rows, kind in cases:
        case = _product(rng, rows, 96, 64) | dict(kind=kind, out=torch.zeros(rows, 32 if kind == 2 else 64).bfloat16())
        same(call("skinny_linear", device, case), call("skinny_linear", "reference", case), dict(out=0.04))
    case = _product(rng, 3, 2304, 64) | dict(kind=1, out=torch.zeros(3, 64).bfloat16(), copy=torch.zeros(3, 192).bfloat16()[:, 64:128])
    same(call("skinny_linear", device, case), call("skinny_linear", "reference", case), dict(out=0.04, copy=0.04))
    return len(cases) + 1


@check("skinny_qkv")
def skinny_qkv(device: str, rng) -> int:
    for rows in (1, 20):
        slots = torch.randperm(24, generator=rng)[:rows]
        slots[rows // 2] = -1
        full = lambda *s: torch.full(s, 7.0).bfloat16()  # noqa: E731
        case = _product(rng, rows, 64, 128) | dict(
            positions=ints(0, 50, rng, rows), slots=slots, cos_sin=torch.rand(50, 16, generator=rng), q=full(rows, 4, 16),
            k_cache=full(6, 4, 2, 16), v_cache=full(6, 4, 2, 16))
        same(call("skinny_qkv", device, case), call("skinny_qkv", "reference", case), dict.fromkeys(("q", "k_cache", "v_cache"), 0.06))
    return 2
