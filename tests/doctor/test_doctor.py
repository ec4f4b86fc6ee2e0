"""fastverify doctor: findings on made-up machines; the report of this one; broken and missing parts."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastverify
from fastverify.cli.main import main
from fastverify.doctor import facts as fx
from fastverify.doctor.allreduce import measure
from fastverify.doctor.judge import Finding, allreduce, code_for, judge
from fastverify.doctor.judge import STEP_OPS as judge_step_ops
from fastverify.doctor.report import lines

ROOT = Path(fastverify.__file__).resolve().parents[1]
BUILD = {"version": "1.0", "git": "abc", "torch_target": "2.10", "cuda": "13.0", "cuda_archs": ["80", "90", "120"], "cuda_ptx": "120"}


def machine(gpus: int = 0, capability: str = "120", kind: str = "PIX") -> dict:
    """Facts of a healthy machine with so many GPUs behind one switch."""
    ids = [f"0000:{i:02x}:00.0" for i in range(gpus)]
    cuda = gpus > 0
    build = dict(BUILD) if cuda else BUILD | {"cuda": None, "cuda_archs": [], "cuda_ptx": None}
    ops = {n: ["cpu", "cuda"] if cuda else ["cpu"] for n in ("probe", "verify_tree")}
    square = lambda value: [["X" if i == j else value for j in range(gpus)] for i in range(gpus)]  # noqa: E731
    access = {k: [["ok"] * gpus for _ in range(gpus)] for k in ("read", "write")}
    return {
        "python": dict(version="3.12.1", executable="/py", system="linux", machine="x86_64", libc="glibc 2.36"),
        "packages": dict.fromkeys((*fx.REQUIRED, *fx.OPTIONAL), "1"),
        "fastverify": dict(version="1.0", path="/x/fastverify", build=build),
        "torch": dict(version="2.11.0", cuda="13.0" if cuda else None, threads=4, available=cuda, nccl="2.28.9" if cuda else None,
                      gpus=[dict(name="RTX PRO 6000", capability=capability, sms=188, memory=1)] * gpus),
        "install": dict(error=None, ops=ops, probe={"cpu": "ok", **{f"cuda:{i}": "ok" for i in range(gpus)}}),
        "topology": dict(gpus=[dict(bus_id=b, link=dict(gen=5, width=16, max_gen=5, max_width=16)) for b in ids],
                         links=square(kind), peer_access=access if gpus else None, bridges={}, numa_nodes=[],
                         iommu=dict(state="passthrough", units=[]), driver=dict(source="nvml", version="580.95.05", cuda="13.0"),
                         nccl=dict(path="/nccl.so", source="mapped", version="2.28.9") if gpus else dict(path=None, version=None)),
        "pci": [dict(bus_id=b, driver="nvidia") for b in ids], "nvcc": None, "nvidia_smi": "580.95.05" if gpus else None,
        "shm": dict(total=64 << 30, free=60 << 30), "environment": {}}


def bad(facts: dict) -> list:
    return [f for f in judge(facts) if f.level in ("wrong", "slow")]


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_healthy_machine(gpus):
    findings = judge(machine(gpus))
    assert bad(machine(gpus)) == [] and lines(findings)[-1] == "nothing to do"
    text = "\n".join(lines(findings))
    assert ("8 GPUs, connected by PIX" in text) == (gpus == 8) and ("sm_120: code of its own" in text) == (gpus > 0)


def change(path: str, value):
    def apply(facts: dict) -> dict:
        facts = copy.deepcopy(facts)
        *way, last = path.split("/")
        at = facts
        for key in way:
            at = at[int(key) if key.isdigit() else key]
        at[int(last) if last.isdigit() else last] = value
        return facts
    return apply


@pytest.mark.parametrize("gpus,path,value,level,text,fix", [
    (0, "python/version", "3.9.2", "wrong", "Python must be >= 3.10; this is 3.9.2", "newer Python"),
    (0, "python/system", "darwin", "wrong", "the system must be Linux; this is darwin", "WSL 2"),
    (0, "packages/gguf", None, "wrong", "missing: gguf", "pip install gguf"),
    (0, "torch/version", "2.9.1", "wrong", "torch must be >= 2.10; this is 2.9.1", "pip install 'torch>=2.10'"),
    (0, "torch", {"error": "ImportError: libc10"}, "wrong", "torch 1 does not import: ImportError: libc10", "reinstall torch"),
    (0, "torch", {"error": "ImportError: libnccl.so.2: cannot open"}, "wrong", "does not import: ImportError: libnccl.so.2", "nvidia-nccl-cu13"),
    (0, "fastverify/build", {}, "wrong", "was never built", "pip install --no-build-isolation -e ."),
    (0, "fastverify/build/version", "0.9", "wrong", "the libraries are those of 0.9", "reinstall"),
    (0, "install", {"error": "undefined symbol"}, "wrong", "_C does not load: undefined symbol", "torch>=2.10"),
    (0, "install/probe/cpu", "wrong result", "wrong", "the probe op on cpu: wrong result", "architectures"),
    (1, "install/probe/cuda:0", "RuntimeError: no kernel image", "wrong", "the probe op on cuda:0: RuntimeError: no kernel image", "driver"),
    (1, "torch/available", False, "wrong", "sees no GPU; the machine has 1", "CUDA_VISIBLE_DEVICES"),
    (1, "fastverify/build/cuda_archs", ["80", "90"], "slow", "sm_120: compiled by the driver", "FASTVERIFY_CUDA_ARCHS=120"),
    (1, "topology/driver/version", "570.12", "wrong", "torch is built with CUDA 13.0, which needs driver >= 580; this is 570.12", "update"),
    (1, "topology/gpus/0/link/width", 8, "slow", "GPU 0000:00:00.0 runs at x8 of x16", "riser"),
    (2, "topology/iommu/state", "translated", "slow", "the IOMMU translates addresses", "iommu=pt"),
    (2, "topology/bridges", {"0000:40:01.0": {"acs": "redirect"}}, "slow", "ACS sends peer traffic up", "setpci"),
    (2, "topology/peer_access/write/0/1", "chipset not supported", "slow", "refuses peer access on 1 of 1 pairs (GPU 0 and 1", "host memory"),
    (2, "shm", {"total": 64 << 20, "free": 1}, "slow", "/dev/shm holds 64 MiB", "--shm-size"),
    (2, "shm", None, "slow", "/dev/shm is missing", "--ipc=host"),
    (2, "environment", {"NCCL_P2P_DISABLE": "1"}, "slow", "NCCL_P2P_DISABLE=1", "unset"),
    (2, "topology", {"error": "no module _comm"}, "slow", "the wiring of the GPUs is not known: no module _comm", "pybind11"),
])
def test_one_fault_at_a_time(gpus, path, value, level, text, fix):
    found = [f for f in bad(change(path, value)(machine(gpus))) if text in f.text]
    assert len(found) >= 1 and found[0].level == level and fix in found[0].fix


def test_a_cpu_build_of_torch_or_of_ours_beside_a_gpu():
    facts = change("torch", machine(0)["torch"])(machine(1))
    assert any("is a CPU build; this machine has 1 NVIDIA GPUs" in f.text for f in bad(facts))
    facts = change("fastverify/build", machine(0)["fastverify"]["build"])(machine(1))
    facts["install"]["ops"] = {"probe": ["cpu", "triton"], "verify_tree": ["cpu"], "compact_kv": ["cpu", "triton"], "all_reduce": ["cpu"]}
    assert [f.text for f in judge(facts) if "kernel" in f.text] == [
        "there is a GPU but this build has no CUDA kernels, and no Triton ones of verify_tree, which every step needs",
        "ops without a GPU kernel: verify_tree, all_reduce", "Triton's kernels run for probe, compact_kv"]
    facts["install"]["ops"].pop("verify_tree")
    assert [(f.level, f.text) for f in bad(facts)] == [("slow", "this build has no CUDA kernels: Triton's run where there are some")]
    facts = change("install/ops/verify_tree", ["cpu"])(machine(1))
    assert bad(facts) == [] and any(f.text == "ops without a GPU kernel: verify_tree" for f in judge(facts))
    facts = change("install/ops/verify_tree", ["cpu", "triton"])(machine(1))
    assert bad(facts) == [] and any(f.text == "Triton's kernels run for verify_tree" for f in judge(facts))


def test_step_ops_are_those_of_the_command_line():
    from fastverify.cli.session import STEP_OPS
    assert sorted(judge_step_ops) == sorted(STEP_OPS)


def test_a_gpu_without_a_driver():
    facts = machine(1)
    facts["topology"]["driver"]["version"] = facts["nvidia_smi"] = None
    facts["pci"][0]["driver"] = "nouveau"
    assert any("1 NVIDIA GPUs, but the driver does not answer (bound: nouveau)" in f.text for f in bad(facts))


def test_gpus_behind_the_cpu_and_no_nccl():
    facts = machine(8, kind="SYS")
    assert [f.part for f in bad(facts)] == ["nccl"] and "NCCL_P2P_LEVEL=SYS" in bad(facts)[0].fix
    facts["environment"]["NCCL_P2P_LEVEL"] = "SYS"
    assert bad(facts) == []
    facts["topology"]["nccl"] = {}
    facts["torch"]["nccl"] = None
    assert "fastverify[nccl]" in bad(facts)[0].fix


def test_torch_missing_is_said_once():
    facts = machine(0)
    facts["packages"]["torch"], facts["torch"], facts["install"] = None, {"error": "no torch"}, {"error": "no torch"}
    assert [f.text for f in bad(facts)] == ["missing: torch"] and bad(facts)[0].fix == "pip install 'torch>=2.10'"


@pytest.mark.parametrize("capability,archs,ptx,what", [
    ("90", ["90"], None, "binary"), ("90", ["90a"], None, "binary"), ("89", ["80"], None, "binary"), ("86", ["80", "90"], None, "binary"),
    ("80", ["86"], None, ""), ("90", ["80"], None, ""), ("100", ["90a"], "90", "ptx"), ("121", ["120"], None, "binary"),
    ("121", ["120a"], None, ""), ("103", ["100a"], "120", ""), ("120", [], "120", "ptx"), ("75", ["80"], "80", "")])
def test_code_for_an_architecture(capability, archs, ptx, what):
    assert code_for(capability, archs, ptx) == what


def test_what_to_do_comes_worst_first():
    out = lines([Finding("a", "slow", "x", "do x"), Finding("b", "wrong", "y", "do y"), Finding("c", "note", "z")])
    assert out == ["SLOW  a  x", "WRONG b  y", "note  c  z", "", "what to do:", "1. b: do y   (y)", "2. a: do x   (x)"]


# ---- this machine -------------------------------------------------------------------------------------------------------------


def test_this_machine(capsys):
    capsys.readouterr()
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["works"] == (code == 0)
    assert data["facts"]["install"]["probe"]["cpu"] == "ok" and data["facts"]["fastverify"]["version"] == fastverify.__version__
    assert not [f for f in data["findings"] if f["part"] in ("python", "packages", "fastverify") and f["level"] == "wrong"], data["findings"]


def test_processes_that_hang_crash_or_fail():
    assert fx.ask("import time; time.sleep(60)", 0.5) == {"error": "no answer within 0.5 s"}
    assert fx.ask("import os; os.kill(os.getpid(), 9)", 60) == {"error": "the process was ended by signal 9"}
    assert fx.ask("raise ImportError('lib x')", 60) == {"error": "ImportError: lib x"}
    assert fx.ask("print('noise'); print('FACTS{\"a\": 1}')", 60) == {"a": 1}
    assert main(["doctor", "--seconds", "0"]) == 2


def test_gpus_on_the_bus(tmp_path):
    for bus, vendor, kind, driver in (("0000:01:00.0", "0x10de", "0x030200", "nvidia"), ("0000:01:00.1", "0x10de", "0x040300", None),
                                      ("0000:02:00.0", "0x1002", "0x030000", None), ("0000:03:00.0", "0x10de", "0x030000", None)):
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
        if driver:
            (tmp_path / driver).mkdir()
            (folder / "driver").symlink_to(tmp_path / driver)
    assert fx.pci_gpus(tmp_path) == [{"bus_id": "0000:01:00.0", "driver": "nvidia"}, {"bus_id": "0000:03:00.0", "driver": None}]
    assert fx.pci_gpus(tmp_path / "none") == []


def test_without_any_package(tmp_path):
    """No torch, no rich, no site-packages at all: the report still comes, by either command, and says what to install."""
    shutil.copytree(ROOT / "fastverify", tmp_path / "fastverify", ignore=shutil.ignore_patterns("data", "__pycache__", "*.so"))
    for command in (["-m", "fastverify.doctor"], ["-m", "fastverify", "doctor"]):
        done = subprocess.run([sys.executable, "-S", *command], capture_output=True, text=True, cwd=tmp_path, timeout=120,
                              env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
        assert done.returncode == 1 and done.stderr == "", done.stderr
        assert "WRONG packages" in done.stdout and "pip install 'torch>=2.10'" in done.stdout


def test_a_library_of_another_tree(tmp_path):
    """A source tree that was never built, beside an editable install of another one: its libraries are not taken for this tree's."""
    (tmp_path / "site").mkdir()
    (tmp_path / "tree").mkdir()
    shutil.copytree(ROOT / "fastverify", tmp_path / "tree/fastverify", ignore=shutil.ignore_patterns("data", "__pycache__", "*.so", "build_info.json"))
    (tmp_path / "site/sitecustomize.py").write_text(
        "import importlib.util, sys\nclass Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        place = {{'fastverify._C': {fastverify._ops._C.__file__!r}}}.get(name)\n"
        "        return place and importlib.util.spec_from_file_location(name, place)\nsys.meta_path.append(Finder)\n")
    done = subprocess.run([sys.executable, "-c", "import fastverify\nfastverify.draft_topk\nfrom fastverify import _ops\n_ops.get('probe')"],
                          capture_output=True, text=True, cwd="/", timeout=120, env=dict(
                              os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path / "tree"), str(tmp_path / "site"), *(p for p in sys.path if p)])))
    assert "fastverify: the compiled library must be built; got a source tree without it" in done.stderr, done.stderr


