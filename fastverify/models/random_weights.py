"""Targets with random weights: for benchmarks and examples, where shapes matter and text does not."""

import torch

from .config import ModelConfig, Rope
from .llama import LlamaModel, build

# layers, hidden, intermediate, vocabulary, query heads, key/value heads, head_dim
SHAPES = {
    "tiny": (2, 128, 256, 1024, 4, 2, 64),
    "smollm2-135m": (30, 576, 1536, 49152, 9, 3, 64),
    "llama3-8b": (32, 4096, 14336, 128256, 32, 8, 128),
    "qwen3-32b": (64, 5120, 25600, 151936, 64, 8, 128),
    "llama3-70b/tp8": (80, 8192, 3584, 16032, 8, 1, 128),  # one rank's part of 8, without its collectives
}


class _Random:
    """A TensorSource: normal matrices of standard deviation 1/sqrt(columns), norms of 1."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config, self._seed = config, seed

    def shapes(self) -> dict:
        return self._config.tensors()

    def read(self, name: str, out: torch.Tensor) -> None:
        if out.dim() == 1:
            out.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        self._seed += 1
        out.normal_(0, out.shape[1] ** -0.5, generator=torch.Generator(out.device).manual_seed(self._seed))


def config_of(name: str, max_position: int = 4096) -> ModelConfig:
    """ModelConfig of one of SHAPES. ValueError for another name."""
    if name not in SHAPES:
        raise ValueError(f"random_target: name must be one of {', '.join(SHAPES)}; got {name!r}. Fix: use one of them.")
    layers, hidden, inter, vocab, heads, kv, dim = SHAPES[name]
    return ModelConfig("llama", layers, hidden, inter, vocab, heads, kv, dim, max_position, 1e-5, Rope(theta=500000.0))


def random_target(name: str = "tiny", dtype: torch.dtype = torch.float32, device: "torch.device | str" = "cpu", *,
                  max_position: int = 4096, seed: int = 0) -> LlamaModel:
    """A target of the shape `name` with reproducible random weights, made on `device`."""
    config = config_of(name, max_position)
    return build(config, _Random(config, seed), dtype, device)
