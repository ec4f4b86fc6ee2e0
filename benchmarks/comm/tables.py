"""Markdown tables of what multi_gpu.py measured: `python benchmarks/comm/tables.py [--write]` (docs/communication.md holds them).

Lines are providers, columns are rows of [rows, 7168]; linear_all_reduce has a line per shape with its best cut.
"""

import json
import re
import sys
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "communication.md"
MARK = re.compile(r"(<!-- multi-gpu -->\n)(.*?)(\n<!-- /multi-gpu -->)", re.S)


def figure(us: Optional[float]) -> str:
    return "-" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def cell(row: Optional[dict]) -> str:
    return "-" if row is None else figure(row["median_us"]) + ("*" if row["correct"] is False else "")


def line(cells: list) -> str:
    return "| " + " | ".join(str(c) for c in cells) + " |"


def header(cells: list) -> list:
    return [line(cells), "|" + "---|" * len(cells)]


def sums(rows: list, op: str) -> list:
    """Providers by message size."""
    mine = [r for r in rows if r["op"] == op and "rows" in r["shape"]]
    sizes = sorted({r["shape"]["rows"] for r in mine})
    by = {(r["provider"], r["shape"]["rows"]): r for r in mine}
    providers = dict.fromkeys(r["provider"] for r in mine)
    return [*header([op, *(f"{n} rows" for n in sizes)]), *(line([p, *(cell(by.get((p, n))) for n in sizes)]) for p in providers)]


def linears(rows: list) -> list:
    """product, sum, both in turn, the best cut, and what it hides of the shorter part: against the faster of both sums in turn; on one card, where
    ranks in turn get in each other's way, at most against the two parts alone added up."""
    groups: dict = {}
    for r in rows:
        if r["op"] == "linear_all_reduce" and r["median_us"] is not None:
            s = r["shape"]
            groups.setdefault((s["over"] + (", one card" if s.get("cards") == 1 else ""), s["K"], s["M"]), []).append(r)
    out = header(["over", "K", "M", "product", "sum", "in turn", "best cut", "us", "hidden of the shorter part", "so"])
    for (over, k, m), group in groups.items():
        by = {r["provider"]: r for r in group}
        cuts = [r for r in group if "pieces" in r["provider"] and not r["provider"].startswith("1 ")]
        both = [by[p] for p in ("product, sum, add", "product, then sum", "1 pieces, one resident kernel") if p in by]
        sums = [by[p] for p in ("sum alone", "sum alone, both directions at once") if p in by]
        if not cuts or not both or not sums or "product alone" not in by:
            continue
        best, turn, total = (min(g, key=lambda r: r["median_us"]) for g in (cuts, both, sums))
        parts = (total["median_us"], by["product alone"]["median_us"])
        base = min(turn["median_us"], sum(parts)) if group[0]["shape"].get("cards") == 1 else turn["median_us"]
        gain = base - best["median_us"]
        out.append(line([over, k, m, cell(by["product alone"]), cell(total), cell(turn), best["provider"], cell(best),
                         f"{100 * gain / min(parts):.0f} %", "cut" if gain > 0.03 * base else "one piece"]))
    return out


def verifies(rows: list) -> list:
    mine = [r for r in rows if r["op"] == "verify_tree_sharded"]
    out = header(["N", "law", "provider", "us", "bytes into a rank"])
    for r in mine:
        nbytes = re.search(r"(\d+) bytes in", r["note"])
        out.append(line([r["shape"]["N"], r["shape"]["law"], r["provider"], cell(r), nbytes[1] if nbytes else ""]))
    return out


def loops(rows: list) -> list:
    mine = [r for r in rows if r["op"] == "decode"]
    out = header(["model", "tree", "what", "result"])
    for r in sorted(mine, key=lambda r: r["shape"]["model"]):
        s = r["shape"]
        what = r["provider"] + (f", {s['law']}" if s.get("law", "{}") != "{}" else "") + (f", communicator {s['over']}" if "over" in s else "")
        out.append(line([s["model"], s.get("tree", ""), what, r["note"]]))
    return out


RIVALS = (("sum over peer memory, fused with the norm", "all_reduce_rms_norm", "peer", "NCCL + add + norm"),
          ("sum over peer memory", "all_reduce", "peer", "NCCL"),
          ("sum over the mailbox, fused with the norm", "all_reduce_rms_norm", "host", "NCCL without P2P + add + norm"),
          ("sum over the mailbox", "all_reduce", "host", "NCCL without P2P"))


def rivals(rows: list) -> list:
    """The fastest of our forms against NCCL, by rows: us and how many times faster."""
    by: dict = {}
    for r in rows:
        if r["op"] in ("all_reduce", "all_reduce_rms_norm") and "rows" in r["shape"] and r["median_us"] is not None and "lossy" not in r["provider"]:
            by.setdefault((r["op"], r["shape"]["rows"]), {})[r["provider"]] = r["median_us"]
    sizes = sorted({n for _, n in by})
    out = header(["fastest form against NCCL, us", *(f"{n} rows" for n in sizes)])
    for name, op, way, rival in RIVALS:
        cells = []
        for n in sizes:
            found = by.get((op, n), {})
            ours = [us for p, us in found.items() if p.split(" ")[0] == way]
            cells.append(f"{figure(min(ours))} / {figure(found[rival])} = {found[rival] / min(ours):.1f}x" if ours and rival in found else "-")
        if any(c != "-" for c in cells):
            out.append(line([name, *cells]))
    return out


def page(path: Path) -> str:
    """All tables of one result file."""
    rows = json.loads(path.read_text())["rows"]
    first = rows[0]
    world = next(r["shape"]["W"] for r in rows if "W" in r["shape"])
    versions = {k: v for k, v in first["versions"].items() if k in ("torch", "cuda")}
    commands = list(dict.fromkeys(r["command"] for r in rows))
    checked = [r for r in rows if r["correct"] is not None]
    parts = [f"{world} x {first['device']}, {first['date'][:10]}, " + ", ".join(f"{k} {v}" for k, v in versions.items()) +
             f"; us per call, the least over ranks of the medians of graph replays; `{'`, `'.join(commands)}`; "
             f"`benchmarks/results/{path.name}`. {len(checked)} rows were checked in that run, {sum(r['correct'] is False for r in checked)} were wrong."]
    for title, lines in (("", rivals(rows)), ("", sums(rows, "all_reduce")), ("", sums(rows, "all_reduce_rms_norm")),
                         ("`linear_all_reduce`, N = 7168:", linears(rows)),
                         ("`verify_tree` over a vocabulary of 163840, vocab-parallel against all-gather + verify:", verifies(rows)),
                         ("The decode loop:", loops(rows))):
        if len(lines) > 2:
            parts += ([title] if title else []) + ["\n".join(lines)]
    return "\n\n".join(parts)


def newest() -> Optional[Path]:
    found = sorted((ROOT / "benchmarks" / "results").glob("*-x[2-8]-????-??-??.json"), key=lambda p: (p.stem[-10:], p.name))
    return found[-1] if found else None


def main(argv: list) -> int:
    path = newest()
    if path is None:
        print("tables: no result of multi_gpu.py in benchmarks/results", file=sys.stderr)
        return 2
    if "--write" in argv:
        text = DOC.read_text()
        DOC.write_text(MARK.sub(lambda m: m[1] + page(path) + m[3], text))
    else:
        print(page(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
