"""plan from a model's config and an interconnect."""

import argparse
import json
from pathlib import Path

from ..cost_model import (ALLREDUCE_US, LINK_GB_S, Machine, break_even_tau, chain_tau, distinct_experts, forward, read_config,
                          tokens_per_second)
from ..eagle3.shapes import parse_shape
from .output import Output
from .plan import allreduce_times, numbers

FASTEST = {"pcie5": "kernel", "pcie4": "kernel", "nvlink": "nvlink-kernel", "host": "host-mailbox"}  # per link


def compute(args: argparse.Namespace, taus: list) -> dict:
    """The JSON of a plan."""
    weights = read_config(_config(args.config))
    machine = Machine(args.ranks, args.memory_gbs, LINK_GB_S[args.link], args.expert_bits, args.shared_bits, args.context)
    times = allreduce_times(args.allreduce or f"nccl-misconfigured,nccl-p2p,{FASTEST[args.link]}") if args.ranks > 1 else [("none", 0.0)]
    names = list(dict.fromkeys(args.shapes.split(",")))
    if "auto" in names:
        raise ValueError("plan: shapes must be fixed ones; got auto. Fix: name them, as --shapes chain-3,tree-20.")
    shapes = [parse_shape(name) for name in names]
    rates = numbers("accept", args.accept, 0.0, 1.0) if args.accept else None
    rows = []
    for name, us in times:
        plain = args.plain_ms or forward(weights, machine, 1, us).total
        for shape in shapes:
            f = forward(weights, machine, shape.nodes, us)
            draft = shape.levels * args.draft_step_ms if shape.speculative else 0.0
            total = f.total + draft + (args.other_ms if shape.speculative else 0.0)
            tau = chain_tau(rates, shape.levels) if rates and shape.name.startswith("chain-") else None
            rows.append({
                "allreduce": name, "allreduce_us": us, "shape": shape.name, "rows": shape.nodes, "plain_ms": plain,
                "experts": distinct_experts(weights.experts, weights.top_k, shape.nodes) if weights.experts else 0.0,
                "message_bytes": f.message, "allreduce_each_us": f.allreduce_each_us, "shared_ms": f.shared,
                "experts_ms": f.experts, "kv_ms": f.kv, "allreduce_ms": f.allreduce, "verify_ms": f.total, "draft_ms": draft,
                "round_ms": total, "break_even_tau": break_even_tau(plain, f.total, total - f.total), "tau": tau,
                "speed_up": None if tau is None else tau * plain / total,
                "tokens_per_second": {f"{t:g}": tokens_per_second(t, total) for t in taus}})
    return {"layers": weights.layers, "hidden": weights.hidden, "experts": weights.experts, "top_k": weights.top_k,
            "allreduces": weights.allreduces if args.ranks > 1 else 0, "ranks": args.ranks, "rows": rows,
            "change_first": _change_first(rows, ALLREDUCE_US[FASTEST[args.link]][0])}


def _config(path: str) -> dict:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"plan: config must be an existing file, or a folder with config.json; got {path}. "
                         "Fix: check the path.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    if not isinstance(data, dict):
        raise ValueError(f"plan: config must be a JSON object; got {file}, which is none. Fix: pass the model's config.json.")
    return data


def _change_first(rows: list, reachable_us: float) -> list:
    """One line per all-reduce time: what a round of its best shape (lowest break-even without --accept) spends most on."""
    lines = []
    by_time: dict = {}
    for r in rows:
        by_time.setdefault((r["allreduce"], r["allreduce_us"]), []).append(r)
    for (name, us), group in by_time.items():
        r = max(group, key=lambda r: (r["speed_up"] or 0.0, -r["break_even_tau"]))
        where = f"{name} ({us:g} us), {r['shape']}" if us else r["shape"]
        parts = {"all-reduces": r["allreduce_ms"], "expert weights": r["experts_ms"], "other weights": r["shared_ms"],
                 "KV cache": r["kv_ms"], "draft": r["draft_ms"]}
        part = max(parts, key=parts.get)
        advice = {"all-reduces": f"a faster all-reduce ({reachable_us:g} us)" if us > reachable_us else
                  "fewer bytes and fewer collectives (fusion with the norm)",
                  "expert weights": "fewer rows: chains or small trees; fewer bits per expert weight",
                  "other weights": "fewer bits per weight; more rows are nearly free", "KV cache": "a smaller KV dtype",
                  "draft": "a faster draft step or fewer levels"}[part]
        lines.append(f"{where}: {part} take {parts[part]:.1f} of {r['round_ms']:.1f} ms; {advice}")
    return lines


def show(out: Output, data: dict) -> None:
    moe = f", {data['experts']} experts, top-{data['top_k']}" if data["experts"] else ", dense"
    out.line(f"{data['layers']} layers, hidden {data['hidden']}{moe}; {data['ranks']} ranks, {data['allreduces']} all-reduces a "
             "forward. Bytes over bandwidth: no launch gaps, no skew")
    out.line("verify and round in ms, break-even tau, all-reduce (AR) in us, and tok/s at accept length tau:")
    taus = list(data["rows"][0]["tokens_per_second"])
    with_tau = any(r["tau"] is not None for r in data["rows"])
    seen: dict = {}
    for r in data["rows"]:
        seen.setdefault((r["allreduce"], r["allreduce_us"]), []).append(r)
    for (name, us), rows in seen.items():
        out.line()
        header = ["shape", "rows"] + (["experts"] if data["experts"] else []) + ["AR us", "verify", "round", "break-even"]
        header += (["tau", "speed-up"] if with_tau else []) + [f"tau {t}" for t in taus]
        table = []
        for r in rows:
            row = [r["shape"], str(r["rows"])] + ([f"{r['experts']:.0f}"] if data["experts"] else [])
            row += [f"{r['allreduce_each_us']:.1f}"]
            row += [f"{r[key]:.2f}" for key in ("verify_ms", "round_ms", "break_even_tau")]
            if with_tau:
                row += ["", ""] if r["tau"] is None else [f"{r['tau']:.2f}", f"{r['speed_up']:.2f}"]
            table.append(row + [f"{r['tokens_per_second'][t]:.0f}" for t in taus])
        title = f"plain {rows[0]['plain_ms']:.2f} ms" + (f", all-reduce {name} ({us:g} us)" if us else "")
        out.line(title)
        out.wide_table(header, table)
    out.line()
    out.line("change first:", style="bold")
    for line in data["change_first"]:
        out.line(line)
