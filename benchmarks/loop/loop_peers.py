"""Peers of the decode loop on the same weights: transformers (eager; static cache and compile) and SafeAILab's EAGLE loop.

SafeAILab's code is not part of this repository: pass a checkout of https://github.com/SafeAILab/EAGLE (commit cb7e084). It was
written for transformers 4; what it imports and never runs here (its Mixtral and Qwen targets) is replaced by empty modules, so that
it loads under transformers 5 too. Its target network, KV cache, draft, tree and acceptance are its own.
"""

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch


def hf_state(target) -> dict:
    """The target's weights under the names of transformers' LlamaForCausalLM."""
    c = target.config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    state = {"model.embed_tokens.weight": target.embed_weight, "model.norm.weight": target.norm, "lm_head.weight": target.lm_head_weight}
    for i, w in enumerate(target.layers):
        p = f"model.layers.{i}."
        gate, up = w.gate_up.chunk(2)
        state |= {f"{p}self_attn.{n}_proj.weight": t for n, t in zip("qkv", w.qkv.split([q, kv, kv]))}
        state |= {f"{p}self_attn.o_proj.weight": w.o, f"{p}mlp.gate_proj.weight": gate, f"{p}mlp.up_proj.weight": up,
                  f"{p}mlp.down_proj.weight": w.down, f"{p}input_layernorm.weight": w.input_norm,
                  f"{p}post_attention_layernorm.weight": w.post_norm}
    return state


def hf_config(target):
    from transformers import LlamaConfig
    c = target.config
    return LlamaConfig(vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
                       num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
                       head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_position, rope_theta=c.rope.theta,
                       rope_parameters=dict(rope_type="default", rope_theta=c.rope.theta), tie_word_embeddings=True, torch_dtype=target.dtype)


def transformers_model(target):
    """The same weights in transformers' class."""
    from transformers import LlamaForCausalLM
    config = hf_config(target)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device=target.device).to(target.dtype)
    missing = model.load_state_dict(hf_state(target), strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    model.tie_weights()
    rotary = type(model.model.rotary_emb)(config=config).to(target.device)
    model.model.rotary_emb = rotary
    return model.eval()


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_runs(provider: str, device: torch.device, go, prompts: list, new: int) -> dict:
    """Tokens per second of go(ids, new) -> tokens over the prompts, one after the other."""
    sync(device)
    start, texts = time.perf_counter(), []
    for ids in prompts:
        texts.append(go(ids, new))
    sync(device)
    took, made = time.perf_counter() - start, sum(map(len, texts))
    return dict(provider=provider, tok_s=made / took, tokens=made, prompts=len(prompts), texts=texts)


def transformers_runs(target, new: int) -> dict:
    """{name: (go, warm-up calls)}: generate() eager, and with the static cache, whose decode step it compiles."""
    model = transformers_model(target)

    def runner(**kw):
        def go(ids: list, n: int) -> list:
            x = torch.tensor([ids], device=target.device)
            out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=2, **kw)
            return out[0, len(ids):].tolist()
        return go

    return {"transformers eager": runner(), "transformers static cache + compile": runner(cache_implementation="static")}


def compiled_steps(target, length: int):
    """Static cache and a compiled decode step (mode reduce-overhead, whole graph) in a loop of our own: what generate() does, without
    its per-token host code. Returns go(ids, new)."""
    from transformers import StaticCache
    model = transformers_model(target)
    cache = StaticCache(config=model.config, max_cache_len=length)

    def forward(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        out = model(token, past_key_values=cache, position_ids=position[None], cache_position=position, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    step = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if target.device.type == "cuda" else forward

    @torch.no_grad()
    def go(ids: list, new: int) -> list:
        cache.reset()
        positions = torch.arange(len(ids), device=target.device)
        token = forward(torch.tensor([ids], device=target.device), positions)
        made, at = [token], positions[-1:] + 1
        for _ in range(new - 1):
            token = step(token.clone(), at).clone()
            made.append(token)
            at = at + 1
        return torch.cat(made, 1)[0].tolist()

    return go


def safeailab_model(checkout: str, target, draft_folder: str, shape: tuple):
    """Their EaModel around the same weights. shape: (k, depth, total tokens) in their counting."""
    stubs = dict(modeling_mixtral_kv="MixtralForCausalLM", modeling_qwen2_kv="Qwen2ForCausalLM", modeling_qwen3_kv="Qwen3ForCausalLM")
    for name, cls in stubs.items():
        module = sys.modules.setdefault(f"eagle.model.{name}", ModuleType(name))
        setattr(module, cls, type(cls, (), {}))
    import transformers.utils as utils
    for name in ("add_start_docstrings", "add_start_docstrings_to_model_forward", "replace_return_docstrings"):
        if not hasattr(utils, name):
            setattr(utils, name, lambda *a, **k: lambda f: f)
    sys.path.insert(0, checkout)
    from eagle.model import ea_model, modeling_llama_kv
    from safetensors.torch import load_file
    # their EConfig takes rope_theta for a scaling under transformers 5: the same file as plain attributes
    ea_model.EConfig = SimpleNamespace(from_pretrained=lambda path: SimpleNamespace(
        **dict(pad_token_id=0, rope_scaling=None, pretraining_tp=1, attention_bias=False) | json.loads(Path(path).read_text())))
    ea_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *a, **k: SimpleNamespace(eos_token_id=-1))
    config = hf_config(target)
    for name, value in dict(rope_theta=target.config.rope.theta, rope_scaling=None, pretraining_tp=1, attention_bias=False,
                            mlp_bias=False, attention_dropout=0.0, output_attentions=False, output_hidden_states=False,
                            use_cache=True, use_return_dict=True, gradient_checkpointing=False).items():
        try:
            setattr(config, name, value)
        except AttributeError:  # a property of this transformers
            pass
    modeling_llama_kv.LlamaForCausalLM._tied_weights_keys = None
    base = modeling_llama_kv.LlamaForCausalLM(config).to(target.dtype)
    missing = base.load_state_dict({k: v.cpu() for k, v in hf_state(target).items()}, strict=False)
    assert not missing.unexpected_keys and all("rotary" in k for k in missing.missing_keys), missing
    base = base.to(target.device).eval()
    folder = Path(draft_folder)
    k, depth, total = shape
    index = folder_with_index(target)  # their loader reads the embedding from an index and a file
    try:
        model = ea_model.EaModel(True, base, index.name, str(folder / "config.json"), total, depth, k, 1.0,
                                 load_file(str(folder / "model.safetensors")))
    finally:
        index.cleanup()
    return model.to(target.device).eval()


def folder_with_index(target):
    """A temporary folder with the embedding as their loader wants it."""
    import tempfile

    from safetensors.torch import save_file
    folder = tempfile.TemporaryDirectory()
    name = "model.embed_tokens.weight"
    save_file({name: target.embed_weight.cpu().contiguous()}, f"{folder.name}/model.safetensors", metadata={"format": "pt"})
    Path(folder.name, "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map={name: "model.safetensors"})))
    return folder


def safeailab_run(model, device: torch.device):
    """(go(ids, new), rounds): eagenerate, cut to `new` tokens; rounds counts its verify forwards."""
    rounds: list = []

    def go(ids: list, new: int) -> list:
        out, made, last = model.eagenerate(torch.tensor([ids], device=device), temperature=0.0, max_new_tokens=new, max_length=4096, log=True)
        rounds.append((int(made), last + 1))
        return out[0, len(ids):].tolist()

    return go, rounds
