"""Accept lengths over prompt sets, all sets in one continuous batch: how a draft does at every shape and temperature.

    python benchmarks/loop/accept_lengths.py --prompts eval/*.jsonl --limit 80 --max-new-tokens 128 --batch 64 \
        --runs tree-60@0,tree-60@0.8,tree-60@0.8:off --agreement --json lengths.json

A run is SHAPE@TEMPERATURE, with ":off" for drafts without the noise of their own tokens. Prompt i of a set has seed SEED + i in every
run, so the text of a temperature is the same under all shapes up to rounding (the column "same"). The file is written after every
run; --seconds ends the list early. --agreement: teacher-forced depth-1 agreement (float32) on the greedy texts of the first run at 0.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from fastverify.cli.environment import command, environment
from fastverify.cli.output import Output
from fastverify.cli.prompts import need_tokenizer, read_sets
from fastverify.cli.session import open_session
from fastverify.eagle3.decode import SamplingParams
from fastverify.eagle3.graph_loop import GraphLoop
from fastverify.eagle3.shapes import parse_shape
from fastverify.eagle3.stats import Stats, distinct_ngram_ratio
from fastverify.kv.next_inputs import FIELDS


class CountingLoop(GraphLoop):
    """A GraphLoop that counts the rounds of every request by its set: by_set[key] is the Stats of requests with job.key = key."""

    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)
        self.pool.buckets = (len(self.pool.slots),)  # one capture a shape
        self.by_set: dict = {}

    def _collect(self) -> list:
        flight = self._flight[0]
        if flight.rows is None:
            flight.rows = self.state.ring.read(flight.number)[1]
        for job, row in zip(flight.jobs, flight.rows.tolist()):
            taken, nodes, depth = row[2:FIELDS]
            if flight.shape is not None and job is not None and job.finish is None and nodes:
                self.by_set.setdefault(job.key, Stats()).count([taken], [depth], [nodes])
        return super()._collect()


def decode(session, sets: dict, shape: str, temperature: float, coupled: bool, args) -> tuple:
    """Runs every prompt of every set; ({set: Stats}, {set: [tokens]}, seconds)."""
    longest = max(len(ids) for prompts in sets.values() for ids in prompts)
    loop = CountingLoop(session.target, session.draft, shapes=(parse_shape(shape),), max_batch=args.batch,
                        max_length=longest + args.max_new_tokens, coupled=coupled)
    start, jobs = time.perf_counter(), {}
    for name, prompts in sets.items():
        for i, ids in enumerate(prompts):
            job = loop.submit(ids, args.max_new_tokens, SamplingParams(temperature=temperature, seed=args.seed + i))
            job.key = name
            jobs.setdefault(name, []).append(job)
    for _ in loop.run():
        pass
    return loop.by_set, {n: [j.tokens for j in js] for n, js in jobs.items()}, time.perf_counter() - start


def parse_run(text: str) -> tuple:
    """"tree-60@0.8:off" -> (shape, temperature, coupled)."""
    shape, _, rest = text.partition("@")
    temperature, _, option = rest.partition(":")
    parse_shape(shape)
    if option not in ("", "off"):
        raise ValueError(f"accept_lengths: a run must be SHAPE@TEMPERATURE or SHAPE@TEMPERATURE:off; got {text}. Fix: try tree-20@0.8.")
    return shape, float(temperature or 0), option != "off"


def agreement(session, sets: dict, texts: dict) -> dict:
    """{set: depth-1 agreement}: the draft's argmax after true tokens against the target's, over the given greedy texts."""
    from fastverify.eagle3.train_data import Ragged, Replies
    from fastverify.eagle3.train_eval import evaluate
    from fastverify.eagle3.train_net import load_draft
    from fastverify.eagle3.train_target import load_target
    import numpy as np
    target = load_target(session.target_name, torch.float32, str(session.device))
    draft = load_draft(session.draft_name, target=target).to(session.device)
    ids, own, source = [], [], []
    for number, name in enumerate(sets):
        for prompt, reply in zip(sets[name], texts[name]):
            ids.append([*prompt, *reply])
            own.append([0] * len(prompt) + [1] * len(reply))
            source.append(number)
    n = len(ids)
    replies = Replies(Ragged.of(ids), Ragged.of(own, np.uint8), np.array(source, np.int16), np.zeros(n, bool), np.ones(n, bool), list(sets))
    with torch.no_grad():
        found = evaluate(target, draft, replies)
    return {name: dict(depth_1=float(v["depth1_agreement"]), positions=v["positions"], chain_3=v["chain3"]["tau"]) for name, v in found.items()
            if name != "all"}


def main(argv: "list | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="GGUF file or Hugging Face folder (default: the demo model)")
    parser.add_argument("--draft", help="EAGLE-3 draft (default: the shipped one)")
    parser.add_argument("--prompts", nargs="+", help="JSONL files (default: the package's own prompts)")
    parser.add_argument("--runs", default="chain-3@0,chain-3@0.8,tree-20@0,tree-20@0.8,tree-60@0,tree-60@0.8", metavar="RUN,...")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=24, help="requests at once (default 24)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after so long")
    parser.add_argument("--agreement", action="store_true", help="teacher-forced depth-1 agreement on the greedy texts")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    begin, runs = time.perf_counter(), [parse_run(r) for r in args.runs.split(",")]
    files = read_sets(args.prompts, args.limit)
    session = open_session("accept_lengths", args, Output(json_only=True), need_tokenizer(files))
    sets = {name: [p.token_ids or session.encode("accept_lengths", p.text) for p in prompts]
            for name, prompts in files.items()}
    data = dict(environment=environment(session.device, session.target.dtype), command=command(), draft=Path(session.draft_name).name,
                max_new_tokens=args.max_new_tokens, prompts={n: len(p) for n, p in sets.items()}, seed=args.seed, rows=[])
    first_text: dict = {}
    with torch.inference_mode():
        for shape, temperature, coupled in runs:
            if time.perf_counter() - begin > args.seconds:
                print(f"no time left for {shape}@{temperature:g}")
                continue
            stats, texts, seconds = decode(session, sets, shape, temperature, coupled, args)
            base = first_text.setdefault(temperature, texts)
            rows = [dict(set=n, tree=shape, temperature=temperature, coupled=coupled and temperature > 0, prompts=len(sets[n]),
                         tau=stats[n].tau, rounds=stats[n].rounds, accepted=stats[n].accepted, drafted=stats[n].drafted,
                         per_depth=[round(u, 4) for _, u, _ in stats[n].per_depth()],
                         distinct_4gram_ratio=sum(map(distinct_ngram_ratio, texts[n])) / len(texts[n]),
                         same=sum(a == b for a, b in zip(base[n], texts[n]))) for n in sets]
            data["rows"] += rows
            mean = sum(r["tau"] for r in rows) / len(rows)
            print(f"{shape}@{temperature:g}{'' if coupled else ':off'}".ljust(18),
                  " ".join(f"{r['set']} {r['tau']:.2f} ({r['distinct_4gram_ratio']:.2f})" for r in rows), f"mean {mean:.3f}",
                  f"{seconds:.1f} s", flush=True)
            if args.agreement and temperature == 0 and "agreement" not in data:
                data["agreement"] = agreement(session, sets, texts)
                print("depth-1 agreement", {n: v["depth_1"] for n, v in data["agreement"].items()}, flush=True)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            if session.device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
