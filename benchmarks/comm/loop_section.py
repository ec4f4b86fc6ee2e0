"""The decode loop on W ranks: the same tokens everywhere, first differences from one rank, ms per cycle and its communication."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import torch
from overlap import SUM_WORDS, length, union
from ranks import Rank

import fastverify
from fastverify import Communicator, GraphLoop, SamplingParams, load_draft, load_target
from fastverify.cli.difference import first_difference
from fastverify.cli.prompts import OWN, read_prompts
from fastverify.eagle3.shapes import parse_shape
from fastverify.models.config import ModelConfig, Rope
from fastverify.models.demo import SHIPPED_DRAFT, demo_target_path
from fastverify.models.dummy import dummy_draft
from fastverify.models.llama import Layer, LlamaModel
from fastverify.models.parallel import heads_of, prepare, shard, shard_layer, split_evenly

GATHER_WORDS = ("all_gather",)
RUNS = (("off", {}), ("tree-8", {}), ("tree-20", {}), ("tree-8", dict(temperature=0.8, top_k=50, top_p=0.95, seed=3)))


PARTS = ("texts-smollm2", "cycles-smollm2", "texts-70b", "texts-70b-float32", "cycles-70b")
FLOAT32_LAYERS = 8  # of the control without rounding to bf16


def loops(me: Rank, args, parts: tuple = PARTS) -> None:
    if "texts-smollm2" in parts or "cycles-smollm2" in parts:
        smollm2(me, args, parts)
    if "texts-70b" in parts:
        llama70b(me, args, compare=True)
    if "texts-70b-float32" in parts:
        llama70b(me, args, compare=True, dtype=torch.float32)
    if "cycles-70b" in parts:
        llama70b(me, args, compare=False)


def communicator(me: Rank, backend: str, hidden: int, rows: int = 64) -> Communicator:
    """NCCL beside it, for prefill."""
    return Communicator(device=me.device, backend=backend, nccl={} if me.cuda else None, max_bytes=rows * hidden * 2)


def smollm2(me: Rank, args, parts: tuple) -> None:
    path = demo_target_path()
    shape = dict(W=me.world, model="SmolLM2-135M")
    if path is None:
        me.absent("loop", "decode", shape, "bfloat16", "not run: no demo model (fastverify fetch-demo)")
        return
    from fastverify.models.load import load_tokenizer
    tokenizer, prompts = load_tokenizer(path), read_prompts(OWN)
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": p.text}]) for p in prompts[::len(prompts) // 4][:4]]
    dtype = torch.bfloat16 if me.cuda else torch.float32
    whole = load_target(path, dtype=dtype, device=me.device)
    draft = load_draft(SHIPPED_DRAFT, whole, dtype=dtype, device=me.device)
    trees = ("off", "tree-8", "tree-20")
    if "texts-smollm2" in parts:
        with communicator(me, args.loop_backends[0], whole.config.hidden_size) as comm:
            target, new = shard(whole, comm), 32 if args.quick else 64
            got = [captured_texts(target, draft, tree, ids, new, SamplingParams(**params)) for tree, params in RUNS]
            compare_texts(me, shape, whole, draft, ids, new, RUNS, got)
            del target
            gc.collect()
    if "cycles-smollm2" in parts:
        one_rank_cycles(me, shape, whole, draft, trees)
        cycles(me, args, shape, lambda comm: shard(whole, comm), draft, trees, whole.config.hidden_size)


LLAMA_70B = ModelConfig("llama", 80, 8192, 28672, 128256, 64, 8, 128, 8192, 1e-5, Rope(theta=500000.0))
SMALL = ModelConfig("llama", 7, 256, 512, 2048, 8, 4, 32, 2048, 1e-5, Rope(theta=500000.0))  # of a rehearsal
SPARE_BYTES = 6 << 30


def llama70b(me: Rank, args, compare: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    """Llama-3-70B's shape with random weights, every layer from a seed of its own, so that a rank never holds more than its part.
    compare: as many layers as fit one GPU whole (80 on 140 GB; FLOAT32_LAYERS in float32); without: 80 layers and a random EAGLE-3
    draft, for times."""
    c = LLAMA_70B if me.cuda else SMALL
    if compare:
        c = replace(c, num_layers=layers_that_fit(me, c) if dtype == torch.bfloat16 else min(c.num_layers, FLOAT32_LAYERS))
    of = "" if dtype == torch.bfloat16 else ", float32"
    shape = dict(W=me.world, model=(f"Llama-3-70B-shaped, {c.num_layers} layers, random" if me.cuda else "small, random") + of)
    prompts = [[(7919 * i + 13 * b) % c.vocab_size for i in range(24)] for b in range(2)]
    runs = (("off", {}), ("off", dict(temperature=0.8, seed=3)))
    with communicator(me, args.loop_backends[0], c.hidden_size) as comm:
        target = random_shard(c, me, comm, dtype)
        if compare:
            got = [captured_texts(target, None, tree, prompts, 24, SamplingParams(**params)) for tree, params in runs]
        else:
            draft = dummy_draft(SimpleNamespace(config=c, dtype=torch.bfloat16, device=me.device, embed_weight=target.embed_weight))
            mine = captured_texts(target, draft, "tree-16", prompts, 16, SamplingParams())
            everyone = me.gathered(mine)
            me.known_row("texts", "decode", shape | dict(tree="tree-16"), "bfloat16", 0.0, all(t == everyone[0] for t in everyone),
                         "ranks bit-equal, each cycle one graph")
        target.comm = None
        gc.collect()
    if not compare:
        def over(comm):
            target.comm = comm
            return target
        cycles(me, args, shape, over, draft, ("off", "chain-3", "tree-16"), c.hidden_size)
        target.comm = draft = None
    del target
    free(me)
    if compare:
        whole = random_model(c, me.device, dtype) if me.rank == 0 else None
        name = str(dtype).removeprefix("torch.")
        alone = compare_texts(me, shape, whole, None, prompts, 24, runs, got, name)
        one_rank_cycles(me, shape, whole, None, ("off",), name)
        if dtype == torch.bfloat16:
            own_rounding(me, shape, whole, prompts, 24, runs, alone)
        del whole
        free(me)


def free(me: Rank) -> None:
    gc.collect()
    if me.cuda:
        torch.cuda.empty_cache()


def layers_that_fit(me: Rank, c: ModelConfig) -> int:
    """Of the whole model on the emptiest GPU, with SPARE_BYTES left."""
    if not me.cuda:
        return c.num_layers
    layer = (c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.hidden_size * c.intermediate_size) * 2
    ends = 2 * c.vocab_size * c.hidden_size * 2
    free = min(me.gathered(torch.cuda.mem_get_info(me.device)[0]))
    return max(1, min(c.num_layers, int((free - SPARE_BYTES - ends) // layer)))


def random_weights(device: torch.device, seed: int, dtype: torch.dtype):
    g = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.empty(*shape, dtype=dtype, device=device).normal_(0, 0.02, generator=g)


def random_layer(c: ModelConfig, device: torch.device, i: int, dtype: torch.dtype) -> Layer:
    w, ones = random_weights(device, 100 + i, dtype), torch.ones(c.hidden_size, dtype=dtype, device=device)
    q, kv, d, h, inner = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, c.intermediate_size
    return Layer(ones, w((q + 2 * kv) * d, h), None, None, None, w(h, q * d), None, ones, w(2 * inner, h), None, w(h, inner), None)


def random_model(c: ModelConfig, device: torch.device, dtype: torch.dtype) -> LlamaModel:
    w = random_weights(device, 7, dtype)
    layers = [random_layer(c, device, i, dtype) for i in range(c.num_layers)]
    return LlamaModel(c, w(c.vocab_size, c.hidden_size), layers, layers[0].input_norm, w(c.vocab_size, c.hidden_size))


def random_shard(c: ModelConfig, me: Rank, comm, dtype: torch.dtype) -> LlamaModel:
    """What parallel.shard(random_model(c)) gives, a layer at a time."""
    heads, columns = heads_of(c.num_heads, c.num_kv_heads, me.world, me.rank), split_evenly(c.intermediate_size, me.world, me.rank)
    vocab, w = split_evenly(c.vocab_size, me.world, me.rank, 32), random_weights(me.device, 7, dtype)
    (q0, q1), (k0, k1) = heads
    local = replace(c, intermediate_size=columns[1] - columns[0], num_heads=q1 - q0, num_kv_heads=k1 - k0)
    layers = [shard_layer(random_layer(c, me.device, i, dtype), c, heads, columns) for i in range(c.num_layers)]
    embed = w(c.vocab_size, c.hidden_size)
    part = LlamaModel(local, embed, layers, layers[0].input_norm, w(c.vocab_size, c.hidden_size)[vocab[0]:vocab[1]].clone())
    part.comm, part.vocab_range, part.split_heads = comm, vocab, True
    prepare(part)
    return part


def captured_texts(target, draft, tree: str, prompts: list, new: int, params: SamplingParams, exact: bool = False) -> list:
    """Tokens of every prompt; each cycle is one captured graph on every rank."""
    loop = GraphLoop(target, draft, shapes=(parse_shape(tree),), max_batch=len(prompts), max_length=1024, stop_ids=[], exact=exact)
    jobs = [loop.submit(p, new, replace(params, seed=params.seed + i)) for i, p in enumerate(prompts)]
    for _ in loop.run():
        pass
    return [list(job.tokens) for job in jobs]


def differences(whole, prompts: list, texts: list, others: list, p: SamplingParams) -> list:
    """A line per text of `others` that parts from that of `texts`, with the margin of the whole model there."""
    found = [first_difference(whole, prompt, a, b, p, p.seed + i) for i, (prompt, a, b) in enumerate(zip(prompts, texts, others))]
    return [f"request {i}: token {d.index}, {d.plain} became {d.spec}" + ("" if d.margin is None else f", margin {d.margin:.3g}")
            for i, d in enumerate(found) if d is not None]


def own_rounding(me: Rank, shape: dict, whole, prompts: list, new: int, runs: tuple, alone: list) -> None:
    """What rounding alone does to such texts: one rank's own text against its text in exact mode, whose products sum in another order."""
    if not me.gathered(me.rank == 0 and whole.exact_fits())[0]:
        return
    for (tree, params), text in zip(runs, alone if me.rank == 0 else runs):
        lines, p = [], SamplingParams(**params)
        if me.rank == 0:
            lines = differences(whole, prompts, text, captured_texts(whole, None, tree, prompts, new, p, exact=True), p)
            print(f"{shape['model']}, one rank against itself in exact mode, {params}: {len(lines)} of {len(prompts)} texts part"
                  + "".join(f"\n  {line}" for line in lines), flush=True)
        me.known_row("one rank against its exact mode", "decode", shape | dict(tree=tree, law=str(params)), "bfloat16", 0.0, True,
                     f"{len(lines)} of {len(prompts)} texts part" + "".join(f"; {x}" for x in lines))


