"""fastverify generate: text, JSON, --compare, pipe and terminal, Ctrl-C."""

import io
import json
import re
import signal
import subprocess
import termios

import pytest
import torch
from cli_run import COMMAND, GOLDEN, IDS, PAIR, Terminal, environment, heed_interrupts, piped

from fastverify import Decoder, NgramDrafter, SamplingParams, load_draft, load_target, load_tokenizer
from cli_fixtures import chatty, cli  # noqa: F401

DRAFT = str(GOLDEN / "draft")
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def pair():
    target = load_target(GOLDEN / "target")
    return target, load_draft(DRAFT, target)


def expected(pair, prompt=(3, 4, 5), tokens: int = 24, tree: str = "off", stops=None, **sampling) -> list:
    target, draft = pair
    return Decoder(target, draft, tree=tree).generate([list(prompt)], tokens, SamplingParams(**sampling), stops).tokens[0]


# ---- what is printed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["auto", "off", "chain-2", "tree-8", "tree-8-k3-d2"])
def test_prints_the_tokens_of_the_decoder(cli, pair, tree):
    code, out, err = cli("generate", *PAIR, *IDS, "--tree", tree, "--max-new-tokens", "24")
    assert code == 0 and out == " ".join(map(str, expected(pair))) + "\n"
    assert re.search(r"\d+ tokens after a prompt of 3: [\d.]+ tok/s, [\d.]+ ms per step", err)
    auto = r"^auto: .*; expected tau/break-even: chain-2 [\d.]+/[\d.]+, chain-3 .*, tree-8 .*, tree-20 [\d.]+/[\d.]+$"
    assert bool(re.search(auto, err, re.M)) == (tree == "auto")


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_other_drafters(cli, pair, draft):
    code, out, _ = cli("generate", *PAIR[:2], "--draft", draft, *IDS, "--max-new-tokens", "24")
    assert code == 0 and out.split() == [str(t) for t in expected(pair)]


