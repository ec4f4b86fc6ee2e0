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


def test_no_eos_means_no_stop_id(model):
    """A target whose config has eos ids, generating without: as generate, also where the caller's own criterion says another id."""
    ids = torch.tensor([PROMPTS[0]])
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    fourth = int(plain[0, len(PROMPTS[0]) + 3])
    stopping = golden_model()
    stopping.generation_config.eos_token_id = stopping.config.eos_token_id = fourth
    fast = fv_transformers.speculative(stopping, "ngram", tree="chain-3")
    kw = dict(max_new_tokens=16, do_sample=False)
    short = stopping.generate(ids, **kw, custom_generate=fast)
    assert torch.equal(short, stopping.generate(ids, **kw)) and short.shape[1] < plain.shape[1], "the id does stop"
    got = stopping.generate(ids, **kw, eos_token_id=None, custom_generate=fast)
    assert torch.equal(got, stopping.generate(ids, **kw, eos_token_id=None)) and torch.equal(got, plain)
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
    for criteria in (EosTokenCriteria(int(plain[0, -9])), MaxLengthCriteria(len(PROMPTS[0]) + 5), MaxLengthCriteria(2)):
        for eos in ({}, {"eos_token_id": None}):
            kw = dict(max_new_tokens=16, do_sample=False, stopping_criteria=StoppingCriteriaList([criteria]), **eos)
            assert torch.equal(stopping.generate(ids, **kw, custom_generate=fast), stopping.generate(ids, **kw)), (criteria, eos)


def test_warpers_of_the_caller_count(model):
    """A top-k of 1 and a temperature near 0 are greedy text."""
    ids = torch.tensor([PROMPTS[0]])
    fast = fv_transformers.speculative(model, "ngram", tree="chain-3")
    kw = dict(max_new_tokens=12, do_sample=True, top_k=40, custom_generate=fast)
    greedy = model.generate(ids, max_new_tokens=12, do_sample=False)
    for warper, options in ((transformers.TopKLogitsWarper(1), dict(top_k=0)), (transformers.TemperatureLogitsWarper(1e-4), {})):
        own = transformers.LogitsProcessorList([warper])
        assert torch.equal(model.generate(ids, logits_processor=own, **(kw | options)), greedy)
    named = type("TopKLogitsWarper", (transformers.TopKLogitsWarper,), {})
    for warper, options, message in (
            (transformers.TopPLogitsWarper(0.5), {}, "in the order temperature, top_k, top_p, min_p; got TopPLogitsWarper, TopK"),
            (transformers.TopKLogitsWarper(1), {}, "must come once each"), (named(1), {}, "got TopKLogitsWarper"),
            (transformers.TopKLogitsWarper(1, min_tokens_to_keep=3), dict(top_k=0), "min_tokens_to_keep of TopKLogitsWarper must be 1; got 3"),
            (transformers.TopKLogitsWarper(1, filter_value=-5.0), dict(top_k=0), "filter_value of TopKLogitsWarper must be -inf; got -5.0")):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, logits_processor=transformers.LogitsProcessorList([warper]), **(kw | options))


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


@pytest.mark.parametrize("kw,message", [
    (dict(inputs_embeds=torch.zeros(1, 7, 64)), "inputs_embeds must be left out; got Tensor"),
    (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha must be 0; got 0.6"),
    (dict(dola_layers="high"), "dola_layers must be None; got high"),
    (dict(assistant_ensemble_weight=0.5), "assistant_ensemble_weight must be 1; got 0.5"),
    (dict(force_words_ids=[[5]]), "force_words_ids must be None"), (dict(constraints=[1]), "constraints must be None"),
    (dict(num_beam_groups=2), "num_beam_groups must be 1; got 2"),
    (dict(output_logits=True, return_dict_in_generate=True), "output_logits must be off; got on"),
    (dict(position_ids=torch.arange(7)[None] + 3), "position_ids must count the visible tokens from 0"),
    (dict(position_ids=torch.arange(9)[None]), r"position_ids must be \(1, 7\); got \(1, 9\)"),
    (dict(top_h=0.5, do_sample=True), "got TopHLogitsWarper"), (dict(typical_p=0.5, do_sample=True), "got TypicalLogitsWarper"),
    (dict(guidance_scale=2.0), "got UnbatchedClassifierFreeGuidance"), (dict(renormalize_logits=True), "got LogitNormalization")])
def test_arguments_that_change_the_output_are_refused_by_name(model, monkeypatch, kw, message):
    fast = fv_transformers.speculative(model, "ngram")
    monkeypatch.setattr(type(model), "_validate_generation_mode", lambda *a: None)  # transformers' own refusals of some come before ours
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([PROMPTS[0]]), **(dict(max_new_tokens=8, do_sample=False) | kw), custom_generate=fast)


