"""Tokenizers: ids and chat templates against transformers and the families' own pipelines, streaming, and bad input."""

import json

import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import make_hf
from tiny_tokenizers import SAMPLES, TEMPLATE, byte_level, metadata, sentencepiece
from transformers import PreTrainedTokenizerFast

from fastverify.models.config import LoadError
from fastverify.models.load import load_tokenizer

CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be <brief> & 'kind'"}, {"role": "user", "content": "12345?\n"},
     {"role": "assistant", "content": "é 漢"}, {"role": "user", "content": ""}],
]
RICH = ("{%- set ns = namespace(n=0) %}{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'tool' %}\n    {% continue %}"
        "{% endif %}\n    {% generation %}{{ m.content | trim | tojson }}{% endgeneration %}\n    {%- set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ strftime_now('%Y')[:2] }}{{ tools is none }}{{ eos_token }}")


@pytest.fixture(scope="module")
def backend():
    return byte_level("smollm")


def folder_of(tmp_path, backend, template=TEMPLATE, **kw):
    """A folder as transformers saves it, and the transformers tokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, bos_token="<|im_start|>",
                                   eos_token="<|im_end|>", **kw)
    fast.save_pretrained(tmp_path)
    return tmp_path, fast


def test_folder_equals_transformers(backend, tmp_path):
    folder, fast = folder_of(tmp_path, backend)
    ours = load_tokenizer(folder)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == fast.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == fast.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_id, ours.eos_ids, ours.add_bos, ours.vocab_size) == (1, (2,), False, len(fast))


@pytest.mark.parametrize("template", [TEMPLATE, RICH])
def test_chat_templates_equal_transformers(backend, tmp_path, template):
    folder, fast = folder_of(tmp_path, backend, template)
    ours = load_tokenizer(folder)
    for chat in CHATS:
        for prompt in (True, False):
            want = fast.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == want
    assert ours.apply_chat_template(CHATS[0]) == ours.apply_chat_template(CHATS[0], add_generation_prompt=True)


@pytest.mark.parametrize("form", ["string", "list", "file_wins"])
def test_where_templates_live(backend, tmp_path, form):
    folder, _ = folder_of(tmp_path, backend, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = {"string": "S", "file_wins": "S", "list": [
        {"name": "tool_use", "template": "T"}, {"name": "default", "template": "L"}]}[form]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if form == "file_wins":
        (folder / "chat_template.jinja").write_text("F")
    assert load_tokenizer(folder).chat_template == {"string": "S", "list": "L", "file_wins": "F"}[form]


def test_only_tokenizer_json_is_needed(backend, tmp_path):
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("hello 42")) == "hello 42" and ours.eos_ids == () and ours.bos_id is None
    with pytest.raises(LoadError, match=r"^apply_chat_template: the tokenizer must have a chat template; got one without\. Fix: "):
        ours.apply_chat_template(CHATS[0])


def test_truncation_and_padding_are_off_and_stop_ids_are_merged(backend, tmp_path):
    folder, _ = folder_of(tmp_path, backend)
    state = json.loads(backend.to_str())
    state["truncation"] = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
    state["padding"] = dict(strategy=dict(Fixed=9), direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0,
                            pad_token="x")
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 6]}')
    ours = load_tokenizer(folder)
    assert ours.encode("hello world 123") == backend.encode("hello world 123").ids
    assert ours.eos_ids == (2, 5, 6)


def test_bos_of_raw_text(backend, tmp_path):
    from tokenizers.processors import TemplateProcessing
    tok = byte_level("llama-bpe")
    tok.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    folder, _ = folder_of(tmp_path, tok)
    ours = load_tokenizer(folder)
    assert ours.add_bos and ours.bos_id == 1 and 1 not in ours.encode("hello")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_gguf_equals_the_family_pipeline(pre, tmp_path):
    own = byte_level(pre)
    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", make_hf("llama2"), "llama", tokenizer=metadata(own, pre)))
    for text in [*SAMPLES, "<think>a</think><a b é> <think>"]:  # two of them are added tokens that are not special
        assert ours.encode(text) == own.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == own.decode(own.encode(text).ids, skip_special_tokens=False)
    assert (ours.eos_ids, ours.bos_id, ours.add_bos, ours.chat_template) == ((2,), 1, False, TEMPLATE)
    ids = ours.apply_chat_template(CHATS[1])
    assert ids.count(1) == 5 and ids[0] == 1 and ids[1] != 1  # one <|im_start|> a message, never two


@pytest.mark.parametrize("pre, whole", [("llama-bpe", True), ("gpt-2", False), ("smollm", False)])
def test_words_that_no_merge_makes(pre, whole, tmp_path):
    """Llama 3 takes a word that is in the vocabulary as it is; the others only what merges make."""
    meta = metadata(byte_level(pre), pre)
    meta["ggml.tokens"].append("qzqz")
    meta["ggml.token_type"].append(1)
    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", make_hf("llama2"), "llama", tokenizer=meta))
    assert (ours.encode("qzqz") == [len(meta["ggml.tokens"]) - 1]) == whole


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_gguf_equals_transformers(pre, tmp_path):
    from transformers import AutoTokenizer
    write_gguf(tmp_path / "m.gguf", make_hf("llama2"), "llama", tokenizer=metadata(byte_level(pre), pre))
    fast = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(tmp_path / "m.gguf")
    for text in SAMPLES:
        if pre != "qwen2" or text.isascii():  # transformers leaves out Qwen2's NFC here
            assert ours.encode(text) == fast.encode(text, add_special_tokens=False), text


def test_gguf_without_a_named_rule(tmp_path):
    own = byte_level("gpt-2")
    for pre in (None, "default"):
        f = write_gguf(tmp_path / "m.gguf", make_hf("llama2"), "llama", tokenizer=metadata(own, pre))
        with pytest.warns(UserWarning, match="does not name its pre-tokenizer"):
            assert load_tokenizer(f).encode("v 12345") == own.encode("v 12345").ids


# ---- streaming --------------------------------------------------------------------------------------------------------


def streamed(tokenizer, ids: list, sizes, skip: bool = False) -> list:
    stream, pieces, at = tokenizer.stream(skip_special_tokens=skip), [], 0
    while at < len(ids):
        n = next(sizes)
        pieces.append(stream.push(ids[at] if n == 1 else ids[at : at + n]))
        at += n
    return pieces + [stream.finish()]


def ones():
    while True:
        yield 1


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def any_tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (byte_level("smollm") if request.param == "byte_level" else sentencepiece()).save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_streams_never_tear_a_character(any_tokenizer):
    for text in SAMPLES:
        ids = any_tokenizer.encode(text)
        pieces = streamed(any_tokenizer, ids, ones())
        assert "".join(pieces) == any_tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)
    assert any(p == "" for p in streamed(any_tokenizer, any_tokenizer.encode("漢字"), ones())[:-1])


def test_random_ids_stream_to_the_whole_decode(any_tokenizer, rng):
    names = map(any_tokenizer.backend.id_to_token, range(any_tokenizer.vocab_size))
    byte_tokens = [i for i, name in enumerate(names) if name and name.startswith("<0x")]
    for trial in range(200):
        ids = torch.randint(0, any_tokenizer.vocab_size, (30,), generator=rng).tolist()
        if byte_tokens:  # invalid byte runs of byte fallback are decided in hindsight: keep to text here
            ids = [i for i in ids if i not in byte_tokens]
        sizes = iter(torch.randint(1, 4, (60,), generator=rng).tolist())
        skip = trial % 2 == 1
        assert "".join(streamed(any_tokenizer, ids, sizes, skip)) == any_tokenizer.decode(ids, skip_special_tokens=skip)


def test_an_unfinished_character_is_shown_at_the_end(any_tokenizer):
    whole = any_tokenizer.encode("漢")
    ids = any_tokenizer.encode("a") + whole[-3:-1]
    pieces = streamed(any_tokenizer, ids, ones())
    assert "".join(pieces[:-1]).strip() == "a" and pieces[-3:-1] == ["", ""]
    assert set(pieces[-1]) == {"\ufffd"} and "".join(pieces) == any_tokenizer.decode(ids)


def test_a_stream_starts_afresh_after_finish(any_tokenizer):
    stream = any_tokenizer.stream()
    stream.push(any_tokenizer.encode("漢")[:-1])
    stream.finish()
    ids = any_tokenizer.encode("hello")
    assert stream.push(ids) + stream.finish() == any_tokenizer.decode(ids)


# ---- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template, part", [
    ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
    ("{% if %}", "TemplateSyntaxError"),
    ("{{ messages[0].x.y }}", "UndefinedError"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ messages[9]['role'] + 1 }}", "UndefinedError"),
])
def test_templates_that_fail(backend, tmp_path, template, part):
    folder, _ = folder_of(tmp_path, backend, template)
    with pytest.raises(LoadError, match="^apply_chat_template: the messages must fit the model's template; got ") as info:
        load_tokenizer(folder).apply_chat_template(CHATS[0])
    assert part in str(info.value)


@pytest.mark.parametrize("changes, part", [
    ({"ggml.model": "llama"}, "tokenizer.ggml.model must be gpt2 (byte-level BPE); got 'llama'"),
    ({"ggml.model": ...}, "got None"),
    ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre must be one of gpt-2, smollm,"),
    ({"ggml.merges": ...}, "must hold tokenizer.ggml.merges"),
    ({"ggml.merges": ["nope nada"]}, "the merges of m.gguf must be made of its tokens"),
    ({"ggml.merges": ["single"]}, "the merges of m.gguf must be made of its tokens"),
])
def test_gguf_tokenizers_that_are_refused(backend, tmp_path, changes, part):
    meta = {k: v for k, v in {**metadata(backend, "smollm"), **changes}.items() if v is not ...}
    f = write_gguf(tmp_path / "m.gguf", make_hf("llama2"), "llama", tokenizer=meta)
    with pytest.raises(LoadError, match="^load_tokenizer: .* Fix: ") as info:
        load_tokenizer(f)
    assert part in str(info.value) and "\n" not in str(info.value)


def test_folders_that_are_refused(backend, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="load_tokenizer: tokenizer.json must be in"):
        load_tokenizer(tmp_path)
    text = backend.to_str()
    for cut in (0, 1, 200, len(text) - 1):
        (tmp_path / "tokenizer.json").write_text(text[:cut])
        with pytest.raises(LoadError, match="must be a complete tokenizer file; got "):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(LoadError, match="must be readable JSON"):
        load_tokenizer(tmp_path)
