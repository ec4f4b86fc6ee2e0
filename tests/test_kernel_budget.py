"""Registers, local memory and architectures of every kernel in the built library, as ptxas left them."""

import os
import re
from pathlib import Path

import pytest

from test_packaging import INFO, _files, library, output, tool

# Pattern of the mangled name -> (most registers, most bytes of stack: spills and arrays with computed indices).
# The first that matches counts. Kernels bound by memory or arithmetic have no stack at all.
BUDGET = {
    r"(draft_topk|grow_tree|build_tree|prepare_tree)_kernel": (64, 0),  # 1024 threads
    r"skinny_kernelILi1ELi3E": (80, 0),  # three blocks of 256 threads per SM
    r"skinny_kernel": (128, 0),  # two blocks of 256 threads per SM
    r"tree_attention_block_kernelILi1E": (128, 8),  # 512 threads; two words from before the wait on sm_80
    r"tree_attention_block_kernel": (128, 0),
    r"tree_attention_short_kernel": (168, 0),  # three blocks of 128 threads per SM
    r"next_inputs_kernel": (64, 0),
    r"compact_kernel": (64, 0),  # four blocks of 256 threads per SM
    r"head_mma_kernel": (255, 0),
    r"head_simt_kernel": (168, 0),
    r"head_walk_kernel": (128, 320),  # calls that are not inlined keep a few words across them
    r"verify_tree_kernel": (128, 256),  # one block of 512 threads per SM; the same calls
    r"partials_kernel": (128, 128),
    r"all_reduce_rms_norm_row_kernelI\w*Li2E": (64, 0),  # 1024 threads
    r"all_reduce_rms_norm_row_kernel": (128, 0),  # 512 threads
    r"all_reduce_(rms_norm_|fp8_)kernel": (176, 16),  # 128 up to 4 ranks; on sm_120 the calls for unaligned ends keep a word
    r"all_reduce_columns_kernel": (128, 0),  # 512 threads
    r"all_reduce_kernel": (128, 0),  # 512 threads
    r"all_gather_small_kernel": (64, 32),  # the calls for unaligned ends keep a few words
    r"rope_append_teams_kernel": (64, 16),  # eight blocks of 128 threads per SM; a word or two spilled on sm_80
    r"rope_append_any_kernel": (64, 32),  # the calls of its divisions keep a few words
    r"probe_kernel": (32, 0),
    r"mla_tree_attention_sm90_kernel": (168, 0),  # one block of 384 threads per SM
    r"tree_attention_sm90_kernel": (224, 0),
    r"mla_tree_attention_kernelI\w*Lb1E": (255, 8),  # Q in registers: two words spilled on sm_90, which runs the one above
    r"mla_tree_attention_kernel": (255, 0),
    r"tree_attention_rows_kernel": (64, 32),
    r"AttentionTileILi128ELi128E": (255, 32),  # a few spills on sm_120
}
DEFAULT = (255, 512)


def of_wheels(name: str) -> str:
    return tool(name, *(Path(f.locate()) for p in (f"nvidia-cuda-{name}", "triton") for f in _files(p) if f.name == name))


def cuobjdump(*options: str, sass: bool = False) -> str:
    """Its output. sass: it calls nvdisasm, which is a wheel of its own."""
    path = [str(Path(of_wheels("nvdisasm")).parent)] if sass else []
    environment = dict(os.environ, PATH=os.pathsep.join([*path, os.environ.get("PATH", "")]))
    return output(of_wheels("cuobjdump"), *options, str(library("_C")), env=environment)


@pytest.fixture(scope="module")
def usage() -> dict:
    """{architecture: {kernel: {"REG": n, "STACK": n, "LOCAL": n, ...}}}."""
    if INFO["cuda"] is None:
        pytest.skip("this build has no CUDA kernels (no nvcc, or FASTVERIFY_NO_CUDA)")
    found, arch, kernel = {}, None, None
    for line in cuobjdump("--dump-resource-usage").splitlines():
        if re.match(r"\s*arch = sm_", line):
            arch = line.split("sm_")[1].strip().rstrip("a")  # kernels of sm_90a are there for sm_90
        elif m := re.match(r"\s*Function (\S+):", line):
            kernel = m.group(1)
        elif kernel and "REG:" in line:
            found.setdefault(arch, {})[kernel] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
            kernel = None
    return found


def budget(kernel: str) -> tuple:
    return next((limit for pattern, limit in BUDGET.items() if re.search(pattern, kernel)), DEFAULT)


def test_every_architecture_has_every_kernel(usage):
    assert set(usage) == set(INFO["cuda_archs"])
    kernels = {arch: set(of) for arch, of in usage.items()}
    everywhere = {k for of in kernels.values() for k in of if "sm90_kernel" not in k}
    assert everywhere
    assert {arch: sorted(everywhere - k) for arch, k in kernels.items() if everywhere - k} == {}


def test_kernels_stay_within_their_budget(usage):
    over = [f"sm_{arch} {kernel}: {used['REG']} registers, {used['STACK']} + {used['LOCAL']} bytes of stack and local memory; "
            f"allowed {budget(kernel)}"
            for arch, of in usage.items() for kernel, used in of.items()
            if used["REG"] > budget(kernel)[0] or used["STACK"] + used["LOCAL"] > budget(kernel)[1]]
    assert over == []


def test_kernels_without_a_stack_do_not_touch_local_memory(usage):
    """nvcc 13.0 has taken a load of global memory for one of local memory, in a kernel that has none (csrc/comm/wire.cuh)."""
    arch = min(usage, key=int)
    kernel, wrong, seen = "", [], 0
    for line in cuobjdump("--dump-sass", "--gpu-architecture", f"sm_{arch}", sass=True).splitlines():
        if "Function :" in line:
            kernel, seen = line.split()[-1], seen + 1
        elif re.search(r"\s(LDL|STL)\b", line) and usage[arch].get(kernel, {}).get("STACK", 1) == 0:
            wrong.append(kernel)
    assert seen >= len(usage[arch]) and sorted(set(wrong)) == []


def test_every_line_of_the_table_is_about_a_kernel(usage):
    kernels = set().union(*usage.values())
    assert [p for p in BUDGET if not any(re.search(p, k) for k in kernels)] == []
