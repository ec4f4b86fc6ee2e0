"""A soak of the decode loop: requests of random lengths that join, stop, are cancelled and leave, while memory stays flat.

    python benchmarks/loop/bench_soak.py --requests 2000 --max-batch 32 --exact --target ... --draft ...

In exact mode a share of the outputs is compared with the request's run alone. One line a second, one JSON object at the end.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch

from fastverify import SamplingParams, load_draft, load_target
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape


def request(rng: random.Random, vocab: int, number: int, real: list) -> tuple:
    """(prompt, budget, params) of one request: short and long, of random ids or (two of three) a real prompt, greedy and sampled."""
    prompt = [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 17, 60, 200)))]
    if real and number % 3:
        prompt = rng.choice(real)
    params = rng.choice((SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(temperature=1.0)))
    return prompt, rng.choice((1, 2, 7, 24, 64)), SamplingParams(**{**vars(params), "seed": number})


class InTurn:
    """In place of the controller: every speculative shape for some cycles, one after the other, now and then none."""

    def __init__(self, shapes: tuple, cycles: int) -> None:
        self.shapes, self.cycles, self.count = (shapes[1:] * 2 + shapes[:1]) if len(shapes) > 1 else shapes, cycles, 0

    def choose(self):
        self.count += 1
        return self.shapes[self.count // self.cycles % len(self.shapes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--tree", default="off,chain-3,tree-8")
    parser.add_argument("--prompts", type=Path, help='{"set": [[token ids], ...]}: prompts of up to 250 tokens are taken from it')
    parser.add_argument("--stop-ids", default="7,11")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--in-turn", type=int, metavar="CYCLES", help="shapes take turns instead of being chosen")
    parser.add_argument("--alone-seconds", type=float, default=600)
    parser.add_argument("--alone", type=int, default=100, help="outputs compared with a run alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, start = random.Random(args.seed), time.perf_counter()
    target = load_target(args.target, torch.bfloat16, args.device)
    draft = load_draft(args.draft, target, dtype=torch.bfloat16, device=args.device)
    shapes = tuple(parse_shape(s) for s in args.tree.split(","))
    vocab, stops = target.config.vocab_size, [int(t) for t in args.stop_ids.split(",")]
    real = [p for ps in json.loads(args.prompts.read_text()).values() for p in ps if len(p) <= 250] if args.prompts else []
    cuda = torch.device(args.device).type == "cuda"

    def make(max_batch: int, shapes: tuple) -> GraphLoop:
        return GraphLoop(target, draft if any(s.speculative for s in shapes) else None, shapes=shapes, max_batch=max_batch,
                         max_length=512, stop_ids=stops, exact=args.exact)

    made = make(args.max_batch, shapes)
    if args.in_turn:
        turns = InTurn(shapes, args.in_turn)
        made.controller = lambda batch, processors=False: turns
    loop, jobs, cancelled, memory, told = made, [], 0, [], start
    while len(jobs) < args.requests and time.perf_counter() - start < args.seconds:
        if len(loop.pool.waiting) < 4:
            for _ in range(rng.randrange(1, 12)):
                jobs.append(loop.submit(*request(rng, vocab, len(jobs), real)))
        loop.step()
        running = loop.pool.running
        if running and rng.random() < 0.02:
            loop.cancel(rng.choice(running))
            cancelled += 1
        if time.perf_counter() - told > 1:
            told = time.perf_counter()
            memory.append((torch.cuda.memory_allocated() if cuda else 0, torch.cuda.memory_reserved() if cuda else 0))
            print(f"{len(jobs)} requests, {loop.stats.emitted} tokens, bucket {loop.pool.bucket()}, memory {memory[-1][0] / 2**20:.1f} MiB", flush=True)
    for _ in loop.run():
        pass
    took = time.perf_counter() - start
    result = dict(requests=len(jobs), cancelled=cancelled, tokens=loop.stats.emitted, seconds=round(took, 1), steps=dict(loop.stats.steps),
                  tau=loop.stats.tau, pages_back=loop.pool.pages.free == loop.pool.pages.total,
                  finish={f: sum(j.finish == f for j in jobs) for f in ("stop", "length", "cancelled", "bad_logits")},
                  allocated_first_last=[memory[len(memory) // 4][0], memory[-1][0]] if memory else None)
    if args.alone:
        alone, same, checked, began = make(1, (parse_shape("off"),)), 0, 0, time.perf_counter()
        for job in rng.sample(jobs, min(args.alone, len(jobs))):
            if time.perf_counter() - began > args.alone_seconds:
                break
            again = alone.submit(job.prompt, job.max_new_tokens, job.params)
            for _ in alone.run():
                pass
            checked += 1
            same += again.tokens[:len(job.tokens)] == job.tokens if job.finish == "cancelled" else again.tokens == job.tokens
        result |= dict(compared=checked, equal=same, exact=args.exact)
    print(json.dumps(result))
    return int(not result["pages_back"] or (args.exact and result.get("equal") != result.get("compared")))


if __name__ == "__main__":
    raise SystemExit(main())
