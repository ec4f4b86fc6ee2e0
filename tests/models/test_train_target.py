"""The trainer's target and generator, for every family that loads, against transformers."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, hf_logits, hf_streams, make_hf, random_tokens

from fastverify.eagle3.train_generate import Generator
from fastverify.eagle3.train_target import load_target, packed_mask


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_rows_equal_transformers(family, tmp_path, rng):
    """Two documents in one row: logits and the residual streams before three layers; then greedy replies, rows that end early."""
    hf = make_hf(family)
    hf.save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert target.eos_ids == (2,)
    docs = [random_tokens(n, rng) for n in (9, 14)]
    ids, doc = torch.tensor([docs[0] + docs[1]]), torch.tensor([[0] * 9 + [1] * 14])
    pos = torch.tensor([[*range(9), *range(14)]])
    hidden, aux = target(ids, pos, packed_mask(doc), (0, 1, 2))
    logits = target.logits(hidden[0])
    for text, part in zip(docs, (slice(0, 9), slice(9, 23))):
        torch.testing.assert_close(logits[part], hf_logits(hf, text), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(aux[0, part], torch.cat(hf_streams(hf, text)[:3], -1), rtol=1e-4, atol=1e-4)
    prompts = [np.array(random_tokens(n, rng)) for n in (3, 7, 4) * 12]
    eos = list(range(0, 97, 5))  # replies of many lengths: rows are dropped on the way
    got = Generator(target, eos, rows=64, step=16).many(prompts, 40, None, log=lambda text: None)
    assert len({len(x) for x in got}) > 2
    for p, reply in zip(prompts[:6], got):
        text = p.tolist()
        for token in reply.tolist():
            assert text[-1] not in eos or len(text) == len(p)
            best = hf_logits(hf, text)[-1]
            assert best[token] > best.max() - 1e-4
            text.append(token)
        assert len(reply) == 40 or reply[-1] in eos
