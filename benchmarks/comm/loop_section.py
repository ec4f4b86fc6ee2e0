"""The decode loop on W ranks: the same tokens everywhere, first differences from one rank, ms per cycle and its communication."""

from dataclasses import replace
from pathlib import Path

import torch
from overlap import SUM_WORDS, length, union
from ranks import Rank

import fastverify
from fastverify import Communicator, GraphLoop, SamplingParams, load_draft, load_target
from fastverify.cli.difference import first_difference
from fastverify.cli.prompts import OWN, read_prompts
from fastverify.eagle3.shapes import parse_shape
from fastverify.models.config import ModelConfig, Rope
from fastverify.models.demo import demo_target_path
from fastverify.models.llama import Layer, LlamaModel
from fastverify.models.parallel import heads_of, prepare, shard, split_evenly

GATHER_WORDS = ("all_gather",)
RUNS = (("off", {}), ("tree-8", {}), ("tree-20", {}), ("tree-8", dict(temperature=0.8, top_k=50, top_p=0.95, seed=3)))


PARTS = ("texts-smollm2", "cycles-smollm2", "texts-70b", "cycles-70b")


def loops(me: Rank, args, parts: tuple = PARTS) -> None:
    if "texts-smollm2" in parts or "cycles-smollm2" in parts:
        smollm2(me, args, parts)
    if "texts-70b" in parts:
        llama70b(me, args, 4, compare=True)
    if "cycles-70b" in parts:
        llama70b(me, args, 80, compare=False)


def communicator(me: Rank, args, hidden: int, rows: int = 64) -> Communicator:
    """NCCL beside it, for prefill."""
    return Communicator(device=me.device, backend=args.loop_backend, nccl={}, max_bytes=rows * hidden * 2)


def smollm2(me: Rank, args, parts: tuple) -> None:
    path = demo_target_path()
    shape = dict(W=me.world, model="SmolLM2-135M")
    if path is None:
        me.absent("loop", "decode", shape, "bfloat16", "not run: no demo model (fastverify fetch-demo)")
        return
    from fastverify.models.load import load_tokenizer
    tokenizer, prompts = load_tokenizer(path), read_prompts(OWN)
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": p.text}]) for p in prompts[::len(prompts) // 4][:4]]
    whole = load_target(path, dtype=torch.bfloat16, device=me.device)
    draft = load_draft(Path(fastverify.__file__).parent / "data" / "smollm2-135m-instruct-eagle3", whole, dtype=torch.bfloat16, device=me.device)
    with communicator(me, args, whole.config.hidden_size) as comm:
        target = shard(whole, comm)
        if "texts-smollm2" in parts:
            compare_texts(me, shape, whole, target, draft, ids, new=32 if args.quick else 64)
        if "cycles-smollm2" in parts:
            cycles(me, args, shape, target, draft, ids[:1], ("off", "tree-8", "tree-20"), comm)


def llama70b(me: Rank, args, layers: int, compare: bool) -> None:
    """Llama-3-70B's shape with random weights; all 80 layers do not fit one GPU whole, so texts are compared with fewer."""
    c = ModelConfig("llama", layers, 8192, 28672, 128256, 64, 8, 128, 8192, 1e-5, Rope(theta=500000.0))
    shape = dict(W=me.world, model=f"Llama-3-70B-shaped, {layers} layers, random")
    prompts = [[(7919 * i + 13 * b) % c.vocab_size for i in range(24)] for b in range(2)]
    with communicator(me, args, c.hidden_size) as comm:
        if compare:
            whole = random_model(c, me.device, seed=1)
            target = shard(whole, comm)
            compare_texts(me, shape, whole, target, None, prompts, new=24, runs=(("off", {}), ("off", dict(temperature=0.8, seed=3))))
            del whole
        else:
            target = random_shard(c, me, comm)
            cycles(me, args, shape, target, None, prompts[:1], ("off", "chain-15"), comm)
        del target
    torch.cuda.empty_cache()


