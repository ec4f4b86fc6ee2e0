"""fastverify.integrations.transformers against transformers: the same text, shared weights, refusals, and its attention function."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fastverify import load_draft, load_target
from fastverify.integrations import transformers as fv_transformers
from fastverify.models.demo import demo_target_path

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
PROMPTS = [[1, 7, 42, 42, 7, 3, 9], [5, 6, 7, 8] * 5, [11, 4]]


def golden_model(**changes):
    config = LlamaConfig.from_pretrained(GOLDEN / "target", **changes)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(load_file(GOLDEN / "target" / "model.safetensors"))
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def model():
    return golden_model()


def padded(prompts: list) -> dict:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return dict(input_ids=ids, attention_mask=mask)


# ---- weights --------------------------------------------------------------------------------------------------------------------


def test_weights_are_shared_and_the_model_works_as_before():
    model = golden_model()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(ids).logits
    target = fv_transformers.share_target(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    inside = {t.untyped_storage().data_ptr() for layer in target.layers for t in vars(layer).values() if t is not None}
    inside |= {t.untyped_storage().data_ptr() for t in (target.embed_weight, target.lm_head_weight, target.norm)}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == inside
    held = sum(p.untyped_storage().nbytes() for p in {p.untyped_storage().data_ptr(): p for p in model.parameters()}.values())
    assert held == sum(p.numel() * 4 for p in model.parameters()), "no weight is held twice"
    loaded = load_target(GOLDEN / "target")
    assert all(torch.equal(a.qkv, b.qkv) and torch.equal(a.gate_up, b.gate_up) for a, b in zip(target.layers, loaded.layers))
    again = fv_transformers.share_target(model)
    assert again.layers[3].qkv.data_ptr() == target.layers[3].qkv.data_ptr(), "a second time nothing moves"
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.mul_(2)
    assert not torch.equal(target.layers[2].qkv, loaded.layers[2].qkv)


def test_tied_biased_and_normed_models():
    base = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=128, eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.2)
    torch.manual_seed(0)
    for made in (LlamaForCausalLM(LlamaConfig(**base, tie_word_embeddings=True, attention_bias=True)),
                 Qwen3ForCausalLM(Qwen3Config(**base, head_dim=32))):
        made = made.eval()
        want = made.generate(torch.tensor([[3, 4, 5, 3, 4]]), max_new_tokens=16, do_sample=False)
        fast = fv_transformers.speculative(made, "ngram", tree="chain-3")
        got = made.generate(torch.tensor([[3, 4, 5, 3, 4]]), max_new_tokens=16, do_sample=False, custom_generate=fast)
        assert torch.equal(got, want)
        assert fast.target.lm_head_weight is fast.target.embed_weight or not made.config.tie_word_embeddings


# ---- generate -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft,tree", [(GOLDEN / "draft", "chain-3"), (GOLDEN / "draft", "tree-8"), ("ngram", "auto"), ("ngram", "off")])
def test_greedy_text_is_the_models_own(model, draft, tree):
    fast = fv_transformers.speculative(model, draft, tree=tree)
    for prompts in (PROMPTS[:1], PROMPTS):
        inputs = padded(prompts)
        want = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        got = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=fast)
        assert got.dtype == torch.int64 and torch.equal(got, want)
    assert fast.stats.emitted > 0 and (fast.stats.drafted > 0 or tree in ("auto", "off"))


@pytest.mark.gpu
def test_greedy_text_on_the_gpu():
    """Captured cycles with an EAGLE-3 draft, eager ones with n-grams; float32, so that both compute the same logits."""
    model, inputs = golden_model().cuda(), {k: v.cuda() for k, v in padded(PROMPTS).items()}
    want = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    for draft, tree, captured in ((GOLDEN / "draft", "tree-8", True), (GOLDEN / "draft", "chain-3", False), ("ngram", "chain-3", False)):
        fast = fv_transformers.speculative(model, draft, tree=tree, captured=captured)
        got = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=fast)
        assert torch.equal(got, want), (draft, tree)
    register = fv_transformers.register_attention()
    model.set_attn_implementation(register)
    assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False), want)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_sampling_on_the_gpu(captured):
    """Reproducible through torch's seed, in the model's own dtype; weights stay shared."""
    model, inputs = golden_model().to(torch.bfloat16).cuda(), {k: v.cuda() for k, v in padded(PROMPTS).items()}
    fast = fv_transformers.speculative(model, GOLDEN / "draft", tree="tree-8", captured=captured)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, max_new_tokens=24, do_sample=True, temperature=0.9, top_k=20, top_p=0.9, custom_generate=fast))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert fast.stats.drafted > 0 and fast.target.layers[0].o.data_ptr() == model.model.layers[0].self_attn.o_proj.weight.data_ptr()


def test_cycles_of_the_captured_loop(model):
    """On the CPU they run eagerly and give the same text."""
    fast = fv_transformers.speculative(model, GOLDEN / "draft", tree="chain-3", captured=True)
    inputs = padded(PROMPTS)
    kw = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, **kw, custom_generate=fast), model.generate(**inputs, **kw))


def test_stop_ids_and_padding(model):
    inputs, fast = padded(PROMPTS), fv_transformers.speculative(model, GOLDEN / "draft", tree="tree-8")
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    stop = int(plain[0, inputs["input_ids"].shape[1] + 5])
    for eos in (stop, [stop, int(plain[1, -1])]):
        kw = dict(max_new_tokens=24, do_sample=False, eos_token_id=eos)
        assert torch.equal(model.generate(**inputs, **kw, custom_generate=fast), model.generate(**inputs, **kw))
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, custom_generate=fast)
    assert torch.equal(out.sequences, plain[:, : inputs["input_ids"].shape[1] + 3])


def test_sampling_is_reproducible_and_keeps_the_law(model):
    """The first token after a prompt, 1000 draws: within sampling error of the model's filtered softmax."""
    fast = fv_transformers.speculative(model, GOLDEN / "draft", tree="tree-8")
    kw = dict(max_new_tokens=8, do_sample=True, temperature=0.9, top_k=20, top_p=0.9, custom_generate=fast)
    ids = torch.tensor([PROMPTS[0]])
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, **kw))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    torch.manual_seed(5)
    drawn = model.generate(ids, **(kw | dict(max_new_tokens=1, num_return_sequences=1000)))[:, -1]
    with torch.no_grad():
        scores = model(ids).logits[0, -1:].float()
    for warp in (transformers.TemperatureLogitsWarper(0.9), transformers.TopKLogitsWarper(20), transformers.TopPLogitsWarper(0.9)):
        scores = warp(ids, scores)
    law = scores.softmax(-1)[0]
    seen = torch.bincount(drawn, minlength=law.numel()) / 1000
    assert float((seen - law).abs().sum()) / 2 < 0.08 and float(seen[law == 0].sum()) == 0


