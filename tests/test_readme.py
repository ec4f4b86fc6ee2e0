"""README: its examples run, and its numbers are those of the stored results."""

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
def test_loop_example(capsys):
    target = demo_target_path()
    if target is None:
        pytest.skip("demo model not here: run `fastverify fetch-demo`")
    import fastverify
    draft = Path(fastverify.__file__).parent / "data/smollm2-135m-instruct-eagle3"
    code = example("loop").replace("SmolLM2-135M-Instruct.Q4_1.gguf", str(target))
    code = code.replace("fastverify/data/smollm2-135m-instruct-eagle3", str(draft)).replace("=128", "=24")
    space = {}
    exec(code, space)
    assert 1 <= len(space["result"].tokens[0]) <= 24 and space["result"].stats.tau >= 1.0
    assert capsys.readouterr().out.strip()