def random_weights(device: torch.device, seed: int):
    g = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=g)


def random_layer(c: ModelConfig, w, q: int, kv: int, inner: int) -> Layer:
    ones, d, h = torch.ones(c.hidden_size, dtype=torch.bfloat16, device=w(1).device), c.head_dim, c.hidden_size
    return Layer(ones, w((q + 2 * kv) * d, h), None, None, None, w(h, q * d), None, ones, w(2 * inner, h), None, w(h, inner), None)


def random_model(c: ModelConfig, device: torch.device, seed: int) -> LlamaModel:
    w = random_weights(device, seed)
    layers = [random_layer(c, w, c.num_heads, c.num_kv_heads, c.intermediate_size) for _ in range(c.num_layers)]
    return LlamaModel(c, w(c.vocab_size, c.hidden_size), layers, layers[0].input_norm, w(c.vocab_size, c.hidden_size))


def random_shard(c: ModelConfig, me: Rank, comm) -> LlamaModel:
    """This rank's part alone, so that no GPU ever holds the whole."""
    w, same = random_weights(me.device, 100 + me.rank), random_weights(me.device, 7)
    (q0, q1), (k0, k1) = heads_of(c.num_heads, c.num_kv_heads, me.world, me.rank)
    a, b = split_evenly(c.intermediate_size, me.world, me.rank)
    vocab = split_evenly(c.vocab_size, me.world, me.rank, 32)
    local = replace(c, intermediate_size=b - a, num_heads=q1 - q0, num_kv_heads=k1 - k0)
    layers = [random_layer(c, w, q1 - q0, k1 - k0, b - a) for _ in range(c.num_layers)]
    part = LlamaModel(local, same(c.vocab_size, c.hidden_size), layers, layers[0].input_norm, w(vocab[1] - vocab[0], c.hidden_size))
    part.comm, part.vocab_range, part.split_heads = comm, vocab, True
    prepare(part)
    return part


def captured_texts(target, draft, tree: str, prompts: list, new: int, params: SamplingParams) -> list:
    """Tokens of every prompt; each cycle is one captured graph on every rank."""
    loop = GraphLoop(target, draft, shapes=(parse_shape(tree),), max_batch=len(prompts), max_length=1024, stop_ids=[])
    jobs = [loop.submit(p, new, replace(params, seed=params.seed + i)) for i, p in enumerate(prompts)]
    for _ in loop.run():
        pass
    return [list(job.tokens) for job in jobs]


def compare_texts(me: Rank, shape: dict, whole, target, draft, prompts: list, new: int, runs: tuple = RUNS) -> None:
    """Bit-equal on all ranks; rank 0 alone decodes with the whole model, and first differences are listed with margins."""
    for tree, params in runs:
        p = SamplingParams(**params)
        got = captured_texts(target, draft, tree, prompts, new, p)
        everyone = me.gathered(got)
        equal, lines = all(t == everyone[0] for t in everyone), []
        if me.rank == 0:
            alone = captured_texts(whole, draft, tree, prompts, new, p)
            found = [first_difference(whole, prompt, a, b, p, p.seed + i) for i, (prompt, a, b) in enumerate(zip(prompts, alone, got))]
            lines = [f"request {i}: token {d.index}, {d.plain} became {d.spec}" + ("" if d.margin is None else f", margin {d.margin:.3g}")
                     for i, d in enumerate(found) if d is not None]
            print(f"{shape['model']}, W={me.world}, {tree} {params}: ranks bit-equal: {equal}; {len(lines)} of {len(got)} texts part from one rank's"
                  + "".join(f"\n  {line}" for line in lines), flush=True)
        me.known_row("texts", "decode", shape | dict(tree=tree, law=str(params)), "bfloat16", 0.0, equal,
                     f"ranks bit-equal; against one rank {len(lines)} of {len(got)} texts part: " + "; ".join(lines))


