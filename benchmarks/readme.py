"""Fills the generated parts of README.md and docs (FILES) from benchmarks/results/*.json.

    python benchmarks/readme.py           rewrite them
    python benchmarks/readme.py --check   exit 1 if they differ (a test runs this: no number is edited by hand)

Sources: <device>-evaluate-<what>-<date>.json, written by `fastverify evaluate --json`; cpu-op-share-<date>.json, written
by `python benchmarks/loop/bench_op_share.py --json`; <device>-probe-<date>.json, written by `fastverify probe --out`;
<device>-lengths-<date>.json, written by `python benchmarks/loop/accept_lengths.py --json`.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_tables import gpu_part, summary  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FILES = (ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("performance", "gpu_results", "plan_and_trace", "drafts")))


def load(kind: str) -> tuple:
    """(file name, content) of the newest result of a kind, or (None, None)."""
    found = sorted(RESULTS.glob(f"*-{kind}-*.json"), key=lambda p: p.stem[-10:])
    return (found[-1].name, json.loads(found[-1].read_text())) if found else (None, None)


def where(name: str, data: dict) -> str:
    e = data["environment"]
    return (f"{e['device']}, {e['threads']} threads, {e['dtype']}, torch {e['torch']}, {e['date'][:10]}; "
            f"{data['max_new_tokens']} new tokens, batch {data['batch']}; `{e['command']}`; "
            f"`benchmarks/results/{name}`")


def auto_rows(data: dict) -> list:
    return [r for r in data["rows"] if r["tree"] == "auto"]


def loop_line() -> str:
    """The decode loop on a GPU: plain and the fastest shape, means over the sets of <device>-smollm2-loop.json."""
    found = sorted(RESULTS.glob("*-smollm2-loop.json"))
    if not found:
        return ""
    data, means = json.loads(found[-1].read_text()), {}
    for shape in dict.fromkeys(r["shape"] for r in data["speed"]):
        mine = [r for r in data["speed"] if r["shape"] == shape]
        means[shape] = [sum(r[k] for r in mine) / len(mine) for k in ("tok_s", "against")] + [len(mine)]
    best = max(means, key=lambda s: means[s][0])
    peer = max((p for p in data.get("peers", ()) if p["provider"].startswith("transformers")), key=lambda p: p["tok_s"], default=None)
    return (f"* **One {data['device'].removeprefix('NVIDIA ')}**: SmolLM2-135M with the EAGLE-3 head that ships here decodes {means[best][0]:.0f} tok/s with {best}, "
            f"**{means[best][1]:.2f}x** the {means['off'][0]:.0f} of plain\n  decoding (batch 1, greedy, mean of {means[best][2]} sets, {data['date'][:10]}; docs/decode_loop.md)"
            + (f"; {peer['provider']}: {peer['tok_s']:.0f}." if peer else "."))


def comm_line() -> str:
    """Sum, residual and norm over a mailbox in host memory against NCCL without P2P, from <n>-x2-<date>.json."""
    found = sorted(RESULTS.glob("*-x2-????-??-??.json"), key=lambda p: p.stem[-10:])
    rows = [r for r in json.loads(found[-1].read_text())["rows"] if r["op"] == "all_reduce_rms_norm" and r["median_us"] and r["correct"] is not False] if found else []
    by = lambda provider: {r["shape"]["rows"]: r for r in rows if r["provider"] == provider and r["shape"]["W"] == 2}  # noqa: E731
    ours, nccl = by("host one-shot"), by("NCCL without P2P + add + norm")
    both = [n for n in sorted(ours) if n in nccl and n <= 16]
    if not both:
        return ""
    low, high = both[0], both[-1]
    return (f"* **GPUs without peer access** (mailboxes over PCIe, {ours[low]['device'].removeprefix('NVIDIA ')} x 2): sum over ranks, residual and RMSNorm of {low} and {high} rows of "
            f"{ours[low]['shape']['H']} take {ours[low]['median_us']:.1f} and {ours[high]['median_us']:.1f} us\n  in one launch, "
            f"NCCL, add and norm {nccl[low]['median_us']:.1f} and {nccl[high]['median_us']:.1f} ({ours[low]['date'][:10]}; docs/communication.md).")


def cpu_line() -> str:
    name, data = load("evaluate-auto")
    if data is None:
        return ""
    rows, e = auto_rows(data), data["environment"]
    low, high = min(r["speedup"] for r in rows), max(r["speedup"] for r in rows)
    return (f"* **On a CPU** ({e['device']}, {e['threads']} threads): {low:.2f}x to {high:.2f}x plain decoding over {len(rows)} sets, "
            f"{sum(r['equal'] for r in rows)} of {sum(r['prompts'] for r in rows)} answers equal token for token\n"
            f"  (SmolLM2-135M, first version of the head, `--tree auto`, {e['date'][:10]}; table below).")


def headline() -> str:
    return "\n".join(filter(None, (comm_line(), loop_line(), cpu_line())))


def table(header: list, rows: list) -> list:
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in rows)]


def set_table(rows: list, timed: bool) -> list:
    header = ["set", "shape", "tau", "accepted/drafted", "depth 1", "distinct 4-grams"]
    cells = [[r["set"], r["tree"], f"{r['tau']:.2f}", f"{r['accepted']}/{r['drafted']}", f"{r['depth_1']:.2f}",
              f"{r['distinct_4gram_ratio']:.2f}"] for r in rows]
    if all("equal" in r for r in rows):
        header.append("equal to plain")
        for c, r in zip(cells, rows):
            c.append(f"{r['equal']}/{r['prompts']}")
    if timed:
        header += ["against plain", "break-even tau"]
        for c, r in zip(cells, rows):
            c += [f"{r['speedup']:.2f}x", f"{r['break_even_tau']:.2f}" if r["break_even_tau"] else "-"]
    return table(header, cells)


def results() -> str:
    name, data = load("evaluate-auto")
    return "\n".join([f"{where(name, data)}:", "", *set_table(auto_rows(data), True)]) if data else ""


SHAPES = (("evaluate-auto", "Timed, greedy, machine otherwise idle", True), ("evaluate-greedy", "Greedy", False),
          ("evaluate-sampled", "Temperature 0.8, top-p 0.95, seeded", False), ("evaluate-ngram", "N-gram drafter, the same sampling", False),
          ("evaluate-chains", "The chain that tree-20 (depth 5) must not fall below, same prompts", False))


def shapes() -> str:
    out = []
    for kind, title, timed in SHAPES:
        name, data = load(kind)
        if data:
            out += [f"{title} ({where(name, data)}):", "", *set_table(data["rows"], timed), ""]
    return "\n".join(out).rstrip()


def op_share() -> str:
    name, data = load("op-share")
    if data is None:
        return ""
    ops = sorted({op for r in data["rows"] for op in r["ms"]}, key=lambda op: -max(r["ms"].get(op, 0) for r in data["rows"]))
    rows = [[op, *(f"{100 * r['ms'].get(op, 0) / r['step_ms']:.1f} %" for r in data["rows"])] for op in ops]
    e = data["environment"]
    return "\n".join([f"{e['device']}, {e['threads']} threads, {e['dtype']}, torch {e['torch']}, {e['date'][:10]}, "
                      f"`benchmarks/results/{name}`:", "", *table(["share of a step", *(r["tree"] for r in data["rows"])], rows)])


def probe() -> str:
    """Pieces of a round, prediction against measurement, and the verdict of every drafter and shape."""
    name, data = load("probe")
    if data is None:
        return ""
    header = ["draft", "shape", "tau", "draft ms", "verify ms", "comm", "other", "break-even", "predicted tok/s", "measured", "error",
              "other half", "against plain", "equal"]
    plain = data["rows"][0]["measured"]["tokens_per_second"]
    rows = []
    for r in data["rows"]:
        ms, speed = r["ms"], r["measured"]["tokens_per_second"]
        rows.append([r["draft"], r["shape"], f"{r['tau']:.2f}" + (f" ± {r['tau_standard_error']:.2f}" if r["tau_standard_error"] else ""), *(f"{ms[k]:.2f}" for k in ("draft", "verify", "communication", "other")),
                     f"{r['break_even_tau']:.2f}", f"{r['predicted_tokens_per_second']:.1f}", f"{speed:.1f}",
                     f"{100 * r['error']:+.1f} %", f"{100 * r['error_other_half']:+.1f} %", f"{speed / plain:.2f}x", f"{r['equal']}/{r['prompts']}"])
    verdicts = [f"* {r['draft']} {r['shape']}: {r['verdict']}" for r in data["rows"] if r["verdict"]]
    return "\n".join([f"{where(name, data)}:", "", *table(header, rows), "", *verdicts])


def lengths() -> str:
    """Accept length and (distinct 4-grams) of every shape and temperature, one column per set, and depth-1 agreement."""
    name, data = load("lengths")
    if data is None:
        return ""
    sets, e, runs = list(data["prompts"]), data["environment"], {}
    for r in data["rows"]:
        runs.setdefault((r["tree"], r["temperature"], r["coupled"]), {})[r["set"]] = r
    out = []
    for (tree, temperature, coupled), by_set in runs.items():
        law = "greedy" if temperature == 0 else f"{temperature:g}" + (", coupled" if coupled else ", not coupled")
        rows = [by_set[s] for s in sets]
        out.append([tree, law, *(f"{r['tau']:.2f} ({r['distinct_4gram_ratio']:.2f})" for r in rows), f"{sum(r['tau'] for r in rows) / len(rows):.2f}"])
    for key, title in (("depth_1", "agreement, depth 1"), ("chain_3", "chain-3, replayed")) if "agreement" in data else ():
        values = [data["agreement"][s][key] for s in sets]
        out.append([title, "greedy", *(f"{v:.3f}" if key == "depth_1" else f"{v:.2f}" for v in values),
                    f"{sum(values) / len(values):.3f}" if key == "depth_1" else f"{sum(values) / len(values):.2f}"])
    return "\n".join([f"{e['device']}, {e['dtype']}, torch {e['torch']}, {e['date'][:10]}; {max(data['prompts'].values())} prompts a set, "
                      f"{data['max_new_tokens']} new tokens; `{e['command']}`; `benchmarks/results/{name}`:", "",
                      *table(["shape", "temperature", *sets, "mean"], out)])


def backends() -> str:
    """Which ops run where, from the sources; ops of a stage that run on the same back ends share a line."""
    sys.path.insert(0, str(ROOT / "docs"))
    import make_reference
    lines: dict = {}
    for stage, op, *_ in make_reference.ops():
        if op != "probe" and not op.startswith("sgl_"):
            files = make_reference.where(stage, op)
            lines.setdefault((stage, *("yes" if b in files else "no" for b in ("CPU", "CUDA", "Triton"))), []).append(f"`{op}`")
    rows = [[" ".join(ops), "through gloo" if stage == "comm" else cpu, "yes, on 1 to 8 GPUs of a host" if stage == "comm" and cuda == "yes" else cuda,
             triton] for (stage, cpu, cuda, triton), ops in lines.items()]
    return "\n".join(table(["", "CPU (C++)", "CUDA", "Triton"], rows))


PARTS = {"backends": backends, "gpu-summary": lambda: summary(RESULTS), "headline": headline, "results": results, "shapes": shapes, "op-share": op_share, "probe": probe, "lengths": lengths}


def generated(text: str) -> str:
    """`text` with every part between its markers made anew."""
    for name, make in PARTS.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: m[1] + (make() + "\n" if make() else "") + m[2],
                      text, flags=re.S)
    return re.sub(r"(<!-- gpu: ([\w.]+) -->\n).*?(<!-- /gpu -->)",
                  lambda m: m[1] + (gpu_part(RESULTS, m[2]) or "No stored result.") + "\n" + m[3], text, flags=re.S)


def main() -> int:
    stale = [f for f in FILES if generated(f.read_text()) != f.read_text()]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"{f.name} differs from benchmarks/results. Fix: python benchmarks/readme.py" for f in stale) or "up to date")
        return bool(stale)
    for f in stale:
        f.write_text(generated(f.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