def compare_texts(me: Rank, shape: dict, whole, draft, prompts: list, new: int, runs: tuple, got: list, dtype: str = "bfloat16") -> list:
    """got[run] of this rank: bit-equal on all ranks; rank 0 decodes alone with the whole model, and first differences are listed with
    margins. Returns the texts of rank 0 alone."""
    texts = []
    for (tree, params), mine in zip(runs, got):
        p = SamplingParams(**params)
        everyone = me.gathered(mine)
        equal, lines = all(t == everyone[0] for t in everyone), []
        if me.rank == 0:
            alone = captured_texts(whole, draft, tree, prompts, new, p)
            texts.append(alone)
            lines = differences(whole, prompts, alone, mine, p)
            print(f"{shape['model']}, W={me.world}, {tree} {params}: ranks bit-equal: {equal}; {len(lines)} of {len(mine)} texts part from one rank's"
                  + "".join(f"\n  {line}" for line in lines), flush=True)
        me.known_row("texts", "decode", shape | dict(tree=tree, law=str(params)), dtype, 0.0, equal,
                     f"ranks bit-equal, each cycle one graph; against one rank {len(lines)} of {len(mine)} texts part" + "".join(f"; {x}" for x in lines))
    return texts


def cycles(me: Rank, args, shape: dict, over, draft, trees: tuple, hidden: int) -> None:
    """ms of a cycle, draft and acceptance included, in one graph on every rank, over every communicator of --loop-backends; over(comm) is
    the target. First all times, then, in profiles, what part of each lies in kernels between ranks."""
    us: dict = {}
    for profiled in (False, True):
        for backend in args.loop_backends:
            with communicator(me, backend, hidden) as comm:
                target = over(comm)
                for tree in trees:
                    at = (backend, tree)
                    took, sums = captured_cycle(me, target, draft, parse_shape(tree), profiled)
                    us[at], sums = us.get(at) or min(me.gathered(took)), min(me.gathered(sums))
                    parts = f" = {(us[at] - sums) / 1e3:.3f} compute + {sums / 1e3:.3f} communication (kernels between ranks, least over ranks)"
                    me.known_row("cycle, one graph", "decode", shape | dict(tree=tree, over=backend), "bfloat16", us[at], True,
                                 f"{us[at] / 1e3:.3f} ms" + (parts if profiled else "") + f"; {comm.transport}")
                    if me.rank == 0 and profiled:
                        print(f"{shape['model']}, W={me.world}, {tree}: cycle {us[at] / 1e3:.3f} ms, of it communication {sums / 1e3:.3f} ms; {backend}: "
                              f"{comm.transport}, {comm.tuned}", flush=True)
                del target
                gc.collect()
                comm.check()


