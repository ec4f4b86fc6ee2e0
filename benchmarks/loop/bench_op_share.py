"""Which op takes how much of a decode step: the profiler's self time of every op, per shape.

    python benchmarks/loop/bench_op_share.py --tree off,chain-3,tree-20 --prompt "Why is the sky blue?"

Shares are of the decode steps' wall time, prefill included in neither. The rule of the house: no op of ours above 10 %.
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from fastverify.cli.environment import environment
from fastverify.cli.options import add_model, check_tree
from fastverify.cli.output import Output
from fastverify.cli.report import steps
from fastverify.cli.session import open_session

LIMIT = 0.10


def shares(decoder, prompt: list, max_new_tokens: int) -> tuple:
    """({op: ms per step}, ms per step) of one decode after its first span, with the model's matrix products as one entry."""
    decoder.generate([prompt], 12, stop_ids=[])
    spans = decoder.stream([prompt], max_new_tokens, stop_ids=[])
    next(spans)  # prefill
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as prof:
        while True:
            try:
                next(spans)
            except StopIteration as end:
                stats = end.value.stats
                break
    n, times = steps(stats), {}
    for event in prof.key_averages():
        ours = event.key.startswith("fastverify::")
        product = event.key in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "mkldnn::_linear_pointwise")
        name = event.key if ours else "matrix products" if product else "other torch ops"
        us = event.self_cpu_time_total + getattr(event, "self_device_time_total", 0)
        times[name] = times.get(name, 0.0) + us / 1e3 / n
    return times, stats.decode_ms / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", default="off,chain-3,tree-20", metavar="SHAPE,...")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in two sentences.")
    parser.add_argument("--token-ids", help="the prompt as token ids (a target without tokenizer)")
    add_model(parser)
    args, out = parser.parse_args(), Output()
    ids = [int(i) for i in args.token_ids.split(",")] if args.token_ids else None
    session = open_session("bench_op_share", args, out, with_tokenizer=ids is None)
    ids = ids or session.encode("bench_op_share", args.prompt)
    out.line(str(environment(session.device, session.target.dtype)))
    for tree in map(check_tree, args.tree.split(",")):
        times, total = shares(session.decoder(tree), ids, args.max_new_tokens)
        above = lambda name, ms: "above" if name.startswith("fastverify::") and ms > LIMIT * total else ""  # noqa: E731
        rows = [[name, f"{ms:.3f}", f"{100 * ms / total:.1f} %", above(name, ms)]
                for name, ms in sorted(times.items(), key=lambda x: -x[1]) if ms > 0.001 * total]
        out.table(["op", "ms per step", "share", "10 % rule"], rows, title=f"{tree}: {total:.2f} ms per step")


if __name__ == "__main__":
    main()
