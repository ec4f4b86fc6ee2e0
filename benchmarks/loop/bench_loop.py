"""The decode loop on the GPU: cycle times by stage, kernels of one cycle, gaps between them, and what reaches the host.

    python benchmarks/loop/bench_loop.py --dummy llama-3-8b --requests 1,8 --length 2048,16384 --tree off,tree-16
    python benchmarks/loop/bench_loop.py --dummy smollm2-135m --tree off,chain-3,tree-20 --profile

Random weights (models/dummy.py): a row says so. Times are of replays of the captured cycle at the given prefix length.
"""

import itertools
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402

from fastverify.eagle3.graph_loop import GraphLoop, _Scratch  # noqa: E402
from fastverify.eagle3.shapes import OFF, parse_shape  # noqa: E402
from fastverify.models.dummy import ImposedAcceptance, dummy_draft, dummy_target, label  # noqa: E402
from fastverify.models.fp8 import to_fp8  # noqa: E402


def weight_bytes(target) -> int:
    """Bytes of every weight that one forward reads."""
    layers = sum(t.numel() * t.element_size() for w in target.layers for t in vars(w).values() if t is not None)
    return layers + target.lm_head_weight.numel() * target.lm_head_weight.element_size()


def kv_bytes(target, batch: int, length: int) -> int:
    c = target.config
    return 2 * batch * length * c.num_layers * c.num_kv_heads * c.head_dim * target.embed_weight.element_size()


def timed(run, repeats: int, before=None) -> harness.Timing:
    """Microseconds of one replay: `before` puts the state back (outside the time)."""
    samples = []
    for _ in range(repeats):
        if before:
            before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 3 * 1e3)
    return harness.summary(samples, True)


def captured(function, memory):
    """`function` as a graph, after two eager calls."""
    function()
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        function()
    return graph


def own_pages(loop: GraphLoop, batch: int) -> None:
    """Pages of its own for every request: shared ones would stay in the L2."""
    table = loop.state.requests.page_table
    columns = table.shape[1]
    table[:batch] = torch.arange(batch * columns, device=table.device, dtype=torch.int32).view(batch, columns)


def stages(loop: GraphLoop, batch: int, shape, repeats: int, together: list) -> dict:
    """{stage: Timing} of one cycle: all of it, its verify (target forward .. next inputs), and per cycle of k cycles in one graph."""
    from fastverify.eagle3.cycle import target_forward
    key = (batch, shape, False)
    cycle = loop._prepare(key)
    req = loop.state.requests

    def reset() -> None:
        for t in (req.prefix_len, req.draft_len):
            t.fill_(loop.calibration_length)
        req.active[:batch].fill_(1)
        req.remaining.fill_(1 << 20)

    def verify() -> None:
        logits, aux = target_forward(loop.target, loop.state.cache, cycle.plan, cycle.req, cycle.page_size, cycle.aux_layers)
        extend, cycle._extend = cycle._extend, lambda: None
        cycle.accept(logits, aux)
        cycle._extend = extend

    with _Scratch(loop, batch):
        own_pages(loop, batch)
        found = {"cycle": timed(loop._graphs[key].replay, repeats, reset)}
        reset()
        with torch.inference_mode():
            graph = captured(verify, loop._memory)
        found["verify"] = timed(graph.replay, repeats, reset)
        for k in together:
            def several(k: int = k) -> None:
                for _ in range(k):
                    cycle.run()
            reset()
            graph = captured(several, loop._memory)
            t = timed(graph.replay, repeats, reset)
            found[f"{k} cycles in a graph, each"] = type(t)(*(v / k if isinstance(v, float) else v for v in t))
    return found