def one_rank_cycles(me: Rank, shape: dict, whole, draft, trees: tuple, dtype: str = "bfloat16") -> None:
    """The same cycles of the whole model on rank 0 alone."""
    for tree in trees:
        us = captured_cycle(me, whole, draft, parse_shape(tree), alone=True)[0] if me.rank == 0 else 0.0
        me.known_row("cycle of one rank alone", "decode", shape | dict(tree=tree), dtype, us, True, f"{us / 1e3:.3f} ms")
        if me.rank == 0:
            print(f"{shape['model']}, one rank alone, {tree}: cycle {us / 1e3:.3f} ms", flush=True)


def captured_cycle(me: Rank, target, draft, shape, profiled: bool = False, alone: bool = False) -> tuple:
    """(us, us in kernels between ranks) of one captured cycle of a greedy request behind some hundred tokens."""
    from fastverify.eagle3.graph_loop import _Scratch
    target.filters = False  # greedy requests
    loop, key = GraphLoop(target, draft, shapes=(shape,), max_batch=1, max_length=1024, stop_ids=[]), (1, shape, False)
    cycle = loop._prepare(key)
    with _Scratch(loop, 1):
        times = replay_time(me, loop._graphs[key].replay if loop.capture else cycle.run, profiled, alone)
    target.filters = True
    return times


def replay_time(me: Rank, replay, profiled: bool, alone: bool, repeats: int = 20) -> tuple:
    """(median us of a replay, us of it in kernels between ranks) on this rank. alone: the other ranks do not take part."""
    together, samples = (lambda: None) if alone else me.together, []
    for i in range((repeats if me.cuda and not profiled else 1) + 3):
        together()
        us = me.elapsed(replay)
        if i >= 3:
            samples.append(us)
    us = sorted(samples)[len(samples) // 2]
    if not profiled or not me.cuda:
        return us, 0.0
    return us, min(between_ranks(me, replay) for _ in range(3))


def between_ranks(me: Rank, replay) -> float:
    """us of one replay in kernels that move data between ranks, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        me.together()
        replay()
        torch.cuda.synchronize()
    return length(union([[e.time_range.start, e.time_range.end] for e in prof.events()
                         if e.device_type == torch.autograd.DeviceType.CUDA and any(w in e.name for w in SUM_WORDS + GATHER_WORDS)]))
