"""A verify of Kimi-K2.5 on 8 GPUs over PCIe Gen5, today against ours: a model, every input named; no GPU needed.

    python benchmarks/comm/model_page.py                                     # the table of docs/performance.md
    fastverify doctor --allreduce --config CONFIG.json --rows 1,2,4,8,16,32,64 --json > doctor.json
    python benchmarks/comm/model_page.py --doctor doctor.json                # your machine's all-reduces in place of the model's

Reads of weights and KV cache are fastverify.cost_model's (bytes over bandwidth). An all-reduce of S bytes of one rank, W = 8:
    ours, P2P      FIXED + 2 HOP + 1.75 S / LINK                  two-shot, residual and norm in the same launch
    ours, mailbox  FIXED + 2 HOST_HOP + W 3.5 S / HOST            every byte is written to and read from host memory once
    NCCL           what others measured, between the sizes by straight lines, plus NORM for the two kernels that follow it
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Optional

from fastverify.cost_model import Machine, forward, read_config

KIMI = dict(num_hidden_layers=61, hidden_size=7168, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
            n_shared_experts=1, first_k_dense_replace=1, intermediate_size=18432, vocab_size=163840)
MACHINE = Machine(8, 1500.0, 25.4, expert_bits=4.5, shared_bits=16, context=8192)
FIXED, HOP, LINK = 2.6, 1.07, 25.4e3   # us; us; bytes per us of GPU stores to all peers at once
HOST_HOP, HOST = 3.1, 114e3            # us; bytes per us of all GPUs with host memory together
NORM = 2.5                             # us of residual add + RMSNorm as kernels of their own
KIB = 1024
SIZES = (12 * KIB, 32 * KIB, 64 * KIB, 96 * KIB, 128 * KIB, 256 * KIB, 384 * KIB, 1024 * KIB)
TODAY = {12 * KIB: 205.1, 96 * KIB: 584.9, 384 * KIB: 1169.0}                                  # NCCL without P2P, two sockets
UNTUNED = {32 * KIB: 48.2, 64 * KIB: 48.7, 128 * KIB: 51.6, 256 * KIB: 56.5}                   # NCCL with P2P
TUNED = {32 * KIB: 24.6, 64 * KIB: 24.6, 256 * KIB: 28.0}                                      # the same, graph XML or switches
ROWS = (1, 2, 4, 8, 16, 32, 64)


def between(points: dict, nbytes: float) -> float:
    """Straight lines between measured sizes; the first value below them, the last slope beyond."""
    known = sorted(points.items())
    if nbytes <= known[0][0]:
        return known[0][1]
    (a, x), (b, y) = next(((p, q) for p, q in zip(known, known[1:]) if nbytes <= q[0]), (known[-2], known[-1]))
    return x + (y - x) * (nbytes - a) / (b - a)


def ours_p2p(nbytes: float) -> float:
    return FIXED + 2 * HOP + 1.75 * nbytes / LINK


def ours_mailbox(nbytes: float) -> float:
    return FIXED + 2 * HOST_HOP + 8 * 3.5 * nbytes / HOST


WAYS = {"NCCL today": lambda s: between(TODAY, s) + NORM, "NCCL, P2P untuned": lambda s: between(UNTUNED, s) + NORM,
        "NCCL, P2P tuned": lambda s: between(TUNED, s) + NORM, "ours, mailbox": ours_mailbox, "ours, P2P": ours_p2p}


def measured_ways(doctor: dict) -> dict:
    """The same kind of functions from a `fastverify doctor --allreduce --json` report."""
    rows = doctor["facts"]["allreduce"]["rows"]
    nccl = {r["bytes"]: r["graph_us"] + NORM for r in rows if r.get("graph_us") is not None}
    found = {"NCCL here": nccl}
    for name in ("host + norm", "peer + norm"):
        found[f"ours, {name.split()[0]}"] = {r["bytes"]: r["ours"][name] for r in rows if r["ours"].get(name) is not None}
    return {name: (lambda s, p=points: between(p, s)) for name, points in found.items() if len(points) > 1}


def table(ways: dict, rows: tuple = ROWS) -> list:
    """Markdown lines: per rows the message, what is read, and per way us of an all-reduce and ms of the verify."""
    weights = read_config(KIMI)
    out = ["| rows | KiB | reads ms | " + " | ".join(f"{n} us | verify ms" for n in ways) + " |", "|" + "---|" * (3 + 2 * len(ways))]
    for n in rows:
        f = forward(weights, MACHINE, n, 0.0)
        reads, message = f.shared + f.experts + f.kv, n * weights.hidden * 2
        cells = []
        for way in ways.values():
            us = way(message)
            cells += [f"{us:.0f}" if us >= 20 else f"{us:.1f}", f"{reads + weights.allreduces * us / 1e3:.1f}"]
        out.append(f"| {n} | {message / KIB:.0f} | {reads:.2f} | " + " | ".join(cells) + " |")
    return out


def main(argv: Optional[list] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--doctor", type=Path, help="report of `fastverify doctor --allreduce --json`: its times replace the model's")
    args = parser.parse_args(argv)
    ways = measured_ways(json.loads(args.doctor.read_text())) if args.doctor else WAYS
    if not ways:
        print("model_page: the report must hold all-reduces of at least two sizes; got none. Fix: doctor --allreduce --rows 1,4,16,64.",
              file=sys.stderr)
        return 2
    print("\n".join(table(ways)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