def test_quantized_caches_and_calls_from_elsewhere_are_refused(model, monkeypatch):
    fast = fv_transformers.speculative(model, "ngram")
    ids = torch.tensor([PROMPTS[0]])
    kw = dict(max_new_tokens=8, do_sample=False, custom_generate=fast)
    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", lambda *a, **kw: None)  # needs another package
    with pytest.raises(ValueError, match="the cache must not be quantized"):
        model.generate(ids, cache_implementation="quantized", **kw)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the cache must not be quantized"):
        model.generate(ids, cache=type("QuantizedCache", (transformers.DynamicCache,), {})(), **kw)
    with pytest.raises(ValueError, match="the call must come from model.generate"):
        fast(model, ids)
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    for same in (dict(cache_implementation="static"), dict(position_ids=torch.arange(7)[None]), dict(use_cache=False),
                 dict(logits_to_keep=0), dict(prefill_chunk_size=2)):
        assert torch.equal(model.generate(ids, **kw, **same), want), same


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


def small(kind: str, implementation: str):
    """A random model on `implementation`: the same weights for each."""
    base = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=512, eos_token_id=None, bos_token_id=1, pad_token_id=0, initializer_range=0.2)
    torch.manual_seed(0)
    made = (LlamaForCausalLM(LlamaConfig(**base)) if kind == "llama" else
            transformers.MistralForCausalLM(transformers.MistralConfig(**base, sliding_window=4))).eval()
    made.set_attn_implementation(implementation)
    return made


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", [dict(cache_implementation="static"), dict(cache_implementation="static", max_cache_len=40), {},
                                   dict(prefill_chunk_size=3), dict(prefill_chunk_size=2, cache_implementation="static"),
                                   dict(use_cache=False)])
def test_the_text_of_sdpa_with_every_cache(calls, kind, cache):
    """Static and growing caches, prefill in one and in chunks, one prompt, two, left padding, windows."""
    ours, theirs = (small(kind, name) for name in (fv_transformers.register_attention(), "sdpa"))
    for inputs in (dict(input_ids=torch.tensor([[3, 4, 7, 3, 4]])), dict(input_ids=torch.tensor([[3, 4, 7, 3, 4], [9, 8, 7, 6, 5]])),
                   dict(input_ids=torch.tensor([[3]])), padded(PROMPTS)):
        kw = dict(**inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **cache)
        got, want = ours.generate(**kw), theirs.generate(**kw)
        assert torch.equal(got.sequences, want.sequences) and near(torch.stack(got.logits), torch.stack(want.logits)), (inputs, cache)
    assert calls or kind == "mistral", "tree_attention took part"


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_second_turn_behind_a_filled_cache(static):
    texts = []
    for name in (fv_transformers.register_attention(), "sdpa"):
        model = small("llama", name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40) if static else transformers.DynamicCache(config=model.config)
        first = model.generate(torch.tensor([[3, 4, 7, 3, 4]]), max_new_tokens=4, do_sample=False, cache=cache)
        second = model.generate(torch.cat([first, torch.tensor([[11, 12, 13]])], 1), max_new_tokens=4, do_sample=False, cache=cache)
        chunk = model(torch.tensor([[5, 6, 7, 8]]), cache=cache).logits
        texts.append((second, chunk))
    assert torch.equal(texts[0][0], texts[1][0]) and near(texts[0][1], texts[1][1])


@torch.no_grad()
def test_a_compiled_model_with_a_mask(model, attending):
    """One graph: the mask's values are not read."""
    inputs = padded(PROMPTS)
    compiled = torch.compile(attending, backend="eager", fullgraph=True)
    real = inputs["attention_mask"].bool()
    position_ids = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert near(compiled(**inputs, position_ids=position_ids).logits[real], model(**inputs, position_ids=position_ids).logits[real])


