"""Does a GPU decode SmolLM2 to the CPU path's tokens? An optional check, not collected by pytest.

    python tests/attention/smollm2_tokens.py --target MODEL.gguf [--draft DRAFT] [--tokens 96] [--prompts FILE]

Greedy decoding on the CPU in float32 is compared with the GPU in float32 (row by row) and bfloat16 (tensor cores), plainly and with
trees. Each first difference is listed with its margin: how far apart the two tokens' logits are on the CPU there. Exit code 1 when
a float32 text differs by a margin above 1e-3, or a bfloat16 one by a margin above 1."""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from fastverify.cli.difference import first_difference  # noqa: E402
from fastverify.eagle3.checkpoint import load_draft  # noqa: E402
from fastverify.eagle3.decode import Decoder, SamplingParams  # noqa: E402
from fastverify.models.load import load_target, load_tokenizer  # noqa: E402

PROMPTS = ["Why is the sky blue?", "Write a Python function that checks whether a string is a palindrome.",
           "Janet has 3 boxes with 12 pencils each and gives away 7. How many are left?", "Name five rivers of Europe.",
           "Explain recursion to a child.", "Write a short letter of thanks to a neighbour.", "What causes the tides?",
           "Summarise the water cycle in three sentences."]
MOST = {torch.float32: 1e-3, torch.bfloat16: 1.0}  # margins that rounding explains


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", help="a JSON list of texts")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    texts = json.load(open(args.prompts)) if args.prompts else PROMPTS
    tokenizer = load_tokenizer(args.target)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    reference = load_target(args.target, torch.float32, "cpu")
    params = SamplingParams()
    want = Decoder(reference, tree="off").generate(prompts, args.tokens, params).tokens
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16):
        target = load_target(args.target, dtype, args.device)
        draft = load_draft(args.draft, target, dtype=dtype, device=args.device) if args.draft else None
        for tree in ("off", "chain-3", "tree-20") if draft else ("off",):
            got = Decoder(target, draft, tree=tree).generate(prompts, args.tokens, params).tokens
            parts = [first_difference(reference, p, w, g, params, 0) for p, w, g in zip(prompts, want, got)]
            equal = sum(d is None for d in parts)
            print(f"{args.device} {str(dtype)[6:]} {tree}: {equal} of {len(parts)} texts of {args.tokens} tokens equal to the CPU's in float32", flush=True)
            for text, d in zip(texts, parts):
                if d is not None:
                    print(f"    {text[:40]!r}: {d}")
                    wrong += d.margin is None or d.margin > MOST[dtype]
    print(f"differences beyond rounding: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
