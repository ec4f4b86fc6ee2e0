"""The controller's forced cases: tau near 1, a slow draft, a verify ten times slower, a tau that changes half-way.

    python benchmarks/loop/bench_controller.py --tokens 500

A target of random weights (`--dummy`), batch 1. Acceptance is imposed (models/dummy.py), drafts and verifies are made slower by busy
waiting inside the captured cycle. Each case runs `auto` and every fixed shape for as many tokens, after the calibration; a row says
how far `auto` is from the better of plain and the best fixed shape. Exit code 1 beyond `--within`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402

from fastverify.eagle3.graph_loop import GraphLoop  # noqa: E402
from fastverify.eagle3.shapes import parse_shape  # noqa: E402
from fastverify.models.dummy import ImposedAcceptance, dummy_draft, dummy_target, label  # noqa: E402


class ChangingAcceptance(ImposedAcceptance):
    """An acceptance rate that is device data, so that a captured cycle follows it."""

    def __init__(self, device) -> None:
        super().__init__(torch.zeros((), device=device))

    def set(self, rate: float) -> None:
        self.rate.fill_(rate)


class Slowed:
    """A model whose forward first keeps the device busy: `us` microseconds for more than `rows` rows at once."""

    def __init__(self, model, us: float, rows: int, cycles_per_us: float) -> None:
        self.model, self.us, self.rows, self.cycles_per_us = model, us, rows, cycles_per_us

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def forward(self, batch, *args):
        if batch.tokens.numel() > self.rows:
            busy(self.us, self.cycles_per_us)
        return self.model.forward(batch, *args)


def busy(us: float, cycles_per_us: float) -> None:
    if cycles_per_us:
        torch.cuda._sleep(int(us * cycles_per_us))
    else:
        time.sleep(us * 1e-6)


def clock(device: torch.device) -> float:
    """Cycles of torch.cuda._sleep per microsecond; 0: on the CPU."""
    if device.type != "cuda":
        return 0.0
    for _ in range(2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
    return 20_000_000 / (start.elapsed_time(end) * 1e3)


def decode(loop: GraphLoop, tokens: int, prompt: list, change=None) -> tuple:
    """(seconds, cycles by shape, switches, reason) of one request; change(emitted) is called after every span."""
    job = loop.submit(prompt, 1)
    for _ in loop.run():
        pass
    before = dict(loop.stats.steps)
    job = loop.submit(prompt, tokens)
    start = None
    for _, span in loop.run():
        if start is None:  # after the prefill
            start = time.perf_counter()
        if change is not None:
            change(len(job.tokens))
    took = time.perf_counter() - start
    controller = next(iter(loop.controllers.values()), None)
    steps = {k: v - before.get(k, 0) for k, v in loop.stats.steps.items() if v != before.get(k, 0)}
    return took, steps, controller.switches if controller else 0, controller.reason if controller else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dummy", default="smollm2-135m")
    parser.add_argument("--tree", default="off,chain-3,tree-8", help="off and the fixed shapes that auto chooses from")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--cases", default="tau-1.1,slow-draft,verify-10x,tau-falls,tau-rises,high-tau")
    parser.add_argument("--runs", type=int, default=2, help="of each, in turn; the median counts")
    parser.add_argument("--within", type=float, default=0.05)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    target = dummy_target(args.dummy, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    draft, per_us = dummy_draft(target), clock(device)
    shapes, hook = tuple(map(parse_shape, args.tree.split(","))), ChangingAcceptance(device)
    prompt = list(range(5, 37))

    def loop(t, d, chosen: tuple) -> GraphLoop:
        return GraphLoop(t, d if any(s.speculative for s in chosen) else None, shapes=chosen, max_length=2 * args.tokens + 64, stop_ids=[], hook=hook)

    plain = loop(target, draft, shapes[:1])
    hook.set(0.0)
    took, *_ = decode(plain, 100, prompt)
    step_us = took / 100 * 1e6
    # the rate of first children that gives the tau of a chain of three: tau = 1 + p + p^2 + p^3
    cases = {"tau-1.1": (0.09, None, 0.0, 0.0), "slow-draft": (0.7, None, 2.0, 0.0), "verify-10x": (0.7, None, 0.0, 9.0),
             "tau-falls": (0.8, 0.05, 0.0, 0.0), "tau-rises": (0.05, 0.8, 0.0, 0.0), "high-tau": (0.8, None, 0.0, 0.0)}
    rows, worst = [], 0.0
    for case in args.cases.split(","):
        rate, later, draft_steps, verify_steps = cases[case]
        t = Slowed(target, verify_steps * step_us, 1, per_us) if verify_steps else target
        d = Slowed(draft, draft_steps * step_us, 0, per_us) if draft_steps else draft
        change = None
        if later is not None:
            def change(emitted: int) -> None:
                if emitted >= args.tokens // 2:
                    hook.set(later)
        runs, made = {}, {name: loop(t, d, chosen) for name, chosen in [*((s.name, (s,)) for s in shapes), ("auto", shapes)]}
        for _ in range(args.runs):  # in turn, so that a clock that drifts meets all of them alike
            for name, one in made.items():
                hook.set(rate)
                one.controllers.clear()  # nothing learned from the run before
                runs.setdefault(name, []).append(decode(one, args.tokens, prompt, change))
        speeds = {}
        for name, found in runs.items():
            took, steps, switches, reason = sorted(found, key=lambda r: r[0])[len(found) // 2]
            speeds[name] = args.tokens / took
        best = max((n for n in speeds if n != "auto"), key=speeds.get)
        loss = 1 - speeds["auto"] / speeds[best]
        worst = max(worst, loss)
        rows.append(dict(case=case, rate=rate, later=later, tok_s={k: round(v, 1) for k, v in speeds.items()}, best=best, loss=round(loss, 4),
                         steps=steps, switches=switches, reason=reason, tokens=args.tokens, note=label(args.dummy, rate)))
        print(f"{case}: auto {speeds['auto']:.0f} tok/s, {100 * loss:+.1f} % behind {best} ({', '.join(f'{k} {v:.0f}' for k, v in speeds.items())}); "
              f"{steps}, {switches} switches", flush=True)
    if args.json:
        args.json.write_text(json.dumps(dict(command=harness.without_paths(" ".join(sys.argv)), date=time.strftime("%Y-%m-%d"),
                                             device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                                             step_us=step_us, rows=rows), indent=1) + "\n")
    return int(worst > args.within)


if __name__ == "__main__":
    raise SystemExit(main())
