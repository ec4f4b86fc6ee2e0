"""README: its examples run, and its numbers are those of the stored results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastverify.models.demo import demo_target_path

HERE = Path(__file__).resolve().parent
ROOT = next((p for p in (HERE.parent, *HERE.parents) if (p / "README.md").exists() and (p / "benchmarks/readme.py").exists()), None)
need_source = pytest.mark.skipif(ROOT is None, reason="README.md and benchmarks/ are not beside these tests")


def example(name: str) -> str:
    text = (ROOT / "README.md").read_text()
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```\n<!-- /example -->", text, flags=re.S)[1]


@need_source
def test_numbers_are_generated():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks/readme.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@need_source
def test_ops_example(capsys):
    space = {}
    exec(example("ops"), space)
    out = space["out"]
    assert int(out.num_tokens_out) >= 1 and out.path[0, 0] == 0
    assert "tensor" in capsys.readouterr().out


@need_source
@pytest.mark.parametrize("name,printed", [
    ("tree", "tensor([ 7, 11, 12, 13], dtype=torch.int32) tensor([-1,  0,  0,  1], dtype=torch.int32) tensor([100, 101, 101, 102]"),
    ("attention", "torch.Size([4, 8, 64])"), ("comm", "torch.Size([4, 512])"), ("kv", "True")])
def test_stage_example(name, printed):
    """In a process of its own: the one of `comm` makes a process group."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = example(name) + ("\ndist.destroy_process_group()" if name == "comm" else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.startswith(printed), done.stdout + done.stderr
    assert len([line for line in example(name).splitlines() if line]) <= 10, "ten lines"


@need_source
def test_transformers_example(capsys):
    transformers = pytest.importorskip("transformers")
    import torch
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
        eos_token_id=2, bos_token_id=1, pad_token_id=0)).eval()
    space = dict(model=model, input_ids=torch.tensor([[5, 6, 7, 5, 6]]))
    exec(example("transformers"), space)
    assert torch.equal(space["out"], model.generate(space["input_ids"], max_new_tokens=64, do_sample=False)) and capsys.readouterr().out


@need_source
@pytest.mark.parametrize("name", ["minimal", "decode_loop"])
def test_examples_run(name):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / f"{name}.py"), "cpu"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "the same text: True" in done.stdout, done.stdout + done.stderr


@need_source
def test_reference_is_current():
    done = subprocess.run([sys.executable, str(ROOT / "docs/make_reference.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@need_source
def test_every_named_command_exists():
    """`fastverify X` and `python PATH` of README and docs: subcommands and files that are there."""
    from fastverify.cli.main import build_parser
    known = set(next(a for a in build_parser()._actions if hasattr(a, "choices") and a.choices).choices)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        used = set(re.findall(r"^    (?:torchrun .* -m )?fastverify ([a-z][\w-]*)", text, re.M)) | set(re.findall(r"`fastverify ([a-z][\w-]*)", text))
        assert used <= known, (page.name, used - known)
        for path in re.findall(r"python (\w[\w/]*\.py)", text):
            found = (ROOT / path).exists() or list((ROOT / "benchmarks").rglob(path)) or list((ROOT / "tests").rglob(path))
            assert found, (page.name, path)


@need_source
def test_loop_example(capsys):
    target = demo_target_path()
    if target is None:
        pytest.skip("demo model not here: run `fastverify fetch-demo`")
    code = example("loop").replace("fetch_demo()", repr(str(target))).replace("=128", "=24")
    space = {}
    exec(code, space)
    assert 1 <= len(space["result"].tokens[0]) <= 24 and space["result"].stats.tau >= 1.0
    assert capsys.readouterr().out.strip()