@torch.no_grad()
def test_what_no_mask_means():
    """One row sees every key; more rows are a chain over the first keys, or see all where the layer is not causal: as sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    layer = torch.nn.Module()
    layer.num_key_value_groups, layer.is_causal = 2, True
    torch.manual_seed(1)
    for batch, rows, keys in ((1, 5, 10), (2, 5, 10), (2, 5, 5), (1, 1, 10), (2, 130, 200), (1, 5, 3)):
        q, k, v = torch.randn(batch, 4, rows, 16), torch.randn(batch, 2, keys, 16), torch.randn(batch, 2, keys, 16)
        for kw in ({}, {"is_causal": False}, {"is_causal": True}, {"scaling": 0.3}, {"sliding_window": 4},
                   {"position_bias": torch.randn(1, 4, rows, keys)}):
            if keys < rows and "position_bias" in kw:
                continue
            want = sdpa_attention_forward(layer, q, k, v, None, **kw)[0]
            assert near(fv_transformers.attention(layer, q, k, v, None, **kw)[0], want), (batch, rows, keys, kw)
    with pytest.raises(ValueError, match=r"s_aux \(attention sinks\) must be None"):
        fv_transformers.attention(layer, q, k, v, None, s_aux=torch.zeros(4))


@torch.no_grad()
def test_a_static_cache_prefill_never_reads_its_empty_slots():
    ours = small("llama", fv_transformers.register_attention())
    layer = ours.model.layers[0].self_attn
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    want = fv_transformers.attention(layer, q, k[:, :, :5], v[:, :, :5], None)[0]
    k[:, :, 5:], v[:, :, 5:] = float("nan"), float("nan")
    assert torch.equal(fv_transformers.attention(layer, q, k, v, None)[0], want)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("change", ["data", "numpy", "op"])
def test_a_mask_may_change_between_forwards(model, attending, calls, monkeypatch, mode, change):
    """Through .data, numpy or in place, inference tensors too; each forward reads it once."""
    reads = []
    real = fv_transformers._words_of
    monkeypatch.setattr(fv_transformers, "_words_of", lambda *a: (reads.append(1), real(*a))[1])
    ids, n = torch.tensor([[3, 4, 5, 6]]), 4
    with mode():
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        for turn in range(3):
            got = attending(ids, attention_mask=mask).logits
            assert near(got, model(ids, attention_mask=torch.where(mask, 0.0, torch.finfo(torch.float32).min)).logits), turn
            assert len(reads) == turn + 1 and len(calls) == (turn + 1) * 8, "read once per forward"
            target = {"data": lambda: mask.data, "numpy": mask.numpy, "op": lambda: mask}[change]()
            target[0, 0, 3, turn] = False


@torch.no_grad()
def test_a_layer_without_an_index_reads_every_time(monkeypatch):
    reads = []
    real = fv_transformers._words_of
    monkeypatch.setattr(fv_transformers, "_words_of", lambda *a: (reads.append(1), real(*a))[1])
    q, mask = torch.randn(1, 4, 3, 16), torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    a = fv_transformers.attention(torch.nn.Module(), q, q, q, mask)[0]
    mask.numpy()[0, 0, 2, 0] = False
    b = fv_transformers.attention(torch.nn.Module(), q, q, q, mask)[0]
    assert len(reads) == 2 and not torch.equal(a, b)


@torch.no_grad()
@pytest.mark.parametrize("rows,keys", [(4, 9), (1, 6), (3, 3), (5, 3)])
def test_additive_masks_of_any_values(calls, rows, keys):
    """Values between hidden and visible are added to the scores, as sdpa does; masks of 0 and hidden run on tree_attention."""
    layer = torch.nn.Module()
    layer.num_key_value_groups, layer.is_causal = 2, True
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, rows, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    for hidden in (-float("inf"), torch.finfo(torch.float32).min, -1e9, -1e4):
        mask = torch.zeros(2, 1, rows, keys)
        mask[1, 0, 0, keys - 1] = hidden if keys > 1 else 0
        soft, one, even = mask.clone(), mask.clone(), mask.clone()
        soft[0, 0, -1, -1], one[0, 0, 0, 0] = -0.5, 1.0
        even[0, 0, 0] = torch.finfo(torch.float32).min
        del calls[:]
        for given in (mask, soft, one, even, torch.randn(2, 1, rows, keys), torch.randn(2, 4, rows, keys)):
            assert near(fv_transformers.attention(layer, q, k, v, given)[0], sdpa_attention_forward(layer, q, k, v, given)[0])
            assert len(calls) == (keys >= rows), "the first only"
    with pytest.raises(ValueError, match="attention_mask must be bool or floating .*; got torch.int64"):
        fv_transformers.attention(layer, q, k, v, torch.ones(2, 1, rows, keys, dtype=torch.int64))


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
