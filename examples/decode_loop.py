"""Speculative decoding on fastverify's ops alone: n-gram drafts, one tree, one forward, one verify, one compaction a step.

    python examples/decode_loop.py [cpu|cuda]

The loop reads the emitted tokens once a step, since the n-gram drafter searches the text on the host; everything else stays on the
device. With nodes=1 the same loop is plain decoding.
"""

import sys

import torch

import fastverify as fv
from fastverify.models.dummy import dummy_target


def decode(target, prompt: list, new: int, nodes: int, page: int = 16) -> tuple:
    """(text, steps): `new` greedy tokens behind `prompt`, trees of `nodes` rows."""
    device, vocab = target.device, target.config.vocab_size
    i32 = dict(dtype=torch.int32, device=device)
    pages = -(-(len(prompt) + new + nodes) // page)                         # reserved once: the page table never changes
    table, cache = torch.arange(pages, **i32)[None], target.make_cache(pages, page)
    prefix, active, remaining = torch.zeros(1, **i32), torch.ones(1, **i32), torch.full((1,), new, **i32)
    sampling, drafter = fv.Sampling.make(1, device), fv.NgramDrafter(num_draft=max(1, nodes - 1))

    def forward(tokens, positions, slots, cu_nodes, mask=None):
        return target.forward(fv.ForwardBatch(tokens, positions, slots, cu_nodes, prefix, table, mask), cache)[0]

    rows, cu = len(prompt) - 1, torch.tensor([0, len(prompt) - 1], **i32)   # prefill: a chain of all tokens but the last
    p = fv.prepare_tree(None, cu, prefix, table, page, fv.Prepared.empty(rows, 1, 1, device))
    forward(torch.tensor(prompt[:-1], **i32), p.positions, p.slots, cu)
    prefix += rows                                                          # len(KV) = len(text) - 1, before every step
    text, root, steps = list(prompt), torch.tensor(prompt[-1:], **i32), 0
    while len(text) < len(prompt) + new:
        pool = [x.to(device) for x in drafter.pool([text])]
        tree = fv.build_tree(*pool, root, prefix, active, nodes, vocab)
        p = fv.prepare_tree(tree.parents, tree.cu_nodes, prefix, table, page, fv.Prepared.empty(nodes, 1, 1, device))
        logits = target.logits(forward(tree.tokens, tree.positions, p.slots, tree.cu_nodes, tree.mask))
        out = fv.verify_tree(logits, tree.tokens, tree.parents, tree.cu_nodes, prefix, active, remaining, sampling, vocab_size=vocab)
        fv.compact_kv(cache.k, cache.v, out.path, out.num_tokens_out, prefix, table)
        text += out.out_tokens[0, : int(out.num_tokens_out)].tolist()
        prefix += out.num_tokens_out
        root, steps = out.next_root.int(), steps + 1
    return text, steps


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    target = dummy_target("tiny", torch.float32, device)
    prompt = [11, 12, 13, 14] * 6
    (plain, n), (text, m) = decode(target, prompt, 48, nodes=1), decode(target, prompt, 48, nodes=8)
    print(f"48 tokens in {n} plain steps, in {m} steps of 8 nodes; the same text: {plain == text}")
