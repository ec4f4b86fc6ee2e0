"""Runs every command of README, CONTRIBUTING and docs as a newcomer would, in the order of the pages, from the root of a clone.

    python tests/docs/commands.py                 what runs without network, with small settings; a table, exit code 1 if one failed
    python tests/docs/commands.py --list          every command, and how or why it is not run
    python tests/docs/commands.py --only bench    those that contain the word
    python tests/docs/commands.py --without rich  where rich cannot be imported; or triton, matplotlib, transformers, nccl, gpu

RULES says for each what is run: the command itself, or the same command with its placeholders (MODEL, FILE.jsonl, ...) filled in and
settings that take seconds. tests/docs/test_commands.py fails if a page has a command that no rule knows, or a rule no command.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMAND = r"(?:[A-Z_]+=\S+ )*(?:fastverify|python3?|make|torchrun|pip|bash)\s"
GENERATED = re.compile(r"<!-- ([\w-]+|gpu: [\w.]+) -->\n.*?<!-- /", re.S)  # records of runs, with files of theirs


# --without: a finder in front of all others, in a sitecustomize of every process that a command starts; or variables
BLOCK = """import importlib.abc, importlib.util, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == {package!r} else real(name, package)
sys.meta_path.insert(0, Blocked())
"""
WITHOUT = {"nccl": dict(FASTVERIFY_NCCL_LIB="/nowhere/libnccl.so"), "gpu": dict(CUDA_VISIBLE_DEVICES=""),
           **dict.fromkeys(("rich", "triton", "matplotlib", "transformers"), {})}


class Rule(NamedTuple):
    """pattern: the whole documented command. run: what is run ("": as written). why: not run by this script, and who runs it."""

    pattern: str
    run: str = ""
    why: str = ""
    model: bool = False  # needs the demo model
    quick: bool = False  # seconds on a CPU: also run by the tests
    code: int = 0


INSTALL = "installs: by hand in a fresh virtual environment; the build itself is what make test does"
CI = "CI runs it"
RULES = (
    Rule(r"make demo", why="network: by hand in a fresh clone"),
    Rule(r"make test|make sanitize|make test TORCH='torch==2.13.0'|make test TRITON=\.\.\.", why=CI),
    Rule(r"FASTVERIFY_CUDA_ARCHS=all make test", why=CI),
    Rule(r"make gpu", why="by itself, on a machine with a GPU"),
    Rule(r"make clean|make distclean", why="removes the build"),
    Rule(r"(FASTVERIFY_\w+=\w+ )?pip (install|wheel) .*|python3 -m venv .*", why=INSTALL),
    Rule(r"FASTVERIFY_NO_CUDA=1 python setup\.py .*", why=INSTALL),
    Rule(r"bash tests/emulator/build\.sh", why=CI),
    Rule(r"fastverify fetch-demo", why="network: make demo runs it"),
    Rule(r"python -m pytest (-q tests/tree|tests/<stage>/test_<op>\.py tests/test_rules\.py)", why=CI),
    Rule(r"fastverify generate --compare \"Why is the sky blue\?\"", 'fastverify generate --compare --max-new-tokens 24 "Why is the sky blue?"',
         model=True),
    Rule(r"fastverify generate --target MODEL .* < prompt\.txt",
         "fastverify generate --target {demo} --tree tree-20 --temperature 0.8 --seed 1 --max-new-tokens 16 < {work}/prompt.txt", model=True),
    Rule(r"fastverify evaluate --prompts FILE\.jsonl", "fastverify evaluate {pair} --prompts {ids} --limit 2 --max-new-tokens 16 --ignore-eos",
         quick=True),
    Rule(r"fastverify inspect DRAFT", "fastverify inspect {draft}", quick=True),
    Rule(r"fastverify inspect DRAFT --target MODEL", "fastverify inspect {draft} --target {target}", quick=True),
    Rule(r"fastverify inspect (DIR|DRAFT) --target MODEL --probe", "fastverify inspect {shipped} --target {demo} --probe", model=True),
    Rule(r"fastverify remap DRAFT --like DRAFT2 --target MODEL --out DIR",
         "fastverify remap {draft} --like {draft} --target {target} --out {work}/remapped", quick=True),
    Rule(r"fastverify (remap|train|probe|plan|trace)", why="named only; with arguments elsewhere"),
    Rule(r"(torchrun --nproc-per-node 4 -m )?fastverify train --target MODEL --prompts (FILE|prompts\.jsonl) --out DIR",
         "fastverify train --target {target} --prompts {ids} --out {work}/trained --steps 4 --batch 2 --row 64 --ttt 2 --ttt-late 2 --eval-every 4 "
         "--warmup 1 --max-new-tokens 24 --samples 1 --draft-vocab-size 300 --held 0.3"),
    Rule(r"fastverify train --out DIR --resume", "fastverify train --out {work}/trained --resume"),
    Rule(r"fastverify train --target NEW --init OLD_DRAFT --remap-vocab .*",
         "fastverify train --target {target} --init {work}/trained --remap-vocab --prompts {ids} --out {work}/again --steps 2 --batch 2 --row 64 --ttt 2 "
         "--ttt-late 2 --eval-every 2 --warmup 1 --max-new-tokens 24 --samples 1 --draft-vocab-size 280 --held 0.3"),
    Rule(r"fastverify check"),
    Rule(r"fastverify doctor|python -m fastverify\.doctor", quick=True, code=-1),
    Rule(r"fastverify doctor --json", quick=True, code=-1),
    Rule(r"fastverify doctor --allreduce --config (MODEL/config\.json|CONFIG\.json)( --rows 1,2,4,8,16,32,64)?",
         "fastverify doctor --allreduce --config {target}/config.json", code=-1),
    Rule(r"fastverify probe --target (MODEL --draft DRAFT|M --draft D)( --draft DRAFT2)?( --draft ngram)?( --out probe\.json)?",
         "fastverify probe {pair} --draft ngram --prompts {ids} --limit 2 --max-new-tokens 16 --tree chain-2 --ignore-eos --out {work}/probe.json", quick=True),
    Rule(r"torchrun --nproc-per-node 8 -m fastverify probe --target MODEL --draft DRAFT",
         "torchrun --nproc-per-node 2 -m fastverify probe {pair} --prompts {ids} --limit 2 --max-new-tokens 16 --tree chain-2 --ignore-eos --device cpu"),
    Rule(r"fastverify plan --probe probe\.json --plot probe\.svg", "fastverify plan --probe {work}/probe.json --plot {work}/probe.svg", quick=True),
    Rule(r"fastverify plan --plain-ms 11\.6 --verify-ms 30 .*", quick=True),
    Rule(r"fastverify plan --plain-ms 11\.6 \.\.\.", "fastverify plan --plain-ms 11.6 --verify-ms 30 --draft-ms 5", quick=True),
    Rule(r"fastverify plan --config MODEL/config\.json .*", "fastverify plan --config {target}/config.json --ranks 8 --memory-gbs 1500 --link pcie5 "
         "--expert-bits 4 --draft-step-ms 0.5 --accept 0.65,0.6", quick=True),
    Rule(r"fastverify trace (RANK|rank0)\.json\.gz .*",
         "fastverify trace tests/data/gpu_traces/late-rank0.json.gz tests/data/gpu_traces/late-rank1.json.gz", quick=True),
    Rule(r"fastverify bench|python -m benchmarks", quick=True),
    Rule(r"fastverify bench run( --quick)?", "fastverify bench run --quick --limit 60"),
    Rule(r"fastverify bench run verify_tree .*",
         "fastverify bench run verify_tree --batch 1,8 --nodes 16,64 --vocab 32000 --repeats 3 --only cpu,cuda --out {work}/results"),
    Rule(r"fastverify bench step( --plot plots)?", "fastverify bench step --quick --model tiny --plot {work}/plots"),
    Rule(r"fastverify bench loop --prompts FILE\.jsonl",
         "fastverify bench loop {pair} --prompts {ids} --limit 1 --max-new-tokens 12 --ignore-eos --eagle3 chain-2 --ngram chain-3 --out {work}/loop"),
    Rule(r"fastverify bench show results/cpu-2026-01-31\.json .*", "fastverify bench show {result} --markdown {work}/table.md --plot {work}/plots",
         quick=True),
    Rule(r"fastverify bench compare (old\.json new\.json|OLD NEW)", "fastverify bench compare {result} {result}", quick=True),
    Rule(r"python tests/docs/commands\.py", why="this script"),
    Rule(r"python -m pytest tests/integrations/test_transformers\.py -k gpu", why="make gpu runs it"),
    Rule(r"python -m pytest benchmarks/host/bench_host\.py", "python -m pytest -q benchmarks/host/bench_host.py --benchmark-disable"),
    Rule(r"python docs/make_reference\.py", "python docs/make_reference.py --check"),
    Rule(r"python benchmarks/readme\.py", "python benchmarks/readme.py --check"),
    Rule(r"python benchmarks/linear/bench_skinny_linear\.py",
         "python benchmarks/linear/bench_skinny_linear.py --quick --tree-rows 1,4"),
    Rule(r"python benchmarks/loop/bench_op_share\.py .*",
         "python benchmarks/loop/bench_op_share.py {pair} --token-ids 3,9,4 --tree off,chain-3 --max-new-tokens 12"),
    Rule(r"fastverify generate --dummy .*", "fastverify generate --dummy tiny --token-ids 3,4,5 --max-new-tokens 8 --device cpu", quick=True),
    Rule(r"python benchmarks/loop/(bench_loop|bench_smollm2|bench_soak|bench_controller)\.py .*", why="a GPU, the demo model and minutes"),
    Rule(r"python benchmarks/loop/tp_differences\.py --new 32", why="four minutes; tests/models/test_parallel_loop.py runs the same on the CPU"),
    Rule(r"python (benchmarks/comm/)?(bench_all_reduce|multi_gpu)\.py .*|bash benchmarks/comm/multi_gpu\.sh", why="two GPUs"),
    Rule(r"python benchmarks/comm/(virtual_checks\.py|soak_virtual\.py .*)", why="a GPU, which stands for all ranks"),
    Rule(r"python tests/random_cases\.py .*|bash tests/sanitize_gpu\.sh|bash benchmarks/one_gpu\.sh OUT", why="a GPU and minutes"),
    Rule(r"python tests/comm/nccl_one_card\.py", why="a GPU, MPS and NCCL >= 2.30"),
    Rule(r"python benchmarks/comm/model_page\.py"),
    Rule(r"fastverify evaluate --draft DIR --prompts eval/\*\.jsonl .*", why="the six prompt files of EAGLE's evaluation, an hour"),
)


def normal(text: str) -> str:
    """One documented line as a command: without its description (after two spaces or a #)."""
    return re.sub(r"\s+", " ", re.split(r"\s{2,}|\s#\s", text.strip())[0]).strip()


def pages() -> list:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> list:
    """[(page, command)] in order, each command of a page once: indented lines, and code in running text."""
    found = []
    for page in pages():
        text = re.sub(r" *\\\n +", " ", GENERATED.sub("", page.read_text()))
        lines = re.findall(rf"^    ({COMMAND}.*)$|(?<!`)`({COMMAND}[^`]{{0,400}})`(?!`)", text, re.M)
        for block, inline in lines:
            for part in (normal(block) if block else ' '.join(inline.split())).split(" && "):
                if re.match(COMMAND, part + " ") and (page.name, part) not in found:
                    found.append((page.name, part))
    return found


def rules_of(command: str) -> list:
    return [r for r in RULES if re.fullmatch(r.pattern, command)]


def places(work: Path) -> dict:
    """What the placeholders of RULES stand for; writes the input files."""
    from fastverify.models.demo import demo_target_path
    golden = ROOT / "tests/data/golden"
    (work / "prompt.txt").write_text("Why is the sky blue?\n")
    (work / "ids.jsonl").write_text("".join(f'{{"token_ids": [{i}, 4, {i}, 4, {i + 1}]}}\n' for i in (3, 9, 20, 77, 50, 61, 90, 33)))
    stored = sorted((ROOT / "benchmarks/results").glob("nvidia-h200-2026-11-*.json"))
    return dict(work=work, target=golden / "target", draft=golden / "draft", pair=f"--target {golden / 'target'} --draft {golden / 'draft'}",
                ids=work / "ids.jsonl", demo=demo_target_path() or "", shipped=ROOT / "fastverify/data/smollm2-135m-instruct-eagle3",
                result=stored[-1])


def filled(rule: Rule, command: str, where: dict) -> str:
    return (rule.run or command).format(**where)


def removed(what: str, work: Path) -> dict:
    """Variables for processes in which one optional thing is missing."""
    if not what or WITHOUT[what]:
        return WITHOUT.get(what, {})
    (work / "without").mkdir()
    (work / "without" / "sitecustomize.py").write_text(BLOCK.format(package=what))
    return dict(FIRST=str(work / "without"))


def right(rule: Rule, line: str, without: str, code: int, last: list) -> bool:
    """Whether a command ended as it should: plots are refused, in words, where there is nothing to draw with."""
    if without == "matplotlib" and "--plot" in line:
        return code == 2 and any("Fix: pip install matplotlib" in text for text in last)
    return code == rule.code or (rule.code == -1 and code in (0, 1))


def run(line: str, seconds: float, **more: str) -> tuple:
    """(exit code, seconds, last lines) of a line of shell, in which `fastverify` is this package."""
    prelude = ('fastverify() { "$PY" -m fastverify "$@"; }; python() { "$PY" "$@"; }; torchrun() { "$PY" -m torch.distributed.run "$@"; }\n')
    start = time.monotonic()
    try:
        done = subprocess.run(["bash", "-c", prelude + line], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
                              env=os.environ | more | {"PY": sys.executable, "PYTHONPATH": os.pathsep.join(
                                  [*filter(None, [more.get("FIRST")]), str(ROOT), *filter(None, sys.path[1:])])})
        return done.returncode, time.monotonic() - start, (done.stdout + done.stderr).strip().splitlines()[-12:]
    except subprocess.TimeoutExpired:
        return 124, seconds, [f"stopped after {seconds:g} s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", metavar="WORD,...", default="")
    parser.add_argument("--skip", metavar="WORD,...", default="", help="those that do not contain it")
    parser.add_argument("--without", choices=list(WITHOUT), default="", help="as if this were not installed")
    parser.add_argument("--quick", action="store_true", help="those only that the tests run too: seconds each")
    parser.add_argument("--seconds", type=float, default=180, help="per command")
    args = parser.parse_args()
    failed, seen, count = [], set(), 0
    with tempfile.TemporaryDirectory() as work:
        where, env = places(Path(work)), removed(args.without, Path(work))
        for page, command in documented():
            (rule,) = rules_of(command)
            line = filled(rule, command, where)
            why = rule.why or ("the demo model is not here: fastverify fetch-demo" if rule.model and not where["demo"] else "")
            if (args.only and not any(w in command for w in args.only.split(","))) or any(w in command for w in args.skip.split(",") if w):
                continue
            if args.quick and not rule.quick:
                continue
            if args.list or why:
                print(f"{'-':>6} {page}: {command}   {'(' + why + ')' if why else line}", flush=True)
                continue
            if line in seen:
                continue
            seen.add(line)
            count += 1
            code, took, last = run(line, args.seconds, **env)
            good = right(rule, line, args.without, code, last)
            print(f"{took:5.1f}s {page}: {command}   {'ok' if good else f'EXIT {code}'}", flush=True)
            if not good:
                failed.append(command)
                print("        " + line, *("        | " + text[:160] for text in last), sep="\n", flush=True)
    if not args.list:
        print(f"{count} commands run, {len(failed)} failed" + "".join(f"\n  {c}" for c in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
