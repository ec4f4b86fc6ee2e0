"""Every wrong input of the command line: one line on stderr, exit code 2, nothing on stdout, no traceback."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from cli_run import COMMAND, GOLDEN, IDS, PAIR, Terminal, environment, piped

import fastverify
from cli_fixtures import chatty, cli  # noqa: F401

TARGET, DRAFT = PAIR[1], PAIR[3]


def refused(result: tuple, message: str) -> None:
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, err
    assert message in err and "Fix: " in err, err


@pytest.mark.parametrize("flags,message", [
    (["--temperature", "-0.1"], "generate: temperature must be a finite number >= 0; got -0.1. Fix: change --temperature."),
    (["--temperature", "nan"], "generate: temperature must be a finite number >= 0; got nan."),
    (["--temperature", "inf"], "generate: temperature must be a finite number >= 0; got inf."),
    (["--top-p", "1.5"], "generate: top_p must be in [0, 1]; got 1.5. Fix: change --top-p."),
    (["--top-p", "-0.01"], "generate: top_p must be in [0, 1]; got -0.01."),
    (["--top-p", "nan"], "generate: top_p must be in [0, 1]; got nan."),
    (["--min-p", "2"], "generate: min_p must be in [0, 1]; got 2.0."),
    (["--top-k", "-1"], "generate: top_k must be 0 (off) or a positive int32; got -1."),
    (["--top-k", str(2**31)], "generate: top_k must be 0 (off) or a positive int32; got 2147483648."),
    (["--repetition-penalty", "0"], "generate: repetition_penalty must be a finite number > 0; got 0.0."),
    (["--presence-penalty", "nan"], "generate: presence_penalty must be a finite number; got nan."),
    (["--seed", str(2**63)], "generate: seed must be an int64; got 9223372036854775808."),
    (["--max-new-tokens", "0"], "generate: max_new_tokens must be at least 1; got 0."),
    (["--threads", "0"], "generate: threads must be in 1..1024; got 0."),
    (["--tree", "bush-3"], "tree: the shape must be off, auto, chain-K (1..16), tree-N (2..128 nodes) or tree-N-kK-dD "
     "(K * D <= 128); got 'bush-3'."),
    (["--tree", "chain-17"], "got 'chain-17'."),
    (["--tree", "tree-1"], "got 'tree-1'."),
    (["--tree", "chain-3", "--no-speculation"], "generate: --tree chain-3 must have a draft; got --draft none."),
    (["--compare", "--no-speculation"], "generate: --compare must have a draft to compare; got plain decoding."),
    (["--compare", "--tree", "off"], "generate: --compare must have a draft to compare; got plain decoding."),
    (["--system", "x"], "generate: --system must go with the chat template; got --raw or --token-ids."),
    (["hello"], "generate: the prompt must be given once; got 2."),
    (["--temperature", "warm"], "argument --temperature: invalid float value: 'warm'. Fix: see fastverify generate --help"),
    (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["--no-such-flag"], "unrecognized arguments: --no-such-flag. Fix: see fastverify"),
])
def test_arguments(cli, flags, message):
    refused(cli("generate", *PAIR, *IDS, *flags), message)


@pytest.mark.parametrize("prompt,message", [
    (["--token-ids", "1,x"], "generate: token_ids must be integers; got '1,x'. Fix: write --token-ids 1,2,3."),
    (["--token-ids", ""], "generate: every prompt must hold at least one token; got an empty one."),
    (["--token-ids", "3,512"], "generate: token ids must be in [0, 512); got 512."),
    (["--token-ids", "-1,3"], "generate: token ids must be in [0, 512); got -1."),
    (["--prompt", "  "], "generate: the prompt must hold text; got an empty one."),
    (["--prompt", "hello"], "load_tokenizer: tokenizer.json must be in"),
])
def test_prompts(cli, prompt, message):
    refused(cli("generate", *PAIR, "=".join(prompt)), message)


def test_prompt_longer_than_the_context(cli):
    code, out, err = cli("generate", *PAIR, "--token-ids", ",".join(["5"] * 1000), "--device", "cpu", "--tree", "chain-3",
                         "--max-new-tokens", "100")
    refused((code, out, err), "generate: prompt + max_new_tokens + drafted rows must be at most 1024 positions; got "
            "1000 + 100 + 5 = 1105.")


def test_missing_files(cli, tmp_path):
    nothing = tmp_path / "nothing"
    refused(cli("generate", "--target", nothing, *IDS), f"got {nothing}, which does not exist")
    refused(cli("generate", *PAIR[:2], "--draft", nothing, *IDS), "load_draft: path must be a folder with config.json and weights")
    (tmp_path / "empty").mkdir()
    refused(cli("generate", "--target", tmp_path / "empty", *IDS), "the folder must hold config.json or one .gguf file")
    (tmp_path / "file").write_text("x")
    refused(cli("generate", "--target", tmp_path / "file", *IDS), "got the file")


def test_no_demo_model(cli):
    refused(cli("generate", "hello"),
            "generate: the demo model must be on this machine; got none. Fix: run `fastverify fetch-demo`")


@pytest.mark.parametrize("which,at", [("target", 0.5), ("target", 0.0), ("draft", 0.5)])
def test_truncated_weights(cli, tmp_path, which, at):
    folder = tmp_path / which
    shutil.copytree(GOLDEN / which, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * at)])
    paths = dict(target=TARGET, draft=DRAFT) | {which: folder}
    refused(cli("generate", "--target", paths["target"], "--draft", paths["draft"], "--device", "cpu", *IDS), f"load_{which}: ")


def test_draft_of_another_hidden_size(cli, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(GOLDEN / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_hidden_size": 96}))
    refused(cli("generate", *PAIR[:2], "--draft", folder, "--device", "cpu", *IDS),
            "load_draft: the draft's target_hidden_size must be this target's 64; got 96")


def test_system_message_needs_a_template(cli, chatty, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(chatty, folder)
    (folder / "tokenizer_config.json").write_text("{}")
    refused(cli("generate", "--target", folder, "--draft", "ngram", "--device", "cpu", "hello"),
            "generate: the model must have a chat template; got one without. Fix: add --raw.")


def test_a_terminal_is_no_prompt(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    refused(cli("generate"), "generate: the prompt must be an argument or on stdin; got a terminal.")


def test_the_process_agrees():
    """The same through a real process: exit code, streams."""
    done = piped("generate", *PAIR, *IDS, "--temperature", "-1")
    refused((done.returncode, done.stdout, done.stderr), "generate: temperature must be")
    done = piped("generate", *PAIR, *IDS, "--target", "/nowhere")
    refused((done.returncode, done.stdout, done.stderr), "which does not exist")
    refused((lambda d: (d.returncode, d.stdout, d.stderr))(piped("generate", *PAIR[:2], stdin=" \n")), "got an empty one")


def test_debug_shows_the_traceback(cli, monkeypatch):
    monkeypatch.setenv("FASTVERIFY_LOG", "debug")
    code, _, err = cli("generate", *PAIR, *IDS, "--temperature", "-1")
    assert code == 2 and err.startswith("Traceback") and err.endswith("Fix: change --temperature.\n")


def test_a_bug_is_one_line_too(cli, monkeypatch):
    def broken(*args, **kw):
        raise KeyError("lost")
    monkeypatch.setattr("fastverify.cli.session.load_target", broken)
    code, out, err = cli("generate", *PAIR, *IDS)
    assert (code, out) == (1, "") and err == ("fastverify: unexpected KeyError: 'lost'. Fix: report it with the output under "
                                              "FASTVERIFY_LOG=debug.\n")


# ---- the command itself -------------------------------------------------------------------------------------------------


def test_version_and_help(cli):
    assert cli("--version") == (0, f"fastverify {fastverify.__version__}\n", "")
    code, out, _ = cli("--help")
    assert code == 0 and all(name in out for name in ("generate", "fetch-demo", "check", "evaluate"))
    for command in ("generate", "fetch-demo", "check", "evaluate"):
        code, out, _ = cli(command, "--help")
        assert code == 0 and out.startswith(f"usage: fastverify {command}")


def test_no_command_is_an_error(cli):
    refused(cli(), "the following arguments are required: COMMAND. Fix: see fastverify --help")
    refused(cli("generte"), "invalid choice: 'generte'")


def test_help_and_argument_errors_load_no_torch():
    code = ("import sys; from fastverify.cli.main import main\n"
            "for args in (['generate', '--temperature', '-1', 'x'], ['evaluate', '--tree', 'bush']):\n"
            "    assert main(args) == 2\n"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_console_entry_point_is_main():
    from importlib import metadata
    (entry,) = [e for e in metadata.entry_points(group="console_scripts") if e.name == "fastverify"] or [None]
    if entry is None:
        pytest.skip("the package is not installed (a source tree)")
    assert entry.value == "fastverify.cli.main:main"


def test_threads_are_set(cli):
    before = torch.get_num_threads()
    try:
        assert cli("generate", *PAIR, *IDS, "--max-new-tokens", "3", "--threads", "1")[0] == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_missing_package_is_named(cli, monkeypatch):  # noqa: F811
    def run(args):
        raise ModuleNotFoundError("No module named 'gguf.quants'", name="gguf.quants")
    monkeypatch.setattr("fastverify.cli.plan.run", run)
    code, out, err = cli("plan")
    assert (code, out) == (2, "") and err == ("fastverify: the package gguf.quants must be installed for this; got none. Fix: pip install "
                                              "gguf (fastverify doctor lists all that is missing).\n")


def test_text_that_is_not_utf8(chatty):
    done = subprocess.run([*COMMAND, "generate", "--target", str(chatty), "--draft", "none"], input=b"caf\xe9", capture_output=True,
                          env=environment(PYTHONUTF8="0", LC_ALL="C", PYTHONCOERCECLOCALE="0"), timeout=120)
    assert done.returncode == 2 and b"encode: the text must be Unicode; got bytes that are not UTF-8. Fix: " in done.stderr, done.stderr


def test_a_path_that_cannot_be_written(cli):
    refused(cli("remap", DRAFT, "--like", DRAFT, "--target", TARGET, "--out", "/proc/x"), "/proc/x must be a path that can be used here; got: ")


def test_the_variable_of_the_demo_model_is_named(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTVERIFY_DEMO_TARGET", str(tmp_path / "none.gguf"))
    refused(cli("generate", "hello"), f"FASTVERIFY_DEMO_TARGET must name the demo model's file; got {tmp_path}/none.gguf, which is no file. Fix: unset it")


def test_a_library_that_does_not_load(cli, monkeypatch):
    def load(*args):
        raise ImportError("libnccl.so.2: cannot open shared object file")
    monkeypatch.setattr("fastverify.cli.generate.run", load)
    refused(cli("generate", "hello"), "the libraries must load for this; got libnccl.so.2: cannot open shared object file. Fix: fastverify doctor")


@pytest.mark.parametrize("columns", [40, 80, 100, 160])
def test_tables_on_a_narrow_terminal_lose_nothing(columns):
    shown = Terminal("bench", "list", COLUMNS=str(columns), NO_COLOR="1").read()
    for name in ("mla_tree_attention", "lm_head_verify_tree", "accept", "bench_mla_tree_attention.py", "fastverify, Triton", "FlashInfer (fa2, XQA)"):
        assert name in shown, (columns, shown)
