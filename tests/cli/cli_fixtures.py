"""Fixtures of the command-line tests; imported by name, since a second conftest would hide the first."""

import json
import shutil
import sys

import pytest
from cli_run import GOLDEN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastverify.cli.main import main

TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    """The golden target with a tokenizer and a chat template of its own: a folder."""
    folder = tmp_path_factory.mktemp("chatty")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "target" / name, folder)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(["the sky is blue, isn't it? hello world 123 naïve café"] * 3, trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """cli(*args) -> (exit code, stdout, stderr), in this process; the user's cache is empty."""
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTVERIFY_DEMO_TARGET", raising=False)
    monkeypatch.delenv("FASTVERIFY_LOG", raising=False)

    def run(*args: str) -> tuple:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fastverify", *map(str, args)])
        try:
            code = main([str(a) for a in args])
        except SystemExit as exc:
            code = exc.code
        return (code or 0, *capsys.readouterr())

    return run
