"""Tensor-parallel decoding against one rank: do all ranks emit the same tokens, and where does their text part from one rank's?

    python benchmarks/loop/tp_differences.py                                   # golden pair and SmolLM2, 2 and 3 ranks over gloo
    python benchmarks/loop/tp_differences.py --device cuda --world 2 --pair smollm2

One line per first difference: run, request, place, the two tokens, and the margin by which one rank's target preferred its own (the
gap of the logits at temperature 0; else the smaller of the gap in perturbed score and the distance to the nearest filter cut). The
sums of W partial products round elsewhere than one product does, so texts may part where a margin is of the size of rounding.
Exit status 1 if ranks disagree. `--json` prints one object.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastverify import Communicator, Decoder, SamplingParams, load_draft, load_target
from fastverify.cli.difference import first_difference
from fastverify.models.parallel import shard

ROOT = Path(__file__).resolve().parents[2]
RUNS = (("off", {}), ("chain-3", {}), ("tree-8", {}), ("tree-20", {}), ("tree-8", dict(temperature=0.9, top_k=20, top_p=0.9, seed=3)),
        ("tree-8", dict(temperature=0.7, seed=5, repetition_penalty=1.2)))
PAIRS = ("golden", "smollm2")
GOLDEN_PROMPTS = [[1, 7, 42, 42, 7, 3, 9], [5, 6, 7, 8] * 5, [11], list(range(20, 60))]


def load(pair: str, device: str, dtype: torch.dtype) -> tuple:
    """(target, draft, prompts as token ids) of "golden" or "smollm2"."""
    if pair == "golden":
        folder = ROOT / "tests" / "data" / "golden"
        target = load_target(folder / "target", dtype=dtype, device=device)
        return target, load_draft(folder / "draft", target), GOLDEN_PROMPTS
    from fastverify.cli.prompts import OWN, read_prompts
    from fastverify.models.demo import SHIPPED_DRAFT, demo_target_path
    from fastverify.models.load import load_tokenizer
    path = demo_target_path()
    if path is None:
        raise SystemExit("tp_differences: the demo model must be there; got none. Fix: fastverify fetch-demo, or FASTVERIFY_DEMO_TARGET.")
    target, tokenizer = load_target(path, dtype=dtype, device=device), load_tokenizer(path)
    draft = load_draft(SHIPPED_DRAFT, target)
    shipped = read_prompts(OWN)
    return target, draft, [tokenizer.apply_chat_template([{"role": "user", "content": p.text}]) for p in shipped[::len(shipped) // 6][:6]]


def texts(target, draft, prompts: list, new: int) -> list:
    """[run][request]: emitted tokens."""
    return [Decoder(target, draft, tree=tree).generate(prompts, new, SamplingParams(**params), stop_ids=[]).tokens for tree, params in RUNS]


def worker(rank: int, world: int, port: int, pair: str, device: str, dtype: torch.dtype, new: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    whole, draft, prompts = load(pair, f"cuda:{rank}" if device == "cuda" else "cpu", dtype)
    comm = Communicator(device=whole.device, max_bytes=256 * whole.config.hidden_size * dtype.itemsize)
    target = shard(whole, comm)
    (Path(out) / f"{rank}.json").write_text(json.dumps(texts(target, draft, prompts, new)))
    comm.check()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def compare(pair: str, world: int, device: str, dtype: torch.dtype, new: int, alone: Optional[tuple] = None) -> dict:
    """{"ranks_equal", "tokens", "requests", "differences": [...]} of one pair and world size."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, port, pair, device, dtype, new, folder), nprocs=world)
        found = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(world)]
    target, draft, prompts, want = alone or one_rank(pair, device, dtype, new)
    differences = []
    for (tree, params), got, plain in zip(RUNS, found[0], want):
        for b, (x, y) in enumerate(zip(got, plain)):
            p = SamplingParams(**params)
            d = first_difference(target, prompts[b], y, x, p, p.seed + b)
            if d is not None:
                differences.append(dict(run=f"{tree} {params}", request=b, place=d.index, one_rank=d.plain, ranks=d.spec, margin=d.margin))
    return dict(pair=pair, world=world, device=device, dtype=str(dtype).removeprefix("torch."),
                ranks_equal=all(t == found[0] for t in found), requests=len(RUNS) * len(prompts),
                tokens=sum(len(t) for run in want for t in run), differences=differences)


def one_rank(pair: str, device: str, dtype: torch.dtype, new: int) -> tuple:
    target, draft, prompts = load(pair, device, dtype)
    return target, draft, prompts, texts(target, draft, prompts, new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=lambda s: [int(v) for v in s.split(",")], default=[2, 3])
    parser.add_argument("--pair", type=lambda s: s.split(","), default=list(PAIRS), help=",".join(PAIRS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--new", type=int, default=48, help="tokens per request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if set(args.pair) - set(PAIRS):
        parser.error(f"--pair must be of {', '.join(PAIRS)}; got {','.join(args.pair)}")
    dtype, results = getattr(torch, args.dtype), []
    for pair in args.pair:
        alone = one_rank(pair, args.device, dtype, args.new)
        for world in args.world:
            results.append(compare(pair, world, args.device, dtype, args.new, alone))
            if not args.json:
                r = results[-1]
                print(f"{pair}, {world} ranks, {r['device']} {r['dtype']}: ranks bit-equal: {'yes' if r['ranks_equal'] else 'NO'}; {r['requests']} texts, "
                      f"{r['tokens']} tokens, {len(r['differences'])} part from one rank's", flush=True)
                for d in r["differences"]:
                    margin = "" if d["margin"] is None else f"{d['margin']:.3g}"
                    print(f"  {d['run']}, request {d['request']}: token {d['place']}, {d['one_rank']} became {d['ranks']}, margin {margin}")
    if args.json:
        print(json.dumps(results))
    return int(not all(r["ranks_equal"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
