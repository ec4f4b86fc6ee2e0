"""Accept lengths over prompt sets, all sets in one continuous batch: how a draft does at every shape and temperature.

    python benchmarks/loop/accept_lengths.py --prompts eval/*.jsonl --limit 80 --max-new-tokens 128 --batch 64 \
        --runs tree-60@0,tree-60@0.8,tree-60@0.8:off --agreement --json lengths.json

A run is SHAPE@TEMPERATURE, with ":off" for drafts without the noise of their own tokens. Prompt i of a set has seed SEED + i in every
run, so the text of a temperature is the same under all shapes up to rounding (the column "same"); --same-text makes every run emit
the text of the first one at its temperature, so that shapes and scores are compared in pairs. The file is written after every run;
--seconds ends the list early. `varied` is tau over the prompts whose greedy text hardly repeats itself (4-grams 90 % distinct). --agreement: teacher-forced depth-1 agreement (float32) on the greedy texts of the first run at 0.
"""

import argparse
import json
import sys
import time
from itertools import zip_longest
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

VARIED = 0.9  # distinct 4-grams of a greedy text that counts as varied

class CountingLoop(GraphLoop):
    """A GraphLoop that counts every request's rounds (job.counts), and whose requests may be made to emit job.text."""

    def __init__(self, *args, max_batch: int, max_length: int, imposed: bool = False, **kw) -> None:
        super().__init__(*args, max_batch=max_batch, max_length=max_length, hook=self._impose if imposed else None, **kw)
        self.pool.buckets = (max_batch,)  # one capture a shape
        self.texts = torch.full((max_batch, max_length + 2), -1, device=self.device)  # id at every position of the slot's text

    def _prefill(self, job) -> None:
        text = [*job.prompt, *job.text] if self.hook else []
        self.texts[job.slot].copy_(torch.tensor((text + [-1] * self.texts.shape[1])[:self.texts.shape[1]]))
        super()._prefill(job)

    def _impose(self, logits: torch.Tensor, plan) -> None:
        """Makes the next token of the text by far the most likely one of every node."""
        t = plan.tree
        slot = torch.searchsorted(t.cu_nodes[1:], torch.arange(t.tokens.numel(), dtype=torch.int32, device=logits.device), right=True)
        place = (t.positions.long() + 1).clamp(0, self.texts.shape[1] - 1)
        token = self.texts[slot.clamp(max=self.texts.shape[0] - 1), place][:, None]
        index = token.clamp(min=0)
        logits.scatter_(1, index, torch.where(token >= 0, logits.new_full((), 3e4), logits.gather(1, index)))

    def _collect(self) -> list:
        flight = self._flight[0]
        if flight.rows is None:
            flight.rows = self.state.ring.read(flight.number)[1]
        for job, row in zip(flight.jobs, flight.rows.tolist()):
            taken, nodes, depth = row[2:FIELDS]
            if flight.shape is not None and job is not None and job.finish is None and nodes:
                job.counts.count([taken], [depth], [nodes])
        return super()._collect()


def decode(session, sets: dict, shape: str, temperature: float, coupled: bool, args, texts: "dict | None" = None) -> tuple:
    """Runs every prompt of every set; ({set: [Stats]}, {set: [tokens]}, seconds). texts {set: [tokens]}: what they are to emit."""
    longest = max(len(ids) for prompts in sets.values() for ids in prompts)
    loop = CountingLoop(session.target, session.draft, shapes=(parse_shape(shape),), max_batch=args.batch,
                        max_length=longest + args.max_new_tokens, coupled=coupled, imposed=texts is not None)
    start, jobs = time.perf_counter(), {}
    for name, prompts in sets.items():
        for i, ids in enumerate(prompts):
            job = loop.submit(ids, args.max_new_tokens, SamplingParams(temperature=temperature, seed=args.seed + i))
            job.counts, job.text = Stats(), texts[name][i] if texts else []
            jobs.setdefault(name, []).append(job)
    for _ in loop.run():
        pass
    return ({n: [j.counts for j in js] for n, js in jobs.items()}, {n: [j.tokens for j in js] for n, js in jobs.items()},
            time.perf_counter() - start)


def merged(stats: list) -> Stats:
    """The counts of several requests together."""
    out = Stats()
    for s in stats:
        out.rounds, out.spec_rounds = out.rounds + s.rounds, out.spec_rounds + s.spec_rounds
        out.accepted, out.drafted = out.accepted + s.accepted, out.drafted + s.drafted
        out.at_depth = [sum(x) for x in zip_longest(out.at_depth, s.at_depth, fillvalue=0)]
    return out


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
    parser.add_argument("--same-text", action="store_true", help="every run emits the text of the first run at its temperature")
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
            by_prompt, texts, seconds = decode(session, sets, shape, temperature, coupled, args,
                                               first_text.get(temperature) if args.same_text else None)
            base, rows = first_text.setdefault(temperature, texts), []
            for n in sets:
                s, distinct = merged(by_prompt[n]), [distinct_ngram_ratio(t) for t in texts[n]]
                varied = [c for c, t in zip(by_prompt[n], first_text.get(0.0, {n: []})[n]) if distinct_ngram_ratio(t) >= VARIED]
                rows.append(dict(set=n, tree=shape, temperature=temperature, coupled=coupled and temperature > 0, prompts=len(sets[n]),
                                 tau=s.tau, rounds=s.rounds, accepted=s.accepted, drafted=s.drafted,
                                 per_depth=[round(u, 4) for _, u, _ in s.per_depth()], distinct_4gram_ratio=sum(distinct) / len(distinct),
                                 varied=merged(varied).tau if varied else None, varied_prompts=len(varied),
                                 same=sum(a == b for a, b in zip(base[n], texts[n]))))
            data["rows"] += rows
            mean = sum(r["tau"] for r in rows) / len(rows)
            on_varied = [r["varied"] for r in rows if r["varied"]]
            print(f"{shape}@{temperature:g}{'' if coupled else ':off'}".ljust(18),
                  " ".join(f"{r['set']} {r['tau']:.2f} ({r['distinct_4gram_ratio']:.2f})" for r in rows), f"mean {mean:.3f}",
                  f"varied {sum(on_varied) / len(on_varied):.3f}" if on_varied else "", f"{seconds:.1f} s", flush=True)
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
