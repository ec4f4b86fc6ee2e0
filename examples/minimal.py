"""The smallest run: a random target on any device, plain and speculative, the same text.

    python examples/minimal.py [cpu|cuda]
"""

import sys

import torch

import fastverify as fv
from fastverify.models.dummy import dummy_target

device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
target = dummy_target("tiny", torch.float32, device)  # 7 layers, hidden size 64; fv.load_target(PATH) loads a real one
prompt = [11, 12, 13, 14] * 6
runs = {}
for tree in ("off", "chain-3", "tree-8"):
    decoder = fv.Decoder(target, fv.NgramDrafter(num_draft=7), tree=tree)
    runs[tree] = decoder.generate([prompt], 64, fv.SamplingParams(temperature=0.0), stop_ids=[])
    stats = runs[tree].stats
    print(f"{tree:8} tau {stats.tau:.2f}, accepted/drafted {stats.accepted}/{stats.drafted}, {stats.tokens_per_second:.0f} tok/s on {device}")
print("the same text:", all(r.tokens == runs["off"].tokens for r in runs.values()))
