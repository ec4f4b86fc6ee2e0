"""plan from a probe's JSON: every drafter and shape that was measured, and the chains between them."""

import argparse
import json
from pathlib import Path
from typing import Optional

from ..cost_model import break_even_tau, chain_tau, tokens_per_second
from .output import Output

_ROW = {"draft": str, "shape": str, "nodes": int, "levels": int, "tau": (int, float), "per_depth": list, "ms": dict, "error": object}
_MS = ("draft", "verify", "communication", "other")


def compute(args: argparse.Namespace, taus: list) -> dict:
    """The JSON of a plan."""
    probe = _read(args.probe)
    measured = [_row(r, args, probe) for r in probe["rows"]]
    rows = measured + [r for draft in dict.fromkeys(r["draft"] for r in measured[1:]) for r in _between(measured, draft)]
    plain = args.plain_ms or measured[0]["round_ms"]
    for r in rows:
        if r["shape"] == "off":
            r["round_ms"] = plain
        rest = r["round_ms"] - r["verify_ms"]
        r["break_even_tau"] = 1.0 if r["shape"] == "off" else break_even_tau(plain, r["verify_ms"], rest)
        r["speed_up"] = r["tau"] / r["break_even_tau"]
        r["expected_tokens_per_second"] = tokens_per_second(r["tau"], r["round_ms"])
        r["tokens_per_second"] = {f"{t:g}": tokens_per_second(t, r["round_ms"]) for t in taus}
    rows = rows[:1] + sorted(rows[1:], key=lambda r: -r["speed_up"])
    return {"probe": Path(args.probe).name, "target": probe.get("target"), "world_size": probe.get("world_size"),
            "plain_ms": plain, "plain_tokens_per_second": 1e3 / plain, "rows": rows, "drafts": _drafts(rows),
            "change_first": _change_first(rows, measured[0]["verify_ms"], plain)}


def _read(path: str) -> dict:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"plan: probe must be an existing file; got {path}. Fix: fastverify probe --out {path}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    rows = data.get("rows") if isinstance(data, dict) and data.get("kind") == "fastverify probe" else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"plan: probe must be the JSON of `fastverify probe`; got {path}, which is none. "
                         "Fix: fastverify probe --out FILE")
    for r in rows:
        good = isinstance(r, dict) and all(isinstance(r.get(k), t) for k, t in _ROW.items())
        if not good or not all(isinstance(r["ms"].get(k), (int, float)) and r["ms"][k] >= 0 for k in _MS):
            raise ValueError(f"plan: every row of the probe must have {', '.join(_ROW)}; got one without in {path}. "
                             "Fix: run fastverify probe of this version again.")
    if rows[0]["shape"] != "off" or sum(rows[0]["ms"][k] for k in _MS) <= 0:
        raise ValueError(f"plan: the first row of the probe must be plain decoding; got {rows[0]['shape']} in {path}. "
                         "Fix: run fastverify probe of this version again.")
    return data


def _row(r: dict, args: argparse.Namespace, probe: dict) -> dict:
    verify = r["ms"]["verify"] + r["ms"]["communication"]
    if args.verify_ms is not None and r["shape"] != "off":
        verify = args.verify_ms
    conditional = [d["conditional"] for d in r["per_depth"]]
    return {"draft": r["draft"], "shape": r["shape"], "rows": r["nodes"], "levels": r["levels"], "source": "measured",
            "verify_ms": verify, "draft_ms": r["ms"]["draft"], "other_ms": r["ms"]["other"], "accept": conditional,
            "round_ms": verify + r["ms"]["draft"] + r["ms"]["other"], "tau": r["tau"],
            "measured_tokens_per_second": (r.get("measured") or {}).get("tokens_per_second")}


def _between(rows: list, draft: str) -> list:
    """Chains that were not run, up to the longest one that was: times interpolated by nodes and levels, tau from its rates."""
    chains = sorted((r for r in rows if r["draft"] == draft and r["shape"].startswith("chain-")), key=lambda r: r["rows"])
    if len(chains) < 2 or not chains[-1]["accept"]:
        return []
    longest, points = chains[-1], [rows[0], *chains]
    out = []
    for length in range(1, longest["levels"]):
        if any(r["levels"] == length for r in chains):
            continue
        new = {k: _interpolate(points, length + 1, k) for k in ("verify_ms", "draft_ms", "other_ms")}
        out.append({"draft": draft, "shape": f"chain-{length}", "rows": length + 1, "levels": length, "source": "interpolated",
                    **new, "accept": longest["accept"][:length], "round_ms": sum(new.values()),
                    "tau": chain_tau(longest["accept"], length), "measured_tokens_per_second": None})
    return out