def test_streamer_gets_every_token(model):
    class Kept:
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value)

        def end(self):
            self.seen.append("end")

    kept = Kept()
    fast = fv_transformers.speculative(model, GOLDEN / "draft", tree="tree-8")
    out = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=12, do_sample=False, stream_to=kept, custom_generate=fast)
    assert kept.seen[-1] == "end" and torch.cat([k.flatten() for k in kept.seen[:-1]]).tolist() == out[0].tolist()
    with pytest.raises(ValueError, match="a streamer must have one prompt; got 3"):
        model.generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False, stream_to=Kept(), custom_generate=fast)


def test_a_model_that_was_cast_is_shared_anew():
    model = golden_model()
    fast = fv_transformers.speculative(model, "ngram", tree="chain-3")
    model.to(torch.float64).to(torch.float32)
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, custom_generate=fast),
                       model.generate(ids, max_new_tokens=8, do_sample=False))
    assert fast.target.layers[0].o.data_ptr() == model.model.layers[0].self_attn.o_proj.weight.data_ptr()


@pytest.mark.parametrize("kw,message", [
    (dict(repetition_penalty=1.3), "got RepetitionPenaltyLogitsProcessor"), (dict(no_repeat_ngram_size=2), "got NoRepeatNGramLogitsProcessor"),
    (dict(min_new_tokens=4), "got MinLengthLogitsProcessor"), (dict(max_time=1.0), "got MaxTimeCriteria"),
    (dict(output_scores=True, return_dict_in_generate=True), "output_scores must be off"), (dict(num_beams=2), "num_beams must be 1")])
def test_what_the_loop_would_not_do_is_refused(model, kw, message):
    fast = fv_transformers.speculative(model, "ngram")
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, custom_generate=fast, **kw)


