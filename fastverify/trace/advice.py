"""The account in words: one line that adds up, and what to do about each of its parts."""

import numpy as np

from .account import Account, Report, Step

# us per all-reduce of at most 1 MiB over PCIe on 2 to 8 GPUs; docs/plan_and_trace.md has the table.
NCCL_LOW_US, NCCL_HIGH_US, KERNEL_US = 24.0, 56.0, 10.0
SMALL_BYTES = 1 << 20
PART = 0.1  # of the communication time: what is below is not worth a word


def sentence(a: Account, waiting_for: np.ndarray, ranks: list) -> str:
    """"25.0 ms = 3.0 wire + 20.0 waiting for rank 5 + 2.0 gaps"."""
    digits = 1 if a.communication >= 1 else 3
    wire, waiting, gaps = (f"{v:.{digits}f}" for v in (a.wire, a.waiting, a.gaps))
    r = int(waiting_for[:-1].argmax())
    share = waiting_for[r] / a.waiting if a.waiting > 0 else 0.0
    who = ""
    if a.waiting >= PART * a.communication:
        most = f" ({waiting_for[r]:.{digits}f} for rank {ranks[r]})" if share >= 0.5 else " (for no one rank)"
        who = f" for rank {ranks[r]}" if share >= 0.9 else most
    return f"{a.communication:.{digits}f} ms = {wire} wire + {waiting} waiting{who} + {gaps} gaps"


def step_sentence(step: Step, report: Report) -> str:
    return sentence(step.account(report.shown), step.waiting_for(report.shown), report.ranks)


def mean_sentence(report: Report) -> str:
    return sentence(report.total(report.shown), report.waiting_for(report.shown), report.ranks)


def advice(report: Report) -> list:
    """One line per part that matters, largest first."""
    total = report.total(report.shown)
    parts = {"wire": (total.wire, _wire), "waiting": (total.waiting, _waiting), "gaps": (total.gaps, _gaps)}
    return [f"{name} ({value / total.communication:.0%}): {words(report)}"
            for name, (value, words) in sorted(parts.items(), key=lambda item: -item[1][0])
            if total.communication > 0 and value >= PART * total.communication]


def _wire(report: Report) -> str:
    wire = np.concatenate([s.wire for s in report.steps])
    sizes = [b for s in report.steps for b in s.nbytes]
    each = float(np.median(wire))
    known = [b for b in sizes if b is not None]
    size = f" of {_bytes(int(np.median(known)))}" if known else ""
    what = f"{each:.1f} us per collective{size}. "
    if report.source == "host":
        return what + "This is a CPU back end: its times say nothing about GPUs."
    if report.source == "param":
        return what + "These are host calls: profile with the CUDA activity to see the transfers."
    if report.world > len(report.ranks):
        return what + (f"With {len(report.ranks)} of {report.world} ranks it may still hold waiting for a missing one: pass all "
                       "ranks first.")
    if known and np.median(known) > SMALL_BYTES:
        return what + (f"That is {np.median(known) / each / 1e3:.1f} GB/s: messages this large are bound by the link. Send "
                       "fewer bytes: fewer tree rows, reduce-scatter + all-gather around the norm, or a quantized wire.")
    if each > NCCL_HIGH_US:
        return what + (f"NCCL takes {NCCL_LOW_US:.0f} to {NCCL_HIGH_US:.0f} us for small messages over PCIe when P2P is on: "
                       "find out why it is not. NCCL_DEBUG=INFO must say P2P and not SHM; see NCCL_P2P_LEVEL=SYS, IOMMU and ACS off.")
    if each > 2 * KERNEL_US:
        return what + f"NCCL at its normal speed; a custom all-reduce kernel takes about {KERNEL_US:.0f} us."
    return what + "Near what kernels reach: only fewer collectives or fusion with the norm after them save more."


def _waiting(report: Report) -> str:
    if report.late is None:
        return ("no one rank is late: the ranks take turns. Capture the whole step in one CUDA graph, pin the processes to "
                "cores, and keep host work (sampling, detokenization) off the step.")
    r, shown, late = report.late, report.shown, report.ranks[report.late]
    arrives = f"rank {late} arrives last in {report.late_count} of {report.number} collectives. "
    if report.source != "kernel":
        return arrives + f"Look at what rank {late} computes before each of them: more work, a slower or a shared core."
    more = report.total(r).gaps - report.total(shown).gaps
    waited = float(report.waiting_for(shown)[r])
    if waited > 0 and more >= 0.5 * waited:
        return arrives + (f"Its GPU is idle {more:.1f} ms longer before them: its launches come late. Look at that process "
                          "on the host: core pinning, NUMA node, a busy core; one CUDA graph per step removes the launches.")
    return arrives + ("Its GPU is busy until then, so its kernels take longer: compare clocks, power limit and temperature "
                      "(nvidia-smi -q -d PERFORMANCE), experts per rank, and work that only this rank does.")


def _gaps(report: Report) -> str:
    gaps = np.concatenate([s.gap[report.shown] for s in report.steps])
    return (f"the GPU runs nothing for {float(np.mean(gaps)):.1f} us before a collective: the host launches too late. Capture "
            "the whole step in one CUDA graph.")


def _bytes(n: int) -> str:
    return f"{n} bytes" if n < 1024 else f"{n / 1024:.0f} KiB" if n < 1 << 20 else f"{n / (1 << 20):.1f} MiB"
