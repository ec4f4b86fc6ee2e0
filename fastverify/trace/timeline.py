"""A picture of one step: a lane per rank, its collectives split into gap, waiting and wire. SVG, without any library."""

import math
from html import escape

from .account import Report

COLOURS = {"gap": "#999999", "waiting": "#E69F00", "wire": "#0072B2"}
LEFT, TOP, WIDTH, LANE, BAR = 90, 60, 1300, 34, 22


def timeline(report: Report, step: int = 0) -> str:
    """The SVG of step number `step`. Errors: ValueError for a step that is not there."""
    if not 0 <= step < len(report.steps):
        raise ValueError(f"trace: timeline_step must be in 0..{len(report.steps) - 1}; got {step}. Fix: change --timeline-step.")
    s = report.steps[step]
    begin = float((s.start - s.gap).min())
    span = max(float((s.start + s.duration).max()) - begin, 1e-9)
    bottom = TOP + LANE * len(report.ranks)
    x = lambda us: LEFT + WIDTH * (us - begin) / span  # noqa: E731
    account = s.account(report.shown)
    late = "" if report.late is None else f"; rank {report.ranks[report.late]} arrives last most often"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{bottom + 60}" '
           'font-family="sans-serif" font-size="13">', '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="22" font-size="15">{escape(s.name)}: {len(s.kinds)} collectives; rank '
           f"{report.ranks[report.shown]}: {account.wire:.3g} ms wire + {account.waiting:.3g} waiting + {account.gaps:.3g} gaps"
           f"{late}</text>"]
    for i, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<rect x="{LEFT + 110 * i}" y="34" width="14" height="14" fill="{colour}"/>'
                   f'<text x="{LEFT + 110 * i + 20}" y="46">{name}</text>')
    out.append(f'<text x="{LEFT + 330}" y="46" fill="#555">white: other work; times on the clock of rank {report.ranks[0]}</text>')
    for r, rank in enumerate(report.ranks):
        y = TOP + LANE * r
        out.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">rank {rank}</text>'
                   f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAR}" fill="white" stroke="#ccc"/>')
        for k in range(len(s.kinds)):
            start, wait, wire, gap = (float(v) for v in (s.start[r, k], s.waiting[r, k], s.wire[k], s.gap[r, k]))
            parts = (("gap", start - gap, gap), ("waiting", start, wait), ("wire", start + wait, wire))
            tip = f"{s.kinds[k]} {k}: wire {wire:.1f} us, waiting {wait:.1f}, gap {gap:.1f}"
            bars = [f'<rect x="{x(a):.2f}" y="{y}" width="{max(WIDTH * d / span, 0.3):.2f}" height="{BAR}" '
                    f'fill="{COLOURS[name]}"/>' for name, a, d in parts if d > 0]
            out.append(f"<g><title>{escape(tip)}</title>{''.join(bars)}</g>")
    tick = _tick(span)
    for i in range(int(span / tick) + 1):
        at = x(begin + i * tick)
        out.append(f'<line x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 6}" stroke="black"/>'
                   f'<text x="{at:.1f}" y="{bottom + 22}" text-anchor="middle">{i * tick / 1e3:g}</text>')
    out.append(f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 44}" text-anchor="middle">ms</text></svg>')
    return "\n".join(out) + "\n"


def _tick(span: float) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that gives 5 to 13 ticks."""
    power = 10 ** math.floor(math.log10(span / 5))
    return next(m * power for m in (5, 2, 1) if m * power <= span / 5)