def test_other_models_are_refused(model):
    fast = fv_transformers.speculative(model, "ngram")
    other = golden_model()
    with pytest.raises(ValueError, match="the model must be the one it was made for"):
        other.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=fast)
    other.model.layers[0].mlp.down_proj = torch.nn.Sequential(other.model.layers[0].mlp.down_proj)
    with pytest.raises(ValueError, match="every linear layer must be a torch.nn.Linear; got Sequential at model.layers.0.mlp.down_proj"):
        fv_transformers.share_target(other)
    other = golden_model()
    other.model.norm.to(torch.bfloat16)
    with pytest.raises(ValueError, match="on one device in one dtype; got 2 kinds"):
        fv_transformers.share_target(other)
    with pytest.raises(ValueError, match="a dense decoder"):
        fv_transformers.share_target(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40)))


@pytest.mark.slow
@pytest.mark.skipif(demo_target_path() is None, reason="demo model not here: run `fastverify fetch-demo`")
def test_smollm2_with_the_shipped_draft():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    import fastverify
    file = demo_target_path()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    tokenizer = fastverify.load_tokenizer(file)
    ids = torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])])
    kw = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    want = model.generate(ids, **kw)
    fast = fv_transformers.speculative(model, Path(fastverify.__file__).parent / "data/smollm2-135m-instruct-eagle3", tree="chain-2")
    got = model.generate(ids, **kw, custom_generate=fast)
    assert torch.equal(got, want) and fast.stats.accepted > 0 and "Paris" in tokenizer.decode(got[0].tolist())


# ---- AttentionInterface -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attending():
    """The golden model on tree_attention, and what it calls instead where it must."""
    name = fv_transformers.register_attention()
    model = golden_model()
    model.set_attn_implementation(name)
    return model


@pytest.fixture
def calls(monkeypatch):
    seen = []
    real = fv_transformers.tree_attention
    monkeypatch.setattr(fv_transformers, "tree_attention", lambda *a, **kw: (seen.append(kw.get("mask")), real(*a, **kw))[1])
    return seen


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_chains_and_decoding_on_tree_attention(model, attending, calls):
    ids = torch.tensor(PROMPTS[:1] * 2)
    assert near(attending(ids).logits, model(ids).logits)
    assert len(calls) == model.config.num_hidden_layers and calls[0] is None
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(attending.generate(ids, max_new_tokens=12, do_sample=False), want) and len(calls) == 8 * 13


@torch.no_grad()
@pytest.mark.parametrize("additive", [False, True])
def test_a_tree_behind_a_prefix(model, attending, calls, additive):
    """Two branches behind five committed tokens, in one forward: each row's logits are those of its own path as a chain."""
    prefix, nodes, parents = PROMPTS[0][:5], [9, 3, 8, 4, 6], [-1, 0, 0, 1, 2]
    cache = transformers.DynamicCache(config=attending.config)
    attending(torch.tensor([prefix]), past_key_values=cache)
    del calls[:]
    n = len(nodes)
    tree = torch.eye(n, dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            tree[i] |= tree[p]
    depth = tree.sum(1) - 1
    mask = torch.cat([torch.ones(n, 5, dtype=torch.bool), tree], 1)[None, None]
    mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask
    got = attending(torch.tensor([nodes]), attention_mask=mask, position_ids=(5 + depth)[None], past_key_values=cache).logits[0]
    assert len(calls) == 8 and calls[0].tolist() == [[int(sum(1 << j for j in range(n) if tree[i, j]))] for i in range(n)]
    for i in range(n):
        path = [nodes[j] for j in range(n) if tree[i, j]]
        assert near(got[i], model(torch.tensor([prefix + path])).logits[0, -1])


@torch.no_grad()
def test_what_it_cannot_do_goes_to_sdpa(model, attending, calls):
    inputs = padded(PROMPTS)
    real = inputs["attention_mask"].bool()
    position_ids = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    got, want = (m(**inputs, position_ids=position_ids).logits for m in (attending, model))
    assert near(got[real], want[real]) and len(calls) == 8, "padding among the rows is a mask like any other"
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(attending.generate(**inputs, max_new_tokens=6, do_sample=False), text) and len(calls) == 16, "padding before them is not"
    del calls[:]
    with torch.enable_grad():
        loss = attending(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss
        loss.backward()
    assert calls == [] and float(attending.lm_head.weight.grad.abs().sum()) > 0
    attending.zero_grad()
