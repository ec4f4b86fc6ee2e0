"""Every command of README, CONTRIBUTING and docs is one that somebody runs: the quick ones here, the others by tests/docs/commands.py."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "README.md").exists() or not (ROOT / "benchmarks/harness.py").exists():
    pytest.skip("README.md and benchmarks/ are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "tests/cli"))
import commands  # noqa: E402
from cli_fixtures import cli  # noqa: E402, F401

DOCUMENTED = commands.documented()
QUICK = list({commands.rules_of(c)[0]: (p, c) for p, c in DOCUMENTED if len(commands.rules_of(c)) == 1 and commands.rules_of(c)[0].quick}.values())


def test_every_command_has_one_rule():
    assert len(DOCUMENTED) > 60, "the pages are found"
    assert [(p, c) for p, c in DOCUMENTED if len(commands.rules_of(c)) != 1] == []


def test_every_rule_has_a_command():
    assert [r.pattern for r in commands.RULES if not any(re.fullmatch(r.pattern, c) for _, c in DOCUMENTED)] == []


def test_reading_of_a_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("A `make\ndemo` of it.\n\n    fastverify plan --plain-ms 1 \\\n        --verify-ms 2     words\n    fastverify doctor   # or: more\n"
                    "    A=1 python x.py && make test\n\n<!-- gpu: op -->\n`python old.py`\n<!-- /gpu -->\n")
    monkeypatch.setattr(commands, "pages", lambda: [page])
    assert [c for _, c in commands.documented()] == ["make demo", "fastverify plan --plain-ms 1 --verify-ms 2", "fastverify doctor", "A=1 python x.py",
                                                      "make test"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return commands.places(tmp_path_factory.mktemp("commands"))


def words_of(command: str, where: dict) -> list:
    words = shlex.split(commands.filled(commands.rules_of(command)[0], command, where))
    words = words[1:] if words[0] == "fastverify" else {"benchmarks": ["bench"], "fastverify.doctor": ["doctor"]}[words[2]]
    return words + (["--device", "cpu"] if words[0] in ("probe", "evaluate") else [])


def files_of(words: list, where: dict, made: bool) -> list:
    """The files of the work folder that a command makes, or reads."""
    return [w for before, w in zip(words, words[1:])
            if w.startswith(f"{where['work']}/") and Path(w).suffix and (before in ("--out", "--plot", "--json", "--markdown")) == made]


@pytest.mark.parametrize("page,command", QUICK, ids=[c[:50] for _, c in QUICK])
def test_a_quick_command(cli, where, monkeypatch, page, command):  # noqa: F811
    """In this process, as commands.py runs it in one of its own; what it reads is made first by the command that makes it."""
    (rule,) = commands.rules_of(command)
    words = words_of(command, where)
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    for file in files_of(words, where, made=False):
        if not Path(file).exists():
            cli(*next(w for w in (words_of(c, where) for _, c in QUICK) if file in files_of(w, where, made=True)))
    code, out, err = cli(*words)
    assert code == rule.code or (rule.code == -1 and code in (0, 1)), out + err
    assert out.strip() and "Traceback" not in err
