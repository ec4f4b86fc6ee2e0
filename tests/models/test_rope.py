"""RoPE tables of every supported type against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastverify.models.config import Rope
from fastverify.models.hf import parse_config

SHAPE = dict(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=4096)
TYPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=256),
    "llama3_other": dict(rope_type="llama3", factor=32.0, low_freq_factor=0.5, high_freq_factor=8.0,
                         original_max_position_embeddings=512),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn_all": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=256, beta_fast=16.0, beta_slow=2.0,
                     attention_factor=1.3, truncate=False),
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", list(TYPES))
def test_scaled_table(name, theta):
    hf = LlamaConfig(**SHAPE, rope_parameters=dict(rope_theta=theta, **TYPES[name]))
    inv_freq, scale = ROPE_INIT_FUNCTIONS[TYPES[name]["rope_type"]](hf, "cpu")
    rope = parse_config(hf.to_dict() | dict(architectures=["LlamaForCausalLM"])).rope
    torch.testing.assert_close(rope.inv_freq(32), inv_freq, rtol=1e-6, atol=0)
    angle = torch.arange(4096.0)[:, None] * inv_freq
    torch.testing.assert_close(rope.cos_sin(32, 4096), torch.cat([angle.cos() * scale, angle.sin() * scale], 1), rtol=0,
                               atol=5e-4)


def test_plain_table():
    table = Rope(100.0).cos_sin(4, 3)
    angle = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]], dtype=torch.float64)  # frequencies 1 and 100^(-2/4)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table.double(), torch.cat([angle.cos(), angle.sin()], 1), rtol=0, atol=1e-7)


def test_factors_divide_the_frequencies():
    divided = Rope(100.0, "factors", factors=(1.0, 8.0)).inv_freq(4)
    assert torch.equal(divided, Rope(100.0).inv_freq(4) / torch.tensor([1.0, 8.0]))


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "old_type_key"])
def test_transformers_4_and_5_forms_agree(form):
    scaling = {k: v for k, v in TYPES["llama3"].items() if k != "rope_type"}
    d = dict(SHAPE, model_type="llama")
    if form == "rope_parameters":
        d["rope_parameters"] = dict(scaling, rope_type="llama3", rope_theta=5e5)
    else:
        d |= dict(rope_theta=5e5, rope_scaling=dict(scaling, **{"rope_type" if form == "rope_scaling" else "type": "llama3"}))
    assert parse_config(d).rope == Rope(5e5, "llama3", 8.0, 256, 1.0, 4.0)


def test_absent_rope_keys_mean_the_default():
    assert parse_config(dict(SHAPE, model_type="llama")).rope == Rope(10000.0)
    assert parse_config(dict(SHAPE, model_type="llama", rope_theta=7.0, rope_scaling=None)).rope == Rope(7.0)
