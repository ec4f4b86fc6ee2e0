"""The rules of the house that a machine can check, on the sources: mirror, size, host reads, macros, environment."""

import re
from pathlib import Path

import pytest

import fastverify
from fastverify import _ops, reference

ROOT = Path(__file__).parents[1]
PACKAGE = Path(fastverify.__file__).parent  # the installed package, or fastverify/ of a source tree
CSRC = ROOT / "csrc"
STAGES = ("tree", "attention", "linear", "comm", "accept", "kv")
OPS = re.findall(r'm\.def\(\s*"(\w+)\(', (CSRC / "ops.cpp").read_text())
ENV_TABLE = re.compile(r"^\|\s*`(FASTVERIFY_\w+)`", re.M)


def sources(*suffixes: str, roots=(CSRC, PACKAGE, ROOT / "tests", ROOT / "benchmarks")) -> list:
    found = [p for r in roots if r.exists() for p in sorted(r.rglob("*")) if p.suffix in suffixes]
    assert found, "no sources found: the rules would pass on nothing"
    return found


def native(*suffixes: str) -> list:
    return sources(*(suffixes or (".cpp", ".h", ".cu", ".cuh")), roots=(CSRC,))


def offenders(files: list, pattern: str) -> list:
    """file:line: text of every line that matches."""
    wanted = re.compile(pattern)
    return [f"{p.name}:{n}: {line.strip()}" for p in files
            for n, line in enumerate(p.read_text().splitlines(), 1) if wanted.search(line)]


def test_no_file_above_700_lines():
    files = sources(".py", ".cpp", ".h", ".cu", ".cuh", ".sh", ".md") + [ROOT / "CMakeLists.txt", ROOT / "Makefile"]
    assert {str(p): n for p in files if (n := len(p.read_text().splitlines())) > 700} == {}
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 120


SGLANG = [o for o in OPS if o.startswith("sgl_")]  # drop-ins: their public functions have SGLang's names


@pytest.mark.parametrize("op", [o for o in OPS if o != "probe" and o not in SGLANG])
def test_mirror_one_name_in_every_place(op):
    (kernel,) = CSRC.glob(f"*/{op}.cpp")
    stage = kernel.parent.name
    assert stage in STAGES
    assert (PACKAGE / stage / f"{op}.py").exists()
    assert (ROOT / "tests" / stage / f"test_{op}.py").exists()
    assert callable(getattr(fastverify, op)), "the public function has the op's name"
    assert getattr(fastverify, op).__module__ == f"fastverify.{stage}.{op}"
    assert getattr(reference, op).__module__ == f"fastverify.reference.{stage}"
    assert op in fastverify.__all__ and op in reference.__all__


@pytest.mark.parametrize("op", SGLANG)
def test_mirror_of_a_drop_in(op):
    from fastverify.integrations import sglang
    (kernel,) = CSRC.glob(f"*/{op}.cpp")
    assert kernel.parent.name in STAGES
    assert callable(getattr(sglang, op.removeprefix("sgl_"))) and op.removeprefix("sgl_") in sglang.__all__
    assert getattr(reference, op).__module__ == "fastverify.reference.sglang" and op in reference.__all__
    assert f'"{op}"' in (ROOT / "tests/integrations/test_sglang.py").read_text()


def test_every_registered_op_is_in_ops_cpp_and_has_a_cpu_kernel():
    assert len(OPS) == len(set(OPS)) and "probe" in OPS
    assert sorted(_ops._NAMES) == sorted(OPS)
    assert [o for o in OPS if not _ops.has_kernel(o, "cpu")] == []


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_opchecked(op):
    """In the op's own test file, or in one named after it (test_<op>_laws.py)."""
    name = "sglang" if op in SGLANG else op
    assert any("opcheck(" in p.read_text() for p in (ROOT / "tests").rglob(f"test_{name}*.py"))


@pytest.mark.parametrize("op", OPS)
def test_schema_conventions(op):
    """Ops return nothing and mark what they write, each with a letter of its own: inputs, then outputs."""
    schema = _ops.get(op)._schema
    assert schema.returns == []
    written = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    assert written and all(w.is_write for w in written)
    letters = re.findall(r"Tensor\((\w)!\)", str(schema))  # a list's alias_info does not name its letter
    assert len(set(letters)) == len(letters) == len(written)


def test_cuda_sources_are_named_after_ops():
    """An op's instantiations may be spread over <op>_<kind>.cu."""
    assert [p.name for p in native(".cu") if p.stem not in OPS and p.stem.rpartition("_")[0] not in OPS] == []


def test_cmake_lists_every_source():
    listed = set(re.findall(r"csrc/[\w/]+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text()))
    assert listed == {f"csrc/{p.relative_to(CSRC).as_posix()}" for p in native(".cpp", ".cu")}


def test_step_path_reads_nothing_on_the_host():
    set_up = {"slabs.py", "peer_check.py", "nccl.py", "tuner.py"}  # run before a communicator's first call or after its last
    step = [p for p in sources(".py", roots=[PACKAGE / s for s in STAGES]) if p.name not in set_up]
    step += [p for p in [PACKAGE / "plan.py"] if p.exists()]
    assert offenders(step, r"\.(item|cpu|tolist|numpy)\(|\.synchronize\(|\bprint\(") == []


def test_kernels_include_no_torch_header():
    kernels = [p for p in native() if p.suffix == ".cuh" or p.stem.endswith("_kernel")]
    assert offenders(kernels, r'#include\s*[<"](torch|ATen|c10)/') == []


def test_algo_headers_are_free_of_torch_and_of_the_cuda_runtime():
    algo = [p for p in native(".h") if p.parent.name == "algo"]
    assert algo and offenders(algo, r'#include\s*[<"](torch|ATen|c10|cuda)') == []


def test_only_stable_torch_headers():
    assert offenders(native(), r'#include\s*[<"](ATen|c10|torch/(?!csrc/stable/|headeronly/|csrc/inductor/aoti_torch/c/))') == []


def test_no_macro_but_the_known_ones():
    names = {re.match(r"\s*#\s*define\s+(\w+)", line).group(1)
             for p in native() for line in p.read_text().splitlines() if re.match(r"\s*#\s*define\b", line)}
    assert names == {"FV_CHECK", "FV_CUDA_CHECK", "FV_HD", "FV_CLONES"}


def test_native_files_carry_the_licence():
    assert [p.name for p in native() if not p.read_text().startswith("// SPDX-License-Identifier: Apache-2.0\n")] == []


def test_nothing_is_left_open():
    words = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "raise NotImplemented" + "Error"))
    assert offenders(sources(".py", ".cpp", ".h", ".cu", ".cuh"), rf"\b({words})\b") == []


def test_environment_table_is_complete():
    """Every variable that the code reads is documented, and no other."""
    read = set()
    for p in sources(".py", roots=(PACKAGE, ROOT / "benchmarks")) + [ROOT / "setup.py", ROOT / "tests/conftest.py"]:
        read |= set(re.findall(r"""["'](FASTVERIFY_\w+)["']""", p.read_text()))
    for p in native():
        read |= set(re.findall(r'getenv\("(FASTVERIFY_\w+)"\)', p.read_text()))
    documents = [p for p in (ROOT / "README.md", ROOT / "docs/environment.md") if p.exists()]
    documented = [v for p in documents for v in ENV_TABLE.findall(p.read_text())]
    assert read and sorted(documented) == sorted(read)


def test_documentation_links_resolve():
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