def test_sampling_arguments_reach_the_decoder(cli, pair):
    given = dict(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=7, repetition_penalty=1.3, frequency_penalty=0.2,
                 presence_penalty=0.1)
    flags = [x for k, v in given.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    code, out, _ = cli("generate", *PAIR, *IDS, "--tree", "tree-8", "--max-new-tokens", "60", "--ignore-eos", *flags)
    want = expected(pair, tokens=60, stops=[], **given)
    assert code == 0 and out.split() == [str(t) for t in want]
    assert want != expected(pair, tokens=60, stops=[], **given | {"seed": 8})


def test_text_is_streamed_through_the_chat_template(cli, chatty, pair):
    tok = load_tokenizer(chatty)
    for extra, ids in (((), tok.apply_chat_template([{"role": "user", "content": "hello"}])),
                       (("--system", "be kind"), tok.apply_chat_template([{"role": "system", "content": "be kind"},
                                                                          {"role": "user", "content": "hello"}])),
                       (("--raw",), tok.encode("hello"))):
        code, out, _ = cli("generate", "--target", chatty, "--draft", DRAFT, "hello", "--max-new-tokens", "40", "--tree",
                           "chain-3", *extra)
        text = tok.decode(expected(pair, ids, 40), skip_special_tokens=True)
        assert code == 0 and out.rstrip("\n") == text.rstrip("\n"), extra


def test_prompt_from_stdin_or_argument_is_the_same(cli, chatty, monkeypatch):
    rest = ["--target", chatty, "--draft", "ngram", "--max-new-tokens", "12"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello world\n"))
    outs = [cli("generate", *prompt, *rest)[:2] for prompt in ((), ("hello world",), ("--prompt", "hello world"))]
    assert outs[0] == outs[1] == outs[2] and outs[0][0] == 0 and outs[0][1]


# ---- JSON and --compare -----------------------------------------------------------------------------------------------


def test_json_is_one_object_and_nothing_else(cli, chatty, pair):
    code, out, _ = cli("generate", "--target", chatty, "--draft", DRAFT, "hello", "--json", "--tree", "tree-8",
                       "--max-new-tokens", "30")
    data = json.loads(out)
    tok = load_tokenizer(chatty)
    want = expected(pair, tok.apply_chat_template([{"role": "user", "content": "hello"}]), 30)
    assert code == 0 and data["tokens"] == want and data["text"] == tok.decode(want, skip_special_tokens=True)
    assert data["tree"] == "tree-8" and data["emitted"] == len(want) and data["finish"] in ("stop", "length")
    assert data["tau"] == (data["accepted"] + data["rounds"]) / data["rounds"] and data["drafted"] == 7 * data["rounds"]
    assert data["environment"]["dtype"] == "float32" and data["sampling"]["temperature"] == 0.0


def test_compare_json(cli, pair):
    code, out, _ = cli("generate", *PAIR, *IDS, "--compare", "--json", "--tree", "chain-3", "--max-new-tokens", "40",
                       "--ignore-eos")
    data = json.loads(out)
    assert code == 0 and data["equal"] is True and data["first_difference"] is None
    assert data["plain"]["tokens"] == data["speculative"]["tokens"] == expected(pair, tokens=40, stops=[])
    assert data["plain"]["drafted"] == 0 and data["plain"]["steps"] == {"off": 39}
    spec = data["speculative"]
    assert spec["drafted"] == 3 * spec["rounds"] and spec["plain_ms_per_step"] == pytest.approx(data["plain"]["ms_per_step"])
    assert spec["break_even_tau"] == pytest.approx(spec["ms_per_step"] / data["plain"]["ms_per_step"])
    assert data["speedup"] == pytest.approx(spec["tokens_per_second"] / data["plain"]["tokens_per_second"])
    assert re.match(r"tau \d\.\d\d [<>] break-even \d+\.\d\d", data["verdict"])


def test_exact_mode(cli):
    """In bfloat16, through the captured loop's cycles."""
    code, out, _ = cli("generate", *PAIR, *IDS, "--compare", "--json", "--exact", "--dtype", "bfloat16", "--tree", "tree-8",
                       "--max-new-tokens", "40", "--ignore-eos", "--temperature", "0.9")
    data = json.loads(out)
    assert code == 0 and data["equal"] is True and data["speculative"]["accepted"] > 0
    code, _, err = cli("generate", "--target", PAIR[1], "--draft", "ngram", *IDS, "--exact", "--tree", "chain-3")
    assert code == 2 and "exact: the drafter must be an EAGLE-3 draft or none" in err


def test_compare_table_in_a_pipe(cli, pair):
    code, out, _ = cli("generate", *PAIR, *IDS, "--compare", "--tree", "chain-3", "--max-new-tokens", "40", "--ignore-eos")
    text, table = out.split("\n\n")
    want = expected(pair, tokens=40, stops=[])
    assert code == 0 and text.split() == [str(t) for t in want], "the text is shown once"
    rows = {name: values for name, *values in (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())}
    for name in ("tok/s (decode)", "ms per step", "draft", "target", "verify", "other", "tau (accepted + 1)", "break-even tau",
                 "accepted / drafted", "depth 1: rate", "depth 3: rate (given depth 2)", "distinct 4-grams"):
        assert name in rows, name
    assert rows["tokens"] == ["40", "40"]
    assert "the two texts are equal (40 tokens)" in table and re.search(r"^tau .* break-even ", table, re.M)
    assert ESCAPE not in out and out.isascii()


# ---- terminal and pipe ------------------------------------------------------------------------------------------------


def test_pipe_is_plain_even_when_colour_is_forced():
    done = piped("generate", *PAIR, *IDS, "--compare", "--tree", "chain-2", "--max-new-tokens", "12", FORCE_COLOR="1")
    assert done.returncode == 0 and ESCAPE not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr


@pytest.mark.parametrize("no_colour", [False, True])
def test_terminal_has_a_table_and_colours(no_colour):
    t = Terminal("generate", *PAIR, *IDS, "--compare", "--tree", "chain-2", "--max-new-tokens", "12",
                 **({"NO_COLOR": "1"} if no_colour else {}))
    shown = t.read()
    assert t.code == 0 and "\u2500\u2500" in shown and "break-even tau" in shown  # a rule of box-drawing characters
    assert (f"{ESCAPE}[1;3" in shown) == (not no_colour)  # bold green, red or yellow: the verdict
    if no_colour:
        assert not re.search(ESCAPE + r"\[[\d;]*m", shown), "no style at all"
    assert shown.count(f"{ESCAPE}[?25l") == shown.count(f"{ESCAPE}[?25h"), "the cursor comes back"


def test_text_cannot_steer_the_terminal(monkeypatch, capsys):
    from fastverify.cli.output import Output
    out = Output()
    out.text("a\x1b[2Jb\n")
    out.out_terminal = True
    out.text("a\x1b[2Jb\tc\r\x9bd\n")
    assert capsys.readouterr().out == "a\x1b[2Jb\n" + "a\ufffd[2Jb\tc\ufffd\ufffdd\n"


LONG = ["generate", *PAIR, *IDS, "--tree", "tree-20", "--max-new-tokens", "960", "--ignore-eos", "--temperature", "1"]


def test_interrupt_in_a_pipe():
    with subprocess.Popen([*COMMAND, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                          preexec_fn=heed_interrupts) as p:
        first = p.stdout.read(20)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    assert p.returncode == 130
    text = first + out
    assert text.endswith("\n") and 1 < len(text.split()) < 960 and all(t.isdigit() for t in text.split())
    last = err.splitlines()[-1]
    assert last == f"fastverify: interrupted after {len(text.split())} tokens" and "Traceback" not in err


def test_interrupt_on_a_terminal():
    t = Terminal(*LONG)
    before = termios.tcgetattr(t.fd)
    t.read(until=rb"\d+ \d+ \d+ ")
    t.type(b"\x03")
    shown = t.read()
    assert t.code == 130 and re.search(r"\r\nfastverify: interrupted after \d+ tokens\r\n$", shown)
    assert "Traceback" not in shown and shown.count(f"{ESCAPE}[?25l") == shown.count(f"{ESCAPE}[?25h")
    assert termios.tcgetattr(t.fd) == before


def test_interrupt_before_the_first_token(cli, monkeypatch):
    def interrupted(*args, **kw):
        raise KeyboardInterrupt
    monkeypatch.setattr("fastverify.cli.session.load_target", interrupted)
    assert cli("generate", *PAIR, *IDS) == (130, "", "fastverify: interrupted\n")


def test_a_closed_pipe_ends_quietly():
    with subprocess.Popen([*COMMAND, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                          preexec_fn=heed_interrupts) as p:
        p.stdout.read(10)
        p.stdout.close()
        err = p.stderr.read()
        p.wait(60)
    assert p.returncode == 141 and "Traceback" not in err and "Broken" not in err


# ---- devices and drafts ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_auto_device_says_why_it_is_the_cpu(cli):
    code, _, err = cli("generate", *PAIR, *IDS, "--max-new-tokens", "4")
    assert code == 0 and err.splitlines()[0] == "device: the CPU (torch sees no CUDA GPU)"
    assert "device:" not in cli("generate", *PAIR, *IDS, "--max-new-tokens", "4", "--device", "cpu")[2]
    code, _, err = cli("generate", *PAIR, *IDS, "--device", "cuda")
    assert code == 2 and err == ("fastverify: generate: --device cuda must find a GPU and a CUDA or Triton kernel of every op of the step; "
                                 "got: torch sees no CUDA GPU. Fix: use --device auto.\n")


def test_auto_device_names_the_missing_kernels(monkeypatch):
    from fastverify.cli import session
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session._ops, "has_kernel", lambda op, kind: op not in ("grow_tree", "compact_kv"))
    notes = []
    assert session._device("generate", "auto", notes).type == "cpu"
    assert notes == ["device: the CPU (no CUDA or Triton kernel of grow_tree, compact_kv in this install)"]
    monkeypatch.setattr(session._ops, "has_kernel", lambda op, kind: True)
    assert session._device("generate", "auto", []).type == session._device("generate", "cuda", []).type == "cuda"


def test_default_draft_is_ngram_where_the_shipped_one_does_not_fit(cli, pair):
    code, out, err = cli("generate", *PAIR[:2], *IDS, "--max-new-tokens", "24")
    assert code == 0 and out.split() == [str(t) for t in expected(pair)] and "draft: " in err and "using n-gram lookup" in err


def test_default_draft_is_the_shipped_one_where_it_fits(cli, pair, monkeypatch):
    from fastverify.cli import session
    monkeypatch.setattr(session, "SHIPPED_DRAFT", GOLDEN / "draft")
    code, out, err = cli("generate", *PAIR[:2], *IDS, "--json", "--max-new-tokens", "24", "--tree", "chain-2")
    assert code == 0 and json.loads(out)["draft"] == DRAFT and "n-gram" not in err


def test_ngram_drafts_as_many_nodes_as_the_shape_holds(pair):
    from fastverify.cli.session import Session
    s = Session(pair[0], NgramDrafter(), None, "", "ngram", torch.device("cpu"), [])
    for tree, nodes, matches in (("chain-3", 3, 1), ("tree-20", 19, 4), ("auto", 7, 4)):
        drafter = s.decoder(tree).draft
        assert (drafter.num_draft, drafter.num_matches) == (nodes, matches)
    result = s.decoder("tree-20").generate([[5, 6, 7, 8] * 6], 30, stop_ids=[])
    assert result.stats.drafted > 7, "a tree of more nodes than the default drafter makes"
