"""Tables of GPU results for the documentation: one line per shape, one column per provider, from <device>-<date>.json of harness.py."""

import json
from pathlib import Path


def figure(us) -> str:
    return "-" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def files(results: Path, op: str) -> list:
    """[(file name, rows of `op`)] of the GPU result files that have some, the one with the latest row last."""
    found = []
    for path in sorted(results.glob("*-????-??-??.json")):
        rows = [r for r in json.loads(path.read_text()).get("rows", ()) if r.get("op") == op and r.get("device_type") == "cuda"]
        if rows:
            found.append((path.name, rows))
    return sorted(found, key=lambda f: max(r["date"] for r in f[1]))


def newest(results: Path, op: str) -> tuple:
    """(file name, rows of `op`) of the GPU result file that has the latest ones; (None, []) without one."""
    return (files(results, op) or [(None, [])])[-1]


def line_of(r: dict) -> tuple:
    return json.dumps(r["shape"], sort_keys=True), r["dtype"], r["cold"]


def earlier(found: list) -> tuple:
    """(file name, rows) of the file before the newest (of `files`), of the same device: of providers that the newest has not measured (a form
    of ours that the plain command leaves out, a peer that was not installed), and whatever the newest lacks of the lines that they are in."""
    mine = [f for f in found[:-1] if f[1][0]["device"] == found[-1][1][0]["device"]]
    if not mine:
        return None, []
    name, rows = mine[-1]
    there = {(r["provider"], *line_of(r)) for r in found[-1][1] if r["median_us"] is not None}
    measured, rows = {key[0] for key in there}, [r for r in rows if r["median_us"] is not None]
    lines = {line_of(r) for r in rows if r["provider"] not in measured}
    return name, [r for r in rows if line_of(r) in lines and (r["provider"], *line_of(r)) not in there]


def pivot(rows: list, old: list = ()) -> tuple:
    """(header, lines): axes of the shape, floor, then the median of every provider ("-": absent or failed).

    A wrong result is marked with *, one of an earlier file (`old`) with +; "warm" lines had their inputs in the L2.
    """
    rows, before = [*rows, *old], {id(r) for r in old}
    axes = list(dict.fromkeys(a for r in rows for a in r["shape"]))
    providers = list(dict.fromkeys(r["provider"] for r in rows if r["median_us"] is not None))
    lines = {}
    for r in rows:
        lines.setdefault(line_of(r), []).append(r)
    table = []
    for group in lines.values():
        by = {r["provider"]: r for r in group}
        cells = [figure(by[p]["median_us"]) + ("*" if by[p]["correct"] is False else "") + ("+" if id(by[p]) in before else "") if p in by else "-"
                 for p in providers]
        floor = next((r["floor_us"] for r in group if r["floor_us"] is not None), None)
        first = group[0]
        table.append([*(str(first["shape"].get(a, "")) for a in axes), first["dtype"], "cold" if first["cold"] else "warm",
                      figure(floor), *cells])
    return [*axes, "dtype", "L2", "floor", *providers], table


def gpu_part(results: Path, op: str) -> str:
    """Caption and table of one op, "" without results. Microseconds, median."""
    found = files(results, op)
    if not found:
        return ""
    name, rows = found[-1]
    first = rows[0]
    commands = list(dict.fromkeys(r["command"] for r in rows))
    peers = {k: v for r in rows for k, v in r["versions"].items() if k not in ("python", "fastverify")}
    source, old = earlier(found)
    header, lines = pivot(rows, old)
    caption = (f"{first['device']}, {first['date'][:10]}, {', '.join(f'{k} {v}' for k, v in peers.items())}; median us, copy "
               f"{first['copy_gb_s']:.0f} GB/s, empty graph node {first['empty_us']:.2f} us; `{'`, `'.join(commands)}`; "
               f"`benchmarks/results/{name}`:")
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in lines)]
    wrong = sum(r["correct"] is False for r in rows)
    checked = sum(r["correct"] is not None for r in rows)
    said = f"{checked} of {len(rows)} rows were checked in that run, {wrong} were wrong."
    if old:
        said += f" +: of {max(r['date'] for r in old)[:10]}, `benchmarks/results/{source}`, {sum(r['correct'] is False for r in old)} wrong."
    return "\n".join([caption, "", *table, "", said])