def test_a_source_tree_in_the_current_folder(tmp_path, monkeypatch):
    """The questions are about this package, not about an unbuilt clone that the user stands in; a hidden install is said."""
    (tmp_path / "fastverify").mkdir()
    (tmp_path / "fastverify" / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    assert fx.ask("import fastverify; print('FACTS' + '{}')", 60) == {}
    facts = machine(1)
    facts["fastverify"] |= dict(build={}, other="/site/fastverify", path="/clone/fastverify")
    (found,) = [f for f in bad(facts) if f.part == "fastverify"]
    assert "hides the install in /site/fastverify" in found.text and "leave this folder" in found.fix


def test_with_a_library_that_does_not_load(tmp_path):
    """A copy of the package whose _C is garbage."""
    package = tmp_path / "fastverify"
    shutil.copytree(ROOT / "fastverify", package, ignore=shutil.ignore_patterns("data", "__pycache__", "*.so"))
    (package / "_C.abi3.so").write_bytes(b"no library")
    (package / "build_info.json").write_text(json.dumps(BUILD | {"version": fastverify.__version__, "cuda": None}))
    done = subprocess.run([sys.executable, "-m", "fastverify.doctor"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1 and "WRONG fastverify" in done.stdout and "_C does not load: " in done.stdout
    assert "what to do:" in done.stdout


# ---- all-reduce -----------------------------------------------------------------------------------------------------------------


def test_two_processes_over_gloo(capsys):
    capsys.readouterr()
    code = main(["doctor", "--allreduce", "--hidden", "64", "--rows", "1,3", "--json"])
    data = json.loads(capsys.readouterr().out)
    got = data["facts"]["allreduce"]
    if got["backend"] == "gloo":
        assert [r["bytes"] for r in got["rows"]] == [128, 384] and all(r["eager_us"] > 0 and r["graph_us"] is None for r in got["rows"])
        assert sum(f["part"] == "all-reduce" and "gloo" in f["text"] for f in data["findings"]) == 2
    assert code == int(not data["works"])


def test_ranks_that_fail_or_hang():
    assert measure(2, "nowhere", [128], 100)["error"].startswith(("rank 0 failed: ", "rank 1 failed: "))
    assert measure(2, "gloo", [128], 0.05) == {"error": "no answer from ranks 0, 1 within 0.05 s"}


def test_all_reduce_times_are_judged():
    def rows(us: float, nbytes: int = 14336) -> dict:
        return {"world": 8, "backend": "nccl", "rows": [{"bytes": nbytes, "eager_us": us + 20, "graph_us": us}]}
    (slow,) = allreduce(rows(205))
    assert slow.level == "slow" and slow.text == "8 GPUs, 14 KiB: 225 us a call, 205 us in a CUDA graph; NCCL with P2P takes 24 to 56 us up to 64 KiB"
    assert allreduce(rows(50))[0].level == allreduce(rows(120, 860160))[0].level == "ok" and allreduce(rows(250, 860160))[0].level == "slow"
    assert allreduce({"error": "rank 1 failed"})[0].level == "wrong"
    both = rows(205)
    both["rows"][0]["ours"], both["reasons"] = {"peer": 5.8, "peer + norm": 6.04, "host": None, "host + norm": None}, ["host: no /dev/shm"]
    said = allreduce(both, calls=122)
    assert [f.text for f in said[1:]] == ["8 GPUs, 14 KiB, ours: peer 5.8 us, peer + norm 6.0 us; 122 of them in a forward: peer 0.71 ms, NCCL 25.01 ms",
                                          "ours does not work: host: no /dev/shm"]


@pytest.mark.parametrize("flags,message", [
    (["--rows", "0"], "doctor: rows and hidden must be positive integers; got '0' and 7168."),
    (["--rows", "a"], "doctor: rows and hidden must be positive integers; got 'a'"),
    (["--config", "/nowhere"], "doctor: config must be a config.json with hidden_size; got /nowhere."),
    (["--seconds", "-1"], "doctor: seconds must be > 0; got -1.0.")])
def test_arguments(capsys, flags, message):
    capsys.readouterr()
    assert main(["doctor", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err and "Fix: " in err
