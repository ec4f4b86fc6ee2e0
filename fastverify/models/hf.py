"""Hugging Face model folders: config.json (transformers 4 and 5 forms) and safetensors, single or sharded."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import ARCHITECTURES, LoadError, ModelConfig, Rope, check_size, merge_ids

_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM"}
_MODEL_NAMES = {"llama": "Llama 2/3, SmolLM2", "mistral": "Mistral", "qwen2": "Qwen2/2.5", "qwen3": "Qwen3"}


def read_json(path: Path, needed: bool = True) -> dict:
    """The JSON object in `path`; {} for an absent file that is not needed. LoadError for the rest."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise LoadError(f"load: {path.name} must be in {path.parent}; got no such file. "
                        "Fix: download the whole model folder.") from None
    except (OSError, ValueError, RecursionError) as exc:
        raise LoadError(f"load: {path} must be readable JSON; got {exc}. Fix: download the file again.") from None
    if not isinstance(data, dict):
        raise LoadError(f"load: {path} must hold a JSON object; got a {type(data).__name__}. Fix: download the file again.")
    return data


def refuse(found: str, fix: str = "use a dense Llama, Mistral, Qwen2 or Qwen3 model") -> None:
    """Raises the one sentence about an unsupported model."""
    supported = ", ".join(_MODEL_NAMES[a] for a in ARCHITECTURES)
    raise LoadError(f"load_target: the model must be a dense decoder ({supported}); got {found}. Fix: {fix}.")


def parse_config(d: dict, generation: "dict | None" = None) -> ModelConfig:
    """config.json (and generation_config.json, for stop ids) as dicts -> ModelConfig; refuses what is not supported."""
    try:
        return _parse_config(d, generation)
    except LoadError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as exc:  # null, or text for a number
        raise LoadError(f"load: every value of config.json must be of its kind; got {exc}. Fix: download the file again.") from None


