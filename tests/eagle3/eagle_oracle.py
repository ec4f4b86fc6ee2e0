"""Does the public EAGLE code read our exported draft, and draw the same first tree? An optional check, not collected by pytest.

    python tests/eagle3/eagle_oracle.py --eagle CHECKOUT --target MODEL.gguf --draft DRAFT [--prompts FILE] [--count 20]

CHECKOUT: a clone of https://github.com/SafeAILab/EAGLE (its folder `eagle` is imported and run on the CPU in float32; commit
cb7e084 and transformers 4.53.3 work together). The target is written as a Hugging Face folder from the weights that our loader
read; EAGLE runs its own target network, feature capture, draft and tree on it, we run ours, and tokens, parents and positions
of the trees are compared prompt by prompt. Exit code 1 when one differs."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent), str(HERE.parent / "models")]

from draft_oracle import Run  # noqa: E402
from tiny_models import Requests  # noqa: E402

from fastverify.cli.prompts import read_prompts  # noqa: E402
from fastverify.eagle3.checkpoint import load_draft  # noqa: E402
from fastverify.models.load import load_target, load_tokenizer  # noqa: E402


def save_hf(model, folder: Path) -> None:
    """A Llama target as a Hugging Face folder with an index (EAGLE's embedding loader reads only the index)."""
    from safetensors.torch import save_file
    c = model.config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    state = {"model.embed_tokens.weight": model.embed_weight, "model.norm.weight": model.norm}
    if not c.tie_word_embeddings:
        state["lm_head.weight"] = model.lm_head_weight
    for i, w in enumerate(model.layers):
        p = f"model.layers.{i}."
        state |= {f"{p}self_attn.{x}_proj.weight": part for x, part in zip("qkv", w.qkv.split([q, kv, kv]))}
        state |= {f"{p}mlp.{x}_proj.weight": part for x, part in zip(("gate", "up"), w.gate_up.split([c.intermediate_size] * 2))}
        state |= {p + "self_attn.o_proj.weight": w.o, p + "mlp.down_proj.weight": w.down, p + "input_layernorm.weight": w.input_norm,
                  p + "post_attention_layernorm.weight": w.post_norm}
    save_file({k: v.contiguous() for k, v in state.items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope.theta,
        max_position_embeddings=c.max_position, tie_word_embeddings=c.tie_word_embeddings, torch_dtype="float32",
        hidden_act="silu", bos_token_id=1, eos_token_id=2)))


def eagle_model(checkout: str, target: Path, draft: str, shape: tuple):
    """Their EaModel; its tokenizer, which is not used here, is left out."""
    sys.path.insert(0, checkout)
    from eagle.model import ea_model
    ea_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *a, **k: None)
    k, depth, total = shape
    return ea_model.EaModel.from_pretrained(use_eagle3=True, base_model_path=str(target), ea_model_path=draft, total_token=total,
                                            depth=depth, top_k=k, torch_dtype=torch.float32).eval()


@torch.no_grad()
def their_tree(model, ids: list) -> tuple:
    """(tokens, parents, depths) of the first draft tree, the root (their sampled token) included."""
    from eagle.model.kv_cache import initialize_past_key_values
    from eagle.model.utils import initialize_tree, reset_tree_mode
    model.ea_layer.reset_kv()
    reset_tree_mode(model)
    past, _, _ = initialize_past_key_values(model.base_model, max_length=len(ids) + 128)
    tokens, _, mask, depth, *_ = initialize_tree(torch.tensor([ids]), model, past, None)
    mask, depth = mask[0, 0].bool(), depth.tolist()
    seen = [[j for j in range(len(depth)) if mask[i, j] and j != i] for i in range(len(depth))]
    return tokens[0].tolist(), [max(js, key=lambda j: depth[j]) if js else -1 for js in seen], depth


@torch.no_grad()
def our_tree(target, draft, ids: list, shape: tuple) -> tuple:
    k, depth, total = shape
    rng = torch.Generator().manual_seed(0)
    requests = Requests(target, 1, rng, max_tokens=len(ids) + 8)
    logits, aux = requests.chain([ids], draft.config.aux_layers)
    root = int(logits[-1].argmax())
    run = Run(draft, 1, len(ids) + 8 + k * depth, rng)
    last = run.extend([ids[1:] + [root]], [aux])
    tree = run.tree(last, [root], k, depth + 1, total, target.config.vocab_size)  # EAGLE's depth d means d + 1 levels
    return tree.tokens.tolist(), tree.parents.tolist(), (tree.positions - len(ids)).tolist()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("eagle", "target", "draft"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--prompts", default=str(ROOT / "fastverify/data/prompts.jsonl"))
    p.add_argument("--count", type=int, default=20)
    p.add_argument("--shape", type=int, nargs=3, default=(10, 5, 60), metavar=("K", "DEPTH", "TOTAL"), help="EAGLE's default: 10 5 60")
    a = p.parse_args()
    shape = tuple(a.shape)
    target, tokenizer = load_target(a.target), load_tokenizer(a.target)
    draft = load_draft(a.draft, target)
    equal = compared = 0
    with tempfile.TemporaryDirectory() as folder:
        save_hf(target, Path(folder))
        model = eagle_model(a.eagle, Path(folder), a.draft, shape)
        for prompt in read_prompts(a.prompts)[:a.count]:
            ids = prompt.token_ids or tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
            theirs, ours = their_tree(model, ids), our_tree(target, draft, ids, shape)
            compared, same = compared + 1, theirs == ours
            equal += same
            nodes = len({*zip(*theirs)} & {*zip(*ours)})
            print(f"{prompt.id}: {len(ids)} tokens, root {theirs[0][0]}, {len(theirs[0])} nodes: {'equal' if same else f'DIFFERENT, {nodes} nodes alike'}",
                  flush=True)
    print(f"{equal} of {compared} first trees (k {shape[0]}, depth {shape[1]}, {shape[2]} nodes) are equal")
    return 0 if equal == compared else 1


if __name__ == "__main__":
    sys.exit(main())
