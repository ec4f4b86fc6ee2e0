"""The loop end to end: prompt files under every drafter and shape, against plain decoding.

    python benchmarks/loop/bench_decode.py --prompts FILE.jsonl ... --limit 20 --max-new-tokens 48

Plain and speculative runs alternate prompt by prompt; decode time only (prefill excluded), everything warmed before.
Writes benchmarks/results/<device>-loop-<date>.json: one entry per drafter, as `fastverify evaluate --json` writes them.
"""

import argparse
import datetime
import json
import re
from pathlib import Path

from fastverify.cli import evaluation
from fastverify.cli.options import add_model, add_sampling, check_run, check_tree, sampling_params, stop_ids
from fastverify.cli.output import Output
from fastverify.cli.prompts import need_tokenizer, read_sets
from fastverify.cli.session import open_session

RESULTS = Path(__file__).resolve().parents[1] / "results"
SHAPES = {"eagle3": "chain-2,chain-3,tree-8,tree-20,auto", "ngram": "chain-3,tree-8,auto"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="default: the prompts that ship with the package")
    parser.add_argument("--limit", type=int, help="prompts per file")
    parser.add_argument("--batch", type=int, default=1)
    for name, shapes in SHAPES.items():
        parser.add_argument(f"--{name}", default=shapes, metavar="SHAPES",
                            help=f"shapes of this drafter, '' for none (default {shapes})")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder (default {RESULTS})")
    add_sampling(parser, 48)
    add_model(parser)
    args = parser.parse_args()
    check_run("bench_decode", args)
    return args


def main() -> None:
    args, out = parse(), Output()
    sets, entries = read_sets(args.prompts, args.limit), []
    for name in SHAPES:
        trees = tuple(check_tree(t) for t in getattr(args, name).split(",") if t)
        if not trees or (args.dummy and name == "ngram"):
            continue
        args.draft = "ngram" if name == "ngram" else args.draft
        session = open_session("bench_decode", args, out, need_tokenizer(sets))
        settings = evaluation.Settings(trees, args.max_new_tokens, args.batch, True, sampling_params(args), stop_ids(args))
        rows = []
        for key, prompts in sets.items():
            items = evaluation.encode(session, key, prompts, settings, out)
            rows += evaluation.evaluate(session, key, items, settings) if items else []
            out.note(f"{name}: {key} done")
        entries.append(evaluation.results(session, rows, settings))
        out.table(*evaluation.table(rows, True), title=f"{name}: {session.draft_name}", left=2)
        for row in rows:
            for key, difference in row.differences:
                out.line(f"{row.name} {row.tree}, prompt {key}: {difference}")
    device = re.sub(r"\W+", "-", entries[0]["environment"]["device"]).strip("-").lower()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{device}-loop-{datetime.date.today()}.json"
    path.write_text(json.dumps(dict(benchmark="loop/bench_decode", entries=entries), indent=1) + "\n")
    out.line(f"written: {path}")


if __name__ == "__main__":
    main()
