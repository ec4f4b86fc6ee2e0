"""The curves of a training run as one picture."""

from __future__ import annotations


def plot_curves(curve: dict, path: str) -> None:
    """Two panels: training cross entropy per unrolled step; held-out agreement (depth 1) and free-running acceptance.

    Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (a, b) = plt.subplots(1, 2, figsize=(11, 4))
    for j in range(max((len(p["ce"]) for p in curve["train"]), default=0)):
        pts = [(p["step"], p["ce"][j]) for p in curve["train"] if len(p["ce"]) > j]
        a.plot(*zip(*pts), lw=0.8, label=f"unrolled step {j}")
    a.set(xlabel="step", ylabel="cross entropy (nats)", title="training")
    for j in range(len(curve["eval"][0]["accept"]) if curve["eval"] else 0):
        b.plot([p["step"] for p in curve["eval"]], [p["conditional"][j] for p in curve["eval"]], marker=".",
               label="depth 1 (teacher-forced)" if j == 0 else f"depth {j + 1} given depths 1..{j}")
    b.set(xlabel="step", ylabel="top-1 agreement", title="held-out, greedy, EMA weights")
    for ax in (a, b):
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)