# op, its provider, the shapes of the README's table (axes that are not named: any), what they are. First rows of a kind first.
SUMMARY = (
    ("tree_attention", "cuda", dict(B=1, N=16, KV=8192), "1 request, 16 nodes, 8192 tokens, heads 32/8 x 128"),
    ("tree_attention", "cuda", dict(B=8, N=16, KV=8192), "8 requests, the same"),
    ("mla_tree_attention", "cuda", dict(H=8, B=4, N=8, KV=32768), "8 heads (Kimi-K2.5 at TP 8), 4 requests, 8 nodes, 32768 tokens"),
    ("rope_append", "cuda", dict(R=16, norm=True, cache="bfloat16"), "16 rows, norm, RoPE, append"),
    ("draft_topk", "fastverify", dict(rows=8, V=32000, k=10), "8 rows of 32000, k = 10"),
    ("grow_tree", "fastverify", dict(B=8, k=10, H=7168), "8 requests, k = 10, hidden 7168"),
    ("build_tree", "fastverify", dict(B=8, k=10, N=64), "8 requests, 64 of 710"),
    ("verify_tree", "cuda", dict(B=1, N=16, V=128256, law="greedy", logits="random", accepted=3), "1 request, 16 nodes, greedy"),
    ("verify_tree", "cuda", dict(B=1, N=16, V=128256, law="temperature", logits="random", accepted=3), "the same, temperature 0.8"),
    ("verify_tree", "cuda", dict(B=8, N=32, V=128256, law="top-k+top-p", logits="random", accepted=3), "8 requests, 32 nodes, top-k 50, top-p 0.95"),
    ("lm_head_verify_tree", "cuda", dict(N=16, H=4096, V=128256, law="temperature"), "16 nodes, hidden 4096"),
    ("compact_kv", "fastverify", dict(B=8, kind="latent 576"), "61 layers, 8 requests, 4 rows, latent 576"),
)
OURS = ("cuda", "fastverify", "triton", "sglang + our drop-in", "cpu")
PARTS_ONLY = ("GEMM alone",)  # not the whole work


def peer_of(rows: list) -> dict:
    """The fastest row that is not ours, does the whole work, and was not wrong; None without one."""
    others = [r for r in rows if not r["provider"].startswith(OURS) and r["provider"] not in PARTS_ONLY and r["median_us"] is not None
              and r["correct"] is not False]
    return min(others, key=lambda r: r["median_us"], default=None)


def summary(results: Path) -> str:
    """The README's table: one line per entry of SUMMARY that has a result, ours beside the fastest peer of the same file."""
    lines, sources, apart = [], {}, {}
    for op, provider, shape, what in SUMMARY:
        name, rows = newest(results, op)
        mine = [r for r in rows if all(r["shape"].get(k) == v for k, v in shape.items())]
        ours = next((r for r in mine if r["provider"] == provider and r["median_us"] is not None), None)
        if ours is None:
            continue
        peer = peer_of([r for r in mine if r["shape"] == ours["shape"] and r["dtype"] == ours["dtype"] and r["cold"] == ours["cold"]])
        if peer and peer["command"] != ours["command"]:
            apart[f"`{op}`"] = None
        against = f"{peer['median_us'] / ours['median_us']:.1f}x" if peer else "-"
        floor = figure(max(ours["floor_us"], ours["empty_us"])) + ("*" if ours["floor_us"] < ours["empty_us"] else "")
        lines.append([f"`{op}`", what, floor, figure(ours["median_us"]) + ("" if ours["correct"] is not False else " (WRONG)"),
                      f"{peer['provider']} {figure(peer['median_us'])}" if peer else "-", against])
        sources.setdefault((ours["device"], ours["date"][:10], ours["versions"]["torch"], name), None)
    if not lines:
        return ""
    header = ["op", "what", "floor us", "ours us", "fastest peer, us", "peer / ours"]
    others = f" ({', '.join(apart)}: another run of the file)" if apart else ""
    said = "; ".join(f"{device}, {date}, torch {torch}, `benchmarks/results/{name}`" for device, date, torch, name in sources)
    return "\n".join([f"One GPU, CUDA graph replay, cold L2, bfloat16, median; each row of a file holds its command, `fastverify bench run` is all of them: {said}:", "",
                      "| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(r) + " |" for r in lines), "",
                      "Floor: bytes that must move over the copy bandwidth measured in that run (*: an empty graph node takes longer, and is shown). Peers "
                      f"under the same output law, in the same run{others}; all rows: docs/gpu_results.md; why: docs/performance.md."])
