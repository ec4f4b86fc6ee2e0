"""Pictures of benchmark rows: roofline per op, a step by stage, all-reduce latency against size. Needs matplotlib."""

from pathlib import Path

from .bench_tables import by_op, shape_text

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MARKERS = "osD^vP*X"
MOST_PANELS = 4


def need_matplotlib(command: str):
    """matplotlib.pyplot without a display, or one sentence."""
    try:
        import matplotlib
    except ImportError as exc:
        raise ValueError(f"{command}: plots must have matplotlib; got none. Fix: pip install matplotlib, or leave --plot out.") from exc
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastverify"
    import matplotlib.pyplot as plt
    return plt


def draw(rows: list, target: Path, suffix: str = "svg") -> list:
    """Every picture that the rows give, in the folder `target`; returns the files."""
    plt = need_matplotlib("bench")
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for op, mine in by_op([r for r in rows if r["median_us"] is not None]).items():
        if op == "step":
            figure = step(plt, mine)
        elif op.startswith("all_reduce"):
            figure = against_size(plt, op, mine)
        elif any(r["bytes"] for r in mine):
            figure = roofline(plt, op, mine)
        else:
            continue
        path = target / f"{op.replace('.', '-')}.{suffix}"
        figure.savefig(path, bbox_inches="tight", dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def caption(rows: list) -> str:
    first = rows[0]
    return f"{first['device']}, {first['date'][:10]}, torch {first['versions'].get('torch', '?')}"


def panels_of(rows: list) -> list:
    """[(title, rows)]: a panel per value of the first axis that is a name (a law, a kind), else one of all."""
    for axis in dict.fromkeys(a for r in rows for a in r["shape"]):
        values = list(dict.fromkeys(r["shape"].get(axis) for r in rows))
        if 1 < len(values) <= MOST_PANELS and all(isinstance(v, str) for v in values):
            return [(f"{axis}: {v}", [r for r in rows if r["shape"][axis] == v]) for v in values]
    return [("", rows)]


def plain_numbers(plt, *axes) -> None:
    """1, 10, 100 instead of powers; 2 and 5 between them where an axis spans less than two decades."""
    for one in axes:
        low, high = one.get_view_interval()
        numbers = plt.FuncFormatter(lambda v, _: f"{v:g}")
        one.set_major_formatter(numbers)
        between = high < 100 * low
        one.set_minor_locator(plt.LogLocator(subs=(2, 5) if between else (2, 3, 4, 5, 6, 7, 8, 9), numticks=20))
        one.set_minor_formatter(numbers if between else plt.NullFormatter())


def roofline(plt, op: str, rows: list):
    """Time against bytes: a point per shape and provider; the floor is bytes over copy bandwidth, and never below an empty node."""
    sized = [r for r in rows if r["bytes"]]
    panels, providers = panels_of(sized), list(dict.fromkeys(r["provider"] for r in sized))
    figure, grid = plt.subplots(1, len(panels), figsize=(max(8, 4.5 * len(panels)), 5), sharex=True, sharey=True, squeeze=False)
    low, high = min(r["bytes"] for r in sized) / 1.5, max(r["bytes"] for r in sized) * 1.5
    speed, empty = sized[0]["copy_gb_s"], sized[0]["empty_us"]
    points = [low * (high / low) ** (i / 60) for i in range(61)]
    for axis, (title, shown) in zip(grid[0], panels):
        for i, provider in enumerate(providers):
            mine = sorted((r for r in shown if r["provider"] == provider), key=lambda r: r["bytes"])
            axis.errorbar([r["bytes"] / 1e6 for r in mine], [r["median_us"] for r in mine],
                          yerr=[[r["median_us"] - r["p20_us"] for r in mine], [r["p80_us"] - r["median_us"] for r in mine]],
                          fmt=MARKERS[i % len(MARKERS)], color=f"C{i}", markersize=5, capsize=2, linestyle="none", label=provider, zorder=20 - i)
        axis.plot([b / 1e6 for b in points], [max(b / (speed * 1e3), empty) for b in points], color="black", linewidth=1,
                  label=f"floor: {speed:.0f} GB/s (copy), {empty:.2f} us (empty)")
        axis.set_xscale("log"), axis.set_yscale("log"), axis.set_title(title, fontsize=9)
        axis.set_xlabel("bytes that a call must move (MB)"), axis.grid(True, which="both", alpha=0.25)
    plain_numbers(plt, *(x for axis in grid[0] for x in (axis.xaxis, axis.yaxis)))
    grid[0][0].set_ylabel("us per call, median (bars: p20 to p80)")
    figure.suptitle(f"{op}\n{caption(rows)}", fontsize=10, y=1.0 if len(panels) == 1 else 1.03)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="upper left", bbox_to_anchor=(0.91, 0.88))
    return figure


