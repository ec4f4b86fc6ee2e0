"""Saves logits of real text for the benchmarks: a few rows of each of eight sampled answers, as bfloat16.

    python benchmarks/accept/save_logits.py smollm2-logits.xz --target SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import json
import lzma
from pathlib import Path

import torch

import fastverify as fv

PROMPTS = Path(fv.__file__).parent / "data/prompts.jsonl"


def rows_of_answers(target, tokenizer, prompts: list, per_answer: int) -> torch.Tensor:
    """bfloat16 [len(prompts)*per_answer, V]: every fourth decode step of answers drawn at temperature 0.8."""
    seen, logits = [], target.logits

    def keep(hidden):
        out = logits(hidden)
        seen.append(out[-1:].to(torch.bfloat16))
        return out

    target.logits = keep
    rows = []
    for prompt in prompts:
        seen.clear()
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        fv.Decoder(target, None, tree="off").generate([ids], max_new_tokens=4 * per_answer + 2,
                                                      sampling=fv.SamplingParams(temperature=0.8, seed=3), stop_ids=[])
        rows += seen[1::4][:per_answer]
    del target.logits  # the method again
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True, help="the model, a GGUF file or a Hugging Face folder")
    parser.add_argument("--rows-per-answer", type=int, default=6)
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    rows = rows_of_answers(fv.load_target(args.target), fv.load_tokenizer(args.target), prompts[::max(1, len(prompts) // 8)][:8],
                           args.rows_per_answer)
    planes = rows.view(torch.uint8).view(-1, 2).T.contiguous()  # low and high bytes apart: they compress far better
    args.out.write_bytes(lzma.compress(planes.numpy().tobytes()))
    print(f"{rows.shape[0]} rows of {rows.shape[1]} logits in {args.out}, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
