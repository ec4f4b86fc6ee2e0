"""How long a draft could be accepted at all: the accept length of chains (and of k children per node) drafted by the target itself.

    python benchmarks/loop/perfect_draft.py --target MODEL.gguf --prompts eval/*.jsonl --limit 4 --temperature 0.8

At temperature 0 the target's own argmax is always accepted: a chain of D drafts has tau D + 1. Sampled text leaves the argmax as often
as the distribution says, whatever the draft: tau of a perfect chain is 1 + the mean number of tokens in a row that are the target's most
likely ones (at most D). "k children" counts a token as drafted if it is among the k most likely; a tree that held k children of every
node on the path, for nothing: a bound that no tree of a few nodes reaches. `--tree tree-60` grows that tree by the loop's rule (beams,
then the best nodes) from the target's own probabilities, at a few places of every reply: its expected tau, 1 + the sum over its nodes
of the probability that the text goes there.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from fastverify import Decoder, SamplingParams, load_target, load_tokenizer
from fastverify.cli.prompts import read_sets
from fastverify.eagle3.shapes import Shape, parse_shape
from fastverify.eagle3.train_target import load_target as load_teacher

CHILDREN, DEPTHS = (1, 2, 4), (3, 5)


def tau(drafted: torch.Tensor, depth: int) -> tuple:
    """drafted bool [T]: (sum over starts of 1 + drafted tokens in a row, at most `depth`; starts that see `depth` tokens)."""
    starts = drafted.shape[0] - depth + 1
    if starts < 1:
        return 0, 0
    windows = drafted.unfold(0, depth, 1).int()
    return int(windows.cumprod(1).sum()) + starts, starts


@torch.no_grad()
def tree_tau(teacher, prefix: list, shape: Shape, temperature: float) -> float:
    """Expected tau behind `prefix` (ids, root included) of the tree of `shape` that the target drafts for itself, without noise.

    Every level is one forward over the prefix and all nodes expanded so far, each of which sees the prefix and its ancestors."""
    n, device = len(prefix), next(teacher.parameters()).device
    ids, pos = torch.tensor(prefix, device=device), torch.arange(n, device=device)
    mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    rows, scores, pool = torch.tensor([n - 1], device=device), torch.zeros(1, device=device), []
    for level in range(shape.levels):
        hidden, _ = teacher(ids[None], pos[None], mask[None, None])
        p = torch.log_softmax(teacher.logits(hidden[0, rows]) / temperature, -1).topk(shape.k)
        children = scores[:, None] + p.values
        pool.append(children.flatten())
        scores, pick = children.flatten().topk(shape.k)  # the beam of the next level
        parents, t = rows[pick // shape.k], len(ids)
        grown = torch.eye(t + shape.k, dtype=torch.bool, device=device)
        grown[:t, :t] = mask
        grown[t:, :t] = mask[parents]
        ids, pos, mask = torch.cat([ids, p.indices.flatten()[pick]]), torch.cat([pos, pos.new_full((shape.k,), n + level)]), grown
        rows = torch.arange(t, t + shape.k, device=device)
    pool = torch.cat(pool)
    return 1 + float(pool.topk(min(shape.nodes - 1, pool.numel())).values.exp().sum())


def measure_tree(teacher, texts: list, shape: Shape, temperature: float, starts: int) -> float:
    """Mean of tree_tau over `starts` places of every reply, spread over it."""
    found = []
    for length, ids in texts:
        for i in range(starts):
            found.append(tree_tau(teacher, ids[:length + 1 + i * (len(ids) - length) // starts], shape, temperature))
    return sum(found) / len(found)


def measure(teacher, texts: list, temperature: float, device: str = "cpu") -> dict:
    """texts: (prompt length, all ids). {"k1 d3": tau, ..., "largest": mean of the largest probability}."""
    sums = {(k, d): [0, 0] for k in CHILDREN for d in DEPTHS}
    largest = []
    for length, ids in texts:
        row = torch.tensor([ids], device=device)
        with torch.no_grad():
            hidden, _ = teacher(row, torch.arange(len(ids), device=device)[None], None)
            logits = teacher.logits(hidden[0, length - 1 : -1])
        rank = (logits > logits.gather(1, row[0, length:, None])).sum(1)
        largest.append(torch.softmax(logits / (temperature or 1.0), -1).amax(1))
        for (k, d), s in sums.items():
            a, n = tau(rank < k, d)
            s[0] += a
            s[1] += n
    found = {f"k{k} d{d}": s[0] / max(s[1], 1) for (k, d), s in sums.items()}
    return {**found, "largest": float(torch.cat(largest).mean())}


def main(argv: "list | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--prompts", nargs="+", help="JSONL files (default: the package's own prompts)")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", help="also the expected tau of this tree, at --starts places of every reply (a temperature above 0)")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    dtype, shape = torch.float32, parse_shape(args.tree) if args.tree and args.temperature else None
    target, tokenizer = load_target(args.target, dtype, torch.device(args.device)), load_tokenizer(args.target)
    teacher = load_teacher(str(args.target), dtype, args.device)
    decoder, sampling = Decoder(target, tree="off"), SamplingParams(temperature=args.temperature, seed=args.seed)
    rows = {}
    for name, prompts in read_sets(args.prompts, args.limit).items():
        texts = []
        for p in prompts:
            ids = p.token_ids or tokenizer.apply_chat_template([{"role": "user", "content": p.text}])
            out = decoder.generate([ids], max_new_tokens=args.max_new_tokens, sampling=sampling).tokens[0]
            texts.append((len(ids), [*ids, *out]))
        rows[name] = measure(teacher, texts, args.temperature, args.device)
        if shape:
            rows[name][args.tree] = measure_tree(teacher, texts, shape, args.temperature, args.starts)
    keys = list(next(iter(rows.values())))
    rows["mean"] = {k: sum(r[k] for r in rows.values()) / len(rows) for k in keys}
    if args.json:
        print(json.dumps(rows))
        return 0
    print("set".ljust(12), *(k.rjust(8) for k in keys))
    for name, row in rows.items():
        print(name.ljust(12), *(f"{row[k]:8.2f}" for k in keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
