"""load_target and load_tokenizer: a path in, a model or tokenizer out, every failure one sentence (LoadError)."""

from pathlib import Path

import torch

from . import hf
from .config import LoadError
from .llama import LlamaModel, build
from .tokenizer import load_tokenizer

__all__ = ["LoadError", "load_target", "load_tokenizer", "resolve"]


def resolve(path: "str | Path") -> tuple:
    """("hf", folder) or ("gguf", file): what kind of model lies at `path`."""
    p = Path(path).expanduser()
    if p.is_file():
        with open(p, "rb") as f:
            if f.read(4) == b"GGUF" or p.suffix == ".gguf":
                return "gguf", p
        raise LoadError(f"load: the path must be a Hugging Face folder or a .gguf file; got the file {p}. "
                        "Fix: give the folder that holds config.json.")
    if not p.is_dir():
        raise LoadError(f"load: the path must be a Hugging Face folder or a .gguf file; got {p}, which does not exist. "
                        "Fix: check the path (the demo model: fastverify fetch-demo).")
    if (p / "config.json").exists() or (p / "tokenizer.json").exists():
        return "hf", p
    files = sorted(p.glob("*.gguf"))
    if len(files) != 1:
        raise LoadError(f"load: the folder must hold config.json or one .gguf file; got {p} with {len(files)} .gguf files. "
                        "Fix: give the path of the model itself.")
    return "gguf", files[0]


def load_target(path: "str | Path", dtype: torch.dtype = torch.float32, device: "torch.device | str" = "cpu") -> LlamaModel:
    """The target network at `path`, a Hugging Face folder (config.json + safetensors) or a GGUF file.

    dtype: float32, bfloat16 or float16, of weights, activations and KV cache. device: where they live.
    Supported: dense Llama 2/3, SmolLM2, Mistral without sliding windows, Qwen2/2.5, Qwen3; rope default, linear, llama3,
    yarn. Errors: LoadError naming what was found. Cost: reads every weight once; peak memory is the model plus one tensor.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LoadError(f"load_target: dtype must be float32, bfloat16 or float16; got {dtype}. Fix: pass one of them.")
    kind, where = resolve(path)
    if kind == "gguf":
        from . import gguf
        from .gguf_file import open_gguf
        file = open_gguf(where)
        config = gguf.parse_config(file)
        return build(config, gguf.GGUFSource(file, config), dtype, device)
    config = hf.parse_config(hf.read_json(where / "config.json"),
                             hf.read_json(where / "generation_config.json", needed=False))
    return build(config, hf.SafetensorsSource(where), dtype, device)
