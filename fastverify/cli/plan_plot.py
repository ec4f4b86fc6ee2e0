"""Pictures of a plan: tok/s against accept length, and the shapes beside one another. matplotlib, if it is installed."""

from pathlib import Path

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#6B6B6B")


def check_plot(command: str, path: str) -> None:
    """Refuses a file that cannot be drawn, before anything runs."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"{command}: plot must end in .svg or .png; got {path}. Fix: change --plot.")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{command}: the folder of the plot must exist; got {path}. Fix: create it.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{command}: matplotlib must be installed for --plot; got none. "
                         "Fix: pip install matplotlib, or leave --plot out.") from None


def plot(path: str, data: dict) -> None:
    """Draws what `fastverify plan` computed, from times, a model or a probe."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    lines, bars, title = series(data)
    most = max([3.0, *(1.25 * point[0] for _, _, point in lines if point)])
    for i, (label, ms, point) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        style = ("-", "--", ":")[i // len(COLOURS) % 3]
        left.plot([1, most], [1e3 / ms, 1e3 * most / ms], style, color=colour, label=label)
        if point:
            left.plot(*point, "o", color=colour)
    plain = 1e3 / data_plain(data)
    left.axhline(plain, color="black", linewidth=1, linestyle="--", label=f"plain decoding, {plain:.0f} tok/s")
    left.set(xlabel="accept length tau", ylabel="tok/s", xlim=(1, most), ylim=(0, None))
    left.set_title("speed against accept length" + (" (points: tau of each shape)" if any(p for _, _, p in lines) else ""))
    left.legend(fontsize="small")
    left.grid(alpha=0.3)
    _bars(right, *bars)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _bars(axes, names: list, groups: dict, label: str, line: float, line_label: str) -> None:
    """Grouped bars with their values. groups: {legend: [value or None per name]}."""
    width = 0.8 / len(groups)
    for g, (legend, values) in enumerate(groups.items()):
        at = [i - 0.4 + width * (g + 0.5) for i in range(len(names))]
        drawn = axes.bar(at, [v or 0.0 for v in values], width, color=COLOURS[g % len(COLOURS)], label=legend)
        if len(groups) * len(names) <= 24:
            axes.bar_label(drawn, [f"{v:.3g}" if v else "" for v in values], fontsize="x-small", padding=1)
    axes.axhline(line, color="black", linewidth=1, linestyle="--", label=line_label)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize="small")
    axes.set(ylabel=label)
    axes.set_title(label + " of each shape")
    axes.legend(fontsize="small")
    axes.grid(axis="y", alpha=0.3)


def data_plain(data: dict) -> float:
    """ms of a plain step (with the fastest all-reduce, from a model)."""
    return data.get("plain_ms") or min(r["plain_ms"] for r in data["rows"])


def series(data: dict) -> tuple:
    """(lines, bars, title): lines are (label, ms of a round, (tau, tok/s) or None); bars the arguments of _bars."""
    if "probe" in data:
        rows = data["rows"][1:]
        lines = [(_name(r), r["round_ms"], (r["tau"], r["expected_tokens_per_second"])) for r in rows]
        names = ["plain", *map(_name, rows)]
        groups = {"expected": [r["expected_tokens_per_second"] for r in data["rows"]],
                  "measured": [r["measured_tokens_per_second"] for r in data["rows"]]}
        return lines, (names, groups, "tok/s", data["plain_tokens_per_second"], "plain decoding"), str(data["target"])
    rows = data["rows"]
    if "shape" not in rows[0]:  # from times
        names = [" ".join(filter(None, (r["allreduce"] if r["allreduce_us"] else "",
                                        f"{r['allreduce_us']:g} us," if r["allreduce_us"] else "",
                                        f"draft {r['draft_ms']:g} ms"))) for r in rows]
        bars = (names, {"break-even tau": [r["break_even_tau"] for r in rows]}, "break-even tau", 1.0, "plain decoding")
        return [(n, r["round_ms"], None) for n, r in zip(names, rows)], bars, ""
    times = list(dict.fromkeys((r["allreduce"], r["allreduce_us"]) for r in rows))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    of = {(r["allreduce"], r["allreduce_us"], r["shape"]): r for r in rows}
    label = lambda t: t[0] if t[0] == f"{t[1]:g} us" or not t[1] else f"{t[0]} {t[1]:g} us"  # noqa: E731
    fast = min(times, key=lambda t: t[1])
    lines = []
    for r in (of[(*fast, s)] for s in shapes if s != "off"):
        lines.append((r["shape"], r["round_ms"], (r["tau"], 1e3 * r["tau"] / r["round_ms"]) if r["tau"] else None))
    groups = {label(t): [of[(*t, s)]["break_even_tau"] for s in shapes] for t in times}
    where = f", all-reduce {label(fast)} (left)" if fast[1] else ""
    return lines, (shapes, groups, "break-even tau", 1.0, "plain decoding"), f"{data['layers']} layers, {data['ranks']} ranks{where}"


def _name(r: dict) -> str:
    return r["shape"] if r["draft"] != "ngram" else f"ngram {r['shape']}"