def _interpolate(points: list, nodes: int, key: str) -> float:
    """Linear in the number of nodes, between the two neighbours that were measured."""
    low = max((p for p in points if p["rows"] <= nodes), key=lambda p: p["rows"])
    high = min((p for p in points if p["rows"] >= nodes), key=lambda p: p["rows"])
    if low["rows"] == high["rows"]:
        return low[key]
    return low[key] + (high[key] - low[key]) * (nodes - low["rows"]) / (high["rows"] - low["rows"])


def _drafts(rows: list) -> list:
    """The best shape of each draft, best first."""
    best: dict = {}
    for r in rows[1:]:
        best.setdefault(r["draft"], r)
    return [{"draft": d, "shape": r["shape"], "source": r["source"], "tau": r["tau"], "break_even_tau": r["break_even_tau"],
             "speed_up": r["speed_up"]} for d, r in best.items()]


def _change_first(rows: list, plain_verify: float, plain: float) -> list:
    """What each part of the best shape's round could give, largest first: [{part, saves_ms, speed_up, what}]."""
    if len(rows) < 2:
        return []
    r = rows[1]
    options = [("verify", r["verify_ms"] - plain_verify, f"verify in {plain_verify:.3g} ms, a plain step's"),
               ("draft", r["draft_ms"] / 2, "draft in half the time"),
               ("other", r["other_ms"], "no time between the stages (one CUDA graph)")]
    out = [{"part": part, "saves_ms": saved, "speed_up": r["tau"] * plain / (r["round_ms"] - saved), "what": what}
           for part, saved, what in options if saved > 0.005 * r["round_ms"]]
    deeper = 0.05 * (r["tau"] - 1)
    out.append({"part": "acceptance", "saves_ms": 0.0, "speed_up": (r["tau"] + 2 * deeper) / r["break_even_tau"],
                "what": "10 % more accepted tokens (a draft trained on this target's own text)"})
    return sorted(out, key=lambda o: -o["speed_up"])


def show(out: Output, data: dict) -> None:
    out.line(f"{data['probe']}: {data['target']}; plain decoding {data['plain_ms']:.2f} ms a token, "
             f"{data['plain_tokens_per_second']:.1f} tok/s")
    out.line("ms of a round, break-even tau, expected and measured tok/s, and tok/s at accept length tau:")
    taus = list(data["rows"][0]["tokens_per_second"])
    table = []
    for r in data["rows"]:
        numbers = [f"{r[k]:.2f}" for k in ("draft_ms", "verify_ms", "other_ms", "round_ms", "tau", "break_even_tau", "speed_up")]
        speed = [f"{r['expected_tokens_per_second']:.1f}", _measured(r["measured_tokens_per_second"])]
        table.append([r["draft"], r["shape"], r["source"], *numbers, *speed, *(f"{r['tokens_per_second'][t]:.0f}" for t in taus)])
    out.wide_table(["draft", "shape", "from", "draft ms", "verify", "other", "round", "tau", "break-even", "speed-up", "expected",
                    "measured", *(f"tau {t}" for t in taus)], table, left=3)
    out.line()
    for d in data["drafts"]:
        sign = ">=" if d["speed_up"] >= 1 else "<"
        out.line(f"{d['draft']}: best is {d['shape']} ({d['source']}), tau {d['tau']:.2f} {sign} break-even "
                 f"{d['break_even_tau']:.2f}, {d['speed_up']:.2f}x plain")
    if data["change_first"]:
        out.line(f"change first ({data['rows'][1]['draft']} {data['rows'][1]['shape']}):", style="bold")
        for i, c in enumerate(data["change_first"], 1):
            out.line(f"{i}. {c['part']}: {c['what']}; {c['speed_up']:.2f}x plain")


def _measured(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.1f}"
