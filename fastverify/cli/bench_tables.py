"""Rows of benchmarks (benchmarks/harness.py) as tables and Markdown. Pure functions; no torch."""

import json
from pathlib import Path
from typing import Optional

SCHEMA = 1
NEEDED = {"op": str, "provider": str, "shape": dict, "dtype": str, "cold": bool, "command": str, "device": str, "date": str,
          "versions": dict}  # what every row says beside its times
TIMES = ("median_us", "p20_us", "p80_us")


def read_rows(command: str, path: str) -> list:
    """Rows of a result file. ValueError in the house form if it is none."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{command}: every result must be an existing file; got {path}. Fix: fastverify bench run --out DIR writes one.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows or any(wrong(r) for r in rows):
        why = next((w for r in rows if (w := wrong(r))), "") if isinstance(rows, list) else ""
        raise ValueError(f"{command}: every result must be the JSON of a benchmark; got {path}, {why or 'which has no rows'}. "
                         "Fix: fastverify bench run --out DIR writes one.")
    return rows


def wrong(row) -> str:
    """Why this is no row of schema 1, or ""."""
    if not isinstance(row, dict):
        return "which holds something else than rows"
    for name, kind in NEEDED.items():
        if not isinstance(row.get(name), kind):
            return f"a row of which has no {name}"
    times = [row.get(t) for t in TIMES]
    if any(t is not None for t in times) and not all(isinstance(t, (int, float)) and t >= 0 for t in times):
        return "a row of which has no times"
    return ""


def key(row: dict) -> tuple:
    """What one row is about: a later run replaces the row with the same key."""
    return row["op"], row["provider"], json.dumps(row["shape"], sort_keys=True), row["dtype"], row["cold"]


def figure(us: Optional[float]) -> str:
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def shape_text(shape: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in shape.items())


def table_rows(rows: list) -> tuple:
    """(header, cells) of the shown table. `against` is this row's median over that of the shape's first measured provider."""
    axes = list(dict.fromkeys(a for r in rows for a in r["shape"]))
    ops = len({r["op"] for r in rows}) > 1
    header = [*(["op"] if ops else []), "provider", *axes, "dtype", "median us", "p20", "p80", "floor", "against", "correct", "note"]
    first, cells = {}, []
    for r in rows:
        group = (r["op"], json.dumps(r["shape"], sort_keys=True), r["dtype"])
        if r["median_us"] is not None:
            first.setdefault(group, r["median_us"])
        ratio = f"{r['median_us'] / first[group]:.2f}x" if r["median_us"] is not None and first[group] > 0 else ""
        right = {True: "yes", False: "NO", None: ""}.get(r["correct"], str(r["correct"]))
        note = "; ".join(x for x in (r["note"], "" if r["cold"] else "warm") if x)
        cells.append([*([r["op"]] if ops else []), r["provider"], *(str(r["shape"].get(a, "")) for a in axes), r["dtype"],
                      figure(r["median_us"]), figure(r["p20_us"]), figure(r["p80_us"]), figure(r["floor_us"]), ratio, right, note])
    return header, cells


def by_op(rows: list) -> dict:
    groups: dict = {}
    for r in rows:
        groups.setdefault(r["op"], []).append(r)
    return groups


def markdown(rows: list) -> str:
    """One table per op, with device, date, versions and the commands."""
    parts = []
    for op, mine in by_op(rows).items():
        header, cells = table_rows(mine)
        first = mine[0]
        commands = "`, `".join(dict.fromkeys(r["command"] for r in mine))
        versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
        lines = ["| " + " | ".join(row) + " |" for row in (header, *cells)]
        parts.append("\n".join([f"### {op}", "", f"{first['device']}, {first['date'][:10]}, {versions}; us per call, median and percentiles; "
                                f"`{commands}`", "", lines[0], "|" + "---|" * len(header), *lines[1:]]))
    return "\n\n".join(parts) + "\n"
