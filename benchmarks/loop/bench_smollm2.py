"""SmolLM2-135M-Instruct and the shipped draft on one GPU: tok/s against our own plain decoding and transformers', tau, equality.

    python benchmarks/loop/bench_smollm2.py --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts ids.json --limit 8

--prompts: {"set": [[token ids], ...]}. Every shape decodes the same prompts, batch 1, greedy, stop ids ignored for the speed rows.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402

from fastverify import GraphDecoder, SamplingParams, load_draft, load_target  # noqa: E402
from fastverify.cli.difference import first_difference  # noqa: E402
from fastverify.cli.report import merge  # noqa: E402
from fastverify.cli.session import SHIPPED_DRAFT  # noqa: E402
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


def transformers_model(target):
    """The same weights in transformers' class."""
    from transformers import LlamaConfig, LlamaForCausalLM
    c = target.config
    config = LlamaConfig(vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
                         num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
                         max_position_embeddings=c.max_position, rope_theta=c.rope.theta, rope_parameters=dict(rope_type="default", rope_theta=c.rope.theta),
                         tie_word_embeddings=True, torch_dtype=target.dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device=target.device).to(target.dtype)
    state, q, kv = {"model.embed_tokens.weight": target.embed_weight, "model.norm.weight": target.norm}, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i, w in enumerate(target.layers):
        p = f"model.layers.{i}."
        parts = dict(zip(("q", "k", "v"), w.qkv.split([q, kv, kv])))
        state |= {f"{p}self_attn.{n}_proj.weight": t for n, t in parts.items()} | {f"{p}self_attn.o_proj.weight": w.o}
        gate, up = w.gate_up.chunk(2)
        state |= {f"{p}mlp.gate_proj.weight": gate, f"{p}mlp.up_proj.weight": up, f"{p}mlp.down_proj.weight": w.down,
                  f"{p}input_layernorm.weight": w.input_norm, f"{p}post_attention_layernorm.weight": w.post_norm}
    missing = model.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config, device=target.device)
    return model.eval()


def transformers_speed(target, prompts: list, new: int) -> list:
    model, rows = transformers_model(target), []
    sync = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    for name, count, kw in (("eager", 48, {}), ("static cache + compile", new, dict(cache_implementation="static"))):
        def go(ids: list, n: int):
            x = torch.tensor([ids], device=target.device)
            return model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=2, **kw)[0, len(ids):].tolist()
        for _ in range(2):
            go(prompts[0], count)
        sync()
        start, texts = time.perf_counter(), []
        for ids in prompts[:2]:
            texts.append(go(ids, count))
        sync()
        rows.append(dict(provider=f"transformers {name}", tok_s=count * len(texts) / (time.perf_counter() - start)))
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
    parser.add_argument("--part", default="speed,equal,transformers")
    parser.add_argument("--equal-limit", type=int, default=2, help="prompts per set whose texts are compared")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, torch.bfloat16, args.device)
    draft = load_draft(args.draft, target, dtype=torch.bfloat16, device=args.device)
    sets = {k: v[:args.limit] for k, v in json.loads(args.prompts.read_text()).items()}
    shapes, found = args.tree.split(","), dict(device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu", command=harness.without_paths(" ".join(sys.argv)),
                                              date=time.strftime("%Y-%m-%d"), new=args.new)
    few = {k: v[:args.equal_limit] for k, v in sets.items()}
    compared = [s for s in shapes if s != "off"][:2]
    parts = dict(speed=lambda: speed(target, draft, sets, shapes, args.new),
                 equal=lambda: equality(target, draft, few, compared, 128, False),
                 exact=lambda: equality(target, draft, few, compared, 128, True),
                 transformers=lambda: transformers_speed(target, [p for ps in sets.values() for p in ps][:2], args.new))
    for name, run_part in parts.items():
        if name in args.part.split(","):
            with torch.inference_mode():
                found[name] = run_part()
            if args.json:  # at once: a run that is cut short keeps what it has
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
