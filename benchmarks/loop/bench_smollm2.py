"""SmolLM2-135M-Instruct and the shipped draft on one GPU: tok/s against our own plain decoding and transformers', tau, equality.

    python benchmarks/loop/bench_smollm2.py --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts ids.json --limit 8

--prompts: {"set": [[token ids], ...]}. Every shape decodes the same prompts, batch 1, greedy, stop ids ignored for the speed rows.
--peers eager,static,compiled,safeailab: transformers' generate(), the same with static cache and compile, its compiled step in a bare loop,
and SafeAILab's loop (--eagle CHECKOUT); they run the first prompt of some sets, and so do our shapes once more beside them.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Optional

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import harness  # noqa: E402
import loop_peers  # noqa: E402

from fastverify import GraphDecoder, SamplingParams, load_draft, load_target  # noqa: E402
from fastverify.cli.difference import first_difference  # noqa: E402
from fastverify.cli.report import merge  # noqa: E402
from fastverify.models.demo import SHIPPED_DRAFT  # noqa: E402
from fastverify.eagle3.stats import distinct_ngram_ratio  # noqa: E402

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


def run(decoder, prompts: list, new: int, params: SamplingParams, stop_ids) -> tuple:
    """([tokens], merged Stats), one prompt at a time."""
    texts, stats = [], []
    for ids in prompts:
        r = decoder.generate([ids], new, params, stop_ids)
        texts.append(r.tokens[0])
        stats.append(r.stats)
    return texts, merge(stats)


def speed(target, draft, sets: dict, shapes: list, new: int) -> list:
    rows = []
    decoders = {shape: GraphDecoder(target, None if shape == "off" else draft, tree=shape) for shape in shapes}
    for decoder in decoders.values():
        decoder.generate([next(iter(sets.values()))[0]], 64, stop_ids=[])
    for name, prompts in sets.items():
        plain = None
        for shape, decoder in decoders.items():
            texts, s = run(decoder, prompts, new, SamplingParams(), [])
            plain = plain or (texts, s)
            rows.append(dict(set=name, shape=shape, tok_s=s.tokens_per_second, ms=s.decode_ms / sum(s.steps.values()), tau=s.tau,
                             against=s.tokens_per_second / plain[1].tokens_per_second, steps=dict(s.steps),
                             equal=sum(a == b for a, b in zip(texts, plain[0])), prompts=len(prompts),
                             distinct=sum(distinct_ngram_ratio(t) for t in texts) / len(texts), accepted=s.accepted, drafted=s.drafted,
                             per_depth=[round(u, 3) for _, u, _ in s.per_depth()], controller=s.controller))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    for shape in shapes:
        mine = [r for r in rows if r["shape"] == shape]
        mean = lambda k: sum(r[k] for r in mine) / len(mine)  # noqa: E731
        print(f"MEAN {shape}: {mean('tok_s'):.0f} tok/s, {mean('ms'):.4f} ms a cycle, tau {mean('tau'):.3f}, "
              f"{mean('against'):.3f}x plain, equal {sum(r['equal'] for r in mine)}/{sum(r['prompts'] for r in mine)}", flush=True)
    return rows


def equality(target, draft, sets: dict, shapes: list, new: int, exact: bool) -> list:
    """Share of prompts whose text differs from plain decoding, greedy and seeded, with the margins of the first differences."""
    rows = []
    options = dict(exact=True) if exact else {}
    plain = GraphDecoder(target, **options)
    for shape in shapes:
        spec = GraphDecoder(target, draft, tree=shape, **options)
        for law, params in (("greedy", SamplingParams()), ("sampled", SAMPLED)):
            differ, total = [], 0
            for prompts in sets.values():
                for ids in prompts:
                    a = plain.generate([ids], new, params).tokens[0]
                    b = spec.generate([ids], new, params).tokens[0]
                    total += 1
                    d = first_difference(target, ids, a, b, params, params.seed)
                    if d is not None:
                        differ.append((d.index, d.margin))
            rows.append(dict(mode="exact" if exact else "normal", shape=shape, law=law, differ=len(differ), prompts=total, differences=differ))
            print(rows[-1], flush=True)
    return rows


class Peers:
    """What else runs the same weights, warmed up (compiling takes most of a minute) and then timed beside our own rows."""

    def __init__(self, target, draft: str, names: list, new: int, prompts: list, eagle: Optional[str], shapes: list) -> None:
        self.device, self.target, self.new, self.rounds = target.device, target, new, {}
        self.go: dict = {}
        if "eager" in names or "static" in names:
            both = loop_peers.transformers_runs(target, new)
            self.go |= {k: v for k, v in both.items() if ("static" in k) == ("static" in names) or ("eager" in k and "eager" in names)}
        if "compiled" in names:
            self.go["transformers, compiled step in a bare loop"] = loop_peers.compiled_steps(target, max(map(len, prompts)) + new + 1)
        if "safeailab" in names:
            for k, depth, total in shapes:
                model = loop_peers.safeailab_model(eagle, target, draft, (k, depth, total))
                name = f"SafeAILab, k {k}, depth {depth}, {total} tokens"
                self.go[name], self.rounds[name] = loop_peers.safeailab_run(model, self.device)
        for name, go in list(self.go.items()):
            start = time.perf_counter()
            try:  # the longest first: a longer cache later would be compiled again
                for ids in sorted(prompts, key=len, reverse=True)[:2]:
                    go(ids, 8 if "eager" in name else new)
            except Exception as e:  # a peer that does not run here is a row that says so
                print(f"{name}: does not run: {type(e).__name__}: {str(e)[:300]}", flush=True)
                del self.go[name]
            print(f"{name}: warm after {time.perf_counter() - start:.1f} s", flush=True)
        for rounds in self.rounds.values():
            rounds.clear()

    def rows(self, prompts: list) -> list:
        rows = []
        for name, go in self.go.items():
            row = loop_peers.timed_runs(name, self.device, go, prompts, 48 if "eager" in name else self.new)
            texts = row.pop("texts")
            row["distinct"] = sum(distinct_ngram_ratio(t) for t in texts) / len(texts)
            if self.rounds.get(name):
                made, rounds = map(sum, zip(*self.rounds[name]))
                row["tau"] = made / rounds
            rows.append(row)
            print(rows[-1], flush=True)
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default=str(SHIPPED_DRAFT))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--tree", default="off,chain-3,chain-5,tree-8,tree-20,auto")
    parser.add_argument("--part", default="speed,equal")
    parser.add_argument("--peers", default="", help="of eager, static, compiled, safeailab")
    parser.add_argument("--eagle", metavar="CHECKOUT", help="of github.com/SafeAILab/EAGLE")
    parser.add_argument("--peer-prompts", type=int, default=3)
    parser.add_argument("--go", type=Path, help="measure when this file exists; FILE.ready is made after warming up")
    parser.add_argument("--equal-limit", type=int, default=2, help="prompts per set whose texts are compared")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "safeailab" in args.peers.split(",") and not args.eagle:
        parser.error("--peers safeailab needs --eagle")
    target = load_target(args.target, torch.bfloat16, args.device)
    draft = load_draft(args.draft, target, dtype=torch.bfloat16, device=args.device)
    sets = {k: v[:args.limit] for k, v in json.loads(args.prompts.read_text()).items()}
    shapes, found = args.tree.split(","), dict(device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu", command=harness.without_paths(" ".join(sys.argv)),
                                              date=time.strftime("%Y-%m-%d"), new=args.new)
    few = {k: v[:args.equal_limit] for k, v in sets.items()}
    compared = [s for s in shapes if s != "off"][:2]
    same = [v[0] for v in sets.values()][:args.peer_prompts]
    peers = Peers(target, args.draft, args.peers.split(","), args.new, same, args.eagle, [(6, 4, 20), (10, 6, 60)]) if args.peers else None
    if args.go:  # another job may have the GPU until then
        args.go.with_suffix(".ready").touch()
        while not args.go.exists():
            time.sleep(0.05)

    def beside() -> list:
        decoders = {s: GraphDecoder(target, None if s == "off" else draft, tree=s) for s in shapes}
        for shape, decoder in decoders.items():
            peers.go[f"fastverify {shape}"] = lambda ids, n, d=decoder: d.generate([ids], n, stop_ids=[]).tokens[0]
            decoder.generate([same[0]], 64, stop_ids=[])
        return peers.rows(same)

    parts = dict(speed=lambda: speed(target, draft, sets, shapes, args.new),
                 equal=lambda: equality(target, draft, few, compared, 128, False),
                 exact=lambda: equality(target, draft, few, compared, 128, True))
    for name, run_part in [*((n, p) for n, p in parts.items() if n in args.part.split(",")), *([("peers", beside)] if peers else [])]:
        with torch.inference_mode() if name != "peers" else torch.no_grad():
            found[name] = run_part()
        if args.json:  # at once: a run that is cut short keeps what it has
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
