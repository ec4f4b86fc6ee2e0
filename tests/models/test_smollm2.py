"""The demo target itself against transformers. Needs the file: fastverify fetch-demo, or FASTVERIFY_DEMO_TARGET."""

import pytest
import torch
from tiny_models import Requests, hf_logits
from tiny_tokenizers import SAMPLES
from tokenizers import Tokenizer, pre_tokenizers

from fastverify.models.demo import demo_target_path
from fastverify.models.load import load_target, load_tokenizer

FILE = demo_target_path()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(FILE is None, reason="demo model not here: run `fastverify fetch-demo`")]
TEXTS = SAMPLES + ["In 2024, 3 of 10 people said: \"It's 25% more!\"", "for i in range(100):\n\tprint(i**2)\n",
                   "1234567890 0x1F 12:30 7,000,000.50", "\u0414\u043e 1941 \u0433\u043e\u0434\u0430 \u2014 \u096a\u0968 \u00bd"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def hf():
    """transformers' own reading of the file (without accelerate, which its from_pretrained wants)."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    config = AutoConfig.from_pretrained(FILE.parent, gguf_file=FILE.name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(FILE, return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def hf_tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.fixture(scope="module")
def ours():
    return load_target(FILE)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FILE)


def test_weights_are_equal(hf, ours):
    state = hf.state_dict()
    assert torch.equal(ours.embed_weight, state["model.embed_tokens.weight"]) and ours.lm_head_weight is ours.embed_weight
    for i in (0, 13, 29):
        p = f"model.layers.{i}."
        assert torch.equal(ours.layers[i].qkv, torch.cat([state[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"]))
        assert torch.equal(ours.layers[i].gate_up, torch.cat([state[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up")]))
        assert torch.equal(ours.layers[i].down, state[f"{p}mlp.down_proj.weight"])


def test_logits_and_greedy_tokens(hf, ours, tokenizer, rng):
    ids = tokenizer.apply_chat_template(QUESTION)
    requests = Requests(ours, 1, rng)
    logits, _ = requests.chain([ids[:20]])
    rest, _ = requests.chain([ids[20:]])
    assert (torch.cat([logits, rest]) - hf_logits(hf, ids)).abs().max() <= 1e-3
    tokens = list(ids)
    for _ in range(20):
        token = int(rest[-1].argmax())
        tokens.append(token)
        rest, _ = requests.chain([[token]])
    with torch.no_grad():
        want = hf.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=2)[0]
    assert tokens == want.tolist()
    text = tokenizer.decode(tokens[len(ids):], skip_special_tokens=True)
    assert text.startswith("The capital of France is Paris.")


def test_tokenizer_has_the_models_own_pipeline(tokenizer, hf_tokenizer):
    """transformers does not know the rule `smollm` (every digit on its own) and falls back to GPT-2's: corrected here."""
    backend = Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == text


def test_tokenizer_equals_transformers_without_digits(tokenizer, hf_tokenizer):
    texts = [t for t in TEXTS if not any(c.isnumeric() for c in t)]
    assert len(texts) > 8
    for text in texts:
        assert tokenizer.encode(text) == hf_tokenizer.encode(text, add_special_tokens=False), text


def test_every_digit_is_one_token(tokenizer):
    ids = tokenizer.encode("in 2024")
    assert [tokenizer.decode([i]) for i in ids] == ["in", " ", "2", "0", "2", "4"]


def test_chat_template(tokenizer, hf_tokenizer):
    ids = tokenizer.apply_chat_template(QUESTION)
    text = hf_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text and ids == hf_tokenizer.encode(text, add_special_tokens=False)
    assert ids[:2] == [1, 9690] and ids.count(1) == 3  # <|im_start|>system ... user ... assistant, none of them twice
    assert ids[-4:] == tokenizer.encode("<|im_start|>assistant\n") and tokenizer.eos_ids == (2,)