def _parse_config(d: dict, generation: "dict | None") -> ModelConfig:
    arch = d.get("model_type")
    if any(d.get(k) for k in ("num_experts", "num_local_experts", "n_routed_experts")):
        refuse(f"model_type {arch!r} with a mixture of experts")
    if arch not in ARCHITECTURES:
        refuse(f"model_type {arch!r}")
    classes = d.get("architectures") or [_CLASSES[arch]]
    if _CLASSES[arch] not in classes:
        refuse(f"architectures {classes}")
    if d.get("quantization_config"):
        method = d["quantization_config"].get("quant_method", "unnamed")
        refuse(f"weights quantised by {method!r}", "use the unquantised checkpoint or a GGUF file")
    if d.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act {d['hidden_act']!r}")
    if d.get("rope_interleaved"):
        refuse("rope_interleaved true")
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
             "max_position_embeddings")
    missing = [k for k in sizes if k not in d]
    if missing:
        raise LoadError(f"load_target: config.json must state {', '.join(missing)}; got a file without. "
                        "Fix: download config.json again.")
    for name in sizes:
        check_size(name, d[name])
    _refuse_windows(arch, d)
    heads = d["num_attention_heads"]
    bias = bool(d.get("attention_bias", False)) and arch != "mistral"
    head_dim = d.get("head_dim") or (128 if arch == "qwen3" else d["hidden_size"] // heads)
    generation = generation or {}
    return ModelConfig(
        architecture=arch, num_layers=d["num_hidden_layers"], hidden_size=d["hidden_size"],
        intermediate_size=d["intermediate_size"], vocab_size=d["vocab_size"], num_heads=heads,
        num_kv_heads=d.get("num_key_value_heads") or heads, head_dim=head_dim, max_position=d["max_position_embeddings"],
        rms_norm_eps=float(d.get("rms_norm_eps", 1e-6)), rope=parse_rope(d),
        tie_word_embeddings=bool(d.get("tie_word_embeddings", False)), qkv_bias=bias or arch == "qwen2",
        o_bias=bias and arch != "qwen2", mlp_bias=bool(d.get("mlp_bias", False)) and arch == "llama",
        qk_norm=arch == "qwen3", bos_id=d.get("bos_token_id"),
        eos_ids=merge_ids(d.get("eos_token_id"), generation.get("eos_token_id")))


def _refuse_windows(arch: str, d: dict) -> None:
    windowed = [t for t in d.get("layer_types") or [] if t != "full_attention"]
    if windowed:
        refuse(f"layers of type {windowed[0]!r}")
    window = d.get("sliding_window", 4096 if arch == "mistral" else None)  # transformers' default for an absent key
    if arch == "llama" or arch != "mistral" and (
            not d.get("use_sliding_window", False) or d.get("max_window_layers", 28) >= d["num_hidden_layers"]):
        window = None
    if window is not None and window < d["max_position_embeddings"]:
        refuse(f"a sliding window of {window} tokens below its context of {d['max_position_embeddings']}")


def parse_rope(d: dict) -> Rope:
    """The RoPE of a config.json, transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) forms; drafts use it too."""
    r = dict(d.get("rope_parameters") or d.get("rope_scaling") or {})
    if any(isinstance(v, dict) for v in r.values()):
        refuse("rope_parameters that differ between layer types")
    kind = r.get("rope_type", r.get("type", "default"))
    theta = float(r.get("rope_theta", d.get("rope_theta", 10000.0)))
    if float(r.get("partial_rotary_factor", d.get("partial_rotary_factor", 1.0))) != 1.0:
        refuse("a partial rotary embedding")
    for name, value in (("rope_theta", theta), ("factor", float(r.get("factor", 1.0)))):
        if not 0.0 < value < float("inf"):
            raise LoadError(f"load: {name} must be a positive number; got {value:g}. Fix: repair config.json.")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3", "yarn"):
        refuse(f"rope type {kind!r}", "use a model with rope type default, linear, llama3 or yarn")
    if "factor" not in r:
        raise LoadError(f"load_target: rope type {kind} must state its factor; got {sorted(r)}. Fix: repair config.json.")
    original = int(r.get("original_max_position_embeddings") or d["max_position_embeddings"])
    if kind == "linear":
        return Rope(theta, "linear", float(r["factor"]))
    if kind == "llama3":
        return Rope(theta, "llama3", float(r["factor"]), original, float(r.get("low_freq_factor", 1.0)),
                    float(r.get("high_freq_factor", 4.0)))
    if r.get("mscale") or r.get("mscale_all_dim"):
        refuse("yarn with mscale")
    return Rope(theta, "yarn", float(r["factor"]), original, beta_fast=float(r.get("beta_fast") or 32.0),
                beta_slow=float(r.get("beta_slow") or 1.0), truncate=bool(r.get("truncate", True)),
                attention_factor=r.get("attention_factor"))


class SafetensorsSource:
    """Tensors of one folder: model.safetensors, or the shards of model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
                raise LoadError(f"load_target: {index} must hold a weight_map; got none. Fix: download the file again.")
            files = sorted(set(weight_map.values()))
        elif (folder / "model.safetensors").exists():
            files, weight_map = ["model.safetensors"], None
        else:
            other = next((p.name for p in sorted(folder.glob("*.bin"))), None)
            raise LoadError(f"load_target: the weights must be model.safetensors or its shards in {folder}; got "
                            f"{other or 'neither'}. Fix: download the model in safetensors form.")
        absent = [f for f in files if not (folder / f).exists()]
        if absent:
            raise LoadError(f"load_target: every shard of {index.name} must be in {folder}; got no {', '.join(absent)}. "
                            "Fix: download the missing files.")
        self._where, self._handles = {}, {}
        for file in files:
            handle = self._handles[file] = _open(folder / file)
            for name in handle.keys():
                if weight_map is None or weight_map.get(name) == file:
                    self._where[name] = file
        lost = sorted(set(weight_map or ()) - set(self._where))
        if lost:
            raise LoadError(f"load_target: {len(lost)} tensors of {index.name} must be in their shards; got shards without "
                            f"{lost[0]} (first of them). Fix: download the shards again.")

    def shapes(self) -> dict:
        return {n: tuple(self._handles[f].get_slice(n).get_shape()) for n, f in self._where.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._handles[self._where[name]].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise LoadError(f"load_target: {name} must be a floating-point tensor of 16 bits or more; got {tensor.dtype}. "
                            "Fix: use the unquantised checkpoint.")
        out.copy_(tensor)


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise LoadError(f"load_target: {path} must be a complete safetensors file; got {path.stat().st_size} bytes that do "
                        f"not parse ({exc}). Fix: download the file again.") from None