def profile(loop: GraphLoop, batch: int, shape, cycles: int = 6, first: int = 2) -> dict:
    """Kernels of one cycle from torch.profiler: count, device time, gaps, copies to the host.

    The first replays under the profiler are left out: it makes the driver send the graph again, and the device waits for it."""
    from torch.profiler import ProfilerActivity
    graph = loop._graphs[(batch, shape, False)]
    with _Scratch(loop, batch):
        own_pages(loop, batch)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
            for _ in range(first + cycles):
                graph.replay()
            torch.cuda.synchronize()
    events = sorted((e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    events = events[len(events) // (first + cycles) * first:]
    times, counts, hops = defaultdict(float), defaultdict(int), defaultdict(float)
    gaps, between, each = [], [], len(events) // cycles
    for e in events:
        times[e.name] += e.time_range.elapsed_us() / cycles
        counts[e.name] += 1
    end = events[0].time_range.end
    for i, (a, b) in enumerate(zip(events, events[1:]), 1):
        gap = b.time_range.start - end  # overlapped launches have none
        (between if i % each == 0 else gaps).append((gap, a.name[:40], b.name[:40]))
        hops[b.name] += max(0.0, b.time_range.end - end) / cycles
        end = max(end, b.time_range.end)
    covered = sum(max(0.0, g) for g, _, _ in gaps)
    host = [e.name for e in p.events() if "DtoH" in e.name or "Synchronize" in e.name]
    span = events[-1].time_range.end - events[0].time_range.start
    return dict(kernels_per_cycle=len(events) / cycles, busy_us=sum(times.values()), span_us=span / cycles,
                idle_share=covered / (span - sum(max(0.0, g) for g, _, _ in between)), gaps_over_5us=[g for g in gaps if g[0] > 5],
                largest_gap_us=max(gaps)[0], between_cycles_us=[round(g, 1) for g, _, _ in between],
                host_events=dict((n, host.count(n)) for n in set(host)),
                kernels={n: (counts[n] / cycles, round(t, 1), round(hops[n], 1)) for n, t in sorted(times.items(), key=lambda x: -x[1])})


def main() -> int:
    parser = harness.options(__doc__.splitlines()[0])
    parser.add_argument("--dummy", default="smollm2-135m")
    parser.add_argument("--tree", default="off,chain-3,tree-20")
    parser.add_argument("--requests", default="1")
    parser.add_argument("--length", default="256")
    parser.add_argument("--acceptance", type=float, default=0.6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--together", default="", help="numbers of cycles to capture in one graph: 1,2,4,8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--fp8", action="store_true", help="the layers' matrices in float8 (models/fp8.py)")
    args = parser.parse_args()
    args.repeats = min(args.repeats, 12)
    bench = harness.Bench("decode_cycle", args)
    target = dummy_target(args.dummy, torch.bfloat16, "cuda", num_layers=args.layers)
    draft = dummy_draft(target)
    if args.fp8:
        to_fp8(target)
    together = [int(k) for k in args.together.split(",") if k]
    note = label(args.dummy, args.acceptance) + (", float8 weights" if args.fp8 else "")
    for batch, length, name in itertools.product(map(int, args.requests.split(",")), map(int, args.length.split(",")), args.tree.split(",")):
        shape = parse_shape(name)
        speculative = shape is not OFF and shape.speculative
        loop = GraphLoop(target, draft if speculative else None, shapes=(shape,), max_batch=batch, max_length=length + 512,
                         calibration_length=length, stop_ids=[],
                         hook=ImposedAcceptance(args.acceptance) if speculative else None)
        floor = weight_bytes(target) + kv_bytes(target, batch, length)
        for stage, t in stages(loop, batch, shape, args.repeats, together).items():
            bench._add(stage, dict(model=args.dummy, B=batch, prefix=length, tree=name) | (dict(weights="fp8") if args.fp8 else {}), "bfloat16", t,
                       floor if stage == "verify" else 0, None, note, True)
            row = bench.rows[-1]
            against = f", {row['median_us'] / row['floor_us']:.3f}x the floor {row['floor_us']:.0f}" if row["floor_us"] else ""
            print(f"{args.dummy}{' fp8' if args.fp8 else ''} B={batch} prefix={length} {name} {stage}: {row['median_us']:.1f} us{against}", flush=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            loop._graphs[(batch, shape, False)].replay()
        launch = (time.perf_counter() - began) / 4 * 1e6
        torch.cuda.synchronize()
        print(f"  host: {launch:.0f} us to launch a cycle")
        if args.profile:
            found = profile(loop, batch, shape)
            kernels = found.pop("kernels")
            print(f"  {found}")
            print("      count   busy us   us from the end of the launch before to its own (gaps included)")
            for kernel, (count, us, hop) in list(kernels.items())[:28]:
                print(f"    {count:7.1f} x {us:8.1f} {hop:8.1f}  {kernel[:110]}")
        del loop
        torch.cuda.empty_cache()
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB; weights {weight_bytes(target) / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
