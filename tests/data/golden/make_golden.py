"""Make the tiny golden pair of this folder: a random near-Markov Llama target and an EAGLE-3 draft trained on its own
text.

    python tests/data/golden/make_golden.py [OUT]

target/   config.json, model.safetensors (float32, Hugging Face layout): L8 H64 I160 V512, 4 query / 2 key heads of
size 16
draft/    config.json, model.safetensors (float32, EAGLE layout): H64, draft vocabulary 480, features before layers
{2, 4, 5}
reference.safetensors   ids [2, 25], target logits, aux features, and per unrolled step j the draft's h2 and logits
record.json             how it was made and what it reaches

About three minutes on two CPU cores. The target is random, but peaked enough (embedding sd 1.0, head sd 0.8, residual
branches scaled by 0.12) that its next token depends mostly on the last one: a small draft can learn it."""

import json
import os
import sys
import time

import numpy as np
import torch
from safetensors.torch import save_file

from fastverify.eagle3.train import TrainConfig, Trainer, training_rows
from fastverify.eagle3.train_data import Ragged, Replies, choose_vocab
from fastverify.eagle3.train_eval import evaluate, held_out
from fastverify.eagle3.train_generate import Generator
from fastverify.eagle3.train_net import DraftConfig, save_draft
from fastverify.eagle3.train_target import LlamaConfig, TargetLlama, packed_mask

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
)


def random_target(c: LlamaConfig, seed: int = 0) -> TargetLlama:
    """Random weights, peaked next-token law. Norm weights are random around 1, so that leaving one out is visible."""
    g = torch.Generator().manual_seed(seed)
    net = TargetLlama(c)
    with torch.no_grad():
        for name, p in net.named_parameters():
            x = torch.randn(p.shape, generator=g)
            if "norm" in name:
                p.copy_(1 + 0.1 * x)
            elif name == "embed_tokens.weight":
                p.copy_(x)
            elif name == "lm_head.weight":
                p.copy_(0.8 * x)
            else:
                scale = 0.12 if "o_proj" in name or "down_proj" in name else 1.0
                p.copy_(x * scale * p.shape[1] ** -0.5 * (3.0 if scale < 1 else 1.0))
    return net.requires_grad_(False).eval()


def sample_texts(net: TargetLlama, count: int, length: int, temps: np.ndarray | None, seed: int) -> Replies:
    """Texts of ``length`` tokens, each from one random first token; every later token counts as generated."""
    rng = np.random.default_rng(seed)
    gen = Generator(net, eos=[-1], rows=count, min_p=1e-6, seed=seed)
    firsts = [rng.integers(3, net.config.vocab_size, 1).astype(np.int32) for _ in range(count)]
    got = gen.many(firsts, length - 1, temps, log=lambda *a, **k: None)
    ids = [np.concatenate([a, b]) for a, b in zip(firsts, got)]
    asst = [np.concatenate([np.zeros(1, np.uint8), np.ones(length - 1, np.uint8)]) for _ in ids]
    return Replies(
        Ragged.of(ids),
        Ragged.of(asst, np.uint8),
        np.zeros(count, np.int16),
        np.zeros(count, bool),
        np.full(count, temps is None),
        ["random"],
    )


def save_target(net: TargetLlama, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    c = net.config
    state = {k if k.startswith("lm_head") else "model." + k: v.contiguous() for k, v in net.state_dict().items()}
    save_file(state, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(
            dict(
                architectures=["LlamaForCausalLM"],
                model_type="llama",
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_hidden_layers,
                num_attention_heads=c.num_attention_heads,
                num_key_value_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                hidden_act="silu",
                attention_bias=False,
                mlp_bias=False,
                rms_norm_eps=c.rms_norm_eps,
                rope_theta=c.rope_theta,
                rope_scaling=None,
                max_position_embeddings=c.max_position_embeddings,
                tie_word_embeddings=False,
                bos_token_id=1,
                eos_token_id=2,
                torch_dtype="float32",
            ),
            f,
            indent=2,
        )
        f.write("\n")


def main(out: str, steps: int = 1200) -> None:
    torch.set_num_threads(2)
    t0 = time.time()
    net = random_target(CONFIG)
    save_target(net, os.path.join(out, "target"))
    temps = np.where(np.arange(384) % 2 == 0, 1.0, 0.5).astype(np.float32)
    texts = sample_texts(net, 384, 96, temps, 1)
    greedy = sample_texts(net, 64, 96, None, 2)
    vocab, cover = choose_vocab(texts, 480, 512, [0, 1, 2])
    c = TrainConfig(
        steps=steps,
        batch=16,
        row=96,
        ttt=4,
        ttt_late=4,
        lr=3e-3,
        head_lr=3e-3,
        warmup=50,
        ema=0.99,
        eval_every=300,
        log_every=100,
        seed=0,
    )
    rows, _ = training_rows(texts, c, "cpu")
    held = Replies(greedy.ids, greedy.asst, greedy.source, np.ones(64, bool), greedy.greedy, greedy.names)
    _, held_rows = training_rows(held, c, "cpu")
    trainer = Trainer(net, DraftConfig.for_target(CONFIG, 480), vocab, c)
    trainer.run(rows, held_rows)
    save_draft(trainer.ema, os.path.join(out, "draft"), dict(name="golden-random-llama", seed=0), torch.float32)

    ids = torch.stack([torch.from_numpy(greedy.ids[i][:25].astype(np.int64)) for i in range(2)])
    pos, doc = torch.arange(25).expand(2, 25), torch.zeros(2, 25, dtype=torch.int16)
    with torch.no_grad():
        hidden, aux = net(ids, pos, None, (2, 4, 5))
        ref = dict(ids=ids, aux=aux, target_logits=net.logits(hidden))
        for j, h2 in enumerate(trainer.ema.unroll(net.embed_tokens, ids, aux, pos, packed_mask(doc), 4)):
            ref[f"h2.{j}"], ref[f"draft_logits.{j}"] = h2, trainer.ema.logits(h2)
    save_file(
        {k: v.contiguous() for k, v in ref.items()},
        os.path.join(out, "reference.safetensors"),
        metadata={
            "note": "index k of step j: chain from pair k fed true tokens k+1..k+1+j; its last 1+j entries saw token 0"
        },
    )
    result = evaluate(net, trainer.ema, held)
    record = dict(
        recipe="384 texts of 96 tokens at T 1.0 and 0.5; AdamW 3e-3 cosine, 16 x 96 tokens a step, 4 unrolled steps",
        steps=steps,
        coverage=round(cover, 4),
        seconds=round(time.time() - t0, 1),
        held_out=held_out(net, trainer.ema, held_rows, 16),
        greedy_chain=result["random"],
    )
    with open(os.path.join(out, "record.json"), "w") as f:
        json.dump(record, f, indent=1)
        f.write("\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)))
