"""Without one of the optional things everything else still works, and says what is missing.

Without nvcc: make sanitize builds that way and runs the op tests on it; what such a build says is in test_errors_install.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).resolve().parent / "data" / "golden"
PAIR = ["--target", str(GOLDEN / "target"), "--draft", str(GOLDEN / "draft")]
RESULT = dict(rows=[dict(op="probe", provider="ours", shape=dict(B=1), dtype="float32", cold=True, median_us=3.0, p20_us=3.0, p80_us=3.0,
                         floor_us=1.0, empty_us=0.5, bytes=1000, copy_gb_s=10.0, correct=True, note="", command="python x.py", device="X",
                         device_type="cpu", date="2026-01-02", versions=dict(torch="2.13"))])

# A finder that knows nothing of the blocked packages, in front of all others; then the commands, one JSON line of (code, stderr) each.
RUN = """
import contextlib, importlib.abc, importlib.util, io, json, sys

blocked, commands, terminal = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "1"

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in blocked else real(name, package)
sys.meta_path.insert(0, Blocked())

class Terminal(io.StringIO):
    def isatty(self):
        return terminal

from fastverify.cli.main import main
for command in commands:
    out, err = Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as exc:
            code = exc.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def without(packages: list, *commands: list, terminal: bool = False, **env: str) -> list:
    """[(exit code, stdout, stderr)] of commands in a process where the packages cannot be imported."""
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(packages), json.dumps(commands), str(int(terminal))], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TERM": "xterm"} | env)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


GENERATE = ["generate", *PAIR, "--token-ids", "3,4,5", "--max-new-tokens", "8", "--tree", "chain-2", "--device", "cpu"]
PLAN = ["plan", "--plain-ms", "11.6", "--verify-ms", "30", "--draft-ms", "0.66"]


def test_without_triton():
    check, generate = without(["triton"], ["check"], GENERATE)
    assert check[0] == generate[0] == 0 and " 0 failed" in check[1]


def test_without_matplotlib(tmp_path):
    result = tmp_path / "r.json"
    result.write_text(json.dumps(RESULT))
    plan, plot, show, picture = without(["matplotlib"], PLAN, [*PLAN, "--plot", str(tmp_path / "x.svg")], ["bench", "show", str(result)],
                                        ["bench", "show", str(result), "--plot", str(tmp_path / "p")])
    assert plan[0] == show[0] == 0 and "2.64" in plan[1] and "3.00" in show[1]
    assert plot[0] == picture[0] == 2 and all("Fix: pip install matplotlib" in x[2] for x in (plot, picture))


def test_without_rich_on_a_terminal():
    check, generate, plan = without(["rich"], ["check"], GENERATE, PLAN, terminal=True)
    assert (check[0], generate[0], plan[0]) == (0, 0, 0)
    assert "rich is not installed: plain text" in check[2] and "rich" not in generate[2] + plan[2], "said once"
    assert "\x1b[" not in check[1] + generate[1] + plan[1]


def test_without_transformers():
    """The integration imports; only what registers with transformers needs it."""
    code = ("import sys; sys.modules['transformers'] = None\nimport fastverify.integrations.transformers as t\n"
            "try: t.register_attention()\nexcept ImportError as e: print('transformers' in str(e))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    assert done.stdout == "True\n", done.stderr
    assert without(["transformers"], GENERATE)[0][0] == 0


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_without_a_gpu():
    generate, asked, check = without([], GENERATE[:-1] + ["auto"], GENERATE[:-1] + ["cuda"], ["check"])
    assert generate[0] == check[0] == 0 and "device: the CPU (torch sees no CUDA GPU)" in generate[2]
    assert asked[0] == 2 and "Fix: use --device auto" in asked[2] and "torch sees no CUDA GPU" in check[1]


@pytest.mark.gpu
def test_with_the_gpu_hidden():
    generate, check = without([], GENERATE[:-1] + ["auto"], ["check"], CUDA_VISIBLE_DEVICES="")
    assert generate[0] == check[0] == 0 and "torch sees no CUDA GPU" in generate[2]


WITHOUT_NCCL = """
import json, types, torch, torch.distributed as dist, fastverify as fv
from fastverify.comm import nccl, topology
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with fv.Communicator(device="cpu") as comm:
    total = float(fv.all_reduce(torch.ones(2, 8), comm).sum())
try:
    nccl.open_nccl(types.SimpleNamespace(_together=lambda what, call: call()), None)
    said = ""
except RuntimeError as error:
    said = str(error)
print(json.dumps([total, topology.nccl_library()["path"], said]))
dist.destroy_process_group()
"""


def test_without_nccl():
    """A library that is not there stops whoever asks for NCCL, not communicators: theirs are kernels of our own."""
    missing = "/nowhere/libnccl.so"
    doctor, generate = without([], ["doctor", "--json"], GENERATE, FASTVERIFY_NCCL_LIB=missing)
    assert generate[0] == 0
    library = json.loads(doctor[1])["facts"]["topology"]["nccl"]
    assert library["path"] is None and missing in " ".join(library["tried"])
    done = subprocess.run([sys.executable, "-c", WITHOUT_NCCL], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "FASTVERIFY_NCCL_LIB": missing})
    assert done.returncode == 0, done.stderr
    total, path, said = json.loads(done.stdout.splitlines()[-1])
    assert total == 16.0 and path is None
    assert said.startswith(f"no NCCL (FASTVERIFY_NCCL_LIB: {missing}: cannot open") and said.endswith("Fix: pip install 'fastverify[nccl]'")
