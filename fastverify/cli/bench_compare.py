"""Two results of the same benchmarks: which rows are the same, faster, slower, or cannot be told apart. No torch."""

from typing import NamedTuple, Optional

from .bench_tables import figure, key, shape_text

SAME, FASTER, SLOWER, UNCLEAR = "SAME", "FASTER", "SLOWER", "UNCLEAR"
TOLERANCE = 0.03  # medians of one kernel differ by up to this between two runs (clocks, where its memory lies); a slowdown of 5 % must show
NOISY = 0.15      # (p80 - p20) / median from which overlapping rows say nothing
GRAIN_US = 0.05   # differences below this are the resolution of events (0.5 us over 50 calls, and the gap of a graph node), whatever their ratio


class Verdict(NamedTuple):
    """ratio: the new median over the old one."""

    word: str
    ratio: Optional[float]


def verdict(old: dict, new: dict, tolerance: float = TOLERANCE) -> Verdict:
    """FASTER or SLOWER if the medians differ by more than `tolerance` and the spans from p20 to p80 do not meet. UNCLEAR if the
    medians differ but the spans meet, or if a span is wider than NOISY (then equal medians prove nothing). Else SAME."""
    if old["median_us"] is None or new["median_us"] is None or old["median_us"] <= 0:
        return Verdict(UNCLEAR, None)
    ratio = new["median_us"] / old["median_us"]
    meet = old["p20_us"] <= new["p80_us"] and new["p20_us"] <= old["p80_us"]
    noise = max((r["p80_us"] - r["p20_us"]) / max(r["median_us"], 1e-9) for r in (old, new))
    near = abs(ratio - 1) <= tolerance or abs(new["median_us"] - old["median_us"]) <= GRAIN_US
    if not meet and not near:
        return Verdict(FASTER if ratio < 1 else SLOWER, ratio)
    if near and noise <= NOISY + (2 * GRAIN_US) / max(old["median_us"], 1e-9):
        return Verdict(SAME, ratio)
    return Verdict(UNCLEAR, ratio)


def compare(old: list, new: list, tolerance: float = TOLERANCE) -> dict:
    """Rows of both by key. Rows without times (absent providers) on both sides are left out."""
    before = {key(r): r for r in old}
    after = {key(r): r for r in new}
    rows, lost, added = [], [], []
    for k, r in after.items():
        if k not in before:
            added += [r] if r["median_us"] is not None else []
        elif r["median_us"] is None and before[k]["median_us"] is None:
            continue
        else:
            word, ratio = verdict(before[k], r, tolerance)
            rows.append(dict(op=r["op"], provider=r["provider"], shape=r["shape"], dtype=r["dtype"], cold=r["cold"], verdict=word, ratio=ratio,
                             old_us=before[k]["median_us"], new_us=r["median_us"], correct=r.get("correct")))
    lost = [r for k, r in before.items() if k not in after and r["median_us"] is not None]
    count = {w: sum(r["verdict"] == w for r in rows) for w in (SAME, FASTER, SLOWER, UNCLEAR)}
    return dict(rows=rows, count=count, only_old=len(lost), only_new=len(added), same_share=count[SAME] / len(rows) if rows else None,
                notes=_notes(old, new))


def _notes(old: list, new: list) -> list:
    notes = []
    for name in ("device", "device_type"):
        a, b = ({str(r.get(name)) for r in rows} for rows in (old, new))
        if a != b:
            notes.append(f"{name}: {', '.join(sorted(a))} against {', '.join(sorted(b))}: differences may be the machine's")
    a, b = ({f"{k} {v}" for r in rows for k, v in r["versions"].items()} for rows in (old, new))
    if a != b:
        notes.append(f"versions that differ: {', '.join(sorted(a - b)) or 'none'} against {', '.join(sorted(b - a)) or 'none'}")
    return notes


def table(result: dict, everything: bool = False) -> tuple:
    """(header, cells): rows that are not SAME, or all; the largest change first."""
    header = ["op", "provider", "shape", "dtype", "old us", "new us", "new/old", "verdict"]
    wanted = [r for r in result["rows"] if everything or r["verdict"] != SAME]
    wanted.sort(key=lambda r: -abs((r["ratio"] or 1.0) - 1))
    return header, [[r["op"], r["provider"], shape_text(r["shape"]), r["dtype"], figure(r["old_us"]), figure(r["new_us"]),
                     f"{r['ratio']:.3f}" if r["ratio"] is not None else "-", r["verdict"]] for r in wanted]


def summary(result: dict) -> str:
    c, n = result["count"], len(result["rows"])
    if not n:
        return "no row is in both"
    text = ", ".join(f"{c[w]} {w}" for w in (SAME, FASTER, SLOWER, UNCLEAR) if c[w])
    more = [f"{result[k]} only in the {w}" for k, w in (("only_old", "first"), ("only_new", "second")) if result[k]]
    return f"{n} rows in both: {text} ({100 * result['same_share']:.1f} % SAME)" + (f"; {', '.join(more)}" if more else "")
