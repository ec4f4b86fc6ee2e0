"""Tables of GPU results for the documentation: one line per shape, one column per provider, from <device>-<date>.json of harness.py."""

import json
from pathlib import Path


def figure(us) -> str:
    return "-" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def newest(results: Path, op: str) -> tuple:
    """(file name, rows of `op`) of the newest GPU result file that has any; (None, []) without one."""
    for path in sorted(results.glob("*-????-??-??.json"), key=lambda p: (p.stem[-10:], p.name), reverse=True):
        data = json.loads(path.read_text())
        rows = [r for r in data.get("rows", ()) if r.get("op") == op and r.get("device_type") == "cuda"]
        if rows:
            return path.name, rows
    return None, []


def pivot(rows: list) -> tuple:
    """(header, lines): axes of the shape, floor, then the median of every provider ("-": absent or failed).

    A wrong result is marked with *; "warm" lines had their inputs in the L2.
    """
    axes = list(dict.fromkeys(a for r in rows for a in r["shape"]))
    providers = list(dict.fromkeys(r["provider"] for r in rows))
    lines = {}
    for r in rows:
        key = (json.dumps(r["shape"], sort_keys=True), r["dtype"], r["cold"])
        lines.setdefault(key, []).append(r)
    table = []
    for group in lines.values():
        by = {r["provider"]: r for r in group}
        cells = [figure(by[p]["median_us"]) + ("*" if by[p]["correct"] is False else "") if p in by else "-" for p in providers]
        floor = next((r["floor_us"] for r in group if r["floor_us"] is not None), None)
        first = group[0]
        table.append([*(str(first["shape"].get(a, "")) for a in axes), first["dtype"], "cold" if first["cold"] else "warm",
                      figure(floor), *cells])
    return [*axes, "dtype", "L2", "floor", *providers], table


def gpu_part(results: Path, op: str) -> str:
    """Caption and table of one op, "" without results. Microseconds, median."""
    name, rows = newest(results, op)
    if not rows:
        return ""
    first = rows[0]
    commands = list(dict.fromkeys(r["command"] for r in rows))
    peers = {k: v for r in rows for k, v in r["versions"].items() if k not in ("python", "fastverify")}
    header, lines = pivot(rows)
    caption = (f"{first['device']}, {first['date'][:10]}, {', '.join(f'{k} {v}' for k, v in peers.items())}; median us, copy "
               f"{first['copy_gb_s']:.0f} GB/s, empty graph node {first['empty_us']:.2f} us; `{'`, `'.join(commands)}`; "
               f"`benchmarks/results/{name}`:")
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in lines)]
    wrong = sum(r["correct"] is False for r in rows)
    checked = sum(r["correct"] is not None for r in rows)
    return "\n".join([caption, "", *table, "", f"{checked} of {len(rows)} rows were checked in that run, {wrong} were wrong."])
