"""How lm_head_verify_tree is cut into blocks, for every architecture, and the size of its workspace: no GPU needed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fastverify.accept.lm_head_verify_tree import lm_head_verify_tree_workspace_bytes

HERE = Path(__file__).parent
DEVICES = {"sm_80": (108, 163), "sm_89": (128, 99), "sm_90": (132, 227), "sm_100": (148, 227), "sm_120": (188, 99), "small": (20, 99)}
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 200, 1024, 4097)
HEADS = ((4096, 128256), (7168, 20480), (576, 49152), (8, 1), (24, 127), (2048, 151937), (16384, 1 << 20))

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> list:
    """[(arguments, plan)] over devices, rows, heads, with and without tensor cores."""
    program = tmp_path_factory.mktemp("plan") / "driver"
    subprocess.run(["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{HERE.parents[1] / 'csrc'}",
                    str(HERE / "head_plan_driver.cpp"), "-o", str(program)], check=True)
    asked = [(rows, v, h, cores, sms, kib * 1024) for sms, kib in DEVICES.values() for rows in ROWS for h, v in HEADS
             for cores in (1, 0)]
    lines = subprocess.run([str(program)], input="\n".join(" ".join(map(str, a)) for a in asked), check=True, capture_output=True,
                           text=True).stdout.splitlines()
    assert len(lines) == len(asked)
    return [(a, json.loads(line)) for a, line in zip(asked, lines)]


def test_every_step_belongs_to_one_block(plans):
    for asked, p in plans:
        assert p["wrong"] == 0, asked
        assert p["chunks"] * p["rows_tile"] >= asked[0] > (p["chunks"] - 1) * p["rows_tile"]
        assert p["blocks"] == p["chunks"] * p["slots"] >= 1
        if asked[3]:
            total = p["tiles"] * p["k_steps"]
            assert (p["slots"] - 1) * p["steps"] < total <= p["slots"] * p["steps"], asked


def test_blocks_fit_the_device(plans):
    for (_, _, _, cores, sms, max_smem), p in plans:
        assert p["smem"] + 128 <= max_smem
        if cores:
            assert p["blocks"] <= max(2 * sms, p["chunks"])  # all run at once, or one per chunk of node rows
            if p["blocks"] > sms and p["chunks"] <= sms:
                assert 2 * (p["smem"] + 1024 + 128) <= max_smem + 1024


def test_large_products_fill_the_device(plans):
    for (_, v, h, cores, sms, _), p in plans:
        if cores and v * h >= 7168 * 20480 and p["chunks"] == 1:
            assert p["blocks"] >= 0.95 * sms


def test_workspace_is_mirrored_in_python(plans):
    for (rows, v, _, cores, sms, _), p in plans:
        assert (p["bytes"], p["zeroed"], p["logits"]) == lm_head_verify_tree_workspace_bytes(rows, v, sms)
        assert p["logits"] + 4 * rows * v <= p["bytes"]
        if cores:
            assert p["partials"] + 2 * 4 * p["rows_tile"] * p["tile"] * p["blocks"] <= p["logits"]
