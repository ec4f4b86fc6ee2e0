"""Tiny trained tokenizers: byte-level BPE with a chosen pre-tokenizer, and SentencePiece-like BPE with byte fallback."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = ["The quick brown fox jumps over 12345 lazy dogs, isn't it? I'LL say: they've 3.14159 reasons.",
        "def verify(tree, logits):\n    return walk(tree, logits.argmax(-1))  # 2024\n\n",
        "Grüße aus Köln; déjà vu, naïve café. Ελληνικά και русский текст. 日本語のテキストと漢字 한국어 😀👍🏽",
        "hello hello world world 100 200 300 400 4096 8192 65536"] * 4
SAMPLES = ["", " ", "a", "hello world", "  two  spaces ", "I'll they've ISN'T", "12345 and 3.14 v2", "x = [1, 22, 333, 4444]",
           "tab\tnew\nline\r\n\n\nend  ", "Grüße, naïve café", "e\u0301 combining", "日本語と漢字", "한국어 텍스트", "😀👍🏽 emoji 🇫🇷",
           "½ ² Ⅷ ٣", "a<|im_end|>b <|im_start|>user", "\u00a0nbsp\u3000wide", "\ufffd genuine"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA3_RULE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")


def split(rule: str):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(kind: str) -> Tokenizer:
    """kind: gpt-2, smollm, llama-bpe or qwen2, with the pipeline of that family's own tokenizer.json."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tok.pre_tokenizer = {"gpt-2": gpt2, "llama-bpe": split(LLAMA3_RULE), "qwen2": split(LLAMA3_RULE.replace("{1,3}", "")),
                         "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])}[kind]
    if kind == "qwen2":
        tok.normalizer = normalizers.NFC()
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<a b é>", normalized=False)])
    return tok


def sentencepiece() -> Tokenizer:
    """Llama 2's pipeline: spaces as U+2581, unknown characters as <0xXX> byte tokens."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    letters = sorted({c for text in TEXT[:2] for c in text.replace(" ", "\u2581") if c.isascii() or c == "\u2581"})
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("i", "n"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocab = {t: i for i, t in enumerate(pieces + letters + ["".join(m) for m in merges])}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    tok.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tok


def metadata(tok: Tokenizer, pre: "str | None") -> dict:
    """GGUF metadata (without the leading "tokenizer.") of a byte-level tokenizer."""
    import json
    state = json.loads(tok.to_str())
    added = {t["id"]: t for t in state["added_tokens"]}
    tokens = [tok.id_to_token(i) for i in range(tok.get_vocab_size())]
    types = [3 if i in added and added[i]["special"] else 4 if i in added else 1 for i in range(len(tokens))]
    out = {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.token_type": types,
           "ggml.merges": [" ".join(m) for m in state["model"]["merges"]], "ggml.bos_token_id": 1, "ggml.eos_token_id": 2,
           "ggml.add_bos_token": False, "chat_template": TEMPLATE}
    return out | ({"ggml.pre": pre} if pre else {})