def cycles(me: Rank, args, shape: dict, target, draft, prompts: list, trees: tuple, comm) -> None:
    """ms of a cycle in one graph on every rank (the target's verify alone where there is no draft to grow trees with)."""
    for tree in trees:
        named = parse_shape(tree)
        if named.speculative and draft is None:
            kind, (us, sums) = "verify forward", replay_time(me, verify_forward(target, named.nodes))
        else:
            kind, (us, sums) = "cycle", captured_cycle(me, target, draft, named)
        me.known_row(f"{kind}, one graph", "decode", shape | dict(tree=tree), "bfloat16", us, True,
                     f"{us / 1e3:.3f} ms = {(us - sums) / 1e3:.3f} compute + {sums / 1e3:.3f} communication (kernels between ranks, least over ranks)")
        if me.rank == 0:
            print(f"{shape['model']}, W={me.world}, {tree}: {kind} {us / 1e3:.3f} ms, of it communication {sums / 1e3:.3f} ms; {comm.transport}, "
                  f"{comm.tuned}", flush=True)


def captured_cycle(me: Rank, target, draft, shape) -> tuple:
    """Times of one captured cycle of a greedy request behind some hundred tokens."""
    from fastverify.eagle3.graph_loop import _Scratch
    target.filters = False  # greedy requests
    loop, key = GraphLoop(target, draft, shapes=(shape,), max_batch=1, max_length=1024, stop_ids=[]), (1, shape, False)
    loop._prepare(key)
    with _Scratch(loop, 1):
        return replay_time(me, loop._graphs[key].replay)


@torch.inference_mode()
def verify_forward(target, nodes: int):
    """Forward of one tree of `nodes` rows behind 256 tokens, logits of this rank's ids, and the sharded acceptance: one graph."""
    from fastverify import Sampling
    from fastverify.accept.verify_tree_combine import verify_tree_sharded
    from fastverify.models.batch import ForwardBatch
    from fastverify.tree.prepare_tree import Prepared, prepare_tree
    device, i32 = target.device, dict(dtype=torch.int32, device=target.device)
    pages = (256 + nodes) // 16 + 2
    cache, table = target.make_cache(pages, 16), torch.arange(pages, **i32).view(1, pages)
    tokens, cu, prefix = torch.arange(nodes, **i32) + 5, torch.tensor([0, nodes], **i32), torch.full((1,), 256, **i32)
    parents = torch.arange(-1, nodes - 1, **i32)
    prepared = Prepared(positions=torch.zeros(nodes, **i32), slots=torch.zeros(nodes, dtype=torch.int64, device=device))
    prepare_tree(parents, cu, prefix, table, 16, prepared)
    active, left, sampling = torch.ones(1, **i32), torch.full((1,), 1 << 20, **i32), Sampling.make(1, device)

    def run() -> None:
        hidden, _ = target.forward(ForwardBatch(tokens, prepared.positions, prepared.slots, cu, prefix, table), cache)
        verify_tree_sharded(target.logits(hidden), tokens, parents, cu, prefix, active, left, sampling, target.comm.gather_rows,
                            vocab_offset=target.vocab_range[0], vocab_size=target.config.vocab_size, filters=False, max_path=nodes)
    run(), run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return lambda keep=(cache, run): graph.replay()


def replay_time(me: Rank, replay, repeats: int = 20) -> tuple:
    """(us of a replay, us of it in kernels between ranks), both the least over ranks of the medians."""
    samples = []
    for i in range(repeats + 3):
        me.together()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            samples.append(start.elapsed_time(end) * 1e3)
    us = min(me.gathered(sorted(samples)[len(samples) // 2]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(4):
            me.together()
            replay()
            torch.cuda.synchronize()
    events = [[e.time_range.start, e.time_range.end] for e in prof.events()
              if e.device_type == torch.autograd.DeviceType.CUDA and any(w in e.name for w in SUM_WORDS + GATHER_WORDS)]
    return us, min(me.gathered(length(union(events)) / 4))