def step(plt, rows: list):
    """One bar per setting, stages stacked; the whole step captured at once as a line across it."""
    parts = [r for r in rows if r["shape"]["stage"] != "whole"]
    name = lambda r: (r["provider"], shape_text({k: v for k, v in r["shape"].items() if k != "stage"}))  # noqa: E731
    bars, stages = list(dict.fromkeys(map(name, parts))), list(dict.fromkeys(r["shape"]["stage"] for r in parts))
    figure, axis = plt.subplots(figsize=(max(6, 2.2 * len(bars) + 3), 5))
    colours = plt.get_cmap("tab10").colors
    for x, bar in enumerate(bars):
        mine, bottom = {r["shape"]["stage"]: r["median_us"] for r in parts if name(r) == bar}, 0.0
        for i, stage in enumerate(stages):
            if stage in mine:
                axis.bar(x, mine[stage] / 1e3, 0.6, bottom=bottom, color=colours[i % 10], label=stage if x == 0 else None)
                bottom += mine[stage] / 1e3
        whole = next((r["median_us"] for r in rows if name(r) == bar and r["shape"]["stage"] == "whole"), None)
        if whole is not None:
            axis.plot([x - 0.38, x + 0.38], [whole / 1e3] * 2, color="black", linewidth=2, label="whole step, one run" if x == 0 else None)
    axis.set_xticks(range(len(bars)), [f"{p}\n{s.replace(' ', chr(10), 1)}" for p, s in bars], fontsize=8)
    axis.set_ylabel("ms per verify step, median"), axis.set_title(f"verify step by stage\n{caption(rows)}", fontsize=10)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.grid(True, axis="y", alpha=0.25)
    return figure


def against_size(plt, op: str, rows: list):
    """All-reduce latency against message size, a line per transport and number of ranks."""
    figure, axis = plt.subplots(figsize=(8, 5))
    size = lambda r: r["shape"]["rows"] * r["shape"]["H"] * ITEM_BYTES.get(r["dtype"], 2)  # noqa: E731
    line_of = lambda r: (r["provider"], r["shape"]["W"], "--same-gpu" in r["command"])  # noqa: E731
    for i, line in enumerate(dict.fromkeys(map(line_of, rows))):
        mine = sorted((r for r in rows if line_of(r) == line), key=size)
        axis.errorbar([size(r) / 1024 for r in mine], [r["median_us"] for r in mine],
                      yerr=[[r["median_us"] - r["p20_us"] for r in mine], [r["p80_us"] - r["median_us"] for r in mine]],
                      color=f"C{i % 10}", linestyle=("-", "--", ":")[i // 10 % 3],  # ten colours: the eleventh line is dashed
                      marker=MARKERS[i % len(MARKERS)], markersize=4, capsize=2, label=f"{line[0]}, {line[1]} ranks" + ", one GPU" * line[2])
    axis.set_xscale("log", base=2), axis.set_yscale("log")
    axis.xaxis.set_major_formatter(plt.FuncFormatter(lambda v, _: f"{v:g}"))
    plain_numbers(plt, axis.yaxis)
    axis.set_xlabel("message of one rank (KiB)"), axis.set_ylabel("us per call, median (bars: p20 to p80)")
    axis.set_title(f"{op}\n{caption(rows)}", fontsize=10)
    axis.grid(True, which="both", alpha=0.25), axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure
